"""Ragged and sparse tensors and indexed slices are stored as their parts and come back whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt.tensorflow import composites


def ragged(rows: Any = (((1, 2), ()), ((3,),))) -> Any:
    return tf.ragged.constant([[list(inner) for inner in row] for row in rows], tf.int32)


def sparse(values: tuple[float, ...] = (1.0, 2.0)) -> Any:
    indices = [[i, 2 - i] for i in range(len(values))]
    return tf.SparseTensor(tf.constant(indices, tf.int64), tf.constant(values), [3, 4])


def slices(values: tuple[float, ...] = (1.0, 2.0), *, shaped: bool = True) -> Any:
    rows = tf.constant([[value, -value] for value in values])
    shape = tf.constant([5, 2]) if shaped else None
    return tf.IndexedSlices(rows, tf.range(len(values)), shape)


def parts(obj: Any) -> list[Any]:
    flat = tf.nest.flatten(obj, expand_composites=True)
    return [type(obj), *(item.numpy().tolist() for item in flat)]


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "ragged": (ragged, lambda: ragged((((),), ((9, 9, 9), (1,), (2,))))),
    "ragged-rows-of-vectors": (
        lambda: tf.RaggedTensor.from_row_lengths(tf.ones([3, 2]), [1, 2]),
        lambda: tf.RaggedTensor.from_row_lengths(tf.zeros([0, 2]), [0, 0]),
    ),
    "sparse": (sparse, lambda: sparse((5.0,))),
    "sparse-empty": (lambda: tf.sparse.from_dense(tf.zeros([3, 4])), sparse),
    "slices": (slices, lambda: slices((3.0,))),
    "slices-unshaped": (lambda: slices(shaped=False), lambda: slices((3.0,), shaped=False)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_composite_comes_back_by_load_by_like_and_by_restore(tmp_path: Path, case: str) -> None:
    make, other = CASES[case]
    ckf.save({"x": make(), "in": [make()]}, tmp_path)
    expected = parts(make())
    assert parts(ckf.load(tmp_path)["x"]) == expected
    assert parts(ckf.load(tmp_path, like={"x": other(), "in": [other()]})["in"][0]) == expected
    target = {"x": other(), "in": [other()]}
    ckf.restore(target, tmp_path).assert_consumed()
    assert parts(target["x"]) == parts(target["in"][0]) == expected


def test_other_readers_get_the_parts(tmp_path: Path) -> None:
    ckf.save({"x": ragged(), "s": sparse()}, tmp_path)
    tree = ckptfmt.load(tmp_path)
    assert {key: value.tolist() for key, value in tree["x"].items()} == {
        "values": [1, 2, 3],
        "row_splits_0": [0, 2, 3],
        "row_splits_1": [0, 2, 2, 3],
    }
    assert tree["s"]["dense_shape"] == [3, 4]


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (sparse, "x: expected a sparse tensor, found a ragged tensor"),
        (lambda: ragged((((1,),), (), ())), r"x/row_splits_0: expected \[4\], found \[3\]"),
        (lambda: tf.cast(ragged(), tf.int64), "x/values: expected int64, found int32"),
        (lambda: tf.ragged.constant([[1], []]), "x/row_splits_1"),
        (lambda: tf.constant(1), "x"),
    ],
)
def test_another_kind_shape_or_dtype_is_refused_and_the_target_stays(
    tmp_path: Path, target: Callable[[], Any], found: str
) -> None:
    ckf.save({"x": ragged(), "v": tf.Variable(1.0)}, tmp_path)
    held = {"x": target(), "v": tf.Variable(3.0)}
    before = held["x"]
    with pytest.raises(ckptfmt.MismatchError, match=found):
        ckf.restore(held, tmp_path)
    assert held["x"] is before
    assert float(held["v"]) == 3.0


def test_a_sparse_shape_is_compared(tmp_path: Path) -> None:
    ckf.save({"x": sparse()}, tmp_path)
    other = tf.SparseTensor(tf.zeros([0, 2], tf.int64), tf.zeros([0]), [3, 5])
    with pytest.raises(ckptfmt.MismatchError, match=r"x: expected \[3, 5\], found \[3, 4\]"):
        ckf.restore({"x": other}, tmp_path)


@pytest.mark.parametrize(
    ("make", "part", "value"),
    [
        (ragged, "row_splits_1", np.array([0, 9, 9, 3])),
        (ragged, "row_splits_0", np.array([0, 2, 7])),
        (sparse, "indices", np.array([[0, 2], [9, 9]])),
        (slices, "indices", np.array([0, -1], np.int32)),
    ],
)
def test_parts_that_make_no_tensor_are_refused_and_the_rest_is_rolled_back(
    tmp_path: Path,
    make: Callable[[], Any],
    part: str,
    value: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = composites.split

    def damaged(obj: Any) -> dict[str, Any]:
        return {**whole(obj), part: tf.constant(value)}

    with monkeypatch.context() as patch:
        patch.setattr(composites, "split", damaged)
        ckf.save({"v": tf.Variable(1.0), "x": make()}, tmp_path)
    variable, held = tf.Variable(3.0), make()
    target = {"v": variable, "x": held}
    with pytest.raises(ckptfmt.CorruptError, match=r"the stored parts make no \w+ tensor: x"):
        ckf.restore(target, tmp_path)
    with pytest.raises(ckptfmt.CorruptError, match=r"the stored parts make no \w+ tensor: x"):
        ckf.load(tmp_path)
    assert target["x"] is held
    assert float(variable) == 3.0


def test_a_part_of_a_composite_is_no_selection(tmp_path: Path) -> None:
    ckf.save({"x": sparse()}, tmp_path)
    with pytest.raises(ckptfmt.MismatchError, match="x: expected all of its parts in names="):
        ckf.restore({"x": sparse((5.0,))}, tmp_path, names="x/values")


def test_a_tensor_array_is_refused_with_a_cure(tmp_path: Path) -> None:
    array = tf.TensorArray(tf.float32, 2).unstack([1.0, 2.0])
    with pytest.raises(ckptfmt.UsageError, match=r"TensorArray cannot be saved: t; save its stack"):
        ckf.save({"t": array}, tmp_path)
