"""Manager: the loop of a run, and what happens to it."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import (
    CheckpointInfo,
    CkptWarning,
    CorruptError,
    Event,
    ExistsError,
    Manager,
    MismatchError,
    NotFoundError,
    Preemption,
    StorageError,
    Store,
    UsageError,
    keep,
    when,
)
from ckptfmt.engine import SaveFuture
from ckptfmt.manager.flight import Started

COST = {"stall_s": 0.0, "stage_s": 0.0}


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(20_000, step, np.float32), "step": step}


def train(folder: Path, steps: range, **options: Any) -> list[Event]:
    """A run that saves at every step, each with its own values."""
    events: list[Event] = []
    with Manager(folder, hooks=[events.append], **options) as manager:
        for step in steps:
            manager.save(state(step), step=step, metrics={"loss": 10 - step})
    return events


def kinds(events: list[Event], *wanted: str) -> list[tuple[str, int | None]]:
    return [(event.kind, event.step) for event in events if event.kind in wanted]


def damage(folder: Path, step: int) -> None:
    """Flip a byte in the middle of the data of a checkpoint that shares none."""
    files = ckptfmt.open(folder, step=step).index.files.ids
    path = folder / "data" / files[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# -- a run ------------------------------------------------------------------------------------------


def test_the_loop_of_the_readme_resumes_where_it_ended(tmp_path: Path) -> None:
    mine = state(0)

    def run(total: int) -> list[int]:
        done = []
        with Manager(tmp_path, keep=2, save_when=5) as manager:
            for step in range(manager.restore(mine).step, total):
                mine["w"] += 1
                mine["step"] = step + 1
                done.append(step)
                manager.save(mine, step=step + 1)
        return done

    assert run(12) == list(range(12))
    mine["w"][:] = -1
    assert run(16) == list(range(10, 16))
    assert (mine["step"], mine["w"][0]) == (16, 16)
    assert Store(tmp_path).steps() == [10, 15]


def test_a_save_that_is_not_due_looks_at_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __float__(self) -> float:
            pytest.fail("a metric was looked at")

    with Manager(tmp_path, save_when=10) as manager:
        assert manager.save(object(), step=3, metrics={"loss": Bomb()}) is None  # type: ignore[dict-item]
        assert manager.save(state(4), step=4, force=True) is not None


def test_should_save_and_save_agree_and_the_step_of_a_restore_is_not_due(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    with Manager(tmp_path, save_when=3) as manager:
        mine = state(0)
        assert manager.restore(mine).step == 3
        assert not manager.should_save(3)
        assert manager.save(mine, step=3) is None
        assert [
            s for s in range(4, 10) if manager.should_save(s) and manager.save(state(s), step=s)
        ] == [6, 9]


def test_retention_deletes_behind_a_verified_newer_one_and_gives_reasons(tmp_path: Path) -> None:
    events = train(tmp_path, range(1, 7), keep=keep.last(1) | keep.best("loss", mode="max"))
    assert Store(tmp_path).steps() == [1, 6]
    assert kinds(events, "delete") == [("delete", n) for n in (2, 3, 4, 5)]
    reasons = {event.data["reason"] for event in events if event.kind == "delete"}
    assert all("is newer and verified" in str(reason) for reason in reasons)


def test_what_a_person_saved_or_tagged_is_never_deleted(tmp_path: Path) -> None:
    ckptfmt.save(state(1), tmp_path, step=1)
    train(tmp_path, range(2, 4))
    Store(tmp_path).tag("good", 2)
    train(tmp_path, range(4, 6), keep=1)
    assert Store(tmp_path).steps() == [1, 2, 5]


def test_nothing_is_deleted_behind_a_damaged_newest(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    damage(tmp_path, 3)
    events: list[Event] = []
    with Manager(tmp_path, keep=1, hooks=[events.append]) as manager:
        decisions = manager.prune()
    assert [(d.step, d.kept, d.waits) for d in decisions] == [
        (1, True, True),
        (2, True, True),
        (3, True, False),
    ]
    alarm = next(event for event in events if event.kind == "alarm")
    assert isinstance(alarm.error, CorruptError)
    assert alarm.data["alarm"] == "damaged"
    assert Store(tmp_path).steps() == [1, 2, 3]


def test_what_a_killed_run_left_is_collected_after_the_first_save(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2))
    stray = tmp_path / "data" / ("0" * 32)
    stray.write_bytes(b"of a save that was killed")
    train(tmp_path, range(2, 4))
    listed = b"".join(path.read_bytes() for path in (tmp_path / "gc").iterdir())
    assert stray.name.encode() in listed  # and the run after the grace deletes it
    assert Store(tmp_path).steps() == [1, 2, 3]


@pytest.mark.damaged_store
def test_cleaning_up_that_fails_is_an_alarm_and_the_save_is_none_the_worse(tmp_path: Path) -> None:
    train(tmp_path, range(1, 3))
    index = tmp_path / "checkpoints" / "step-0000000000000002~0.index"
    index.write_bytes(b"rotten")
    events: list[Event] = []
    with Manager(tmp_path, keep=1, hooks=[events.append]) as manager:
        with pytest.warns(CkptWarning):
            manager.restore(state(0))
        manager.save(state(2), step=2)
        manager.wait()
    assert kinds(events, "save.error", "save.commit") == [("save.commit", 2)]
    alarm = next(event for event in events if event.kind == "alarm")
    assert alarm.data["alarm"] == "cleanup"
    assert "delete('step-0000000000000002', quarantined=True)" in str(alarm.error)


def test_a_dry_run_of_prune_explains_and_changes_nothing(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    with Manager(tmp_path, keep=1) as manager:
        assert [d.reason for d in manager.prune(dry_run=True)] == [
            "no newer one is verified yet",
            "no newer one is verified yet",
            "the newest",
        ]
        assert [d.kept for d in manager.prune()] == [False, False, True]


def test_metrics_that_come_later_decide_what_is_best(tmp_path: Path) -> None:
    with Manager(tmp_path, keep=keep.last(2) | keep.best("val", mode="max")) as manager:
        for step in range(1, 5):
            manager.save(state(step), step=step)
            manager.annotate(step, val=-step)
        manager.wait()
        best = manager.best()
        assert best is not None
        assert best.step == 1
        assert manager.store.steps() == [1, 3, 4]


def test_events_tell_the_story_and_a_failing_hook_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    def broken(event: Event) -> None:
        raise ZeroDivisionError

    with Manager(tmp_path, hooks=[broken, events.append]) as manager:
        manager.restore(state(0))
        manager.save(state(1), step=1)
    assert [event.kind for event in events] == [
        "restore.start", "save.start", "save.staged", "save.commit",
    ]  # fmt: skip
    assert events[-1].seconds is not None
    assert events[-1].nbytes > 0
    assert "a hook failed at save.commit" in caplog.text


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_error_of_a_save_is_raised_once_or_told_and_training_goes_on(
    tmp_path: Path, asynchronous: bool
) -> None:
    train(tmp_path, range(1, 2))
    manager = Manager(tmp_path, asynchronous=asynchronous)
    with pytest.raises(ExistsError):
        save_and_wait(manager, state(7), step=1)
    manager.close()
    events: list[Event] = []
    with Manager(
        tmp_path, asynchronous=asynchronous, on_error="continue", hooks=[events.append]
    ) as manager:
        manager.save(state(7), step=1)
        manager.save(state(2), step=2)
    assert kinds(events, "save.error", "save.commit") == [("save.error", 1), ("save.commit", 2)]
    assert ckptfmt.load(tmp_path, step=1)["step"] == 1


def test_the_body_s_error_wins_and_carries_the_save_s(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2))
    with pytest.raises(ZeroDivisionError) as caught, Manager(tmp_path) as manager:
        _start_and_fail(manager)
    (note,) = caught.value.__notes__
    assert note.startswith("ckptfmt: besides, a save failed: this name holds another tree")


def _start_and_fail(manager: Manager) -> None:
    # The same structure: what differs is found at the commit, in the background.
    assert manager.save(state(7) | {"step": 1}, step=1) is not None
    raise ZeroDivisionError


def save_and_wait(manager: Manager, tree: object, *, step: int) -> None:
    assert manager.save(tree, step=step) is not None
    manager.wait()


def test_a_full_disk_gives_back_the_space_of_what_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, range(1, 4))
    Store(tmp_path).delete(1)
    asked: list[float] = []
    real = Store.gc

    def gc(self: Store, *, grace_s: float = 600.0, **rest: Any) -> Any:
        asked.append(grace_s)
        return real(self, grace_s=grace_s, **rest)

    monkeypatch.setattr(Store, "gc", gc)
    with Manager(tmp_path, on_error="continue") as manager:
        future = SaveFuture("step-0000000000000009")
        future.set_exception(StorageError("full", reason="no-space", errno=errno.ENOSPC))
        save = Started(9, 0.0, COST, future, concurrent.futures.Future())
        manager._aftermath.finished(save, quiet=True)
    assert asked == [0]


def test_a_busy_manager_skips_or_waits(tmp_path: Path) -> None:
    events: list[Event] = []
    with Manager(tmp_path, when_busy="skip", hooks=[events.append]) as manager:
        slow = SaveFuture("step-0000000000000001")
        save = Started(1, 0.0, COST, slow, concurrent.futures.Future())
        save.after.set_result(None)
        manager._flight.begin(save)
        assert manager.save(state(2), step=2) is None
        assert kinds(events, "save.skipped") == [("save.skipped", 2)]
        assert manager.save(state(3), step=3, force=True) is not None


def test_a_manager_that_cleans_up_is_busy_too(tmp_path: Path) -> None:
    events: list[Event] = []
    with Manager(tmp_path, when_busy="skip", hooks=[events.append]) as manager:
        done = SaveFuture("step-0000000000000001")
        done.set_running_or_notify_cancel()
        done.set_exception(OSError("a test"))
        done.exception()
        after: concurrent.futures.Future[None] = concurrent.futures.Future()
        manager._flight.begin(Started(1, 0.0, COST, done, after))
        assert manager.save(state(2), step=2) is None
        after.set_result(None)
        assert manager.save(state(3), step=3) is not None


def test_the_stall_is_all_that_the_loop_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the save before is the loop's too, though no part of this save's staging."""
    now = [100.0]
    monkeypatch.setattr("ckptfmt.manager.manager.time.monotonic", lambda: now[0])
    events: list[Event] = []
    with Manager(tmp_path, hooks=[events.append], asynchronous=False) as manager:
        monkeypatch.setattr(manager, "_settle", lambda: now.__setitem__(0, now[0] + 7))
        manager.save(state(1), step=1)
    staged = next(event for event in events if event.kind == "save.staged")
    assert (staged.seconds, staged.data) == (7.0, {"stage_s": 0.0})
    alarm = next(event for event in events if event.kind == "alarm")
    assert alarm.data["alarm"] == "stall"
    info = Store(tmp_path).latest()
    assert info is not None
    assert info.metadata["ckptfmt.save_cost"]["stall_s"] == 7.0  # type: ignore[index]


def test_wait_says_when_the_time_is_over(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        after: concurrent.futures.Future[None] = concurrent.futures.Future()
        manager._flight.begin(Started(1, 0.0, COST, SaveFuture("x"), after))
        with pytest.raises(StorageError, match="not done yet"):
            manager.wait(0.01)
        after.set_result(None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep": 0},
        {"keep": -1},
        {"save_when": 0},
        {"when_busy": "panic"},
        {"on_error": "ignore"},
        {"codec": "lz5"},
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ckptfmt.CheckpointError):
        Manager(tmp_path, **wrong)
    with pytest.raises(UsageError, match="a store, not one checkpoint"):
        Manager(f"{tmp_path}@7")


# -- healing ----------------------------------------------------------------------------------------


def test_an_empty_store_is_a_false_report_or_an_error_if_required(tmp_path: Path) -> None:
    with Manager(tmp_path / "none") as manager:
        report = manager.restore(state(0))
        assert (bool(report), report.step, report.info) == (False, 0, None)
        assert manager.load() is None
        with pytest.raises(NotFoundError, match="no checkpoint to restore"):
            manager.restore(state(0), required=True)


@pytest.mark.damaged_store
def test_a_damaged_newest_is_passed_over_and_set_aside_by_the_next_save(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    damage(tmp_path, 3)
    mine = state(0)
    with Manager(tmp_path) as manager:
        with pytest.warns(CkptWarning, match="step-0000000000000003 is passed over"):
            report = manager.restore(mine)
        assert (report.step, mine["step"], mine["w"][0]) == (2, 2, 2)
        assert [bad.checkpoint for bad in report.rejected] == ["step-0000000000000003"]
        assert manager.store.steps() == [1, 2, 3]  # looking moves nothing
        manager.save(state(30), step=3)
        manager.wait()
        assert [i.step for i in manager.store.checkpoints(quarantined=True)] == [3]
    assert ckptfmt.load(tmp_path)["step"] == 30


@pytest.mark.damaged_store
def test_none_good_is_the_last_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    train(tmp_path, range(1, 3))
    damage(tmp_path, 1)
    damage(tmp_path, 2)
    mine = state(0)
    with Manager(tmp_path) as manager, pytest.warns(CkptWarning), pytest.raises(CorruptError):
        manager.restore(mine)
    assert mine["step"] == 0


def test_validators_see_staged_arrays_before_any_target_changes(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    mine = state(0)
    seen = []

    def finite(arrays: Mapping[str, Any], info: CheckpointInfo) -> None:
        seen.append((info.step, float(arrays["w"][0]), arrays["step"], float(mine["w"][0])))
        if info.step == 3:
            raise ValueError("step 3 looks odd")

    with Manager(tmp_path, validate=[finite]) as manager:
        with pytest.warns(CkptWarning, match="a validator says: step 3 looks odd"):
            report = manager.restore(mine)
        assert report.step == 2
        assert seen == [(3, 3.0, 3, 0.0), (2, 2.0, 2, 0.0)]
        with pytest.warns(CkptWarning):
            loaded = manager.load()
        assert loaded is not None
        assert (loaded.info.step, loaded.tree["step"], len(loaded.report.rejected)) == (2, 2, 1)


def test_a_validator_cannot_change_what_is_restored(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2))
    mine = state(0)

    def normalizes(arrays: Mapping[str, Any], info: CheckpointInfo) -> None:
        with pytest.raises(ValueError, match="read-only"):
            arrays["w"][:] = 0

    with Manager(tmp_path, validate=[normalizes]) as manager:
        manager.restore(mine)
    assert float(mine["w"][0]) == 1.0


def test_an_error_of_the_tree_is_raised_and_not_taken_for_damage(tmp_path: Path) -> None:
    train(tmp_path, range(1, 3))
    with Manager(tmp_path) as manager, pytest.raises(MismatchError):
        manager.restore({"w": np.zeros(3), "step": 0})


def test_going_on_from_an_older_step_sets_the_newer_ones_aside(tmp_path: Path) -> None:
    train(tmp_path, range(1, 6))
    with Manager(tmp_path, keep=3) as manager:
        manager.restore(state(0), at=2)
        manager.save(state(30), step=3)
        manager.wait()
        assert manager.store.steps() == [1, 2, 3]
        assert [i.step for i in manager.store.checkpoints(quarantined=True)] == [3, 4, 5]
        reason = manager.store.checkpoints(quarantined=True)[0].metadata["ckptfmt.quarantine"]
        assert reason == "training went on from step-0000000000000002"


def test_load_gives_the_structure_of_like(tmp_path: Path) -> None:
    train(tmp_path, range(1, 3))
    with Manager(tmp_path) as manager:
        loaded = manager.load(like=state(0), at=1)
        assert loaded is not None
        assert (loaded.tree["step"], loaded.info.step) == (1, 1)


# -- preemption -------------------------------------------------------------------------------------

RUN = """
    import os, signal, sys, time
    import numpy as np
    from ckptfmt import Manager, Preemption

    def before(number, frame):
        print("the handler before", flush=True)

    signal.signal(signal.SIGTERM, before)
    with Manager(sys.argv[1], save_when=1000, preemption=Preemption(exit_code=85)) as manager:
        for step in range(1, 100):
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            verdict = manager.observe(step)
            assert verdict.stop == (step >= 7), verdict
            manager.save({"w": np.full(1000, step)}, step=step)
    print("not reached")
"""


def test_a_signal_saves_at_the_step_s_end_calls_the_handler_before_and_leaves(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (85, "the handler before\n"), done.stderr
    assert ckptfmt.load(tmp_path)["w"][0] == 7
    assert Store(tmp_path).steps() == [7]


def test_a_request_without_a_signal_stops_the_loop_and_handlers_come_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    preemption = Preemption(signals=["SIGUSR1"])
    with Manager(tmp_path, save_when=when.every(steps=1000), preemption=preemption) as manager:
        assert signal.getsignal(signal.SIGUSR1) != before
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.observe(3).stop
        future = manager.save(state(3), step=3)
        assert future is not None
        assert future.done()  # durable, and no exit code: the loop ends by itself
    assert signal.getsignal(signal.SIGUSR1) == before


def test_signals_that_cannot_be_taken_are_refused() -> None:
    for wrong in ("SIGKILL", "SIGNOTHING", "usr1"):
        with pytest.raises(UsageError, match="no preemption can be told"):
            Preemption(signals=[wrong])
