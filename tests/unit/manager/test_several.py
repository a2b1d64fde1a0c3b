"""Several trainers on one store, and a store that fails at the wrong moment."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CheckpointInfo, CkptWarning, Event, Manager, StorageError, Store
from ckptfmt.storage import open_backend
from ckptfmt.testing import FaultyBackend, Operation


def test_an_abandoned_line_is_set_aside_though_the_store_failed_at_first(tmp_path: Path) -> None:
    def state(value: int) -> dict[str, Any]:
        return {"w": np.full(50, value, np.float32)}

    with Manager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step=step)
    faulty = FaultyBackend(
        open_backend(tmp_path),
        fail_at=0,
        only=lambda o: o.kind == "put_if_absent" and o.key.startswith("quarantine/"),
    )
    with Manager(Store(faulty)) as manager:  # type: ignore[arg-type]
        manager.restore(state(0), at=1)
        with pytest.raises(StorageError):
            manager.save(state(20), step=2)
        manager.save(state(20), step=2)
    assert Store(tmp_path).steps() == [1, 2]
    mine = state(0)
    with Manager(tmp_path) as manager:
        assert manager.restore(mine).step == 2
    assert (mine["w"] == 20).all()


def test_what_another_trainer_commits_during_a_restore_is_not_set_aside(tmp_path: Path) -> None:
    state = {"w": np.ones(50, np.float32)}
    ckptfmt.save(state, tmp_path, step=1)

    def meanwhile(_: object, info: CheckpointInfo) -> None:
        if info.step == 1:
            ckptfmt.save(state, tmp_path, step=9)

    with Manager(tmp_path, validate=[meanwhile]) as manager:
        assert manager.restore(state).step == 1
        manager.save(state, step=2)
    assert Store(tmp_path).steps() == [1, 2, 9]


@pytest.mark.parametrize("mirrored", [False, True])
def test_what_another_trainer_saves_anew_under_an_abandoned_name_is_not_set_aside(
    tmp_path: Path, mirrored: bool
) -> None:
    """Both leave steps 2 and 3; the slower one finds step 3 of the other when it goes on."""

    def state(value: int) -> dict[str, Any]:
        return {"w": np.full(50, value, np.float32)}

    def reject(_: object, info: CheckpointInfo) -> None:
        if info.metadata.get("bad"):
            raise ArithmeticError("not this one")

    mirror = tmp_path / "mirror" if mirrored else None
    store = Store(tmp_path / "run")

    def trainer() -> Manager:
        return Manager(store.url, validate=[reject], mirror=mirror)

    with trainer() as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step=step, metadata={"bad": step > 1})
    with trainer() as slow:
        with pytest.warns(CkptWarning, match="not this one"):
            assert slow.restore(state(0)).step == 1
        with trainer() as fast:
            with pytest.warns(CkptWarning, match="not this one"):
                fast.restore(state(0))
            fast.save(state(30), step=3)
        slow.save(state(20), step=2)
    for where in (store, *([Store(mirror)] if mirror else [])):
        assert where.steps() == [1, 2, 3]
        assert ckptfmt.load(where, step=3)["w"][0] == 30
        assert [i.step for i in where.checkpoints(quarantined=True)] == [2, 3]


def test_a_restore_sees_what_others_delete_and_commit_while_it_looks(tmp_path: Path) -> None:
    def state(value: int) -> dict[str, Any]:
        return {"w": np.full(50, value, np.float32)}

    for step in (1, 2, 3):
        ckptfmt.save(state(step), tmp_path, step=step)

    def reject(_: object, info: CheckpointInfo) -> None:
        if info.step == 3:
            raise ArithmeticError("not this one")

    def others(event: Event) -> None:
        if event.kind == "restore.rejected":
            Store(tmp_path).delete(2)
            ckptfmt.save(state(4), tmp_path, step=4)

    mine = state(0)
    with Manager(tmp_path, hooks=[others], validate=[reject]) as manager:
        with pytest.warns(CkptWarning, match="not this one"):
            report = manager.restore(mine)
        assert (report.step, len(report.rejected)) == (4, 1)
    assert (mine["w"] == 4).all()


def test_what_is_deleted_while_a_restore_looks_is_not_called_damaged(tmp_path: Path) -> None:
    state = {"w": np.ones(50, np.float32)}
    for step in (1, 2):
        ckptfmt.save(state, tmp_path, step=step)

    class Vanishing(FaultyBackend):
        """Deletes the newest between the listing and the first look at it."""

        def get(self, key: Any, *args: Any, **options: Any) -> memoryview:
            if "0002" in key and 2 in Store(tmp_path).steps():
                Store(tmp_path).delete(2)
            return super().get(key, *args, **options)

    store = Store(Vanishing(open_backend(tmp_path)))  # type: ignore[arg-type]
    with Manager(store) as manager:
        report = manager.restore(state)
    assert (report.step, report.rejected) == (1, [])


def full_disk(path: Path, limit_nbytes: int) -> FaultyBackend:
    """A store on a disk that takes so many bytes of data."""

    def no_space(operation: Operation) -> BaseException:
        return StorageError(
            "no space", reason="no-space", where=operation.key, errno=errno.ENOSPC, do="make room"
        )

    def is_full(operation: Operation) -> bool:
        if operation.kind != "create" or not operation.key.startswith("tmp/"):
            return False
        return sum(file.stat().st_size for file in (path / "data").glob("*")) >= limit_nbytes

    return FaultyBackend(open_backend(path), fail_at=0, mode="from", error=no_space, only=is_full)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_for_two_and_one_in_flight_is_enough_at_any_cadence(
    tmp_path: Path, asynchronous: bool
) -> None:
    """What is deleted waits ten minutes for its readers: a save that needs its space has it at once."""
    backend = full_disk(tmp_path, 3 * 200_000)
    events: list[Event] = []
    options: dict[str, Any] = {"keep": 1, "asynchronous": asynchronous, "hooks": [events.append]}
    with Manager(Store(backend), **options) as manager:  # type: ignore[arg-type]
        for step in range(1, 8):
            manager.save({"w": np.full(50_000, step, np.float32)}, step=step)
            manager.wait()
    assert backend.fired
    store = Store(tmp_path)
    assert (store.steps(), store.verify().ok) == ([7], True)
    assert {e.data["alarm"] for e in events if e.kind == "alarm"} == {"full"}


def test_a_disk_without_anything_to_delete_is_full(tmp_path: Path) -> None:
    backend = full_disk(tmp_path, 200_000)
    with Manager(Store(backend)) as manager:  # type: ignore[arg-type]
        manager.save({"w": np.full(50_000, 1, np.float32)}, step=1)
        manager.wait()
        manager.save({"w": np.full(50_000, 2, np.float32)}, step=2)
        with pytest.raises(StorageError, match="no space"):
            manager.wait()
    assert Store(tmp_path).steps() == [1]


def test_a_disk_that_is_full_before_the_save_begins_is_emptied_of_what_was_deleted(
    tmp_path: Path,
) -> None:
    full = [False]

    def no_space(operation: Operation) -> BaseException:
        return StorageError(
            "no space", reason="no-space", where=operation.key, errno=errno.ENOSPC, do="make room"
        )

    backend = FaultyBackend(
        open_backend(tmp_path),
        fail_at=0,
        mode="from",
        error=no_space,
        only=lambda o: full[0] and o.kind == "create" and o.key.startswith("parts/"),
    )
    options: dict[str, Any] = {"keep": 1, "on_error": "continue", "asynchronous": False}
    with Manager(Store(backend), **options) as manager:  # type: ignore[arg-type]
        for step in (1, 2):
            manager.save({"w": np.full(50_000, step, np.float32)}, step=step)
        assert (
            len(list((tmp_path / "data").iterdir())) == 2
        )  # one is only listed: readers may be there
        full[0] = True
        assert manager.save({"w": np.full(50_000, 3, np.float32)}, step=3) is None
    assert len(list((tmp_path / "data").iterdir())) == 1
