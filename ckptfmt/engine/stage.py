"""stage: a leaf -> host bytes, as the data file will hold them. Spec: 05-data-files.

A save that the caller waits for reads tensors where they are. A save in the background first copies
them into an *arena*, host memory of ours that is kept for the next save, and takes a *fingerprint*
of the source: 64 bytes of every MiB, the first and last 32 bytes of a smaller tensor, and one whole
chunk. Encode compares: what is saved is what was live when the call was made.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckptfmt.engine.adapter import TensorSource
from ckptfmt.engine.arena import aligned_buffer
from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.engine.plan import SavePlan
from ckptfmt.errors import ConflictError, InternalError
from ckptfmt.format import ALIGN_NBYTES, BLOCK_NBYTES, SMALL_TENSOR_NBYTES, digest, pack_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

SLICE_NBYTES = 16 << 20
COPY_THREADS = 2
"""A third thread copies no faster: two saturate the memory."""
_STRIDE_NBYTES, _SAMPLE_NBYTES, _EDGE_NBYTES = 1 << 20, 64, 32


def stage_tensor(
    source: TensorSource, name: str, nbytes: int, payload: memoryview | None = None
) -> memoryview:
    """The packed bytes of a tensor; no copy where its memory has them already.

    Args:
        nbytes: What the plan says.
        payload: Bytes that are packed or staged already.
    Raises:
        ConflictError: kind `conflict-stale-plan`: the tensor changed its size since it was planned.
    """
    data = pack_array(source.fetch()) if payload is None else payload
    if len(data) != nbytes:
        raise ConflictError(
            "tensor changed while it was saved",
            reason="stale-plan",
            where=repr(name),
            expected=f"{nbytes} bytes",
            found=f"{len(data)} bytes",
            do="save at a moment when nothing resizes tensors; nothing was committed",
        )
    return data


def changed(name: str) -> ConflictError:
    """The error of a tensor whose bytes did not hold still between their digest and the file."""
    return ConflictError(
        "tensor changed while it was saved",
        reason="changed",
        where=repr(name),
        do="save at a moment when nothing writes to tensors, or save a copy; nothing was committed",
    )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Samples of the sources: a digest for each tensor, and of the chunk chosen."""

    samples: Mapping[int, bytes]
    chunk_tensor: int
    chunk: bytes


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan's tensors in an arena: tensor row -> its bytes there, and their fingerprint."""

    payloads: Mapping[int, memoryview]
    fingerprint: Fingerprint


class Arena:
    """Host memory for one staged save, kept and grown for the next; pre-faulted as it is filled.

    Whoever asks for it while he is staging himself (a signal handler that saves) gets other memory:
    he would wait for himself.
    """

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._lock = threading.Lock()
        self._stager: int | None = None

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """The first `nbytes` of it; the caller has it until he gives it `back`."""
        me = threading.get_ident()
        if self._stager == me:
            return aligned_buffer(nbytes)
        self._lock.acquire()
        self._stager = me
        if len(self._memory) < nbytes:
            self._memory = np.zeros(0, np.uint8)  # the old one goes before the new one comes
            self._memory = aligned_buffer(-(-nbytes // SLICE_NBYTES) * SLICE_NBYTES)
        return self._memory[:nbytes]

    def staged(self, memory: NDArray[np.uint8]) -> None:
        """The taker is done with filling it; another thread may give it back."""
        if self._is_own(memory):
            self._stager = None

    def back(self, memory: NDArray[np.uint8]) -> None:
        if self._is_own(memory):
            self._stager = None
            self._lock.release()

    def _is_own(self, memory: NDArray[np.uint8]) -> bool:
        return memory.ctypes.data == self._memory.ctypes.data

    def trim(self) -> None:
        """Give the memory back to the system, unless a save has it."""
        if self._lock.acquire(blocking=False):
            self._memory = np.zeros(0, np.uint8)
            self._lock.release()


def layout(plan: SavePlan) -> tuple[dict[int, int], int]:
    """Tensor row -> its offset in an arena, aligned as in a data file, and the bytes in all."""
    made: dict[int, int] = {}
    at = 0
    for tensor, nbytes in enumerate(plan.tree.tensor_nbytes.tolist()):
        if nbytes and tensor not in plan.payloads:
            align = BLOCK_NBYTES if nbytes >= SMALL_TENSOR_NBYTES else ALIGN_NBYTES
            at = -(-at // align) * align
            made[tensor] = at
            at += nbytes
    return made, at


def stage_all(plan: SavePlan, memory: NDArray[np.uint8], offsets: Mapping[int, int]) -> Staged:
    """Copy every tensor into an arena, and sample the sources, before this returns."""
    sizes = plan.tree.tensor_nbytes.tolist()
    payloads = dict(plan.payloads)
    samples: dict[int, bytes] = {}
    chosen, chunk = _choose(sizes, offsets), b""
    algorithm = plan.options.digest
    with Threads(COPY_THREADS) as threads:
        for tensor, offset in offsets.items():
            nbytes = sizes[tensor]
            data = stage_tensor(plan.sources[tensor], plan.names[tensor], nbytes)
            target = memory[offset : offset + nbytes]
            source = np.frombuffer(data, np.uint8)
            if nbytes <= SLICE_NBYTES:
                if nbytes < _STRIDE_NBYTES:
                    target[:] = source
                else:
                    threads.submit(_Copy(target, source), 0)
            else:
                for start in range(0, nbytes, SLICE_NBYTES):
                    stop = min(start + SLICE_NBYTES, nbytes)
                    threads.submit(_Copy(target[start:stop], source[start:stop]), 0)
            payloads[tensor] = target.data
            samples[tensor] = sample(data)
            if tensor == chosen:
                chunk = digest(data[: _chunk_nbytes(plan, tensor)], algorithm)
        threads.drain()
    return Staged(payloads, Fingerprint(samples, chosen, chunk))


class _Copy:
    """A slice to copy; NumPy releases the GIL meanwhile."""

    __slots__ = ("_source", "_target")

    def __init__(self, target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        self._target, self._source = target, source

    def __call__(self) -> None:
        np.copyto(self._target, self._source)


def _choose(sizes: list[int], offsets: Mapping[int, int]) -> int:
    """The tensor whose first chunk is compared whole: the largest."""
    return max(offsets, key=lambda tensor: sizes[tensor], default=-1)


def _chunk_nbytes(plan: SavePlan, tensor: int) -> int:
    region = int(plan.tree.tensor_region_starts[tensor])
    return int(plan.tree.chunk_raw[plan.tree.region_chunk_starts[region]])


def sample(data: memoryview) -> bytes:
    """64 bytes of every MiB; of a smaller tensor its first and last 32 bytes."""
    if len(data) < _STRIDE_NBYTES:
        return bytes(data[:_EDGE_NBYTES]) + bytes(data[-_EDGE_NBYTES:])
    whole = np.frombuffer(data, np.uint8)
    count = len(whole) // _STRIDE_NBYTES
    rows = whole[: count * _STRIDE_NBYTES].reshape(count, _STRIDE_NBYTES)[:, :_SAMPLE_NBYTES]
    return rows.tobytes() + whole[-_EDGE_NBYTES:].tobytes()


def compare(plan: SavePlan, staged: Staged) -> None:
    """Before the first byte is encoded: the arena holds what the sources held.

    Raises:
        InternalError: kind `internal-stale-arena`.
    """
    prints = staged.fingerprint
    wrong = next(
        (t for t, expected in prints.samples.items() if sample(staged.payloads[t]) != expected), -1
    )
    if wrong < 0 and prints.chunk_tensor >= 0:
        data = staged.payloads[prints.chunk_tensor][: _chunk_nbytes(plan, prints.chunk_tensor)]
        if digest(data, plan.options.digest) != prints.chunk:
            wrong = prints.chunk_tensor
    if wrong >= 0:
        raise InternalError(
            "staged bytes are not those of the tensor when it was saved",
            reason="stale-arena",
            where=repr(plan.names[wrong]),
            do="nothing was committed; please report this",
        )
