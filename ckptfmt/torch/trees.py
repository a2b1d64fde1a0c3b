"""State of an object as a tree: torch tensors on our side, NumPy arrays on the engine's.

An object that gave torch tensors at save gets torch tensors at restore. NumPy arrays that it had
are marked at save (`torch.numpy`), so that it gets those too.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckptfmt.engine import StoredLeaf
from ckptfmt.format import escape_key, join_name
from ckptfmt.torch.dtypes import holds
from ckptfmt.torch.tensors import from_array

NUMPY = "torch.numpy"
BYTES_IO = "torch.bytes_io"


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)


def map_tree(tree: Any, name: str, leaf: Callable[[Any, str], Any]) -> Any:
    """The same tree with `leaf(value, name)` for everything that is no dict, list or tuple.

    Containers that hold nothing new are returned as they are, kinds and all.
    """
    if isinstance(tree, dict):
        items = {
            key: map_tree(v, join_name(name, escape_key(key)), leaf) for key, v in tree.items()
        }
        return _rebuilt(tree, items)
    if type(tree) in (list, tuple) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        parts = [map_tree(v, join_name(name, str(i)), leaf) for i, v in enumerate(tree)]
        if all(new is old for new, old in zip(parts, tree, strict=True)):
            return tree
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        return type(tree)(parts)
    return leaf(tree, name)


def _rebuilt(tree: Any, items: dict[Any, Any]) -> Any:
    if all(items[key] is value for key, value in tree.items()):
        return tree
    rebuilt = tree.copy()  # keeps the kind: OrderedDict, defaultdict, Counter
    rebuilt.update(items)
    return rebuilt


def mark(tree: Any, attributes: dict[str, dict[str, object]], name: str = "") -> Any:
    """The tree as the engine takes it, and the marks that bring it back."""

    def leaf(value: Any, at: str) -> Any:
        if isinstance(value, np.ndarray):
            attributes.setdefault(at, {})[NUMPY] = True
        elif type(value) is io.BytesIO:
            attributes.setdefault(at, {})[BYTES_IO] = True
            return value.getvalue()
        return value

    return map_tree(tree, name, leaf)


def to_torch(tree: Any, name: str, stored: Mapping[str, StoredLeaf]) -> Any:
    """A staged tree with torch tensors where the object had them; tied arrays are one tensor."""
    made: dict[int, Any] = {}

    def leaf(value: Any, at: str) -> Any:
        row = stored.get(at)
        attributes = row.attributes if row is not None else {}
        if attributes.get(BYTES_IO) and isinstance(value, bytes):
            return io.BytesIO(value)
        if not isinstance(value, np.ndarray) or attributes.get(NUMPY) or not holds(value.dtype):
            return value
        if id(value) not in made:
            made[id(value)] = from_array(value, attributes, at)
        return made[id(value)]

    return map_tree(tree, name, leaf)
