"""Managers of several ranks: here each is a thread, or a process where signals are meant."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import (
    FileGroup,
    LossGuard,
    Manager,
    Preemption,
    Sharded,
    Store,
    UsageError,
    keep,
    when,
)
from ckptfmt.manager.when import Look, When

pytestmark = pytest.mark.filterwarnings("ignore::ckptfmt.CkptWarning")
SIZE = 3


def together(call: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    """What each rank returns or raises."""

    def one(rank: int) -> Any:
        try:
            return call(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def manager(path: Path, rank: int, size: int = SIZE, **o: Any) -> Manager:
    o.setdefault("asynchronous", False)
    return Manager(path, group=FileGroup(rank, size), **o)


def state(rank: int, value: float, size: int = SIZE) -> dict[str, Any]:
    part = np.full(4, value + rank)
    return {"w": Sharded((4 * size,), [((4 * rank,), part)]), "same": np.full(3, value)}


def values(tree: dict[str, Any]) -> list[float]:
    return [float(tree["w"].parts[0][1][0]), float(tree["same"][0])]


class OfOneRank(When):
    """What each rank's own clock says."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = steps

    def due(self, look: Look) -> bool:
        return look.step in self.steps


def test_a_save_is_due_when_rank_0_says_so(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        mine = manager(tmp_path, rank, save_when=OfOneRank([2, 4] if rank == 0 else [1, 3, 4]))
        with mine:
            found = []
            for step in range(1, 5):
                asked = mine.should_save(step)
                saved = mine.save(state(rank, step), step=step) is not None
                assert asked == saved
                found.append(saved)
            return found

    assert together(run) == [[False, True, False, True]] * SIZE
    assert Store(tmp_path).steps() == [2, 4]
    assert not [p for p in (tmp_path / "parts").rglob("*") if p.is_file()]


def test_where_steps_alone_decide_nobody_is_asked(tmp_path: Path) -> None:
    policy = when.every(steps=2) | when.staged({10: 3, None: 5})
    mine = manager(tmp_path, 1, save_when=policy)  # the other ranks are not there
    assert [mine.should_save(step) for step in range(1, 5)] == [False, True, True, True]


def test_a_signal_to_one_rank_is_acted_on_by_all_at_one_step(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        preemption = Preemption(deadline_s=60.0)
        with manager(tmp_path, rank, save_when=100, preemption=preemption) as mine:
            for step in range(1, 10):
                verdict = mine.observe(step, loss=1.0)
                if (rank, step) == (1, 2):  # all have looked: it is heard at the next step's end
                    preemption.request(left_s=20.0)
                saved = mine.save(state(rank, step), step=step)
                if verdict.stop:
                    return step, saved is not None, verdict.reason[:10], preemption.left_s <= 20.0
            return None

    found = together(run)
    assert found == [(3, True, "preempted,", True)] * SIZE
    assert Store(tmp_path).steps() == [3]


def test_what_one_rank_rejects_all_pass_over(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        with manager(tmp_path, rank) as mine:
            for step in (1, 2, 3):
                mine.save(state(rank, step), step=step)

    assert together(save) == [None] * SIZE
    index = max((tmp_path / "checkpoints").iterdir())
    damaged = bytearray(index.read_bytes())
    damaged[-1] ^= 1
    index.write_bytes(damaged)  # step 3, for all; step 2 is wrong in the eyes of rank 1
    targets = [state(rank, 0) for rank in range(SIZE)]

    def restore(rank: int) -> Any:
        def picky(arrays: Any, info: Any) -> None:
            if rank == 1 and info.step == 2:
                raise ZeroDivisionError("not this one")

        with manager(tmp_path, rank, validate=[picky]) as mine:
            report = mine.restore(targets[rank])
            mine.save(state(rank, 7), step=2)
            return report.step, [bad.checkpoint for bad in report.rejected], report.rejected[1]

    found = together(restore)
    assert [row[:2] for row in found] == [(1, [f"step-{s:016d}" for s in (3, 2)])] * SIZE, found
    assert {row[2].reason for row in found} == {"a validator says: not this one"}
    assert [values(target) for target in targets] == [[1.0 + r, 1.0] for r in range(SIZE)]
    assert Store(tmp_path).steps() == [1, 2]
    assert ckptfmt.load(tmp_path)["same"].tolist() == [7.0] * 3
    assert len(Store(tmp_path).checkpoints(quarantined=True)) >= 1


def test_targets_that_do_not_fit_on_one_rank_are_told_on_all_and_no_older_one_is_tried(
    tmp_path: Path,
) -> None:
    def save(rank: int) -> None:
        with manager(tmp_path, rank) as mine:
            for step in (1, 2):
                mine.save(state(rank, step), step=step)

    together(save)

    def restore(rank: int) -> Any:
        target = state(rank, 0)
        if rank == 2:
            target["more"] = np.zeros(2)
        with manager(tmp_path, rank) as mine:
            return mine.restore(target)

    for error in together(restore):
        assert isinstance(error, ckptfmt.MismatchError)
        assert "more" in str(error)


def test_an_empty_store_begins_anew_on_all_ranks_and_one_is_restored_by_name(
    tmp_path: Path,
) -> None:
    def run(rank: int) -> Any:
        target = state(rank, 0)
        with manager(tmp_path, rank) as mine:
            first = bool(mine.restore(target))
            with pytest.raises(ckptfmt.NotFoundError, match="no checkpoint to restore"):
                mine.restore(target, required=True)
            for step in (1, 2):
                mine.save(state(rank, step), step=step)
            step = mine.restore(target, at=1).step
            loaded = mine.load()
            assert loaded is not None
            return first, step, values(target), loaded.tree["w"].tolist(), loaded.info.step

    whole = [2.0 + r for r in range(SIZE) for _ in range(4)]
    assert together(run) == [(False, 1, [1.0 + r, 1.0], whole, 2) for r in range(SIZE)]


def test_rank_0_alone_retains_mirrors_and_annotates(tmp_path: Path) -> None:
    events: list[list[str]] = [[] for _ in range(SIZE)]

    def run(rank: int) -> None:
        with manager(
            tmp_path / "here", rank, keep=keep.last(2), mirror=tmp_path / "there",
            hooks=[lambda event: events[rank].append(event.kind)],
        ) as mine:  # fmt: skip
            for step in range(1, 5):
                mine.save(state(rank, step), step=step)
            mine.annotate(4, val_loss=0.5)
            mine.prune()

    assert together(run) == [None] * SIZE
    assert Store(tmp_path / "here").steps() == [3, 4]
    assert Store(tmp_path / "there").steps()[-1] == 4
    assert [kinds.count("delete") for kinds in events] == [2, 0, 0]
    assert [("mirror.done" in kinds) for kinds in events] == [True, False, False]
    assert [kinds.count("save.commit") for kinds in events] == [4] * SIZE
    latest = Store(tmp_path / "here").latest()
    assert latest is not None
    assert latest.metrics["val_loss"] == 0.5


def test_a_mirror_gives_all_ranks_what_is_damaged_here(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        with manager(tmp_path / "here", rank, mirror=tmp_path / "there") as mine:
            mine.save(state(rank, 5), step=1)

    together(save)
    for file in (tmp_path / "here/data").iterdir():
        raw = bytearray(file.read_bytes())
        raw[70] ^= 1
        file.write_bytes(raw)
    targets = [state(rank, 0) for rank in range(SIZE)]

    def restore(rank: int) -> Any:
        with manager(tmp_path / "here", rank, mirror=tmp_path / "there") as mine:
            return mine.restore(targets[rank]).step

    assert together(restore) == [1] * SIZE
    assert [values(target) for target in targets] == [[5.0 + r, 5.0] for r in range(SIZE)]
    assert Store(tmp_path / "here").verify().ok  # rank 0 fetched the copy


def test_the_guard_of_rank_0_speaks_for_all(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        with manager(tmp_path, rank, guard=LossGuard(window=8)) as mine:
            for step in range(1, 4):
                assert mine.observe(step, loss=1.0).rollback_to is None
                mine.save(state(rank, step), step=step)
            verdict = mine.observe(4, loss=float("nan") if rank == 0 else 1.0)
            return verdict.rollback_to, verdict.reason

    found = together(run)
    assert found[0][0] == 3
    assert found == [found[0]] * SIZE


def test_ranks_at_different_steps_are_told(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        with manager(tmp_path, rank, preemption=Preemption()) as mine:
            return mine.observe(7 + (rank == 2), loss=1.0)

    for error in together(run):
        assert isinstance(error, UsageError)
        assert error.kind == "usage-group-step"
        assert "different steps: rank 2: expected 7, found 8" in str(error)


def test_an_error_of_one_rank_before_the_save_is_heard_by_all(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        with manager(tmp_path, rank) as mine:
            metrics = {"loss": "much"} if rank == 1 else {"loss": 1.0}
            if rank == 2:
                time.sleep(0.5)  # the others have failed by then
            with pytest.raises(UsageError, match="loss"):
                mine.save(state(rank, 1), step=1, metrics=metrics)  # type: ignore[arg-type]
            mine.save(state(rank, 2), step=2)

    assert together(run) == [None] * SIZE
    assert Store(tmp_path).steps() == [2]


def test_an_error_in_the_loop_of_one_rank_is_heard_by_all(tmp_path: Path) -> None:
    events: list[Any] = []

    def run(rank: int) -> Any:
        with manager(tmp_path, rank, preemption=Preemption(), hooks=[events.append]) as mine:
            for step in range(1, 4):
                if (rank, step) == (1, 2):
                    raise ZeroDivisionError("bad batch")
                mine.observe(step)
                mine.save(state(rank, step), step=step)

    found = together(run)
    assert isinstance(found[1], ZeroDivisionError)
    for error in (found[0], found[2]):
        assert isinstance(error, ckptfmt.ConflictError)
        assert error.kind == "conflict-rank-gone"
        assert "rank 1 (" in str(error)
        assert "ZeroDivisionError: bad batch" in str(error)
    assert [e.data["alarm"] for e in events if e.kind == "alarm"] == ["rank"] * 2
    assert Store(tmp_path).steps() == [1]
    assert together(lambda rank: _once(tmp_path, rank)) == [1] * SIZE  # the next job


def _once(path: Path, rank: int) -> int:
    with manager(path, rank) as mine:
        return mine.restore(state(rank, 0)).step


def _preempted(path: Path, rank: int, out: Any) -> None:
    """A rank as a process: saves in the background; the second is told to go."""
    preemption = Preemption(exit_code=17)

    def linger(event: ckptfmt.Event) -> None:
        if rank == 1 and event.kind == "save.commit":
            time.sleep(
                0.3
            )  # busy for longer than rank 0, which says for all whether a save is skipped

    mine = manager(
        path, rank, 2, save_when=2, preemption=preemption, asynchronous=True, when_busy="skip",
        hooks=[linger],
    )  # fmt: skip
    for step in range(1, 100):
        if (rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGTERM)
        mine.observe(step)
        mine.save(state(rank, step, 2), step=step)
    out.put(f"rank {rank} was not stopped")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGTERM that can be taken")
def test_all_processes_leave_with_one_last_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=_preempted, args=(tmp_path, r, out)) for r in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert out.empty()
    assert [process.exitcode for process in processes] == [17, 17]
    steps = Store(tmp_path).steps()
    assert steps in ([2, 5], [2, 4, 5])
    assert Store(tmp_path).verify().ok
    assert ckptfmt.load(tmp_path)["same"].tolist() == [5.0] * 3
