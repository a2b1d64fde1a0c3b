"""Watcher: whole values, swapped while others are in use."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Checkpoint, NotFoundError, Store, UsageError, Watcher
from ckptfmt.storage import open_backend
from ckptfmt.testing import FaultyBackend
from ckptfmt.types import Key


def save(store: Store, step: int) -> None:
    ckptfmt.save({"a": np.full(200_000, step), "b": np.full(200_000, step)}, store, step=step)


def load(checkpoint: Checkpoint) -> Any:
    return checkpoint.load(mode="mmap")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_value_follows_its_tag_and_the_old_one_stays_valid(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 1)
    save(store, 2)
    store.tag("production", 1)
    with Watcher(store, load=load, poll_s=0.01) as watcher:
        old = watcher.value
        store.tag("production", 2)
        wait_for(lambda: watcher.value is not old)
        assert watcher.name == "step-0000000000000002"
        store.delete(1, force=True)
        store.gc(grace_s=0)
        assert (old["a"] == 1).all()
        assert (watcher.value["a"] == 2).all()


def test_twenty_swaps_under_load_give_no_torn_value(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 1)
    torn: list[Any] = []
    served: list[int] = []
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            value = watcher.value
            seen = {int(value[name][at]) for name in ("a", "b") for at in (0, 199_999)}
            if len(seen) != 1:
                torn.append(seen)
            served.append(seen.pop())
            time.sleep(0.001)

    with Watcher(store, at="latest", load=load, poll_s=0.002) as watcher:
        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        for step in range(2, 22):
            save(store, step)
            store.delete(step - 1)
            store.gc(grace_s=0)
            wait_for(lambda step=step: watcher.value["a"][0] == step)  # type: ignore[misc]
        wait_for(lambda: 21 in served)
        stop.set()
        for thread in threads:
            thread.join()
    assert torn == []
    assert set(served) >= {21}
    assert len(set(served)) > 10


def test_a_load_that_fails_keeps_the_old_value_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    save(store, 1)
    failures = [2]

    def picky(checkpoint: Checkpoint) -> Any:
        if checkpoint.info.step == 2 and failures[0]:
            failures[0] -= 1
            raise ValueError("not yet")
        return checkpoint.info.step

    with Watcher(store, at="latest", load=picky, poll_s=0.01) as watcher:
        save(store, 2)
        wait_for(lambda: watcher.value == 2)
    assert failures == [0]
    assert "could not be taken; step-0000000000000001 stays" in caplog.text


def test_what_is_not_there_or_makes_no_sense_is_an_error_at_once(tmp_path: Path) -> None:
    save(Store(tmp_path), 1)
    with pytest.raises(NotFoundError):
        Watcher(tmp_path, load=load)
    with pytest.raises(UsageError, match="whole store"):
        Watcher(f"{tmp_path}@1", load=load)
    with pytest.raises(UsageError, match="poll_s"):
        Watcher(tmp_path, at="latest", load=load, poll_s=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_worker_follows_the_tag_itself(tmp_path: Path) -> None:
    """A server that loads before it forks its workers."""
    ckptfmt.save({"w": np.full(10, 1)}, tmp_path, step=1)
    store = Store(tmp_path)
    store.tag("production", 1)
    with Watcher(tmp_path, load=lambda ckpt: int(ckpt.load()["w"][0]), poll_s=0.01) as current:
        worker = os.fork()
        if worker == 0:
            for _ in range(3000):
                if current.value == 2:
                    os._exit(0)
                time.sleep(0.01)
            os._exit(1)
        ckptfmt.save({"w": np.full(10, 2)}, tmp_path, step=2)
        store.tag("production", 2)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0


def test_a_look_at_what_has_not_moved_reads_no_whole_index(tmp_path: Path) -> None:
    # Of many names that no codec makes smaller.
    names = {uuid.UUID(int=n * 0x9E3779B97F4A7C15F39CC060 % 2**128).hex: n for n in range(5000)}
    ckptfmt.save(names, tmp_path, step=1)
    Store(tmp_path).tag("production", 1)
    read: list[tuple[str, int]] = []

    class Counting(FaultyBackend):
        def get(self, key: Key, start: int = 0, stop: int | None = None, out: Any = None) -> Any:
            data = super().get(key, start, stop, out)
            read.append((key, len(data)))
            return data

    store = Store(Counting(open_backend(tmp_path)))  # type: ignore[arg-type]
    with Watcher(store, load=lambda ckpt: len(ckpt), poll_s=0.01) as current:
        assert current.value == 5000
        whole = sum(nbytes for _, nbytes in read)
        begun = len(read)
        while len(read) < begun + 40:
            time.sleep(0.01)
    assert max(nbytes for _, nbytes in read[begun + 8 :]) <= 64 << 10 < whole
