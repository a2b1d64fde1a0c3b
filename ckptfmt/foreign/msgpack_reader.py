"""msgpack from a mapped file, as data: long runs of bytes stay where they are.

The library would copy all of the file. Numbers of items and nesting are bounded; a map's keys are
text, bytes or numbers, each once.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptfmt.foreign.mapping import corrupt

DEPTH_MAX = 90
ITEMS_FREE, ITEM_NBYTES_MIN = 1 << 18, 8
"""So many items whatever the length; beyond, one for every so many bytes. A list of numbers of one
width is one item for every eight: it is taken at once."""
_CONTAINER_ITEMS, _EXTENSION_ITEMS = 3, 6
_NUMBERS_MIN = 16
_FIXED: dict[int, tuple[str, int]] = {
    0xCA: (">f", 4),
    0xCB: (">d", 8),
    0xCC: (">B", 1),
    0xCD: (">H", 2),
    0xCE: (">I", 4),
    0xCF: (">Q", 8),
    0xD0: (">b", 1),
    0xD1: (">h", 2),
    0xD2: (">i", 4),
    0xD3: (">q", 8),
}
_NIL, _FALSE, _TRUE = 0xC0, 0xC2, 0xC3
# First byte -> (what, bytes of the length that follows).
_SIZED = {
    **{0xC4 + n: ("bin", 1 << n) for n in range(3)},
    **{0xC7 + n: ("ext", 1 << n) for n in range(3)},
    **{0xD9 + n: ("str", 1 << n) for n in range(3)},
    **{0xDC + n: ("array", 2 << n) for n in range(2)},
    **{0xDE + n: ("map", 2 << n) for n in range(2)},
}


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of the file: those of a `bin`."""

    start: int
    stop: int


class MsgpackReader:
    """Reads values from `data[at:stop)`.

    Args:
        ext: (code, start, stop) -> what an extension stands for.
    """

    def __init__(
        self,
        data: mmap.mmap | bytes,
        at: int,
        stop: int,
        *,
        where: str,
        form: str,
        ext: Callable[[int, int, int], Any],
    ) -> None:
        self.data, self.at, self.stop = data, at, stop
        self.where, self.form, self._ext = where, form, ext
        self._room = ITEMS_FREE + (stop - at) // ITEM_NBYTES_MIN

    def fail(self, what: str, reason: str, found: object = None) -> Exception:
        return corrupt(self.form, what, reason, f"{self.where}, byte {self.at}", found)

    def take(self, nbytes: int) -> int:
        """Where the next bytes begin."""
        begin = self.at
        if nbytes > self.stop - begin:
            raise self.fail("a value ends behind the file (truncated?)", "truncated")
        self.at += nbytes
        return begin

    def value(self, depth: int = 0) -> Any:
        """The next value: plain, a list, a dict, a `Span`, or what `ext` made."""
        first = self.data[self.take(1)]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 256
        if first < 0x90:
            return self._map(first & 15, depth)
        if first < 0xA0:
            return self._list(first & 15, depth)
        if first < 0xC0:
            return self._text(first & 31)
        if first == _NIL:
            return None
        if first in (_FALSE, _TRUE):
            return first == _TRUE
        if first in _FIXED:
            code, width = _FIXED[first]
            return struct.unpack_from(code, self.data, self.take(width))[0]
        if 0xD4 <= first <= 0xD8:
            return self._extension(1 << (first - 0xD4))
        return self._sized(first, depth)

    def _sized(self, first: int, depth: int) -> Any:
        kind, width = _SIZED.get(first, ("", 0))
        if not kind:
            raise self.fail("a byte that begins no value", "byte", first)
        begin = self.take(width)
        length = int.from_bytes(self.data[begin : begin + width], "big")
        if kind == "str":
            return self._text(length)
        if kind == "bin":
            start = self.take(length)
            return Span(start, start + length)
        if kind == "ext":
            return self._extension(length)
        return self._list(length, depth) if kind == "array" else self._map(length, depth)

    def _text(self, length: int) -> str:
        begin = self.take(length)
        try:
            return self.data[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise self.fail("a text that is not UTF-8", "text") from None

    def _extension(self, length: int) -> Any:
        code = self.data[self.take(1)]
        start = self.take(length)
        self._spend(_EXTENSION_ITEMS)
        return self._ext(code - 256 if code > 127 else code, start, start + length)

    def _spend(self, items: int) -> None:
        self._room -= items
        if self._room < 0:
            raise self.fail("too many items for the bytes of the file", "limit", items)

    def _enter(self, count: int, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise self.fail(f"nested deeper than {DEPTH_MAX}", "depth")
        if count > self.stop - self.at:
            raise self.fail("too many items", "limit", count)
        self._spend(_CONTAINER_ITEMS + count)

    def _numbers(self, count: int) -> list[Any] | None:
        """A list of numbers that all have one width; None if it is another."""
        code = self.data[self.at] if self.at < self.stop else 0
        form, width = _FIXED.get(code, ("", 0))
        nbytes = count * (width + 1)
        if nbytes > self.stop - self.at:
            return None
        codes = self.data[self.at : self.at + nbytes : width + 1]
        if form and codes == bytes([code]) * count:
            numbers = np.dtype([("code", "u1"), ("number", np.dtype(form))])
            made: list[Any] = np.frombuffer(self.data, numbers, count, self.at)["number"].tolist()
        elif not form and max(codes) < 0x80:
            made = list(codes)
        else:
            return None
        self.at += nbytes
        self._spend(_CONTAINER_ITEMS + count // 8)
        return made

    def _list(self, count: int, depth: int) -> list[Any]:
        made = self._numbers(count) if count >= _NUMBERS_MIN else None
        if made is not None and depth <= DEPTH_MAX:
            return made
        self._enter(count, depth)
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[Any, Any]:
        self._enter(2 * count, depth)
        made: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if isinstance(key, Span):
                key = bytes(self.data[key.start : key.stop])
            if type(key) not in (str, int, bool, float, bytes, type(None)):
                raise self.fail("a key that is no text or number", "key", type(key).__name__)
            if key in made:
                raise self.fail("a key stands twice", "key", ascii(key)[:80])
            made[key] = self.value(depth + 1)
        return made
