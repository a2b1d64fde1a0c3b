"""Optimizers of TensorFlow 1's interface, loss scaling, and optimizers that an object holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import MismatchError, UsageError
from tests.unit.tensorflow.nets import Block, Lazy, train_step

V1 = tf.compat.v1.train
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(0, 1, 16, dtype=np.float32).reshape(8, 2)


class Line(tf.Module):
    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.w = tf.Variable(tf.fill((3, 2), start), name="w")
        self.b = tf.Variable(tf.zeros(2), name="w")  # one full name: the path tells them apart

    def __call__(self, x: Any) -> Any:
        return tf.matmul(x, self.w) + self.b


def step(net: Any, optimizer: Any) -> None:
    optimizer.minimize(lambda: tf.reduce_mean((net(X) - Y) ** 2))


MAKE = {
    "adam": lambda: V1.AdamOptimizer(0.1),
    "momentum": lambda: V1.MomentumOptimizer(0.1, 0.9),
    "rmsprop": lambda: V1.RMSPropOptimizer(0.1, momentum=0.5, centered=True),
    "ftrl": lambda: V1.FtrlOptimizer(0.1),
    "adagrad": lambda: V1.AdagradOptimizer(0.1),
    "descent": lambda: V1.GradientDescentOptimizer(0.1),
}


@pytest.mark.parametrize("kind", MAKE)
def test_slots_go_on_from_a_restore(tmp_path: Path, kind: str) -> None:
    nets, optimizers = [Line(), Line(2.0)], [MAKE[kind](), MAKE[kind]()]
    for _ in range(3):
        step(nets[0], optimizers[0])
    ckf.save({"net": nets[0], "opt": optimizers[0]}, tmp_path, step=3)
    status = ckf.restore({"net": nets[1], "opt": optimizers[1]}, tmp_path)
    status.assert_consumed()
    for net, optimizer in zip(nets, optimizers):
        step(net, optimizer)
    assert np.array_equal(nets[0].w, nets[1].w)
    assert np.array_equal(nets[0].b, nets[1].b)
    one, other = optimizers
    for slot in one.get_slot_names():
        for name in "wb":
            variables = (getattr(net, name) for net in nets)
            mine, theirs = (o.get_slot(v, slot) for o, v in zip(optimizers, variables))
            assert np.array_equal(mine, theirs)
    assert len(one.variables()) == len(other.variables())


def test_slots_are_named_by_their_variables(tmp_path: Path) -> None:
    net, optimizer = Line(), V1.AdamOptimizer(0.1)
    step(net, optimizer)
    ckf.save({"net": net, "opt": optimizer}, tmp_path, step=1)
    with ckptfmt.open(tmp_path) as checkpoint:
        assert set(checkpoint.names("opt/**")) == {
            "opt/beta1_power",
            "opt/beta2_power",
            *(f"opt/state/{v}/{slot}" for v in "wb" for slot in "mv"),
        }


def test_slots_of_variables_that_come_later_wait_for_the_first_step(tmp_path: Path) -> None:
    first, optimizer = Lazy(), V1.AdamOptimizer(0.1)
    first(X)
    for _ in range(2):
        step(first, optimizer)
    ckf.save({"net": first, "opt": optimizer}, tmp_path, step=2)
    fresh, other = Lazy(), V1.AdamOptimizer(0.1)
    status = ckf.restore({"net": fresh, "opt": other}, tmp_path)
    assert len(status.pending) == 5
    for net, one in ((first, optimizer), (fresh, other)):
        step(net, one)
    status.assert_consumed()
    assert np.array_equal(first.w, fresh.w)
    assert np.array_equal(optimizer.get_slot(first.w, "v"), other.get_slot(fresh.w, "v"))


def test_another_kind_of_slots_is_refused_before_anything_changes(tmp_path: Path) -> None:
    net, optimizer = Line(), V1.MomentumOptimizer(0.1, 0.9)
    step(net, optimizer)
    ckf.save({"net": net, "opt": optimizer}, tmp_path, step=1)
    other, adam = Line(5.0), V1.AdamOptimizer(0.1)
    with pytest.raises(MismatchError, match="opt/state/w/momentum"):
        ckf.restore({"net": other, "opt": adam}, tmp_path)
    assert np.all(other.w.numpy() == 5.0)
    assert adam.variables() == []


def test_slots_of_variables_outside_of_the_tree_are_refused(tmp_path: Path) -> None:
    net, optimizer = Line(), V1.AdamOptimizer(0.1)
    step(net, optimizer)
    with pytest.raises(UsageError, match="slots for variables that no model in the tree has"):
        ckf.save({"opt": optimizer}, tmp_path)


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_a_loss_scale_optimizer_goes_on_with_its_scale(tmp_path: Path, built: bool) -> None:
    def make() -> Any:
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.1), dynamic_growth_steps=2
        )

    nets, optimizers = [Block(), Block()], [make(), make()]
    nets[0](X)
    for _ in range(3):
        train_step(nets[0], optimizers[0], X, Y)
    ckf.save({"net": nets[0], "opt": optimizers[0]}, tmp_path, step=3)
    if built:
        nets[1](X)
    status = ckf.restore({"net": nets[1], "opt": optimizers[1]}, tmp_path)
    for net, optimizer in zip(nets, optimizers):
        train_step(net, optimizer, X, Y)
    status.assert_consumed()
    for one, other in zip(optimizers[0].variables, optimizers[1].variables):
        assert np.array_equal(one, other)
    assert float(optimizers[1].dynamic_scale) == 2.0**17


@pytest.mark.parametrize("late", [False, True], ids=["built", "not built"])
def test_a_checkpoint_of_tensorflow_holds_its_optimizer(tmp_path: Path, late: bool) -> None:
    nets = [Block(), Block()]
    roots = [tf.train.Checkpoint(model=n, optimizer=keras.optimizers.Adam(0.1)) for n in nets]
    nets[0](X)
    for _ in range(2):
        train_step(nets[0], roots[0].optimizer, X, Y)
    ckf.save({"job": roots[0]}, tmp_path, step=2)
    names = list(ckptfmt.open(tmp_path).names("job/optimizer/**"))
    assert "job/optimizer/state/head/kernel/velocity" in names
    if not late:
        nets[1](X)
    status = ckf.restore({"job": roots[1]}, tmp_path)
    for net, root in zip(nets, roots):
        train_step(net, root.optimizer, X, Y)
    status.assert_consumed()
    assert np.array_equal(nets[0].head.kernel, nets[1].head.kernel)
    for one, other in zip(roots[0].optimizer.variables, roots[1].optimizer.variables):
        assert np.array_equal(one, other)


def held_by_a_module(model: Any, optimizer: Any) -> Any:
    module = tf.Module()
    module.model, module.optimizer = model, optimizer
    return module


HOLDERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda m, o: {"model": m, "optimizer": o},
    "tf.train": lambda m, o: tf.train.Checkpoint(model=m, optimizer=o),
    "ckf": lambda m, o: ckf.Checkpoint(model=m, optimizer=o).objects,
    "module": held_by_a_module,
}


def state_of(nets: Any) -> list[Any]:
    return [v.numpy() for net, optimizer in nets for v in (*net.variables, *optimizer.variables)]


@pytest.mark.parametrize("late", [False, True], ids=["built", "not built"])
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
def test_a_checkpoint_of_tensorflow_and_a_dict_take_what_any_holder_saved(
    tmp_path: Path, nested: bool, late: bool
) -> None:
    def tree(kind: str, net: Any, optimizer: Any) -> Any:
        made = HOLDERS[kind](net, optimizer)
        return {"job": made} if nested else made

    net, optimizer = Block(), keras.optimizers.Adam(0.1)
    net(X)
    for _ in range(2):
        train_step(net, optimizer, X, Y)
    names = {}
    for kind in HOLDERS:
        ckf.save(tree(kind, net, optimizer), tmp_path / kind)
        names[kind] = sorted(ckptfmt.open(tmp_path / kind).names())
    assert names["tf.train"] == names["ckf"] == names["dict"]
    assert f"{'job/' if nested else ''}optimizer/state/head/kernel/velocity" in names["dict"]
    train_step(net, optimizer, X, Y)
    for saved, target in itertools.product(HOLDERS, ("dict", "tf.train")):
        other, fresh = Block(), keras.optimizers.Adam(0.1)
        if not late:
            other(X)
        status = ckf.restore(tree(target, other, fresh), tmp_path / saved)
        train_step(other, fresh, X, Y)
        status.assert_consumed()
        assert all(map(np.array_equal, state_of([(net, optimizer)]), state_of([(other, fresh)])))


@pytest.mark.parametrize("target", ["dict", "tf.train"])
def test_names_of_earlier_versions_are_taken_from_a_checkpoint_of_tensorflow(
    tmp_path: Path, target: str
) -> None:
    """They had the model's own name in those of the state."""
    net, optimizer = Block(), keras.optimizers.Adam(0.1)
    net(X)
    train_step(net, optimizer, X, Y)
    ckf.save(HOLDERS["dict"](net, optimizer), tmp_path)
    source: Any = ckptfmt.load(tmp_path)
    source["optimizer"]["state"] = {"model": source["optimizer"]["state"]}
    other, fresh = Block(), keras.optimizers.Adam(0.1)
    other(X)
    ckf.restore(HOLDERS[target](other, fresh), source).assert_consumed()
    assert all(map(np.array_equal, state_of([(net, optimizer)]), state_of([(other, fresh)])))


def test_a_shorter_name_that_two_models_share_is_nobodys(tmp_path: Path) -> None:
    """An optimizer of two models, whose variables end alike, from one that had a model alone."""

    def make() -> dict[str, Any]:
        nets = {"one": Block(), "two": Block()}
        for net in nets.values():
            net(X)
        return {**nets, "opt": keras.optimizers.Adam(0.1)}

    state = make()
    train_step(state["one"], state["opt"], X, Y)
    ckf.save(state, tmp_path)
    fresh = make()
    variables = [v for key in ("one", "two") for v in fresh[key].trainable_variables]
    fresh["opt"].build(variables)
    with pytest.raises(ckptfmt.MismatchError, match="missing in the checkpoint: opt/state/one/"):
        ckf.restore(fresh, tmp_path)


class Pair(keras.Model):
    """Two networks with an optimizer each, as generator and discriminator have."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = keras.layers.Dense(2), keras.layers.Dense(2)
        self.first, self.second = keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.2)

    def call(self, x: Any) -> Any:
        return self.one(x) + self.two(x)

    def step(self) -> None:
        for layer, optimizer in ((self.one, self.first), (self.two, self.second)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(X) - Y) ** 2)
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)


def test_optimizers_that_a_model_holds_are_saved_with_it(tmp_path: Path) -> None:
    first, second = Pair(), Pair()
    for _ in range(2):
        first.step()
    ckf.save({"gan": first}, tmp_path, step=2)
    second(X)
    ckf.restore({"gan": second}, tmp_path).assert_consumed()
    for pair in (first, second):
        pair.step()
    assert np.array_equal(first.one.kernel, second.one.kernel)
    assert np.array_equal(first.two.kernel, second.two.kernel)
    assert len(second.first.variables) == len(second.second.variables) == 6


def test_a_compiled_model_in_a_checkpoint_with_its_optimizer_warns_of_nothing(
    tmp_path: Path,
) -> None:
    net = Block()
    net.compile(keras.optimizers.Adam(0.1), "mse")
    net.fit(X, Y, verbose=0)
    ckf.save({"job": tf.train.Checkpoint(model=net, optimizer=net.optimizer)}, tmp_path, step=1)
    assert "job/optimizer/iterations" in ckptfmt.open(tmp_path).names()


class Twins(keras.Model):
    """Two layers of one shape, under names that the caller chooses."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.one = keras.layers.Dense(3, name=first)
        self.two = keras.layers.Dense(3, name=second)

    def call(self, x: Any) -> Any:
        return self.two(self.one(x))


@pytest.mark.parametrize("late", [False, True], ids=["built", "not built"])
@pytest.mark.parametrize(
    ("names", "rename"),
    [
        (("enc", "b"), {"m/a": "net/enc", "m": "net"}),
        (("b", "a"), {"m/a": "net/b", "m/b": "net/a"}),  # they change places
        (("enc", "b"), {"m/a": "net/enc", "m": "net", "o/state/a": "o/state/enc"}),
    ],
    ids=["one", "swapped", "said for both"],
)
def test_state_follows_a_renamed_variable(
    tmp_path: Path, names: tuple[str, str], rename: dict[str, str], late: bool
) -> None:
    first, optimizer = Twins("a", "b"), keras.optimizers.Adam(0.1)
    first(X)
    for _ in range(2):
        train_step(first, optimizer, X, X)
    ckf.save({"m": first, "o": optimizer}, tmp_path, step=2)
    fresh, other = Twins(*names), keras.optimizers.Adam(0.1)
    if not late:
        fresh(X)
    status = ckf.restore({"net": fresh, "o": other}, tmp_path, rename=rename)
    for net, one in ((first, optimizer), (fresh, other)):
        train_step(net, one, X, X)
    status.assert_consumed()
    assert np.array_equal(first.one.kernel, fresh.one.kernel)
    assert np.array_equal(first.two.kernel, fresh.two.kernel)
    for mine, theirs in zip(optimizer.variables, other.variables):
        assert np.array_equal(mine, theirs)
