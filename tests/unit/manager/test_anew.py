"""Runs that do not go on where the store ends: begun anew, or with saves that failed."""

from __future__ import annotations

import concurrent.futures
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import (
    CkptWarning,
    ExistsError,
    Manager,
    Mirror,
    NotFoundError,
    Preemption,
    Store,
    UsageError,
)


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(3000, value, np.float32), "step": value}


def train(folder: Path, steps: range, **options: Any) -> None:
    with Manager(folder, **options) as manager:
        for step in steps:
            manager.save(state(step), step=step)


def fails(manager: Manager, tree: object, step: int) -> None:
    """Save what the store has another tree of, and wait until that is known."""
    future = manager.save(tree, step=step)
    assert future is not None
    concurrent.futures.wait([future])


def test_a_run_begun_anew_below_old_steps_is_told_and_keeps_its_last_save(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    mirror = Mirror(second, keep=2)
    train(first, range(1000, 1003), keep=2, mirror=mirror)
    with pytest.warns(CkptWarning, match="step 10 is saved below step 1002") as told:
        train(first, range(10, 13), keep=2, mirror=mirror)
    assert len([row for row in told if row.category is CkptWarning]) == 1
    for store in (Store(first), Store(second)):
        assert store.steps() == [12, 1001, 1002]
        assert ckptfmt.load(store, step=12)["step"] == 12
    train(first, range(1003, 1005), keep=2)  # above them again: the rules alone hold
    assert Store(first).steps() == [1003, 1004]


def test_a_run_begun_anew_beside_a_mirror_of_an_earlier_one_is_told(tmp_path: Path) -> None:
    train(tmp_path / "old", range(1000, 1002), mirror=tmp_path / "b")
    with pytest.warns(CkptWarning, match="step 10 is saved below step 1001"):
        train(tmp_path / "new", range(10, 12), mirror=tmp_path / "b")


def test_a_run_that_has_restored_is_told_nothing_of_newer_steps(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    with Manager(tmp_path) as manager:
        manager.restore(state(0), at=1)
        manager.save(state(2), step=2)
        ckptfmt.save(state(9), tmp_path, step=9)  # another trainer's
        manager.save(state(3), step=3)


def test_the_last_save_of_a_preempted_job_is_made_though_one_before_it_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckptfmt.save(state(7), tmp_path, step=2)
    notice = Preemption(signals=(), exit_code=3)

    def job() -> None:
        with Manager(tmp_path, preemption=notice) as manager:
            manager.restore(state(0), at=2)
            ckptfmt.save(state(5), tmp_path, step=5)
            fails(manager, {"w": np.ones(3000, np.float32), "step": 5}, step=5)
            notice.request()
            manager.save(state(6), step=6)

    with pytest.raises(SystemExit) as left:
        job()
    assert left.value.code == 3
    assert Store(tmp_path).steps() == [2, 5, 6]
    assert "before the last save, one failed: this name holds another tree" in caplog.text


def test_training_goes_on_where_a_metric_comes_for_a_save_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Manager(tmp_path, on_error="continue") as manager:
        manager.save(state(1), step=1)
        with caplog.at_level(logging.ERROR):
            manager.annotate(2, val_loss=0.5)
        assert "val_loss is not noted at step 2: no such checkpoint" in caplog.text
        with pytest.raises(UsageError, match="metric is no number"):
            manager.annotate(1, val_loss="low")  # type: ignore[arg-type]
    with Manager(tmp_path) as manager, pytest.raises(NotFoundError, match="no such checkpoint"):
        manager.annotate(2, val_loss=0.5)


def test_an_error_that_was_not_seen_is_raised_where_the_job_may_go_on(tmp_path: Path) -> None:
    ckptfmt.save(state(1), tmp_path, step=1)

    def job() -> None:
        with Manager(tmp_path) as manager:
            fails(manager, state(2), step=1)
            manager.save(state(2), step=2)

    with pytest.raises(ExistsError):
        job()
    assert Store(tmp_path).steps() == [1]
