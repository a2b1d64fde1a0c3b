"""Values that come late are those of an early restore, bit for bit, where numbers are narrow or scaled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import ckptfmt.tensorflow as ckf
from ckptfmt.tensorflow.objects import survey

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3) / 3
Y = np.linspace(0, 1, 16, dtype=np.float32).reshape(8, 2)


class Nested(layers.Layer):
    """Computes in few bits; what it holds is made in its own `build` and built within its call."""

    def build(self, shape: Any) -> None:
        self.normal = layers.Normalization(dtype="float32")
        self.inner = layers.Dense(4, dtype=self.dtype_policy)
        self.out = layers.Dense(2, dtype="float32")

    def call(self, x: Any) -> Any:
        return self.out(self.inner(self.normal(tf.cast(x, tf.float32))))


def values(model: Any) -> dict[str, bytes]:
    return {one.name: one.variable.numpy().tobytes() for one in survey(model, "model").found}


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_what_is_built_in_the_call_of_a_narrow_layer_gets_what_was_stored(
    tmp_path: Path, dtype: str
) -> None:
    keras.utils.set_random_seed(0)
    first, fresh = Nested(dtype=dtype), Nested(dtype=dtype)
    first(X)
    first.normal.adapt(X + 0.1)
    ckf.save({"model": first}, tmp_path)
    status = ckf.restore({"model": fresh}, tmp_path)
    got = fresh(X)
    status.assert_consumed()
    assert values(fresh) == values(first)
    for late, own in [(fresh.normal.mean, first.normal.mean), (got, first(X))]:
        assert np.asarray(late).tobytes() == np.asarray(own).tobytes()


def stepper(scale: float, *inputs: Any, every: int | None = 3) -> Any:
    model = keras.Sequential([*inputs, layers.Dense(2)])
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=every)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale)
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def test_the_first_eager_step_scales_its_loss_as_the_restored_optimizer_unscales_it(
    tmp_path: Path,
) -> None:
    first, fresh = stepper(8.0), stepper(64.0)
    first.train_on_batch(X, Y)
    optimizer = fresh.optimizer
    for step in (1, 2):
        ckf.save({"model": first, "optimizer": first.optimizer}, tmp_path, step=step)
        if step == 1:
            first.optimizer.dynamic_scale.assign(16.0)
    older = ckf.restore({"model": fresh, "optimizer": optimizer}, tmp_path, step=1)
    status = ckf.restore({"model": fresh, "optimizer": optimizer}, tmp_path, step=2)
    assert float(optimizer.scale_loss(1.0)) == 16.0
    for model in (first, fresh):
        model.train_on_batch(X, Y)
    status.assert_consumed()
    state = [[v.numpy().tobytes() for v in one.optimizer.variables] for one in (first, fresh)]
    assert state[0] == state[1]
    assert optimizer.initial_scale == 64.0
    assert "scale_loss" not in vars(optimizer)
    older.close()


def test_a_status_that_is_closed_leaves_the_scale_of_the_loss_as_it_was(tmp_path: Path) -> None:
    first, fresh = stepper(8.0), stepper(64.0)
    first.train_on_batch(X, Y)
    ckf.save({"model": first, "optimizer": first.optimizer}, tmp_path)
    ckf.restore({"model": fresh, "optimizer": fresh.optimizer}, tmp_path).close()
    assert float(fresh.optimizer.scale_loss(1.0)) == 64.0


def test_a_scale_without_slots_waits_for_the_first_step(tmp_path: Path) -> None:
    first, fresh = (stepper(one, keras.Input((3,)), every=None) for one in (8.0, 64.0))
    first.train_on_batch(X, Y)
    ckf.save({"model": first, "optimizer": first.optimizer}, tmp_path)
    status = ckf.restore({"model": fresh, "optimizer": fresh.optimizer}, tmp_path)
    assert list(status.pending) == ["optimizer/step_counter", "optimizer/dynamic_scale"]
    for model in (first, fresh):
        model.train_on_batch(X, Y)
    status.assert_consumed()
    assert values(fresh) == values(first)
    assert float(fresh.optimizer.dynamic_scale) == 8.0
    assert int(fresh.optimizer.step_counter) == 2
