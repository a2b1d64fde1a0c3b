"""Models and modules that make their variables late."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class Block(keras.Model):
    """Subclassed, without a build of its own: its layers are built by its first call."""

    def __init__(
        self, units: int = 4, bias: bool = True, more: bool = False, dtype: str = "float32"
    ) -> None:
        super().__init__(dtype=dtype)
        self.inner = keras.layers.Dense(units, activation="relu", dtype=dtype)
        self.head = keras.layers.Dense(2, use_bias=bias, dtype=dtype)
        self.more = keras.layers.Dense(2, dtype=dtype) if more else None

    def call(self, x: Any, training: bool = False) -> Any:
        made = self.head(self.inner(x))
        return made if self.more is None else made + self.more(made)


class Lazy(tf.Module):
    """Makes its variable at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.w: Any = None

    def __call__(self, x: Any) -> Any:
        if self.w is None:
            self.w = tf.Variable(tf.ones((3, 2)), name="w")
        return tf.matmul(x, self.w)


def train_step(net: Any, optimizer: Any, x: Any, y: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(x) - y) ** 2)
    gradients = tape.gradient(loss, net.trainable_variables)
    optimizer.apply(gradients, net.trainable_variables)
