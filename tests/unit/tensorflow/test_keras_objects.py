"""Keras layers and models: what their children are called, in any process, and how they come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ckptfmt import CkptWarning, UsageError
from ckptfmt.tensorflow import ADAPTER

Save = Callable[[dict[str, Any]], Any]


def names(store: Any, root: str = "model") -> list[str]:
    return [name.removeprefix(root + "/") for name in store.leaves]


def scramble(model: Any, seed: int) -> Any:
    """Give every floating variable values of its own."""
    random = np.random.default_rng(seed)
    for variable in model.variables:
        if "float" in variable.dtype:
            variable.assign(random.normal(size=variable.shape))
    return model


def same(left: Any, right: Any) -> bool:
    pairs = zip(left.variables, right.variables, strict=True)
    return all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)


def sequential(seed: int) -> Any:
    return scramble(
        keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(3),
                layers.Dropout(0.5),
                layers.BatchNormalization(),
                layers.Dense(3, name="head"),
                layers.Dense(3),
            ]
        ),
        seed,
    )


SEQUENTIAL = [
    *("dense/kernel", "dense/bias", "dropout/seed_generator/state"),
    *(f"batch_normalization/{v}" for v in ("gamma", "beta", "moving_mean", "moving_variance")),
    *("head/kernel", "head/bias", "dense_1/kernel", "dense_1/bias"),
]


def test_names_do_not_depend_on_what_the_process_built_before(saved: Save) -> None:
    first = sequential(1)
    assert first.variables[0].path.startswith("sequential")
    for _ in range(3):
        layers.Dense(1), layers.Dropout(0.1), layers.BatchNormalization()
    second = sequential(2)
    assert first.variables[0].path != second.variables[0].path
    store = saved({"model": first})
    assert names(store) == names(saved({"model": second})) == SEQUENTIAL
    assert store.restore({"model": second}).problems == []
    assert same(first, second)


def test_a_functional_model_has_the_same_names_as_a_sequential_one(saved: Save) -> None:
    def make(seed: int) -> Any:
        start = keras.Input((4,))
        x = layers.BatchNormalization()(layers.Dropout(0.5)(layers.Dense(3)(start)))
        return scramble(keras.Model(start, layers.Dense(3)(layers.Dense(3, name="head")(x))), seed)

    first, second = make(1), sequential(2)
    assert saved({"model": first}).restore({"model": second}).problems == []
    assert [v.name for v in first.variables] == [v.name for v in second.variables]
    assert same(first, second)


class Nested(keras.Model):
    """Layers in attributes, lists of lists and dicts; weights with and without names."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.blocks: Any = [[layers.Dense(3), layers.Dense(3)], {"k": layers.Dense(3)}]
        self.by_key = {"a/b": layers.Dense(3), "x.y": layers.Dense(3), "": layers.Dense(3)}
        self.pair = (layers.Dense(3), layers.Dense(3, name="chosen"))
        self._hidden = layers.LayerNormalization()
        self.scale = self.add_weight(shape=(3,), initializer="ones")
        self.shift = self.add_weight(shape=(3,), name="offset")
        self.raw = tf.Variable([1.0, 2.0], name="raw")
        self.noise = keras.random.SeedGenerator(seed)
        self.loss_mean = keras.metrics.Mean()
        self(np.zeros((1, 3)))
        scramble(self, seed)
        self.raw.assign([seed, seed])

    def call(self, x: Any) -> Any:
        for layer in [*self.blocks[0], self.blocks[1]["k"], *self.by_key.values(), *self.pair]:
            x = layer(x)
        return self._hidden(x) * self.scale + self.shift


def test_nested_containers_and_odd_keys_are_all_found(saved: Save) -> None:
    first, second = Nested(1), Nested(2)
    store = saved({"model": first})
    layer_names = [
        *("blocks/0/0", "blocks/0/1", "blocks/1/k", "by_key/a~1b", "by_key/x.y", "by_key/~2"),
        *("pair/0", "chosen"),
    ]
    expected = {f"{name}/{part}" for name in layer_names for part in ("kernel", "bias")}
    expected |= {"_hidden/gamma", "_hidden/beta", "scale", "offset", "noise/state", "raw"}
    assert set(names(store)) == expected
    assert len(store.leaves) == len(first.variables) + 1  # `raw`, which Keras does not count
    answers = store.restore({"model": second})
    assert (answers.problems, answers.unexpected) == ([], [])
    assert same(first, second)
    assert second.raw.numpy().tolist() == [1.0, 1.0]


def test_layers_that_changed_places_keep_their_values_by_the_name_the_user_gave(
    saved: Save,
) -> None:
    def make(order: list[str], seed: int) -> Any:
        start = x = keras.Input((3,))
        for name in order:
            x = layers.Dense(3, name=name)(x)
        return scramble(keras.Model(start, x), seed)

    first, second = make(["left", "right"], 1), make(["right", "left"], 2)
    assert saved({"model": first}).restore({"model": second}).problems == []
    for name in ("left", "right"):
        assert np.array_equal(first.get_layer(name).kernel, second.get_layer(name).kernel)


def test_equal_layers_whose_counted_names_cross_are_refused(saved: Save) -> None:
    def make(order: list[str], seed: int) -> Any:
        start = x = keras.Input((3,))
        for name in order:
            x = layers.Dense(3, name=name)(x)
        return scramble(keras.Model(start, x, name="net"), seed)

    store = saved({"model": make(["dense_1", "dense_2"], 1)})
    second = make(["dense_2", "dense_1"], 2)
    before = [v.numpy() for v in second.variables]
    answers = store.restore({"model": second})
    assert len(answers.problems) == 4
    assert (
        "full name dense_2/kernel, which is stored as model/dense_1/kernel" in answers.problems[0]
    )
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(before, second.variables, strict=True))
    # Numbers that only moved on, as in a second process, are not believed.
    assert store.restore({"model": make(["dense_7", "dense_8"], 3)}).problems == []


def test_two_layers_of_one_given_name_are_called_by_attribute(saved: Save) -> None:
    class Twice(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.a = layers.Dense(2, name="same")
            self.b = layers.Dense(2, name="same")

        def build(self, shape: Any) -> None:
            self.a.build(shape)
            self.b.build(shape)

    layer = Twice()
    layer.build((None, 2))
    assert names(saved({"model": layer})) == ["a/kernel", "a/bias", "b/kernel", "b/bias"]


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (
            lambda: layers.Bidirectional(layers.LSTM(2)),
            [(None, 3, 4)],
            {"forward_layer/cell/kernel", "backward_layer/cell/recurrent_kernel"},
        ),
        (
            lambda: layers.MultiHeadAttention(2, 2),
            [(1, 2, 4), (1, 2, 4)],
            {"query/kernel", "attention_output/bias"},
        ),
        (lambda: layers.TimeDistributed(layers.Dense(2)), [(None, 3, 4)], {"layer/kernel"}),
        (lambda: layers.Normalization(), [(None, 3)], {"mean", "variance", "count"}),
        (lambda: layers.SeparableConv1D(2, 3), [(None, 9, 2)], {"depthwise_kernel"}),
        (lambda: layers.RNN([layers.GRUCell(2), layers.GRUCell(2)]), [(None, 3, 4)], set()),
        (lambda: layers.Embedding(5, 2), [(None, 3)], {"embeddings"}),
        (lambda: layers.SpectralNormalization(layers.Dense(2)), [(None, 3)], set()),
    ],
)
def test_keras_own_layers_are_complete_and_named_alike_twice(
    saved: Save, make: Callable[[], Any], shape: list[Any], expected: set[str]
) -> None:
    built = []
    for seed in (1, 2):
        layer = make()
        layer.build(*shape)
        built.append(scramble(layer, seed))
    store = saved({"model": built[0]})
    assert len(store.leaves) == len(built[0].variables)
    assert expected <= set(names(store))
    assert not any(any(c.isdigit() for c in n.split("/")[0]) for n in names(store))
    assert store.restore({"model": built[1]}).problems == []
    assert same(*built)


def test_a_shared_layer_is_stored_once_with_its_other_paths(saved: Save) -> None:
    class Tied(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = layers.Dense(2)
            self.head = self.embed
            self.inner = keras.Sequential([keras.Input((2,)), self.embed])

    model = Tied()
    store = saved({"model": model})
    assert names(store) == ["embed/kernel", "embed/bias"]
    assert "inner/dense/kernel" in store.leaves["model/embed/kernel"].attributes["tf.aliases"]


def test_layer_state_of_half_precision_models_keeps_its_dtypes(saved: Save) -> None:
    def make(seed: int) -> Any:
        dense = layers.Dense(3, dtype="mixed_bfloat16")
        low = layers.Dense(3, dtype="bfloat16")
        return scramble(keras.Sequential([keras.Input((4,)), dense, low]), seed)

    first, second = make(1), make(2)
    store = saved({"model": first})
    assert [leaf.dtype for leaf in store.leaves.values()] == ["float32"] * 2 + ["bfloat16"] * 2
    assert store.restore({"model": second}).problems == []
    assert same(first, second)


def test_what_an_unbuilt_model_will_have_is_pending_and_it_is_not_touched(saved: Save) -> None:
    store = saved({"model": sequential(1)})
    second = keras.Sequential(
        [
            layers.Dense(3),
            layers.Dropout(0.5),
            layers.BatchNormalization(),
            layers.Dense(3, name="head"),
            layers.Dense(3),
        ]
    )
    answers = store.restore({"model": second})
    assert answers.problems == []
    assert len(answers.pended) == 10
    assert "model/head/kernel" in answers.pended
    assert len(second.variables) == 1
    second.build((None, 4))
    assert store.restore({"model": second}).problems == []


def test_what_a_model_makes_in_its_build_is_pending(saved: Save) -> None:
    class Late(keras.Model):
        def build(self, shape: Any) -> None:
            self.inner = layers.Dense(2)
            self.inner.build(shape)
            self.built = True

    first, second = Late(), Late()
    first.build((None, 3))
    answers = saved({"model": first}).restore({"model": second})
    assert (answers.problems, len(answers.pended)) == ([], 2)


def test_a_compiled_model_warns_of_an_optimizer_that_is_not_in_the_tree(saved: Save) -> None:
    model = sequential(1)
    model.compile("adam", "mse", metrics=["mae"])
    assert names(saved({"model": model})) == SEQUENTIAL  # no step yet: nothing to lose
    model.fit(np.zeros((4, 4)), np.zeros((4, 3)), verbose=0)
    with pytest.warns(CkptWarning, match=r"model: its optimizer is not in the tree"):
        store = saved({"model": model})
    assert names(store) == SEQUENTIAL
    both = saved({"model": model, "optimizer": model.optimizer})
    assert len(both.leaves) == len(model.variables) + len(model.optimizer.variables)


def test_a_metric_is_saved_where_it_stands_in_the_tree(saved: Save) -> None:
    first, second = keras.metrics.Mean(), keras.metrics.Mean()
    first.update_state([1.0, 2.0, 6.0])
    store = saved({"metric": first})
    assert names(store, "metric") == ["total", "count"]
    assert store.restore({"metric": second}).problems == []
    assert float(second.result()) == 3.0


def test_a_keras_layer_inside_of_a_module_and_a_module_inside_of_a_layer(saved: Save) -> None:
    def make(seed: int) -> tf.Module:
        outer = tf.Module()
        outer.layer = layers.Dense(2)
        outer.layer.build((None, 2))
        scramble(outer.layer, seed)
        outer.layer.extra = tf.Module()
        outer.layer.extra.v = tf.Variable([float(seed)])
        return outer

    first, second = make(1), make(2)
    store = saved({"m": first})
    assert names(store, "m") == ["layer/kernel", "layer/bias", "layer/extra/v"]
    assert store.restore({"m": second}).problems == []
    assert same(first.layer, second.layer)
    assert second.layer.extra.v.numpy().tolist() == [1.0]


class WithFiles(layers.Layer):
    def save_assets(self, dir_path: str) -> None: ...


def test_a_layer_that_writes_files_of_its_own_is_refused() -> None:
    with pytest.raises(UsageError, match="saves assets of its own cannot be saved: model/with"):
        ADAPTER.capture(keras.Sequential([WithFiles()]), "model", [])


def test_a_keras_variable_in_the_tree_is_a_tensor(saved: Save) -> None:
    first, second = keras.Variable([1.0, 2.0]), keras.Variable([0.0, 0.0])
    store = saved({"v": first, "again": first})
    assert store.leaves["v"].tensor == store.leaves["again"].tensor
    assert saved({"v": first}).restore({"v": second}).problems == []
    assert second.numpy().tolist() == [1.0, 2.0]


def test_a_variable_that_no_attribute_or_list_leads_to_is_refused_by_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ckptfmt.tensorflow import keras_objects

    model = sequential(1)
    monkeypatch.setattr(keras_objects, "_own_children", lambda obj: list(obj._layers)[:1])
    with pytest.raises(UsageError, match=r"no attribute leads to: model: expected 11 variables"):
        ADAPTER.capture(model, "model", [])
