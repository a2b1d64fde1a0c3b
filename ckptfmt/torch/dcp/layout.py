"""A tree as torch's planners see it: which parts are one item, and what each is called.

An item is called by its path, the keys joined by dots (the *fqn*). Mappings are gone through, and so
are lists with a tensor or a mapping in them; a tuple, or any other list, is one item as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptfmt.errors import UsageError
from ckptfmt.format import escape_key, join_name

Path = tuple[str | int, ...]
"""Keys as torch writes them: dict keys as text, positions of a list as int."""

TREE_DEPTH_MAX = 512


@dataclass(frozen=True, slots=True)
class Item:
    """One item.

    Attributes:
        fqn, path: As torch's planners have them.
        name: As a leaf of ours: keys that are no text keep their kind.
        held: The tensor, or the object.
    """

    fqn: str
    path: Path
    name: str
    held: Any


def is_torch_tensor(obj: object) -> bool:
    return isinstance(obj, torch.Tensor)


def items_of(
    tree: Mapping[Any, Any], is_tensor: Callable[[object], bool] = is_torch_tensor
) -> Iterator[Item]:
    """The items of a tree, in order."""
    for key, value in tree.items():
        yield from _walk(value, (str(key),), escape_key(key), is_tensor)


def _walk(value: Any, path: Path, name: str, is_tensor: Callable[[object], bool]) -> Iterator[Item]:
    if len(path) > TREE_DEPTH_MAX:
        raise UsageError(
            "the tree is too deep, or contains itself",
            reason="tree-depth",
            where=name[:200],
            expected=f"at most {TREE_DEPTH_MAX} levels",
            do="flatten it",
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            part = escape_key(key)
            yield from _walk(item, (*path, str(key)), join_name(name, part), is_tensor)
    elif is_inner_list(value, is_tensor):
        for position, item in enumerate(value):
            yield from _walk(item, (*path, position), join_name(name, str(position)), is_tensor)
    else:
        yield Item(".".join(map(str, path)), path, name, value)


def is_inner_list(value: object, is_tensor: Callable[[object], bool]) -> bool:
    """A list that is gone through: it holds a tensor, a mapping, or such a list."""
    return isinstance(value, list) and any(
        isinstance(item, Mapping) or is_tensor(item) or is_inner_list(item, is_tensor)
        for item in value
    )


def set_at(root: Any, path: Path, value: object) -> None:
    """Put a value where a path leads in a tree of dicts and lists that has it already.

    A key that is no text is found by its text: torch would add another one beside it.
    """
    node = root
    for part in path[:-1]:
        node = node[_key(node, part)]
    node[_key(node, path[-1])] = value


def _key(node: Any, part: str | int) -> Any:
    if isinstance(part, int) or part in node:
        return part
    return next((key for key in node if str(key) == part), part)
