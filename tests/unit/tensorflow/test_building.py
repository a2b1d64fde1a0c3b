"""`build=True`: layers are built from what was recorded at save, before their values come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import MismatchError
from tests.unit.tensorflow.nets import Block

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(0, 1, 16, dtype=np.float32).reshape(8, 2)


class Deep(keras.Model):
    """Layers of many ways to be built: by a shape, by several, by what is inside, by none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(4)
        self.norm = keras.layers.BatchNormalization()
        self.attention = keras.layers.MultiHeadAttention(2, 3)
        self.drop = keras.layers.Dropout(0.5)
        self.tail = keras.Sequential([keras.layers.Dense(4), keras.layers.LSTM(4)])
        self.block = Block()

    def call(self, x: Any, training: bool = False) -> Any:
        made = self.drop(self.norm(self.inner(x)), training=training)[:, None]
        return self.block(self.tail(self.attention(made, made)))


def compiled(net: Any) -> Any:
    net.compile(keras.optimizers.Adam(0.05), "mse")
    return net


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    net = compiled(Deep())
    net.fit(X, Y, epochs=2, verbose=0)
    path = tmp_path_factory.mktemp("deep")
    ckf.save({"model": net, "optimizer": net.optimizer}, path, step=2)
    return net, path


def test_a_nested_subclassed_model_is_built_with_its_optimizer(trained: tuple[Any, Path]) -> None:
    net, path = trained
    fresh = compiled(Deep())
    state = {"model": fresh, "optimizer": fresh.optimizer}
    status = ckf.restore(state, path, build=True)
    assert list(status.pending) == []
    status.assert_consumed().assert_nontrivial_match()
    assert fresh.built
    assert fresh.optimizer.built
    assert all(layer.built for layer in fresh._flatten_layers())
    assert np.array_equal(net(X), fresh(X))
    for one in (
        (net.variables, fresh.variables),
        (net.optimizer.variables, fresh.optimizer.variables),
    ):
        assert [v.numpy().tolist() for v in one[0]] == [v.numpy().tolist() for v in one[1]]


def test_a_model_with_a_build_of_its_own_is_built_through_it(tmp_path: Path) -> None:
    class Own(keras.Model):
        def build(self, shape: Any) -> None:
            self.late = keras.layers.Dense(2, name="late")
            self.late.build(shape)
            self.scale = self.add_weight(shape=(2,), name="scale")

        def call(self, x: Any) -> Any:
            return self.late(x) * self.scale

    net, fresh = Own(), Own()
    net(X)
    ckf.save({"model": net}, tmp_path, step=1)
    ckf.restore({"model": fresh}, tmp_path, build=True).assert_consumed()
    assert np.array_equal(net(X), fresh(X))


def test_a_part_builds_only_that_part(trained: tuple[Any, Path]) -> None:
    net, path = trained
    fresh = Deep()
    ckf.restore({"model": fresh}, path, names="model/inner", build=True, allow_missing="**")
    assert fresh.inner.built
    assert not fresh.norm.built
    assert np.array_equal(net.inner.kernel, fresh.inner.kernel)


def test_nothing_is_built_where_the_restore_would_fail(trained: tuple[Any, Path]) -> None:
    _, path = trained
    fresh = Deep()
    with pytest.raises(MismatchError, match="not in the target: optimizer"):
        ckf.restore({"model": fresh}, path, build=True)
    assert fresh.trainable_variables == []
    assert not fresh.inner.built


def test_a_layer_that_refuses_its_config_is_named(tmp_path: Path) -> None:
    class Picky(keras.layers.Layer):
        def __init__(self, good: bool) -> None:
            super().__init__()
            self.good = good

        def build(self, shape: Any) -> None:
            if not self.good:
                raise TypeError("not this shape")
            self.w = self.add_weight(shape=(3,), name="w")

    net = keras.Sequential([Picky(True)])
    net.build((None, 3))
    ckf.save({"model": net}, tmp_path, step=1)
    with pytest.raises(MismatchError, match=r"cannot be built .* model/picky: found TypeError"):
        ckf.restore({"model": keras.Sequential([Picky(False)])}, tmp_path, build=True)


def test_a_config_that_is_no_plain_data_is_warned_of_and_left_out(tmp_path: Path) -> None:
    class Odd(keras.layers.Dense):
        def get_build_config(self) -> dict[str, Any]:
            return {"input_shape": object()}

    net = keras.Sequential([keras.Input((3,)), Odd(2)])
    with pytest.warns(ckptfmt.CkptWarning, match="odd: its build config is not recorded"):
        ckf.save({"model": net}, tmp_path, step=1)


def test_a_layer_of_another_size_is_a_mismatch_of_shapes(tmp_path: Path) -> None:
    net = Block(units=4)
    net(X)
    ckf.save({"model": net}, tmp_path, step=1)
    other = Block(units=5)
    with pytest.raises(MismatchError, match="model/inner/kernel: expected"):
        ckf.restore({"model": other}, tmp_path, build=True)
    assert other.inner.built  # the cost of asking for it: at its initial values


def test_recorded_configs_are_no_leaves_and_change_nothing_else(tmp_path: Path) -> None:
    net = Block()
    net(X)
    ckf.save({"model": net}, tmp_path, step=1)
    with ckptfmt.open(tmp_path) as checkpoint:
        assert sorted(checkpoint.names()) == [
            f"model/{layer}/{variable}"
            for layer in ("head", "inner")
            for variable in ("bias", "kernel")
        ]
