"""Behaviours that TensorFlow's own checkpoint tests check: README.md beside this file lists them."""

from __future__ import annotations

import ast
import gc
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import MismatchError, NotFoundError, UsageError
from tests.unit.tensorflow.nets import Block, train_step

Node = tf.Module
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(0, 1, 16, dtype=np.float32).reshape(8, 2)


def node(**attributes: Any) -> Any:
    made: Any = Node()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def var(value: float = 0.0) -> tf.Variable:
    return tf.Variable(value)


def test_the_table_names_tests_that_exist() -> None:
    folder = Path(__file__).parent
    rows = (folder / "README.md").read_text().splitlines()
    named = [m for row in rows for m in re.findall(r"`(test_\w+)\.py::(test_\w+)`", row)]
    assert len(named) > 40
    there = {
        (module, n.name)
        for module in {module for module, _ in named}
        for n in ast.parse((folder / f"{module}.py").read_text()).body
        if isinstance(n, ast.FunctionDef)
    }
    assert set(named) - there == set()
    table = [row for row in rows if row.startswith("| `test")]
    assert len(table) > 50
    for row in table:
        assert re.search(r"::test_|out of scope: [\w`]+|differs: \w+", row), row


def test_a_dependency_that_is_added_late_with_its_variable(tmp_path: Path) -> None:
    ckf.save({"r": node(dep=node(var=var(123.0)))}, tmp_path, step=1)
    fresh = node()
    status = ckf.restore({"r": fresh}, tmp_path).assert_existing_objects_matched()
    with pytest.raises(MismatchError):
        status.assert_consumed()
    fresh.dep = node()
    fresh.dep.var = var()
    status.assert_consumed()
    assert float(fresh.dep.var) == 123.0


def test_a_dependency_that_is_added_when_it_has_its_variable(tmp_path: Path) -> None:
    ckf.save({"r": node(dep=node(var=var(-14.0)))}, tmp_path, step=1)
    fresh = node()
    status = ckf.restore({"r": fresh}, tmp_path)
    fresh.dep = node(var=var())
    status.assert_consumed()
    assert float(fresh.dep.var) == -14.0


def test_of_restores_that_overlap_the_last_to_meet_a_variable_wins(tmp_path: Path) -> None:
    for step in (12, 13):
        ckf.save({"r": node(dep=node(var=var(float(step))))}, tmp_path, step=step)
    first, second = node(), node()
    statuses = [
        ckf.restore({"r": root}, tmp_path, step=n) for root, n in ((first, 12), (second, 13))
    ]
    shared = node(var=var())
    first.dep = shared
    assert float(shared.var) == 12.0
    second.dep = shared
    assert float(shared.var) == 13.0
    for status in statuses:
        status.assert_consumed()


def test_one_stored_object_is_not_split_in_two_without_a_word(tmp_path: Path) -> None:
    shared = node(var=var(3.0))
    ckf.save({"r": node(one=node(three=shared), two=node(three=shared))}, tmp_path, step=1)
    fresh = node()
    status = ckf.restore({"r": fresh}, tmp_path)
    fresh.one, fresh.two = node(three=node()), node(three=node())
    fresh.one.three.var = var()
    fresh.two.three.var = var()
    with pytest.raises(MismatchError, match="r/two/three/var"):
        status.assert_existing_objects_matched()
    there = node(one=node(three=node(var=var())), two=node(three=node(var=var())))
    report = ckf.restore(
        {"r": there}, tmp_path
    ).report  # both exist: both are filled, and it says so
    assert list(report.ties) == ["r/two/three/var"]
    assert float(there.two.three.var) == 3.0


def test_two_stored_objects_go_into_one(tmp_path: Path) -> None:
    ckf.save({"r": node(one=node(a=var(32.0)), two=node(b=var(64.0)))}, tmp_path, step=1)
    both = node(a=var(), b=var())
    ckf.restore({"r": node(one=both, two=both)}, tmp_path).assert_consumed()
    assert (float(both.a), float(both.b)) == (32.0, 64.0)


def test_empty_containers_are_no_difference(tmp_path: Path) -> None:
    ckf.save({"r": node(a=[], v=var(1.0))}, tmp_path, step=1)
    fresh = node(b=[], c={"d": 1}, v=var())
    fresh.b.append([])
    ckf.restore({"r": fresh}, tmp_path).assert_consumed().assert_nontrivial_match()


def test_objects_that_lead_back_to_each_other(tmp_path: Path) -> None:
    def loop() -> tuple[Any, Any]:
        first, second = node(), node()
        first.second, second.first = second, first
        return first, second

    first, second = loop()
    first.v, second.v = tf.Variable([3.0, 1.0]), tf.Variable([1.0, 2.0, 3.0])
    ckf.save({"r": first}, tmp_path, step=1)
    late, other = node(), node()
    status = ckf.restore({"r": late}, tmp_path)
    late.second, other.first = other, late
    late.v, other.v = tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0, 0.0])
    status.assert_consumed()
    assert late.v.numpy().tolist() == [3.0, 1.0]
    late.v.assign([7.0, 7.0])
    ckf.restore({"r": late}, tmp_path).assert_consumed()
    assert late.v.numpy().tolist() == [3.0, 1.0]
    assert other.v.numpy().tolist() == [1.0, 2.0, 3.0]


def test_a_variable_beside_others_is_missed_at_once_not_later(tmp_path: Path) -> None:
    ckf.save({"r": node(one=var(4.0), two=var(8.0))}, tmp_path, step=1)
    partial = node(two=var())
    with pytest.raises(MismatchError, match="not in the target: r/one"):
        ckf.restore({"r": partial}, tmp_path)
    status = ckf.restore({"r": partial}, tmp_path, strict=False)
    assert (list(status.report.unexpected), float(partial.two)) == (["r/one"], 8.0)


def test_nodes_without_values_wait_for_nothing(tmp_path: Path) -> None:
    first = node(full=node(v=var(5.0)), empty=node(child=node()), v=var(1.0))
    ckf.save({"r": first}, tmp_path, step=1)
    fresh = node()
    status = ckf.restore({"r": fresh}, tmp_path)
    assert sorted(status.pending) == ["r/full/v", "r/v"]
    fresh.empty = node(child=node())
    assert len(status.pending) == 2
    fresh.full = node(v=var())
    fresh.v = var()
    status.assert_consumed()
    assert float(fresh.full.v) == 5.0


def test_a_deep_copy_has_its_own_variables_and_no_hooks(tmp_path: Path) -> None:
    import copy

    first = tf.train.Checkpoint(v=var(1.0))
    second = copy.deepcopy(first)
    second.v.assign(2.0)
    ckf.save({"c": second}, tmp_path, step=1)
    ckf.restore({"c": first}, tmp_path).assert_consumed()
    assert float(first.v) == 2.0
    waiting = tf.train.Checkpoint()
    status = ckf.restore({"c": waiting}, tmp_path)
    copied = copy.deepcopy(waiting)
    copied.v = var()
    assert (float(copied.v), list(status.pending)) == (0.0, ["c/v"])
    status.close()


def test_a_status_lives_longer_than_its_objects_and_lets_them_go(tmp_path: Path) -> None:
    import weakref

    first = node(v=var(1.0))
    ckf.save({"r": first}, tmp_path, step=1)
    fresh = node()
    ckf.restore({"r": fresh}, tmp_path).close()
    gone = weakref.ref(fresh)
    del fresh
    gc.collect()
    assert gone() is None
    status = ckf.restore({"r": node(v=var())}, tmp_path)
    status.assert_consumed()


def test_a_save_in_a_tf_function_is_refused(tmp_path: Path) -> None:
    checkpoint = ckf.Checkpoint(v=var(1.0))

    save = tf.function(lambda: checkpoint.write(tmp_path), autograph=False)
    with pytest.raises(Exception, match=r"outside of tf\.function"):
        save()
    assert ckptfmt.Store(tmp_path).names() == []


def test_a_path_where_nothing_is_raises_and_changes_nothing(tmp_path: Path) -> None:
    root = node(v=var(7.0))
    with pytest.raises(NotFoundError):
        ckf.restore({"r": root}, tmp_path / "no")
    with pytest.raises(NotFoundError):
        ckf.Checkpoint(r=root).read(tmp_path / "no")
    assert float(root.v) == 7.0


def test_slots_can_be_left_out(tmp_path: Path) -> None:
    net, optimizer = Block(), keras.optimizers.Adam(0.1)
    net(X)
    train_step(net, optimizer, X, Y)
    ckf.save({"net": net, "opt": optimizer}, tmp_path, step=1)
    fresh, other = Block(), keras.optimizers.Adam(0.1)
    fresh(X)
    other.build(fresh.trainable_variables)
    names = lambda name: "/state/" not in name  # noqa: E731
    status = ckf.restore({"net": fresh, "opt": other}, tmp_path, names=names)
    status.assert_existing_objects_matched()
    assert int(other.iterations) == 1
    assert np.array_equal(net.head.kernel, fresh.head.kernel)
    assert all(np.all(v.numpy() == 0) for v in other.variables if "momentum" in v.path)


def test_slots_wait_while_a_later_restore_takes_the_variable(tmp_path: Path) -> None:
    root, adam = node(var=var(12.0)), tf.compat.v1.train.AdamOptimizer(0.1)
    ckf.save({"r": root}, tmp_path, step=1)
    adam.minimize(lambda: root.var * 1.0)
    root.var.assign(13.0)
    adam.get_slot(root.var, "m").assign(14.0)
    ckf.save({"r": root, "o": adam}, tmp_path, step=2)
    fresh, other = node(), tf.compat.v1.train.AdamOptimizer(0.1)
    slots = ckf.restore({"r": fresh, "o": other}, tmp_path, step=2)
    ckf.restore({"r": fresh}, tmp_path, step=1)
    fresh.var = var()
    assert float(fresh.var) == 12.0
    assert "o/state/var/m" in slots.pending
    other._create_slots([fresh.var])  # what its first step does
    assert float(other.get_slot(fresh.var, "m")) == 14.0
    slots.assert_consumed()


@pytest.mark.parametrize(
    "change",
    [
        lambda items: items.pop(0),
        lambda items: items.reverse(),
        lambda items: items.__setitem__(slice(0, 1), []),
        lambda items: items.insert(0, var(9.0)),
    ],
    ids=["pop", "reverse", "a slice", "insert"],
)
def test_a_list_is_saved_as_it_is_however_it_was_changed(tmp_path: Path, change: Any) -> None:
    root = node(items=[var(1.0), var(2.0), var(3.0)])
    change(root.items)
    ckf.save({"r": root}, tmp_path, step=1)
    fresh = node(items=[var() for _ in root.items])
    ckf.restore({"r": fresh}, tmp_path).assert_consumed()
    assert [float(v) for v in fresh.items] == [float(v) for v in root.items]


def test_a_dict_that_was_changed_in_place_is_saved_as_it_is(tmp_path: Path) -> None:
    table = {"a": var(1.0), "b": var(2.0)}
    root = node(table=table)
    table["c"] = table.pop("a")  # past TensorFlow's wrapper, which refuses to save after that
    ckf.save({"r": root}, tmp_path, step=1)
    assert sorted(ckptfmt.open(tmp_path).names()) == ["r/table/b", "r/table/c"]


def test_tuples_and_named_tuples_keep_their_names(tmp_path: Path) -> None:
    import collections

    Pair = collections.namedtuple("Pair", "left right")
    first = node(pair=Pair(var(1.0), (var(2.0), [var(3.0)])))
    ckf.save({"r": first}, tmp_path, step=1)
    assert sorted(ckptfmt.open(tmp_path).names()) == [
        "r/pair/left",
        "r/pair/right/0",
        "r/pair/right/1/0",
    ]
    fresh = node(pair=Pair(var(), (var(), [var()])))
    ckf.restore({"r": fresh}, tmp_path).assert_consumed()
    assert float(fresh.pair.right[1][0]) == 3.0


def test_a_wrapper_alone_is_refused_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="put the module itself into the tree"):
        ckf.save({"l": node(items=[var()]).items}, tmp_path)


def test_a_list_and_its_numbered_attributes_stay_apart(tmp_path: Path) -> None:
    root = node(items=[var(1.0)])
    root.items_0 = var(2.0)
    ckf.save({"r": root}, tmp_path, step=1)
    assert sorted(ckptfmt.open(tmp_path).names()) == ["r/items/0", "r/items_0"]


def test_values_of_the_checkpoint_of_another_shape_of_a_list_are_named(tmp_path: Path) -> None:
    ckf.save({"r": node(items=[var(1.0), var(2.0)])}, tmp_path, step=1)
    with pytest.raises(MismatchError, match="not in the target: r/items/1"):
        ckf.restore({"r": node(items=[var()])}, tmp_path)
    fresh = node(items=[])
    status = ckf.restore({"r": fresh}, tmp_path)
    fresh.items.extend([var(), var()])
    status.assert_consumed()
    assert [float(v) for v in fresh.items] == [1.0, 2.0]


def test_a_restore_in_a_tf_function_is_refused(tmp_path: Path) -> None:
    variable = tf.Variable([1.0, 2.0])
    ckf.save({"v": variable}, tmp_path)
    variable.assign([3.0, 4.0])
    restore = tf.function(lambda: bool(ckf.restore({"v": variable}, tmp_path)), autograph=False)
    with pytest.raises(UsageError, match=r"outside of tf\.function"):
        restore()
    assert variable.numpy().tolist() == [3.0, 4.0]
