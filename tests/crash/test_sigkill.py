"""A process in a loop is killed by SIGKILL at random moments, on a real directory.

After each kill: what it reported is there, the one in progress is there whole or not at all, every
checkpoint loads and verifies, and gc returns the space. The next process goes on with that store.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptfmt
from ckptfmt import Store

KILLS = [pytest.param(20, id="few"), pytest.param(200, id="200", marks=pytest.mark.slow)]


def killed_after(
    delay_s: float, work: Callable[[Callable[[int], None]], None], reports: int = 0
) -> int | None:
    """Fork, let the child work, kill it; gives the last version that it reported.

    Args:
        reports: Of which to wait for so many first: then the delay begins.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(lambda version: _send(writer, version))
        finally:
            os._exit(1)  # only an error ends the loop
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        reported = pipe.read(8 * reports)
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        reported += pipe.read()
    assert os.WIFSIGNALED(status), "the child's loop failed"
    return int.from_bytes(reported[-8:], "little") if reported else None


def _send(writer: int, version: int) -> None:
    os.write(writer, version.to_bytes(8, "little"))


def rounds(count: int, crash: Any, path: Path) -> list[float]:
    """Seconds until each kill: up to three times what a save takes on this machine."""
    begun = time.monotonic()
    for version in (1, 2):
        ckptfmt.save(crash.tree(version), path / "probe")
    longest_s = 3 * (time.monotonic() - begun) / 2
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    return [rng.uniform(0, longest_s) for _ in range(count)]


def check_rest(crash: Any, store: Store) -> None:
    """Everything that is listed loads whole; verify; gc; no litter."""
    for name in store.names():
        crash.version_of(ckptfmt.load(store, at=name))
    report = store.verify()
    assert report.ok, str(report.problems)
    assert store.backend.capabilities.put_if_absent
    store.gc(grace_s=0)
    store.gc(grace_s=0)
    assert crash.litter(store.backend) == []


@pytest.mark.parametrize("count", KILLS)
def test_killed_while_it_saves_steps(crash: Any, tmp_path: Path, count: int) -> None:
    store, newest = Store(tmp_path / "run"), 0
    in_the_middle = 0
    for number, delay_s in enumerate(rounds(3 * count, crash, tmp_path)):
        if number >= count and in_the_middle > count / 4:
            break

        def work(report: Callable[[int], None], first: int = newest + 1) -> None:
            for version in itertools.count(first):
                ckptfmt.save(crash.tree(version), store, step=version)
                report(version)

        reported = killed_after(delay_s, work, 0 if number else 4)
        in_the_middle += bool(list(store.backend.list("parts/")))
        newest = newest if reported is None else reported
        steps = store.steps()
        assert max(steps, default=0) in (newest, newest + 1)
        assert steps[-3:] == list(range(max(steps, default=0) + 1))[1:][-3:], "none is missing"
        newest = max(steps, default=0)
        if newest:
            assert crash.version_of(ckptfmt.load(store)) == newest
        check_rest(crash, store)
        for step in steps[:-3]:
            store.delete(step)
    assert newest > 3
    assert in_the_middle > count / 4, "the kills missed the saves"


@pytest.mark.parametrize("count", KILLS)
def test_killed_while_it_overwrites_main(crash: Any, tmp_path: Path, count: int) -> None:
    store, newest = Store(tmp_path / "run"), 0
    for number, delay_s in enumerate(rounds(count, crash, tmp_path)):

        def work(report: Callable[[int], None], first: int = newest + 1) -> None:
            for version in itertools.count(first):
                ckptfmt.save(crash.tree(version), store)
                report(version)

        reported = killed_after(delay_s, work, 0 if number else 4)
        newest = newest if reported is None else reported
        found = crash.load_version(store.backend, "main") or 0
        assert found in (newest, newest + 1)
        newest = found
        check_rest(crash, store)
        assert len(list(store.backend.list("checkpoints/"))) <= 1, "gc ends a replacement"
    assert newest > 3


@pytest.mark.parametrize("collects", [False, True], ids=["delete", "gc"])
@pytest.mark.parametrize("count", KILLS)
def test_killed_while_it_deletes_and_collects(
    crash: Any, tmp_path: Path, count: int, collects: bool
) -> None:
    store = Store(tmp_path / "run")
    ckptfmt.save(crash.tree(1), store, step=1)
    newest = 1
    for number, delay_s in enumerate(rounds(count, crash, tmp_path)):

        def work(report: Callable[[int], None], first: int = newest + 1) -> None:
            for version in itertools.count(first):
                ckptfmt.save(crash.tree(version), store, step=version)
                store.delete(version - 1)
                if collects:
                    store.gc(grace_s=0)
                report(version)

        reported = killed_after(delay_s, work, 0 if number else 4)
        newest = newest if reported is None else reported
        steps = store.steps()
        assert steps in ([newest], [newest, newest + 1], [newest + 1])
        check_rest(crash, store)
        for step in steps[:-1]:
            store.delete(step)
        newest = steps[-1]
    assert newest > 3
