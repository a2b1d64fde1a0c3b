"""A file of an export in the making, which remembers the digests of what is sent to the disk."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfmt.engine import FileStream, Pipeline
from ckptfmt.foreign.exporters.failures import writing
from ckptfmt.foreign.exporters.tree import new_digest
from ckptfmt.format import Hasher
from ckptfmt.storage import Backend

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Checksum: TypeAlias = Callable[[Any, int], int]
_BLOCK_NBYTES = 1 << 20
"""Copied and digested while it is in the cache of a core."""


class ExportStream(FileStream):
    """Bytes one after another. A context manager: what is there when it is left is durable.

    Args:
        where: What messages call the destination.

    Attributes:
        digests: (offset, bytes) -> digest, of all values that were sent.
    """

    def __init__(self, backend: Backend, name: str, nbytes: int | None, where: str) -> None:
        self.where = where
        self.digests: dict[tuple[int, int], bytes] = {}
        self._summing = Pipeline(1)
        with writing(where, storage=True):
            super().__init__(backend, name, nbytes)

    def put(
        self,
        data: bytes | bytearray | memoryview | NDArray[np.uint8],
        digest: Hasher | None = None,
    ) -> None:
        with writing(self.where, storage=True):
            super().put(data, digest)

    def put_values(
        self, raw: NDArray[np.uint8], checksum: Checksum | None = None, before: int = 0
    ) -> int:
        """The next bytes of a tensor: a C-contiguous array of bytes.

        Args:
            checksum: What the format has of them.
            before: Of the bytes before.
        Returns:
            The checksum so far.
        """
        digest, begin, sums = new_digest(), self.position, [before]
        if checksum is not None and raw.nbytes >= _BLOCK_NBYTES:
            # While the bytes are copied: to sum them takes as long.
            self._summing.submit(lambda: sums.append(checksum(raw, before)), 0)
        elif checksum is not None:
            sums.append(checksum(raw, before))
        for at in range(0, raw.nbytes, _BLOCK_NBYTES):
            self.put(raw[at : at + _BLOCK_NBYTES], digest)
        self.digests[begin, raw.nbytes] = digest.digest()
        self._summing.drain()
        return sums[-1]

    def __enter__(self) -> ExportStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._summing.__exit__(kind, error, trace)
        with writing(self.where, storage=True):
            super().__exit__(kind, error, trace)
