"""A Keras fit that can be killed at any moment and goes on at the batch that was saved.

    python keras_fit.py --store runs/fit --epochs 4

`BackupAndRestore` keeps the running fit, `ModelCheckpoint` the model that was best so far.
"""

from __future__ import annotations

import argparse
import hashlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import ckptfmt.tensorflow as ckf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--every", type=int, default=3, help="save after this many batches")
    options = parser.parse_args()

    keras.utils.set_random_seed(11)
    x = np.random.default_rng(1).normal(size=(96, 8)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=5).batch(16)

    model = keras.Sequential([layers.Dense(16, "relu"), layers.Dropout(0.2), layers.Dense(1)])
    model.compile("adam", "mse")
    history = model.fit(
        data,
        epochs=options.epochs,
        shuffle=False,  # the data set does that
        validation_data=(x, y),
        verbose=0,
        callbacks=[
            ckf.ModelCheckpoint(f"{options.store}/best", save_best_only=True),
            ckf.BackupAndRestore(f"{options.store}/backup", save_freq=options.every),
        ],
    )

    weights = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
    print(f"losses: {', '.join(f'{loss:.4f}' for loss in history.history['loss'])}")
    print(f"weights after {options.epochs} epochs: {weights[:16]}")


if __name__ == "__main__":
    main()
