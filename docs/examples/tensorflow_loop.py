"""A TensorFlow loop of one's own that can be killed at any moment and goes on exactly.

    python tensorflow_loop.py --store runs/loop --steps 40

One dict names all that the run consists of, the position in the data among it; the manager fills it,
says when to save, saves in the background and deletes what is old.
"""

from __future__ import annotations

import argparse
import hashlib

import keras
import tensorflow as tf
from keras import layers

import ckptfmt
import ckptfmt.tensorflow as ckf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=7, help="save after this many steps")
    options = parser.parse_args()

    keras.utils.set_random_seed(11)
    x = tf.random.stateless_normal((96, 8), seed=(1, 2))
    y = tf.reduce_sum(x, axis=1, keepdims=True)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=5).repeat().batch(16)
    batches = iter(rows)

    model = keras.Sequential([layers.Dense(16, "relu"), layers.Dropout(0.2), layers.Dense(1)])
    optimizer = keras.optimizers.Adam(1e-2)

    def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    step_in_graph = tf.function(train)
    model.build((None, 8))  # what exists before the restore needs no waiting for
    optimizer.build(model.trainable_variables)
    state = {"model": model, "optimizer": optimizer, "data": batches, "rng": ckf.rng_state()}
    with ckptfmt.Manager(options.store, keep=2, save_when=options.every) as manager:
        start = manager.restore(state).step
        print(f"starts at step {start}")
        for step in range(start, options.steps):
            loss = step_in_graph(*next(batches))
            manager.save(state, step=step + 1, metrics={"loss": loss})

    weights = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
    print(f"weights after {options.steps} steps: {weights[:16]}")


if __name__ == "__main__":
    main()
