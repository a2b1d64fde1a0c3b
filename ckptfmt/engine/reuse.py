"""Chunks that need not be written: those of the bases, and whole regions equal within one save.

A save reuses nothing but the chunks of its bases, which its `open` file names (I4), of the same
digest algorithm, in files that are there, whole, not condemned and not known to be damaged (I7).
Spec: 08-protocol.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ckptfmt.format import Index, Pipeline


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk is stored: `file` is an id, or the number of a file in the making."""

    file: str | int
    offset: int
    stored_nbytes: int
    pipeline: Pipeline
    digest: bytes


class Bases:
    """Digest -> place, over all chunks of the bases that may be reused."""

    def __init__(self, indexes: Sequence[Index], algorithm: str, refused: Container[str]) -> None:
        self._indexes = [index for index in indexes if index.header.algorithm == algorithm]
        self._rows: dict[bytes, tuple[int, int]] = {}
        self.files: dict[str, int] = {}
        for number, index in enumerate(self._indexes):
            self._add(number, index, refused)

    def _add(self, number: int, index: Index, refused: Container[str]) -> None:
        good = np.array([file not in refused for file in index.files.ids], bool)
        for file, nbytes, usable in zip(index.files.ids, index.files.nbytes.tolist(), good):
            if usable:
                self.files[file] = nbytes
        digests = index.tree.chunk_digests
        width = digests.shape[1] if digests.ndim == 2 else 0
        flat = digests.tobytes()
        usable_rows = good[index.placement.files] if len(good) else np.zeros(0, bool)
        for row in np.flatnonzero(usable_rows).tolist():
            self._rows.setdefault(flat[row * width : (row + 1) * width], (number, row))

    def has_any(self, digests: Iterable[bytes]) -> bool:
        """Whether a base has one of these chunks."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(digests)

    def find(self, raw_digest: bytes, raw_nbytes: int) -> Place | None:
        """A stored chunk with this content, or None."""
        found = self._rows.get(raw_digest)
        if found is None:
            return None
        index, row = self._indexes[found[0]], found[1]
        if int(index.tree.chunk_raw[row]) != raw_nbytes:
            return None
        placement = index.placement
        digests = placement.digests
        return Place(
            file=index.files.ids[int(placement.files[row])],
            offset=int(placement.offsets[row]),
            stored_nbytes=int(placement.stored[row]),
            pipeline=placement.pipelines[int(placement.codecs[row])],
            digest=raw_digest if digests is None else digests[row].tobytes(),
        )
