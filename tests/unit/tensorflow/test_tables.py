"""Mutable lookup tables come back with their content, whatever the target held before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf

Hash = tf.lookup.experimental.MutableHashTable
Dense = tf.lookup.experimental.DenseHashTable


def words(*pairs: tuple[str, int]) -> Any:
    table = Hash(tf.string, tf.int64, -1)
    if pairs:
        table.insert([key for key, _ in pairs], tf.constant([v for _, v in pairs], tf.int64))
    return table


def rows() -> Any:
    return Dense(tf.int64, tf.float32, [0.0, 0.0], empty_key=-1, deleted_key=-2)


def content(table: Any) -> dict[Any, Any]:
    """What a table has; a dense one exports its unused places too."""
    keys, values = (part.numpy() for part in table.export())
    if isinstance(table, Dense):
        used = ~np.isin(keys, [-1, -2]).all(axis=1)
        keys, values = keys[used, 0], values[used]
    return dict(zip(keys.tolist(), values.tolist()))


def test_a_table_is_replaced_whole_and_stays_the_same_object(tmp_path: Path) -> None:
    ckf.save({"t": words(("b", 1), ("a", 2))}, tmp_path)
    target = words(("old", 9))
    status = ckf.restore({"t": target}, tmp_path)
    status.assert_consumed()
    assert content(target) == {b"a": 2, b"b": 1}
    assert target.lookup(tf.constant(["a", "old"])).numpy().tolist() == [2, -1]


def test_keys_and_values_are_tensors_that_numpy_reads_in_the_order_of_the_keys(
    tmp_path: Path,
) -> None:
    ckf.save({"t": words(("b", 1), ("a", 2))}, tmp_path)
    loaded = ckptfmt.load(tmp_path)["t"]
    assert loaded["keys"].tolist() == [b"a", b"b"]
    assert loaded["values"].tolist() == [2, 1]


def test_equal_tables_that_grew_in_another_order_have_equal_bytes(tmp_path: Path) -> None:
    one, other = words(("b", 1), ("a", 2), ("c", 3)), words(("c", 3), ("b", 1), ("a", 2))
    assert (
        ckf.save({"t": one}, tmp_path / "1").digest == ckf.save({"t": other}, tmp_path / "2").digest
    )


def test_a_dense_table_in_a_module_with_rows_as_values(tmp_path: Path) -> None:
    module, other = tf.Module(), tf.Module()
    module.table, other.table = rows(), rows()
    module.w, other.w = tf.Variable(1.0), tf.Variable(0.0)
    module.table.insert(tf.constant([5, 3], tf.int64), [[1.0, 2.0], [3.0, 4.0]])
    module.table.erase(tf.constant([5], tf.int64))
    ckf.save({"m": module}, tmp_path)
    assert ckptfmt.open(tmp_path).names() == ["m/w", "m/table/keys", "m/table/values"]
    ckf.restore({"m": other}, tmp_path).assert_consumed()
    assert content(other.table) == {3: [3.0, 4.0]}
    assert float(other.w) == 1.0


@pytest.mark.parametrize("make", [words, rows])
def test_an_empty_table_empties_the_target(tmp_path: Path, make: Callable[[], Any]) -> None:
    target = make()
    full = words(("a", 1)) if make is words else rows()
    if make is rows:
        full.insert(tf.constant([1], tf.int64), [[1.0, 2.0]])
    ckf.save({"t": make()}, tmp_path)
    ckf.restore({"t": full}, tmp_path)
    assert content(full) == content(target) == {}


def test_keys_that_are_rows_of_text(tmp_path: Path) -> None:
    def make() -> Any:
        return Dense(tf.string, tf.int64, -1, empty_key=["", ""], deleted_key=["x", "x"])

    saved, fresh = make(), make()
    keys = tf.constant([["b", "2"], ["a", "9"], ["a", "1"]])
    saved.insert(keys, tf.constant([1, 2, 3], tf.int64))
    ckf.save({"t": saved}, tmp_path)
    assert ckptfmt.load(tmp_path)["t"]["keys"].tolist() == [
        [b"a", b"1"],
        [b"a", b"9"],
        [b"b", b"2"],
    ]
    ckf.restore({"t": fresh}, tmp_path)
    assert fresh.lookup(keys).numpy().tolist() == [1, 2, 3]


def test_a_table_of_other_types_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    ckf.save({"t": words(("a", 2)), "v": tf.Variable(1.0)}, tmp_path)
    target, variable = Hash(tf.int64, tf.int64, -1), tf.Variable(5.0)
    target.insert(tf.constant([7], tf.int64), tf.constant([8], tf.int64))
    with pytest.raises(ckptfmt.MismatchError, match=r"t/keys.*int64.*bytes"):
        ckf.restore({"t": target, "v": variable}, tmp_path)
    assert content(target) == {7: 8}
    assert float(variable) == 5.0


def test_a_table_gets_its_old_content_back_if_the_restore_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tf.Module()
    good.table, good.w = words(("a", 2)), tf.Variable(1.0)
    ckf.save({"m": good}, tmp_path)
    bad = tf.Module()
    bad.table, bad.w = words(("old", 1)), tf.Variable(0.0)

    calls: list[Any] = []

    def fail_at_first(value: Any) -> None:
        calls.append(value)
        if len(calls) == 1:
            raise RuntimeError("no")

    monkeypatch.setattr(bad.w, "assign", fail_at_first)
    with pytest.raises(RuntimeError, match="no"):
        ckf.restore({"m": bad}, tmp_path)
    assert content(bad.table) == {b"old": 1}


def test_a_constant_table_is_no_state(tmp_path: Path) -> None:
    module = tf.Module()
    init = tf.lookup.KeyValueTensorInitializer(["a"], np.array([1], np.int64))
    module.table = tf.lookup.StaticHashTable(init, -1)
    module.w = tf.Variable(1.0)
    ckf.save({"m": module}, tmp_path)
    assert ckptfmt.open(tmp_path).names() == ["m/w"]


def test_a_table_that_comes_after_the_restore_is_filled_when_it_comes(tmp_path: Path) -> None:
    saved, late = tf.Module(), tf.Module()
    saved.table = words(("a", 2), ("b", 1))
    ckf.save({"m": saved}, tmp_path)
    status = ckf.restore({"m": late}, tmp_path)
    assert list(status.pending) == ["m/table/keys", "m/table/values"]
    late.table = words()
    assert content(late.table) == {b"a": 2, b"b": 1}
    status.assert_consumed()


def test_a_table_that_a_layer_makes_when_it_is_built_is_filled_then(tmp_path: Path) -> None:
    class Counting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.w = self.add_weight(shape=(1,))
            self.table = words()

    saved, late = (keras.Sequential([Counting(name="c")]) for _ in range(2))
    saved.layers[0].build((1,))
    saved.layers[0].table.insert(["a"], tf.constant([2], tf.int64))
    ckf.save({"m": saved}, tmp_path)
    status = ckf.restore({"m": late}, tmp_path)
    late.layers[0].build((1,))
    assert content(late.layers[0].table) == {b"a": 2}
    status.assert_consumed()


def test_entries_that_a_table_does_not_take_leave_it_as_it_was(tmp_path: Path) -> None:
    table = Hash(tf.int64, tf.float32, [0.0, 0.0])
    table.insert(tf.constant([-1, 3], tf.int64), [[1.0, 2.0], [3.0, 4.0]])
    ckf.save({"t": table}, tmp_path)
    target = rows()  # -1 is its empty key
    target.insert(tf.constant([7], tf.int64), [[5.0, 6.0]])
    with pytest.raises(ckptfmt.MismatchError, match="a table did not take the stored entries: t"):
        ckf.restore({"t": target}, tmp_path)
    assert content(target) == {7: [5.0, 6.0]}


def test_a_table_under_two_names_is_stored_once(tmp_path: Path) -> None:
    table = words(("a", 2))
    ckf.save({"x": table, "y": table}, tmp_path)
    with ckptfmt.open(tmp_path) as checkpoint:
        assert checkpoint.ties() == [["x/keys", "y/keys"], ["x/values", "y/values"]]
    target = words()
    ckf.restore({"x": target, "y": target}, tmp_path).assert_consumed()
    assert content(target) == {b"a": 2}


def test_one_table_with_two_stored_contents_is_refused(tmp_path: Path) -> None:
    ckf.save({"x": words(("a", 2)), "y": words(("b", 3))}, tmp_path)
    target = words(("old", 1))
    with pytest.raises(ckptfmt.MismatchError, match="found two stored values"):
        ckf.restore({"x": target, "y": target}, tmp_path)
    assert content(target) == {b"old": 1}


@pytest.mark.parametrize("saved_by", ["shortest", "other"])
def test_a_table_is_found_by_any_path_that_it_had(tmp_path: Path, saved_by: str) -> None:
    both, one = tf.Module(), tf.Module()
    both.table = words(("a", 2))
    both.below = {"x": [both.table]}
    one.below = {"x": [words(("a", 2))]}
    first, second = (both, one) if saved_by == "shortest" else (one, both)
    ckf.save({"m": first}, tmp_path)
    table = second.below["x"][0]
    table.insert(["z"], tf.constant([9], tf.int64))
    ckf.restore({"m": second}, tmp_path).assert_consumed()
    assert content(table) == {b"a": 2}


def test_a_part_of_a_table_is_no_selection(tmp_path: Path) -> None:
    ckf.save({"t": words(("a", 2))}, tmp_path)
    with pytest.raises(ckptfmt.MismatchError, match="t: expected all of its parts in names="):
        ckf.restore({"t": words()}, tmp_path, names="t/keys")
