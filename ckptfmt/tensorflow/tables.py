"""Mutable lookup tables of `tf.lookup`: their keys and values, as two tensors.

The keys are sorted, and what TensorFlow exports of a dense table beside its entries (empty and
deleted places) is left out, so that equal tables have equal bytes, however they grew. Constant
tables are built by code and have no state.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from ckptfmt.engine import ORDER_TENSOR, Captured, Comparison, Staged
from ckptfmt.errors import MismatchError
from ckptfmt.format import join_name
from ckptfmt.tensorflow.tensors import dtype_name, host_array, make_tensor
from ckptfmt.tensorflow.whole import identity, part_source, takes_part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Entries: TypeAlias = tuple[NDArray[Any], NDArray[Any]]

_DENSE = tf.lookup.experimental.DenseHashTable


class _Tables:
    def holds(self, obj: object) -> bool:
        return isinstance(obj, (tf.lookup.experimental.MutableHashTable, _DENSE))

    def capture(self, obj: Any, name: str) -> Captured:
        keys, values = _entries(obj)
        order = _order(keys)
        parts = {"keys": keys[order], "values": values[order]}
        return Captured(
            {key: part_source(np.ascontiguousarray(part), obj, key) for key, part in parts.items()}
        )

    def target(self, obj: Any, name: str) -> TableTarget:
        return TableTarget(obj, name)


TABLES = _Tables()


def _key_shape(table: Any) -> tuple[int, ...]:
    return np.shape(table._empty_key) if isinstance(table, _DENSE) else ()


def _entries(table: Any) -> Entries:
    """Keys (n, *key shape) and values (n, *value shape), in no order."""
    keys, values = map(host_array, table.export())
    if isinstance(table, _DENSE):
        unused = np.zeros(len(keys), bool)
        for mark in (table._empty_key, table._deleted_key):
            marked = host_array(tf.convert_to_tensor(mark, table.key_dtype)).reshape(-1)
            unused |= (keys == marked).all(axis=1)
        keys, values = keys[~unused], values[~unused]
    rows = len(keys)
    return (
        keys.reshape(rows, *_key_shape(table)),
        values.reshape(rows, *tf.TensorShape(table._value_shape)),
    )


def _order(keys: NDArray[Any]) -> NDArray[Any]:
    if keys.ndim == 1:
        return np.argsort(keys, kind="stable")
    columns = keys.reshape(len(keys), -1)
    if keys.dtype == object:
        rows = [tuple(row) for row in columns.tolist()]
        return np.array(sorted(range(len(rows)), key=rows.__getitem__), np.int64)
    return np.lexsort(columns.T[::-1])


class TableTarget:
    """A table, whose content is replaced whole; the table itself stays."""

    order = ORDER_TENSOR

    def __init__(self, table: Any, name: str) -> None:
        self.name = name
        self.identities: dict[str, Hashable | None] = {}
        self._table = table
        self._keys, self._values = join_name(name, "keys"), join_name(name, "values")
        self._old: Entries | None = None

    def compare(self, comparison: Comparison) -> None:
        table = self._table
        if not takes_part(comparison, self.name, [self._keys, self._values]):
            return
        keys = comparison.stored(self.name).get(self._keys)
        count = keys.shape[0] if keys is not None and keys.shape else 0
        dtype = dtype_name(table.key_dtype, self._keys)
        comparison.tensor(self._keys, dtype, (count, *_key_shape(table)))
        dtype = dtype_name(table.value_dtype, self._values)
        comparison.tensor(self._values, dtype, (count, *tf.TensorShape(table._value_shape)))
        self.identities = {
            self._keys: identity(table, "keys"),
            self._values: identity(table, "values"),
        }

    def bind(self, staged: Staged) -> None:
        if self._keys in staged and self._values in staged:
            with tf.init_scope():
                old = _entries(self._table)
                self._old = old if staged.undoable else None
                try:
                    self._replace(old[0], staged[self._keys], staged[self._values])
                except tf.errors.OpError as error:
                    raise MismatchError(
                        "a table did not take the stored entries",
                        reason="table",
                        where=self.name,
                        found=str(error.message)[:200],
                        do="give it other empty and deleted keys, or restore another checkpoint",
                    ) from error

    def _replace(self, old_keys: Any, keys: Any, values: Any) -> None:
        if len(old_keys):
            self._table.remove(make_tensor(old_keys, self._keys))
        if len(keys):
            self._table.insert(make_tensor(keys, self._keys), make_tensor(values, self._values))

    def undo(self) -> None:
        if self._old is not None:
            with tf.init_scope():
                self._replace(_entries(self._table)[0], *self._old)
            self._old = None
