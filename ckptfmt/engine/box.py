"""Boxes of a stored tensor: which chunks a NumPy index touches, and the array it gives. Spec: 07."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from ckptfmt.errors import UsageError
from ckptfmt.format import Dtype, Index, empty_array, parse_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

_STRETCHES_MAX = 1 << 20
"""More stretches than that: what lies between the inner ones is read too."""
_BLOCK_NBYTES = 16 << 20
"""Rows are put together in blocks of at most this size, so that a part of a tensor larger than
memory can be read."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Positions `first`, `first + step`, ... of one axis, ascending."""

    first: int
    count: int
    step: int

    def inside(self, origin: int, extent: int) -> tuple[Axis, slice]:
        """What of it lies in [origin, origin + extent): relative to origin, and which of `count`."""
        begin = max(0, -(-(origin - self.first) // self.step))
        stop = min(self.count, -(-(origin + extent - self.first) // self.step))
        made = Axis(self.first + begin * self.step - origin, stop - begin, self.step)
        return made, slice(begin, stop)

    @property
    def index(self) -> slice:
        return slice(self.first, self.first + (self.count - 1) * self.step + 1, self.step)


@dataclass(frozen=True, slots=True)
class Box:
    """An index, settled for a shape.

    Attributes:
        tensor: Row.
        axes: What is read, ascending.
        local: The index that makes the result of what was read: flips, dropped axes, or, where all
            is read, the whole index as it was given.
    """

    tensor: int
    axes: tuple[Axis, ...]
    local: tuple[Any, ...]

    def is_whole(self, shape: Sequence[int]) -> bool:
        return all(axis.count == n for axis, n in zip(self.axes, shape))


def slices_of(box: tuple[Sequence[int], Sequence[int]]) -> tuple[slice, ...]:
    """The NumPy index of a box (origin, extent)."""
    return tuple(slice(origin, origin + extent) for origin, extent in zip(*box))


def settle(index: Index, tensor: int, region: object, name: str) -> Box:
    """Settle ints, slices and an Ellipsis; anything else is applied to the whole tensor.

    Raises:
        UsageError: It does not fit the tensor.
    """
    shape = index.tree.shape(tensor)
    items = region if isinstance(region, tuple) else (region,)
    if any(isinstance(item, bool) for item in items) or not all(
        isinstance(item, int | slice | np.integer | EllipsisType) for item in items
    ):
        return Box(tensor, tuple(Axis(0, length, 1) for length in shape), items)
    axes: list[Axis] = []
    local: list[int | slice] = []
    for number, (item, length) in enumerate(zip(_expand(items, len(shape), name), shape)):
        if isinstance(item, slice):
            axis, flip = _settle_slice(item, length, name)
            axes.append(axis)
            local.append(flip)
        else:
            where = f"{name!r}, axis {number}"
            axes.append(_settle_int(operator.index(item), length, where))
            local.append(0)
    return Box(tensor, tuple(axes), tuple(local))


def _settle_int(item: int, length: int, where: str) -> Axis:
    position = item + (length if item < 0 else 0)
    if not 0 <= position < length:
        raise UsageError(
            "index is out of range",
            reason="region",
            where=where,
            expected=f"-{length} to {length - 1}",
            found=item,
            do="check the tensor's shape",
        )
    return Axis(position, 1, 1)


def _settle_slice(item: slice, length: int, name: str) -> tuple[Axis, slice]:
    try:
        positions = range(*item.indices(length))
    except (TypeError, ValueError) as error:
        refuse(item, name, error)
    if len(positions) == 0:
        return Axis(0, 0, 1), slice(None)
    if len(positions) == 1:
        return Axis(positions[0], 1, 1), slice(None)
    if positions.step < 0:
        return Axis(positions[-1], len(positions), -positions.step), slice(None, None, -1)
    return Axis(positions[0], len(positions), positions.step), slice(None)


def refuse(region: object, name: str, error: Exception) -> NoReturn:
    """An index that NumPy does not take either."""
    raise UsageError(
        "not an index of this tensor",
        reason="region",
        where=repr(name),
        expected="ints, slices and an Ellipsis, or what NumPy takes",
        found=f"{region!r}"[:80] + f" ({error})",
        do="check the tensor's shape",
    ) from error


def _expand(items: Sequence[Any], ndim: int, name: str) -> list[Any]:
    dots = [p for p, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or len(items) - len(dots) > ndim:
        raise UsageError(
            "index has too many axes",
            reason="region",
            where=repr(name),
            expected=f"at most {ndim}, and one Ellipsis",
            found=f"{len(items) - len(dots)}, and {len(dots)}" if dots else len(items),
            do="check the tensor's shape",
        )
    at = dots[0] if dots else len(items)
    rest = items[at + 1 :] if dots else ()
    fill = ndim - at - len(rest)
    return [*items[:at], *([slice(None)] * fill), *rest]


# -- which chunks -------------------------------------------------------------------------------


def chunks_of(index: Index, box: Box) -> dict[int, NDArray[np.int64]]:
    """Region row -> the chunk rows that the box touches in it."""
    tree = index.tree
    made: dict[int, NDArray[np.int64]] = {}
    first, last = (int(x) for x in tree.tensor_region_starts[box.tensor : box.tensor + 2])
    for region in range(first, last):
        axes, _ = _meet(box, *tree.box(region))
        if not any(axis.count <= 0 for axis in axes):
            made[region] = touched_chunks(index, region, axes)
    return made


def touched_chunks(index: Index, region: int, axes: Sequence[Axis]) -> NDArray[np.int64]:
    """The chunk rows of a region that hold elements at `axes`, which are relative to it."""
    tree = index.tree
    dtype = tree.dtype(int(tree.region_tensors[region]))
    a, b = (int(x) for x in tree.region_chunk_starts[region : region + 2])
    if dtype.bits < 8 or b - a == 1:
        return np.arange(a, b)
    width = int(tree.chunk_raw[a])
    return a + _touched(tree.box(region)[1], axes, dtype.bits // 8, width)


def _meet(
    box: Box, origin: Sequence[int], extent: Sequence[int]
) -> tuple[list[Axis], tuple[slice, ...]]:
    """What of the box lies in a region: in the region's coordinates, and where in the result."""
    parts = [axis.inside(o, n) for axis, o, n in zip(box.axes, origin, extent)]
    return [axis for axis, _ in parts], tuple(at for _, at in parts)


def _touched(
    extent: Sequence[int], axes: Sequence[Axis], size: int, width: int
) -> NDArray[np.int64]:
    """Chunks, of `width` bytes each, that hold elements of a box of a C-order region.

    The outer axes are gone through position by position, as long as a step over one could pass a
    chunk by; from there on a stretch reaches from the first element to the last.
    """
    ndim = len(extent)
    strides = [math.prod(extent[axis + 1 :]) for axis in range(ndim)]
    offsets = np.zeros(1, np.int64)
    outer = 0
    for axis, stride in zip(axes, strides):
        rest = range(outer + 1, ndim)
        solid = axis.step == 1 and all(axes[a].count == extent[a] for a in rest)
        passes = axis.step * stride * size > width and axis.count > 1
        if solid or (not passes and axis.count > 1) or len(offsets) * axis.count > _STRETCHES_MAX:
            break
        steps = (axis.first + axis.step * np.arange(axis.count, dtype=np.int64)) * stride
        offsets = (offsets[:, None] + steps).reshape(-1)
        outer += 1
    inner = range(outer, ndim)
    begin = sum(axes[a].first * strides[a] for a in inner)
    length = sum((axes[a].count - 1) * axes[a].step * strides[a] for a in inner) + 1
    low = (offsets + begin) * size // width
    high = ((offsets + begin + length) * size - 1) // width
    span = int((high - low).max()) + 1
    return np.unique(np.minimum(low[:, None] + np.arange(span), high[:, None]))


# -- the result ---------------------------------------------------------------------------------


def assemble(
    index: Index, box: Box, rows: Mapping[int, NDArray[np.int64]], chunks: Mapping[int, Array]
) -> Array:
    """What the box reads, from raw bytes of chunks; `Box.local` is still to be applied."""
    tree = index.tree
    dtype = tree.dtype(box.tensor)
    made = empty_array(dtype, [axis.count for axis in box.axes])
    for region in rows:
        origin, extent = tree.box(region)
        axes, at = _meet(box, origin, extent)
        copy_box(index, region, axes, made[at] if at else made, chunks)
    return made


def copy_box(
    index: Index, region: int, axes: Sequence[Axis], out: Array, chunks: Mapping[int, Array]
) -> None:
    """The elements of a region at `axes`, which are relative to it, into an array of its dtype."""
    tree = index.tree
    dtype = tree.dtype(int(tree.region_tensors[region]))
    first, extent = int(tree.region_chunk_starts[region]), tree.box(region)[1]
    source = _Region(dtype, first, int(tree.chunk_raw[first]), chunks)
    if dtype.bits < 8:
        # A row may end inside a byte, and strings are found by offsets: the region as a whole.
        whole = source.bytes(0, int(tree.region_nbytes[region]))
        out[...] = parse_array(whole, dtype, extent)[tuple(axis.index for axis in axes)]
    else:
        _fill(source, out, extent, axes, 0)


@dataclass(frozen=True, slots=True)
class _Region:
    """The bytes of a region, of which some chunks are there."""

    dtype: Dtype
    first: int
    width: int
    chunks: Mapping[int, Array]

    def bytes(self, begin: int, nbytes: int) -> NDArray[np.uint8]:
        """[begin, begin + nbytes); what lies in other chunks is undefined, and touches no memory."""
        made = np.empty(nbytes, np.uint8)
        for number in range(begin // self.width, -(-(begin + nbytes) // self.width)):
            chunk = self.chunks.get(self.first + number)
            if chunk is not None:
                start = number * self.width - begin
                part = chunk[max(-start, 0) : nbytes - start]
                made[max(start, 0) : max(start, 0) + len(part)] = part
        return made


def _fill(
    source: _Region, out: Array, extent: Sequence[int], axes: Sequence[Axis], begin: int
) -> None:
    """Fill `out` with the elements at `axes` of a C-order array of `extent` that begins at a byte."""
    nbytes = math.prod(extent) * (source.dtype.bits // 8)
    if nbytes <= _BLOCK_NBYTES or not extent:
        block = parse_array(source.bytes(begin, nbytes), source.dtype, extent)
        out[...] = block[tuple(axis.index for axis in axes)]
        return
    axis, slab = axes[0], nbytes // extent[0]
    if slab > _BLOCK_NBYTES:
        for number in range(axis.count):
            at = begin + (axis.first + number * axis.step) * slab
            _fill(source, out[number], extent[1:], axes[1:], at)
        return
    count = (_BLOCK_NBYTES // slab - 1) // axis.step + 1
    for number in range(0, axis.count, count):
        rows = Axis(0, min(count, axis.count - number), axis.step)
        reach = (rows.count - 1) * rows.step + 1
        at = begin + (axis.first + number * axis.step) * slab
        part = out[number : number + rows.count]
        _fill(source, part, (reach, *extent[1:]), (rows, *axes[1:]), at)
