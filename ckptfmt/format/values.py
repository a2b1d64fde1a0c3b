"""Plain values as tagged msgpack: what comes back has exactly the type that went in.

nil, bool, int64 and uint64, float64, str, bin, array (list) and map with str keys (dict) are
themselves; everything else is ext 1, whose data is the packed array [tag, payload]. Spec: 03-names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol

import msgpack

from ckptfmt.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    UnsupportedError,
    UsageError,
    warn,
)
from ckptfmt.format.limits import VALUE_DEPTH_MAX
from ckptfmt.format.names import escape_key, join_name
from ckptfmt.format.value_kinds import KINDS_BY_TAG, Kind, explain, find_kind

EXT_CODE = 1
TYPE_TAG = "type"
"""[registered name, plain data] of a type that `register_type` added."""
_SCALARS = frozenset([type(None), bool, int, float, str, bytes])
_NO_CHECK = frozenset([type(None), bool, float, bytes])
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_SCAN_NBYTES = 4096
_CURE = 'restore another step or run "ckptfmt verify"'


class Extend(Protocol):
    """Packs and parses kinds of values that this module does not know."""

    def pack(self, obj: object) -> tuple[str, object] | None:
        """(tag, plain payload), or None if the object is not one of these kinds."""

    def unpack(self, tag: str, payload: object) -> object:
        """The reverse; NotImplemented for a tag that nothing here has."""


def pack_value(obj: object, extend: Extend | None = None) -> bytes:
    """The bytes of a plain value.

    Raises:
        UsageError: It would not come back as it is. `where` is the path within the value.
    Spec: 03-names §3.5.
    """
    if type(obj) is float or obj is None or obj is True or obj is False:
        return _packb(obj)
    return _packb(_Packer(extend).encode(obj, 1))


def _packb(obj: object) -> bytes:
    try:
        made: bytes = msgpack.packb(obj, use_bin_type=True)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            "a value is too large", reason="value", found=str(error), do="save it as an array"
        ) from None
    return made


def _ext(tag: str, payload: object) -> msgpack.ExtType:
    return msgpack.ExtType(EXT_CODE, _packb([tag, payload]))


class _Packer:
    """Turns a value into what msgpack packs. A value's level is 1 more than its container's."""

    __slots__ = ("_extend",)

    def __init__(self, extend: Extend | None) -> None:
        self._extend = extend

    def encode(self, obj: object, level: int) -> object:
        kind = type(obj)
        if level > VALUE_DEPTH_MAX:
            raise UsageError(
                f"a value is nested deeper than {VALUE_DEPTH_MAX}, or contains itself",
                reason="value-depth",
                do="flatten it",
            )
        if kind in _NO_CHECK:
            return obj
        if isinstance(obj, int) and kind is int:
            if _INT_MIN <= obj <= _INT_MAX:
                return obj
            nbytes = obj.bit_length() // 8 + 1
            return _ext("int", obj.to_bytes(nbytes, "little", signed=True))
        if isinstance(obj, str) and kind is str:
            return self.text(obj)
        if isinstance(obj, list) and kind is list:
            return self.items(obj, level + 1)
        if isinstance(obj, dict) and kind is dict:
            if all(type(key) is str for key in obj):
                return self.fields(obj, level + 1)
            return _ext("dict", self.pairs(obj, level + 1))
        return self._encode_kind(obj, level)

    def _encode_kind(self, obj: object, level: int) -> object:
        known = find_kind(obj, registered=False)
        if known is not None:
            return _ext(known.tag, known.encode(obj, self, level + 1))
        extra = self._extend.pack(obj) if self._extend is not None else None
        if extra is not None:
            tag, payload = extra
            if tag == TYPE_TAG and isinstance(payload, list):
                # The name is part of the frame, the data a value below this one.
                return _ext(tag, [payload[0], self.encode(payload[1], level + 1)])
            return _ext(tag, self.encode(payload, level + 1))
        known = find_kind(obj, registered=True)
        if known is not None:
            return _ext(known.tag, known.encode(obj, self, level + 1))
        what, cure = explain(obj)
        raise UsageError(what, reason="value", found=type(obj).__name__, do=cure)

    def text(self, text: str) -> str:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UsageError(
                    "a string is not valid Unicode (lone surrogate)",
                    reason="value",
                    found=ascii(text)[:80],
                    do="encode it to bytes",
                ) from None
        return text

    def items(self, items: Iterable[object], level: int) -> list[object]:
        made: list[object] = []
        try:
            for item in items:
                made.append(self.encode(item, level))
        except UsageError as error:
            raise below(error, str(len(made))) from None
        return made

    def fields(self, items: Mapping[str, object], level: int) -> dict[str, object]:
        made: dict[str, object] = {}
        for key, item in items.items():
            try:
                made[self.text(key)] = self.encode(item, level)
            except UsageError as error:
                raise below(error, ascii(key) if not key.isascii() else key) from None
        return made

    def pairs(self, items: Mapping[Any, object], level: int) -> list[list[object]]:
        made = []
        for key, item in items.items():
            try:
                made.append([self.encode(key, level), self.encode(item, level)])
            except UsageError as error:
                try:
                    part = escape_key(key)
                except UsageError:
                    part = ascii(key)[:40]
                raise below(error, part) from None
        return made

    def sorted_items(self, items: Iterable[object], level: int) -> list[object]:
        return sorted(self.items(items, level), key=_packb)


def below(error: UsageError, part: str) -> UsageError:
    """The same error, raised for what is one level further down."""
    where = join_name(part, error.where) if error.where else part
    return UsageError(
        error.what,
        reason=error.reason,
        where=where,
        expected=error.expected,
        found=error.found,
        do=error.do,
    )


def parse_value(data: bytes | memoryview, extend: Extend | None = None, *, where: str = "") -> Any:
    """The value that `pack_value` packed.

    Args:
        data: Exactly one packed value.
        extend: Makes the kinds of frameworks and registered types. Without it such a value is its
            plain payload, with a CkptWarning.
        where: Which value this is, for errors.
    Raises:
        CorruptError: These bytes are no value.
        UnsupportedError: A tag or dtype that this version does not know.
    Spec: 03-names §3.5.
    """
    return _Parser(extend, where).decode(_unpackb(data, where), 1)


def _unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    if not all(type(key) is str for key, _ in pairs):
        _corrupt("a key of a map is not a string", "value", "")
    made = dict(pairs)
    if len(made) != len(pairs):
        _corrupt("a key stands twice in a map", "msgpack", "")
    return made


def _unpackb(data: bytes | memoryview, where: str) -> Any:
    try:
        if len(data) > _SCAN_NBYTES:
            # A header may claim as many items as there are bytes left, at each of 1,024 levels,
            # and the list for them is allocated at once. Skipping counts without allocating.
            scan = msgpack.Unpacker(max_buffer_size=len(data))
            scan.feed(data)
            scan.skip()
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=False,
            object_pairs_hook=_unique,
            ext_hook=msgpack.ExtType,
        )
    except FormatError as error:
        _corrupt(error.what, error.reason, where)
    except msgpack.ExtraData:
        _corrupt("bytes after a value", "trailing-bytes", where)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        _corrupt("not a msgpack value", "msgpack", where, f"{type(error).__name__}: {error}"[:200])


def _corrupt(what: str, reason: str, where: str, found: object = None) -> NoReturn:
    raise CorruptError(what, reason=reason, where=where, found=found, do=_CURE)


class _Parser:
    """Turns what msgpack unpacked into values, from the root down, so that depth is bounded."""

    __slots__ = ("_extend", "_where")

    def __init__(self, extend: Extend | None, where: str) -> None:
        self._extend = extend
        self._where = where

    def decode(self, raw: Any, level: int) -> Any:
        if level > VALUE_DEPTH_MAX:
            _corrupt(f"a value is nested deeper than {VALUE_DEPTH_MAX}", "value-depth", self._where)
        kind = type(raw)
        if kind in _SCALARS:
            return raw
        if kind is list:
            return self.items(raw, level + 1)
        if kind is dict:
            return self.fields(raw, level + 1)
        if kind is not msgpack.ExtType or raw.code != EXT_CODE:
            _corrupt("an ext of another code than 1", "value", self._where)
        frame = _unpackb(raw.data, self._where)
        if type(frame) is not list or len(frame) != 2 or type(frame[0]) is not str:
            _corrupt("an ext is not [tag, payload]", "value", self._where)
        tag, payload = frame
        known = KINDS_BY_TAG.get(tag)
        if known is None:
            return self._decode_unknown(tag, payload, level + 1)
        return self._decode_known(known, payload, level + 1)

    def _decode_known(self, known: Kind, payload: Any, level: int) -> Any:
        try:
            return known.decode(payload, self, level)
        except CorruptError as error:
            if error.where or not self._where:
                raise
            _corrupt(error.what, error.reason, self._where, error.found)
        except FormatError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            text = f"{type(error).__name__}: {error}"[:200]
            _corrupt(f"the payload of a value {known.tag!r} is wrong", "value", self._where, text)

    def _decode_unknown(self, tag: str, payload: Any, level: int) -> Any:
        if tag == TYPE_TAG:
            if type(payload) is not list or len(payload) != 2 or type(payload[0]) is not str:
                _corrupt("a value 'type' is not [name, data]", "value", self._where)
            plain: Any = [payload[0], self.decode(payload[1], level)]
        elif "." in tag:
            plain = self.decode(payload, level)
        else:
            raise UnsupportedError(
                "a value's tag is unknown",
                reason="value-tag",
                where=self._where,
                found=ascii(tag)[:80],
                do="upgrade ckptfmt",
            )
        made = self._unpack(tag, plain)
        if made is not NotImplemented:
            return made
        name = f"the registered type {plain[0]!r}" if tag == TYPE_TAG else f"the kind {tag!r}"
        warn(
            f"{self._where or 'a value'} is of {name}, which this process does not know: "
            "you get its plain data; register or install what defines it",
        )
        return plain[1] if tag == TYPE_TAG else plain

    def _unpack(self, tag: str, plain: Any) -> object:
        if self._extend is None:
            return NotImplemented
        try:
            return self._extend.unpack(tag, plain)
        except CheckpointError:
            raise
        except Exception as error:
            raise CorruptError(
                f"{tag!r} cannot be made from its stored data",
                reason="value",
                where=self._where,
                found=f"{type(error).__name__}: {error}"[:200],
                do=_CURE,
            ) from error

    def items(self, raw: Any, level: int) -> list[Any]:
        if type(raw) is not list:
            _corrupt("a payload is not an array", "value", self._where, type(raw).__name__)
        if _SCALARS.issuperset(map(type, raw)) and level <= VALUE_DEPTH_MAX:
            return raw
        return [self.decode(item, level) for item in raw]

    def fields(self, raw: Any, level: int) -> dict[str, Any]:
        if type(raw) is not dict:
            _corrupt("a payload is not a map", "value", self._where, type(raw).__name__)
        if _SCALARS.issuperset(map(type, raw.values())) and level <= VALUE_DEPTH_MAX:
            return raw
        return {key: self.decode(item, level) for key, item in raw.items()}

    def pairs(self, raw: Any, level: int) -> list[tuple[Any, Any]]:
        if type(raw) is not list or not all(type(p) is list and len(p) == 2 for p in raw):
            _corrupt("a payload is not an array of pairs", "value", self._where)
        return [(self.decode(key, level), self.decode(item, level)) for key, item in raw]
