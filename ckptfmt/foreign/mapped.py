"""A foreign tree, or a checkpoint, as rules make it: other names, other layouts, still unread."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import UsageError, warn
from ckptfmt.foreign.base import (
    ForeignContainer,
    ForeignTensor,
    ForeignTree,
    ForeignValue,
    like,
    tree_of,
)
from ckptfmt.foreign.rules import Leaf, Leaves, Rule, apply_rules
from ckptfmt.reports import RuleReport

if TYPE_CHECKING:
    from ckptfmt.engine import FlatTree

_Containers = list[tuple[str, str, bytes]]


@dataclass(frozen=True, slots=True)
class Mapped:
    """What rules made of a tree.

    Attributes:
        tree: The tree; `renamed` and so on are as in a `ConvertReport`.
    """

    tree: ForeignTree
    renamed: Mapping[str, str]
    transformed: Mapping[str, str]
    dropped: Mapping[str, str]
    rules: Sequence[RuleReport]

    @property
    def notes(self) -> list[str]:
        return [note for rule in self.rules for note in rule.notes]


def map_tree(tree: ForeignTree, columns: Callable[[], FlatTree], rules: Sequence[Rule]) -> Mapped:
    """Apply rules to a tree.

    Args:
        columns: Gives the tree as columns. A tree that has no `root` yet gets one, also without
            rules.
    Raises:
        UsageError: A rule touches nothing or does not fit, or no tree has the names that they make.
    """
    # A flat tree of 50,000 names need not be made columns of for nothing.
    has_tree = tree.root is not None or tree.flat is not None or tree.keys
    flat = None if not rules and has_tree else columns()
    if flat is None or not (rules or flat.names):
        return Mapped(tree, _renamed(tree.tensors.values()), {}, {}, ())
    applied = apply_rules(rules, _leaves(tree, flat))
    leaves = applied.leaves
    containers, attributes = _moved_containers(flat, leaves)
    root = _nested(leaves, containers, attributes)
    made = tree_of(
        root,
        tree.format,
        metadata=tree.metadata,
        skipped={**tree.skipped, **applied.lost},
        ignored=tree.ignored,
        opaque=tree.opaque,
    )
    tensors = {name: _with_origin(t, _leaf_of(name, leaves)) for name, t in made.tensors.items()}
    return Mapped(
        replace(made, tensors=tensors, file=tree.file, step=tree.step, metrics=tree.metrics),
        _renamed(tensors.values())
        | {
            x.origin[0]: n
            for n, x in leaves.items()
            if x.tensor is None and x.origin[:1] not in ((), (n,))
        },
        {name: "; ".join(leaf.steps) for name, leaf in leaves.items() if leaf.steps},
        applied.dropped,
        applied.reports,
    )


def _leaf_of(name: str, leaves: Leaves) -> Leaf:
    """The leaf that a tensor of the new tree is. A list that lost an item is a dict of positions."""
    return leaves[name] if name in leaves else leaves[_POSITION.sub(r"\1", name)]


_POSITION = re.compile(r"(?<![^/])~3i(\d+)(?![^/])")


def _with_origin(tensor: ForeignTensor, leaf: Leaf) -> ForeignTensor:
    assert leaf.tensor is not None
    return like(tensor, foreign_name=leaf.tensor.foreign_name)


def _renamed(tensors: Any) -> dict[str, str]:
    """Foreign name -> name, where they differ; a tensor that became several has all of them."""
    made: dict[str, str] = {}
    for tensor in tensors:
        foreign = tensor.foreign_name
        if foreign and foreign != tensor.name:
            made[foreign] = f"{made[foreign]}, {tensor.name}" if foreign in made else tensor.name
    return made


def _leaves(tree: ForeignTree, flat: FlatTree) -> Leaves:
    """The table that rules work on. Values of frameworks stay as they are packed."""
    from ckptfmt.format import LEAF_TENSOR, LEAF_VALUE, parse_value

    made: Leaves = {}
    for name, kind, row in zip(flat.names, flat.kinds, flat.rows, strict=True):
        if kind == LEAF_TENSOR:
            made[name] = Leaf((name,), tree.tensors[name])
            continue
        data = flat.values[row] if kind == LEAF_VALUE else flat.tensors[row].fetch().tobytes()
        made[name] = Leaf((name,), None, parse_value(data, KEEP, where=name))
    return made


def _home(name: str, rest: Sequence[str], kind: str) -> str | None:
    """Where the container is whose leaf `rest` has this name now; None if it has lost it."""
    parts = name.split("/")
    kept = len(parts) - len(rest)
    # The items of a list are known by their positions, those of a dict may have other keys now.
    if kept < 0 or (kind not in ("dict", "odict", "defaultdict") and parts[kept:] != list(rest)):
        return None
    return "/".join(parts[:kept])


class _Keep:
    """Values of frameworks and registered types, kept without knowing them."""

    def pack(self, obj: object) -> tuple[str, object] | None:
        return None

    def unpack(self, tag: str, payload: Any) -> object:
        return ForeignValue(tag, payload)


KEEP = _Keep()


def _moved_containers(
    flat: FlatTree, leaves: Leaves
) -> tuple[_Containers, dict[str, dict[str, object]]]:
    """Lists, ordered dicts and the like, where their leaves are now.

    A container goes where all of its leaves go that are left; one whose leaves part is a plain dict.
    """
    from ckptfmt.format import pack_value, parse_value

    positions = {name: at for at, (name, _, _) in enumerate(flat.containers)}
    homes: dict[int, set[str | None]] = {}
    for name, leaf in leaves.items() if positions else ():
        old = leaf.origin[0] if len(leaf.origin) == 1 else ""
        parts = old.split("/") if old else []
        for depth in range(len(parts)):
            at = positions.get("/".join(parts[:depth]))
            if at is not None:
                home = _home(name, parts[depth:], flat.containers[at][1])
                homes.setdefault(at, set()).add(home)
    containers: _Containers = []
    attributes: dict[str, dict[str, object]] = {}
    new_names = {
        at: home
        for at, found in homes.items()
        for home in found
        if len(found) == 1 and home is not None
    }
    for at, home in sorted(new_names.items()):
        name, kind, argument = flat.containers[at]
        if kind == "type":
            warn(
                f"{name or 'the tree'}: a registered type becomes the plain data it packs itself to"
            )
            _, kind, plain = parse_value(argument, KEEP, where=name)
            argument = pack_value(plain)
        if kind != "dict":
            containers.append((home, kind, argument))
    for key, rows in flat.container_attributes.items():
        for at, data in rows:
            if at in new_names:
                value = parse_value(data, KEEP, where=key)
                attributes.setdefault(new_names[at], {})[key] = value
    return containers, attributes


def _nested(
    leaves: Leaves, containers: _Containers, attributes: Mapping[str, Mapping[str, object]]
) -> Any:
    """The tree that the names make."""
    from ckptfmt.engine import build_tree
    from ckptfmt.errors import CorruptError

    if not leaves:
        raise UsageError("the rules leave nothing", reason="rule-name", do="drop less")
    makers = {
        name: (lambda made, kept=kept: ForeignContainer(made, kept))
        for name, kept in attributes.items()
    }
    objects = [leaf.value if leaf.tensor is None else leaf.tensor for leaf in leaves.values()]
    try:
        return build_tree(
            list(leaves), objects, containers, partial=True, makers=makers, registered=False
        )
    except CorruptError as error:
        raise UsageError(
            "no tree has the names that the rules make",
            reason="rule-name",
            where=error.where,
            found=error.what,
            expected="keys joined by /; ~1 is a / within a key",
        ) from None
