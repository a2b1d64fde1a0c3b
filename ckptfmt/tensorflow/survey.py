"""Which variables an object holds, and what each is called.

A *survey* walks an object breadth first, so a variable's name is the shortest path to it, and of
equally short ones the path that was defined first. All other paths are its *aliases*. Names are
relative to the object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfmt.errors import UsageError
from ckptfmt.format import escape_key, join_name
from ckptfmt.tensorflow.own_state import own_state
from ckptfmt.tensorflow.tensors import full_name_of, identity_of, is_optimizer, is_variable

Keys = tuple[object, ...]
"""Keys from an object to something below it, not yet escaped."""

# A module that every layer refers to back and forth has more paths than anybody can use.
_ALIASES_MAX = 32


@dataclass(frozen=True, slots=True)
class Edge:
    """From an object to a child.

    Attributes:
        keys: How the child is called below its parent.
        child: A variable, or an object that has children.
        given: The name that the user gave the child, or "".
        numbered: The last key counts children of one class: it says little.
    """

    keys: Keys
    child: Any
    given: str = ""
    numbered: bool = False


@dataclass(slots=True)
class Found:
    """A variable, or an object whose state is not in variables.

    Attributes:
        keys, name: Its path, as keys and as a leaf's name.
        variable: The tf.Variable or Keras variable; or the object.
        full_name: What the framework calls it.
        trusted: The full name tells variables apart in another process too.
        numbered: A part of the name counts children of one class.
        aliases: Names of the other paths.
    """

    keys: Keys
    name: str
    variable: Any
    full_name: str
    trusted: bool
    numbered: bool
    aliases: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Survey:
    """`found`: the variables. `nodes`: (name, object) of every object on the way, the root with the
    empty name. `holders`: optimizers, and objects with a state of their own, see `own_state`."""

    found: list[Found]
    nodes: list[tuple[str, Any]]
    holders: list[Found] = field(default_factory=list)


@dataclass(slots=True)
class _Visit:
    keys: Keys
    name: str
    obj: Any
    chosen: frozenset[str]
    numbered: bool
    below: list[_Visit] = field(default_factory=list)
    edge: Edge | None = None


Children = Callable[[Any, str], Iterable[Edge]]
Trust = Callable[[Any, frozenset[str]], bool]


def name_of(keys: Sequence[object], where: str) -> str:
    """The leaf name of a path.

    Raises:
        UsageError: A key cannot be part of a name; it says below what.
    """
    name = ""
    for key in keys:
        try:
            name = join_name(name, escape_key(key))
        except UsageError as error:
            raise UsageError(
                error.what,
                reason="key",
                where=join_name(where, name),
                found=f"key {ascii(key)[:80]}",
                do=error.do,
            ) from None
    return name


def take_survey(root: Any, where: str, children: Children, trust: Trust, given: str = "") -> Survey:
    """Walk `root`.

    Args:
        root: Any object that `children` knows.
        where: The root's own name, for errors.
        children: Gives an object's edges; it refuses what cannot be saved.
        trust: Says of a variable, and the names the user chose above it, whether its full name
            is the same in every process.
        given: The name that the user gave the root, or "".
    """
    start = _Visit((), "", root, frozenset([given] if given else []), False)
    visits: dict[int, _Visit] = {identity_of(root): start}
    others: list[tuple[Keys, _Visit]] = []
    queue = deque([start])
    while queue:
        visit = queue.popleft()
        if _is_leaf(visit.obj):
            continue
        for edge in children(visit.obj, join_name(where, visit.name) if visit.name else where):
            keys = visit.keys + edge.keys
            known = visits.get(identity_of(edge.child))
            if known is not None:
                if keys[: len(known.keys)] != known.keys:  # not a way back to an ancestor
                    others.append((keys, known))
                continue
            chosen = visit.chosen | {edge.given} if edge.given else visit.chosen
            below = _Visit(
                keys,
                name_of(keys, where),
                edge.child,
                chosen,
                visit.numbered or edge.numbered,
                edge=edge,
            )
            visits[identity_of(edge.child)] = below
            visit.below.append(below)
            queue.append(below)
    found, nodes, rows = _in_order(start, trust)
    _add_aliases(found, rows, others, where)
    variables = [one for one in found if is_variable(one.variable)]
    return Survey(variables, nodes, [one for one in found if not is_variable(one.variable)])


def _is_leaf(obj: Any) -> bool:
    return is_variable(obj) or is_optimizer(obj) or own_state(obj) is not None


def _in_order(
    start: _Visit, trust: Trust
) -> tuple[list[Found], list[tuple[str, Any]], dict[int, tuple[int, int]]]:
    """Variables and objects in depth-first order, and the run of variables below each visit."""
    found: list[Found] = []
    nodes: list[tuple[str, Any]] = []
    rows: dict[int, tuple[int, int]] = {}
    stack: list[tuple[_Visit, int | None]] = [(start, None)]
    while stack:
        visit, first = stack.pop()
        if first is not None:
            rows[id(visit)] = (first, len(found))
        elif _is_leaf(visit.obj):
            rows[id(visit)] = (len(found), len(found) + 1)
            found.append(_found(visit, trust))
        else:
            nodes.append((visit.name, visit.obj))
            stack.append((visit, len(found)))
            stack.extend((below, None) for below in reversed(visit.below))
    return found, nodes, rows


def _found(visit: _Visit, trust: Trust) -> Found:
    if not is_variable(visit.obj):
        return Found(visit.keys, visit.name, visit.obj, "", False, visit.numbered)
    full_name, trusted = full_name_of(visit.obj), trust(visit.obj, visit.chosen)
    return Found(visit.keys, visit.name, visit.obj, full_name, trusted, visit.numbered)


def _add_aliases(
    found: list[Found],
    rows: Mapping[int, tuple[int, int]],
    others: Sequence[tuple[Keys, _Visit]],
    where: str,
) -> None:
    for keys, visit in others:
        first, stop = rows[id(visit)]
        for row in range(first, stop):
            one = found[row]
            if len(one.aliases) < _ALIASES_MAX:
                alias = name_of(keys + one.keys[len(visit.keys) :], where)
                if alias != one.name and alias not in one.aliases:
                    one.aliases.append(alias)


def nest(pairs: Iterable[tuple[Keys, Any]], where: str) -> dict[Any, Any]:
    """A tree of dicts from paths.

    Raises:
        UsageError: One path goes through another's end.
    """
    tree: dict[Any, Any] = {}
    inner = {id(tree)}
    for keys, value in pairs:
        at = tree
        for key in keys[:-1]:
            if key not in at:
                at[key] = {}
                inner.add(id(at[key]))
            at = at[key]
            if id(at) not in inner:
                break
        if id(at) not in inner or keys[-1] in at:
            raise UsageError(
                "two variables would have one name",
                reason="name",
                where=join_name(where, name_of(keys, where)),
                do="give one of the two layers or variables another name",
            )
        at[keys[-1]] = value
    return tree
