"""Names from the object graph: layers by their names, slots by their variables, paths as they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt.foreign import read_foreign
from ckptfmt.foreign.bundle.names import name_of, name_plainly, settle, split_object_key


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("m/v/.ATTRIBUTES/VARIABLE_VALUE", ("m", "v")),
        ("m/a.Sb/.ATTRIBUTES/VARIABLE_VALUE", ("m", "a/b")),
        ("m/x..y/.ATTRIBUTES/VARIABLE_VALUE", ("m", "x.y")),
        ("m/..S/.ATTRIBUTES/VARIABLE_VALUE", ("m", ".S")),
        ("m/a....Sb.Sc/.ATTRIBUTES/VARIABLE_VALUE", ("m", "a..Sb/c")),
        ("m//.ATTRIBUTES/VARIABLE_VALUE", ("m", "")),
        ("t/.ATTRIBUTES/table-keys", ("t", ".ATTRIBUTES.table-keys")),
        ("plain/name", ("plain", "name")),
    ],
)
def test_object_keys(key: str, keys: tuple[str, ...]) -> None:
    assert split_object_key(key) == keys


def test_no_name_is_inside_of_a_tensors() -> None:
    keys = ["a", "a/b", "a/b/c", "d/e", "d/f/g", "h~/i", "j//k", "/l", "d/e/m/n"]
    named = name_plainly(keys)
    settle(named, "x")
    assert named.names == {
        "a": "a",
        "a/b": "a~1b",
        "a/b/c": "a~1b~1c",
        "d/e": "d/e",
        "d/f/g": "d/f/g",
        "h~/i": "h~0/i",
        "j//k": "j/~2/k",
        "/l": "~2/l",
        "d/e/m/n": "d/e~1m/n",
    }
    assert name_of(("d", "e/m", "n")) == named.names["d/e/m/n"]


def sequential() -> Any:
    """Given and counted names, a model in the model, a layer with layers of its own."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, name="head"),
            keras.layers.Dense(5),
            keras.layers.BatchNormalization(),
            keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(4, name="inner")]),
            keras.layers.Dense(3),
        ]
    )


def functional() -> Any:
    start = keras.Input((4, 6))
    x = keras.layers.MultiHeadAttention(2, 3, name="mixer")(start, start)
    x = keras.layers.LSTM(5)(x)
    return keras.Model(start, keras.layers.Dense(2, name="out")(keras.layers.Dense(4)(x)))


class Subclassed(keras.Model):  # type: ignore[misc, unused-ignore]
    """Layers by attribute; called before it is built, so that full names have no layers in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(5)
        self.second = keras.layers.Dense(5)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def built_subclassed() -> Any:
    model = Subclassed()
    model(np.zeros((1, 6), np.float32))
    return model


# TensorFlow does not save what Keras keeps in a seed generator.
SEEDS = "model/lstm/cell/seed_generator"
MODELS = {"sequential": sequential, "functional": functional, "subclassed": built_subclassed}


@pytest.mark.parametrize("kind", MODELS)
def test_a_keras_model_is_named_as_our_own_checkpoints_name_it(tmp_path: Path, kind: str) -> None:
    keras.utils.set_random_seed(3)
    MODELS["sequential"]()  # so that what Keras counts does not begin at zero
    model = MODELS[kind]()
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "x"))
    ckf.save({"model": model}, tmp_path / "ours", durable=False)
    with ckptfmt.open(tmp_path / "ours") as ours:
        wanted = {name: ours[name].read() for name in ours if not name.startswith(SEEDS)}
    found = {name: tensor.fetch() for name, tensor in read_foreign(prefix).tensors.items()}
    found.pop("save_counter", None)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name


@pytest.mark.parametrize("kind", MODELS)
def test_a_training_state_of_keras_restores_into_fresh_objects(tmp_path: Path, kind: str) -> None:
    def state() -> dict[str, Any]:
        model, optimizer = MODELS[kind](), keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        return {"model": model, "optimizer": optimizer}

    keras.utils.set_random_seed(4)
    old = state()
    rng = np.random.default_rng(0)
    for variable in old["optimizer"].variables[2:]:
        variable.assign(rng.random(variable.shape, np.float32))
    prefix = tf.train.Checkpoint(**old).write(str(tmp_path / "x"))
    ckptfmt.convert(prefix, tmp_path / "s", durable=False)
    new = state()
    seeds = (SEEDS,) if kind == "functional" else ()
    ckf.restore(new, tmp_path / "s", allow_missing=seeds)
    for part in ("model", "optimizer"):
        for one, other in zip(old[part].variables, new[part].variables):
            if "seed_generator" in one.path:
                continue
            assert np.array_equal(one.numpy(), other.numpy()), one.path
    names = set(ckptfmt.open_foreign(prefix))
    assert "optimizer/iterations" in names
    slot = {"sequential": "head", "functional": "out", "subclassed": "first"}[kind]
    assert f"optimizer/state/{slot}/kernel/momentum" in names


def test_slots_of_tf1_optimizers_in_an_object_graph(tmp_path: Path) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        module = tf.Module()
        module.w = tf.Variable([1.0, 2.0])
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        step = optimizer.minimize(tf.reduce_sum(module.w * module.w))
        session.run(v1.global_variables_initializer())
        session.run(step)
        checkpoint = v1.train.Checkpoint(net=module, opt=optimizer)
        prefix = checkpoint.write(str(tmp_path / "x"), session=session)
    tree = read_foreign(prefix)
    assert "net/w" in tree.tensors
    slot = tree.tensors["opt/state/w/momentum"]
    assert slot.foreign_name == "net/w/.OPTIMIZER_SLOT/opt/momentum/.ATTRIBUTES/VARIABLE_VALUE"
    assert np.array_equal(slot.fetch(), [2.0, 4.0])


def test_a_module_keeps_its_attributes_whatever_its_variables_are_called(tmp_path: Path) -> None:
    module = tf.Module()
    module.w = tf.Variable(1.0, name="other/name")
    module.b = tf.Variable(2.0, name="w")
    prefix = tf.train.Checkpoint(net=module).write(str(tmp_path / "x"))
    found = {name: float(t.fetch()) for name, t in read_foreign(prefix).tensors.items()}
    found.pop("save_counter", None)
    assert found == {"net/w": 1.0, "net/b": 2.0}
