"""The TensorFlow examples of docs/examples: interrupted, they go on exactly."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import keras
import pytest

from ckptfmt import Store

pytestmark = pytest.mark.integration
EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"


class Stopped(Exception):
    """Stands for a crash."""


class Run:
    """An example in this process."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        self.monkeypatch, self.capsys, self.script = monkeypatch, capsys, EXAMPLES / name

    def __call__(self, store: Path, *more: str) -> str:
        self.monkeypatch.setattr(sys, "argv", [str(self.script), "--store", str(store), *more])
        try:
            runpy.run_path(str(self.script), run_name="__main__")
        finally:
            output = self.capsys.readouterr().out
        return output


def test_the_loop_goes_on_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(monkeypatch, capsys, "tensorflow_loop.py")
    straight = run(tmp_path / "straight", "--steps", "20").splitlines()
    assert straight[0] == "starts at step 0"
    run(tmp_path / "two parts", "--steps", "16")
    assert Store(tmp_path / "two parts").steps() == [7, 14]
    resumed = run(tmp_path / "two parts", "--steps", "20").splitlines()
    assert resumed == ["starts at step 14", straight[1]]


def test_the_fit_goes_on_at_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(monkeypatch, capsys, "keras_fit.py")
    straight = run(tmp_path / "straight")
    assert Store(tmp_path / "straight/backup").steps() == []
    assert len(Store(tmp_path / "straight/best").steps()) == 1
    count = 0
    ends = keras.callbacks.CallbackList.on_train_batch_end

    def stop(self: object, batch: int, logs: object = None) -> None:
        nonlocal count
        ends(self, batch, logs)
        count += 1
        if count == 10:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(keras.callbacks.CallbackList, "on_train_batch_end", stop)
        with pytest.raises(Stopped):
            run(tmp_path / "stopped")
    assert Store(tmp_path / "stopped/backup").latest() is not None
    assert run(tmp_path / "stopped") == straight
