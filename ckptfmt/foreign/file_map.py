"""A file mapped for reading, of which the system reads ahead what is used next.

A page of a map is read when it is touched, and who touches it waits, one page after another. With
what comes next asked for, a cold file is converted as fast as the disk reads and writes at once
(`benchmarks/bench_convert.py`, `cold copy`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.foreign.base import open_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

_AHEAD_NBYTES = 64 << 20
_STEP_NBYTES = 8 << 20
"""Less is not asked for, but of the file's end."""
_GAP_NBYTES = 1 << 20
"""What may lie between two ranges that follow one another: headers, padding."""
_WILLNEED: Any = getattr(mmap, "MADV_WILLNEED", None)


_locating: ContextVar[bool] = ContextVar("ckptfmt_locating", default=False)


@contextmanager
def locating() -> Iterator[None]:
    """Where the values are is asked for in files that are opened within this, but hardly one of them:
    they are not read ahead, and their checksums are not compared."""
    token = _locating.set(True)
    try:
        yield
    finally:
        _locating.reset(token)


def is_locating() -> bool:
    return _locating.get()


class FileMap(mmap.mmap):
    """A mapped file. Ranges that are announced in order are read ahead."""

    path = ""
    is_read_ahead = True

    _start = -1
    _end = 0
    """Of the range that was announced last."""
    _asked = 0
    """Up to here the system was asked to read."""

    def announce(self, start: int, stop: int) -> None:
        """The bytes [start, stop) are about to be read."""
        # A storage, of which boxes are read one after another, begins where it did.
        if start == self._start or not self.is_read_ahead:
            return
        self._start = start
        follows = 0 <= start - self._end <= _GAP_NBYTES
        wanted = start + _AHEAD_NBYTES if follows else min(stop, start + _AHEAD_NBYTES)
        wanted = min(wanted, len(self))
        begin = max(start, self._asked) if follows else start
        self._end = stop
        if wanted - begin < _STEP_NBYTES and (wanted <= begin or wanted < len(self)):
            return
        self._asked = wanted
        begin -= begin % mmap.PAGESIZE
        if _WILLNEED is not None:
            with suppress(OSError):  # a file system that does not
                self.madvise(_WILLNEED, begin, wanted - begin)


def open_map(path: str, where: str) -> tuple[FileMap | None, int]:
    """A regular file without links at its last step, and its bytes; None where it has none."""
    descriptor, nbytes = open_regular(path, where)
    try:
        made = FileMap(descriptor, nbytes, access=mmap.ACCESS_READ) if nbytes else None
    finally:
        os.close(descriptor)
    if made is not None:
        made.path, made.is_read_ahead = path, not is_locating()
    return made, nbytes


def place_of(array: NDArray[Any]) -> tuple[str, int] | None:
    """(path, offset) of values that lie in a mapped file as they lie in memory; None for others."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, FileMap) or not array.flags.c_contiguous:
        return None
    begin = np.frombuffer(owner, np.uint8).__array_interface__["data"][0]
    return owner.path, array.__array_interface__["data"][0] - begin


def view(data: bytes | mmap.mmap, start: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes of a file, without a copy; of a mapped one those that follow are read ahead."""
    if isinstance(data, FileMap):
        data.announce(start, start + nbytes)
    return np.frombuffer(data, np.uint8, nbytes, start)
