"""Runs fits for test_killed_fit, each in a fork of a process that has imported TensorFlow once.

A line of JSON in: {"folder", "kill", "out"}; one out: how the fit ended. `kill` counts what the fit
does, batches and the system calls of its saves alike; at that one the process kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import ckptfmt.tensorflow as ckf

EPOCHS, EVERY = 3, 2
CALLS = ("fsync", "fdatasync", "link", "rename", "replace", "unlink")


class Mortal:
    """Counts, and ends the process at one of the points."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def point(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.point()
            return call(*arguments, **options)

        return counted


class Batches(keras.callbacks.Callback):
    def __init__(self, mortal: Mortal) -> None:
        super().__init__()
        self.mortal, self.seen = mortal, list[Any]()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append([batch, *(float(value).hex() for value in (logs or {}).values())])
        self.mortal.point()


def fit(folder: str, kill: int) -> dict[str, Any]:
    mortal = Mortal(kill)
    for name in CALLS:
        setattr(os, name, mortal.watched(getattr(os, name)))
    keras.utils.set_random_seed(11)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 3, 40)
    model = keras.Sequential(
        [layers.Dense(8, "relu"), layers.Dropout(0.4), layers.BatchNormalization(), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], run_eagerly=True)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=5).batch(8).prefetch(2)
    spy = Batches(mortal)
    callbacks = [spy, ckf.BackupAndRestore(folder, save_freq=EVERY, delete_checkpoint=False)]
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return {
        "values": [variable.numpy().tobytes().hex() for variable in variables],
        "history": history.history,
        "batches": spy.seen,
        "points": mortal.count,
    }


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            made = fit(job["folder"], job["kill"])
            with open(job["out"], "w") as file:
                json.dump(made, file)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(
            json.dumps({"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}), flush=True
        )


if __name__ == "__main__":
    main()
