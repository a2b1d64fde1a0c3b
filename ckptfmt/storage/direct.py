"""Direct I/O: bytes between the disk and our memory, past the page cache, where it is offered.

A save or a cold load moves each byte once; the page cache would copy it again, evict the training
job's own pages, and cap the speed. Offered by trying: a file system that refuses is remembered per
device and served through the cache. `direct_io` of `ckptfmt.configure` overrides.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ckptfmt import config

BLOCK_NBYTES = 4096
DIRECT_NBYTES_MIN = 1 << 20
"""Smaller pieces are not worth a second descriptor."""

_SAMPLES, _SAMPLES_PIECE = 32, 8

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_refused: set[int] = set()


def is_wanted() -> bool:
    """False where the system has no direct I/O, or the user has switched it off."""
    return bool(_O_DIRECT) and config.current().direct_io != "off"


def is_aligned(buffer: memoryview, offset: int, nbytes_min: int = DIRECT_NBYTES_MIN) -> bool:
    """Whether a piece can go directly: large, whole blocks, memory and file on block borders."""
    nbytes = buffer.nbytes
    if nbytes < max(nbytes_min, BLOCK_NBYTES) or nbytes % BLOCK_NBYTES or offset % BLOCK_NBYTES:
        return False
    import numpy as np  # loaded long ago where a megabyte comes from; not by a bare import of this

    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % BLOCK_NBYTES == 0


def open_direct(path: str, flags: int, device: int) -> int:
    """A second descriptor of a file for direct I/O, or -1 where the file system refuses."""
    if device in _refused:
        return -1
    try:
        return os.open(path, flags | _O_DIRECT | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            _refused.add(device)
            return -1
        raise


def refuse(device: int) -> None:
    """The file system took the descriptor and refuses the transfer."""
    _refused.add(device)


def is_refusal(error: OSError) -> bool:
    """Whether a transfer failed only because it was direct."""
    return error.errno in (errno.EINVAL, errno.ENOTSUP)


def is_resident(fd: int, start: int, stop: int, samples: int = _SAMPLES) -> bool:
    """Whether a range is in the page cache, by samples of a byte that do not wait for the disk."""
    if not _RWF_NOWAIT or stop <= start:
        return False
    one = bytearray(1)
    step = max(1, (stop - start - 1) // samples)
    try:
        # Such a read does not wait, but it starts read-ahead, of megabytes on some disks, which
        # then competes with the direct reads that follow.
        _advise(fd, "POSIX_FADV_RANDOM")
        return all(
            os.preadv(fd, [one], offset, _RWF_NOWAIT) == 1
            for offset in [stop - 1, *range(start, stop, step)]
        )
    except OSError:
        return False
    finally:
        _advise(fd, "POSIX_FADV_NORMAL")


def _advise(fd: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, getattr(os, advice))


def read_resident(fd: int, out: memoryview, offset: int) -> int:
    """A range from the page cache, if it seems to be there, without waiting for the disk; how much
    of it, from its beginning, was there."""
    if not is_resident(fd, offset, offset + out.nbytes, _SAMPLES_PIECE):
        return 0
    done = 0
    with suppress(OSError):
        while done < out.nbytes:
            count = os.preadv(fd, [out[done:]], offset + done, _RWF_NOWAIT)
            if count <= 0:
                break
            done += count
    return done
