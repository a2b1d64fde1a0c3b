"""What the machine allows: 4 MiB direct writes and reads from four threads, and a memcpy by two.

It names nothing, hashes nothing, and its memory is there before the clock runs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from peers.durable import sync_path

PACKAGE = "numpy"
FILE = "model.bin"
PIECE_NBYTES, THREADS, COPY_THREADS = 4 << 20, 4, 2
BLOCK_NBYTES = 4096

_memory: list[mmap.mmap] = []


def _pages(nbytes: int) -> mmap.mmap:
    """Memory that begins on a page and has all its pages; kept, so that it is warm the next time."""
    if not _memory or len(_memory[0]) < nbytes:
        _memory[:] = [mmap.mmap(-1, nbytes)]
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _memory[0].madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(_memory[0], np.uint8)[::BLOCK_NBYTES] = 1
    return _memory[0]


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The bytes of all arrays, one after another, in whole blocks."""
    nbytes = sum(array.nbytes for array in flat.values())
    pages = mmap.mmap(-1, -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES)
    whole, at = np.frombuffer(pages, np.uint8), 0
    for array in flat.values():
        whole[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += array.nbytes
    return {"all": pages}


def _each(function: Callable[[int], int], nbytes: int, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(function, range(0, nbytes, PIECE_NBYTES))) == nbytes


def _open(path: Path, flags: int) -> int:
    """With direct I/O where the file system has it."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError:
        return os.open(path, flags, 0o666)


def save(own: Mapping[str, mmap.mmap], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    view = memoryview(own["all"])
    descriptor = _open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, len(view))
        _each(
            lambda at: os.pwrite(descriptor, view[at : at + PIECE_NBYTES], at), len(view), THREADS
        )
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_path(folder)


def prepare_load(folder: Path) -> None:
    _pages((folder / FILE).stat().st_size)


def load(folder: Path) -> Mapping[str, Any]:
    nbytes = (folder / FILE).stat().st_size
    pages = _pages(nbytes)
    view = memoryview(pages)
    descriptor = _open(folder / FILE, os.O_RDONLY)
    try:
        _each(
            lambda at: os.preadv(descriptor, [view[at : min(at + PIECE_NBYTES, nbytes)]], at),
            nbytes,
            THREADS,
        )
    finally:
        os.close(descriptor)
    return {"all": np.frombuffer(pages, np.uint8)[:nbytes]}


def copy_file(source: Path, target: Path) -> None:
    """The bytes of a file into another, durably: each piece is read, then written."""
    nbytes = source.stat().st_size
    view = memoryview(_pages(THREADS * PIECE_NBYTES))
    reading, writing = _open(source, os.O_RDONLY), -1

    def copy(lane: int) -> int:
        piece, done = view[lane * PIECE_NBYTES : (lane + 1) * PIECE_NBYTES], 0
        for at in range(lane * PIECE_NBYTES, nbytes, THREADS * PIECE_NBYTES):
            found = os.preadv(reading, [piece], at)
            whole = -(-found // BLOCK_NBYTES) * BLOCK_NBYTES  # direct writes are of whole blocks
            os.pwrite(writing, piece[:whole], at)
            done += found
        return done

    try:
        writing = _open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with ThreadPoolExecutor(THREADS) as pool:
            assert sum(pool.map(copy, range(THREADS))) == nbytes
        os.ftruncate(writing, nbytes)
        os.fsync(writing)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    sync_path(target.parent)


def begin(own: Mapping[str, mmap.mmap], folder: Path) -> Callable[[], object]:
    """memcpy into memory that is warm from the second call on; nothing is written."""
    nbytes = len(own["all"])
    source = np.frombuffer(own["all"], np.uint8)
    target = np.frombuffer(_pages(nbytes), np.uint8)[:nbytes]

    def copy(at: int) -> int:
        piece = source[at : at + PIECE_NBYTES]
        np.copyto(target[at : at + PIECE_NBYTES], piece)
        return len(piece)

    _each(copy, nbytes, COPY_THREADS)
    return lambda: None
