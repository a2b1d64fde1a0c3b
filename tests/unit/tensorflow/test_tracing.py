"""Calls within a tf.function: refused while it is traced, made by each run through tf.py_function."""

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

PLAIN = {"n": 1, "a": np.arange(2.0)}


def calls_of(path: Path) -> dict[str, Callable[[], Any]]:
    """Every public call that reads or writes a store, none of which needs a tensor of TensorFlow's."""
    manager = ckptfmt.Manager(path)
    checkpoint = ckf.Checkpoint(**PLAIN)
    fresh = {"n": 0, "a": np.zeros(2)}
    return {
        "save": lambda: ckptfmt.save(PLAIN, path, step=9),
        "save_async": lambda: ckptfmt.save_async(PLAIN, path, step=9),
        "open": lambda: ckptfmt.open(path),
        "load": lambda: ckptfmt.load(path),
        "restore": lambda: ckptfmt.restore(fresh, path),
        "plan": lambda: ckptfmt.plan(fresh, path),
        "Manager.save": lambda: manager.save(PLAIN, step=9),
        "Manager.restore": lambda: manager.restore(fresh),
        "Manager.load": lambda: manager.load(),
        "ckf.load": lambda: ckf.load(path),
        "ckf.restore": lambda: ckf.restore(fresh, path),
        "ckf.save": lambda: ckf.save(PLAIN, path, step=9),
        "ckf.save_async": lambda: ckf.save_async(PLAIN, path, step=9),
        "Checkpoint.save": lambda: checkpoint.save(path, 9),
        "Checkpoint.save_async": lambda: checkpoint.save_async(path, 9),
        "Checkpoint.restore": lambda: checkpoint.restore(path),
        "Checkpoint.write": lambda: checkpoint.write(path),
        "Checkpoint.read": lambda: checkpoint.read(path),
    }


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    ckptfmt.save(PLAIN, tmp_path / "run", step=1)
    return tmp_path / "run"


def trace(body: Callable[..., Any], how: str) -> None:
    if how == "data set":
        tf.data.Dataset.range(1).map(body)
    else:
        tf.function(body, autograph=how == "autograph")(tf.constant(1))


@pytest.mark.parametrize("how", ["function", "autograph", "data set"])
def test_every_call_is_refused_while_a_function_is_traced(stored: Path, how: str) -> None:
    for name, call in calls_of(stored).items():

        def body(x: tf.Tensor, call: Callable[[], Any] = call) -> tf.Tensor:
            call()
            return x

        with pytest.raises(ckptfmt.UsageError) as caught:
            trace(body, how)
        assert caught.value.kind == "usage-graph", name
        assert "a tf.function is traced: this call would be made once" in str(caught.value)
        assert name.rpartition(".")[2] in str(caught.value.found) or "Checkpoint" in name
    assert ckptfmt.Store(stored).steps() == [1]


def test_a_save_in_the_train_step_of_keras_is_refused(tmp_path: Path) -> None:
    class Saving(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            ckptfmt.save({"epoch": 1}, tmp_path, step=1)
            return super().train_step(data)

    model = Saving()
    model.compile("sgd", "mse")
    x = np.ones((2, 1), np.float32)
    with pytest.raises(ckptfmt.UsageError, match=r"tf\.function is traced.*tf\.py_function"):
        model.fit(x, x, verbose=0)
    assert not list(tmp_path.iterdir())


def test_through_py_function_each_run_saves_what_is_there_then(tmp_path: Path) -> None:
    v, step = tf.Variable(0.0), tf.Variable(0)

    def save() -> None:
        ckf.save({"v": v}, tmp_path, step=int(step))

    @tf.function  # type: ignore[untyped-decorator]
    def train() -> None:
        with tf.control_dependencies([v.assign_add(2.0), step.assign_add(1)]):
            tf.py_function(save, [], [])  # else TensorFlow may run it before, or between

    for _ in range(3):
        train()
    assert ckptfmt.Store(tmp_path).steps() == [1, 2, 3]
    assert [float(ckptfmt.load(tmp_path, step=n)["v"]) for n in (1, 2, 3)] == [2.0, 4.0, 6.0]
    v.assign(0.0)

    def restore() -> None:
        ckf.restore({"v": v}, tmp_path)

    @tf.function  # type: ignore[untyped-decorator]
    def go_back() -> None:
        tf.py_function(restore, [], [])

    go_back()
    assert float(v) == 6.0


def test_a_late_mismatch_in_a_function_of_autograph_is_told_by_its_own_class(
    tmp_path: Path,
) -> None:
    def net(units: int) -> Any:
        return keras.Sequential([keras.layers.Dense(units, name="one")])

    first, fresh = net(2), net(3)
    first(tf.zeros([1, 4]))
    ckf.save({"m": first}, tmp_path, step=1)
    status = ckf.restore({"m": fresh}, tmp_path)

    @tf.function  # type: ignore[untyped-decorator]
    def call(x: tf.Tensor) -> Any:
        return fresh(x)

    with pytest.raises(ckptfmt.MismatchError, match=r"m/one/kernel: expected float32 \[4, 3\]"):
        call(tf.zeros([1, 4]))
    status.close()


def test_arrays_of_a_graph_of_tensorflow_1_are_saved_as_they_are(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        w = tf.compat.v1.get_variable("w", initializer=[1.0, 2.0])
        session.run(tf.compat.v1.global_variables_initializer())
        ckptfmt.save({"w": session.run(w)}, tmp_path, step=1)
        assert ckptfmt.load(tmp_path)["w"].tolist() == [1.0, 2.0]
