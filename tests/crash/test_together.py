"""Processes that save the same contents again and again, and collectors without a grace, at once."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import ConflictError, Store

SECONDS = [pytest.param(3.0, id="short"), pytest.param(120.0, id="long", marks=pytest.mark.slow)]


def start(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_save_that_succeeded_stays_whole_whoever_collects(
    crash: Any, quick_path: Path, seconds: float
) -> None:
    path, deadline = quick_path / "run", time.monotonic() + seconds

    def saver(name: str) -> None:
        """Four contents in turn: what one generation gave up, another writes again."""
        conflicts = saved = 0
        while time.monotonic() < deadline:
            version = (saved + conflicts) % 4
            try:
                ckptfmt.save(crash.tree(version), Store(path), name=name, if_exists="replace")
            except ConflictError:
                conflicts += 1
                continue
            saved += 1
            assert crash.load_version(Store(path).backend, name) == version
        assert saved > conflicts

    def collector() -> None:
        while time.monotonic() < deadline:
            Store(path).gc(grace_s=0)

    def dying_collector() -> None:
        while time.monotonic() < deadline:
            pid = start(collector)
            time.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    workers = [start(lambda: saver("a")), start(lambda: saver("b"))]
    workers += [start(collector), start(dying_collector)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers]
    assert codes == [0, 0, 0, 0], "see the traceback on stderr"
    store = Store(path)
    assert store.verify().ok
    assert store.names() == ["a", "b"]
    store.gc(grace_s=0)
    assert crash.litter(store.backend) == []


def test_what_is_loaded_and_staged_is_not_shared_with_a_forked_process(quick_path: Path) -> None:
    tree = {"w": np.arange(1_000_000)}  # large enough for the arena
    ckptfmt.save(tree, quick_path / "run")
    loaded = ckptfmt.load(quick_path / "run", mode="read")

    def child() -> None:
        loaded["w"][:] = -1
        ckptfmt.save({"w": np.full(1_000_000, -1)}, quick_path / "other")

    assert os.waitstatus_to_exitcode(os.waitpid(start(child), 0)[1]) == 0
    np.testing.assert_array_equal(loaded["w"], tree["w"])
