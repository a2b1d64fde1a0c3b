"""How far a restore looks for a good checkpoint, and for a good copy of the one asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import (
    CheckpointInfo,
    CkptWarning,
    CorruptError,
    Manager,
    Mirror,
    NotFoundError,
    StorageError,
    Store,
)
from ckptfmt.storage import open_backend
from ckptfmt.testing import FaultyBackend, Operation


def test_after_so_many_bad_ones_the_trouble_is_elsewhere(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        for step in range(1, 14):
            manager.save({"w": np.full(3000, step)}, step=step)
    tried: list[int | None] = []

    def refuse(_: object, info: CheckpointInfo) -> None:
        tried.append(info.step)
        raise ArithmeticError(f"not {info.step}")

    mine = {"w": np.zeros(3000, np.int64)}
    manager = Manager(tmp_path, validate=[refuse])
    with (
        pytest.warns(CkptWarning, match="is passed over"),
        pytest.raises(ArithmeticError, match="not 4"),
    ):
        manager.restore(mine)
    assert tried == list(range(13, 3, -1))  # ten, and no scan of a whole history
    assert not mine["w"].any()
    assert Store(tmp_path).steps() == list(range(1, 14))


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(3000, value, np.float32), "step": value}


def train(folder: Path, steps: range, mirror: Path | None = None, **options: Any) -> None:
    with Manager(folder, mirror=mirror, **options) as manager:
        for step in steps:
            manager.save(state(step), step=step)


def damage(folder: Path, step: int) -> None:
    for file in ckptfmt.open(folder, step=step).index.files.ids:
        path = folder / "data" / file
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def test_a_tree_that_is_loaded_is_the_caller_s_but_not_the_validator_s(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2))

    def normalizes(arrays: Mapping[str, Any], info: CheckpointInfo) -> None:
        with pytest.raises(ValueError, match="read-only"):
            arrays["w"][:] = 0

    with Manager(tmp_path, validate=[normalizes]) as manager:
        loaded = manager.load()
    assert loaded is not None
    loaded.tree["w"] += 1
    assert float(loaded.tree["w"][0]) == 2.0


@pytest.mark.parametrize("at", [2, "step-0000000000000002", "good"])
def test_the_one_asked_for_comes_from_the_mirror_where_it_is_damaged_or_gone(
    tmp_path: Path, at: int | str
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    train(first, range(1, 4), second)
    Store(first).tag("good", 2)
    damage(first, 2)
    mine = state(0)
    with Manager(first) as manager, pytest.raises(CorruptError):
        manager.restore(mine, at=at)
    with Manager(first, mirror=second) as manager:
        with pytest.warns(CkptWarning, match="is passed over"):
            report = manager.restore(mine, at=at)
        assert (report.step, mine["step"], len(report.rejected)) == (2, 2, 1)
        assert manager.store.verify(2).ok  # and it is whole here again
    shutil.rmtree(first)
    if at == "good":
        return  # a tag is the store's
    mine = state(0)
    with Manager(first, mirror=second) as manager:
        loaded = manager.load(at=at)
        assert loaded is not None
        assert (manager.restore(mine, at=at).step, loaded.tree["step"]) == (2, 2)


def test_what_is_nowhere_is_said_with_what_there_is(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 3), tmp_path / "b")
    with Manager(tmp_path / "a", mirror=tmp_path / "b") as manager:
        with pytest.raises(NotFoundError, match="expected step 7, found 1, 2"):
            manager.restore(state(0), at=7)
        assert manager.restore(state(0), at="latest").step == 2


def test_the_line_that_is_left_is_left_in_the_mirror_too_where_it_alone_has_it(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    train(first, range(1, 5), second)
    shutil.rmtree(first)  # a new node
    with Manager(first, mirror=second) as manager:
        assert manager.restore(state(0)).step == 4
        assert manager.restore(state(0), at=2).step == 2
        manager.save(state(30), step=3)
    mine = state(0)
    with Manager(first, mirror=second) as manager:
        assert manager.restore(mine).step == 3
    assert mine["step"] == 30
    assert Store(second).steps() == [1, 2, 3]


def test_a_line_that_was_left_is_not_taken_from_a_mirror_that_was_not_told(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    train(first, range(1, 5), second)
    with Manager(first) as manager:  # the mirror is away
        manager.restore(state(0), at=2)
        manager.save(state(30), step=3)
    mine = state(0)
    with Manager(first, mirror=Mirror(second)) as manager:
        assert manager.restore(mine).step == 3
    assert mine["step"] == 30
    assert Store(second).steps() == [1, 2, 3]  # and now it has heard
    assert ckptfmt.load(second, step=3)["step"] == 30


def test_what_a_validator_rejects_is_not_tried_again_in_the_mirror(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 4), tmp_path / "b")
    seen: list[int | None] = []

    def refuse(_: object, info: CheckpointInfo) -> None:
        seen.append(info.step)
        if info.step == 3:
            raise ArithmeticError("not this one")

    with (
        pytest.warns(CkptWarning, match="not this one"),
        Manager(tmp_path / "a", mirror=tmp_path / "b", validate=[refuse]) as manager,
    ):
        assert manager.restore(state(0)).step == 2
    assert seen == [3, 2]


def test_a_tagged_one_that_is_set_aside_is_said_and_how_to_take_it_back(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    Store(tmp_path).tag("production", 3)
    with Manager(tmp_path) as manager:
        manager.restore(state(0), at=1)
        with pytest.warns(CkptWarning, match="which is tagged 'production', is set aside"):
            manager.save(state(20), step=2)
    with pytest.raises(
        NotFoundError,
        match=r"it is set aside \(training went on from .*\); to take it back: .*readmit\('step-0+3'",
    ):
        ckptfmt.load(f"{tmp_path}@production")
    Store(tmp_path).readmit("step-0000000000000003")
    assert ckptfmt.load(f"{tmp_path}@production")["step"] == 3


def refusing(path: Path, only: Callable[[Operation], bool], reason: str) -> Store:
    """A store of which some operations are refused, for good."""

    def refusal(operation: Operation) -> BaseException:
        return StorageError("refused", reason=reason, where=operation.key, do="look")

    backend = FaultyBackend(open_backend(path), fail_at=0, mode="from", error=refusal, only=only)
    return Store(backend)  # type: ignore[arg-type]


def test_what_may_not_be_read_is_not_taken_for_damage(tmp_path: Path) -> None:
    """A file of another user: an older checkpoint would be trained anew, and this one set aside."""
    train(tmp_path, range(1, 3))
    newest = ckptfmt.open(tmp_path, step=2).index.files.ids

    def is_newest(operation: Operation) -> bool:
        return operation.key.removeprefix("data/") in newest

    with (
        Manager(refusing(tmp_path, is_newest, "access-denied")) as manager,
        pytest.raises(StorageError, match="refused"),
    ):
        manager.restore(state(0))
    mine = state(0)
    with (
        Manager(refusing(tmp_path, is_newest, "io")) as manager,  # a bad sector
        pytest.warns(CkptWarning, match="is passed over"),
    ):
        assert manager.restore(mine).step == 1


def test_a_mirror_that_cannot_be_looked_at_is_said_and_what_is_here_may_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfmt.manager.mirror.CLOSE_TIMEOUT_S", 20.0)
    train(tmp_path / "a", range(1, 3))
    away = refusing(tmp_path / "b", lambda _: True, "io")
    with Manager(tmp_path / "a", mirror=away) as manager:
        with pytest.raises(StorageError, match=r"may have a newer checkpoint.*restore\(at="):
            manager.restore(state(0))
        assert manager.restore(state(0), at=2).step == 2


def test_metrics_for_what_only_the_mirror_has_still_go_there(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 3), tmp_path / "b")
    Store(tmp_path / "a").delete(1)
    with Manager(tmp_path / "a", mirror=tmp_path / "b") as manager:
        manager.annotate(1, val_loss=0.5)
        with pytest.raises(NotFoundError, match="expected step 7"):
            manager.annotate(7, val_loss=0.5)
    assert Store(tmp_path / "b").checkpoints()[0].metrics == {"val_loss": 0.5}


@pytest.mark.damaged_store
def test_what_was_read_in_part_or_from_the_mirror_is_not_verified_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older ones stay behind a newest whose damaged part no restore has looked at."""
    first, second = tmp_path / "a", tmp_path / "b"
    train(first, range(1, 3))
    big = {"w": np.full(3000, 3, np.float32), "step": 3, "rest": np.arange(9000.0)}
    ckptfmt.save(big, first, step=3)
    Store(first).push(second, 3)
    data = bytearray()
    for file in ckptfmt.open(first, step=3).index.files.ids:
        path = first / "data" / file
        data[:] = path.read_bytes()
        data[-5000] ^= 1
        path.write_bytes(data)
    with Manager(first, keep=1) as manager:
        assert manager.restore(state(0), allow_unexpected="rest").step == 3
        assert [decision.kept for decision in manager.prune()] == [True] * 3
    monkeypatch.setattr(Store, "pull", refuse_to_pull)
    with Manager(first, keep=1, mirror=second) as manager:
        with pytest.warns(CkptWarning, match="is passed over"):
            assert manager.restore({**big, "step": 0}).step == 3
        assert [decision.kept for decision in manager.prune()] == [True] * 3


def refuse_to_pull(*_: object) -> None:
    raise StorageError("away", reason="io", where="mirror", do="try again")
