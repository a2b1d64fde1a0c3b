"""Variables of `tf.distribute`: what they are in memory, and how they are read and written.

Mirrored variables are read and assigned as plain ones: a value, once. A *synchronized on read*
variable has another value on each replica and is read as their sum or mean; a *sharded* one lies in
pieces along its first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

# Of a variable that is trained: no more of it is compared between replicas at each save.
_LOOKED_AT_NBYTES = 1 << 20

Sharded = tf.__internal__.distribute.ShardedVariable


def is_sharded(obj: object) -> bool:
    return isinstance(obj, Sharded)


def is_sync_on_read(obj: object) -> bool:
    return isinstance(obj, tf.distribute.DistributedValues) and (
        getattr(obj, "synchronization", None) == tf.VariableSynchronization.ON_READ
    )


def has_replicas(obj: object) -> bool:
    """True for a variable of which every replica holds one of its own."""
    return isinstance(obj, tf.distribute.DistributedValues) and hasattr(obj, "values")


def differs_by_replica(variable: Any, *, together: bool) -> bool:
    """Whether the replicas' own values are state beside the one that TensorFlow reads.

    What is mirrored without an aggregation is assigned on each replica by itself, and TensorFlow reads
    the first's: so the moving averages of BatchNormalization grow apart. Large variables that are
    trained are not looked at: optimizers assign equal values everywhere.

    Args:
        together: All workers are in one call. What the others have cannot be seen, so theirs may
            differ.
    """
    if is_sync_on_read(variable):
        return True
    if not has_replicas(variable) or variable.aggregation != tf.VariableAggregation.NONE:
        return False
    if variable.trainable and _nbytes(variable) > _LOOKED_AT_NBYTES:
        return False
    if workers_of(variable) > 1:
        return together and not variable.trainable
    return _grown_apart(replicas_of(variable))


def _nbytes(variable: Any) -> int:
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size or 1)


def _grown_apart(replicas: list[Any]) -> bool:
    first, *others = (_bits(one.read_value()) for one in replicas)
    return any(not np.array_equal(first, other) for other in others)


def _bits(value: tf.Tensor) -> Any:
    """The bytes of a tensor: a NaN is equal to itself, and zeros of two signs are two."""
    array = np.ascontiguousarray(value.numpy())
    return array if value.dtype == tf.string else array.reshape(-1).view(np.uint8)


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
    if differs_by_replica(variable, together=False):
        return keep_replicas(variable)
    return _kept(shards_of(variable))


def keep_replicas(variable: Any) -> Callable[[], None]:
    """The same of every replica here, where they are about to be given values of their own."""
    return _kept(replicas_of(variable))


def _kept(parts: list[Any]) -> Callable[[], None]:
    values = [tf.convert_to_tensor(part.read_value()) for part in parts]

    def put_back() -> None:
        for part, value in zip(parts, values):
            part.assign(value)

    return put_back
