"""tf.Module and other trackables: which variables are found, what they are called, how they match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ckptfmt import UsageError
from ckptfmt.tensorflow import ADAPTER

Save = Callable[[dict[str, Any]], Any]


class Block(tf.Module):
    def __init__(self, seed: int, size: int = 2) -> None:
        super().__init__()
        self.w = tf.Variable(tf.random.stateless_normal([size, 3], [seed, 1]), name="w")
        self.b = tf.Variable(tf.random.stateless_normal([3], [seed, 2]), name="b")


class Net(tf.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.enc = Block(seed)
        self.dec = Block(seed + 1)
        self.step = tf.Variable(seed, dtype=tf.int64, name="step")


def values(module: tf.Module) -> list[Any]:
    return [variable.numpy() for variable in module.variables]


def same(left: tf.Module, right: tf.Module) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(values(left), values(right), strict=True))


def test_a_module_is_named_by_attributes_in_order_of_definition(saved: Save) -> None:
    names = list(saved({"model": Net(1)}).leaves)
    assert names == ["model/enc/w", "model/enc/b", "model/dec/w", "model/dec/b", "model/step"]


def test_a_module_comes_back_into_a_fresh_one(saved: Save) -> None:
    first, second = Net(1), Net(5)
    answers = saved({"model": first}).restore({"model": second})
    assert (answers.problems, answers.unexpected, answers.rules) == ([], [], {})
    assert same(first, second)


def test_odd_keys_and_nested_containers_keep_their_names_apart(saved: Save) -> None:
    def make(start: float) -> tf.Module:
        module = tf.Module()
        count = iter(range(100))

        def new() -> tf.Variable:
            return tf.Variable(start + next(count))

        module.d = {"a/b": new(), "x.y": new(), "": new(), "é": new(), "~2": new()}
        module.i = {1: new(), 20: new(), 3: new()}
        module.l = [[new()], {"k": new()}, 5, None, (new(),)]
        module.l.append(new())
        return module

    first, second = make(0.0), make(50.0)
    store = saved({"m": first})
    assert [name.removeprefix("m/") for name in store.leaves] == [
        *("d/a~1b", "d/x.y", "d/~2", "d/é", "d/~02", "i/~3i1", "i/~3i20", "i/~3i3"),
        *("l/0/0", "l/1/k", "l/4/0", "l/5"),
    ]
    assert len(store.leaves) == len(first.variables)
    answers = store.restore({"m": second})
    assert (answers.problems, answers.unexpected) == ([], [])
    assert same(first, second)


def test_keys_of_several_types_in_one_dict_stay_apart(saved: Save) -> None:
    def make(*numbers: float) -> tf.Module:
        module = tf.Module()
        module.d = {k: tf.Variable(n) for k, n in zip((1, "1", (1, "a"), None, 2.5), numbers)}
        return module

    store = saved({"m": make(1.0, 2.0, 3.0, 4.0, 5.0)})
    assert list(store.leaves) == [
        *("m/d/~3i1", "m/d/1", 'm/d/~3t["~03i1","a"]', "m/d/~3n", "m/d/~3f2.5")
    ]
    other = make(0.0, 0.0, 0.0, 0.0, 0.0)
    assert store.restore({"m": other}).problems == []
    assert [float(value) for value in other.d.values()] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_list_that_has_grown_since_the_save_is_missing_its_new_item(saved: Save) -> None:
    module = tf.Module()
    module.l = [tf.Variable(1.0)]
    store = saved({"m": module})
    module.l.append(tf.Variable(2.0))
    assert store.restore({"m": module}).problems == ["missing m/l/1"]


def test_a_key_that_no_name_can_hold_is_refused_by_path() -> None:
    module = tf.Module()
    module.d = {"ok": {np.int64(3): tf.Variable(1.0)}}
    with pytest.raises(UsageError, match=r"cannot be saved: model/d/ok: found key"):
        ADAPTER.capture(module, "model", [])


def test_shared_variables_are_stored_once_and_all_their_paths_are_recorded(saved: Save) -> None:
    net = Net(1)
    net.tied = net.enc
    net.all = [net.dec, net.step]
    net.dec.parent = net  # a way back is no path
    store = saved({"m": net})
    assert len(store.leaves) == 5
    aliases = {name: leaf.attributes.get("tf.aliases") for name, leaf in store.leaves.items()}
    assert aliases["m/enc/w"] == ["tied/w"]
    assert aliases["m/dec/b"] == ["all/0/b"]
    assert aliases["m/step"] == ["all/1"]
    assert store.leaves["m/enc/w"].attributes["tf.full_name"] == "w"


def test_a_path_that_was_an_alias_when_saved_still_matches(saved: Save) -> None:
    first = Net(1)
    first.old = first.enc
    second = tf.Module()
    source = Net(9)
    second.dec, second.step, second.old = source.dec, source.step, source.enc
    answers = saved({"m": first}).restore({"m": second})
    assert (answers.problems, answers.unexpected) == ([], [])
    assert answers.rules == {"m/old/w": "alias", "m/old/b": "alias"}
    assert np.array_equal(second.old.w, first.enc.w)


def test_a_renamed_attribute_matches_by_a_unique_full_name(saved: Save) -> None:
    first = tf.Module()
    first.encoder = tf.Variable([1.0], name="enc")
    first.decoder = tf.Variable([2.0], name="dec")
    second = tf.Module()
    second.decoder = tf.Variable([0.0], name="dec")
    second.front = tf.Variable([0.0], name="enc")
    answers = saved({"m": first}).restore({"m": second})
    assert (answers.problems, answers.rules) == ([], {"m/front": "full name"})
    assert (second.front.numpy().tolist(), second.decoder.numpy().tolist()) == ([1.0], [2.0])


def test_a_full_name_that_two_variables_have_matches_nothing(saved: Save) -> None:
    first, second = tf.Module(), tf.Module()
    first.a, first.b = tf.Variable([1.0], name="w"), tf.Variable([2.0], name="w")
    second.a, second.c = tf.Variable([0.0], name="w"), tf.Variable([0.0], name="w")
    answers = saved({"m": first}).restore({"m": second})
    assert answers.problems == ["missing m/c"]
    assert answers.unexpected == ["m/b"]


def test_path_and_full_name_that_cross_are_refused(saved: Save) -> None:
    first, second = tf.Module(), tf.Module()
    first.a, first.b = tf.Variable([1.0], name="enc"), tf.Variable([2.0], name="dec")
    second.a, second.b = tf.Variable([0.0], name="dec"), tf.Variable([0.0], name="enc")
    answers = saved({"m": first}).restore({"m": second})
    assert len(answers.problems) == 2
    assert "full name dec, which is stored as m/b | full name enc" in answers.problems[0]
    assert second.a.numpy().tolist() == [0.0]


def test_wrong_shapes_and_dtypes_are_told_before_anything_is_assigned(saved: Save) -> None:
    first, second = Net(1), Net(5)
    second.dec = Block(3, size=4)
    second.step = tf.Variable(0.5)
    before = values(second)
    answers = saved({"m": first}).restore({"m": second})
    assert answers.problems == [
        "shape m/dec/w: (4, 3) (2, 3)",
        "dtype m/step: float32 int64",
    ]
    assert all(np.array_equal(a, b) for a, b in zip(before, values(second), strict=True))


def test_what_a_module_without_variables_will_have_is_pending(saved: Save) -> None:
    class Lazy(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tf.Module()
            self.step = tf.Variable(1)

    first, second = Lazy(), Lazy()
    first.inner.w = tf.Variable([1.0])
    answers = saved({"m": first}).restore({"m": second})
    assert answers.problems == []
    assert answers.pended == ["m/inner/w"]


def test_a_variable_with_open_dimensions_takes_the_stored_size(saved: Save) -> None:
    first = tf.Variable(np.ones((2, 3)), shape=[None, 3])
    second = tf.Variable(np.zeros((5, 3)), shape=[None, 3])
    answers = saved({"v": first}).restore({"v": second})
    assert answers.problems == []
    assert second.numpy().shape == (2, 3)
    other = tf.Variable(np.zeros((5, 4)), shape=[None, 4])
    assert saved({"v": first}).restore({"v": other}).problems == ["shape v: (5, 4) (2, 3)"]


def test_generators_and_keras_seeds_come_back(saved: Save) -> None:
    first = {"g": tf.random.Generator.from_seed(3), "s": keras.random.SeedGenerator(3)}
    first["g"].normal([2])
    keras.random.normal([2], seed=first["s"])
    store = saved(first)
    assert set(store.leaves) == {"g/state", "s/state"}
    expected = (first["g"].normal([4]).numpy(), keras.random.normal([4], seed=first["s"]).numpy())
    second = {"g": tf.random.Generator.from_seed(9), "s": keras.random.SeedGenerator(9)}
    assert store.restore(second).problems == []
    drawn = (second["g"].normal([4]).numpy(), keras.random.normal([4], seed=second["s"]).numpy())
    assert all(np.array_equal(a, b) for a, b in zip(expected, drawn, strict=True))


def test_a_checkpoint_object_is_walked_like_a_module(saved: Save) -> None:
    root = tf.train.Checkpoint(net=Net(1), step=tf.Variable(4))
    store = saved({"root": root})
    assert {"root/net/enc/w", "root/step"} <= set(store.leaves)
    other = tf.train.Checkpoint(net=Net(7), step=tf.Variable(0))
    assert store.restore({"root": other}).problems == []
    assert same(root.net, other.net)


def test_functions_and_plain_attributes_of_a_module_are_no_state(saved: Save) -> None:
    net = Net(1)
    net.call = tf.function(lambda x: x)
    net.config = {"rate": 0.1, "names": ["a"]}
    net.data = tf.data.Dataset.range(3)
    assert len(saved({"m": net}).leaves) == 5


class OwnFormat(tf.__internal__.tracking.AutoTrackable):
    """What a library may bring: TensorFlow asks it for its state, which is in no variable."""

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"state": tf.constant(1)}


def test_state_outside_of_variables_is_refused_by_name_and_path() -> None:
    obj = OwnFormat()
    assert ADAPTER.kind(obj) == "stateful"
    message = r"not in variables cannot be saved yet: data/it: found OwnFormat"
    with pytest.raises(UsageError, match=message):
        ADAPTER.capture(obj, "data/it", [])
    with pytest.raises(UsageError, match=message):
        ADAPTER.target(obj, "data/it", [])
    module = tf.Module()
    module.it = obj
    with pytest.raises(UsageError, match=r"not in variables cannot be saved yet: data/it"):
        ADAPTER.capture(module, "data", [])


def test_what_has_no_state_is_unknown_to_the_adapter() -> None:
    for obj in (tf.data.Dataset.range(2), tf.function(lambda: 1), keras.losses.MeanSquaredError()):
        assert ADAPTER.kind(obj) == "unknown"


def test_a_list_that_a_module_has_wrapped_is_refused_with_a_cure() -> None:
    module = tf.Module()
    module.l = [tf.Variable(1.0)]
    with pytest.raises(UsageError, match="wrapped is not part of a tree: x"):
        ADAPTER.capture(module.l, "x", [])


def test_bind_can_be_undone_bit_for_bit(saved: Save) -> None:
    first, second = Net(1), Net(5)
    second.enc.b.assign(np.frombuffer(b"\x01\x00\xc0\x7f" * 3, np.float32))
    store = saved({"m": first})
    before = [value.tobytes() for value in values(second)]
    target = ADAPTER.target(second, "m", [("m", second)])

    class Failing(dict[str, Any]):
        undoable = True

        def __getitem__(self, name: str) -> Any:
            if name == "m/dec/b":
                raise OSError("gone")
            return super().__getitem__(name)

        own = __getitem__

    answers = type(store.restore({"m": Net(2)}))(store.leaves)
    assert target is not None
    target.compare(answers)
    with pytest.raises(OSError, match="gone"):
        target.bind(Failing(store.arrays))  # type: ignore[arg-type]
    assert [value.tobytes() for value in values(second)] != before
    target.undo()
    assert [value.tobytes() for value in values(second)] == before
