"""Variables whose memory others see: each target holds what is stored for it, or nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
from ckptfmt.errors import MismatchError


def address(variable: Any) -> int:
    return int(np.from_dlpack(variable.read_value()).__array_interface__["data"][0])


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
