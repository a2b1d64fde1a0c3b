"""Walking a tree without flattening it: what lies where, and whether a tensor lies below.

Spec: 03-names §3.2.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np

from ckptfmt.engine.adapter import ObjectKind
from ckptfmt.engine.dispatch import adapter_of, object_kind
from ckptfmt.engine.ranks import PerRank
from ckptfmt.engine.registered import BY_TYPE, packed
from ckptfmt.errors import UsageError
from ckptfmt.format import escape_key, is_namedtuple, join_name

TREE_DEPTH_MAX = 100

SCALARS = frozenset([type(None), bool, int, float, complex, str, bytes])
MAPPINGS = frozenset([dict, collections.OrderedDict, collections.defaultdict])
_HOLDING = frozenset(["tensor", "composite", "stateful"])
NO_TENSORS = frozenset([*SCALARS, set, frozenset, range])


def refuse(error: UsageError, name: str) -> NoReturn:
    """Raise the same error for what is at or below a name."""
    if not name:
        error.where = error.where or "the tree's root"
    elif error.where != name and not error.where.startswith(f"{name}/"):
        error.where = join_name(name, error.where) if error.where else name
    error.args = (error._message(),)
    raise error


def holds_tensor(obj: object, memo: dict[int, bool], depth: int = 0) -> bool:
    """True if a tensor or a stateful object lies at or below an object of a tree.

    `memo` is by id: its owner keeps the objects alive. A list within itself counts as holding none.
    """
    kind = type(obj)
    if kind in NO_TENSORS:
        return False
    if kind is np.ndarray or kind is PerRank:  # which is walked into, whatever it holds
        return True
    key = id(obj)
    known = memo.get(key)
    if known is not None:
        return known
    memo[key] = False
    children = children_of(obj)
    if children is None:
        found = not isinstance(obj, np.generic) and object_kind(obj) in _HOLDING
    elif depth > TREE_DEPTH_MAX:
        too_deep()
    else:
        found = not NO_TENSORS.issuperset(map(type, children)) and any(
            holds_tensor(child, memo, depth + 1) for child in children
        )
    memo[key] = found
    return found


def children_of(obj: object) -> list[object] | None:
    """What a container holds; None for what is no container of a tree."""
    kind = type(obj)
    entry = BY_TYPE.get(kind)
    if entry is not None:
        return [packed(entry, obj)]
    if isinstance(obj, dict) and kind in MAPPINGS:
        return list(obj.values())
    if isinstance(obj, list | tuple) and is_sequence(obj):
        return list(obj)
    return None


def is_sequence(obj: object) -> bool:
    kind = type(obj)
    if kind is list or kind is tuple:
        return True
    if not is_namedtuple(kind):
        return False
    adapter = adapter_of(obj)  # torch.Size and the like are values of their framework
    return adapter is None or adapter.kind(obj) == "unknown"


def too_deep() -> NoReturn:
    raise UsageError(
        f"the tree is nested deeper than {TREE_DEPTH_MAX}, or contains itself",
        reason="tree-depth",
        do="flatten it, or cut the loop",
    )


@dataclass(frozen=True, slots=True)
class Visit:
    """An object of a tree that is not walked into: a tensor, a stateful object or a whole value.

    Attributes:
        name: Its name.
        parent: The container that holds it; None for the root.
        key: Its key or position there.
        obj: The object.
        kind: "tensor", "composite", "stateful", "value" (plain values, lists without a tensor, empty
            containers, registered types), or "per_rank" (what it holds follows).
    """

    name: str
    parent: Any
    key: Any
    obj: Any
    kind: ObjectKind | Literal["per_rank"]


def walk(tree: object, *, rank: int = 0) -> Iterator[Visit]:
    """The tensors, stateful objects and values of a tree, in depth-first order.

    What `per_rank` holds has the rank's number in its name; one within another is no visit of its own.
    A registered type is one value here, also with tensors in it: it is replaced whole.

    Raises:
        UsageError: As in `flatten`.
    """
    memo: dict[int, bool] = {}
    of_rank = False  # within what `per_rank` holds

    def below(obj: Any, name: str, at: tuple[Any, Any], depth: int) -> Iterator[Visit]:
        nonlocal of_rank
        kind = type(obj)
        if kind in BY_TYPE or kind in NO_TENSORS or isinstance(obj, np.generic):
            yield Visit(name, *at, obj, "value")
            return
        try:
            if depth > TREE_DEPTH_MAX:
                too_deep()
            if kind is PerRank:
                outer, of_rank = of_rank, True
                if not outer:  # what is one rank's own already is not told of the others once more
                    yield Visit(name, *at, obj, "per_rank")
                yield from below(obj.value, join_name(name, str(rank)), (obj.held, ""), depth + 1)
                of_rank = outer
                return
            if kind in MAPPINGS and obj:
                children = [(key, escape_key(key), item) for key, item in obj.items()]
            elif isinstance(obj, list | tuple) and is_sequence(obj) and holds_tensor(obj, memo):
                children = [(i, str(i), item) for i, item in enumerate(obj)]
            else:
                found: ObjectKind = "value" if children_of(obj) is not None else object_kind(obj)
                yield Visit(name, *at, obj, "value" if found == "unknown" else found)
                return
        except UsageError as error:
            refuse(error, name)
        for key, part, item in children:
            child = f"{name}/{part}" if name else part
            if type(item) is np.ndarray:  # most of what there is, and no container
                yield Visit(child, obj, key, item, "tensor")
            else:
                yield from below(item, child, (obj, key), depth + 1)

    yield from below(tree, "", (None, None), 0)


def named_leaves(tree: object) -> dict[str, Any]:
    """The tensors and plain values of a tree by name; arrays that cannot be written."""
    return {visit.name: read_only(visit.obj) for visit in walk(tree)}


def read_only(value: Any) -> Any:
    """An array as a view that cannot be written; anything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def find_peers(tree: object, *, rank: int = 0) -> dict[int, list[tuple[str, object]]]:
    """The stateful objects of a tree by `id` of their adapter (of None for the others)."""
    return peers_of(walk(tree, rank=rank))


def peers_of(visits: Iterable[Visit]) -> dict[int, list[tuple[str, object]]]:
    """The same of what was visited."""
    made: dict[int, list[tuple[str, object]]] = {}
    for visit in visits:
        if visit.kind == "stateful":
            made.setdefault(id(adapter_of(visit.obj)), []).append((visit.name, visit.obj))
    return made
