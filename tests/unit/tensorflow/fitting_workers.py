"""A worker that tries Keras's fit: `fitting_workers.py RANK PORTS FOLDER`, see test_distribution."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]
    return "no error"


def main(rank: int, ports: list[str], folder: Path) -> None:
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
            "task": {"type": "worker", "index": rank},
        }
    )
    import keras
    import numpy as np
    import tensorflow as tf

    import ckptfmt.tensorflow as ckf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    x = np.ones((8, 3), np.float32)
    rows = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)

    def model() -> Any:
        with strategy.scope():
            made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            made.compile("adam", "mse")
        return made

    def past(*callbacks: Any) -> None:
        """As if Keras came through the batch that it looks at before it asks a callback."""
        made = model()
        made._maybe_symbolic_build = lambda **_: None
        made.fit(rows, verbose=0, callbacks=list(callbacks))

    seen = {"alone": error_of(lambda: model().fit(rows, verbose=0))}
    for kind in (ckf.BackupAndRestore, ckf.ModelCheckpoint):
        callback: Any = kind(folder)
        seen[kind.__name__] = error_of(lambda callback=callback: past(callback))  # type: ignore[misc]
    seen["past the first batch"] = error_of(past)
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), Path(sys.argv[3]))
