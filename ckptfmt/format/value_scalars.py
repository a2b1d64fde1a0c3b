"""Kinds of values that hold no other values: numbers, NumPy scalars, paths, times.

Each has a pair of functions for its payload; the rows are in `value_kinds`. Spec: 03-names.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from ckptfmt.errors import CorruptError, UnsupportedError, UsageError
from ckptfmt.format.dtypes import (
    Dtype,
    dtype_of,
    known_bits,
    numpy_dtype,
    pack_array,
    parse_array,
)

if TYPE_CHECKING:
    import pathlib


class Encoder(Protocol):
    """What a kind may ask of the packer. `level` is that of the items."""

    def encode(self, obj: object, level: int) -> object: ...
    def text(self, text: str) -> str: ...
    def items(self, items: Iterable[object], level: int) -> list[object]: ...
    def fields(self, items: Mapping[str, object], level: int) -> dict[str, object]: ...
    def pairs(self, items: Mapping[Any, object], level: int) -> list[list[object]]: ...
    def sorted_items(self, items: Iterable[object], level: int) -> list[object]: ...


class Decoder(Protocol):
    """What a kind may ask of the parser; each refuses a payload of another form."""

    def decode(self, raw: Any, level: int) -> Any: ...
    def items(self, raw: Any, level: int) -> list[Any]: ...
    def fields(self, raw: Any, level: int) -> dict[str, Any]: ...
    def pairs(self, raw: Any, level: int) -> list[tuple[Any, Any]]: ...


def require(condition: bool, what: str) -> None:
    """Refuse a payload. The parser adds which value it is."""
    if not condition:
        raise CorruptError(what, reason="value")


def typed(raw: Any, *kinds: type) -> Any:
    require(type(raw) in kinds, f"expected {kinds[0].__name__}, found {type(raw).__name__}")
    return raw


def array_of(raw: Any, count: int) -> list[Any]:
    require(type(raw) is list and len(raw) == count, f"expected an array of {count}")
    return cast("list[Any]", raw)


def decode_int(raw: Any, decoder: Decoder, level: int) -> int:
    made = int.from_bytes(typed(raw, bytes), "little", signed=True)
    require(not -(1 << 63) <= made < 1 << 64, "an int that msgpack has itself")
    require(len(raw) == made.bit_length() // 8 + 1, "an int with needless bytes")
    return made


def decode_complex(raw: Any, decoder: Decoder, level: int) -> complex:
    real, imag = array_of(raw, 2)
    return complex(typed(real, float), typed(imag, float))


def encode_np(obj: Any, encoder: Encoder, level: int) -> object:
    # NumPy strips trailing zeros when it takes a string out of an array, so these go past arrays.
    if type(obj) is np.str_:
        data = encoder.text(str(obj)).encode("utf-32-le")
        return [f"str{len(data) * 8}", data]
    if type(obj) is np.bytes_:
        return [f"bytes{len(obj) * 8}", bytes(obj)]
    if type(obj) is not obj.dtype.type:
        raise UsageError(
            "a subclass of a NumPy scalar cannot be saved",
            reason="value",
            found=type(obj).__qualname__,
            do=f"convert it to {obj.dtype.type.__name__}",
        )
    return [dtype_of(obj.dtype).name, bytes(pack_array(np.asarray(obj)))]


def _numpy_dtype(name: Any) -> tuple[Dtype, np.dtype[Any]]:
    """The dtype of a name that the format and the installed libraries know."""
    bits = known_bits(typed(name, str))
    if bits is not None:
        require(bits >= 0, "an illegal width of a dtype")
        dtype = Dtype(name, bits)
        into = numpy_dtype(dtype)
        if into.metadata is None:
            return dtype, into
    raise UnsupportedError(
        "a dtype is unknown",
        reason="value-dtype",
        found=ascii(name)[:80],
        do="upgrade ml_dtypes or ckptfmt",
    )


def decode_np(raw: Any, decoder: Decoder, level: int) -> Any:
    name, data = array_of(raw, 2)
    dtype, _ = _numpy_dtype(name)
    require(not dtype.is_variable, "a scalar of variable length")
    require(len(typed(data, bytes)) == dtype.itemsize, "another length than the dtype says")
    if name.startswith("str"):
        return np.str_(data.decode("utf-32-le"))
    if name.startswith("bytes"):
        return np.bytes_(data)
    try:
        return parse_array(data, dtype, ())[()]
    except CorruptError as error:
        require(False, error.what)


def encode_np_dtype(obj: Any, encoder: Encoder, level: int) -> object:
    known = dtype_of(obj)
    if numpy_dtype(known) != obj or obj.metadata is not None:
        raise UsageError(
            "this dtype would come back as another",
            reason="value",
            found=repr(obj),
            do='save its .str, or its .newbyteorder("<")',
        )
    return known.name


def decode_np_dtype(raw: Any, decoder: Decoder, level: int) -> np.dtype[Any]:
    return _numpy_dtype(raw)[1]


_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})


def is_path(kind: type) -> bool:
    """Whether this is one of the four classes of paths; who has none need not load them."""
    name, home = kind.__name__, sys.modules.get("pathlib")
    return name in _PATHS and getattr(home, name, None) is kind


def encode_path(obj: Any, encoder: Encoder, level: int) -> object:
    return [type(obj).__name__, encoder.text(str(obj))]


def decode_path(raw: Any, decoder: Decoder, level: int) -> pathlib.PurePath:
    import pathlib  # here: it brings a parser of URLs along, and few values are paths

    name, text = array_of(raw, 2)
    require(typed(name, str) in _PATHS, "no kind of path")
    kind: type[pathlib.PurePath] = getattr(pathlib, name)
    if issubclass(kind, pathlib.Path) and not isinstance(pathlib.Path(), kind):
        # The other system's paths exist here without a file system.
        kind = getattr(pathlib, f"Pure{name}")
    return kind(typed(text, str))


def encode_zone(zone: datetime.tzinfo | None, encoder: Encoder) -> object:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone:
        raise UsageError(
            "a time zone by rules cannot be saved",
            reason="value",
            found=type(zone).__qualname__,
            do="use .astimezone(datetime.timezone.utc)",
        )
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return [offset // datetime.timedelta(microseconds=1), encoder.text(name[0]) if name else None]


def _decode_zone(raw: Any) -> datetime.timezone | None:
    if raw is None:
        return None
    offset, name = array_of(raw, 2)
    delta = datetime.timedelta(microseconds=typed(offset, int))
    return datetime.timezone(delta) if name is None else datetime.timezone(delta, typed(name, str))


def encode_moment(obj: Any, encoder: Encoder, level: int) -> object:
    return [obj.replace(tzinfo=None).isoformat(), obj.fold, encode_zone(obj.tzinfo, encoder)]


def decode_moment(kind: Any) -> Callable[[Any, Decoder, int], Any]:
    def decode(raw: Any, decoder: Decoder, level: int) -> Any:
        text, fold, zone = array_of(raw, 3)
        made = kind.fromisoformat(typed(text, str))
        require(made.isoformat() == text and made.tzinfo is None, "not the usual ISO form")
        return made.replace(fold=typed(fold, int), tzinfo=_decode_zone(zone))

    return decode


def decode_date(raw: Any, decoder: Decoder, level: int) -> datetime.date:
    made = datetime.date.fromisoformat(typed(raw, str))
    require(made.isoformat() == raw, "not the usual ISO form")
    return made


def decode_timedelta(raw: Any, decoder: Decoder, level: int) -> datetime.timedelta:
    parts = [typed(part, int) for part in array_of(raw, 3)]
    made = datetime.timedelta(*parts)
    require([made.days, made.seconds, made.microseconds] == parts, "parts out of range")
    return made


def decode_timezone(raw: Any, decoder: Decoder, level: int) -> datetime.timezone:
    made = _decode_zone(raw)
    require(made is not None, "no offset")
    return cast("datetime.timezone", made)
