"""Keras optimizers: state goes by the names of variables, and fresh optimizers are built first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import ckptfmt.tensorflow as ckf
from ckptfmt import CkptWarning, MismatchError, UsageError
from ckptfmt.tensorflow import ADAPTER

Save = Callable[[dict[str, Any]], Any]

OPTIMIZERS = [
    name
    for name, cls in sorted(vars(keras.optimizers).items())
    if isinstance(cls, type)
    and issubclass(cls, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
]


def make_model(width: int = 3) -> Any:
    return keras.Sequential([keras.Input((4,)), layers.Dense(width, name="in"), layers.Dense(3)])


def train(model: Any, optimizer: Any, seed: int = 0) -> None:
    """One step, by hand."""
    x = np.random.default_rng(seed).normal(size=(8, 4)).astype("float32")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    variables = [v.value for v in model.trainable_variables]
    optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)


def same(left: Any, right: Any) -> bool:
    pairs = zip(left.variables, right.variables, strict=True)
    return all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("more", [{}, {"use_ema": True, "gradient_accumulation_steps": 2}])
def test_every_optimizer_resumes_bit_for_bit_from_a_fresh_one(
    saved: Save, name: str, more: dict[str, Any]
) -> None:
    model, other = make_model(40), make_model(40)
    optimizer = getattr(keras.optimizers, name)(learning_rate=0.01, **more)
    for seed in range(3):
        train(model, optimizer, seed)
    store = saved({"model": model, "optimizer": optimizer})
    state = {n for n in store.leaves if n.startswith("optimizer/")}
    assert len(state) == len(optimizer.variables)
    assert {"optimizer/iterations", "optimizer/learning_rate"} <= state
    fresh = getattr(keras.optimizers, name)(learning_rate=0.5, **more)
    assert store.restore({"model": other, "optimizer": fresh}).problems == []
    assert same(model, other)
    assert same(optimizer, fresh)
    train(model, optimizer, 9)
    train(other, fresh, 9)
    assert same(model, other)
    assert same(optimizer, fresh)


def test_state_is_named_by_the_models_names_for_its_variables(saved: Save) -> None:
    model, optimizer = make_model(), keras.optimizers.Adam()
    train(model, optimizer)
    names = list(saved({"nets": model, "opt": optimizer}).leaves)
    assert names[4:] == [
        *("opt/iterations", "opt/learning_rate"),
        *(
            f"opt/state/{layer}/{variable}/{slot}"
            for layer in ("in", "dense")
            for variable in ("kernel", "bias")
            for slot in ("momentum", "velocity")
        ),
    ]


def test_an_unbuilt_optimizer_saves_its_step_and_stays_unbuilt(saved: Save) -> None:
    model, optimizer, fresh = make_model(), keras.optimizers.Adam(0.1), keras.optimizers.Adam()
    store = saved({"model": model, "opt": optimizer})
    assert [n for n in store.leaves if n.startswith("opt")] == [
        *("opt/iterations", "opt/learning_rate")
    ]
    assert store.restore({"model": make_model(), "opt": fresh}).problems == []
    assert not fresh.built
    assert float(fresh.learning_rate) == pytest.approx(0.1)


def test_comparing_leaves_an_unbuilt_optimizer_unbuilt(saved: Save) -> None:
    model, optimizer, fresh = make_model(), keras.optimizers.Adam(), keras.optimizers.Adam()
    train(model, optimizer)
    store = saved({"model": model, "opt": optimizer})
    answers = store.restore({"model": make_model(5), "opt": fresh})
    assert "shape model/in/kernel: (4, 5) (4, 3)" in answers.problems
    assert "shape opt/state/in/kernel/momentum: (4, 5) (4, 3)" in answers.problems
    assert not fresh.built
    assert len(fresh.variables) == 2


@pytest.mark.parametrize(
    ("had", "has"),
    [
        (keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9)),
        (keras.optimizers.SGD(momentum=0.9), keras.optimizers.Adam()),
        (keras.optimizers.SGD(), keras.optimizers.Adam()),
        (keras.optimizers.Lion(), keras.optimizers.SGD(momentum=0.9)),  # slots of the same names
    ],
    ids=lambda one: type(one).__name__,
)
def test_another_class_of_optimizer_is_a_mismatch_that_names_both(
    tmp_path: Path, had: Any, has: Any
) -> None:
    model, fresh = make_model(), make_model()
    train(model, had)
    ckf.save({"model": model, "opt": had}, tmp_path)
    old, new = type(had).__name__, type(has).__name__
    for strict in (True, False):
        with pytest.raises(
            MismatchError,
            match=rf"opt: expected the state of {new}, found that of {old} \(restore into {old} to go "
            r"on with it, or leave opt out of names=",
        ) as raised:
            ckf.restore({"model": fresh, "opt": has}, tmp_path, strict=strict)
        assert "missing" not in str(raised.value)
        assert "not in the target" not in str(raised.value)
    assert int(has.iterations) == 0
    ckf.restore({"model": fresh}, tmp_path, names="model")  # as it says
    ckf.restore({"opt": has}, tmp_path, names="opt/iterations")  # no state takes part
    assert int(has.iterations) == int(had.iterations)


def test_a_class_and_one_derived_from_it_take_each_other_by_names(tmp_path: Path) -> None:
    class Mine(keras.optimizers.Adam):
        pass

    classes = (keras.optimizers.Adam, keras.optimizers.AdamW, Mine)
    model = make_model()
    for number, first in enumerate(classes):
        had = first()
        train(model, had)
        ckf.save({"model": model, "opt": had}, tmp_path, step=number)
        for second in classes:
            has = second()
            ckf.restore({"model": make_model(), "opt": has}, tmp_path).assert_consumed()
            assert int(has.iterations) == int(had.iterations)


def test_equal_layers_that_changed_places_keep_their_own_moments(saved: Save) -> None:
    def make(order: list[str]) -> Any:
        start = x = keras.Input((4,))
        for name in order:
            x = layers.Dense(4, name=name)(x)
        return keras.Model(start, x)

    model, optimizer = make(["left", "right"]), keras.optimizers.Adam()
    train(model, optimizer)
    other, fresh = make(["right", "left"]), keras.optimizers.Adam()
    store = saved({"model": model, "opt": optimizer})
    assert store.restore({"model": other, "opt": fresh}).problems == []
    back = saved({"model": other, "opt": fresh})
    for name in store.leaves:
        assert np.array_equal(store.arrays[name], back.arrays[name]), name


def test_one_optimizer_over_two_models_names_them_in_full(saved: Save) -> None:
    def make() -> dict[str, Any]:
        return {"G": make_model(), "D": make_model(), "opt": keras.optimizers.Adam()}

    first, second = make(), make()
    both = first["G"].trainable_variables + first["D"].trainable_variables
    first["opt"].build(both)
    first["opt"].apply([tf.ones(v.shape) for v in both], both)
    store = saved(first)
    assert {"opt/state/G/in/kernel/momentum", "opt/state/D/dense/bias/velocity"} <= set(
        store.leaves
    )
    assert store.restore(second).problems == []
    assert len(second["opt"].variables) == len(first["opt"].variables)
    again = saved(second)
    assert all(np.array_equal(store.arrays[n], again.arrays[n]) for n in store.leaves)


def test_an_optimizer_of_a_module_goes_by_its_attribute_paths(saved: Save) -> None:
    def make() -> dict[str, Any]:
        module = tf.Module()
        module.w, module.b = tf.Variable([1.0, 2.0], name="w"), tf.Variable([3.0])
        module.also = module.b
        return {"m": module, "opt": keras.optimizers.SGD(0.1, momentum=0.9)}

    first, second = make(), make()
    pair = [first["m"].w, first["m"].b]
    first["opt"].apply([tf.constant([1.0, 2.0]), tf.constant([3.0])], pair)
    store = saved(first)
    assert {"opt/state/w/momentum", "opt/state/b/momentum"} <= set(store.leaves)
    assert store.leaves["opt/state/b/momentum"].attributes["tf.aliases"] == ["state/also/momentum"]
    assert store.restore(second).problems == []
    again = saved(second)
    assert all(np.array_equal(store.arrays[n], again.arrays[n]) for n in store.leaves)


def test_an_optimizer_alone_goes_by_position_and_says_so(saved: Save) -> None:
    model, optimizer = make_model(), keras.optimizers.Adam()
    train(model, optimizer)
    with pytest.warns(CkptWarning, match="opt: the optimizer's variables are not in the tree"):
        store = saved({"opt": optimizer})
    assert "opt/state/3/velocity" in store.leaves
    other = keras.optimizers.Adam()
    other.build(make_model().trainable_variables)
    assert store.restore({"opt": other}).problems == []
    assert same(optimizer, other)


def test_an_optimizer_with_only_some_of_its_variables_in_the_tree_is_refused() -> None:
    model, other, optimizer = make_model(), make_model(), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables + other.trainable_variables)
    peers = [("model", model), ("opt", optimizer)]
    with pytest.raises(UsageError, match=r"no model in the tree has: opt: found 4 of 8"):
        ADAPTER.capture(optimizer, "opt", peers)


def test_the_state_of_an_unbuilt_optimizer_without_a_model_is_pending(saved: Save) -> None:
    model, optimizer = make_model(), keras.optimizers.Adam()
    train(model, optimizer)
    fresh = keras.optimizers.Adam()
    answers = saved({"opt": optimizer, "model": model}).restore({"opt": fresh})
    assert [name for name in answers.pended if not name.startswith("opt/state/")] == []
    assert len(answers.pended) == 2 * len(model.trainable_variables)
    assert not fresh.built


def test_a_loss_scale_optimizer_brings_its_inner_one(saved: Save) -> None:
    model, other = make_model(), make_model()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    train(model, optimizer)
    store = saved({"model": model, "opt": optimizer})
    assert "opt/inner_optimizer/state/in/kernel/velocity" in store.leaves
    fresh = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    assert store.restore({"model": other, "opt": fresh}).problems == []
    assert same(optimizer, fresh)


def test_a_learning_rate_schedule_is_configuration(saved: Save) -> None:
    def make() -> Any:
        schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
        return keras.optimizers.Adam(schedule)

    model, optimizer, fresh = make_model(), make(), make()
    train(model, optimizer)
    store = saved({"model": model, "opt": optimizer})
    assert "opt/learning_rate" not in store.leaves
    assert store.restore({"model": make_model(), "opt": fresh}).problems == []
    assert same(optimizer, fresh)


def test_frozen_layers_have_no_state_and_thawing_one_is_missing(saved: Save) -> None:
    model, optimizer = make_model(), keras.optimizers.Adam()
    model.get_layer("in").trainable = False
    train(model, optimizer)
    store = saved({"model": model, "opt": optimizer})
    assert not any(n.startswith("opt/state/in/") for n in store.leaves)
    answers = store.restore({"model": make_model(), "opt": keras.optimizers.Adam()})
    assert "missing opt/state/in/kernel/momentum" in answers.problems


def test_two_optimizers_of_one_compiled_model_are_each_built_on_their_part(tmp_path: Path) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(0)
        model = make_model()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5))
        return model, keras.optimizers.Adam()

    (model, head), (other, fresh) = make(), make()
    body, tail = model.trainable_variables[:-2], model.trainable_variables[-2:]
    model.optimizer.apply([tf.ones_like(v) for v in body], body)
    head.apply([tf.ones_like(v) for v in tail], tail)
    ckf.save({"model": model, "optimizer": model.optimizer, "head": head}, tmp_path)
    ckf.restore({"model": other, "optimizer": other.optimizer, "head": fresh}, tmp_path)
    assert same(model.optimizer, other.optimizer)
    assert same(head, fresh)


def test_an_optimizer_can_be_undone(saved: Save) -> None:
    model, optimizer = make_model(), keras.optimizers.Adam()
    train(model, optimizer)
    store = saved({"model": model, "opt": optimizer})
    for seed in range(2):
        train(model, optimizer, seed)
    before = [v.numpy() for v in optimizer.variables]
    tree = {"model": model, "opt": optimizer}
    target = ADAPTER.target(optimizer, "opt", list(tree.items()))
    answers = type(store.restore({"model": make_model(7)}))(store.leaves)
    assert target is not None
    target.compare(answers)
    target.bind(store.arrays)
    assert int(optimizer.iterations) == 1
    target.undo()
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(before, optimizer.variables))


def pair(first: str, second: str) -> Any:
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name=first), layers.Dense(4, name=second)]
    )


def test_state_of_several_models_follows_a_renamed_variable_under_its_full_name(
    tmp_path: Path,
) -> None:
    first, second, optimizer = pair("a", "b"), pair("a", "b"), keras.optimizers.Adam(0.01)
    chain = keras.Sequential([first, second])
    train(chain, optimizer)
    ckf.save({"G": first, "D": second, "optimizer": optimizer}, tmp_path, step=1)
    one, two, fresh = pair("a", "b"), pair("x", "b"), keras.optimizers.Adam()
    tree = {"G": one, "D": two, "optimizer": fresh}
    ckf.restore(tree, tmp_path, rename={"D/a": "D/x"}).assert_consumed()
    assert same(optimizer, fresh)


def test_state_goes_with_the_variable_of_its_path_not_with_a_deeper_one(tmp_path: Path) -> None:
    def model(deep: str) -> Any:
        inner = keras.Sequential([layers.Dense(4, name=deep)], name="inner")
        return keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), inner])

    first, second = model("a"), model("x")
    optimizer, fresh = keras.optimizers.Adam(0.01), keras.optimizers.Adam()
    train(first, optimizer)
    ckf.save({"model": first, "optimizer": optimizer}, tmp_path, step=1)
    rename = {"model/inner/a": "model/inner/x"}
    ckf.restore({"model": second, "optimizer": fresh}, tmp_path, rename=rename).assert_consumed()
    assert same(first, second)
    assert same(optimizer, fresh)


def test_state_does_not_follow_a_namesake_in_another_model(tmp_path: Path) -> None:
    first, second, optimizer = pair("a", "b"), pair("a", "b"), keras.optimizers.Adam(0.01)
    train(first, optimizer)
    ckf.save({"G": first, "D": second, "optimizer": optimizer}, tmp_path, step=1)
    one, two, fresh = pair("a", "b"), pair("x", "b"), keras.optimizers.Adam()
    fresh.build(one.trainable_variables)
    tree = {"G": one, "D": two, "optimizer": fresh}
    ckf.restore(tree, tmp_path, rename={"D/a": "D/x"}).assert_consumed()
    assert same(second, two)
    assert same(optimizer, fresh)
