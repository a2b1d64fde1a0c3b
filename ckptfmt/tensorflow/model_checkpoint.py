"""`ModelCheckpoint`: a model during `fit`, every so often or when it is the best so far, in a store."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import keras
import tensorflow as tf

from ckptfmt.errors import CkptWarning, UsageError, warn
from ckptfmt.manager import Keep, Manager
from ckptfmt.manager import keep as policies
from ckptfmt.tensorflow.fit_checks import MARK, check_save_freq, check_store, check_strategy
from ckptfmt.tensorflow.fit_state import model_tree, numbers
from ckptfmt.tensorflow.tensors import is_optimizer
from ckptfmt.types import StrPath


class ModelCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the model, and its optimizer, at the end of epochs or every so many batches.

    Each checkpoint is a step of one store, with the logs as its metrics: no file names with
    placeholders. The step is the number of batches done, so a run that goes on counts on; what a
    store has beyond it when the run first saves is of an abandoned line and is set aside. The best
    value so far is found in the store again. NaN is never the best.

    Saves are made in the background; the error of one is raised by the next, or at the end of `fit`.

    Args:
        filepath: A store of its own: a directory or a URL. It may lie in another store's folder.
        monitor: The metric that is to be best.
        verbose: 1: say on stdout what is saved.
        save_best_only: Save only what is better than all before. Where `monitor` is not among the
            logs nothing is saved, and a CkptWarning says so.
        save_weights_only: Leave out the optimizer.
        mode: What is better; "auto": as the metric says.
        save_freq: "epoch", or after how many batches.
        initial_value_threshold: Save only what is better than this.
        keep: What to keep, as in `ckptfmt.Manager`; 1, as with Keras's own: the one saved last.
    Raises:
        UsageError: An argument makes no sense, or it is made for several workers. When `fit` begins:
            another callback uses the store.
    """

    def __init__(
        self,
        filepath: StrPath,
        monitor: str = "val_loss",
        *,
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: Literal["auto", "min", "max"] = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        initial_value_threshold: float | None = None,
        keep: Keep | int | None = 1,
    ) -> None:
        super().__init__()
        check_save_freq(save_freq)
        check_strategy(self, tf.distribute.get_strategy())
        _check_path(str(filepath))
        if mode not in ("auto", "min", "max"):
            raise UsageError(
                "not a mode", reason="mode", expected='"auto", "min" or "max"', found=repr(mode)
            )
        self.filepath, self.monitor, self.verbose = filepath, monitor, verbose
        self.save_best_only, self.save_weights_only = save_best_only, save_weights_only
        self.mode, self.save_freq = mode, save_freq
        self.best = initial_value_threshold
        policy = policies.last(keep) | policies.quarantined(keep) if isinstance(keep, int) else keep
        self._manager = Manager(filepath, keep=policy)
        self._epoch = self._batch = self._batches = self._unsaved = 0
        self._line_is_clear = False
        self._seen = False

    # -- of the run, for BackupAndRestore ----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "batch": self._batch,
            "batches": self._batches,
            "unsaved": self._unsaved,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self._batch = state["best"], state["batch"]
        self._batches, self._unsaved = state["batches"], state["unsaved"]
        self._line_is_clear = False

    # -- what Keras calls --------------------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        check_strategy(self, getattr(self.model, "distribute_strategy", None))
        self._manager.wait()  # the error of a save that nobody has seen
        check_store(self, "ModelCheckpoint", self._manager, self.model)
        self._seen = self._line_is_clear = False
        self._batch = 0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if not self._line_is_clear:
            self._begin_line()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        count = batch + 1 - (self._batch if batch >= self._batch else 0)
        self._batch = batch + 1
        self._batches += count
        self._unsaved += count
        if self.save_freq != "epoch" and self._unsaved >= self.save_freq:
            self._unsaved = 0
            self._consider(logs, f"epoch {self._epoch + 1}, batch {batch + 1}", batch + 1)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch, self._batch = epoch + 1, 0
        if self.save_freq == "epoch":
            self._consider(logs, f"epoch {epoch + 1}", 0)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._manager.wait()
        if self.save_best_only and not self._seen and self._batches:
            warn(f"{self.filepath}: {self.monitor!r} was in no logs of this fit: nothing was saved")

    # -- deciding ----------------------------------------------------------------------------------

    def _begin_line(self) -> None:
        """Before the first step: where this run stands, and what of the store is not its own past."""
        self._line_is_clear = True
        optimizer: Any = getattr(self.model, "optimizer", None)
        if is_optimizer(optimizer):
            self._batches = max(self._batches, int(optimizer.iterations.numpy()))
        store = self._manager.store
        newer = [step for step in store.steps() if step > self._batches]
        for step in newer:
            store.quarantine(step, f"training went on from step {self._batches}")
        if newer:
            warn(
                f"{store.url}: {len(newer)} checkpoints up to step {newer[-1]} are set aside: this run "
                f"goes on from step {self._batches}. Store.readmit brings one back"
            )
        if self.save_best_only and self.best is None:
            values = [
                value
                for info in store.checkpoints()
                if not math.isnan(value := info.metrics.get(self.monitor, math.nan))
            ]
            for value in values:
                self.best = value if self.best is None or self._is_better(value) else self.best

    def _consider(self, logs: Mapping[str, Any] | None, where: str, batch: int) -> None:
        found = numbers(logs)
        value = found.get(self.monitor)
        if self.save_best_only:
            if value is None:
                names = ", ".join(sorted(found)) or "nothing"
                warn(f"{self.filepath}: not saved at {where}: no {self.monitor!r} in {names}")
                return
            self._seen = True
            if not self._is_better(value):
                self._tell(f"{where}: {self.monitor} {value:g} is not better than {self.best}")
                return
            self.best = value
        tree = model_tree(self.model)
        if self.save_weights_only:
            tree = {"model": tree["model"]}
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "model: its optimizer is not in the tree", CkptWarning
            )
            self._manager.save(
                tree,
                step=self._batches,
                metrics=found,
                metadata={MARK: "ModelCheckpoint", "epoch": self._epoch, "batch": batch},
            )
        self._tell(f"{where}: saved to {self._manager.store.url} as step {self._batches}")

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None or math.isnan(self.best):
            return True
        return value < self.best if self._direction() == "min" else value > self.best

    def _direction(self) -> str:
        if self.mode != "auto":
            return self.mode
        name = self.monitor.removeprefix("val_")
        if name == "loss" or name.endswith("_loss"):
            return "min"
        for metric in self.model.metrics:
            for one in [metric, *getattr(metric, "metrics", ())]:
                direction = getattr(one, "_direction", None)
                if one.name == name and direction in ("up", "down"):
                    return "max" if direction == "up" else "min"
        raise UsageError(
            "nothing says which values of a metric are better",
            reason="mode",
            where=self.monitor,
            do='pass mode="max" or mode="min"',
        )

    def _tell(self, text: str) -> None:
        if self.verbose:
            print(text)


def _check_path(path: str) -> None:
    if "{" in path or path.endswith((".keras", ".h5", ".ckptz")):
        raise UsageError(
            "one store holds all checkpoints of a run",
            reason="filepath",
            where=path,
            expected="a directory or URL, without placeholders and file suffixes",
            do="epoch and batch are in the metadata, the logs in the metrics of each checkpoint",
        )
