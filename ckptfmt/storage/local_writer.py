"""A file of a local store in the making: pieces go directly to the disk where that is offered, else
through the page cache, whose write-back is started at once. Spec: 02-store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from ckptfmt.errors import CheckpointError
from ckptfmt.storage import direct, failures, syscalls
from ckptfmt.storage.base import Buffer, Writer
from ckptfmt.storage.folders import Folders
from ckptfmt.types import Key


class LocalWriter(Writer):
    """A file under `tmp/`. Positional writes need no lock: the system keeps them apart."""

    def __init__(
        self, folders: Folders, key: Key, path: tuple[str, Callable[[Key], str]], fd: int
    ) -> None:
        """`path`: of the file, and what gives the path of a key."""
        self._folders, self._key, self._fd = folders, key, fd
        self._path, self._path_of = path
        self._second = -1
        self._state = "open"
        self._error: CheckpointError | None = None
        self._lock = threading.Lock()
        self._written = 0
        self._end = 0
        self._device = os.fstat(fd).st_dev
        self._wants_direct = direct.is_wanted()

    def write(self, offset: int, buffer: Buffer) -> None:
        if self._state != "open":
            # Of several threads one hears first of a full disk, and the others must not hide it.
            raise self._error or failures.writer_is_done(self._key, self._state)
        view = failures.as_bytes(buffer)
        try:
            self._send(view, offset)
        except OSError as error:
            self._error = failures.from_write_error(error, self._key)
            self._state = "failed"
            raise self._error from error
        with self._lock:
            self._written += view.nbytes
            self._end = max(self._end, offset + view.nbytes)

    def _send(self, view: memoryview, offset: int) -> None:
        """Directly where the piece and the file system allow it, else through the page cache."""
        nbytes_min = direct.BLOCK_NBYTES if self._second >= 0 else direct.DIRECT_NBYTES_MIN
        if self._wants_direct and direct.is_aligned(view, offset, nbytes_min):
            fd = self._direct_fd()
            if fd >= 0:
                try:
                    syscalls.pwrite_all(fd, view, offset)
                    return
                except OSError as error:
                    if not direct.is_refusal(error):
                        raise
                    direct.refuse(self._device)
                    self._wants_direct = False
        syscalls.pwrite_all(self._fd, view, offset)
        if view.nbytes >= direct.DIRECT_NBYTES_MIN:
            syscalls.start_write_back(self._fd, offset, view.nbytes)

    def _direct_fd(self) -> int:
        with self._lock:
            if self._second < 0:
                self._second = direct.open_direct(self._path, os.O_WRONLY, self._device)
                self._wants_direct = self._second >= 0
            return self._second

    def finish(self, *, durable: bool, key: Key | None = None) -> None:
        if self._state != "open":
            raise failures.writer_is_done(self._key, self._state)
        if self._written != self._end:
            self._state = "failed"
            raise failures.gap(self._key, expected=self._end, found=self._written)
        final = self._key if key is None else key
        target = self._path_of(final)
        self._state = "failed"  # until it has succeeded; nothing below is tried twice
        try:
            if os.fstat(self._fd).st_size != self._end:  # more was reserved than was needed
                os.ftruncate(self._fd, self._end)
            if durable:
                syscalls.sync_fd(self._fd)
            self._close()
            if target != self._path:
                self._folders.with_parent(target, lambda: os.replace(self._path, target))
        except OSError as error:
            raise failures.from_write_error(error, final) from error
        self._state = "finished"

    def abort(self) -> None:
        if self._state in ("finished", "aborted"):
            return
        self._state = "aborted"
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            os.unlink(self._path)

    def _close(self) -> None:
        for fd in (self._second, self._fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._second = -1

    def __del__(self) -> None:
        # Only the descriptor: the file may belong to the parent of a forked process, and what
        # stays under tmp/ is collected.
        with suppress(OSError, AttributeError):
            self._close()
