"""A model's configuration, as `.keras` files have it: which layers, in which order, of what class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptfmt.foreign.keras.variables import Told

_LISTED = frozenset({"Functional", "Sequential", "Model"})


def snake_case(name: str) -> str:
    """A class's name as Keras spells it in files: `conv1d_transpose` of `Conv1DTranspose`."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def fields_of(node: Any) -> Mapping[str, Any]:
    """The options of an object, or nothing."""
    found = node.get("config") if isinstance(node, dict) else None
    return found if isinstance(found, dict) else {}


def told(node: Any) -> Told | None:
    """What a configuration says of an object."""
    if not isinstance(node, dict) or not isinstance(node.get("class_name"), str):
        return None
    options = fields_of(node)
    return Told(snake_case(node["class_name"]), str(options.get("name", "")), options)


def layers_of(node: Any) -> dict[str, Any] | None:
    """Name of its group in the file -> configuration, in the model's order; None of others."""
    if not isinstance(node, dict) or node.get("class_name") not in _LISTED:
        return None
    return numbered_classes(fields_of(node).get("layers"))


def numbered_classes(listed: Any) -> dict[str, Any] | None:
    """Name in the file -> configuration, of a list of objects: their classes, numbered."""
    if not isinstance(listed, list):
        return None
    counts: dict[str, int] = {}
    made: dict[str, Any] = {}
    for node in listed:
        found = told(node)
        if found is None:
            return None
        count = counts.get(found.snake, 0)
        counts[found.snake] = count + 1
        made[f"{found.snake}_{count}" if count else found.snake] = node
    return made


def part_of(node: Any, attribute: str) -> Any:
    """The configuration of a layer's part: of a wrapper's layer, of an RNN's cell."""
    options = fields_of(node)
    if attribute in ("forward_layer", "backward_layer"):
        found = options.get("backward_layer") if attribute == "backward_layer" else None
        return found or options.get("layer")
    return options.get(attribute)
