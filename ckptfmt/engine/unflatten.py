"""Named leaves back to the tree they were: the reverse of `flatten`.

It believes nothing: names that make no tree are refused, and no class is imported by name.
Spec: 03-names §3.3.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NoReturn

from ckptfmt.engine.registered import BY_NAME
from ckptfmt.errors import CheckpointError, CorruptError, warn
from ckptfmt.format import factory_of, namedtuple_class, parse_key, parse_value, split_name

CURE = 'restore another step or run "ckptfmt verify"'

Containers = Mapping[str, tuple[str, bytes]]


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
"""In place of a leaf that was not selected: it says that something stands there."""


def _corrupt(what: str, where: str, reason: str = "structure") -> NoReturn:
    raise CorruptError(what, reason=reason, where=ascii(where)[1:201].rstrip("'"), do=CURE)


class _Node:
    """An inner node: its children by part, in order."""

    __slots__ = (
        "argument", "children", "complete", "kind", "maker", "parent", "part", "whole",
    )  # fmt: skip

    def __init__(self, parent: _Node | None, part: str) -> None:
        self.parent = parent
        self.part = part
        self.children: dict[str, Any] = {}
        self.kind = "dict"
        self.argument: Any = None
        self.whole = True
        """All children are there."""
        self.complete = True
        """All leaves below are there."""
        self.maker: Callable[[Any], Any] | None = None

    def name(self) -> str:
        parts = []
        node: _Node | None = self
        while node is not None and node.parent is not None:
            parts.append(node.part)
            node = node.parent
        return "/".join(reversed(parts))


def unflatten(
    names: Sequence[str],
    leaves: Sequence[object],
    containers: Containers,
    *,
    partial: bool = False,
    makers: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
    registered: bool = True,
) -> Any:
    """Build the tree of some leaves.

    Args:
        names: Of the leaves, in order.
        leaves: Array, value or whatever stands for one; `ABSENT` for what was not selected.
        containers: Name -> (kind, packed argument).
        partial: Leaves were left out of `names`: containers without leaves are passed over, and
            gaps in a list are no damage. A list with gaps becomes {position: item}.
        makers: Container name -> what makes one object of it, where all its leaves are there.
        registered: False: registered types stay their plain data, so that nobody's code runs.
    Raises:
        CorruptError: No tree has these names.
    Spec: 03-names §3.1 to §3.4.
    """
    if len(names) == 1 and names[0] == "":
        if containers and not partial:
            _corrupt("a container has no leaf below it", next(iter(containers)))
        return leaves[0]
    root, nodes = _grow(names, leaves)
    _place_containers(root, containers, partial)
    for name, maker in makers.items():
        node = _node_at(root, name)
        if node is not None:
            node.maker = maker
    if not names and not partial:
        _corrupt("a tree without a leaf", "")
    for node in reversed(nodes):
        made = _build(node, partial, registered)
        node.complete = node.complete and node.whole
        if node.parent is not None and not node.complete:
            node.parent.complete = False
        if node.maker is not None and node.complete:
            made = node.maker(made)
        if node.parent is None:
            return {} if made is ABSENT else made
        node.parent.children[node.part] = made
    return _corrupt("a tree without a root", "")


def _grow(names: Sequence[str], leaves: Sequence[object]) -> tuple[_Node, list[_Node]]:
    """The root, and all inner nodes, parents before children."""
    root = _Node(None, "")
    nodes = [root]
    head, at = "", root
    for name, leaf in zip(names, leaves, strict=True):
        above, slash, part = name.rpartition("/")
        if above != head or not part or (slash and not above):
            at = root
            for step in split_name(name)[:-1]:
                below = at.children.get(step)
                if below is None:
                    below = at.children[step] = _Node(at, step)
                    nodes.append(below)
                elif type(below) is not _Node:
                    _corrupt("a leaf stands above another leaf", name)
                at = below
            head = above
        if part in at.children or not part:
            _corrupt("a leaf stands above another leaf, or twice", name)
        at.children[part] = leaf
    return root, nodes


def _place_containers(root: _Node, containers: Containers, partial: bool) -> None:
    for name, (kind, argument) in containers.items():
        node = _node_at(root, name)
        if node is not None and node.children:
            node.kind = kind
            node.argument = parse_value(argument, where=name)
        elif not partial:
            _corrupt("a container has no leaf below it", name)


def _node_at(root: _Node, name: str) -> _Node | None:
    node: Any = root
    for step in split_name(name):
        node = node.children.get(step) if type(node) is _Node else None
    return node if type(node) is _Node else None


def _build(node: _Node, partial: bool, registered: bool) -> Any:
    """The container of a node whose inner nodes have been built."""
    name = node.name() if node.kind == "type" else ""
    kept = {part: item for part, item in node.children.items() if item is not ABSENT}
    node.whole = len(kept) == len(node.children)
    if not kept and not node.whole:
        return ABSENT
    kind, argument = node.kind, node.argument
    if kind != "type":
        return _make(node, kept, kind, argument, partial)
    if type(argument) is not list or len(argument) != 3 or type(argument[0]) is not str:
        _corrupt("the argument of a container is wrong", name, "value")
    made = _make(node, kept, argument[1], argument[2], partial)
    return _unpack(argument[0], made, name) if node.whole and registered else made


def _make(node: _Node, kept: dict[str, Any], kind: object, argument: Any, partial: bool) -> Any:
    if kind in ("list", "tuple", "namedtuple"):
        return _make_sequence(node, kept, str(kind), argument, partial)
    keyed = {parse_key(part): item for part, item in kept.items()}
    if len(keyed) != len(kept):
        _corrupt("two keys of a dict are equal", node.name())
    if kind == "defaultdict":
        try:
            return collections.defaultdict(factory_of(argument), keyed)
        except CorruptError as error:
            _corrupt(error.what, node.name(), "value")
    if argument is not None:
        _corrupt("the argument of a container is wrong", node.name(), "value")
    if kind == "dict":
        return keyed
    if kind == "odict":
        return collections.OrderedDict(keyed)
    _corrupt("the kind of a container is unknown", node.name(), "column-range")


def _make_sequence(
    node: _Node, kept: dict[str, Any], kind: str, argument: Any, partial: bool
) -> Any:
    parts = list(node.children)
    if parts != list(map(str, range(len(parts)))) and not (partial and _ascend(parts)):
        _corrupt("positions of a list are not 0, 1, 2, ...", node.name())
    fields: list[str] = []
    if kind != "namedtuple":
        if argument is not None:
            _corrupt("the argument of a container is wrong", node.name(), "value")
    else:
        fields = _fields(argument, node)
        over = len(fields) - len(parts)
        if over < 0 or (over > 0 and not partial):
            _corrupt("a namedtuple has other fields than items", node.name())
    items = list(kept.values())
    gaps = list(kept) != list(map(str, range(len(kept))))
    if gaps or not node.whole or (fields and len(fields) != len(kept)):
        return {int(part): item for part, item in kept.items()}
    if kind == "namedtuple":
        return namedtuple_class(argument[0], tuple(fields))(*items)
    return items if kind == "list" else tuple(items)


def _ascend(parts: list[str]) -> bool:
    if not all(part.isascii() and part.isdecimal() and len(part) < 20 for part in parts):
        return False
    numbers = list(map(int, parts))
    ascending = all(a < b for a, b in pairwise(numbers))
    return ascending and list(map(str, numbers)) == parts


def _fields(argument: Any, node: _Node) -> list[str]:
    if type(argument) is list and len(argument) == 2 and type(argument[1]) is list:
        name, fields = argument
        if type(name) is str and all(type(item) is str for item in fields):
            try:
                namedtuple_class(name, tuple(fields))
            except CorruptError as error:
                _corrupt(error.what, node.name(), "value")
            return list(fields)
    _corrupt("the argument of a container is wrong", node.name(), "value")


def _unpack(type_name: str, made: Any, name: str) -> Any:
    entry = BY_NAME.get(type_name)
    if entry is None:
        warn(
            f"{name or 'the tree'} is of the registered type {type_name!r}, which this process "
            "does not know: you get its plain data; call register_type first",
        )
        return made
    try:
        return entry.unpack(made)
    except CheckpointError:
        raise
    except Exception as error:
        raise CorruptError(
            f"unpack of the registered type {type_name!r} refuses its stored data",
            reason="value",
            where=name,
            found=f"{type(error).__name__}: {error}"[:200],
            do=CURE,
        ) from error
