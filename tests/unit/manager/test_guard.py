"""LossGuard and what follows from it, with losses made up."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from ckptfmt import CkptWarning, Event, LossGuard, Manager, Store, UsageError
from ckptfmt.manager.guard import BAD_RESUMES_MAX, LossWatch
from ckptfmt.storage import open_backend
from ckptfmt.testing import FaultyBackend


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


def test_losses_that_are_no_numbers_after_each_resume_lead_to_the_next_older(
    tmp_path: Path,
) -> None:
    """The loop of the documentation, with a checkpoint that had gone wrong already."""
    state = {"w": np.zeros(4)}
    with Manager(tmp_path, guard=LossGuard(window=3)) as manager:
        for step in range(1, 4):
            manager.observe(step, loss=1.0)
            manager.save({"w": np.full(4, float(step))}, step=step)
    went: list[int | None] = []
    with Manager(tmp_path, guard=LossGuard(window=3), save_when=100) as manager:
        step = manager.restore(state).step
        for _ in range(7):
            verdict = manager.observe(step + 1, loss=float("nan"))
            went.append(verdict.rollback_to)
            if verdict.rollback_to is None:
                break
            step = manager.restore(state, at=verdict.rollback_to).step
    assert went == [3, 3, 2, 2, 2, 1, 1]
    assert Store(tmp_path).steps() == [1, 2, 3]


def test_losses_near_the_largest_number_are_losses_too() -> None:
    watch = LossWatch(LossGuard(window=3))
    assert [watch.see(1.7e308) for _ in range(9)] == [""] * 9


def test_a_guard_that_cannot_reach_the_store_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Manager(tmp_path, guard=LossGuard(window=2)) as manager:
        for step in (1, 2):
            manager.observe(step, loss=1.0)
            manager.save({"w": np.zeros(4)}, step=step)
    faulty = FaultyBackend(open_backend(tmp_path), fail_at=0, mode="from", only=lambda _: armed)
    armed = False
    manager = Manager(Store(faulty), guard=LossGuard(window=2))  # type: ignore[arg-type]
    manager.restore({"w": np.zeros(4)})
    armed = True
    manager.observe(3, loss=9.0)
    assert manager.observe(4, loss=9.0).reason  # a bad resume, which cannot be noted
    verdict = manager.observe(5, loss=float("inf"))
    assert (verdict.rollback_to, "no checkpoint is older" in verdict.reason) == (None, True)
    assert "is not noted" in caplog.text
    assert "the guard cannot look into" in caplog.text
    armed = False
    manager.close()


def test_bad_resumes_from_a_mirror_are_counted_there(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    guard = LossGuard(window=2)
    with Manager(first, guard=guard, mirror=second) as manager:
        for step in (1, 2):
            manager.observe(step, loss=1.0)
            manager.observe(step, loss=1.0)
            manager.save({"w": np.zeros(4)}, step=step)
    started = []
    for run in range(BAD_RESUMES_MAX + 1):
        node = tmp_path / f"node{run}"  # each time an empty disk
        told = pytest.warns(CkptWarning) if run == BAD_RESUMES_MAX else nullcontext()
        with told, Manager(node, guard=guard, mirror=second, save_when=100) as manager:
            started.append(manager.restore({"w": np.zeros(4)}).step)
            manager.observe(3, loss=9.0)
            manager.observe(4, loss=9.0)
    assert started == [2, 2, 2, 1]


def test_a_copy_in_the_mirror_is_no_better_where_resumes_went_wrong(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    guard = LossGuard(window=2)
    with Manager(first, guard=guard, mirror=second) as manager:
        for step in (1, 2):
            manager.observe(step, loss=1.0)
            manager.save({"w": np.zeros(4)}, step=step)
    for _ in range(BAD_RESUMES_MAX):
        with Manager(first, guard=guard) as manager:  # the mirror hears nothing of it
            assert manager.restore({"w": np.zeros(4)}).step == 2
            manager.observe(3, loss=9.0)
            manager.observe(4, loss=9.0)
    with (
        pytest.warns(CkptWarning, match="went wrong"),
        Manager(first, guard=guard, mirror=second) as manager,
    ):
        assert manager.restore({"w": np.zeros(4)}).step == 1
