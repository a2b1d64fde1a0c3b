"""A second store that follows the first one, and a restore that looks at both."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CkptWarning, Event, Manager, Mirror, StorageError, Store, UsageError, keep
from ckptfmt.engine import CopyRequest, copy_checkpoints
from ckptfmt.storage import Backend


def state(step: int) -> dict[str, Any]:
    return {"frozen": np.arange(50_000.0), "w": np.full(20_000, step, np.float32), "step": step}


def train(folder: Path, steps: range, **options: Any) -> list[Event]:
    events: list[Event] = []
    with Manager(folder, hooks=[events.append], **options) as manager:
        for step in steps:
            manager.save(state(step), step=step)
    return events


def damage(folder: Path, step: int) -> None:
    index = ckptfmt.open(folder, step=step).index
    path = (
        folder / "data" / min(index.files.ids, key=lambda i: (folder / "data" / i).stat().st_size)
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_mirror_has_everything_when_the_manager_is_left(tmp_path: Path) -> None:
    events = train(tmp_path / "a", range(1, 4), mirror=tmp_path / "b")
    mirror = Store(tmp_path / "b")
    assert mirror.steps() == [1, 2, 3]
    assert mirror.verify().ok
    done = [event for event in events if event.kind == "mirror.done"]
    assert [event.step for event in done] == [1, 2, 3]
    assert done[-1].nbytes < done[0].nbytes / 2  # the frozen tensor went over once


def test_the_mirror_keeps_what_its_own_policy_says(tmp_path: Path) -> None:
    with Manager(tmp_path / "a", keep=1, mirror=Mirror(tmp_path / "b", keep=3)) as manager:
        for step in range(1, 7):
            manager.save(state(step), step=step)
            manager.wait()
            deadline = time.monotonic() + 60
            while step not in Store(tmp_path / "b").steps() and time.monotonic() < deadline:
                time.sleep(0.01)
    assert Store(tmp_path / "a").steps() == [6]
    assert Store(tmp_path / "b").steps() == [4, 5, 6]


def test_what_an_earlier_run_left_to_do_is_done(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 3))
    train(tmp_path / "a", range(0), mirror=tmp_path / "b")
    assert Store(tmp_path / "b").steps() == [1, 2]


def test_a_mirror_that_fails_costs_nothing_is_told_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = copy_checkpoints, [3]

    def flaky(source: Backend, target: Backend, *rest: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise StorageError("the network is down", reason="test", retryable=True)
        return real(source, target, *rest)

    monkeypatch.setattr("ckptfmt.manager.mirror.copy_checkpoints", flaky)
    monkeypatch.setattr("ckptfmt.manager.mirror.BACKOFF_MAX_S", 0.01)
    events: list[Event] = []
    with Manager(tmp_path / "a", mirror=tmp_path / "b", hooks=[events.append]) as manager:
        manager.save(state(1), step=1)
        manager.wait()
        deadline = time.monotonic() + 60
        while failures[0] and time.monotonic() < deadline:
            time.sleep(0.01)
    lags = [event for event in events if event.kind == "mirror.lag"]
    assert [event.data["failures"] for event in lags] == [1, 2, 3]
    assert lags[0].data["pending"] == 1
    assert Store(tmp_path / "b").steps() == [1]


def test_a_mirror_that_is_gone_does_not_keep_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*args: Any) -> Any:
        raise StorageError("no such host", reason="test")

    monkeypatch.setattr("ckptfmt.manager.mirror.copy_checkpoints", gone)
    monkeypatch.setattr("ckptfmt.manager.mirror.CLOSE_TIMEOUT_S", 60.0)
    events = train(tmp_path / "a", range(1, 3), mirror=tmp_path / "b")
    assert "left before the mirror" not in caplog.text  # what it says when the time is over
    assert Store(tmp_path / "a").steps() == [1, 2]
    assert [event.kind for event in events].count("mirror.lag") >= 1


def test_with_the_first_store_lost_restore_takes_the_mirror_s(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 4), mirror=tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    mine = state(0)
    with Manager(tmp_path / "a", mirror=tmp_path / "b") as manager:
        assert manager.restore(mine).step == 3
        assert mine["step"] == 3
        manager.save(state(4), step=4)
    assert Store(tmp_path / "a").steps() == [4]
    assert Store(tmp_path / "b").steps() == [1, 2, 3, 4]


@pytest.mark.damaged_store
def test_a_damaged_file_is_fetched_from_the_mirror(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 4), mirror=tmp_path / "b")
    damage(tmp_path / "a", 3)
    mine = state(0)
    with Manager(tmp_path / "a", mirror=tmp_path / "b") as manager:
        with pytest.warns(CkptWarning, match="is passed over"):
            report = manager.restore(mine)
        assert (report.step, mine["w"][0]) == (3, 3)
        assert manager.store.verify(3).ok


def test_what_is_set_aside_here_is_set_aside_there(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 5), mirror=tmp_path / "b")
    with Manager(tmp_path / "a", mirror=tmp_path / "b") as manager:
        manager.restore(state(0), at=2)
        manager.save(state(30), step=3)
    for folder in ("a", "b"):
        store = Store(tmp_path / folder)
        assert store.steps() == [1, 2, 3]
        assert ckptfmt.load(store)["step"] == 30
        assert [i.step for i in store.checkpoints(quarantined=True)] == [3, 4]


def test_what_is_behind_is_told_and_the_limit_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float | None] = []
    real = copy_checkpoints

    def copy(source: Backend, target: Backend, chosen: Any, request: CopyRequest) -> Any:
        rates.append(request.bytes_per_s)
        return real(source, target, chosen, request)

    train(tmp_path / "a", range(1, 4))
    monkeypatch.setattr("ckptfmt.manager.mirror.copy_checkpoints", copy)
    mirror = Mirror(tmp_path / "b", bytes_per_s=1e9)
    events = train(tmp_path / "a", range(0), mirror=mirror)
    done = [event.data for event in events if event.kind == "mirror.done"]
    assert [data["pending"] for data in done] == [2, 1, 0]
    assert all(data["lag_s"] > 0 for data in done)  # type: ignore[operator]
    assert rates == [1e9] * 3


def test_a_store_is_not_its_own_mirror(tmp_path: Path) -> None:
    """Whose policy would delete what the store's keeps."""
    with pytest.raises(UsageError, match="a store is not its own mirror"):
        Manager(tmp_path / "a", keep=3, mirror=Mirror(str(tmp_path / "x" / ".." / "a"), keep=1))


@pytest.mark.parametrize("rate", [0, -1, float("inf")])
def test_a_rate_that_makes_no_sense_is_refused(tmp_path: Path, rate: float) -> None:
    with pytest.raises(UsageError, match="bytes_per_s above 0"):
        Mirror(tmp_path, bytes_per_s=rate)


def test_metrics_that_come_later_reach_the_mirror_and_its_policy(tmp_path: Path) -> None:
    policy = keep.last(1) | keep.best("val_loss")
    mirror = Mirror(tmp_path / "b", keep=policy)
    copied = threading.Event()

    def hook(event: Event) -> None:
        if event.kind == "mirror.done":
            copied.set()

    with Manager(tmp_path / "a", keep=policy, mirror=mirror, hooks=[hook]) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.8)):
            manager.save(state(step), step=step)
            assert copied.wait(60)
            copied.clear()
            manager.annotate(step, val_loss=loss)
    for folder in ("a", "b"):
        store = Store(tmp_path / folder)
        assert store.steps() == [2, 4]
        assert [info.metrics for info in store.checkpoints()] == [
            {"val_loss": 0.1},
            {"val_loss": 0.8},
        ]


def test_what_the_mirror_would_not_keep_is_not_copied(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 4))
    mirror = Mirror(tmp_path / "b", keep=1)
    for again in range(2):
        events = train(tmp_path / "a", range(0), mirror=mirror)
        copied = [event.step for event in events if event.kind == "mirror.done"]
        assert copied == ([] if again else [3])
    assert Store(tmp_path / "b").steps() == [3]


@pytest.mark.damaged_store
def test_behind_a_damaged_one_the_mirror_gets_the_next_older(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 4))
    damage(tmp_path / "a", 3)
    train(tmp_path / "a", range(0), mirror=Mirror(tmp_path / "b", keep=1))
    assert Store(tmp_path / "b").steps() == [2]
