"""`Checkpoint(**objects)`: the functions of the package under the names that TensorFlow users know."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import UsageError


def test_named_objects_are_saved_and_restored_under_their_names(tmp_path: Path) -> None:
    weight, settings = tf.Variable([1.0, 2.0]), {"epoch": 3}
    checkpoint = ckf.Checkpoint(weight=weight, settings=settings)
    info = checkpoint.save(tmp_path / "run", 7, metadata={"note": "x"})
    assert (info.step, info.metadata["note"]) == (7, "x")
    assert list(ckptfmt.open(tmp_path / "run").names()) == ["weight", "settings/epoch"]
    weight.assign([0.0, 0.0])
    settings["epoch"] = 0
    assert checkpoint.restore(tmp_path / "run").assert_consumed().step == 7
    assert weight.numpy().tolist() == [1.0, 2.0]
    assert settings == {"epoch": 3}


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path: Path) -> None:
    weight = tf.Variable(np.arange(1000, dtype=np.float32))
    checkpoint = ckf.Checkpoint(weight=weight)
    future = checkpoint.save_async(tmp_path / "run", 1)
    weight.assign(tf.zeros(1000))
    assert future.result().step == 1
    assert np.array_equal(ckptfmt.load(tmp_path / "run")["weight"], np.arange(1000))


def test_write_replaces_what_it_wrote_and_read_takes_that_beside_steps(tmp_path: Path) -> None:
    weight = tf.Variable(1.0)
    checkpoint = ckf.Checkpoint(weight=weight)
    checkpoint.write(tmp_path / "run")
    weight.assign(2.0)
    checkpoint.write(tmp_path / "run")
    weight.assign(3.0)
    checkpoint.save(tmp_path / "run", 5)
    checkpoint.read(tmp_path / "run")
    assert float(weight) == 2.0
    checkpoint.read(f"{tmp_path / 'run'}@5")
    assert float(weight) == 3.0


def test_nothing_is_counted_behind_the_users_back(tmp_path: Path) -> None:
    checkpoint = ckf.Checkpoint(weight=tf.Variable(1.0))
    for step in (10, 20):
        checkpoint.save(tmp_path / "run", step)
    assert ckptfmt.Store(tmp_path / "run").steps() == [10, 20]
    assert list(checkpoint.objects) == ["weight"]
    assert list(ckptfmt.load(tmp_path / "run")) == ["weight"]


def test_a_checkpoint_without_objects_is_refused() -> None:
    with pytest.raises(UsageError, match="Checkpoint\\(model=model"):
        ckf.Checkpoint()


def test_a_checkpoint_of_keras_objects_restores_in_place(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    checkpoint = ckf.Checkpoint(model=model)
    checkpoint.save(tmp_path / "run", 1)
    before = [v.numpy() for v in model.variables]
    for variable in model.variables:
        variable.assign(tf.zeros(variable.shape))
    checkpoint.restore(tmp_path / "run")
    assert all(np.array_equal(v.numpy(), b) for v, b in zip(model.variables, before))
