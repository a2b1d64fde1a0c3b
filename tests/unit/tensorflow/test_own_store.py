"""What a layer of the user's saves beside its variables is saved, and given back to its own code."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ckptfmt
import ckptfmt.tensorflow as ckf


class Counting(keras.layers.Layer):
    """Keeps an array that no variable holds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = np.zeros(0, np.int64)
        self.bad = False

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(2,), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * self.w

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        super().save_own_variables(store)
        store["seen"] = self.seen

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        rest = {key: value for key, value in store.items() if key != "seen"}
        super().load_own_variables(rest)
        self.seen = np.array(store["seen"])
        if self.bad:
            self.bad = False
            raise OSError("no")


def model(seen: list[int], weight: float = 1.0) -> Any:
    made = keras.Sequential([keras.Input((2,)), Counting(name="c"), keras.layers.Dense(2)])
    made.layers[0].seen = np.array(seen, np.int64)
    made.layers[0].w.assign([weight, weight])
    return made


def test_a_layers_own_arrays_come_back_through_its_own_code(tmp_path: Path) -> None:
    ckf.save({"m": model([3, 4], 7.0)}, tmp_path)
    assert ckptfmt.load(tmp_path)["m"]["c"]["own_variables"]["seen"].tolist() == [3, 4]
    fresh = model([])
    ckf.restore({"m": fresh}, tmp_path).assert_consumed()
    assert fresh.layers[0].seen.tolist() == [3, 4]
    assert fresh.layers[0].w.numpy().tolist() == [7.0, 7.0]


def test_a_layer_gets_its_own_arrays_back_if_its_code_fails(tmp_path: Path) -> None:
    ckf.save({"m": model([3, 4], 7.0)}, tmp_path)
    target = model([9], 2.0)
    target.layers[0].bad = True
    with pytest.raises(OSError, match="no"):
        ckf.restore({"m": target}, tmp_path)
    assert target.layers[0].seen.tolist() == [9]
    assert target.layers[0].w.numpy().tolist() == [2.0, 2.0]


def test_arrays_that_were_not_saved_are_missing(tmp_path: Path) -> None:
    ckptfmt.save({"m": {"c": {"w": np.ones(2, np.float32)}}}, tmp_path)
    with pytest.raises(ckptfmt.MismatchError, match="m/c/own_variables/seen"):
        ckf.restore({"m": model([9])}, tmp_path, names="m/c")


def test_a_layer_that_is_built_after_the_restore_is_given_them_then(tmp_path: Path) -> None:
    ckf.save({"m": model([3, 4], 7.0)}, tmp_path)
    late = keras.Sequential([Counting(name="c"), keras.layers.Dense(2)])
    status = ckf.restore({"m": late}, tmp_path)
    late(np.ones((1, 2), np.float32))
    status.assert_consumed()
    assert late.layers[0].seen.tolist() == [3, 4]
    assert late.layers[0].w.numpy().tolist() == [7.0, 7.0]
