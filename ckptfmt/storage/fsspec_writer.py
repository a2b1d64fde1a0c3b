"""Writers for drivers that take a stream: positional writes in, bytes in order out.

Memory is bounded where writes come in order; what comes early waits. Spec: 02-store.
"""

from __future__ import annotations

import logging
import secrets
import threading
from abc import abstractmethod
from contextlib import suppress
from typing import Any

from ckptfmt.errors import StorageError
from ckptfmt.storage import failures, remote_failures
from ckptfmt.storage.base import Buffer, Writer
from ckptfmt.types import Key

_log = logging.getLogger("ckptfmt.storage")

# Up to here an object is one put; above, it is uploaded in parts of this size (S3 allows 10,000).
_PART_NBYTES = 32 << 20


class _OrderedWriter(Writer):
    """Puts positional writes in order and hands them to `_send`."""

    def __init__(self, fs: Any, path: str, key: Key) -> None:
        self._fs, self._path, self._key = fs, path, key
        self._lock = threading.Lock()
        self._early: dict[int, bytes] = {}
        self._sent = 0
        self._state = "open"

    @abstractmethod
    def _send(self, data: memoryview) -> None:
        """Take the next bytes; they may change after the call."""

    @abstractmethod
    def _complete(self) -> None:
        """Make the object visible under its key."""

    @abstractmethod
    def _discard(self) -> None:
        """Leave nothing behind."""

    def write(self, offset: int, buffer: Buffer) -> None:
        view = failures.as_bytes(buffer)
        with self._lock:
            if self._state != "open":
                raise failures.writer_is_done(self._key, self._state)
            if not view.nbytes:
                return
            if offset < self._sent or offset in self._early:
                self._state = "failed"
                raise failures.gap(self._key, expected=self._sent, found=offset)
            if offset > self._sent:
                self._early[offset] = bytes(view)
                return
            self._advance(view)
            while self._sent in self._early:
                self._advance(memoryview(self._early.pop(self._sent)))

    def _advance(self, view: memoryview) -> None:
        try:
            self._send(view)
        except Exception as error:
            self._state = "failed"
            raise remote_failures.from_driver(error, self._key, writing=True) from error
        self._sent += view.nbytes

    def finish(self, *, durable: bool, key: Key | None = None) -> None:
        if key is not None and key != self._key:
            raise failures.no_late_key(key)
        with self._lock:
            if self._state != "open":
                raise failures.writer_is_done(self._key, self._state)
            self._state = "failed"  # until it has succeeded; nothing is tried twice
            if self._early:
                end = max(offset + len(data) for offset, data in self._early.items())
                raise failures.gap(self._key, expected=end, found=self._sent)
            try:
                self._complete()
            except Exception as error:
                unknown = not remote_failures.says_refused(error)
                raise remote_failures.from_driver(
                    error, self._key, writing=True, outcome_unknown=unknown
                ) from error
            self._state = "finished"

    def abort(self) -> None:
        with self._lock:
            if self._state in ("finished", "aborted"):
                return
            self._state = "aborted"
            self._early.clear()
            try:
                self._discard()
            except Exception as error:
                # Whoever aborts has an error of his own to tell; what stays is litter.
                _log.warning("an upload could not be withdrawn: %s: %s", self._key, error)


class UploadWriter(_OrderedWriter):
    """For object stores: one put, or an upload in parts that is completed at `finish`.

    Args:
        one_put: Keep everything until `finish` (drivers whose open files are visible at once).
    """

    def __init__(self, fs: Any, path: str, key: Key, *, one_put: bool = False) -> None:
        super().__init__(fs, path, key)
        self._one_put = one_put
        self._held = bytearray()
        self._file: Any = None

    def _send(self, data: memoryview) -> None:
        if self._file is None:
            if self._one_put or len(self._held) + data.nbytes <= _PART_NBYTES:
                self._held += data
                return
            # autocommit=False: closing the file sends the last part and no more.
            self._file = self._fs.open(self._path, "wb", autocommit=False, block_size=_PART_NBYTES)
            self._file.write(self._held)
            self._held = bytearray()
        self._file.write(data)

    def _complete(self) -> None:
        if self._file is None:
            self._fs.pipe_file(self._path, bytes(self._held))
            self._held = bytearray()
            return
        self._file.close()
        self._file.commit()

    def _discard(self) -> None:
        self._held = bytearray()
        if self._file is not None:
            try:
                self._file.discard()
            finally:
                # Else its destructor would try to upload the rest.
                with suppress(AttributeError):
                    self._file.closed = True


class RenamingWriter(_OrderedWriter):
    """For drivers of file systems: a file under tmp/, renamed at `finish`."""

    def __init__(self, fs: Any, path: str, key: Key, root: str) -> None:
        super().__init__(fs, path, key)
        self._temporary = f"{root}/tmp/put-{secrets.token_hex(16)}"
        with remote_failures.mapped(key, writing=True):
            for folder in (f"{root}/tmp", path.rpartition("/")[0]):
                with suppress(FileExistsError):
                    fs.makedirs(folder, exist_ok=True)
            self._file = fs.open(self._temporary, "wb")

    def _send(self, data: memoryview) -> None:
        done = self._file.write(bytes(data))
        if done is not None and done != data.nbytes:
            raise StorageError(
                "the driver wrote less than it was given",
                reason="io",
                where=self._key,
                expected=f"{data.nbytes} bytes",
                found=f"{done} bytes",
            )

    def _complete(self) -> None:
        self._file.close()
        self._fs.mv(self._temporary, self._path)

    def _discard(self) -> None:
        try:
            self._file.close()
        finally:
            self._fs.rm_file(self._temporary)
