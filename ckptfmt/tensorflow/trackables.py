"""Children of TensorFlow's own objects: modules, trackables, lists and dicts of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from ckptfmt.errors import UsageError
from ckptfmt.tensorflow.own_state import own_state
from ckptfmt.tensorflow.survey import Edge, Keys
from ckptfmt.tensorflow.tensors import is_optimizer, is_variable

Trackable = tf.__internal__.tracking.Trackable

# What a Trackable overrides when it has state that is not in variables below it.
_OWN_FORMAT = ("_serialize_to_tensors", "_gather_saveables_for_checkpoint")
_KERAS = (
    keras.layers.Layer,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)


def is_keras(obj: object) -> bool:
    return isinstance(obj, _KERAS)


def is_container(obj: object) -> bool:
    return isinstance(obj, (list, tuple, Mapping))


def has_own_format(obj: object) -> bool:
    """True for what TensorFlow serializes in a way of its own that is not known here."""
    if (
        not isinstance(obj, Trackable)
        or is_variable(obj)
        or is_keras(obj)
        or own_state(obj)
        or is_optimizer(obj)
    ):
        return False
    return any(
        getattr(type(obj), method, None) is not getattr(Trackable, method, None)
        for method in _OWN_FORMAT
    )


def is_stateful(obj: object) -> bool:
    """True for what can hold variables, and for what has state that is refused by name.

    Data sets, functions and constant tables are built by code and have no state: False.
    """
    if is_keras(obj) or is_optimizer(obj) or own_state(obj) is not None or has_own_format(obj):
        return True
    if isinstance(obj, (tf.data.Dataset, tf.types.experimental.GenericFunction)):
        return False
    return isinstance(obj, (tf.Module, tf.__internal__.tracking.AutoTrackable)) or (
        isinstance(obj, Trackable) and is_container(obj)
    )


def refuse_own_format(obj: object, where: str) -> None:
    if has_own_format(obj):
        raise UsageError(
            "an object whose state is not in variables cannot be saved yet",
            reason="stateful",
            where=where,
            found=type(obj).__name__,
            do="leave it out of the tree; for an input pipeline save the step and skip to it",
        )


def trackable_children(obj: Any, where: str) -> list[Edge]:
    """Edges of a tf.Module, a tf.train.Checkpoint, a generator, any other Trackable."""
    refuse_own_format(obj, where)
    if isinstance(obj, tf.random.Generator):
        return [Edge(("state",), obj.state)]
    edges: list[Edge] = []
    for name, child in tf.train.TrackableView.children(obj).items():
        edges.extend(expand((name,), child, where))
    return edges


def tracked_containers(obj: Any) -> Iterator[tuple[Keys, Any]]:
    """The lists and dicts that TensorFlow tracks for an object, at any depth of nesting."""
    if isinstance(obj, Trackable) and not isinstance(obj, tf.random.Generator):
        for name, child in tf.train.TrackableView.children(obj).items():
            yield from _containers((name,), child, ())


def _containers(keys: Keys, value: Any, above: tuple[int, ...]) -> Iterator[tuple[Keys, Any]]:
    if is_container(value) and isinstance(value, Trackable) and id(value) not in above:
        yield keys, value
        for key, item in _items(value):
            yield from _containers((*keys, key), item, (*above, id(value)))


def _items(container: Any) -> list[tuple[object, Any]]:
    if isinstance(container, Mapping):
        return list(container.items())
    if hasattr(container, "_fields"):
        return list(zip(container._fields, container))
    return [(str(position), item) for position, item in enumerate(container)]


def expand(keys: Keys, value: Any, where: str, above: tuple[int, ...] = ()) -> Iterator[Edge]:
    """Edges to the variables and objects in a value: itself, or the items of containers."""
    if is_container(value):
        if id(value) in above:
            return
        above = (*above, id(value))
        for key, item in _items(value):
            yield from expand((*keys, key), item, where, above)
    elif is_variable(value) or is_stateful(value):
        yield Edge(keys, value)
