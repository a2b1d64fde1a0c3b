"""Tensors made of others box by box are what NumPy makes of the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptfmt import MismatchError, UsageError
from ckptfmt.foreign import ForeignTensor, lazy
from ckptfmt.foreign.streaming import PackedStream, boxes_of
from ckptfmt.format import dtype_of

Array = NDArray[Any]


def foreign(array: Array, name: str = "x", reads: list[int] | None = None) -> ForeignTensor:
    """`array`, readable by boxes alone where `reads` counts the elements of each."""

    def box(sides: tuple[slice, ...]) -> Array:
        index: tuple[Any, ...] = (*sides, ...)
        made: Array = array[index]
        assert reads is not None
        reads.append(made.size)
        return made

    dtype = dtype_of(array.dtype).name
    return ForeignTensor(
        name, name, dtype, array.shape, array.nbytes, name, lambda: array, identity=id(array),
        box=None if reads is None else box,
    )  # fmt: skip


def values(*shape: int, dtype: Any = np.float32) -> Array:
    return np.arange(int(np.prod(shape)), dtype=np.float32).astype(dtype).reshape(shape)


CASES: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any], tuple[int, ...]]] = [
    ("transpose", lazy.permuted, lambda a: a.T, (3, 4, 5)),
    ("transpose of a number", lazy.permuted, lambda a: a.T, ()),
    ("permute", lambda t: lazy.permuted(t, (1, 2, 0)), lambda a: a.transpose(1, 2, 0), (3, 4, 5)),
    ("part", lambda t: lazy.part(t, 1, 1, 3), lambda a: a[:, 1:3], (3, 4, 5)),
    ("blocks", lambda t: lazy.blocks(t, -1, (2, 0, 1)),
     lambda a: np.concatenate([a[:, 4:], a[:, :2], a[:, 2:4]], 1), (3, 6)),
    ("reshape", lambda t: lazy.reshaped(t, (12, 5)), lambda a: a.reshape(12, 5), (3, 4, 5)),
    ("reshape apart", lambda t: lazy.reshaped(t, (3, 2, 2, -1)), lambda a: a.reshape(3, 2, 2, 5),
     (3, 4, 5)),
    ("reshape across", lambda t: lazy.reshaped(t, (10, 6)), lambda a: a.reshape(10, 6), (4, 3, 5)),
    ("reshape with ones", lambda t: lazy.reshaped(t, (1, 6, 1)), lambda a: a.reshape(1, 6, 1), (2, 3)),
    ("reshape of nothing", lambda t: lazy.reshaped(t, (0, 7)), lambda a: a.reshape(0, 7), (3, 0)),
    ("reshape and transpose", lambda t: lazy.permuted(lazy.reshaped(t, (3, 20))),
     lambda a: a.reshape(3, 20).T, (3, 4, 5)),
    ("transpose and reshape", lambda t: lazy.reshaped(lazy.permuted(t, (2, 0, 1)), (5, 12)),
     lambda a: a.transpose(2, 0, 1).reshape(5, 12), (3, 4, 5)),
    ("cast", lambda t: lazy.cast(t, "bfloat16"), lambda a: a.astype(ml_dtypes.bfloat16), (7, 3)),
    ("added", lambda t: lazy.added(t, t), lambda a: a + a, (7, 3)),
    ("filled", lambda t: lazy.filled(t, (2, 3), 1.0), lambda a: np.ones((2, 3), a.dtype), (4,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "expected", "shape"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_tensor_made_of_another_is_what_numpy_makes(
    op: Callable[[Any], Any], expected: Callable[[Any], Any], shape: tuple[int, ...]
) -> None:
    array = values(*shape)
    want = expected(array)
    for reads in (None, list[int]()):
        made = op(foreign(array, reads=reads))
        assert (made.shape, made.nbytes) == (want.shape, want.nbytes)
        got = made.fetch()
        assert got.dtype == want.dtype
        assert got.tobytes() == np.ascontiguousarray(want).tobytes()
        total = want.size
        for first, last in itertools.islice(
            itertools.combinations(range(total + 1), 2), 0, None, 7
        ):
            parts = [
                lazy.read_box(made, sides).reshape(-1)
                for sides in boxes_of(want.shape, first, last)
            ]
            assert np.concatenate(parts).tobytes() == want.reshape(-1)[first:last].tobytes()


def test_tensors_are_joined_across_their_borders() -> None:
    arrays = [values(2, 3), values(2, 0), values(2, 4) + 100]
    want = np.concatenate(arrays, 1)
    made = lazy.joined([foreign(a, reads=[]) for a in arrays], 1)
    assert made.fetch().tobytes() == want.tobytes()
    for start, stop in itertools.combinations(range(8), 2):
        box = (slice(0, 2), slice(start, stop))
        assert (lazy.read_box(made, box) == want[:, start:stop]).all()
    apart = lazy.split(made, 1, [3, 4], 2)
    assert apart[1].fetch().tobytes() == np.ascontiguousarray(arrays[2]).tobytes()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_reshape_reads_any_box(data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=5))

    def shape() -> tuple[int, ...]:
        order = data.draw(st.permutations(factors))
        cuts = data.draw(st.lists(st.booleans(), min_size=len(order) - 1, max_size=len(order) - 1))
        sides = [order[0]]
        for factor, cut in zip(order[1:], cuts):
            if cut:
                sides.append(factor)
            else:
                sides[-1] *= factor
        return tuple(sides)

    array, wanted = values(*shape()), shape()
    made = lazy.reshaped(foreign(array, reads=[]), wanted)
    ends = [sorted((data.draw(st.integers(0, n - 1)), n)) for n in wanted]
    box = tuple(slice(start, stop) for start, stop in ends)
    assert (lazy.read_box(made, box) == array.reshape(wanted)[box]).all()


def test_a_large_transposed_tensor_is_read_by_boxes() -> None:
    """Not more than a piece stands in memory, and no element is read twice."""
    array, reads = values(4096, 1024), list[int]()
    made = lazy.permuted(foreign(array, reads=reads))
    stream = PackedStream(made.shape, dtype_of(array.dtype), made.box)  # type: ignore[arg-type]
    out = np.empty(array.nbytes, np.uint8)
    for start in range(0, len(out), 1 << 20):
        stream.fill(out[start : start + (1 << 20)], start)
    assert out.tobytes() == np.ascontiguousarray(array.T).tobytes()
    assert max(reads) <= 1 << 18
    assert sum(reads) == array.size


def test_the_bits_of_a_sum_with_zero_stay() -> None:
    odd = np.array([0x80000000, 0x7FC12345, 0xFFA00001, 0x3F800000], np.uint32).view(np.float32)
    zero = np.zeros(4, np.float32)
    for pair in ([odd, zero], [zero, odd]):
        made = lazy.added(*[foreign(a) for a in pair]).fetch()
        assert made.view(np.uint32)[1:].tolist() == odd.view(np.uint32)[1:].tolist()
    kept = lazy.added(foreign(odd), foreign(zero)).fetch()
    assert kept.view(np.uint32)[0] == 0x80000000


def test_a_tie_stays_where_both_are_treated_alike() -> None:
    array = values(2, 3)
    one, other = foreign(array, "a"), foreign(array, "b")
    assert lazy.permuted(one).identity == lazy.permuted(other).identity
    assert lazy.permuted(one).identity != one.identity
    assert lazy.part(one, 0, 0, 1).identity != lazy.part(other, 0, 1, 2).identity


@pytest.mark.parametrize(
    ("op", "match"),
    [
        (lambda t: lazy.permuted(t, (0, 0)), "axes of a rule"),
        (lambda t: lazy.permuted(t, (0, 1, 2)), "axes of a rule"),
        (lambda t: lazy.part(t, 2, 0, 1), "axis that a tensor has not"),
        (lambda t: lazy.split(t, 1, None, 2), "cannot be split"),
        (lambda t: lazy.split(t, 1, [1, 1], 2), "cannot be split"),
        (lambda t: lazy.blocks(t, 1, (0, 2, 2)), "does not name each block once"),
        (lambda t: lazy.reshaped(t, (4, -1)), "another number of elements"),
        (lambda t: lazy.reshaped(t, (-1, -1)), "another number of elements"),
        (lambda t: lazy.joined([t, foreign(values(3, 3))], 1), "do not fit"),
        (lambda t: lazy.joined([t, foreign(values(2, 3).astype("f8"))], 1), "do not fit"),
        (lambda t: lazy.added(t, foreign(values(2))), "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_read(
    op: Callable[[Any], Any], match: str
) -> None:
    reads: list[int] = []
    with pytest.raises(UsageError, match=match):
        op(foreign(values(2, 3), reads=reads))
    assert not reads


def test_a_cast_that_would_overflow_is_an_error() -> None:
    big = foreign(np.array([1e30], np.float32))
    with pytest.raises(MismatchError, match="overflow"):
        lazy.cast(big, "float16").fetch()
    with pytest.raises(MismatchError, match="do not convert"):
        lazy.cast(foreign(np.array(["a"])), "float16")


@pytest.mark.parametrize("tile", [1, 3, 4, 256])
def test_tiles_of_any_layout_make_the_whole_in_c_order(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy, "_TILE", tile)
    shapes = [(300, 400), (512, 256), (7, 5), (5, 1, 9), (3, 4, 5), (2, 3, 4, 6), (1, 1), (64,)]
    for shape in shapes:
        array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
        for order in itertools.permutations(range(len(shape))):
            for view in (array.transpose(order), array[::-1].transpose(order)):
                assert np.array_equal(lazy._in_c_order(view), view)
