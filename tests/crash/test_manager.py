"""A manager that leaves a line, saves, prunes and mirrors while its store fails at operation k, and
from there on: the state that a kill leaves. Then another run goes on from what is there."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CheckpointError, Manager, Mirror, Store, keep
from ckptfmt.storage import Backend, open_backend
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.testing import FaultyBackend

pytestmark = pytest.mark.usefixtures("expecting_failures")

POLICY = keep.last(2) | keep.quarantined(0)
OPERATIONS_MIN = 60


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(3000, value, np.int32), "value": value}


def begin(crash: Any, backend: Backend) -> None:
    """Steps 1 to 5, of which 4 is tagged."""
    store = crash.store_over(backend)
    with Manager(store, asynchronous=False) as manager:
        for step in range(1, 6):
            manager.save(state(step), step=step)
    store.tag("best", 4)


def go_on(crash: Any, backend: Backend) -> None:
    """Back to step 2, and three steps of another line; the manager prunes after each."""
    with Manager(crash.store_over(backend), keep=POLICY, asynchronous=False) as manager:
        manager.restore(state(0), at=2)
        for step in (3, 4, 5):
            manager.save(state(10 * step), step=step)


def check(crash: Any, backend: Backend) -> None:
    """Whole, nothing good lost, and the next run goes on and cleans up."""
    store = crash.store_over(backend)
    assert store.verify().ok
    found = {
        info.step: ckptfmt.load(store, step=info.step)["value"] for info in store.checkpoints()
    }
    for step, value in found.items():
        assert value in (step, 10 * step)
    aside = [info.step for info in store.checkpoints(quarantined=True)]
    newest = max(found)
    assert newest >= 2
    assert 2 in found or newest >= 4, "the one that it went on from is gone too early"
    if found.get(4) != 4:
        assert 4 in aside, "the tagged one is gone"
    mine = state(0)
    with Manager(store, keep=POLICY, asynchronous=False) as manager:
        assert manager.restore(mine).step == newest
        assert mine["value"] == found[newest]
        for step in (newest + 1, newest + 2):
            manager.save(state(step), step=step)
    store.gc(grace_s=0)
    assert store.verify().ok
    left = store.steps()
    assert left[-2:] == [newest + 1, newest + 2]
    assert set(left[:-2]) <= {4}  # tagged, if it was not left
    assert [info.step for info in store.checkpoints(quarantined=True)] in ([], [4])
    assert (4 in left) or store.checkpoints(quarantined=True)


@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mode", "when"), [("from", "before"), ("once", "before"), ("once", "after")]
)
def test_a_store_that_fails_at_any_moment_costs_nothing_good(
    crash: Any,
    mode: Literal["from", "once"],
    when: Literal["before", "after"],
    stride: int,
) -> None:
    start = MemoryBackend()
    begin(crash, start)
    for k in itertools.count(0, stride):
        inner = crash.copy(start)
        faulty = FaultyBackend(inner, fail_at=k, mode=mode, when=when)
        try:
            go_on(crash, faulty)
        except CheckpointError:
            pass
        check(crash, inner)
        if not faulty.fired:
            break
    assert k > OPERATIONS_MIN


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_moment_costs_nothing_good(
    crash: Any, quick_path: Path
) -> None:
    start = quick_path / "start"
    begin(crash, open_backend(str(start)))
    for k in itertools.count():
        path = quick_path / f"{k}"
        shutil.copytree(start, path)
        pid = os.fork()
        if pid == 0:
            try:
                go_on(crash, FaultyBackend(open_backend(str(path)), fail_at=k, mode="kill"))
            finally:
                os._exit(0)
        status = os.waitpid(pid, 0)[1]
        check(crash, open_backend(str(path)))
        shutil.rmtree(path)
        if not os.WIFSIGNALED(status):
            break
    assert k > OPERATIONS_MIN


@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_a_mirror_that_is_gone_at_any_moment_is_whole_and_is_caught_up(
    crash: Any, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of a first run are cut off at operation k; a second run does the rest."""
    monkeypatch.setattr("ckptfmt.manager.mirror.CLOSE_TIMEOUT_S", 20.0)
    source = MemoryBackend()
    begin(crash, source)
    for k in itertools.count(0, stride):
        inner = MemoryBackend()
        faulty = FaultyBackend(inner, fail_at=k, mode="from")
        where: list[Store] = [crash.store_over(backend) for backend in (faulty, inner)]
        for store in where:
            with Manager(crash.store_over(source), mirror=Mirror(store, keep=3)):
                pass  # it copies what an earlier run left to do
            partial = crash.store_over(inner)
            if partial.names():
                assert partial.verify().ok
            for step in partial.steps():
                assert ckptfmt.load(partial, step=step)["value"] == step
        assert partial.steps() == [3, 4, 5]
        if not faulty.fired:
            break
    assert k > OPERATIONS_MIN


def test_a_deletion_that_took_effect_and_was_answered_by_an_error_is_told(crash: Any) -> None:
    """Each checkpoint that goes is explained: the event stream is what a person has."""
    inner = MemoryBackend("memory://")
    with Manager(crash.store_over(inner), asynchronous=False) as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step=step)
    told: list[str] = []
    faulty = FaultyBackend(
        inner,
        fail_at=0,
        when="after",
        only=lambda o: o.kind == "delete" and o.key.startswith("checkpoints/"),
    )
    store = crash.store_over(faulty)
    with Manager(
        store,
        keep=2,
        hooks=[lambda e: told.append(str(e.checkpoint)) if e.kind == "delete" else None],
    ) as manager:
        with pytest.raises(ckptfmt.StorageError):
            manager.prune()
        assert store.steps() == [2, 3]
        assert told == ["step-0000000000000001"]
        manager.prune()
    assert told == ["step-0000000000000001"]
