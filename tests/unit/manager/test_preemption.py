"""Signals: whom they reach when managers come and go, and what a job that must go still does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptfmt import Manager, Mirror, Preemption, Store
from ckptfmt.engine import Repeating

USR1 = signal.SIGUSR1


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(3000, value, np.float32), "step": value}


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What the program's own handler of SIGUSR1 has heard."""
    made: list[int] = []
    before = signal.signal(USR1, lambda number, frame: made.append(number))
    yield made
    signal.signal(USR1, before)


def test_managers_that_are_left_in_any_order_leave_the_program_s_handler(
    tmp_path: Path, heard: list[int]
) -> None:
    own = signal.getsignal(USR1)
    notices = [Preemption(signals=["SIGUSR1"]) for _ in range(3)]
    managers = [Manager(tmp_path / str(n), preemption=told) for n, told in enumerate(notices)]
    managers[0].close()
    managers[1].close()
    os.kill(os.getpid(), USR1)
    assert heard == [USR1]  # through one that is left
    assert [notice.requested for notice in notices] == [False, False, True]
    managers[2].close()
    assert signal.getsignal(USR1) is own


def test_managers_may_share_a_notice(tmp_path: Path, heard: list[int]) -> None:
    own, notice = signal.getsignal(USR1), Preemption(signals=["SIGUSR1"])
    with Manager(tmp_path / "a", preemption=notice):
        with Manager(tmp_path / "b", preemption=notice):
            pass
        os.kill(os.getpid(), USR1)
        assert (notice.requested, heard) == (True, [USR1])
    assert signal.getsignal(USR1) is own


def run(program: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_signal_ends_a_process_whose_managers_are_over(tmp_path: Path) -> None:
    done = run(
        """
        import os, signal, sys
        from ckptfmt import Manager, Preemption

        a, b = (Manager(sys.argv[1], preemption=Preemption()) for _ in range(2))
        a.close()
        keep = signal.getsignal(signal.SIGTERM)
        b.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.signal(signal.SIGTERM, keep)  # somebody who had stored it
        os.kill(os.getpid(), signal.SIGTERM)
        print("not reached")
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr


def test_a_forked_worker_dies_of_the_signal_and_leaves_its_parent_s_save_alone(
    tmp_path: Path,
) -> None:
    """A data loader's workers are forked while the manager stands, and are ended by SIGTERM."""
    done = run(
        """
        import multiprocessing, os, signal, sys, time
        import numpy as np
        from ckptfmt import Manager, Preemption

        held = multiprocessing.get_context("fork").Event()

        def hold(event):
            if event.kind == "save.commit":
                held.wait(60)

        with Manager(
            sys.argv[1], mirror=sys.argv[2], preemption=Preemption(), hooks=[hold]
        ) as manager:
            manager.save({"w": np.ones(1000)}, step=1)
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            worker.start()
            worker.terminate()
            worker.join()
            assert worker.exitcode == -signal.SIGTERM, worker.exitcode
            if os.fork() == 0:
                sys.exit(7)  # through the manager, whose save is in flight in the parent
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
            held.set()
            manager.save({"w": np.ones(1000)}, step=2)
            manager.wait()
            if os.fork() == 0:
                with manager:  # a child that goes on with it has it whole
                    manager.save({"w": np.ones(1000)}, step=3)
                os._exit(8)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 8
        """,
        tmp_path / "a",
        tmp_path / "b",
    )
    assert done.returncode == 0, done.stderr
    assert Store(tmp_path / "a").steps() == Store(tmp_path / "b").steps() == [1, 2, 3]


def test_a_job_that_must_go_waits_for_a_mirror_no_longer_than_it_may_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    close = Repeating.close

    def noted(self: Repeating, timeout_s: float | None = None) -> bool:
        limits.append(timeout_s)
        return close(self, timeout_s)

    monkeypatch.setattr(Repeating, "close", noted)
    monkeypatch.setattr("ckptfmt.manager.mirror.CLOSE_TIMEOUT_S", 30.0)
    notice = Preemption(signals=(), deadline_s=1.0, exit_code=5)
    mirror = Mirror(tmp_path / "b", bytes_per_s=10.0)  # which takes half an hour

    def job() -> None:
        with Manager(tmp_path / "a", mirror=mirror, preemption=notice) as manager:
            manager.save(state(1), step=1)
            notice.request()
            manager.save(state(2), step=2)

    with pytest.raises(SystemExit) as left:
        job()
    assert left.value.code == 5
    assert "left before the mirror" in caplog.text
    assert [limit is not None and 0 <= limit < 1 for limit in limits] == [True]
    assert Store(tmp_path / "a").steps() == [1, 2]


def test_a_job_that_must_go_does_not_clean_up_and_the_next_run_does(tmp_path: Path) -> None:
    notice = Preemption(signals=())
    with Manager(tmp_path, keep=1, preemption=notice) as manager:
        manager.save(state(1), step=1)
        manager.wait()
        notice.request()
        manager.save(state(2), step=2)
        assert [decision.waits for decision in manager.prune()] == [True, False]
    assert Store(tmp_path).steps() == [1, 2]
    with Manager(tmp_path, keep=1) as manager:
        manager.save(state(3), step=3)
    assert Store(tmp_path).steps() == [3]
