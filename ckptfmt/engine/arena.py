"""Host memory that direct I/O and large copies like: page-aligned, in huge pages, reused.

First touch of small pages ran at a seventh of the speed of a warm buffer, so buffers of one size
are kept for the next save.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.adapter import Device
from ckptfmt.format import BLOCK_NBYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"

PIECE_NBYTES = 4 << 20
RING_PIECES = 12
"""Pieces of one save in flight: what is copied while others are on their way to the disk."""

_GROWTH_NBYTES = 16 << 20
_MAP_NBYTES_MIN = 1 << 20
_HUGE_NBYTES = 2 << 20

_kept: list[Bytes] = []
_lock = threading.RLock()  # a signal handler that saves may interrupt its holder


def _forget_in_child() -> None:
    """A thread that a forked process does not have may hold the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def aligned_buffer(nbytes: int) -> Bytes:
    """Bytes, not initialised, that begin on a page; from 2 MiB on in huge pages where offered."""
    if nbytes < _MAP_NBYTES_MIN:
        return _heap_buffer(nbytes)
    slack = _HUGE_NBYTES if nbytes >= _HUGE_NBYTES else 0
    try:
        memory = _map_anonymous(nbytes + slack)
    except OSError:  # no memory for a map: what NumPy says of it is a MemoryError
        return _heap_buffer(nbytes)
    advice: Any = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and slack:
        with suppress(OSError, ValueError):
            memory.madvise(advice)
    mapped: Bytes = np.frombuffer(memory, np.uint8)
    skip = -mapped.ctypes.data % _HUGE_NBYTES if slack else 0
    return mapped[skip : skip + nbytes]


@dataclass(frozen=True, slots=True)
class StagedMemory:
    """Memory that holds tensors as data files will: in their order, with the same padding, zeroed.

    Attributes:
        offsets: Tensor row -> where its bytes begin; -1 for one that has none.
    """

    memory: Bytes
    offsets: NDArray[np.int64]

    def position(self, data: bytes | bytearray | memoryview) -> int:
        """Where bytes begin in this memory; -1 if they lie elsewhere."""
        at = _address(np.frombuffer(data, np.uint8)) - _address(self.memory)
        return at if 0 <= at < len(self.memory) else -1


def _address(array: Bytes) -> int:
    made: int = array.__array_interface__["data"][0]
    return made


def touch(memory: memoryview) -> None:
    """Have the system give the pages of a buffer now, but for its first and last block, which a
    neighbour may be reading into already.

    Direct reads into pages that are not there yet ran at less than half the speed (1 GiB: 1.4 s
    against 0.2 s for this and 0.5 s for the read).
    """
    np.frombuffer(memory, np.uint8)[BLOCK_NBYTES:-BLOCK_NBYTES:BLOCK_NBYTES] = 0


def fault_in(memory: memoryview) -> None:
    """Have the system bring the pages of a map now. Of less than a page: by who reads it."""
    if memory.nbytes >= BLOCK_NBYTES:
        np.frombuffer(memory, np.uint8)[::BLOCK_NBYTES].max()


def _heap_buffer(nbytes: int) -> Bytes:
    whole = np.empty(nbytes + BLOCK_NBYTES, np.uint8)
    skip = -whole.ctypes.data % BLOCK_NBYTES
    return whole[skip : skip + nbytes]


def _map_anonymous(nbytes: int) -> mmap.mmap:
    """Private: Python's default is shared, with which a forked process writes into our buffers."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Arena:
    """Host memory for one staged save, kept and grown for the next; pre-faulted as it is filled.

    Whoever asks for it while he is staging himself (a signal handler that saves) gets other memory:
    he would wait for himself. Devices whose tensors come to it pin it, once for each allocation.
    """

    def __init__(self) -> None:
        self._memory: Bytes = np.zeros(0, np.uint8)
        self._lock = threading.Lock()
        self._stager: int | None = None
        self._pinned_by: list[Device] = []

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    def take(self, nbytes: int, devices: Iterable[Device] = ()) -> Bytes:
        """The first `nbytes` of it; the caller has it until he gives it `back`.

        Args:
            devices: Those that will copy into it.
        """
        me = threading.get_ident()
        if self._stager == me:
            return aligned_buffer(nbytes)
        self._lock.acquire()
        self._stager = me
        try:
            if len(self._memory) < nbytes:
                self._free()  # the old one goes before the new one comes
                self._memory = aligned_buffer(-(-nbytes // _GROWTH_NBYTES) * _GROWTH_NBYTES)
            for device in devices:
                if device not in self._pinned_by and nbytes:
                    device.register(self._memory.ctypes.data, len(self._memory))
                    self._pinned_by.append(device)
        except BaseException:
            self._stager = None
            self._lock.release()
            raise
        return self._memory[:nbytes]

    def staged(self, memory: Bytes) -> None:
        """The taker is done with filling it; another thread may give it back."""
        if self._is_own(memory):
            self._stager = None

    def back(self, memory: Bytes) -> None:
        if self._is_own(memory):
            self._stager = None
            self._lock.release()

    def _is_own(self, memory: Bytes) -> bool:
        return memory.ctypes.data == self._memory.ctypes.data

    def trim(self) -> None:
        """Give the memory back to the system, unless a save has it."""
        if self._lock.acquire(blocking=False):
            try:
                self._free()
            finally:
                self._lock.release()

    def _free(self) -> None:
        memory, self._memory = self._memory, np.zeros(0, np.uint8)
        pinned_by, self._pinned_by = self._pinned_by, []
        for device in pinned_by:
            device.unregister(memory.ctypes.data)


class Ring:
    """Pieces for one save: `take` one, fill it, hand it to a task that gives it `back`.

    A context manager: leaving it keeps the memory for the next save.
    """

    def __init__(self, pieces: int = RING_PIECES) -> None:
        self._left = pieces
        self._free: list[Bytes] = []
        self._changed = threading.Condition()

    def take(self) -> Bytes:
        """A piece of `PIECE_NBYTES`; waits until one comes back if all are out."""
        with self._changed:
            while not self._free and self._left == 0:
                self._changed.wait()
            if self._free:
                return self._free.pop()
            self._left -= 1
        with _lock:
            if _kept:
                return _kept.pop()
        return aligned_buffer(PIECE_NBYTES)

    def back(self, piece: Bytes) -> None:
        with self._changed:
            self._free.append(piece)
            self._changed.notify()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            free, self._free = self._free, []
        with _lock:
            _kept.extend(free[: RING_PIECES - len(_kept)])
