"""A restore that may not hold the state twice: it checks every byte first, then reads again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import CorruptError

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


def make(seed: int) -> dict[str, Any]:
    """A model with state of several kinds, its optimizer, and variables large enough to be adopted."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), layers.Dropout(0.5), layers.Dense(2, name="head")])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    model.train_on_batch(X, X[:, :2] * seed)
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    table.insert(tf.constant(["seed"]), tf.constant([seed], tf.int64))
    large = [tf.Variable(tf.random.normal([200, 200])) for _ in range(3)]
    return {"table": table, "model": model, "optimizer": model.optimizer, "large": large}


def bytes_of(tree: dict[str, Any]) -> list[bytes]:
    variables = [*tree["model"].variables, *tree["optimizer"].variables, *tree["large"]]
    entry = tree["table"].lookup(tf.constant("seed")).numpy().tobytes()
    return [*(variable.numpy().tobytes() for variable in variables), entry]


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with ckptfmt.configure(staging_nbytes=0):
        yield


def test_everything_comes_back_and_what_is_not_built_waits(tmp_path: Path) -> None:
    first, other = make(1), make(2)
    ckf.save(first, tmp_path, step=1)
    ckf.restore(other, tmp_path).assert_consumed()
    assert bytes_of(other) == bytes_of(first)
    late = keras.Sequential([layers.Dropout(0.5), layers.Dense(2, name="head")])
    status = ckf.restore({"model": late}, tmp_path, names="model")
    assert "model/head/kernel" in status.pending
    late(X)
    status.assert_consumed()
    assert np.array_equal(late.layers[1].kernel, first["model"].layers[1].kernel)


def test_a_damaged_byte_is_found_before_the_first_variable_changes(tmp_path: Path) -> None:
    ckf.save(make(1), tmp_path, step=1)
    target = make(2)
    before = bytes_of(target)
    checkpoint = ckptfmt.open(tmp_path)
    (file,) = (tmp_path / "data").iterdir()
    content = bytearray(file.read_bytes())
    last = np.ascontiguousarray(checkpoint["large/2"].read()).tobytes()
    content[content.find(last) + len(last) - 1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError, match="large/2"):
        ckf.restore(target, tmp_path)
    assert bytes_of(target) == before
