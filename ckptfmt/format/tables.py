"""Sections of large tables: columns are views of the section, long arrays of names stay packed.

msgpack would copy each column and make an object of each name. `parse_tables` steps over entries by
their headers instead, and `PackedNames` are unpacked and checked when the first is asked for. Nothing
is handed out unchecked. Spec: 07-index.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NoReturn

import msgpack

from ckptfmt.errors import CorruptError
from ckptfmt.format.columns import (
    NOT_MSGPACK,
    check_map,
    check_unique,
    corrupt,
    get_list,
    unpack,
)
from ckptfmt.format.limits import NAME_NBYTES_MAX

_BIN_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_ARRAY_WIDTHS = {0xDC: 2, 0xDD: 4}
_MAP_WIDTHS = {0xDE: 2, 0xDF: 4}
_ENTRIES_MAX = 64
"""A map of more entries than any of ours has is left to msgpack: stepping costs a microsecond each."""
_DEPTH = 2
"""Tables lie in the section's map; what lies deeper is small."""
_FEED_NBYTES = 256 << 10


class PackedNames:
    """An array of distinct strings, of which so far only the number is known.

    `names()` unpacks and checks it: strings only, of at most `NAME_NBYTES_MAX` characters, none
    twice.
    """

    __slots__ = ("_count", "_data", "_made", "_where", "document")

    def __init__(self, data: memoryview, count: int, where: str) -> None:
        self._data, self._count, self._where = data, count, where
        self._made: list[str] | None = None
        self.document = ""
        """Where they come from, for errors."""

    @classmethod
    def of(cls, names: list[str]) -> PackedNames:
        """Names that are known to be good."""
        packed: bytes = msgpack.packb(names, use_bin_type=True)
        made = cls(memoryview(packed), len(names), "")
        made._made = names
        return made

    def __len__(self) -> int:
        return self._count

    @property
    def packed(self) -> memoryview:
        """The msgpack array, header included: equal bytes are equal names."""
        return self._data

    def names(self) -> list[str]:
        """CorruptError if they are none; the kinds are those of an index that is read whole."""
        if self._made is None:
            try:
                self._made = checked_names(unpack(self._data, self._where), self._where)
            except CorruptError as error:
                error.add_note(f"in {self.document}")
                raise
        return self._made


def checked_names(value: object, where: str) -> list[str]:
    """Names of leaves or containers: strings, none twice, none too long."""
    table, _, key = where.rpartition(".")
    names: list[str] = get_list({key: value}, key, str, table)
    check_unique(names, where)
    if names and max(map(len, names)) > NAME_NBYTES_MAX:
        corrupt("name is too long", "name", where, f"at most {NAME_NBYTES_MAX}")
    return names


def parse_tables(
    data: bytes | memoryview, where: str, packed: Container[str] = ()
) -> dict[str, Any]:
    """A section as `parse_map` gives it, but for what costs memory.

    Args:
        packed: Paths of arrays that become `PackedNames`: `$.tree.leaves.name`.
    Returns:
        `bin` entries of the map and of its tables are memoryviews of `data`; the rest is as
        msgpack has it.
    Raises:
        CorruptError: kind `corrupt-msgpack`, as from `parse_map`.
    """
    walk = _Walk(memoryview(data).toreadonly(), packed)
    try:
        made = walk.value(where, _DEPTH)
    except IndexError:
        _cut_off(where)
    if walk.at != len(data):
        corrupt("bytes after a msgpack map", "msgpack", where, walk.at, len(data))
    return check_map(made, where)


def _cut_off(where: str) -> NoReturn:
    corrupt("not a msgpack map", "msgpack", where, found="cut off")


class _Walk:
    """Steps over one msgpack object; `at` is where the next byte is."""

    __slots__ = ("_packed", "_view", "at")

    def __init__(self, view: memoryview, packed: Container[str]) -> None:
        self._view, self._packed, self.at = view, packed, 0

    def value(self, where: str, depth: int) -> Any:
        first = self._view[self.at]
        if first in _BIN_WIDTHS:
            return self._bytes(self._number(_BIN_WIDTHS[first]), where)
        if depth and (0x80 <= first <= 0x8F or first in _MAP_WIDTHS):
            begin = self.at
            count = first & 15 if first <= 0x8F else self._number(_MAP_WIDTHS[first])
            if count <= _ENTRIES_MAX:
                self.at += first <= 0x8F
                return self._map(count, where, depth)
            self.at = begin
        return self._other(where)

    def _number(self, width: int) -> int:
        """A header of one byte and a big-endian number; steps over it."""
        begin, self.at = self.at + 1, self.at + 1 + width
        if self.at > len(self._view):
            _cut_off("")
        return int.from_bytes(self._view[begin : self.at], "big")

    def _bytes(self, nbytes: int, where: str) -> memoryview:
        begin, self.at = self.at, self.at + nbytes
        if self.at > len(self._view):
            _cut_off(where)
        return self._view[begin : self.at]

    def _map(self, count: int, where: str, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for _ in range(count):
            key = self._other(where)
            if type(key) is not str:
                corrupt("not a msgpack map", "msgpack", where, "str keys", type(key).__name__)
            if key in made:
                corrupt("duplicate key in a map", "msgpack", where, found=ascii(key)[:80])
            made[key] = self.value(f"{where}.{key}", depth - 1)
        return made

    def _other(self, where: str) -> Any:
        """Any object: counted first, which allocates nothing, then unpacked."""
        first, begin = self._view[self.at], self.at
        self.at += _nbytes_of_object(self._view[begin:], where)
        span = self._view[begin : self.at]
        if where in self._packed and (0x90 <= first <= 0x9F or first in _ARRAY_WIDTHS):
            count = first & 15
            if first > 0x9F:
                count = int.from_bytes(span[1 : 1 + _ARRAY_WIDTHS[first]], "big")
            return PackedNames(span, count, where)
        return unpack(span, where)


def _nbytes_of_object(view: memoryview, where: str) -> int:
    """Length of the first msgpack object. It is fed in pieces: the rest is not copied."""
    if view[0] < 0x80 or view[0] >= 0xE0:
        return 1
    if 0xA0 <= view[0] <= 0xBF and len(view) > view[0] & 31:  # a short string: nearly all keys
        return 1 + (view[0] & 31)
    size = min(_FEED_NBYTES, len(view))
    scan = msgpack.Unpacker(_Feed(view), read_size=size, max_buffer_size=len(view))
    try:
        scan.skip()
    except NOT_MSGPACK as error:
        corrupt("not a msgpack map", "msgpack", where, found=f"{type(error).__name__}: {error}")
    made: int = scan.tell()
    return made


class _Feed:
    """A buffer as the file that `msgpack.Unpacker` reads."""

    __slots__ = ("_at", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def read(self, nbytes: int) -> bytes:
        begin, self._at = self._at, self._at + nbytes
        return bytes(self._view[begin : self._at])
