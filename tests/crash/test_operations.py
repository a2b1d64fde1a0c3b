"""Each operation on the store fails in turn: once, from there on, or with the process killed.

For saving a first step, a next one, `main` again, deleting, and collecting. Then the recovery is
faulted too.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest

from ckptfmt import CheckpointError, StorageError
from ckptfmt.storage import open_backend
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.testing import FaultyBackend

OPERATIONS_MIN = {
    "first save": 20,
    "next step": 20,
    "next step by ranks": 40,
    "main again": 20,
    "delete": 6,
    "gc": 15,
}


def prepared(scene: Any) -> MemoryBackend:
    backend = MemoryBackend()
    scene.prepare(backend)
    return backend


@pytest.mark.parametrize(
    ("late_key", "mode", "when"),
    [
        *((True, mode, when) for mode in ("once", "from") for when in ("before", "half", "after")),
        (False, "once", "after"),
        (False, "from", "before"),
    ],
)
def test_a_failed_operation_leaves_the_old_or_the_new_whole(
    crash: Any,
    scene: Any,
    mode: Literal["once", "from"],
    when: Literal["before", "half", "after"],
    late_key: bool,
) -> None:
    start = prepared(scene)
    # Half an operation is half a write.
    only = (lambda op: op.kind == "write") if when == "half" else None
    for k in itertools.count():
        inner = crash.copy(start, late_key=late_key)
        faulty = FaultyBackend(inner, fail_at=k, mode=mode, when=when, only=only)
        must = None
        try:
            scene.act(faulty)
            must = scene.after
        except StorageError:
            assert faulty.fired
        crash.check(inner, scene, must=must)
        if not faulty.fired:
            break
    assert when == "half" or k > OPERATIONS_MIN[scene.name], "not every operation was seen"


def test_a_killed_process_leaves_the_old_or_the_new_whole(
    crash: Any, scene: Any, quick_path: Path
) -> None:
    start = quick_path / "start"
    scene.prepare(open_backend(str(start)))
    for k in itertools.count():
        path = quick_path / f"{k}"
        if start.exists():
            shutil.copytree(start, path)
        killed = run_and_kill(scene, path, k)
        crash.check(open_backend(str(path)), scene, must=None if killed else scene.after)
        shutil.rmtree(path)
        if not killed:
            break
    assert k > OPERATIONS_MIN[scene.name]


def run_and_kill(scene: Any, path: Path, k: int) -> bool:
    """True if the child died at its operation k; false if it finished before."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            scene.act(FaultyBackend(open_backend(str(path)), fail_at=k, mode="kill"))
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_fault_of_the_recovery_loses_nothing_either(crash: Any, scene: Any, stride: int) -> None:
    start = prepared(scene)
    for k in itertools.count(stride - 1, stride):
        crashed = crash.copy(start)
        first = FaultyBackend(crashed, fail_at=k, mode="from")
        try:
            scene.act(first)
        except StorageError:
            pass
        for j in itertools.count(k % stride, 2 * stride):
            inner = crash.copy(crashed)
            second = FaultyBackend(inner, fail_at=j, mode="from")
            try:
                crash.recover(second, faulted=True)
            except StorageError:
                assert second.fired
            crash.check(inner, scene)
            if not second.fired:
                break
        if not first.fired:
            break


def test_a_store_that_reorders_writes_is_caught(crash: Any) -> None:
    """The canary: were data put after the index, these checks would notice."""
    scene = crash.scenes["next step"]
    start = prepared(scene)
    caught = 0
    for k in itertools.count():
        inner = crash.copy(start)
        faulty = FaultyBackend(inner, fail_at=k, mode="from", reorder=True)
        try:
            scene.act(faulty)
        except StorageError:
            pass
        try:
            crash.check(inner, scene)
        except (AssertionError, CheckpointError, Warning):
            caught += 1
        if not faulty.fired:
            break
    assert caught > 0
