"""The containers of a tree, with a slot where an item stands: what the coordinator fills again.

torch's planners tell where an item stands by a path of texts and positions. `TreeSavePlanner` gives
the containers themselves besides, so that nothing of the tree is lost.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from ckptfmt.errors import UsageError
from ckptfmt.format import escape_key, factory_name, join_name
from ckptfmt.torch.dcp.layout import TREE_DEPTH_MAX, Path, is_inner_list, is_torch_tensor

DROP = object()
"""What `filled` is told of a slot that holds nothing."""


class Slot(str):
    """Where an item stands: its fqn."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Positions:
    """A list of which not all items may be known: another rank may have the others."""

    items: dict[int, Any]


class Layout(dict[str, Path]):
    """torch's mapping from fqn to path, and the tree's containers."""

    def __init__(self, mapping: Mapping[str, Path], skeleton: Any) -> None:
        super().__init__(mapping)
        self.skeleton = skeleton

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (dict(self), self.skeleton)


def skeleton_of(tree: Mapping[Any, Any]) -> Any:
    """The containers of a tree; what torch takes for one item is a slot.

    Raises:
        UsageError: A mapping of a kind that would come back as a dict.
    """
    return _skeleton(tree, (), "")


def _skeleton(value: Any, path: Path, name: str) -> Any:
    if isinstance(value, Mapping):
        made = _empty_like(value, name)
        for key, item in value.items():
            made[key] = _skeleton(item, (*path, str(key)), join_name(name, escape_key(key)))
        return made
    if path and len(path) <= TREE_DEPTH_MAX and is_inner_list(value, is_torch_tensor):
        items = [
            _skeleton(item, (*path, position), join_name(name, str(position)))
            for position, item in enumerate(value)
        ]
        return Positions(dict(enumerate(items)))
    return Slot(".".join(map(str, path)))


def _empty_like(value: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    if isinstance(value, collections.defaultdict):
        try:
            factory_name(value.default_factory)
        except UsageError as error:
            error.where = name
            error.args = (error._message(),)
            raise
        return collections.defaultdict(value.default_factory)
    if type(value) is collections.OrderedDict:
        return collections.OrderedDict()
    if type(value) is dict or not isinstance(value, dict):
        return {}
    raise UsageError(
        "a subclass of dict would come back as a dict",
        reason="tree-object",
        where=name,
        found=type(value).__qualname__,
        do="save dict(x)",
    )


def skeleton_of_paths(paths: Mapping[str, Path]) -> Any:
    """What paths alone tell: text is the key of a dict, a number the position in a list."""
    root: dict[Any, Any] = {}
    known: dict[Path, dict[Any, Any]] = {}
    for fqn, path in paths.items():
        above = path[:-1]
        items = known.get(above)
        if items is None:
            items = known[above] = _items_at(root, path, fqn)
        if path[-1] in items:
            _refuse_path(fqn)
        items[path[-1]] = Slot(fqn)
    return root


def _items_at(root: dict[Any, Any], path: Path, fqn: str) -> dict[Any, Any]:
    """The items of the container that a path ends in; containers are made where there are none."""
    items = root
    for part, below in pairwise(path):
        found = items.get(part)
        if found is None:
            found = items[part] = Positions({}) if isinstance(below, int) else {}
        if isinstance(found, Slot) or isinstance(found, Positions) != isinstance(below, int):
            _refuse_path(fqn)
        items = found.items if isinstance(found, Positions) else found
    return items


def _refuse_path(fqn: str) -> NoReturn:
    raise UsageError(
        "a path leads through another item",
        reason="dcp-path",
        where=repr(fqn),
        do="give the planner paths that make a tree",
    )


def merge(mine: Any, other: Any) -> Any:
    """What two ranks know of one tree: in the order of the first, then what only the other has."""
    if isinstance(mine, Positions) and isinstance(other, Positions):
        for position, item in other.items.items():
            known = mine.items.get(position)
            mine.items[position] = item if known is None else merge(known, item)
        return mine
    if isinstance(mine, dict) and isinstance(other, dict):
        for key, item in other.items():
            mine[key] = merge(mine[key], item) if key in mine else item
        return mine
    if isinstance(mine, Slot) and mine == other:
        return mine
    raise UsageError(
        "ranks have different trees",
        reason="dcp-ranks",
        found=f"{_kind(mine)} on one rank, {_kind(other)} on another",
        do="give what is a rank's own a key of its own",
    )


def _kind(node: Any) -> str:
    return repr(str(node)) if isinstance(node, Slot) else type(node).__name__


def filled(node: Any, item_of: Callable[[str], Any], name: str = "") -> Any:
    """The tree, with an item in every slot. `DROP` for a slot leaves it out."""
    if isinstance(node, Slot):
        return item_of(node)
    if isinstance(node, Positions):
        made = {
            position: filled(item, item_of, join_name(name, str(position)))
            for position, item in sorted(node.items.items())
        }
        kept = [item for item in made.values() if item is not DROP]
        if list(made) != list(range(len(made))) or len(kept) not in (0, len(made)):
            raise UsageError(
                "positions of a list are missing on all ranks",
                reason="dcp-path",
                where=name,
                found=", ".join(str(p) for p, item in made.items() if item is not DROP)[:200],
                do="save lists whole, or use dicts",
            )
        return kept if kept or not made else DROP
    new = _empty_like(node, name)
    for key, item in node.items():
        if isinstance(item, Slot):
            value = item_of(item)
        else:
            value = filled(item, item_of, join_name(name, escape_key(key)))
        if value is not DROP:
            new[key] = value
    # A mapping that lost all its items was not empty before: nobody wrote any of them.
    return new if new or not node else DROP


def names_of(
    node: Any, name: str = "", above: tuple[Any, ...] = ()
) -> Iterator[tuple[str, str, Any]]:
    """(fqn, name, containers above) of every slot; containers are (name, node)."""
    if isinstance(node, Slot):
        yield str(node), name, above
        return
    items = node.items.items() if isinstance(node, Positions) else node.items()
    here = (*above, (name, node))
    is_list = isinstance(node, Positions)
    for key, item in items:
        below = join_name(name, str(key) if is_list else escape_key(key))
        if isinstance(item, Slot):
            yield str(item), below, here
        else:
            yield from names_of(item, below, here)
