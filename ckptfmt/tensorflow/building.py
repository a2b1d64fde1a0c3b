"""Keras layers built before a restore, as the saved ones were.

A save records the build config of every layer that is built, as the attribute `keras.build` of the
object's container. `build=True` gives each layer that is not built its own back, innermost first: a
layer that leaves the building to its first call has nothing to build but its sublayers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from ckptfmt.engine import Comparison
from ckptfmt.errors import MismatchError, UsageError, warn
from ckptfmt.tensorflow.matching import absolute
from ckptfmt.tensorflow.objects import children
from ckptfmt.tensorflow.survey import Survey, take_survey

BUILD = "keras.build"


def build_configs(made: Survey) -> dict[str, object]:
    """Name -> build config of each layer that is built, where that is plain data."""
    configs: dict[str, object] = {}
    for name, obj in made.nodes:
        if isinstance(obj, keras.layers.Layer) and obj.built:
            try:
                config = _plain(obj.get_build_config())
            except Exception as error:  # the user's code, which may raise anything
                said = f"{type(error).__name__}: {error}"[:200]
                warn(
                    f"{name}: its build config is not recorded, so build=True cannot build it: {said}"
                )
                continue
            if config:
                configs[name] = config
    return configs


def _plain(value: Any) -> object:
    """A copy of plain data.

    Raises:
        UsageError: It is none.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tf.TensorShape):
        return tuple(value.as_list())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    raise UsageError(
        "a build config that is no plain data", reason="build", found=type(value).__name__
    )


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded for an object of the target's tree.

    Attributes:
        configs: Name of a layer within the object -> its build config.
        wanted: Whether a name takes part in the restore.
    """

    obj: Any
    name: str
    configs: Mapping[str, Any]
    wanted: Callable[[str], bool]

    def build(self) -> None:
        """Build the layers that are not built.

        Raises:
            MismatchError: A layer refuses its config.
        """
        tried: set[int] = set()
        while todo := self._unbuilt(tried):
            for name, layer in todo:
                tried.add(id(layer))
                if not layer.built:  # by another, whose part it is
                    self._build(name, layer)

    def _build(self, name: str, layer: Any) -> None:
        try:
            _build(layer, dict(self.configs[name]))
        except Exception as error:
            raise MismatchError(
                "a layer cannot be built from the config that was recorded at save",
                reason="build",
                where=absolute(self.name, name),
                found=f"{type(error).__name__}: {error}"[:300],
                do="build it first, or leave out build=: its values wait for it",
            ) from error

    def _unbuilt(self, tried: set[int]) -> list[tuple[str, Any]]:
        """Innermost first. Building one may have made others."""
        made = take_survey(self.obj, self.name, children, lambda *_: False)
        todo = [
            (name, obj)
            for name, obj in made.nodes
            if isinstance(obj, keras.layers.Layer)
            and not obj.built
            and id(obj) not in tried
            and name in self.configs
            and self.wanted(absolute(self.name, name))
        ]
        return sorted(todo, key=lambda one: -_depth(one[0]))


def _build(layer: Any, config: dict[str, Any]) -> None:
    shape = config.get("input_shape")
    if getattr(layer.build, "_is_default", False) and all(
        one.built for one in layer._flatten_layers(include_self=False)
    ):
        layer.build(shape)  # which says that it is built, and nothing else
    else:
        layer.build_from_config(config)


def _depth(name: str) -> int:
    return name.count("/") + 1 if name else 0


_RECORDED: ContextVar[list[Recorded] | None] = ContextVar("ckptfmt_recorded", default=None)


@contextmanager
def looking_up() -> Iterator[Sequence[Recorded]]:
    """What comparisons within find recorded."""
    found: list[Recorded] = []
    token = _RECORDED.set(found)
    try:
        yield found
    finally:
        _RECORDED.reset(token)


def note_recorded(obj: Any, name: str, comparison: Comparison) -> None:
    """Keep what was recorded for an object, if somebody looks it up."""
    found, configs = _RECORDED.get(), comparison.attributes(name).get(BUILD)
    if found is not None and isinstance(configs, Mapping):
        found.append(Recorded(obj, name, configs, comparison.wanted))
