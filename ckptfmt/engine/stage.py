"""stage: a leaf -> host bytes, as the data file will hold them. Spec: 05-data-files.

A save that the caller waits for reads tensors where they are. A save in the background first copies
them into an *arena*, host memory of ours that is kept for the next save and laid out as the data
files will be, and takes a fingerprint of the sources. Tensors on a device are copied by it, beside
those of the host, into pinned memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ckptfmt.engine.adapter import Device, TensorSource
from ckptfmt.engine.arena import Arena, Bytes, StagedMemory
from ckptfmt.engine.fingerprint import (
    STRIDE_NBYTES,
    Fingerprint,
    Scratch,
    choose,
    first_chunk_nbytes,
    sample,
    sample_boxes,
)
from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.engine.plan import SavePlan, packed_bytes
from ckptfmt.errors import ConflictError
from ckptfmt.format import (
    ALIGN_NBYTES,
    BLOCK_NBYTES,
    FILE_NBYTES_TARGET,
    HEAD_NBYTES,
    SMALL_TENSOR_NBYTES,
    digest,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

SLICE_NBYTES = 16 << 20
COPY_THREADS = 2
"""A third thread copies no faster: two saturate the memory."""
BOUNCE_NBYTES = 64 << 20
"""Of a tensor on a device, so much comes to the host at once in a save that the caller waits for."""


def stage_tensor(
    source: TensorSource, name: str, nbytes: int, payload: memoryview | None = None
) -> memoryview:
    """The packed bytes of a tensor; no copy where its memory has them already.

    Args:
        nbytes: What the plan says.
        payload: Bytes that are packed or staged already.
    Raises:
        ConflictError: kind `conflict-stale-plan`: the tensor changed its size since it was planned.
        UsageError: There is no memory for its packed bytes.
    """
    data = packed_bytes(source, name) if payload is None else payload
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
class Staged:
    """A plan's tensors in an arena: tensor row -> its bytes there, and their fingerprint."""

    payloads: Mapping[int, memoryview]
    fingerprint: Fingerprint
    memory: StagedMemory


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors go in an arena.

    Attributes:
        offsets: Tensor row -> its offset, or -1; aligned as in a data file.
        end: Behind the last of them; `scratch` is what is needed there for samples.
    """

    offsets: NDArray[np.int64]
    end: int
    scratch: Scratch = field(default_factory=lambda: Scratch(0))

    @property
    def nbytes(self) -> int:
        return self.end + self.scratch.nbytes

    @property
    def tensors(self) -> list[int]:
        """The rows that have a place."""
        made: list[int] = np.flatnonzero(self.offsets >= 0).tolist()
        return made


def plan_layout(plan: SavePlan) -> Layout:
    """Lay tensors out as a save that reuses nothing writes them: a file after another, each with
    room for its head, so that whole stretches of the arena can be sent as they are."""
    sizes = plan.tree.tensor_nbytes.tolist()
    offsets = np.full(len(sizes), -1, np.int64)
    begin, at = 0, HEAD_NBYTES
    for tensor, nbytes in enumerate(sizes):
        if not nbytes or tensor in plan.vouched:
            continue
        if at - begin > FILE_NBYTES_TARGET:
            begin = -(-at // BLOCK_NBYTES) * BLOCK_NBYTES
            at = begin + HEAD_NBYTES
        align = BLOCK_NBYTES if nbytes >= SMALL_TENSOR_NBYTES else ALIGN_NBYTES
        at = -(-at // align) * align
        offsets[tensor] = at
        at += nbytes
    laid = Layout(offsets, at if (offsets >= 0).any() else 0)
    return Layout(offsets, laid.end, Scratch.planned(plan, laid.tensors))


def devices_of(plan: SavePlan) -> list[Device]:
    """The devices that have tensors of a plan, each once."""
    made: list[Device] = []
    for _, source in plan.sources.others():
        if source.device is not None and source.device not in made:
            made.append(source.device)
    return made


def stage_all(plan: SavePlan, memory: Bytes, layout: Layout) -> Staged:
    """Copy every tensor into an arena, and sample the sources, before this returns."""
    sizes = plan.tree.tensor_nbytes.tolist()
    tensors = layout.tensors
    chosen = choose(sizes, tensors)
    on_device = plan.sources.far()
    near = [tensor for tensor in tensors if tensor not in on_device]
    far = [tensor for tensor in tensors if tensor in on_device]
    targets = {
        tensor: memory[offset : offset + sizes[tensor]]
        for tensor, offset in zip(tensors, layout.offsets[tensors].tolist())
    }
    _zero_gaps(memory, layout, sizes)
    layout.scratch.begin(memory[layout.end :])
    with _waiting(devices_of(plan)):
        seen = {tensor: _issue(plan, tensor, targets[tensor], layout.scratch) for tensor in far}
        seen_chunk = _issue_chunk(plan, chosen, layout.scratch) if chosen in seen else None
        samples, chunk = _copy_near(plan, near, targets, chosen)
    samples |= {tensor: b"".join(part.tobytes() for part in seen[tensor]) for tensor in far}
    if seen_chunk is not None:
        chunk = digest(seen_chunk.reshape(-1).data, plan.options.digest)
    payloads = {tensor: target.data for tensor, target in targets.items()}
    staged = StagedMemory(memory[: layout.end], layout.offsets)
    return Staged(payloads, Fingerprint(samples, chosen, chunk), staged)


@contextmanager
def _waiting(devices: list[Device]) -> Iterator[None]:
    """Leave only when every copy that was issued is over, also after an error: the memory is in
    use until then."""
    first: BaseException | None = None
    try:
        yield
    except BaseException as error:
        first = error
    for device in devices:
        try:
            device.wait()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def _zero_gaps(memory: Bytes, layout: Layout, sizes: list[int]) -> None:
    """The padding of a data file is zero, and so is that of what is sent from here as it lies."""
    rows = np.array(layout.tensors, np.int64)
    begins = layout.offsets[rows]
    ends = begins + np.array(sizes, np.int64)[rows]
    starts = np.concatenate([[0], ends[:-1]]) if len(rows) else ends
    for gap in np.flatnonzero(begins > starts).tolist():
        memory[starts[gap] : begins[gap]] = 0


def _issue(plan: SavePlan, tensor: int, target: Bytes, scratch: Scratch) -> list[Bytes]:
    """Have a device copy a tensor, and the samples of it; they are there after the wait."""
    copy = plan.sources[tensor].copy_async
    assert copy is not None
    copy(target.reshape(1, -1))
    made = []
    for rows, width, start, stride in sample_boxes(len(target)):
        part = scratch.take(rows, width)
        copy(part, start, stride)
        made.append(part)
    return made


def _issue_chunk(plan: SavePlan, tensor: int, scratch: Scratch) -> Bytes:
    copy = plan.sources[tensor].copy_async
    assert copy is not None
    made = scratch.take(1, first_chunk_nbytes(plan, tensor))
    copy(made)
    return made


def _copy_near(
    plan: SavePlan, tensors: list[int], targets: Mapping[int, Bytes], chosen: int
) -> tuple[dict[int, bytes], bytes]:
    """Copy the tensors of the host by threads; their samples, and the chunk of the chosen one."""
    samples: dict[int, bytes] = {}
    chunk = b""
    with Threads(COPY_THREADS) as threads:
        for tensor in tensors:
            target, payload = targets[tensor], plan.payloads.get(tensor)
            nbytes = len(target)
            data = stage_tensor(plan.sources[tensor], plan.names[tensor], nbytes, payload)
            source = np.frombuffer(data, np.uint8)
            if nbytes < STRIDE_NBYTES:
                target[:] = source
            else:
                for start in range(0, nbytes, SLICE_NBYTES):
                    stop = min(start + SLICE_NBYTES, nbytes)
                    threads.submit(_Copy(target[start:stop], source[start:stop]), 0)
            samples[tensor] = sample(data)
            if tensor == chosen:
                chunk = digest(data[: first_chunk_nbytes(plan, tensor)], plan.options.digest)
        threads.drain()
    return samples, chunk


def copy_arrays(pairs: Iterable[tuple[Bytes, Bytes]]) -> None:
    """(target, source) of bytes in host memory, copied by as many threads as memory has use for."""
    with Threads(COPY_THREADS) as threads:
        for target, source in pairs:
            if len(target) < STRIDE_NBYTES:
                target[:] = source
                continue
            for start in range(0, len(target), SLICE_NBYTES):
                stop = min(start + SLICE_NBYTES, len(target))
                threads.submit(_Copy(target[start:stop], source[start:stop]), 0)
        threads.drain()


class _Copy:
    """A slice to copy; NumPy releases the GIL meanwhile."""

    __slots__ = ("_source", "_target")

    def __init__(self, target: Bytes, source: Bytes) -> None:
        self._target, self._source = target, source

    def __call__(self) -> None:
        np.copyto(self._target, self._source)


_bounce = Arena()


class Bounce:
    """Tensors on a device, by parts through pinned memory of bounded size, for a save that the
    caller waits for; a context manager that keeps the memory for the next save."""

    def __init__(self, plan: SavePlan) -> None:
        self._plan = plan
        self._devices = devices_of(plan)
        self._arena = _bounce
        self._memory: Bytes | None = None

    def part(self, tensor: int, start: int, stop: int) -> memoryview:
        """Packed bytes [start, stop) of a tensor, `BOUNCE_NBYTES` or one chunk at most; good until
        the next."""
        source = self._plan.sources[tensor]
        assert source.device is not None
        assert source.copy_async is not None
        if self._memory is None:
            chunk_nbytes = int(self._plan.tree.chunk_raw.max())
            self._memory = self._arena.take(max(BOUNCE_NBYTES, chunk_nbytes), self._devices)
        target = self._memory[: stop - start]
        with _waiting([source.device]):
            source.copy_async(target.reshape(1, -1), start)
        return target.data

    def __enter__(self) -> Bounce:
        return self

    def __exit__(self, *error: object) -> None:
        if self._memory is not None:
            self._arena.back(self._memory)


def _forget_in_child() -> None:
    """A forked process has neither the thread that may hold the memory nor the device."""
    global _bounce
    _bounce = Arena()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
