"""Any basic index of any tensor gives what NumPy gives, from no more chunks than it needs."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.engine import box as box_module
from ckptfmt.format.boxes import are_inside, are_tiled
from ckptfmt.testing import difference

DTYPES = [np.int16, np.float64, ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint2, np.bool_]


def slices(length: int) -> st.SearchStrategy[slice]:
    bound = st.none() | st.integers(-length - 2, length + 2)
    step = st.none() | st.integers(-4, 4).filter(bool) | st.sampled_from([-length - 1, 7, 50])
    return st.builds(slice, bound, bound, step.filter(lambda s: s != 0))


@st.composite
def parts(draw: st.DrawFn) -> tuple[Any, Any]:
    """A tensor of several chunks, and an index of it."""
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    if shape:
        shape[draw(st.integers(0, len(shape) - 1))] *= draw(st.sampled_from([1, 40, 700]))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    count = int(np.prod(shape))
    array = (np.arange(count) % 4 % 2).astype(np.int8).astype(dtype)
    if dtype.itemsize > 1:
        array = np.arange(count).astype(dtype)
    array = array.reshape(shape)
    items: list[Any] = []
    for length in shape[: draw(st.integers(0, len(shape)))]:
        items.append(draw(slices(length) | st.integers(-length, length - 1)))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), ...)
        tail = len(items) - 1 - items.index(...)
        for position in range(tail):  # those behind the Ellipsis are of the last axes
            length = shape[len(shape) - tail + position]
            items[-tail + position] = draw(slices(length) | st.integers(-length, length - 1))
    return array, tuple(items)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, stretches and regions so small that every way of putting a box together is taken."""
    monkeypatch.setattr(box_module, "_BLOCK_NBYTES", 600)
    monkeypatch.setattr(box_module, "_STRETCHES_MAX", 50)
    module = importlib.import_module("ckptfmt.engine.save")
    monkeypatch.setattr(module, "FILE_NBYTES_TARGET_REMOTE", 9000)


@settings(max_examples=150)
@given(parts(), st.booleans())
def test_a_part_is_what_numpy_gives(drawn: tuple[Any, Any], in_regions: bool) -> None:
    array, index = drawn
    store = ckptfmt.Store("memory://", storage_options={"late_key": not in_regions})
    codec = "zstd" if in_regions else "raw"
    ckptfmt.save({"a": array}, store, chunk_nbytes=4096, codec=codec, durable=False)
    found = store.open()["a"].read(index)
    assert not difference(np.asarray(found), np.asarray(array[index]))


@settings(max_examples=100)
@given(parts())
def test_no_chunk_is_read_that_no_element_lies_in(drawn: tuple[Any, Any]) -> None:
    array, index = drawn
    if array.dtype in (ml_dtypes.int4, ml_dtypes.uint2):
        return  # packed by region: all of it is needed
    store = ckptfmt.Store("memory://")
    ckptfmt.save({"a": array}, store, chunk_nbytes=4096, durable=False)
    document = store.open().index
    settled = box_module.settle(document, 0, index, "a")
    found = box_module.chunks_of(document, settled)
    positions = np.arange(array.size).reshape(array.shape)[index]
    needed = set((np.asarray(positions).reshape(-1) * array.dtype.itemsize // 4096).tolist())
    read = set(found[0].tolist()) if found else set()
    assert needed <= read
    if np.size(positions) <= 50:  # beyond _STRETCHES_MAX what lies between may be read
        assert read == needed


BOXES = st.integers(1, 3).flatmap(
    lambda ndim: st.lists(st.integers(1, 6), min_size=ndim, max_size=ndim)
)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """A shape, cut again and again."""
    shape = draw(BOXES)
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(boxes) - 1))
        axis = draw(st.integers(0, len(shape) - 1))
        origin, extent = boxes[at]
        if extent[axis] < 2:
            continue
        cut = draw(st.integers(1, extent[axis] - 1))
        left = (origin, [cut if a == axis else n for a, n in enumerate(extent)])
        right = (
            [o + cut if a == axis else o for a, o in enumerate(origin)],
            [n - cut if a == axis else n for a, n in enumerate(extent)],
        )
        boxes[at : at + 1] = [left, right]
    return shape, boxes


def tile(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> bool:
    ndim = np.full(len(boxes), len(shape), np.uint8)
    origins = np.array([o for o, _ in boxes], np.uint64).reshape(-1)
    extents = np.array([e for _, e in boxes], np.uint64).reshape(-1)
    dims = np.array(shape * len(boxes), np.uint64)
    if not are_inside(origins, extents, dims).all():
        return False
    return bool(are_tiled(ndim, origins, extents, dims, np.zeros(1, np.int64))[0])


def covers_once(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> bool:
    count = np.zeros(shape, int)
    for origin, extent in boxes:
        if any(o + n > d for o, n, d in zip(origin, extent, shape)):
            return False
        count[tuple(slice(o, o + n) for o, n in zip(origin, extent))] += 1
    return bool((count == 1).all())


@given(tilings())
def test_boxes_cut_from_a_whole_tile_it(drawn: tuple[Any, Any]) -> None:
    shape, boxes = drawn
    assert tile(shape, boxes)


@given(tilings(), st.data())
def test_boxes_tile_exactly_if_every_element_is_in_one(
    drawn: tuple[Any, Any], data: st.DataObject
) -> None:
    shape, boxes = drawn
    at = data.draw(st.integers(0, len(boxes) - 1))
    origin, extent = boxes[at]
    axis = data.draw(st.integers(0, len(shape) - 1))
    change = data.draw(st.sampled_from([-1, 1]))
    moved = [o + change if a == axis else o for a, o in enumerate(origin)]
    grown = [n + change if a == axis else n for a, n in enumerate(extent)]
    if data.draw(st.booleans()):
        boxes[at] = (moved, extent)
    else:
        boxes[at] = (origin, grown)
    if data.draw(st.booleans()):
        boxes.append(data.draw(st.sampled_from(boxes)))
    if min(boxes[at][0]) < 0 or min(boxes[at][1]) < 1:
        return
    assert tile(shape, boxes) == covers_once(shape, boxes)
