"""From groups and numbers to `model/<layer>/<variable>`, and which variables are trained.

The names are those of `ckptfmt.tensorflow`, as far as the file and the configuration tell; what
cannot be known keeps what the file has. `tf.full_name` is the path by the layers' own names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.hdf5 import Group
from ckptfmt.foreign.keras.configuration import layers_of, numbered_classes, part_of, told
from ckptfmt.foreign.keras.variables import CHILDREN, is_trained, variable_names
from ckptfmt.foreign.keras_layers import counted, is_automatic, without_number

VARIABLES = "vars"
FULL_NAME = "tf.full_name"
_LISTS = ("layers", "_layer_checkpoint_dependencies")
Keys = tuple[str, ...]


@dataclass(slots=True)
class Trained:
    """A variable that an optimizer has state for."""

    keys: Keys
    shape: tuple[int, ...]


@dataclass(slots=True)
class Named:
    """All variables below a group.

    Attributes:
        tensors: Keys -> tensor, in the file's order.
        trained: In the model's order; None where that is not known.
    """

    tensors: dict[Keys, ForeignTensor] = field(default_factory=dict)
    trained: list[Trained] | None = field(default_factory=list)

    def put(self, keys: Keys, tensor: ForeignTensor, full_name: str) -> None:
        while keys in self.tensors:  # two layers of one chosen name
            keys = (*keys[:-2], f"{keys[-2]}_", keys[-1])
        attributes = {**tensor.attributes, FULL_NAME: full_name} if full_name else tensor.attributes
        self.tensors[keys] = replace(tensor, attributes=attributes)


def name_variables(root: Group, config: Any, skip: Sequence[str]) -> Named:
    """Names of all variables of a model.

    Args:
        root: The model's group.
        config: Its configuration, or None.
        skip: Groups that are not the model's: the optimizer.
    """
    made = Named()
    if config is None:
        made.trained = None
    _Walk(made).holder(root, (), "", config, skip=skip)
    return made


def own_name(group: Group) -> str:
    """The name that an object had, which newer files tell; "" where it is not there."""
    inner = group.groups.get(VARIABLES)
    found = inner.attributes.get("name") if inner is not None else None
    return found if isinstance(found, str) and "/" not in found else ""


def _holds_variables(group: Group) -> bool:
    return bool(group.tensors) or any(map(_holds_variables, group.groups.values()))


def numbered(tensors: dict[str, ForeignTensor]) -> list[tuple[str, ForeignTensor]]:
    """Variables in the order of their numbers."""
    return sorted(tensors.items(), key=lambda item: (len(item[0]), item[0]))


class _Walk:
    def __init__(self, named: Named) -> None:
        self._named = named

    def holder(
        self,
        group: Group,
        keys: Keys,
        full: str,
        config: Any,
        *,
        snake: str = "",
        skip: Sequence[str] = (),
    ) -> None:
        """An object with variables of its own, and parts."""
        found = told(config)
        if found is not None:
            snake = found.snake
        options = found.options if found is not None else None
        frozen = options is not None and options.get("trainable") is False
        self._variables(group, keys, full, snake, options, frozen=frozen)
        done = {VARIABLES, *skip}
        listed = layers_of(config)
        for name in _LISTS:
            if name in group.groups and self._is_list(group.groups[name]):
                self._layers(group.groups[name], keys, full, listed)
                done.add(name)
        parts = CHILDREN.get(snake, {})
        for name in (*parts, *(n for n in group.groups if n not in parts)):
            if name in group.groups and name not in done:
                self._part(name, group.groups[name], keys, full, config, snake=parts.get(name))

    def _is_list(self, group: Group) -> bool:
        return VARIABLES not in group.groups and not group.tensors

    def _variables(
        self, group: Group, keys: Keys, full: str, snake: str, options: Any, *, frozen: bool
    ) -> None:
        inner = group.groups.get(VARIABLES)
        rows = numbered(inner.tensors) if inner is not None else []
        names = variable_names(snake, [tensor.shape for _, tensor in rows], options)
        if rows and rows[0][1].dtype.startswith(("int", "uint")) and snake != "seed_generator":
            names = None  # quantized: other variables, in another order
        if names is None and rows:
            self._named.trained = None
        for at, (number, tensor) in enumerate(rows):
            name = names[at] if names is not None else number
            path = f"{full}/{name}" if full and names is not None else ""
            self._named.put((*keys, name), tensor, path)
            if self._named.trained is not None and is_trained(name) and not frozen:
                self._named.trained.append(Trained((*keys, name), tensor.shape))

    def _layers(self, group: Group, keys: Keys, full: str, listed: dict[str, Any] | None) -> None:
        """The layers of a model, which go by their names."""
        order = sorted(group.groups, key=lambda n: (without_number(n), len(n), n))
        if listed is not None and set(order) <= set(listed):
            order = [name for name in listed if name in group.groups]
        else:
            listed, self._named.trained = None, None
        configs = [listed[name] if listed is not None else None for name in order]
        names = []
        for name, config in zip(order, configs):
            found = told(config)
            names.append(own_name(group.groups[name]) or (found.name if found else "") or name)
        for name, config, given, key in zip(order, configs, names, counted(names)):
            path = f"{full}/{given}" if full else given
            snake = without_number(name)
            self.holder(group.groups[name], (*keys, key), path, config, snake=snake)

    def _part(
        self, name: str, group: Group, keys: Keys, full: str, config: Any, *, snake: str | None
    ) -> None:
        """What an object has under an attribute: another object, or a list of them."""
        inner = part_of(config, name)
        if snake is None and _holds_variables(group):
            self._named.trained = None  # when its variables were made is not known
        if (
            self._is_list(group)
            and group.groups
            and all(VARIABLES in child.groups for child in group.groups.values())
        ):
            self._list(name, group, keys, full, inner)
            return
        given = own_name(group)
        key = given if given and not is_automatic(given) and snake != "" else name
        hint = snake or (without_number(given) if is_automatic(given) else "")
        path = f"{full}/{given}" if full and given else ""
        self.holder(group, (*keys, key), path, inner, snake=hint)

    def _list(self, name: str, group: Group, keys: Keys, full: str, config: Any) -> None:
        """A list of objects: by position where the configuration has it, or where all are of one
        class, since the file numbers those."""
        order = sorted(group.groups, key=lambda n: (len(n), n))
        listed = numbered_classes(config)
        if listed is not None and set(order) == set(listed):
            order = list(listed)
        else:
            listed, self._named.trained = None, None
        is_ordered = listed is not None or len({without_number(n) for n in order}) == 1
        for at, child in enumerate(order):
            given = own_name(group.groups[child])
            chosen = bool(given) and not is_automatic(given)
            key: Keys = (given,) if chosen else (name, str(at) if is_ordered else child)
            path = f"{full}/{given}" if full and given else ""
            inner = listed[child] if listed is not None else None
            self.holder(
                group.groups[child], (*keys, *key), path, inner, snake=without_number(child)
            )
