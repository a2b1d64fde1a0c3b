"""Through the engine: TensorFlow and Keras trees to a store and back, and to other frameworks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch
from keras import layers

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import plan


def make_model() -> Any:
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, name="in"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )


def make_state() -> dict[str, Any]:
    return {
        "model": make_model(),
        "optimizer": keras.optimizers.Adam(0.01),
        "rng": tf.random.Generator.from_seed(1),
        "ema": tf.Variable(tf.zeros([3], tf.bfloat16)),
        "epoch": 0,
        "history": [],
        "table": np.zeros(4),
        "relu": layers.ReLU(),
    }


def train(state: dict[str, Any]) -> float:
    """One step that uses everything in the state."""
    model, optimizer = state["model"], state["optimizer"]
    x = state["rng"].normal([16, 4])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=True) ** 2)
    variables = model.trainable_variables
    grads = tape.gradient(loss, [variable.value for variable in variables])
    optimizer.apply(grads, variables)
    state["ema"].assign_add(tf.cast(tf.fill([3], loss), tf.bfloat16))
    state["epoch"] += 1
    state["history"] = [*state["history"], float(loss)]
    state["table"] += float(loss)
    return float(loss)


def bits(state: dict[str, Any]) -> list[bytes]:
    variables = [*state["model"].variables, *state["optimizer"].variables, state["ema"]]
    return [variable.numpy().tobytes() for variable in variables] + [state["table"].tobytes()]


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    first = make_state()
    for _ in range(3):
        train(first)
    info = ckf.save(first, tmp_path / "run", step=3)
    assert (info.step, ckptfmt.Store(tmp_path / "run").verify().ok) == (3, True)
    second = make_state()
    status = ckf.restore(second, tmp_path / "run")
    assert status.report.clean
    assert status
    assert status.step == status.report.step == 3
    assert second["epoch"] == 3
    assert bits(first) == bits(second)
    assert [train(first) for _ in range(3)] == [train(second) for _ in range(3)]
    assert bits(first) == bits(second)


def test_names_in_the_store_are_those_of_the_documentation(tmp_path: Path) -> None:
    state = make_state()
    train(state)
    ckf.save(state, tmp_path)
    with ckptfmt.Store(tmp_path).open() as ckpt:
        names = ckpt.names()
    assert {
        *("model/in/kernel", "model/batch_normalization/moving_mean", "model/dense/bias"),
        *("model/dropout/seed_generator/state", "optimizer/state/in/kernel/momentum"),
        *("optimizer/iterations", "optimizer/learning_rate", "rng/state", "ema", "epoch", "relu"),
    } <= set(names)
    assert len(names) == len(state["model"].variables) + len(state["optimizer"].variables) + 6


def test_saving_the_same_state_again_gives_the_same_digest(tmp_path: Path) -> None:
    state = make_state()
    train(state)
    infos = [ckf.save(state, tmp_path / name) for name in ("a", "b")]
    assert infos[0].digest == infos[1].digest
    copy = make_state()
    train(copy)
    ckf.restore(copy, tmp_path / "a")
    again = ckf.save(copy, tmp_path / "a", step=1)
    assert again.written_nbytes == 0


def test_a_failed_restore_changes_nothing(tmp_path: Path) -> None:
    first = make_state()
    train(first)
    ckf.save(first, tmp_path)
    second = make_state()
    second["ema"] = tf.Variable(tf.zeros([4], tf.bfloat16))
    before = bits(second)
    with pytest.raises(ckptfmt.MismatchError, match="ema") as caught:
        ckf.restore(second, tmp_path)
    report = caught.value.report
    assert isinstance(report, ckptfmt.RestoreReport)
    assert [m.name for m in report.shapes] == ["ema"]
    assert bits(second) == before
    assert not second["optimizer"].built
    assert second["epoch"] == 0


def test_an_error_while_binding_puts_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_state(), make_state()
    train(first)
    train(second)
    train(second)
    ckf.save(first, tmp_path)
    before = bits(second)
    seen: list[Any] = []
    real = tf.random.Generator.state.fget(second["rng"])
    original = type(real).assign

    def failing(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if self is real and not seen:
            seen.append(self)
            raise RuntimeError("device lost")
        return original(self, value, *args, **kwargs)

    monkeypatch.setattr(type(real), "assign", failing)
    with pytest.raises((RuntimeError, ckptfmt.CheckpointError)):
        ckf.restore(second, tmp_path)
    assert seen
    assert bits(second) == before
    assert second["epoch"] == 2


def test_an_unbuilt_model_gets_its_values_when_it_is_called(tmp_path: Path) -> None:
    first = make_model()
    ckf.save({"model": first}, tmp_path)
    second = keras.Sequential(
        [
            layers.Dense(8, name="in"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    status = ckf.restore({"model": second}, tmp_path)
    with pytest.raises(ckptfmt.MismatchError, match="stored values were not used"):
        status.assert_consumed()
    second(np.zeros((1, 4)))
    status.assert_consumed()
    assert np.array_equal(first.layers[0].kernel, second.layers[0].kernel)


def test_planning_builds_nothing(tmp_path: Path) -> None:
    first = make_state()
    train(first)
    ckf.save(first, tmp_path)
    second = make_state()
    report = plan(second, tmp_path)
    assert report.clean
    assert "optimizer/state/in/kernel/velocity" in report.matched
    assert not second["optimizer"].built


def test_a_part_can_be_restored_by_name(tmp_path: Path) -> None:
    first, second = make_state(), make_state()
    train(first)
    ckf.save(first, tmp_path)
    status = ckf.restore({"model": second["model"]}, tmp_path, names="model")
    assert status.report.clean
    pairs = zip(first["model"].variables, second["model"].variables, strict=True)
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)


def test_the_status_answers_what_tensorflow_users_ask(tmp_path: Path) -> None:
    first, second = make_model(), make_model()
    ckf.save({"model": first, "more": tf.Variable(1.0)}, tmp_path)
    partly = ckf.restore({"model": second}, tmp_path, strict=False)
    assert partly.expect_partial() is partly
    assert list(partly.pending) == []
    partly.assert_existing_objects_matched().assert_nontrivial_match()
    with pytest.raises(ckptfmt.MismatchError, match="stored values were not used: more"):
        partly.assert_consumed()
    extra = {"model": second, "other": tf.Variable(1.0)}
    lacking = ckf.restore(extra, tmp_path, strict=False)
    with pytest.raises(ckptfmt.MismatchError, match="variables were not restored: other"):
        lacking.assert_existing_objects_matched()
    with pytest.raises(ckptfmt.MismatchError):
        ckf.restore({"model": second}, tmp_path)
    partly.close()


def pair(first: Any, second: Any) -> tf.Module:
    module = tf.Module()
    module.a, module.b = first, second
    return module


def test_a_tie_that_is_lost_is_reported_and_both_get_the_value(tmp_path: Path) -> None:
    variable = tf.Variable([1.0, 2.0])
    ckf.save({"m": pair(variable, variable)}, tmp_path)
    loose = pair(tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0]))
    status = ckf.restore({"m": loose}, tmp_path)
    assert list(status.report.ties) == ["m/b"]
    assert status.report.matched_by == {"m/b": "alias"}
    assert loose.a.numpy().tolist() == loose.b.numpy().tolist() == [1.0, 2.0]


def test_a_tied_target_refuses_two_stored_values(tmp_path: Path) -> None:
    tied = tf.Variable([0.0])
    ckf.save({"m": pair(tf.Variable([1.0]), tf.Variable([2.0]))}, tmp_path, step=1)
    with pytest.raises(ckptfmt.MismatchError, match=r"m/b: expected one value"):
        ckf.restore({"m": pair(tied, tied)}, tmp_path)
    assert tied.numpy().tolist() == [0.0]
    ckf.save({"m": pair(tf.Variable([3.0]), tf.Variable([3.0]))}, tmp_path, step=2)
    assert ckf.restore({"m": pair(tied, tied)}, tmp_path).report.clean
    assert tied.numpy().tolist() == [3.0]


def test_one_variable_in_two_objects_of_a_tree_takes_one_value(tmp_path: Path) -> None:
    shared = tf.Variable([1.0])
    ckf.save({"m": pair(shared, tf.Variable([2.0])), "ema": shared}, tmp_path)
    with ckptfmt.Store(tmp_path).open() as ckpt:
        assert ckpt.ties() == [["m/a", "ema"]]
    loose = {"m": pair(tf.Variable([0.0]), tf.Variable([0.0])), "ema": tf.Variable([0.0])}
    report = ckf.restore(loose, tmp_path).report
    assert list(report.ties) == ["ema"]
    assert loose["ema"].numpy().tolist() == [1.0]


def test_load_gives_tensors_and_keeps_ties_values_and_containers(tmp_path: Path) -> None:
    shared = tf.Variable([1.0, 2.0])
    tree = {
        "a": shared,
        "b": [shared, (tf.constant(3, tf.uint8), "text")],
        "half": tf.constant([1.5, float("nan")], tf.bfloat16),
        "bytes": tf.constant([[b"\xff\x00", b""]]),
        "plain": {"x": 1, "shape": tf.TensorShape([None, 2]), "dtype": tf.bfloat16},
        "empty": tf.zeros([0, 3], tf.int16),
    }
    ckf.save(tree, tmp_path)
    loaded = ckf.load(tmp_path)
    assert loaded["a"] is loaded["b"][0]
    assert isinstance(loaded["a"], tf.Tensor)
    assert isinstance(loaded["b"][1], tuple)
    assert loaded["b"][1][0].dtype == tf.uint8
    assert loaded["b"][1][1] == "text"
    assert loaded["half"].numpy().tobytes() == tree["half"].numpy().tobytes()
    assert loaded["bytes"].numpy().tolist() == [[b"\xff\x00", b""]]
    assert loaded["plain"]["x"] == 1
    assert loaded["plain"]["dtype"] is tf.bfloat16
    assert loaded["plain"]["shape"].as_list() == [None, 2]
    assert (loaded["empty"].dtype, loaded["empty"].shape) == (tf.int16, (0, 3))


def test_a_constant_is_replaced_in_the_dict_or_list_that_holds_it(tmp_path: Path) -> None:
    ckf.save({"c": tf.constant([1, 2]), "l": [tf.constant(b"x")]}, tmp_path)
    held = tf.constant([0, 0])
    target = {"c": held, "l": [tf.constant(b"")]}
    assert ckf.restore(target, tmp_path).report.clean
    assert target["c"].numpy().tolist() == [1, 2]
    assert target["l"][0].numpy() == b"x"
    assert held.numpy().tolist() == [0, 0]
    with pytest.raises(ckptfmt.MismatchError, match="c"):
        ckf.restore({"c": tf.constant([1.0, 2.0]), "l": [tf.constant(b"")]}, tmp_path)
    with pytest.raises(ckptfmt.UsageError, match="cannot be replaced"):
        ckf.restore({"c": (held,), "l": [tf.constant(b"")]}, tmp_path)


def test_like_gives_variables_and_tensors_of_their_own_kind(tmp_path: Path) -> None:
    ckf.save({"v": tf.Variable([1.0]), "c": tf.constant([2.0]), "n": np.ones(1)}, tmp_path)
    like = {"v": tf.Variable([0.0]), "c": tf.constant([0.0]), "n": np.zeros(1)}
    made = ckf.load(tmp_path, like=like)
    assert isinstance(made["v"], tf.Variable)
    assert made["v"] is not like["v"]
    assert isinstance(made["c"], tf.Tensor)
    assert isinstance(made["n"], np.ndarray)
    assert [float(made[key][0]) for key in like] == [1.0, 2.0, 1.0]


def test_load_names_a_leaf_that_tensorflow_cannot_hold(tmp_path: Path) -> None:
    ckf.save({"a": {"t": np.zeros(2, "datetime64[s]"), "ok": np.zeros(1)}}, tmp_path)
    with pytest.raises(ckptfmt.UnsupportedError, match="no such dtype: a/t"):
        ckf.load(tmp_path)
    assert isinstance(ckf.load(tmp_path, names="a/ok")["a"]["ok"], tf.Tensor)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bool, tf.bfloat16, tf.string])
def test_a_store_of_only_empty_or_scalar_tensors_works(
    tmp_path: Path, shape: tuple[int, ...], dtype: tf.DType
) -> None:
    value = tf.fill(shape, "") if dtype == tf.string else tf.zeros(shape, dtype)
    first, second = tf.Variable(value), tf.Variable(value)
    ckf.save({"a": first, "b": second}, tmp_path)
    loaded = ckf.load(tmp_path)
    assert (loaded["a"].dtype, tuple(loaded["a"].shape)) == (dtype, shape)
    assert loaded["a"] is not loaded["b"]
    assert ckf.restore({"a": first, "b": second}, tmp_path).report.clean
    assert ckptfmt.Store(tmp_path).verify().ok


BOTH = {
    "bfloat16": np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16),
    "float8_e5m2": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2),
    "float8_e4m3fn": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
    "float32": np.frombuffer(b"\x01\x00\xa0\x7f\x00\x00\x00\x80", np.float32),
    "complex64": np.array([1 + 2j, complex(0, float("inf"))], np.complex64),
    "uint16": np.arange(5, dtype=np.uint16),
    "bool": np.array([True, False]),
}


@pytest.mark.parametrize("dtype", sorted(BOTH))
def test_torch_tensorflow_and_numpy_read_each_others_bytes(tmp_path: Path, dtype: str) -> None:
    ckt = ckptfmt.torch
    array = BOTH[dtype]
    raw = array.view(np.uint8).tobytes()
    as_torch = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))
    as_tf = ckf.ADAPTER.make(tf.constant(0), array)
    ckt.save({"x": as_torch}, tmp_path / "torch")
    ckf.save({"x": as_tf}, tmp_path / "tf")
    for store in ("torch", "tf"):
        in_numpy = ckptfmt.load(tmp_path / store)["x"]
        assert in_numpy.dtype == array.dtype
        assert in_numpy.tobytes() == raw
        in_tf = ckf.load(tmp_path / store)["x"]
        assert in_tf.dtype.name == dtype
        assert in_tf.numpy().tobytes() == raw
        in_torch = ckt.load(tmp_path / store)["x"]
        assert in_torch.dtype == getattr(torch, dtype)
        assert in_torch.view(torch.uint8).numpy().tobytes() == raw


def test_a_keras_model_takes_weights_that_torch_saved_under_its_names(tmp_path: Path) -> None:
    ckt = ckptfmt.torch
    model = make_model()
    weights: dict[str, Any] = {}
    for name in ("in", "dense"):
        layer = model.get_layer("in") if name == "in" else model.layers[-1]
        kernel = torch.randn(*layer.kernel.shape)
        weights[name] = {"kernel": kernel, "bias": torch.randn(layer.bias.shape[0])}
    ckt.save({"model": weights}, tmp_path)
    allow = ("model/batch_normalization", "model/dropout")
    status = ckf.restore({"model": model}, tmp_path, allow_missing=allow)
    assert len(status.report.matched) == 4
    assert np.array_equal(model.get_layer("in").kernel, weights["in"]["kernel"].numpy())
    assert np.array_equal(model.layers[-1].bias, weights["dense"]["bias"].numpy())


SECOND_PROCESS = """
import sys, numpy as np, keras
from keras import layers
import ckptfmt.tensorflow as ckf
from ckptfmt import plan
for _ in range(3):
    layers.Dense(1), layers.Dropout(0.1), layers.BatchNormalization()
model = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="in"),
    layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)])
optimizer = keras.optimizers.Adam()
ckf.restore({"model": model, "optimizer": optimizer}, sys.argv[1],
    names=("model", "optimizer")).assert_consumed()
np.savez(sys.argv[2], *[v.numpy() for v in model.variables + optimizer.variables])
"""


def test_another_process_with_other_automatic_names_restores_the_same(tmp_path: Path) -> None:
    state = make_state()
    train(state)
    ckf.save(state, tmp_path / "run")
    out = tmp_path / "out.npz"
    subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS, str(tmp_path / "run"), str(out)], check=True
    )
    with np.load(out) as found:
        arrays = [found[f"arr_{row}"] for row in range(len(found.files))]
    expected = state["model"].variables + state["optimizer"].variables
    assert len(arrays) == len(expected)
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(arrays, expected, strict=True))
