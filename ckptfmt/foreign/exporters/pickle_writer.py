"""Pickles of plain data and of calls by name: protocol 2, the opcodes that torch's own files have.

Names are written, never looked up: nothing is imported. What has no opcode here is refused.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

from ckptfmt.errors import UnsupportedError

_BATCH = 1000
_NAME = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*\.)+[A-Za-z_][A-Za-z0-9_]*")
_LONG_NBYTES_MAX = 255


@dataclass(frozen=True, slots=True)
class Named:
    """A global: `torch.float32`."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a call to a global gives. The same `Call` twice is one object for the reader."""

    function: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class, made without its constructor, and given its state."""

    name: str
    state: Any


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """An object that stands outside of the pickle."""

    key: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class WithState:
    """An OrderedDict with attributes of its own."""

    items: dict[Any, Any]
    state: dict[str, Any]


def pack_pickle(obj: Any) -> bytes:
    """The pickle of an object.

    Raises:
        UnsupportedError: A value in it is of another type than plain data.
    """
    writer = _Writer()
    writer.out += b"\x80\x02"
    writer.save(obj)
    writer.out += b"."
    return bytes(writer.out)


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray()
        self._memo: dict[object, int] = {}

    def save(self, obj: Any) -> None:
        kind = type(obj)
        if obj is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"\x88" if obj else b"\x89"
        elif kind is int:
            self._int(obj)
        elif kind is float:
            self.out += b"G" + struct.pack(">d", obj)
        elif kind is str:
            self._text(obj)
        elif kind is bytes:
            self._call("_codecs.encode", (obj.decode("latin-1"), "latin1"))
        elif kind is complex:
            self._call("__builtin__.complex", (obj.real, obj.imag))
        elif kind is set:
            self._call("__builtin__.set", (sorted(obj, key=repr),))
        elif kind is tuple:
            self._tuple(obj)
        elif kind is list:
            self.out += b"]"
            self._batches([(item,) for item in obj], b"a", b"e")
        elif kind is dict:
            self.out += b"}"
            self._batches(list(obj.items()), b"s", b"u")
        else:
            self._other(obj)

    def _other(self, obj: Any) -> None:
        if isinstance(obj, OrderedDict):
            self._call("collections.OrderedDict", ())
            self._batches(list(obj.items()), b"s", b"u")
        elif isinstance(obj, defaultdict):
            self.save(dict(obj))
        elif isinstance(obj, tuple):  # a namedtuple
            self._tuple(tuple(obj))
        elif isinstance(obj, Instance):
            self._global(obj.name)
            self.out += b")\x81"
            self.save(obj.state)
            self.out += b"b"
        elif isinstance(obj, WithState):
            self.save(OrderedDict(obj.items))
            self.save(obj.state)
            self.out += b"b"
        elif isinstance(obj, Named):
            self._global(obj.name)
        elif isinstance(obj, Persistent):
            self._tuple(obj.key)
            self.out += b"Q"
        elif isinstance(obj, Call):
            key = ("call", id(obj))
            if not self._known(key):
                self._call(obj.function, obj.args)
                self._put(key)
        else:
            raise UnsupportedError(
                "no plain data",
                reason="export-value",
                found=f"{type(obj).__module__}.{type(obj).__qualname__}",
            )

    def _known(self, key: object) -> bool:
        """Whether it was written before; a reference is, then."""
        at = self._memo.get(key)
        if at is None:
            return False
        self.out += b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<I", at)
        return True

    def _put(self, key: object) -> None:
        at = self._memo[key] = len(self._memo)
        self.out += b"q" + bytes([at]) if at < 256 else b"r" + struct.pack("<I", at)

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 1 << 16:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > _LONG_NBYTES_MAX:
                raise UnsupportedError(
                    "an int of over 2,000 bits", reason="export-value", found=len(data)
                )
            self.out += b"\x8a" + bytes([len(data)]) + data

    def _text(self, text: str) -> None:
        key = ("text", text)
        if not self._known(key):
            data = text.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(data)) + data
            self._put(key)

    def _tuple(self, items: tuple[Any, ...]) -> None:
        if not items:
            self.out += b")"
            return
        if len(items) > 3:
            self.out += b"("
        for item in items:
            self.save(item)
        self.out += (b"\x85", b"\x86", b"\x87")[len(items) - 1] if len(items) <= 3 else b"t"

    def _global(self, name: str) -> None:
        if _NAME.fullmatch(name) is None:  # a line break would end the name and begin an opcode
            raise UnsupportedError("not a name", reason="export-value", found=ascii(name)[:80])
        key = ("global", name)
        if not self._known(key):
            module, _, last = name.rpartition(".")
            self.out += f"c{module}\n{last}\n".encode()
            self._put(key)

    def _call(self, function: str, args: tuple[Any, ...]) -> None:
        self._global(function)
        self._tuple(args)
        self.out += b"R"

    def _batches(self, rows: list[tuple[Any, ...]], one: bytes, many: bytes) -> None:
        for begin in range(0, len(rows), _BATCH):
            batch = rows[begin : begin + _BATCH]
            if len(batch) > 1:
                self.out += b"("
            for row in batch:
                for item in row:
                    self.save(item)
            self.out += many if len(batch) > 1 else one
