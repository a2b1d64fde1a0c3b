"""The generators of the process, through a live handle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import MismatchError


def draw() -> list[Any]:
    generator = tf.random.get_global_generator()
    return [
        random.random(),
        float(np.random.rand()),
        generator.uniform([3]).numpy().tolist(),
        keras.random.uniform((3,)).numpy().tolist(),
    ]


def test_all_draws_after_a_restore_are_those_after_the_save(tmp_path: Path) -> None:
    state = {"rng": ckf.rng_state()}
    ckf.save(state, tmp_path / "run", step=1)
    first = draw()
    draw()
    ckf.restore(state, tmp_path / "run")
    assert draw() == first


def test_neither_save_nor_plan_draws_a_number(tmp_path: Path) -> None:
    state = {"rng": ckf.rng_state()}
    ckf.save(state, tmp_path / "a", step=1)
    first = draw()
    ckf.restore(state, tmp_path / "a")
    ckf.save(state, tmp_path / "b", step=1)
    ckptfmt.plan(state, tmp_path / "a")
    assert draw() == first


def test_a_handle_that_makes_the_seed_generator_draws_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run whose first save is in its middle: it goes on as without the save."""
    monkeypatch.setattr(global_state.GLOBAL_STATE_TRACKER, GLOBAL_SEED_GENERATOR, None)
    before = random.getstate()
    ckf.save({"rng": ckf.rng_state()}, tmp_path, step=1)
    assert random.getstate() == before
    assert getattr(global_state.GLOBAL_STATE_TRACKER, GLOBAL_SEED_GENERATOR) is not None


def test_a_restore_that_fails_leaves_the_generators_alone(tmp_path: Path) -> None:
    state = {"rng": ckf.rng_state(), "w": tf.Variable([1.0])}
    ckf.save(state, tmp_path / "run", step=1)
    following = draw()
    ckf.restore(state, tmp_path / "run")
    with pytest.raises(MismatchError):
        ckf.restore({"rng": state["rng"], "w": tf.Variable([1.0, 2.0])}, tmp_path / "run")
    assert draw() == following


def test_a_state_that_is_none_is_refused_before_anything_is_set(tmp_path: Path) -> None:
    state = {"rng": ckf.rng_state()}
    ckf.save(state, tmp_path / "run", step=1)
    tree = ckptfmt.load(tmp_path / "run")
    tree["rng"]["python"] = (3, (1, 2, 3), None)
    following = draw()
    ckf.restore(state, tmp_path / "run")
    with pytest.raises(MismatchError, match="not the state of these generators"):
        ckf.restore(state, tree)
    assert draw() == following
