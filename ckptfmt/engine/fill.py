"""Boxes of stored tensors, read into arrays that the caller has: what a rank of a resharded load does.

Raw chunks that lie in the array as they lie in the file are read to where they belong, and verified
there; all else goes through memory of its own, a bounded amount at a time. Spec: 07-index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.box import Axis, copy_box, touched_chunks
from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.engine.plan import GAP_NBYTES
from ckptfmt.engine.progress import Reporter
from ckptfmt.format import Index, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.engine.open import Checkpoint

Array: TypeAlias = "NDArray[Any]"

STRAIGHT_NBYTES_MIN = 1 << 20
"""A part of less is read with its neighbours; one of more goes straight to its place."""
STRAIGHT_NBYTES_MAX = 8 << 20
"""One request of such a part."""
BATCH_NBYTES = 64 << 20
"""What passes through memory of its own at a time."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A box of a tensor, and the array that takes it.

    Attributes:
        tensor: Row. Its dtype has a fixed number of whole bytes.
        origin: The box's first element; its extent is the array's shape.
        out: Writable; items as wide as the tensor's, of any dtype and any strides.
    """

    tensor: int
    origin: tuple[int, ...]
    out: Array


@dataclass(frozen=True, slots=True)
class _Part:
    """What of a box lies in one region: relative to the region, and the piece of the array."""

    region: int
    origin: tuple[int, ...]
    out: Array


@dataclass(frozen=True, slots=True)
class _Copy:
    """Bytes [start, stop) of a chunk."""

    row: int
    start: int
    stop: int
    out: NDArray[np.uint8]


def fill_boxes(checkpoint: Checkpoint, fills: Sequence[Fill]) -> None:
    """Read every box into its array. The chunks that it touches are read whole and verified.

    Raises:
        CorruptError: Bytes are damaged; arrays filled so far stay so, and are named by nobody.
    """
    index = checkpoint.index
    straight: list[tuple[list[int], NDArray[np.uint8]]] = []
    copies: list[_Copy] = []
    strided: list[tuple[_Part, NDArray[np.int64]]] = []
    for fill in fills:
        for part in _parts(index, fill):
            begin = _begin(index, part)
            if begin is None:
                strided += [(piece, _chunks(index, piece)) for piece in _split(part)]
            else:
                _sort_range(index, part, begin, straight, copies)
    reader = checkpoint._reader(True)
    with Reporter(False, "read", 0) as reporter:
        with Threads() as threads:
            for rows, out in straight:
                threads.submit(partial(reader.straight, rows, out.data), 0)
            threads.drain()
        for batch in _batches(index, copies):
            rows_of = np.fromiter((copy.row for copy in batch), np.int64, len(batch))
            chunks = reader.chunks(rows_of, reporter, gap_nbytes=GAP_NBYTES)
            for copy in batch:
                copy.out[:] = chunks[copy.row][copy.start : copy.stop]
            del chunks
        for some in _strided_batches(index, strided):
            touched = np.concatenate([rows for _, rows in some])
            chunks = reader.chunks(touched, reporter, gap_nbytes=GAP_NBYTES)
            for part, _ in some:
                axes = [Axis(o, n, 1) for o, n in zip(part.origin, part.out.shape)]
                copy_box(index, part.region, axes, part.out, chunks)
            del chunks


def _parts(index: Index, fill: Fill) -> Iterator[_Part]:
    """The box, cut at the regions of its tensor."""
    if fill.out.size == 0:
        return
    tree = index.tree
    first, last = (int(x) for x in tree.tensor_region_starts[fill.tensor : fill.tensor + 2])
    out = fill.out.view(numpy_dtype(tree.dtype(fill.tensor)))
    shape = out.shape
    for region in range(first, last):
        at, extent = tree.box(region)
        low = [max(a, b) for a, b in zip(at, fill.origin)]
        high = [min(a + n, b + m) for a, n, b, m in zip(at, extent, fill.origin, shape)]
        if any(a >= b for a, b in zip(low, high)):
            continue
        place = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, fill.origin))
        origin = tuple(a - o for a, o in zip(low, at))
        yield _Part(region, origin, out[place] if place else out)


def _begin(index: Index, part: _Part) -> int | None:
    """The first byte of a part in its region, where it is one range there and one in memory."""
    if not part.out.flags.c_contiguous:
        return None
    extent, shape = index.tree.box(part.region)[1], part.out.shape
    outer = next((a for a, n in enumerate(shape) if n > 1), len(shape))
    if shape[outer + 1 :] != extent[outer + 1 :]:
        return None
    element = 0
    for origin, length in zip(part.origin, extent):
        element = element * length + origin
    return element * part.out.itemsize


def _sort_range(
    index: Index,
    part: _Part,
    begin: int,
    straight: list[tuple[list[int], NDArray[np.uint8]]],
    copies: list[_Copy],
) -> None:
    """One range of a region: whole raw chunks go straight to their place if it is worth it."""
    tree, placement = index.tree, index.placement
    out = part.out.reshape(-1).view(np.uint8)
    first = int(tree.region_chunk_starts[part.region])
    width, end = int(tree.chunk_raw[first]), begin + len(out)
    rows = range(first + begin // width, first + -(-end // width))
    is_large = len(out) >= STRAIGHT_NBYTES_MIN
    runs: list[list[int]] = []
    for row in rows:
        start = (row - first) * width
        stop = start + int(tree.chunk_raw[row])
        is_whole = begin <= start and stop <= end
        if not (is_large and is_whole and int(placement.codecs[row]) == 0):
            piece = out[max(start - begin, 0) : stop - begin]
            begin_in = max(begin - start, 0)
            copies.append(_Copy(row, begin_in, begin_in + len(piece), piece))
        elif runs and _follows(index, runs[-1], row):
            runs[-1].append(row)
        else:
            runs.append([row])
    for run in runs:
        start = (run[0] - first) * width - begin
        stop = (run[-1] - first) * width + int(tree.chunk_raw[run[-1]]) - begin
        straight.append((run, out[start:stop]))


def _follows(index: Index, run: list[int], row: int) -> bool:
    """Whether a chunk can be read in one request with those of a run."""
    placement, last = index.placement, run[-1]
    nbytes = (row - run[0] + 1) * int(index.tree.chunk_raw[run[0]])
    end = int(placement.offsets[last]) + int(placement.stored[last])
    return (
        row == last + 1
        and nbytes <= STRAIGHT_NBYTES_MAX
        and placement.files[row] == placement.files[last]
        and int(placement.offsets[row]) == end
    )


def _split(part: _Part) -> Iterator[_Part]:
    """A part that is not one range, in pieces that pass through memory of a bounded size."""
    axis = next((a for a, n in enumerate(part.out.shape) if n > 1), None)
    if part.out.nbytes <= BATCH_NBYTES or axis is None:
        yield part
        return
    length = part.out.shape[axis]
    slab = part.out.nbytes // length
    count = max(1, BATCH_NBYTES // slab)
    for start in range(0, length, count):
        place = (slice(None),) * axis + (slice(start, start + count),)
        origin = (*part.origin[:axis], part.origin[axis] + start, *part.origin[axis + 1 :])
        yield from _split(_Part(part.region, origin, part.out[place]))


def _chunks(index: Index, part: _Part) -> NDArray[np.int64]:
    axes = [Axis(o, n, 1) for o, n in zip(part.origin, part.out.shape)]
    return touched_chunks(index, part.region, axes)


def _strided_batches(
    index: Index, strided: Sequence[tuple[_Part, NDArray[np.int64]]]
) -> Iterator[list[tuple[_Part, NDArray[np.int64]]]]:
    some: list[tuple[_Part, NDArray[np.int64]]] = []
    total = 0
    for part, rows in strided:
        nbytes = int(index.tree.chunk_raw[rows].sum())
        if some and total + nbytes > BATCH_NBYTES:
            yield some
            some, total = [], 0
        some.append((part, rows))
        total += nbytes
    if some:
        yield some


def _batches(index: Index, copies: list[_Copy]) -> Iterator[list[_Copy]]:
    """In the order of the files, so that neighbours are read at once."""
    placement = index.placement
    rows = np.fromiter((copy.row for copy in copies), np.int64, len(copies))
    order = np.lexsort((placement.offsets[rows], placement.files[rows]))
    nbytes = np.cumsum(index.tree.chunk_raw[rows[order]], dtype=np.int64)
    start = 0
    while start < len(copies):
        before = int(nbytes[start - 1]) if start else 0
        stop = int(np.searchsorted(nbytes, before + BATCH_NBYTES, "right"))
        stop = max(stop, start + 1)
        yield [copies[position] for position in order[start:stop].tolist()]
        start = stop
