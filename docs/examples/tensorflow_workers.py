"""A Keras model trained by several workers, each of which may die at any moment.

    TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}' \\
        python tensorflow_workers.py --store /shared/runs/workers --steps 40

Keras's `fit` serves one process: between workers the loop is one's own. All workers run this script,
see the same store, and call the manager alike; one checkpoint holds the model once, and of each worker
its own place in the data.
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

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow's
    worker = strategy.cluster_resolver.task_id or 0
    keras.utils.set_random_seed(11)  # all begin with equal weights
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(1)])
        optimizer = keras.optimizers.Adam(1e-2)
        optimizer.build(model.trainable_variables)

    x = tf.random.stateless_normal((96, 8), seed=(1, worker))
    y = tf.reduce_sum(x, axis=1, keepdims=True)
    batch = 16
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=5).repeat().batch(batch)
    batches = iter(rows)

    def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            errors = tf.square(model(x, training=True) - y)
            loss = tf.reduce_sum(errors) / (batch * strategy.num_replicas_in_sync)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)  # the sum over all workers
        return loss

    def step_of_all(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(train, args=(x, y)), axis=None)

    step_in_graph = tf.function(step_of_all)
    state = {"model": model, "optimizer": optimizer, "data": ckf.per_rank(batches)}
    with ckptfmt.Manager(options.store, keep=2, save_when=options.every, group=strategy) as manager:
        start = manager.restore(state).step
        print(f"starts at step {start}", flush=True)
        for step in range(start, options.steps):
            loss = step_in_graph(*next(batches))
            manager.save(state, step=step + 1, metrics={"loss": loss})

    weights = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
    print(f"weights after {options.steps} steps: {weights[:16]}")


if __name__ == "__main__":
    main()
