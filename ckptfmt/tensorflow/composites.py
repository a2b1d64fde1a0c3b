"""Tensors that are made of tensors: ragged and sparse ones, and indexed slices.

One is stored as a dict of its parts, which every reader can open, under the container attribute
`tf.tensor`. They are immutable: a restore puts a new one in the place of the old. Spec: 07-index §7.4.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ckptfmt.engine import ORDER_TENSOR, Captured, Comparison, Staged
from ckptfmt.errors import CorruptError, warn
from ckptfmt.format import join_name
from ckptfmt.tensorflow.tensors import source_of, tensor_of
from ckptfmt.tensorflow.whole import takes_part

COMPOSITE = "tf.tensor"
_CLASSES: Mapping[str, type] = {
    "ragged": tf.RaggedTensor,
    "sparse": tf.SparseTensor,
    "indexed_slices": tf.IndexedSlices,
}


def kind_of(obj: object) -> str:
    """The kind of a tensor that is stored in parts; "" for all others."""
    return next((kind for kind, cls in _CLASSES.items() if isinstance(obj, cls)), "")


def split(obj: Any) -> dict[str, Any]:
    """Its parts: tensors, and the shape as a plain list."""
    kind = kind_of(obj)
    if kind == "ragged":
        splits = {f"row_splits_{i}": part for i, part in enumerate(obj.nested_row_splits)}
        return {"values": tf.convert_to_tensor(obj.flat_values), **splits}
    parts = {"indices": obj.indices, "values": obj.values}
    if obj.dense_shape is not None:
        parts["dense_shape"] = [int(n) for n in obj.dense_shape]
    return parts


def capture(obj: Any, name: str) -> Captured:
    """A composite at save.

    Raises:
        UsageError: It is symbolic, and has no values.
    """
    for part, item in split(obj).items():
        if part != "dense_shape":
            source_of(item, join_name(name, part))
    return Captured(split(obj), {"": {COMPOSITE: {"kind": kind_of(obj)}}})


def compose(attributes: Mapping[str, object], name: str) -> Callable[[Any], Any] | None:
    """How to put a stored composite together from the dict of its parts, tensors and a list."""
    facts = attributes.get(COMPOSITE)
    kind = facts.get("kind") if isinstance(facts, Mapping) else None
    if COMPOSITE not in attributes:
        return None
    if kind not in _CLASSES:
        warn(f"{name or 'the tree'} is a tensor of a kind that this version does not know: {facts}")
        return None
    return lambda items: join(str(kind), items, name)


def join(kind: str, items: Any, name: str) -> Any:
    """A composite of its parts.

    Raises:
        CorruptError: The parts make no such tensor.
    """
    try:
        found = _trouble(kind, items)
        if not found:
            return _join(kind, items)
    except (KeyError, TypeError, ValueError, tf.errors.OpError) as error:
        found = f"{type(error).__name__}: {error}"[:300]
    raise CorruptError(
        f"the stored parts make no {kind} tensor",
        reason="value",
        where=name or "the tree",
        found=found,
        do='load it with ckptfmt.load, which returns the parts, or run "ckptfmt verify"',
    )


def _trouble(kind: str, items: Any) -> str:
    """What TensorFlow would not notice: it checks row splits, and no indices."""
    if kind == "ragged":
        return ""
    indices, count = items["indices"].numpy(), len(items["values"])
    rows = indices if indices.ndim == 2 else indices[:, None]
    if len(rows) != count:
        return f"{len(rows)} indices of {count} values"
    if items.get("dense_shape") is None:
        return ""
    bounds = np.array(items["dense_shape"])[: rows.shape[1]]
    return "" if ((rows >= 0) & (rows < bounds)).all() else f"indices outside of {bounds.tolist()}"


def _join(kind: str, items: Any) -> Any:
    values = items["values"]
    if kind == "ragged":
        rank = sum(key.startswith("row_splits_") for key in items)
        splits = [items[f"row_splits_{axis}"] for axis in range(rank)]
        return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=True)
    indices, shape = items["indices"], items.get("dense_shape")
    if kind == "sparse":
        return tf.SparseTensor(indices, values, shape)
    return tf.IndexedSlices(
        values, indices, None if shape is None else tf.constant(shape, indices.dtype)
    )


class CompositeTarget:
    """Compared part by part; how many values there are is free. `make` gives the new one."""

    order = ORDER_TENSOR

    def __init__(self, obj: Any, name: str) -> None:
        self.name = name
        self.identities: dict[str, Hashable] = {}
        self._kind, self._parts = kind_of(obj), split(obj)

    @property
    def parts(self) -> list[str]:
        return list(self._parts)

    def compare(self, comparison: Comparison) -> None:
        facts = comparison.attributes(self.name).get(COMPOSITE)
        found = facts.get("kind") if isinstance(facts, Mapping) else None
        stored = comparison.stored(self.name)
        if found != self._kind and stored:
            comparison.take(self.name)
            comparison.mismatch(
                self.name, f"a {self._kind} tensor", f"a {found} tensor" if found else "none"
            )
            return
        names = {part: join_name(self.name, part) for part in self._parts}
        if not takes_part(comparison, self.name, list(names.values())):
            return
        for part, item in self._parts.items():
            at = names[part]
            leaf = stored.get(at)
            if isinstance(item, list):
                if comparison.value(at) and leaf is not None and leaf.value != item:
                    comparison.mismatch(self.name, str(item), str(leaf.value), what="shape")
            else:
                one = source_of(item, at)
                free = part != "row_splits_0" and leaf is not None and len(leaf.shape) > 0
                first = leaf.shape[:1] if free and leaf is not None else one.shape[:1]
                comparison.tensor(at, one.dtype, (*first, *one.shape[1:]))

    def make(self, staged: Staged) -> Any:
        items: dict[str, Any] = {}
        for part, item in self._parts.items():
            at = join_name(self.name, part)
            value = staged[at]
            items[part] = value if isinstance(item, list) else tensor_of(item.dtype, value, at)
        return join(self._kind, items, self.name)
