"""What the adapter knows about an object as a whole: its survey, and that nothing is missing in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ckptfmt.errors import UsageError
from ckptfmt.format import join_name
from ckptfmt.tensorflow.distributed import shards_of
from ckptfmt.tensorflow.keras_objects import given_name, keras_children, trust_full_name
from ckptfmt.tensorflow.survey import Edge, Survey, name_of, take_survey
from ckptfmt.tensorflow.tensors import identity_of
from ckptfmt.tensorflow.trackables import (
    is_container,
    is_keras,
    trackable_children,
    tracked_containers,
)


def children(obj: Any, where: str) -> list[Edge]:
    return keras_children(obj, where) if is_keras(obj) else trackable_children(obj, where)


def survey(obj: Any, where: str) -> Survey:
    """Variables and objects at and below a module, layer, model, metric or generator.

    Raises:
        UsageError: Something in it cannot be saved, or Keras or TensorFlow count other variables
            than the survey found.
    """
    if is_container(obj):
        raise UsageError(
            "a list or dict that a module has wrapped is not part of a tree",
            reason="wrapped",
            where=where,
            found=type(obj).__name__,
            do="put the module itself into the tree, or list(...) or dict(...) of this",
        )
    given = given_name(obj) if is_keras(obj) else ""
    made = take_survey(obj, where, children, trust_full_name, given)
    _check_complete(made, where)
    return made


def _check_complete(made: Survey, where: str) -> None:
    """Compare with what `.variables` says, for the outermost module or layer on each path."""
    found = {identity_of(part) for one in made.found for part in shards_of(one.variable)}
    done: list[str] = []
    for name, obj in made.nodes:
        if any(not above or name.startswith(above + "/") for above in done):
            continue
        if isinstance(obj, (keras.layers.Layer, keras.metrics.Metric, tf.Module)):
            done.append(name)
            lost = [one for one in _variables(obj) if identity_of(one) not in found]
            if lost:
                raise UsageError(
                    "an object has variables that no attribute leads to",
                    reason="untracked",
                    where="/".join(part for part in (where, name) if part),
                    expected=f"{len({identity_of(one) for one in _variables(obj)})} variables",
                    found=f"all but {_names(lost)}",
                    do="assign them to attributes, or to lists and dicts that are attributes",
                )


def _variables(obj: Any) -> list[Any]:
    try:
        return list(obj.variables)
    except ValueError:
        # TensorFlow cannot list the variables of a module with a dict whose keys do not sort.
        return []


def _names(variables: Sequence[Any]) -> str:
    names = [str(getattr(one, "path", one.name)) for one in variables[:5]]
    return ", ".join(names) + (f" and {len(variables) - 5} more" if len(variables) > 5 else "")


def late_method(obj: Any) -> str:
    """By which a metric makes variables at its first update; "" for all other objects."""
    found = isinstance(obj, keras.metrics.Metric)
    return next((name for name in ("_build", "build") if found and hasattr(obj, name)), "")


def cleared_by_reset(obj: Any) -> str | None:
    """Below which name of an object lies what its `reset_state` clears: all of a metric, the states
    of a recurrent layer. None for all other objects."""
    if isinstance(obj, keras.metrics.Metric):
        return ""
    return "states" if isinstance(obj, keras.layers.RNN) else None


def _has_more_to_make(obj: Any) -> bool:
    return bool(late_method(obj)) and not getattr(obj, "_built", getattr(obj, "built", True))


def empty_nodes(made: Survey) -> dict[str, Any]:
    """What may be given variables later, by name: layers and metrics that are not built; modules,
    metrics, and the lists and dicts of modules, without a variable so far."""
    holding = {
        "/".join(parts[:depth])
        for one in made.found
        for parts in [one.name.split("/")]
        for depth in range(len(parts) + 1)
    }
    empty: dict[str, Any] = {}
    for name, obj in made.nodes:
        if isinstance(obj, keras.layers.Layer):
            if not obj.built:
                empty[name] = obj
            continue
        # Some metrics make a part of their variables at once, and the others at their first update.
        if name not in holding or _has_more_to_make(obj):
            empty[name] = obj
        if not is_keras(obj):
            for keys, container in tracked_containers(obj):
                below = join_name(name, name_of(keys, name))
                if below not in holding:
                    empty[below] = container
    return empty
