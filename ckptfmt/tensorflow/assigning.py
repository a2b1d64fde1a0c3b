"""Values into variables, and back out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ckptfmt.engine import Staged, StoredLeaf
from ckptfmt.tensorflow.distributed import assign_as_one, keep_value
from ckptfmt.tensorflow.tensors import QUANTIZED, adopt, copy_of, raw_variable, tensor_of


class Assigned:
    """Variables assigned so far, with their old values."""

    def __init__(self) -> None:
        self._old: list[Callable[[], None]] = []

    def assign(self, variable: Any, array: Any, name: str, *, keep: bool = True) -> None:
        raw = raw_variable(variable, name)
        # Restoring may be called while Keras or TensorFlow trace: the values must not end up there.
        with tf.init_scope():
            # Where memory is bounded, TensorFlow's own takes the values, which it used before: what
            # is adopted comes on top until the old is given back to the system.
            if raw.dtype.base_dtype.name in QUANTIZED:
                value = tensor_of(raw.dtype, array, name)
            else:
                value = adopt(array, name) if keep else copy_of(array, name)
            if keep:
                self._old.append(keep_value(raw))
            assign_as_one(raw, value)

    def undo(self) -> None:
        with tf.init_scope():
            while self._old:
                self._old.pop()()


def held_values(
    staged: Staged, names: Sequence[str], stored: Mapping[str, StoredLeaf]
) -> dict[str, Any]:
    """Values for later, in memory that nobody else is given."""
    return {
        name: staged.own(name) if stored[name].dtype else staged[name]
        for name in names
        if name in staged
    }
