"""Data that a peer has stored for later rounds, and proof that all of it came back."""

from __future__ import annotations

import functools
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import models
import numpy as np
import peers
from numpy.typing import NDArray

PAGE_NBYTES = 4096
READ_NBYTES = 16 << 20
HUGE_NBYTES = 2 << 20


def warm_up(peer: ModuleType) -> None:
    """What is imported and set up at the first call is not what is asked about."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "x"
        own = peer.convert({"a": np.ones((8, 8), np.float32)})
        peer.save(own, place)
        for name in ("load", "map", "count"):
            if hasattr(peer, name):
                getattr(peer, name)(place)
        if hasattr(peer, "restore"):
            peer.restore(own, place)


def factories(make: Callable[..., Any], names: Sequence[str]) -> dict[str, Any]:
    """Peer name -> what makes its trial from options."""
    return {name: functools.partial(make, name) for name in names}


def kept(folder: Path) -> Path:
    """Beside the folder of a round: what stays from round to round."""
    return folder.parent / "kept"


def save_once(peer: ModuleType, folder: Path, nbytes: int) -> None:
    """Store a transformer of that size, unless an earlier round has."""
    if folder.exists():
        return
    tree = models.transformer(nbytes)
    total = checksum(tree)
    peer.save(peer.convert(tree), folder)
    sums(folder).write_text(json.dumps(total))


def sums(folder: Path) -> Path:
    return folder.with_name("checksum.json")


def expected(folder: Path) -> int:
    total: int = json.loads(sums(folder).read_text())
    return total


def words(array: NDArray[Any]) -> NDArray[Any]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.view(np.uint64) if flat.nbytes % 8 == 0 else flat


def checksum(arrays: Mapping[str, Any]) -> int:
    """Touches every byte: the sum of all words."""
    return sum(int(words(a).sum(dtype=np.uint64)) for a in arrays.values()) % 2**64


def touch_pages(arrays: Mapping[str, Any]) -> int:
    """Touches every page: what is mapped has come from the disk then."""
    flats = (np.asarray(a).reshape(-1).view(np.uint8) for a in arrays.values())
    return sum(int(flat[::PAGE_NBYTES].sum()) for flat in flats)


def read_all(folder: Path) -> None:
    """Bring a folder's files into the page cache."""
    buffer = memoryview(bytearray(READ_NBYTES))
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def ready_pages(nbytes: int) -> None:
    """Have that much free memory in this machine, in huge pages, just before something that needs it
    is timed.

    A virtual machine may give free memory back to its host (free page reporting), two seconds after
    it became free. The host then took 1 to 2.4 s to back 600 MB again at the first touch, which is
    nobody's work here, and hits whoever comes first.
    """
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    with mmap.mmap(-1, nbytes + HUGE_NBYTES, **private) as pages:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(pages, np.uint8)
        whole[::PAGE_NBYTES] = 1
        del whole


def nbytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def disk_nbytes() -> int:
    """Bytes that this process has had read from a disk, where the system counts them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peer(name: str) -> ModuleType:
    return peers.module(name)
