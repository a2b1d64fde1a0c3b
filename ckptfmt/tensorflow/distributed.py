"""Variables of `tf.distribute`: what they are in memory, and how they are read and written.

Mirrored variables are read and assigned as plain ones: a value, once. A *synchronized on read*
variable has another value on each replica and is read as their sum or mean; a *sharded* one lies in
pieces along its first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

Sharded = tf.__internal__.distribute.ShardedVariable


def is_sharded(obj: object) -> bool:
    return isinstance(obj, Sharded)


def is_sync_on_read(obj: object) -> bool:
    return isinstance(obj, tf.distribute.DistributedValues) and (
        getattr(obj, "synchronization", None) == tf.VariableSynchronization.ON_READ
    )


def shards_of(variable: Any) -> list[Any]:
    """The variables that a variable is made of; itself where it is made of none."""
    return list(variable.variables) if is_sharded(variable) else [variable]


def replicas_of(variable: Any) -> list[Any]:
    """This worker's own variables of one that is synchronized on read, a variable each."""
    return list(variable.values)


def workers_of(variable: Any) -> int:
    """How many workers the replicas of a variable lie on."""
    strategy = variable.distribute_strategy
    return max(1, int(strategy.num_replicas_in_sync) // max(1, len(replicas_of(variable))))


def read_as_one(variable: Any) -> tf.Tensor:
    """The value that TensorFlow reads: of all workers together, if there are several.

    Without an aggregation TensorFlow reads nothing; then it is the first replica's.
    """
    if is_sharded(variable):
        return tf.convert_to_tensor(variable)
    if is_sync_on_read(variable) and variable.aggregation == tf.VariableAggregation.NONE:
        return tf.convert_to_tensor(replicas_of(variable)[0].read_value())
    return tf.convert_to_tensor(variable.read_value())


def assign_as_one(variable: Any, value: tf.Tensor) -> None:
    """Assign as TensorFlow restores: a sum is divided among the replicas."""
    if is_sync_on_read(variable) and variable.aggregation == tf.VariableAggregation.NONE:
        for replica in replicas_of(variable):
            replica.assign(value)
    else:
        variable.assign(value)


def keep_value(variable: Any) -> Callable[[], None]:
    """What puts the value of now back, bit for bit; no other worker takes part."""
    parts = replicas_of(variable) if is_sync_on_read(variable) else shards_of(variable)
    values = [tf.convert_to_tensor(part.read_value()) for part in parts]

    def put_back() -> None:
        for part, value in zip(parts, values):
            part.assign(value)

    return put_back
