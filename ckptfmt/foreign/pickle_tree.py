"""From what a pickle machine made to a tree that a save takes: bounded, without cycles, all plain.

Objects of unknown classes become `{"class": "pkg.Name", "state": ...}` and are listed as opaque.
"""

from __future__ import annotations

import argparse
import types
from abc import abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckptfmt.errors import CorruptError, UnsupportedError, UsageError
from ckptfmt.foreign.base import ForeignContainer, ForeignTensor
from ckptfmt.foreign.pickle_machine import Global, Record
from ckptfmt.format import escape_key, join_name

DEPTH_MAX = 90
"""Below the tree's own limit of 100: an opaque record adds levels."""
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_NAMESPACES: Mapping[str, Callable[..., Any]] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
}
_SCALARS = frozenset([str, int, float, bool, type(None), bytes])
_NODE_COST, _ITEM_COST, _CONTAINER_COST = 32, 8, 96


class _Omit:
    """In place of what is not carried."""


OMIT = _Omit()


class Node:
    """What a format's builder made: it knows how it is carried."""

    __slots__ = ()

    @abstractmethod
    def carry(self, maker: TreeMaker, name: str) -> Any:
        """What stands in the tree; `OMIT` after `maker.skipped[name] = reason`."""


class TreeMaker:
    """Makes one tree.

    Args:
        states: id of a dict -> the state that the pickle set on it.
        where: The file, for messages.
        reason: Prefix of the errors' reasons.
        nbytes: Of the pickle: what the tree holds is bounded by it. A list that stands in a list
            twice, and so on for fifty levels, is a short pickle and an endless tree.
        value_of: Name of a global -> the plain value that it means, or None.
        attributes_of: Attributes for a dict with a state; None: the state is not carried.
    """

    def __init__(
        self,
        states: Mapping[int, Any],
        *,
        where: str,
        reason: str,
        nbytes: int,
        value_of: Callable[[str], Any] = lambda name: None,
        attributes_of: Callable[[Any], Mapping[str, object] | None] = lambda state: None,
    ) -> None:
        self.states, self.where, self.reason = states, where, reason
        self.value_of, self.attributes_of = value_of, attributes_of
        self.skipped: dict[str, str] = {}
        self.ignored: dict[str, str] = {}
        self.opaque: dict[str, str] = {}
        self._budget = (16 << 20) + 16 * nbytes
        self._active: set[int] = set()

    def refuse(self, what: str, name: str, reason: str, found: object = None) -> UnsupportedError:
        return UnsupportedError(
            what,
            reason=f"{self.reason}-{reason}",
            where=f"{self.where}, {name[:200] or 'the root'}",
            found=found,
            do="load it with the framework that wrote it, and save plain data",
        )

    def corrupt(self, what: str, name: str, found: object = None) -> CorruptError:
        return CorruptError(
            what,
            reason=f"{self.reason}-value",
            where=f"{self.where}, {name[:200] or 'the root'}",
            found=found,
            do="get the file again",
        )

    def join(self, name: str, key: object) -> str:
        """The name of what stands under a key."""
        try:
            return join_name(name, escape_key(key))
        except UsageError as error:
            raise self.refuse(error.what, name, "key", error.found) from error

    def make(self, obj: Any, name: str = "", depth: int = 0) -> Any:
        """The tree of an object; OMIT if it is not carried."""
        kind = type(obj)
        self._spend(_cost(obj, kind), name)
        if kind in _SCALARS:
            return obj
        if isinstance(obj, Node):
            return obj.carry(self, name)
        if kind is Global:
            return self._global(obj, name)
        if kind not in _MAPPINGS and kind not in (list, tuple, deque, Record):
            return obj  # a set of scalars, a path, a time, ...
        if depth > DEPTH_MAX or id(obj) in self._active:
            raise self.refuse(f"nested deeper than {DEPTH_MAX}, or in itself", name, "tree-depth")
        if not obj and kind in (list, tuple):
            return kind()
        self._active.add(id(obj))
        if kind is Record:
            made = self._record(obj, name, depth)
        elif kind in _MAPPINGS:
            made = self._mapping(obj, name, depth)
        else:
            items = self._items(obj, name, depth)
            made = tuple(items) if kind is tuple else items
            made = deque(made, obj.maxlen) if kind is deque else made
        self._active.discard(id(obj))
        return made

    def _spend(self, nbytes: int, name: str) -> None:
        self._budget -= nbytes
        if self._budget < 0:
            raise self.refuse("the tree is far larger than its pickle", name, "tree-size")

    def _items(self, items: Sequence[Any], name: str, depth: int) -> list[Any]:
        kinds = set(map(type, items))
        if len(kinds) == 1 and kinds <= _SCALARS:
            # A million numbers are one value: they are taken as they lie.
            self._spend(_ITEM_COST * len(items) + _text_nbytes(items, *kinds), name)
            return list(items)
        self._spend(len(items) * len(name), name)
        made = []
        for at, item in enumerate(items):
            if type(item) in _SCALARS:
                self._spend(_cost(item, type(item)), name)
                made.append(item)
                continue
            value = self.make(item, f"{name}/{at}" if name else str(at), depth + 1)
            made.append(None if value is OMIT else value)
        return made

    def _mapping(self, obj: Any, name: str, depth: int) -> Any:
        made = type(obj)()
        if type(obj) is defaultdict:
            made.default_factory = obj.default_factory
        self._spend(len(obj) * len(name), name)
        for key, item in obj.items():
            if type(item) in _SCALARS and type(key) is str and key.isascii():
                # Legal whatever it is, and there is nothing in it that had to be named.
                self._spend(_cost(item, type(item)) + len(key), name)
                made[key] = item
                continue
            value = self.make(item, self.join(name, key), depth + 1)
            if value is not OMIT:
                made[key] = value
        state = self.states.get(id(obj))
        if not state:
            return made
        attributes = self.attributes_of(state)
        if attributes is None:
            self.ignored[name or "(root)"] = "attributes of a dict"
        return ForeignContainer(made, attributes) if made and attributes else made

    def _record(self, obj: Record, name: str, depth: int) -> Any:
        namespace = _NAMESPACES.get(obj.name)
        state = (
            None if obj.state is None else self.make(obj.state, self.join(name, "state"), depth + 1)
        )
        if namespace is not None and not obj.args and not obj.items and _is_fields(state):
            return namespace(**(state or {}))
        self.opaque[name] = obj.name
        made: dict[str, Any] = {"class": obj.name}
        if obj.args:
            made["args"] = self.make(list(obj.args), self.join(name, "args"), depth + 1)
        if state is not None and state is not OMIT:
            made["state"] = state
        if obj.items:
            made["items"] = self.make(obj.items, self.join(name, "items"), depth + 1)
        return made

    def _global(self, obj: Global, name: str) -> Any:
        value = self.value_of(obj.name)
        if value is not None:
            return value
        self.opaque[name] = obj.name
        return {"class": obj.name}


def _cost(obj: Any, kind: type) -> int:
    """About as many bytes as an object takes in a checkpoint, without what it holds."""
    if kind in (str, bytes, bytearray):
        return _NODE_COST + len(obj)
    if kind in (set, frozenset):
        flat = (item for e in obj for item in (e if type(e) is tuple else (e,)))
        return _NODE_COST + sum(_cost(item, type(item)) for item in flat)
    if kind is int:
        return _NODE_COST + int(obj).bit_length() // 8
    return _NODE_COST if kind in _SCALARS else _CONTAINER_COST


def _text_nbytes(items: Iterable[Any], kind: type) -> int:
    """What items of one kind take beside the room for a number."""
    if kind is int:
        return sum(map(int.bit_length, items)) // 8
    return sum(map(len, items)) if kind in (str, bytes) else 0


def _is_fields(state: Any) -> bool:
    """A dict of values under names, with no tensor in it: a namespace is one plain value."""
    return (
        type(state) is dict
        and all(type(key) is str for key in state)
        and not any(_holds_tensor(item) for item in state.values())
    )


def _holds_tensor(obj: Any) -> bool:
    if isinstance(obj, ForeignTensor | ForeignContainer):
        return True
    if isinstance(obj, dict):
        return any(_holds_tensor(item) for item in obj.values())
    return isinstance(obj, list | tuple | deque) and any(_holds_tensor(item) for item in obj)
