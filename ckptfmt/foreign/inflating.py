"""A deflated ZIP entry read as a stream: any range, cheap as long as ranges ascend.

Its length and its CRC-32 are compared when its end is reached.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from ckptfmt.foreign.zip_archive import ZipArchive, ZipEntry

_INPUT_NBYTES = 1 << 20
_OUTPUT_NBYTES = 4 << 20


class Inflater:
    """The inflated bytes of one entry."""

    def __init__(self, archive: ZipArchive, entry: ZipEntry) -> None:
        self._zip, self._entry = archive, entry
        self._start = archive.start_of(entry)
        self._rewind()

    def _rewind(self) -> None:
        self._stream = zlib.decompressobj(-15)
        self._taken = self._given = self._crc = 0
        self._held = b""

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes [start, start + nbytes), which lie in the entry.

        Raises:
            CorruptError: The stream is damaged, ends early, or is not what its header says.
        """
        if start < self._given - len(self._held):
            self._rewind()
        made = np.empty(nbytes, np.uint8)
        stop = start + nbytes
        while True:
            begin = self._given - len(self._held)
            low, high = max(start, begin), min(stop, self._given)
            if low < high:
                part = self._held[low - begin : high - begin]
                made[low - start : high - start] = np.frombuffer(part, np.uint8)
            if self._given >= stop:
                if stop == self._entry.nbytes:
                    self._check_end()
                    self._rewind()  # and hold nothing
                return made
            self._held = self._next()
            self._given += len(self._held)

    def _check_end(self) -> None:
        """Nothing follows, and the checksum is the entry's: the last bytes may come before the end."""
        while not self._stream.eof:
            made, is_fed = self._piece(1)
            if made:
                raise self._damaged("is longer than its header says")
            if not is_fed and not self._stream.eof:
                raise self._damaged("is cut off")
        if self._crc != self._entry.crc:
            raise self._damaged("is not what its header says")

    def _next(self) -> bytes:
        """The next inflated bytes, never none."""
        entry = self._entry
        while True:
            made, is_fed = self._piece(_OUTPUT_NBYTES)
            if self._stream.eof:
                is_whole = self._given + len(made) == entry.nbytes and self._crc == entry.crc
                if not is_whole or not made:
                    raise self._damaged("is not what its header says")
                return made
            if self._given + len(made) > entry.nbytes:
                raise self._damaged("is longer than its header says")
            if made:
                return made
            if not is_fed:
                raise self._damaged("is cut off")

    def _piece(self, nbytes_max: int) -> tuple[bytes, bool]:
        """(inflated bytes, perhaps none; whether anything was left to inflate)."""
        data = self._stream.unconsumed_tail
        if not data:
            at = self._start + self._taken
            data = self._zip.data[at : at + min(_INPUT_NBYTES, self._entry.stored - self._taken)]
            self._taken += len(data)
        try:
            made = self._stream.decompress(data, nbytes_max)
        except zlib.error as error:
            raise self._damaged("is damaged", str(error)) from error
        self._crc = zlib.crc32(made, self._crc)
        return made, bool(data)

    def _damaged(self, what: str, found: str | None = None) -> Exception:
        return self._zip.corrupt(f"a deflated entry {what}", "zip-deflate", self._entry.name, found)
