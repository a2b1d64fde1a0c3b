"""LossGuard and what follows from it, with losses made up."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from ckptfmt import CkptWarning, Event, LossGuard, Manager, UsageError
from ckptfmt.manager.guard import BAD_RESUMES_MAX, LossWatch


def test_a_loss_that_falls_is_never_wrong() -> None:
    guard = LossWatch(LossGuard(window=20))
    assert {guard.see(3 * math.exp(-n / 100)) for n in range(500)} == {""}


def test_a_value_that_is_not_finite_is_found_at_once() -> None:
    guard = LossWatch(LossGuard())
    assert guard.see(1.0) == ""
    assert guard.see(math.nan) == "not finite"
    assert guard.see(math.inf) == "not finite"


def test_one_outlier_is_no_spike_and_a_jump_is_one_said_once() -> None:
    guard = LossWatch(LossGuard(window=50, ratio=1.5))
    values = [1.0] * 60 + [3.0] + [1.0] * 20
    assert {guard.see(v) for v in values} == {""}
    found = [guard.see(2.0) for _ in range(10)]
    assert found.count("spike") == 1


def test_a_resume_is_judged_against_the_mean_before_it() -> None:
    guard = LossWatch(LossGuard(window=4, ratio=1.5))
    guard.resumed(1.0)
    assert [guard.see(1.2) for _ in range(4)] == ["", "", "", "good resume"]
    guard.resumed(1.0)
    assert [guard.see(2.0) for _ in range(4)] == ["", "", "", "bad resume"]
    guard.resumed(None)
    assert {guard.see(2.0) for _ in range(4)} == {""}


@pytest.mark.parametrize("wrong", [{"window": 0}, {"window": 2.5}, {"ratio": 1.0}])
def test_a_guard_that_cannot_watch_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="this guard cannot watch"):
        LossGuard(**wrong)  # type: ignore[arg-type]


def test_a_spike_gives_the_step_to_go_back_to_and_leaves_it_to_the_loop(tmp_path: Path) -> None:
    events: list[Event] = []
    guard = LossGuard(window=20)
    with Manager(tmp_path, save_when=10, guard=guard, hooks=[events.append]) as manager:
        for step in range(1, 46):
            verdict = manager.observe(step, loss=1.0 if step < 41 else 9.0)
            if verdict:
                break
            manager.save({"w": np.full(4, float(step))}, step=step)
        manager.wait()
        assert step == 41
        assert verdict.rollback_to == 30  # 40 may have seen what led to it: 41 - 2 is the last safe
        assert not verdict.stop
        assert "loss is 9 at step 41: spike, go back to step 30" in verdict.reason
        told = [event for event in events if event.kind == "guard"]
        assert [event.data["rollback_to"] for event in told] == [30]
        assert manager.store.steps() == [10, 20, 30, 40]  # nothing was moved


def test_three_bad_resumes_in_a_row_make_restore_choose_the_next_older(tmp_path: Path) -> None:
    def run(loss: float, resumes: int) -> int:
        """A process of its own: resumes, sees three losses, dies."""
        guard = LossGuard(window=3)
        state = {"w": np.zeros(4)}
        told = pytest.warns(CkptWarning) if resumes > BAD_RESUMES_MAX else nullcontext()
        with told, Manager(tmp_path, save_when=1, guard=guard) as manager:
            start = manager.restore(state).step
            for step in range(start, start + 3):
                manager.observe(step + 1, loss=loss)
            return start

    with Manager(tmp_path, guard=LossGuard(window=3)) as manager:
        for step in range(1, 5):
            manager.observe(step, loss=1.0)
            manager.save({"w": np.full(4, float(step))}, step=step)
    assert [run(1.0, 0), run(5.0, 1), run(1.0, 1), run(5.0, 1)] == [4] * 4  # a good one between
    assert [run(5.0, 2), run(5.0, 3)] == [4, 4]
    assert run(1.0, 4) == 3
