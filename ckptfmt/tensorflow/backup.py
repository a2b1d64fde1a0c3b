"""`BackupAndRestore`: an interrupted `fit` goes on at the batch where it was saved, bit for bit.

It is kept in a store by a `Manager`: the model, its optimizers and metrics, the generators, the
position in the data, the logs so far and what other callbacks carry on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

import keras
import tensorflow as tf

from ckptfmt.errors import UsageError
from ckptfmt.manager import Keep, Manager
from ckptfmt.manager import keep as policies
from ckptfmt.tensorflow.fit_checks import MARK, check_save_freq, check_store, check_strategy
from ckptfmt.tensorflow.fit_data import FitData, running_fit
from ckptfmt.tensorflow.fit_state import (
    Snapshot,
    callback_states,
    metric_variables,
    model_tree,
    numbers,
    set_callback_states,
    was_stopped,
)
from ckptfmt.tensorflow.rng import rng_state
from ckptfmt.types import StrPath


class BackupAndRestore(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a running `fit`, and lets the next one go on where it was interrupted.

    Restored are weights, optimizers, metrics of the epoch, seeds (Keras's, Python's, NumPy's), the
    position in the data, `History`, the state of `EarlyStopping`, `ReduceLROnPlateau` and callbacks with
    `state_dict` or `get_state`. Where the data's position cannot be written down (generators,
    `PyDataset`, distributed data), batches that are done are drawn again and dropped; a CkptWarning
    says where that may not be exact.

    Saves are made in the background; the error of one is raised by the next, or at the end of `fit`.

    Args:
        backup_dir: A store of its own: a directory or a URL. It may lie in another store's folder.
        save_freq: "epoch", or after how many batches.
        double_checkpoint: Keep the last two: a damaged newest one is then passed over.
        delete_checkpoint: Delete what was saved once `fit` has come to its end.
        keep: What to keep, as in `ckptfmt.Manager`; None: the last, or the last two.
    Raises:
        UsageError: An argument makes no sense, or it is made for several workers. When `fit` begins:
            another callback uses the store.
    """

    def __init__(
        self,
        backup_dir: StrPath,
        save_freq: Literal["epoch"] | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        keep: Keep | int | None = None,
    ) -> None:
        super().__init__()
        check_save_freq(save_freq)
        check_strategy(self, tf.distribute.get_strategy())
        self.backup_dir, self.save_freq = backup_dir, save_freq
        self.double_checkpoint, self.delete_checkpoint = double_checkpoint, delete_checkpoint
        last = 2 if double_checkpoint else 1
        self._manager = Manager(
            backup_dir,
            keep=policies.last(last) | policies.quarantined(1) if keep is None else keep,
        )
        self._state = _State(self)
        self._data: FitData | None = None
        self._others: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        self._epoch = self._batch = self._done = 0
        self._batches = self._unsaved = 0
        self._due = False
        self._logs: dict[str, float] = {}
        self._pending: Mapping[str, Any] | None = None
        """What a restore has left to do before the first step."""

    # -- what Keras calls --------------------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        check_strategy(self, self.model.distribute_strategy)
        epochs, callbacks = running_fit(self.model)
        self._manager.wait()  # the error of a save that nobody has seen
        check_store(self, "BackupAndRestore", self._manager, self.model)
        if sum(isinstance(one, BackupAndRestore) for one in callbacks.callbacks) > 1:
            raise UsageError(
                "a fit goes on from one backup",
                reason="two-backups",
                found="two BackupAndRestore callbacks",
                do="leave one out; keep= keeps more than the last checkpoint",
            )
        self._reset()
        self._data = FitData(epochs)
        # Last of all, so that what is saved of the others is behind the batch, too; and first of
        # all once, to give them their state before they begin an epoch. A new list: the old one is
        # being walked.
        begun = callbacks.callbacks
        self._others = [one for one in begun if one is not self and not isinstance(one, _First)]
        callbacks.callbacks = [_First(self), *self._others, self]
        begun.append(_Last(self))
        if self._manager.latest() is not None:
            self._restore()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch
        if self._pending is None:
            self._batch = self._done = 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        assert self._data is not None
        done = self._data.done(batch)
        count, self._done, self._batch = done - self._done, done, batch + 1
        self._batches += count
        self._unsaved += count
        self._data.gave(count)
        self._logs = numbers(logs)
        if self.save_freq == "epoch" or self._unsaved < self.save_freq:
            return
        if self._data.is_last(batch):
            self._due = (
                True  # behind the end of the epoch: what follows the last batch is done then
            )
        else:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        assert self._data is not None
        self._data.end_epoch(self._batch)
        self._epoch, self._batch, self._done = epoch + 1, 0, 0
        self._logs = numbers(logs)
        if self.save_freq == "epoch" or self._due:
            self._data.begin_next()
            self._save()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._data, self._others, self.model._initial_epoch = None, [], None
        self._manager.wait()
        if self.delete_checkpoint:
            self._delete()

    # -- saving ------------------------------------------------------------------------------------

    def _tree(self) -> dict[str, Any]:
        assert self._data is not None
        tree = model_tree(self.model)
        tree["metrics"] = metric_variables(self.model)
        return {**tree, "fit": self._state, "rng": rng_state()}

    def _save(self) -> None:
        assert self._data is not None
        self._manager.save(
            self._tree(),
            step=self._batches,
            metrics=self._logs,
            metadata={MARK: "BackupAndRestore", "epoch": self._epoch, "batch": self._batch},
        )
        self._unsaved, self._due = 0, False

    def _state_dict(self) -> dict[str, Any]:
        assert self._data is not None
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "done": self._done,
            "batches": self._batches,
            "logs": self._logs,
            "data": self._data.state(self._batch),
            "callbacks": callback_states(self._others),
        }

    def _delete(self) -> None:
        store = self._manager.store
        tagged = set(store.tags().values())
        for info in store.checkpoints():
            if info.metadata.get(MARK) == "BackupAndRestore" and info.name not in tagged:
                store.delete(info.name)
        for info in store.checkpoints(quarantined=True):
            if info.metadata.get(MARK) == "BackupAndRestore":
                store.delete(info.name, quarantined=True)
        store.gc(grace_s=0)

    # -- going on ----------------------------------------------------------------------------------

    def _restore(self) -> None:
        assert self._data is not None
        self._build()
        self._manager.restore(self._tree())
        state = self._state.loaded
        self._epoch, self._batch, self._done = state["epoch"], state["batch"], state["done"]
        self._batches, self._logs = state["batches"], state["logs"]
        self._pending = state
        # What begins an epoch, Keras and the other callbacks, has been done before the save already:
        # all of it is undone before the first step.
        snapshot = Snapshot(self.model) if self._batch else None
        self._data.resume(state["data"], self._batch, lambda: self._before_first_step(snapshot))

    def _build(self) -> None:
        """Make the variables that the first batch would make, from the data's shapes."""
        assert self._data is not None
        optimizer: Any = getattr(self.model, "optimizer", None)
        unbuilt = optimizer is not None and not optimizer.built
        try:
            if unbuilt:  # it is built by the restore: on what it has stored state of, not on all
                optimizer.built = True
            self.model._symbolic_build(data_batch=self._data.spec)
        except Exception as error:  # the model's own code, which may raise anything
            if not self.model.built:
                raise UsageError(
                    "a model that is not built cannot be restored",
                    reason="unbuilt",
                    where=self.model.name,
                    found=f"{type(error).__name__}: {error}"[:300],
                    do="build it before fit: call it once, or model.build(shape)",
                ) from error
        finally:
            if unbuilt:
                optimizer.built = False

    def _all_began(self) -> None:
        """Behind all `on_train_begin`: had one of them raised, a later fit would begin there, too."""
        if self._pending is not None:
            # Interrupted between the decision to stop and the end of the fit: it only ends.
            over = not self._batch and was_stopped(self._others, self._pending["callbacks"])
            self.model._initial_epoch = sys.maxsize if over else self._epoch

    def _before_epoch(self, epoch: int) -> None:
        """Before all other callbacks begin the first epoch."""
        self.model._initial_epoch = None  # a later fit begins where it is told to
        if self._pending is not None and epoch != self._epoch:
            raise UsageError(
                "fit begins at another epoch than the one it was interrupted in",
                reason="initial-epoch",
                expected=self._epoch,
                found=epoch,
                do="leave out initial_epoch=: the backup says where to go on",
            )
        if not self._batch:
            self._give_states()

    def _give_states(self) -> None:
        """Let the other callbacks know what they knew; also where no epoch is left, before they end."""
        if self._pending is not None:
            state, self._pending = self._pending, None
            set_callback_states(self._others, state["callbacks"])

    def _before_first_step(self, snapshot: Snapshot | None) -> None:
        if self._pending is None or snapshot is None:
            return
        state, self._pending = self._pending, None
        snapshot.put_back()
        set_callback_states(self._others, state["callbacks"])
        self._keep_logs(state["logs"])

    def _keep_logs(self, saved: Mapping[str, float]) -> None:
        """Give the epoch the logs of its last batch, should no batch be left in it."""
        model = self.model
        original = model._get_metrics_result_or_logs

        def once(logs: Any) -> Any:
            del model._get_metrics_result_or_logs
            return original(logs or saved)

        model._get_metrics_result_or_logs = once


class _State:
    """The plain part of a fit, in the tree."""

    def __init__(self, backup: BackupAndRestore) -> None:
        self._backup = backup
        self.loaded: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self._backup._state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        data = self._backup._data
        assert data is not None
        data.load(state["data"], state["batch"])
        self.loaded = state


class _First(keras.callbacks.Callback):  # type: ignore[misc]
    """Before all others."""

    def __init__(self, backup: BackupAndRestore) -> None:
        super().__init__()
        self._backup = backup

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._backup._before_epoch(epoch)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._backup._give_states()


class _Last(keras.callbacks.Callback):  # type: ignore[misc]
    """Behind all others that begin."""

    def __init__(self, backup: BackupAndRestore) -> None:
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._backup._all_began()
