"""Products of dims and tilings, against brute force. Spec: 07-index §7.6 (M07-19, M07-21)."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import CorruptError
from ckptfmt.format.boxes import are_inside, are_tiled, products

Box = tuple[tuple[int, ...], tuple[int, ...]]


def flat(rows: list[tuple[int, ...]]) -> Any:
    return np.array([x for row in rows for x in row], np.uint64)


def tiled(*tensors: tuple[tuple[int, ...], list[Box]]) -> list[bool]:
    """What `are_tiled` says of each tensor (dims, boxes)."""
    ndim = np.array([len(dims) for dims, boxes in tensors for _ in boxes], np.uint8)
    counts = [len(boxes) for _, boxes in tensors]
    first = np.cumsum([0, *counts])[:-1]
    made = are_tiled(
        ndim,
        flat([box[0] for _, boxes in tensors for box in boxes]),
        flat([box[1] for _, boxes in tensors for box in boxes]),
        flat([dims for dims, boxes in tensors for _ in boxes]),
        first,
    )
    answer: list[bool] = made.tolist()
    return answer


def covered_once(dims: tuple[int, ...], boxes: list[Box]) -> bool:
    """The truth, element by element."""
    cover = np.zeros(dims, int)
    for origin, extent in boxes:
        cover[tuple(slice(o, o + e) for o, e in zip(origin, extent))] += 1
    return bool((cover == 1).all())


@st.composite
def cut_tensor(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut by straight cuts, one box after another, in any number of axes."""
    dims = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    boxes: list[Box] = [((0,) * len(dims), dims)]
    for _ in range(draw(st.integers(0, 8))):
        row = draw(st.integers(0, len(boxes) - 1))
        axis = draw(st.integers(0, len(dims) - 1))
        origin, extent = boxes[row]
        if extent[axis] < 2:
            continue
        at = draw(st.integers(1, extent[axis] - 1))
        low, high = [*extent], [*extent]
        low[axis], high[axis] = at, extent[axis] - at
        moved = [*origin]
        moved[axis] += at
        boxes[row : row + 1] = [(origin, tuple(low)), (tuple(moved), tuple(high))]
    return dims, boxes


@given(cut_tensor())
def test_a_tensor_cut_into_boxes_is_tiled(tensor: tuple[tuple[int, ...], list[Box]]) -> None:
    dims, boxes = tensor
    assert covered_once(dims, boxes)
    assert tiled((dims, boxes), (dims, boxes[::-1])) == [True, True]


@settings(max_examples=300)
@given(cut_tensor(), st.data())
def test_boxes_that_were_changed_are_judged_as_element_by_element(
    tensor: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    dims, boxes = tensor
    boxes = [*boxes]
    for _ in range(data.draw(st.integers(1, 2))):
        row = data.draw(st.integers(0, len(boxes) - 1))
        match data.draw(st.sampled_from(["change", "drop", "double"])):
            case "change":
                origin = tuple(data.draw(st.integers(0, d - 1)) for d in dims)
                extent = tuple(data.draw(st.integers(1, d - o)) for d, o in zip(dims, origin))
                boxes[row] = (origin, extent)
            case "drop" if len(boxes) > 1:
                del boxes[row]
            case _:
                boxes.append(boxes[row])
    assert tiled((dims, boxes)) == [covered_once(dims, boxes)]


@settings(max_examples=50)
@given(st.lists(cut_tensor(), min_size=1, max_size=6), st.data())
def test_every_tensor_is_judged_by_its_own_boxes(
    tensors: list[tuple[tuple[int, ...], list[Box]]], data: st.DataObject
) -> None:
    expected = []
    for dims, boxes in tensors:
        if len(boxes) > 1 and data.draw(st.booleans()):
            boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        expected.append(covered_once(dims, boxes))
    assert tiled(*tensors) == expected


def test_all_pairs_of_boxes_in_a_square_are_judged_right() -> None:
    spans = [(o, e) for o in range(3) for e in range(1, 4 - o)]
    boxes: list[Box] = [((a, c), (b, d)) for (a, b), (c, d) in itertools.product(spans, spans)]
    pairs = [[*pair] for pair in itertools.combinations_with_replacement(boxes, 2)]
    found = tiled(*(((3, 3), pair) for pair in pairs))
    assert found == [covered_once((3, 3), pair) for pair in pairs]
    assert sum(found) == 4  # two cuts along each axis


@pytest.mark.parametrize("shape", [(100_000,), (316, 317), (46, 46, 47), (2,) * 14])
def test_tens_of_thousands_of_boxes_are_judged(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    origins = np.stack(np.unravel_index(np.arange(count), shape), axis=1).astype(np.uint64) * 5
    extents = np.full_like(origins, 5)
    dims = np.tile(np.array(shape, np.uint64) * 5, (count, 1))
    ndim, first = np.full(count, len(shape), np.uint8), np.array([0])

    def judge() -> bool:
        inside = are_inside(origins.ravel(), extents.ravel(), dims.ravel()).all()
        made = are_tiled(ndim, origins.ravel(), extents.ravel(), dims.ravel(), first)
        return bool(inside and made[0])

    assert judge()
    row = count // 3
    origins[row] = origins[row + 1]
    assert not judge()  # one box twice, another never: the volumes still fit
    origins[row] -= np.uint64(1)
    assert not judge()


def test_sixty_four_axes_are_judged() -> None:
    dims = (2,) * 62 + (1, 1)
    axis = 40
    low, high = [*dims], [*dims]
    low[axis] = high[axis] = 1
    origin = (0,) * 64
    moved = tuple(int(a == axis) for a in range(64))
    assert tiled((dims, [(origin, tuple(low)), (moved, tuple(high))])) == [True]
    assert tiled((dims, [(origin, tuple(low)), (origin, tuple(high))])) == [False]
    other = tuple(int(a == axis + 1) for a in range(64))
    assert tiled((dims, [(origin, tuple(low)), (other, tuple(high))])) == [False]


def test_a_tensor_of_no_axes_has_one_box() -> None:
    assert tiled(((), [((), ())]), ((), [((), ()), ((), ())])) == [True, False]


def test_coordinates_near_the_limit_are_judged() -> None:
    top = 2**63 - 1
    assert tiled(((top,), [((0,), (top - 1,)), ((top - 1,), (1,))])) == [True]
    assert tiled(((top,), [((0,), (top - 2,)), ((top - 1,), (1,))])) == [False]


def test_inside_is_judged_without_overflow() -> None:
    top = 2**64 - 1
    rows = [
        (0, 5, 5, True), (1, 5, 5, False), (4, 1, 5, True), (5, 1, 5, False), (0, 0, 5, False),
        (5, 0, 5, False), (top, 1, 5, False), (1, top, 5, False), (top, top, 5, False),
        (0, 1, 0, False), (2**63, 2**63, 5, False), (top - 1, 2, 5, False),
        (0, top, top, True), (1, top, top, False),
    ]  # fmt: skip
    columns = [np.array([row[i] for row in rows], np.uint64) for i in range(3)]
    assert are_inside(*columns).tolist() == [row[3] for row in rows]


DIM = st.one_of(
    st.integers(0, 9), st.integers(0, 2**63 - 1), st.sampled_from([0, 1, 2**31, 2**32, 2**62])
)


@settings(max_examples=300)
@given(st.lists(st.lists(DIM, max_size=6), max_size=6))
def test_products_are_exact_or_refused(rows: list[list[int]]) -> None:
    ndim, dims = np.array([len(r) for r in rows], np.uint8), flat([tuple(r) for r in rows])
    exact = [math.prod(row) for row in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            made = products(ndim, dims, "dims").tolist()
        except CorruptError as error:
            made = error.kind
    assert made == (exact if max(exact, default=0) < 2**63 else "corrupt-dims-overflow")


@pytest.mark.parametrize(
    ("row", "product"),
    [
        ([2**63 - 1] * 64, None),
        ([2**63 - 1] * 63 + [0], 0),
        ([0] + [2**63 - 1] * 63, 0),
        ([2**32, 2**32], None),
        ([2**31, 2**32], None),
        ([2**31, 2**31], 2**62),
        ([2**63 - 1], 2**63 - 1),
        ([2**63 - 1, 1, 1], 2**63 - 1),
        ([3, 2**62], None),
        ([7, 7, 73, 127, 337, 92737, 649657], 2**63 - 1),
        ([1] * 64, 1),
        ([2] * 62 + [1, 1], 2**62),
        ([2] * 63 + [1], None),
        ([2**63], None),
        ([0, 2**64 - 1], None),
    ],
)  # fmt: skip
def test_products_at_the_limit(row: list[int], product: int | None) -> None:
    ndim, dims = np.array([len(row)], np.uint8), np.array(row, np.uint64)
    if product is not None:
        assert products(ndim, dims, "dims").tolist() == [product]
        return
    with pytest.raises(CorruptError) as caught:
        products(ndim, dims, "dims")
    assert caught.value.kind == "corrupt-dims-overflow"


def test_more_than_64_dims_and_columns_of_other_lengths_are_refused() -> None:
    for ndim, nbytes, kind in ((65, 65, "corrupt-dims"), (255, 255, "corrupt-dims"),
                               (3, 2, "corrupt-column-length"), (3, 4, "corrupt-column-length"),
                               (0, 1, "corrupt-column-length")):  # fmt: skip
        with pytest.raises(CorruptError) as caught:
            products(np.array([ndim], np.uint8), np.ones(nbytes, np.uint64), "dims")
        assert caught.value.kind == kind
