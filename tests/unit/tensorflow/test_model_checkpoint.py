"""ModelCheckpoint: what is saved when, what is best, what stays."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt.errors import CkptWarning, UsageError

X, Y = np.ones((12, 3), np.float32), np.ones((12, 1), np.float32)


class Script(keras.callbacks.Callback):
    """Gives the epochs the logs that a test wants."""

    def __init__(self, *values: float, name: str = "val_loss") -> None:
        super().__init__()
        self.values, self.name = values, name

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch < len(self.values):
            logs[self.name] = self.values[epoch]


def make() -> Any:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
    return model


def fit(model: Any, *callbacks: Any, epochs: int, initial_epoch: int = 0) -> None:
    model.fit(
        X, Y, batch_size=4, epochs=epochs, initial_epoch=initial_epoch, verbose=0,
        callbacks=list(callbacks),
    )  # fmt: skip


def steps(folder: Path) -> list[int]:
    return ckptfmt.Store(folder).steps()


def test_the_model_and_its_optimizer_are_saved_at_the_end_of_epochs(tmp_path: Path) -> None:
    model = make()
    fit(model, ckf.ModelCheckpoint(tmp_path, keep=None), epochs=2)
    assert steps(tmp_path) == [3, 6]
    info = ckptfmt.open(tmp_path).info
    assert info.metadata["epoch"] == 2
    assert set(info.metrics) == {"loss", "mae"}
    other = make()
    assert ckf.restore({"model": other, "optimizer": other.optimizer}, tmp_path)
    assert np.array_equal(other.get_weights()[0], model.get_weights()[0])
    assert int(other.optimizer.iterations) == 6


def test_weights_alone_are_saved_without_a_warning_and_every_so_many_batches(
    tmp_path: Path,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CkptWarning)
        fit(
            make(),
            ckf.ModelCheckpoint(tmp_path, save_weights_only=True, save_freq=2, keep=None),
            epochs=2,
        )
    assert steps(tmp_path) == [2, 4, 6]
    assert all(name.startswith("model/") for name in ckptfmt.open(tmp_path).names())


@pytest.mark.parametrize(
    ("mode", "values", "saved"),
    [
        ("auto", (3.0, 2.0, 2.5, 2.0, 1.0), [3, 6, 15]),
        ("max", (3.0, 2.0, 2.5, 4.0, 4.0), [3, 12]),
        ("min", (math.nan, 2.0, math.nan, 1.0, math.inf), [6, 12]),
        ("max", (math.nan, -math.inf, 1.0, math.nan, math.inf), [6, 9, 15]),
    ],
)
def test_only_what_is_better_than_all_before_is_saved(
    tmp_path: Path, mode: Any, values: tuple[float, ...], saved: list[int]
) -> None:
    best = ckf.ModelCheckpoint(tmp_path, save_best_only=True, mode=mode, keep=None)
    fit(make(), Script(*values), best, epochs=5)
    assert steps(tmp_path) == saved


def test_the_best_alone_stays(tmp_path: Path) -> None:
    best = ckf.ModelCheckpoint(tmp_path, save_best_only=True)
    fit(make(), Script(3.0, 1.0, 2.0), best, epochs=3)
    assert steps(tmp_path) == [6]
    assert ckptfmt.open(tmp_path).info.metrics["val_loss"] == 1.0


def test_a_threshold_counts_as_the_best_so_far(tmp_path: Path) -> None:
    best = ckf.ModelCheckpoint(tmp_path, save_best_only=True, initial_value_threshold=1.5)
    fit(make(), Script(3.0, 1.0), best, epochs=2)
    assert steps(tmp_path) == [6]


def test_a_run_that_goes_on_knows_the_best_of_before(tmp_path: Path) -> None:
    fit(make(), Script(3.0, 1.0), ckf.ModelCheckpoint(tmp_path, save_best_only=True), epochs=2)
    model = make()
    ckf.restore({"model": model, "optimizer": model.optimizer}, tmp_path)
    script = Script(9.0, 9.0, 2.0, 0.5)
    again = ckf.ModelCheckpoint(tmp_path, save_best_only=True, keep=None)
    fit(model, script, again, epochs=4, initial_epoch=2)
    assert steps(tmp_path) == [6, 12]


def test_a_run_from_the_start_sets_aside_what_is_there_and_says_so(tmp_path: Path) -> None:
    fit(make(), ckf.ModelCheckpoint(tmp_path, keep=None), epochs=2)
    with pytest.warns(CkptWarning, match="set aside"):
        fit(make(), ckf.ModelCheckpoint(tmp_path, keep=None), epochs=1)
    assert steps(tmp_path) == [3]
    aside = ckptfmt.Store(tmp_path).checkpoints(quarantined=True)
    assert [info.step for info in aside] == [3, 6]


def test_a_second_fit_counts_on(tmp_path: Path) -> None:
    model, callback = make(), ckf.ModelCheckpoint(tmp_path, keep=None)
    fit(model, callback, epochs=1)
    fit(model, callback, epochs=1)
    assert steps(tmp_path) == [3, 6]


def test_a_metric_that_is_in_no_logs_is_warned_of_and_nothing_is_lost(tmp_path: Path) -> None:
    best = ckf.ModelCheckpoint(tmp_path, "val_los", save_best_only=True, mode="min")
    with pytest.warns(CkptWarning) as found:
        fit(make(), best, epochs=1)
    texts = [str(one.message) for one in found]
    assert any("no 'val_los' in loss, mae" in text for text in texts)
    assert any("in no logs of this fit" in text for text in texts)
    assert steps(tmp_path) == []


def test_a_metric_says_itself_what_is_better_or_is_asked_for(tmp_path: Path) -> None:
    best = ckf.ModelCheckpoint(tmp_path, "val_mae", save_best_only=True, keep=None)
    fit(make(), Script(3.0, 2.0, name="val_mae"), best, epochs=2)
    assert steps(tmp_path) == [3, 6]
    unknown = ckf.ModelCheckpoint(tmp_path / "x", "score", save_best_only=True)
    with pytest.raises(UsageError, match='mode="max" or mode="min"'):
        fit(make(), Script(3.0, 2.0, name="score"), unknown, epochs=2)


def test_it_says_what_it_does_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(
        make(),
        Script(1.0, 2.0),
        ckf.ModelCheckpoint(tmp_path, save_best_only=True, verbose=1),
        epochs=2,
    )
    said = capsys.readouterr().out
    assert "epoch 1: saved to" in said
    assert "epoch 2: val_loss 2 is not better than 1.0" in said


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("a/{epoch:02d}", {}),
        ("best.keras", {}),
        ("best.weights.h5", {}),
        ("a", {"mode": "best"}),
        ("a", {"save_freq": 0}),
        ("a", {"keep": 0}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    tmp_path: Path, path: str, more: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        ckf.ModelCheckpoint(tmp_path / path, **more)


def test_after_a_crash_it_goes_on_with_the_backup(tmp_path: Path) -> None:
    """The checkpoint of a line that the crash ended is set aside, and the same one is made again."""

    class Crash(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    def callbacks() -> list[Any]:
        return [
            Script(3.0, 2.0, 1.0, 2.5),
            ckf.ModelCheckpoint(tmp_path / "best", save_best_only=True, keep=None),
        ]

    made = callbacks()
    with pytest.raises(KeyboardInterrupt):
        fit(make(), *made, Crash(), ckf.BackupAndRestore(tmp_path / "b"), epochs=4)
    made[1]._manager.wait()
    assert steps(tmp_path / "best") == [3, 6, 9]
    with pytest.warns(CkptWarning, match="set aside"):
        fit(make(), *callbacks(), ckf.BackupAndRestore(tmp_path / "b"), epochs=4)
    assert steps(tmp_path / "best") == [3, 6, 9]
