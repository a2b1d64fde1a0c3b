"""A file that grows from its begin to its end, written by threads while its maker goes on."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from ckptfmt.engine.arena import Ring
from ckptfmt.engine.outlet import Data, Outlet
from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.format import Hasher
from ckptfmt.storage import Backend
from ckptfmt.types import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray


class FileStream:
    """Bytes one after another to one object. A context manager: leaving it finishes the object,
    durably, or leaves nothing of it after an error.

    Args:
        nbytes: Bytes to reserve; None where they are not known.
    """

    def __init__(self, backend: Backend, key: str, nbytes: int | None = None) -> None:
        self.position = 0
        self._writer = backend.create(Key(key), nbytes)
        self._threads, self._ring = Threads(), Ring()
        self._outlet = Outlet(self._writer, self._threads, self._ring, None)

    def put(self, data: Data | NDArray[np.uint8], digest: Hasher | None = None) -> None:
        """The next bytes: a buffer, or a C-contiguous array of bytes. They are copied.

        Args:
            digest: Told the bytes as they are sent to the disk, from the copy.
        """
        view = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        self._outlet.put(self.position, view.data, digest)
        self.position += view.nbytes

    def pad(self, alignment: int) -> None:
        """Zeros up to a multiple of `alignment`."""
        self.put(bytes(-self.position % alignment))

    def __enter__(self) -> FileStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._outlet.emit()
                self._threads.drain()
        except BaseException:
            self._leave()
            raise
        if error is not None:
            self._leave()
            return
        self._threads.__exit__(None, None, None)
        self._ring.__exit__()
        try:
            self._writer.finish(durable=True)
        except BaseException:
            self._writer.abort()
            raise

    def _leave(self) -> None:
        """Give up: tasks may still be writing."""
        self._threads.wait()
        self._threads.__exit__(None, None, None)
        self._ring.__exit__()
        self._writer.abort()
