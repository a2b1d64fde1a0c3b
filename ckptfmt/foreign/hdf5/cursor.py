"""Numbers out of a part of a file; whatever leaves it is a typed error."""

from __future__ import annotations

import mmap
from functools import partial

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.mapping import corrupt as damage

REASON = "hdf5"
UNDEFINED = -1
_STRUCTURE_NBYTES_FREE, _STRUCTURE_FACTOR = 16 << 20, 8
corrupt = partial(damage, REASON)


def unsupported(what: str, where: str, found: object = None) -> UnsupportedError:
    return UnsupportedError(
        what,
        reason=f"{REASON}-feature",
        where=where,
        found=found,
        do="write it again with h5py (libver='earliest'), into one file",
    )


class File:
    """The bytes of one file, which lies in data[start:stop).

    Attributes:
        offset_nbytes, length_nbytes: Widths of addresses and of lengths, from the superblock.
        kept: The large chunk that was undone last: of which dataset, where, and its bytes.
    """

    def __init__(self, data: mmap.mmap | bytes, start: int, stop: int, where: str) -> None:
        self.data, self.start, self.nbytes, self.where = data, start, stop - start, where
        self.offset_nbytes = self.length_nbytes = 8
        self.kept: tuple[object, tuple[int, ...], bytes] | None = None
        self._room = _STRUCTURE_NBYTES_FREE + _STRUCTURE_FACTOR * self.nbytes

    def check(self, at: int, nbytes: int, what: str) -> None:
        """A range lies in the file."""
        if not 0 <= at <= at + nbytes <= self.nbytes:
            raise corrupt(
                f"{what} lies outside of the file (truncated?)",
                "truncated",
                f"{self.where}[{at}:{at + nbytes})",
                expected=f"at most {self.nbytes} bytes",
            )

    def bytes(self, at: int, nbytes: int, what: str) -> bytes:
        self.check(at, nbytes, what)
        return self.data[self.start + at : self.start + at + nbytes]

    def cursor(self, at: int, nbytes: int, what: str) -> Cursor:
        """A structure. All of them together may be read a few times over, not once for each object."""
        self._room -= nbytes
        if self._room < 0:
            raise corrupt("structures that are used over and over", "limit", self.where)
        return Cursor(self.bytes(at, nbytes, what), self, f"{self.where}, {what} at {at}")

    def fail(self, what: str, where: str, found: object = None) -> CorruptError:
        return corrupt(what, "structure", where, found)


class Cursor:
    """Reads little-endian numbers one after another."""

    def __init__(self, data: bytes, file: File, where: str) -> None:
        self.data, self.file, self.where, self.at = data, file, where, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.left:
            raise corrupt("a structure is cut off", "truncated", self.where)
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def address(self) -> int:
        """An address, or UNDEFINED."""
        width = self.file.offset_nbytes
        found = self.number(width)
        return UNDEFINED if found == (1 << 8 * width) - 1 else found

    def length(self) -> int:
        return self.number(self.file.length_nbytes)

    def text(self, padding: int) -> str:
        """A name that ends with a zero; the next starts at a multiple of `padding`."""
        end = self.data.find(b"\0", self.at)
        if end < 0:
            raise corrupt("a name without an end", "structure", self.where)
        raw = self.take(end - self.at)
        self.take(-(-(len(raw) + 1) // padding) * padding - len(raw))
        return raw.decode("utf-8", "replace")

    def expect(self, magic: bytes) -> None:
        found = self.take(len(magic))
        if found != magic:
            raise corrupt(
                "a signature differs", "structure", self.where, ascii(found), expected=ascii(magic)
            )
