"""Saves in the background: what is saved is the moment of the call, and no error is lost."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine import background, stage, wait_until
from ckptfmt.engine.arena import Arena
from ckptfmt.errors import ConflictError, InternalError
from ckptfmt.storage import Backend, Writer
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.testing import difference
from ckptfmt.types import Key


class _Slow(MemoryBackend):
    """A memory store whose data waits at a gate."""

    def __init__(self, name: str) -> None:
        super().__init__(f"memory://{name}")
        self.gate = threading.Event()
        self.fails: Exception | None = None

    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        if key.startswith(("tmp/", "data/")):
            self.gate.wait(30)
            if self.fails is not None:
                raise self.fails
        return super().create(key, nbytes)


@pytest.fixture
def slow(request: pytest.FixtureRequest) -> _Slow:
    return _Slow(f"background-{request.node.name}")


def _store(backend: Backend) -> ckptfmt.Store:
    return ckptfmt.Store(backend)  # type: ignore[arg-type]


def test_what_is_saved_is_the_state_at_the_call(slow: _Slow) -> None:
    """Case 23: arrays, 0-d counters, nested containers and values change right after the call."""
    state: dict[str, Any] = {
        "w": np.arange(300_000.0),
        "step": np.array(2),
        "list": [np.ones(3), {"deep": np.zeros((2, 2))}],
        "config": {"lr": 0.1, "names": ["a", "b"]},
    }
    future = ckptfmt.save_async(state, _store(slow), step=2)
    assert future.staged
    assert not future.done()
    state["w"][:] = -1
    state["step"][...] = 3
    state["list"][0][:] = 7
    state["list"][1]["deep"][:] = 7
    state["config"]["lr"] = 9.9
    state["config"]["names"].append("c")
    slow.gate.set()
    assert future.result(30).step == 2
    loaded = ckptfmt.load(_store(slow))
    np.testing.assert_array_equal(loaded["w"], np.arange(300_000.0))
    assert loaded["step"] == 2
    np.testing.assert_array_equal(loaded["list"][0], np.ones(3))
    np.testing.assert_array_equal(loaded["list"][1]["deep"], np.zeros((2, 2)))
    assert loaded["config"] == {"lr": 0.1, "names": ["a", "b"]}


def test_fifty_saves_in_a_loop_hold_one_step_each(tmp_path: Path) -> None:
    weights, counter = np.zeros(50_000), np.array(0)
    for step in range(50):
        weights[:] = step
        counter[...] = step
        ckptfmt.save_async({"w": weights, "n": counter}, tmp_path, step=step)
        weights[:] = -1
    ckptfmt.save({"done": 1}, tmp_path, name="end")
    for step in range(50):
        loaded = ckptfmt.load(tmp_path, step=step)
        assert (loaded["w"] == step).all()
        assert loaded["n"] == step


def test_a_second_save_waits_or_raises(slow: _Slow) -> None:
    first = ckptfmt.save_async({"w": np.ones(10)}, _store(slow), step=1)
    with pytest.raises(ConflictError, match="in flight: step-0000000000000001"):
        ckptfmt.save_async({"w": np.ones(10)}, _store(slow), step=2, when_busy="raise")
    threading.Timer(0.1, slow.gate.set).start()
    second = ckptfmt.save_async({"w": np.zeros(10)}, _store(slow), step=2)
    assert first.done()
    assert second.result(30).step == 2


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_save(slow: _Slow) -> None:
    slow.fails = ConflictError("the disk is on fire", reason="test")
    slow.gate.set()
    ckptfmt.save_async({"w": np.ones(10)}, _store(slow), step=1)
    slow_again = _store(slow)
    with pytest.raises(ConflictError, match="on fire"):
        ckptfmt.save({"w": np.ones(10)}, slow_again, step=2)
    slow.fails = None
    assert ckptfmt.save({"w": np.ones(10)}, slow_again, step=2).step == 2
    assert slow_again.steps() == [2]


def test_an_error_that_was_asked_for_is_raised_once(slow: _Slow) -> None:
    slow.fails = ConflictError("the disk is on fire", reason="test")
    slow.gate.set()
    future = ckptfmt.save_async({"w": np.ones(10)}, _store(slow), step=1)
    with pytest.raises(ConflictError, match="on fire"):
        future.result(30)
    slow.fails = None
    assert ckptfmt.save({"w": np.ones(10)}, _store(slow), step=2).step == 2


def test_what_cannot_be_saved_is_refused_in_the_call(tmp_path: Path) -> None:
    with pytest.raises(ckptfmt.UsageError, match="bad"):
        ckptfmt.save_async({"bad": object()}, tmp_path / "s", step=1)
    assert not (tmp_path / "s").exists()
    ckptfmt.save({"a": np.ones(2)}, tmp_path / "s", step=1)
    with pytest.raises(ckptfmt.ExistsError):
        ckptfmt.save_async({"b": np.ones(2)}, tmp_path / "s", step=1)


def test_a_cancelled_save_leaves_nothing(slow: _Slow) -> None:
    future = ckptfmt.save_async({"w": np.ones(2_000_000)}, _store(slow), step=1)
    threading.Timer(0.1, slow.gate.set).start()
    assert future.cancel()
    assert future.cancelled()
    store = _store(slow)
    assert store.steps() == []
    assert [e.key for e in slow.list("parts/")] == []
    assert [e.key for e in slow.list("tmp/")] == []
    assert ckptfmt.save({"w": np.ones(2)}, store, step=2).step == 2


def test_a_committed_save_cannot_be_cancelled(tmp_path: Path) -> None:
    future = ckptfmt.save_async({"w": np.ones(2)}, tmp_path, step=1)
    future.result(30)
    assert not future.cancel()
    assert ckptfmt.Store(tmp_path).steps() == [1]


def test_an_arena_that_is_overwritten_too_early_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_all = stage.stage_all

    def overwrite(plan: Any, memory: Any, offsets: Any) -> stage.Staged:
        staged = copy_all(plan, memory, offsets)
        memory[: len(memory) // 2] = 7
        return staged

    monkeypatch.setattr(background, "stage_all", overwrite)
    future = ckptfmt.save_async({"w": np.arange(500_000.0)}, tmp_path, step=1)
    with pytest.raises(InternalError, match="staged bytes are not those"):
        future.result(30)
    assert ckptfmt.Store(tmp_path).steps() == []


def test_a_plan_with_stale_sources_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classic way to save old weights: staged bytes of the step before."""
    weights = np.arange(500_000.0)
    copy_all = stage.stage_all
    kept: list[bytes] = []

    def stale(plan: Any, memory: Any, offsets: Any) -> stage.Staged:
        staged = copy_all(plan, memory, offsets)
        if kept:
            memory[:] = np.frombuffer(kept[0], np.uint8)
        kept.append(memory.tobytes())
        return staged

    monkeypatch.setattr(background, "stage_all", stale)
    ckptfmt.save_async({"w": weights}, tmp_path, step=1).result(30)
    weights += 1
    with pytest.raises(InternalError, match="'w'"):
        ckptfmt.save_async({"w": weights}, tmp_path, step=2).result(30)
    assert ckptfmt.Store(tmp_path).steps() == [1]


def test_a_state_over_the_staging_budget_is_saved_while_the_caller_waits(tmp_path: Path) -> None:
    with ckptfmt.configure(staging_nbytes=1000):
        future = ckptfmt.save_async({"w": np.ones(1000)}, tmp_path, step=1)
    assert future.done()
    assert future.result().step == 1


def test_no_thread_is_left_after_many_saves(tmp_path: Path, stayed: Any) -> None:
    for step in range(20):
        ckptfmt.save_async({"w": np.full(1000, step)}, tmp_path, step=step).result(30)
    assert stayed() == []


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_exit_waits_for_a_save_in_flight(tmp_path: Path) -> None:
    done = _run(
        """
        import sys, numpy as np, ckptfmt
        ckptfmt.save_async({"w": np.arange(3_000_000.0)}, sys.argv[1], step=5)
        """,
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    np.testing.assert_array_equal(ckptfmt.load(tmp_path)["w"], np.arange(3_000_000.0))


def test_an_error_at_exit_is_printed(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("in the way")
    done = _run(
        """
        import sys, numpy as np, ckptfmt
        ckptfmt.save_async({"w": np.arange(1000.0)}, sys.argv[1], step=5)
        """,
        str(tmp_path),
    )
    assert "the save of step-0000000000000005 failed" in done.stderr


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Arena:
    fresh = Arena()
    monkeypatch.setattr(background, "_arena", fresh)
    return fresh


def test_memory_is_made_ready_for_the_save_that_follows_a_restore(
    tmp_path: Path, arena: Arena
) -> None:
    state = {name: np.arange(1 << 20, dtype=np.float32) for name in "abcde"}
    with ckptfmt.Manager(tmp_path) as manager:
        manager.restore(state)  # there is nothing yet
        assert arena.nbytes == 0
        manager.save(state, step=1)
    arena.trim()
    with ckptfmt.Manager(tmp_path) as manager:
        manager.restore(state)
        nbytes = sum(array.nbytes for array in state.values())
        assert wait_until(lambda: arena.nbytes >= nbytes, timeout_s=60)
        ready = arena.nbytes
        state["a"][:] = 7
        future = manager.save(state, step=2)
        assert future is not None
        assert arena.nbytes == ready  # it was enough, padding included
    assert not difference(ckptfmt.load(tmp_path), state)


def test_no_memory_is_made_ready_for_a_part_a_synchronous_save_or_too_large_a_state(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": np.arange(1 << 20, dtype=np.float32), "b": np.ones(3)}
    ckptfmt.save(state, tmp_path, step=1)
    asked: list[object] = []
    monkeypatch.setattr(background, "_ready", lambda *given: asked.append(given))
    with ckptfmt.Manager(tmp_path, asynchronous=False) as manager:
        manager.restore(state)
    with ckptfmt.Manager(tmp_path) as manager:
        manager.restore({"b": state["b"]}, allow_unexpected="a")
        with ckptfmt.configure(staging_nbytes=1 << 20):
            manager.restore(state)
        assert not asked
        manager.restore(state)
    assert len(asked) == 1
