"""The fingerprint of sources at the call: what is saved is what was live then. Spec: 05-data-files.

64 bytes of every MiB of a tensor, the first and last 32 bytes of a smaller one, and one whole chunk:
taken from the *source* before staging returns, and compared with the arena before it is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckptfmt.engine.plan import SavePlan
from ckptfmt.errors import InternalError
from ckptfmt.format import digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

STRIDE_NBYTES = 1 << 20
_SAMPLE_NBYTES, _EDGE_NBYTES = 64, 32


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Samples of the sources, by tensor row, and the digest of one tensor's first chunk."""

    samples: Mapping[int, bytes]
    chunk_tensor: int
    chunk: bytes


def choose(sizes: Sequence[int], tensors: Sequence[int]) -> int:
    """The tensor whose first chunk is compared whole: the largest; -1 if there is none."""
    return max(tensors, key=lambda tensor: sizes[tensor], default=-1)


def first_chunk_nbytes(plan: SavePlan, tensor: int) -> int:
    region = int(plan.tree.tensor_region_starts[tensor])
    return int(plan.tree.chunk_raw[plan.tree.region_chunk_starts[region]])


def sample(data: memoryview) -> bytes:
    """64 bytes of every MiB; of a smaller tensor its first and last 32 bytes."""
    if len(data) < STRIDE_NBYTES:
        return bytes(data[:_EDGE_NBYTES]) + bytes(data[-_EDGE_NBYTES:])
    whole = np.frombuffer(data, np.uint8)
    count = len(whole) // STRIDE_NBYTES
    rows = whole[: count * STRIDE_NBYTES].reshape(count, STRIDE_NBYTES)[:, :_SAMPLE_NBYTES]
    return rows.tobytes() + whole[-_EDGE_NBYTES:].tobytes()


def sample_boxes(nbytes: int) -> list[tuple[int, int, int, int]]:
    """What `sample` takes of so many bytes: (rows, width, start, stride), one after another."""
    if nbytes >= STRIDE_NBYTES:
        return [
            (nbytes // STRIDE_NBYTES, _SAMPLE_NBYTES, 0, STRIDE_NBYTES),
            (1, _EDGE_NBYTES, nbytes - _EDGE_NBYTES, 0),
        ]
    edge = min(nbytes, _EDGE_NBYTES)
    return [(2, edge, 0, nbytes - edge)]


def compare(plan: SavePlan, payloads: Mapping[int, memoryview], fingerprint: Fingerprint) -> None:
    """Before the first byte is encoded: the arena holds what the sources held.

    Raises:
        InternalError: kind `internal-stale-arena`.
    """
    samples, chosen = fingerprint.samples, fingerprint.chunk_tensor
    wrong = next((t for t, expected in samples.items() if sample(payloads[t]) != expected), -1)
    if wrong < 0 and chosen >= 0:
        data = payloads[chosen][: first_chunk_nbytes(plan, chosen)]
        if digest(data, plan.options.digest) != fingerprint.chunk:
            wrong = chosen
    if wrong >= 0:
        raise InternalError(
            "staged bytes are not those of the tensor when it was saved",
            reason="stale-arena",
            where=repr(plan.names[wrong]),
            do="nothing was committed; please report this",
        )


class Scratch:
    """Room in an arena, behind the tensors, for the samples of tensors on a device: they come by
    the same kind of copy, into pinned memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._end = 0

    @classmethod
    def planned(cls, plan: SavePlan, tensors: Sequence[int]) -> Scratch:
        """For the tensors among these that are on a device."""
        sizes = plan.tree.tensor_nbytes.tolist()
        on_device = plan.sources.far()
        mine = [tensor for tensor in tensors if tensor in on_device]
        nbytes = sum(rows * width for t in mine for rows, width, _, _ in sample_boxes(sizes[t]))
        chosen = choose(sizes, tensors)
        return cls(nbytes + (first_chunk_nbytes(plan, chosen) if chosen in mine else 0))

    def begin(self, memory: NDArray[np.uint8]) -> None:
        self._memory, self._end = memory, 0

    def take(self, rows: int, width: int) -> NDArray[np.uint8]:
        made = self._memory[self._end : self._end + rows * width].reshape(rows, width)
        self._end += rows * width
        return made
