"""Boxes of a stored tensor: which chunks a NumPy index touches, and the array it gives. Spec: 07."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptfmt.errors import UsageError
from ckptfmt.format import Index, empty_array, parse_array

BoxIndex: TypeAlias = "int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]"
Array = NDArray[Any]

_STRETCHES_MAX = 1 << 20
"""More stretches than that: everything between the first and the last is read."""


@dataclass(frozen=True, slots=True)
class Box:
    """A basic index, settled for a shape.

    Attributes:
        tensor: Row.
        begins, ends: The bounding box, per axis.
        local: The index that takes the result out of the bounding box.
    """

    tensor: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    local: tuple[Any, ...]


def settle(index: Index, tensor: int, region: object, name: str) -> Box:
    """Settle ints, slices and an Ellipsis; anything else is applied to the whole tensor."""
    shape = index.tree.shape(tensor)
    items = region if isinstance(region, tuple) else (region,)
    whole = Box(tensor, (0,) * len(shape), shape, items)
    if not all(isinstance(item, int | slice | np.integer | EllipsisType) for item in items) or any(
        isinstance(item, bool) for item in items
    ):
        return whole
    expanded = _expand(items, len(shape), name)
    begins: list[int] = []
    ends: list[int] = []
    local: list[int | slice] = []
    for axis, (item, length) in enumerate(zip(expanded, shape)):
        if isinstance(item, slice):
            positions = range(*item.indices(length))
            low = min(positions[0], positions[-1]) if positions else 0
            high = max(positions[0], positions[-1]) + 1 if positions else 0
            begins.append(low)
            ends.append(high)
            local.append(_local(positions, low) if positions else slice(0, 0))
        else:
            position = int(item) + (length if item < 0 else 0)
            if not 0 <= position < length:
                raise UsageError(
                    "index is out of range",
                    reason="region",
                    where=f"{name!r}, axis {axis}",
                    expected=f"-{length} to {length - 1}",
                    found=int(item),
                    do="check the tensor's shape",
                )
            begins.append(position)
            ends.append(position + 1)
            local.append(0)
    return Box(tensor, tuple(begins), tuple(ends), tuple(local))


def _local(positions: range, low: int) -> slice:
    start, step = positions[0] - low, positions.step
    stop: int | None = start + step * len(positions)
    return slice(start, None if stop is not None and stop < 0 else stop, step)


def _expand(items: Sequence[Any], ndim: int, name: str) -> list[Any]:
    dots = [p for p, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or len(items) - len(dots) > ndim:
        raise UsageError(
            "index has too many axes",
            reason="region",
            where=repr(name),
            expected=f"at most {ndim}",
            found=len(items),
            do="check the tensor's shape",
        )
    at = dots[0] if dots else len(items)
    rest = items[at + 1 :] if dots else ()
    fill = ndim - at - len(rest)
    return [*items[:at], *([slice(None)] * fill), *rest]


def chunks_of(index: Index, box: Box) -> dict[int, NDArray[np.int64]]:
    """Region row -> the chunk rows that the box touches in it."""
    tree = index.tree
    made: dict[int, NDArray[np.int64]] = {}
    first, last = (int(x) for x in tree.tensor_region_starts[box.tensor : box.tensor + 2])
    dtype = tree.dtype(box.tensor)
    for region in range(first, last):
        origin, extent = tree.box(region)
        meet = _meet(box, origin, extent)
        if meet is None:
            continue
        a, b = (int(x) for x in tree.region_chunk_starts[region : region + 2])
        if dtype.bits < 8 or b - a == 1:
            made[region] = np.arange(a, b)
            continue
        begins, ends = meet
        offsets, length = _stretches(extent, begins, ends)
        size, width = dtype.bits // 8, int(tree.chunk_raw[a])
        low, high = offsets * size // width, ((offsets + length) * size - 1) // width
        span = int((high - low).max()) + 1
        touched = np.unique(np.minimum(low[:, None] + np.arange(span), high[:, None]))
        made[region] = a + touched
    return made


def _meet(
    box: Box, origin: Sequence[int], extent: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The part of the box inside a region, in the region's own coordinates."""
    begins = tuple(max(b - o, 0) for b, o in zip(box.begins, origin))
    ends = tuple(min(e - o, n) for e, o, n in zip(box.ends, origin, extent))
    if any(b >= e for b, e in zip(begins, ends)):
        return None
    return begins, ends


def _stretches(
    extent: Sequence[int], begins: Sequence[int], ends: Sequence[int]
) -> tuple[NDArray[np.int64], int]:
    """Element offsets of the box's contiguous stretches in C order, and their common length."""
    ndim = len(extent)
    strides = [math.prod(extent[axis + 1 :]) for axis in range(ndim)]
    inner = ndim
    while inner and (begins[inner - 1], ends[inner - 1]) == (0, extent[inner - 1]):
        inner -= 1
    inner = max(inner - 1, 0)
    length = (ends[inner] - begins[inner]) * strides[inner] if ndim else 1
    outer = math.prod(ends[a] - begins[a] for a in range(inner))
    if outer > _STRETCHES_MAX:
        low = sum(b * s for b, s in zip(begins, strides))
        high = sum((e - 1) * s for e, s in zip(ends, strides)) + 1
        return np.array([low], np.int64), high - low
    offsets = np.zeros(1, np.int64)
    for axis in range(inner):
        steps = np.arange(begins[axis], ends[axis], dtype=np.int64) * strides[axis]
        offsets = (offsets[:, None] + steps).reshape(-1)
    return offsets + (begins[inner] * strides[inner] if ndim else 0), length


def assemble(
    index: Index, box: Box, rows: Mapping[int, NDArray[np.int64]], chunks: Mapping[int, Array]
) -> Array:
    """The box's array from raw chunk bytes."""
    tree = index.tree
    dtype = tree.dtype(box.tensor)
    made = empty_array(dtype, [e - b for b, e in zip(box.begins, box.ends)])
    for region, touched in rows.items():
        origin, extent = tree.box(region)
        meet = _meet(box, origin, extent)
        assert meet is not None
        begins, ends = meet
        at = tuple(
            slice(b + o - x, e + o - x) for b, e, o, x in zip(begins, ends, origin, box.begins)
        )
        made[at] = _region_part(index, region, (begins, ends), touched, chunks)
    return made[box.local] if box.local else made


def _region_part(
    index: Index,
    region: int,
    part: tuple[tuple[int, ...], tuple[int, ...]],
    touched: NDArray[np.int64],
    chunks: Mapping[int, Array],
) -> Array:
    tree = index.tree
    tensor = int(tree.region_tensors[region])
    dtype, (_, extent) = tree.dtype(tensor), tree.box(region)
    begins, ends = part
    take = tuple(slice(b, e) for b, e in zip(begins, ends))
    first = int(tree.region_chunk_starts[region])
    width = int(tree.chunk_raw[first])
    # Pages of the buffer that no touched chunk fills are never written, nor read.
    buffer = np.empty(int(tree.region_nbytes[region]), np.uint8)
    for row in touched.tolist():
        start = (row - first) * width
        buffer[start : start + len(chunks[row])] = chunks[row]
    return parse_array(buffer, dtype, extent)[take]
