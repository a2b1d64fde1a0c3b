"""What saves leave behind in the process and on the disk: nothing but checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.storage.local_writer import LocalWriter

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc here")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@needs_proc
def test_two_hundred_saves_leave_no_thread_and_no_descriptor(tmp_path: Path, stayed: Any) -> None:
    state = {"w": np.arange(400_000.0), "n": np.array(0)}

    def save(step: int) -> None:
        state["n"][...] = step
        if step % 2:
            ckptfmt.save_async(state, tmp_path, step=step, durable=False).result(60)
        else:
            ckptfmt.save(state, tmp_path, step=step, durable=False)

    save(0)
    save(1)
    assert stayed() == []
    before = _descriptors()
    for step in range(2, 200):
        save(step)
    assert stayed() == []
    assert _descriptors() <= before
    assert len(ckptfmt.Store(tmp_path).steps()) == 200


@needs_proc
def test_saves_that_fail_leave_none_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stayed: Any
) -> None:
    state = {"w": np.arange(400_000.0)}
    ckptfmt.save_async(state, tmp_path, step=0).result(60)
    assert stayed() == []
    before = _descriptors()

    def fails(*args: Any, **more: Any) -> None:
        raise ckptfmt.StorageError("disk", reason="io")

    for step in range(1, 21):
        with monkeypatch.context() as patch:
            patch.setattr(LocalWriter, "finish" if step % 2 else "write", fails)
            with pytest.raises(ckptfmt.StorageError):
                ckptfmt.save_async({"w": state["w"] + step}, tmp_path, step=step).result(60)
    assert stayed() == []
    assert _descriptors() <= before
    assert ckptfmt.Store(tmp_path).steps() == [0]
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.is_file()]


@pytest.mark.parametrize("after", range(6))
def test_a_save_that_is_cancelled_at_any_piece_leaves_nothing_half_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The pieces come straight from the arena, which the next save must be able to fill."""
    rng = np.random.default_rng(0)
    state = {f"{i}": rng.random(700_000) for i in range(4)}
    ckptfmt.save(state, tmp_path, step=0)
    reached, go_on, seen = threading.Event(), threading.Event(), []
    real = LocalWriter.write

    def held(self: Any, offset: int, buffer: Any) -> None:
        seen.append(offset)
        if len(seen) == after + 1:
            reached.set()
            go_on.wait(30)
        real(self, offset, buffer)

    for array in state.values():
        array += 1
    with monkeypatch.context() as patch:
        patch.setattr(LocalWriter, "write", held)
        future = ckptfmt.save_async(state, tmp_path, step=1)
        assert reached.wait(30)
        threading.Timer(0.05, go_on.set).start()
        cancelled = future.cancel()
    assert cancelled == future.cancelled()
    store = ckptfmt.Store(tmp_path)
    assert store.steps() == ([0] if cancelled else [0, 1])
    assert not any((tmp_path / "parts").iterdir())
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.is_file()]
    ckptfmt.save_async(state, tmp_path, step=2).result(60)
    assert store.verify().ok
    loaded = ckptfmt.load(tmp_path, step=2)
    assert all(np.array_equal(loaded[name], state[name]) for name in state)


def test_development_mode_with_warnings_as_errors_has_nothing_to_say(tmp_path: Path) -> None:
    code = """
        import gc, sys, numpy as np, ckptfmt
        path = sys.argv[1]
        state = {"w": np.arange(600_000.0), "s": np.array(["a", "bc"], object), "n": 3}
        ckptfmt.save(state, path, step=1)
        ckptfmt.save_async(state, path, step=2).result()
        ckptfmt.save_async({"w": state["w"] + 1}, path, step=3).cancel()
        try:
            ckptfmt.save({"bad": object()}, path, step=4)
        except ckptfmt.UsageError:
            pass
        for mode in ("auto", "mmap", "read"):
            ckptfmt.load(path, step=2, mode=mode)
        ckptfmt.restore(state, path, at=2)
        with ckptfmt.open(path, step=2) as checkpoint:
            checkpoint["w"].read(np.s_[3:9])
        assert ckptfmt.Store(path).verify().ok
        ckptfmt.Store(path).gc()
        gc.collect()
        ckptfmt.save_async(state, path, step=9)  # an exit waits for it
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert 9 in ckptfmt.Store(tmp_path).steps()
