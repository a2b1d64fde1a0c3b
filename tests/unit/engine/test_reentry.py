"""Saves within saves: from a signal handler, a callback, a process that was forked, without threads."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine import arena, background, call, stage
from ckptfmt.engine.plan import SaveOptions
from ckptfmt.errors import StorageError
from ckptfmt.storage.local import LocalBackend

TREE: dict[str, Any] = {"a": np.arange(300_000), "b": 3}


def test_a_signal_handler_may_save_while_a_tree_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_all, saved = stage.stage_all, []

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(background, "stage_all", stage_all)
        os.kill(os.getpid(), signal.SIGUSR1)
        return stage_all(*args)

    def handler(*_: object) -> None:
        saved.append(ckptfmt.save_async({"x": np.ones(5)}, tmp_path, step=9).result())

    monkeypatch.setattr(background, "stage_all", interrupted)
    old = signal.signal(signal.SIGUSR1, handler)
    try:
        ckptfmt.save_async(TREE, tmp_path, step=1).result()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert [info.step for info in saved] == [9]
    assert np.array_equal(ckptfmt.load(tmp_path, step=1)["a"], TREE["a"])


def test_the_next_save_may_start_where_the_last_one_is_told_done(tmp_path: Path) -> None:
    done = threading.Event()

    def again(_: object) -> None:
        ckptfmt.save_async({"x": 1, "y": np.ones(3)}, tmp_path, step=2).result()
        done.set()

    future = ckptfmt.save_async(TREE, tmp_path, step=1)
    future.add_done_callback(again)
    assert done.wait(20)
    assert ckptfmt.Store(tmp_path).steps() == [1, 2]


def test_a_forked_process_saves_without_waiting_for_its_parents_save(tmp_path: Path) -> None:
    future = ckptfmt.save_async({"a": np.arange(2_000_000)}, tmp_path, step=1)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            ckptfmt.save_async({"x": np.ones(5)}, tmp_path, step=2).result()
            ckptfmt.save({"x": np.ones(6)}, tmp_path, step=3)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert future.result().step == 1
    assert os.waitpid(pid, 0)[1] == 0
    assert ckptfmt.Store(tmp_path).steps() == [1, 2, 3]
    assert ckptfmt.Store(tmp_path).verify().ok


def test_a_process_that_gets_no_thread_saves_and_loads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    ckptfmt.save(TREE, tmp_path, step=1)
    assert ckptfmt.save_async(TREE, tmp_path, step=2).result().step == 2
    monkeypatch.undo()
    assert ckptfmt.save_async(TREE, tmp_path, step=3).result().step == 3
    assert np.array_equal(ckptfmt.load(tmp_path)["a"], TREE["a"])


def _raising(error: BaseException) -> Any:
    def raises(*args: object) -> None:
        raise error

    return raises


def test_an_error_of_a_save_over_the_budget_is_raised_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.import_module("ckptfmt.engine.save"),
        "finish_save",
        _raising(StorageError("disk", reason="io")),
    )
    with ckptfmt.configure(staging_nbytes=1000):
        ckptfmt.save_async(TREE, tmp_path, step=1)
    monkeypatch.undo()
    with pytest.raises(StorageError, match="disk"):
        ckptfmt.save({"x": 1}, tmp_path, step=2)
    ckptfmt.save({"x": 1}, tmp_path, step=2)


def test_an_interrupt_of_a_save_over_the_budget_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.import_module("ckptfmt.engine.save"), "finish_save", _raising(KeyboardInterrupt())
    )
    with ckptfmt.configure(staging_nbytes=1000), pytest.raises(KeyboardInterrupt):
        ckptfmt.save_async(TREE, tmp_path, step=1)


def test_of_saves_that_several_threads_began_no_error_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def fails(*args: object) -> None:
        gate.wait(20)
        raise StorageError("disk", reason="io")

    monkeypatch.setattr(importlib.import_module("ckptfmt.engine.save"), "finish_save", fails)
    monkeypatch.setattr(
        arena.Arena, "take", lambda self, nbytes, devices: np.zeros(nbytes, np.uint8)
    )
    settled = threading.Barrier(2)

    def begin(step: int) -> None:
        backend = LocalBackend(tmp_path)
        background.settle(backend)
        settled.wait(20)
        _, request = call.settle_call(
            TREE, tmp_path, step, None, metadata={}, metrics={}, if_exists=None,
            options=SaveOptions(), bases=None, timeout_s=1.0,
            progress=False,
        )  # fmt: skip
        background.save_in_background(TREE, backend, request)

    threads = [threading.Thread(target=begin, args=(step,)) for step in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gate.set()
    for _ in range(2):
        with pytest.raises(StorageError, match="disk"):
            background.settle(LocalBackend(tmp_path))
    background.settle(LocalBackend(tmp_path))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_just_after_the_index_was_put_leaves_nothing_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    ckptfmt.save(TREE, tmp_path, name="main")
    put = LocalBackend.put_if_absent

    def interrupted(self: LocalBackend, key: Any, data: Any, *, durable: bool) -> bool:
        put(self, key, data, durable=durable)
        if key.startswith("checkpoints/"):
            raise error
        return True

    monkeypatch.setattr(LocalBackend, "put_if_absent", interrupted)
    with pytest.raises(error):
        ckptfmt.save({"other": np.ones(3)}, tmp_path, name="main")
    monkeypatch.undo()
    assert np.array_equal(ckptfmt.load(tmp_path)["a"], TREE["a"])
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_many_equal_tensors_are_mapped_without_a_descriptor_each(tmp_path: Path) -> None:
    import resource

    tree = {str(i): np.zeros(100) for i in range(2000)}
    ckptfmt.save(tree, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
    try:
        loaded = ckptfmt.load(tmp_path, mode="mmap")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    loaded["7"][:] = 1
    assert not any(loaded[name].any() for name in tree if name != "7")
