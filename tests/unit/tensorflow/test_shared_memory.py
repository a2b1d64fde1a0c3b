"""Variables whose memory others see: each target holds what is stored for it, or nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
from ckptfmt.errors import MismatchError
from ckptfmt.tensorflow.tensors import _SHARED, adopt, copy_of


def address(variable: Any) -> int:
    return int(np.from_dlpack(variable.read_value()).__array_interface__["data"][0])


def aligned(nbytes: int) -> Any:
    """Memory that begins where TensorFlow wants it to."""
    memory = np.empty(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


def test_a_variable_over_an_arrays_memory_and_that_array_hold_their_own_values(
    tmp_path: Path,
) -> None:
    """An assignment never writes to memory that others see, so there is no overlap to refuse."""
    ckptfmt.save({"v": np.ones(16, np.float32), "n": np.zeros(16, np.float32)}, tmp_path)
    array = np.full(16, 7, np.float32)
    shared = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    variable = tf.Variable(shared)
    target = {"v": variable, "n": array}
    assert ckptfmt.restore(target, tmp_path).clean
    assert variable.numpy().tolist() == [1.0] * 16
    assert array.tolist() == [0.0] * 16


def test_what_was_read_from_a_variable_keeps_its_values(tmp_path: Path) -> None:
    ckptfmt.save({"v": np.ones(16, np.float32)}, tmp_path)
    variable = tf.Variable(np.full(16, 7, np.float32))
    seen = np.from_dlpack(variable.read_value())
    assert address(variable) == seen.__array_interface__["data"][0]
    ckptfmt.restore({"v": variable}, tmp_path)
    assert seen.tolist() == [7.0] * 16
    assert variable.numpy().tolist() == [1.0] * 16


def test_one_variable_under_two_names_takes_no_two_values(tmp_path: Path) -> None:
    variable = tf.Variable([1.0, 2.0])
    ckptfmt.save({"a": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}, tmp_path / "bad")
    ckptfmt.save({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, tmp_path / "good")
    with pytest.raises(MismatchError, match="two stored values"):
        ckptfmt.restore({"a": variable, "b": variable}, tmp_path / "bad")
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert ckptfmt.restore({"a": variable, "b": variable}, tmp_path / "good").clean
    assert variable.numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64", "bfloat16"])
def test_a_large_array_is_handed_over_without_a_copy(dtype: str) -> None:
    words = aligned(1 << 20)
    words[:] = np.arange(1 << 20) % 2
    array = words.view(tf.as_dtype(dtype).as_numpy_dtype)
    tensor = adopt(array)
    assert tensor.dtype == tf.as_dtype(dtype)
    shown = tf.bitcast(tensor, tf.uint16) if dtype == "bfloat16" else tensor
    assert np.shares_memory(np.from_dlpack(shown), array)
    assert tensor.numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [*sorted(_SHARED), "bfloat16"])
def test_a_copy_has_the_values_in_memory_of_its_own(dtype: str) -> None:
    array = aligned(1 << 17).view(tf.as_dtype(dtype).as_numpy_dtype)
    array[:] = np.arange(len(array)) % 2
    expected = array.tobytes()
    made = copy_of(array)
    array[:] = 1
    assert made.dtype == tf.as_dtype(dtype)
    assert made.numpy().tobytes() == expected


@pytest.mark.parametrize("kind", ["unaligned", "read-only", "strided", "small"])
def test_what_tensorflow_cannot_take_over_is_copied(kind: str) -> None:
    memory = aligned(1 << 20).view(np.float32)
    memory[:] = np.arange(1 << 18)
    array = {
        "unaligned": memory[1:],
        "read-only": memory[:],
        "strided": memory[::2],
        "small": memory[:16],
    }[kind]
    if kind == "read-only":
        array.flags.writeable = False
    tensor = adopt(array)
    assert not np.shares_memory(np.from_dlpack(tensor), memory)
    assert np.array_equal(tensor.numpy(), array)  # its first use: TensorFlow aborts if unaligned


@pytest.mark.parametrize("atomic", [True, False])
def test_variables_that_were_tied_go_their_own_ways_after_a_restore(
    tmp_path: Path, atomic: bool
) -> None:
    values = np.ones(1 << 20, np.float32)
    ckptfmt.save({"a": values, "b": values}, tmp_path)
    state = {name: tf.Variable(tf.zeros(values.shape)) for name in "ab"}
    report = ckptfmt.restore(state, tmp_path, atomic=atomic)
    assert set(report.ties) == {"b"}
    for _ in range(2):  # in place from the second on
        state["a"].assign_add(tf.ones(values.shape))
    assert np.unique(state["a"].numpy()).tolist() == [3.0]
    assert np.unique(state["b"].numpy()).tolist() == [1.0]


def test_training_on_writes_to_no_file_that_a_variable_was_read_from(tmp_path: Path) -> None:
    values = np.ones(1 << 20, np.float32)
    ckptfmt.save({"v": values}, tmp_path)
    variable = tf.Variable(tf.zeros(values.shape))
    ckptfmt.restore({"v": variable}, tmp_path)  # its pages are resident: they are mapped
    for _ in range(2):
        variable.assign_add(tf.ones(values.shape))
    assert np.array_equal(ckptfmt.load(tmp_path)["v"], values)
    assert ckptfmt.Store(tmp_path).verify().ok
