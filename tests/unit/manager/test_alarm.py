"""Alarms: limits that a person should hear of, and what a save cost, kept with the checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptfmt import Alarm, Event, Manager, StorageError, Store, UsageError
from ckptfmt.manager.alarm import AlarmWatch
from ckptfmt.storage import open_backend
from ckptfmt.testing import FaultyBackend, Operation


def said(limits: Alarm, *events: tuple[str, float]) -> list[object]:
    watch = AlarmWatch(limits)
    found = [watch.see(Event(kind, 0.0, seconds=seconds)) for kind, seconds in events]
    return [data["alarm"] if data else "" for data in found]


def test_a_long_stall_is_an_alarm_at_once() -> None:
    events = [("save.staged", 4.9), ("save.staged", 5.1), ("save.commit", 500.0)]
    assert said(Alarm(), *events) == ["", "stall", ""]
    assert said(Alarm(stall_s=None), *events) == ["", "", ""]


def test_slow_saves_are_an_alarm_when_in_a_row() -> None:
    limits = Alarm(durable_s=10, in_a_row=2)
    seconds = [11, 9, 11, 11, 11, 11, 9, 11]
    found = said(limits, *(("save.commit", s) for s in seconds))
    assert [n for n, name in enumerate(found) if name == "slow"] == [3, 5]


def test_failing_saves_are_an_alarm_until_one_commits() -> None:
    kinds = ["save.error", "save.skipped", "save.commit", *["save.error"] * 3]
    assert said(Alarm(), *((kind, 0.0) for kind in kinds)) == ["", "", "", "", "", "failing"]


@pytest.mark.parametrize("wrong", [{"stall_s": 0.0}, {"durable_s": -1.0}, {"in_a_row": 0}])
def test_limits_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="alarm"):
        Alarm(**wrong)


def test_hooks_hear_of_a_store_that_fails(tmp_path: Path) -> None:
    events: list[Event] = []
    store = Store(FaultyBackend(open_backend(tmp_path), fail_at=0, mode="from"))  # type: ignore[arg-type]
    with Manager(store, hooks=[events.append], on_error="continue") as manager:
        for step in range(1, 7):
            manager.save({"w": np.zeros(8, np.float32)}, step=step)
    alarms = [event for event in events if event.kind == "alarm"]
    assert [alarm.data["alarm"] for alarm in alarms] == ["failing", "failing"]
    assert "fault injected" in str(alarms[0].data["last_error"])


def test_what_a_save_cost_stays_with_the_checkpoint(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        for step in (1, 2):
            manager.save({"w": np.ones(5000, np.float32)}, step=step)
    costs: list[Any] = [i.metadata["ckptfmt.save_cost"] for i in Store(tmp_path).checkpoints()]
    assert costs[0]["written_nbytes"] > 20_000 > costs[1]["written_nbytes"]
    assert all(0 < cost["stall_s"] <= cost["durable_s"] for cost in costs)


def test_a_store_that_goes_away_in_a_commit_is_an_alarm_while_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()
    events: list[Event] = []

    def hook(event: Event) -> None:
        events.append(event)
        if event.data.get("alarm") == "unknown":
            told.set()

    def fails(operation: Operation) -> bool:
        """The index is put, and the reply lost; nothing of it is read until the alarm was told."""
        if not operation.key.startswith("checkpoints/step"):
            return False
        return operation.kind == "put_if_absent" or (operation.kind == "get" and not told.is_set())

    monkeypatch.setattr("ckptfmt.engine.commit.UNKNOWN_AFTER_S", 0.0)
    store = Store(tmp_path)
    store.backend = FaultyBackend(
        open_backend(tmp_path), fail_at=0, mode="from", when="after", only=fails
    )
    with Manager(store, hooks=[hook]) as manager:
        manager.save({"w": np.ones(3)}, step=1)
    assert [e.data["alarm"] for e in events if e.kind == "alarm"] == ["unknown"]
    (alarm,) = (e for e in events if e.kind == "alarm")
    assert (alarm.checkpoint, alarm.step) == ("step-0000000000000001", 1)
    assert isinstance(alarm.error, StorageError)
    assert "whether checkpoints/step-0000000000000001~0.index was committed" in caplog.text
    assert [e.kind for e in events if e.kind.startswith("save.")][-1] == "save.commit"
    assert Store(tmp_path).steps() == [1]


def test_a_loop_that_waits_for_a_save_is_an_alarm_while_it_waits(tmp_path: Path) -> None:
    """The first save's last hook goes on only when the alarm of the second was told."""
    waits = threading.Event()
    events: list[Event] = []

    def hook(event: Event) -> None:
        events.append(event)
        if event.data.get("alarm") == "stall":
            waits.set()
        if (event.kind, event.step) == ("save.commit", 1):
            assert waits.wait(60)

    with Manager(tmp_path, hooks=[hook], alarm=Alarm(stall_s=0.05)) as manager:
        for step in (1, 2):
            manager.save({"w": np.full(3, step)}, step=step)
    reasons = [str(e.data["reason"]) for e in events if e.kind == "alarm" and e.step == 1]
    assert any("the loop waits for step-0000000000000001 for 0.05 s by now" in r for r in reasons)
    assert Store(tmp_path).steps() == [1, 2]
