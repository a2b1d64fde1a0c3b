"""A tree of state to named leaves, and back: names, order and kinds survive exactly.

`flatten` touches no tensor's bytes; it refuses what cannot come back, with its path, before anything
is written. `ADAPTERS` is the table of frameworks. Spec: 03-names.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.engine.adapter import Captured, TensorSource
from ckptfmt.engine.dispatch import (
    ADAPTERS,
    EXTEND,
    adapter_of,
    array_source,
    capture,
    captures_last,
    framework_of,
    is_adapted,
    is_stateful,
    object_kind,
    tensor_source,
)
from ckptfmt.engine.ranks import PerRank
from ckptfmt.engine.registered import BY_TYPE, Registered, packed, register_type
from ckptfmt.engine.sources import Sources, are_plain, is_plain
from ckptfmt.engine.unflatten import ABSENT, unflatten
from ckptfmt.engine.walk import (
    MAPPINGS,
    NO_TENSORS,
    SCALARS,
    TREE_DEPTH_MAX,
    Visit,
    children_of,
    find_peers,
    holds_tensor,
    is_sequence,
    peers_of,
    refuse,
    too_deep,
    walk,
)
from ckptfmt.errors import UsageError, warn
from ckptfmt.format import (
    SECTIONS_NBYTES_MAX,
    VALUE_NBYTES_MAX,
    escape_key,
    factory_name,
    join_name,
    namedtuple_parts,
    pack_value,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ABSENT",
    "ADAPTERS",
    "EXTEND",
    "FlatTree",
    "Visit",
    "adapter_of",
    "capture",
    "find_peers",
    "flatten",
    "is_stateful",
    "object_kind",
    "peers_of",
    "register_type",
    "tensor_source",
    "unflatten",
    "walk",
]

LEAF_TENSOR, LEAF_VALUE, LEAF_PACKED = 0, 1, 2
LEAF_NBYTES = 64
"""What a leaf takes in the tables, about, beside its name."""
FRAMEWORK = "ckptfmt.framework"
"""Attribute of a tensor in the state of an object that no adapter knows: whose tensor it was."""
_NIL = pack_value(None)
_MANY = 8
"""A dict of so many items may be taken all at once."""


@dataclass(slots=True)
class FlatTree:
    """A tree as columns. Leaves and containers stand in depth-first order.

    Attributes:
        names: Of the leaves.
        kinds: 0 tensor, 1 value, 2 a value stored as a tensor of its packed bytes.
        rows: Tensor or value that each leaf is.
        values: Packed.
        tensors: Numbered by first use; tied leaves share one.
        containers: (name, kind, packed argument) of every inner node that is not a plain dict.
        attributes: Dotted key -> (leaf, packed value), leaves ascending.
        container_attributes: The same for positions in `containers`.
    """

    names: list[str] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    tensors: Sources = field(default_factory=Sources)
    containers: list[tuple[str, str, bytes]] = field(default_factory=list)
    attributes: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    container_attributes: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)


def flatten(
    tree: object, *, rank: int = 0, names_nbytes_max: int = SECTIONS_NBYTES_MAX
) -> FlatTree:
    """Turn a tree into named leaves; equal trees give equal columns.

    Args:
        rank: Whose state `per_rank` values are.
        names_nbytes_max: What names may take together, and about `LEAF_NBYTES` for each beside: a
            key stands in the name of all that lies below it.
    Raises:
        UsageError: Something would not come back as it is, or the tree contains itself. `where` is
            its path.
    Spec: 03-names §3.1 to §3.4.
    """
    flattener = _Flattener(tree, rank, names_nbytes_max)
    flattener.node(tree, "", 0)
    flattener.finish()
    return flattener.flat


class _Flattener:
    """Walks a tree once. Its columns grow in depth-first order."""

    __slots__ = (
        "_active",
        "_by_identity",
        "_captured",
        "_keep",
        "_marks",
        "_memo",
        "_own",
        "_peers",
        "_rank",
        "_room",
        "_root",
        "_siblings",
        "_within",
        "flat",
    )

    def __init__(self, root: object, rank: int, room: int) -> None:
        self.flat = FlatTree()
        self._root, self._rank, self._room = root, rank, room
        self._peers: dict[int, list[tuple[str, object]]] | None = None
        self._captured: dict[str, Captured] = {}
        self._by_identity: dict[object, int] = {}
        self._memo: dict[int, bool] = {}
        self._active: set[int] = set()
        self._keep: list[object] = []
        self._marks: dict[str, Mapping[str, object]] = {}
        self._own = False  # within the state of an object that no adapter knows
        self._siblings: Mapping[Any, Any] | None = None  # the dict that the node stands in
        self._within: object = None  # the object that is given all of its state back at once

    def node(self, obj: object, name: str, depth: int) -> None:
        """Any object: the slow way; `_mapping` short-cuts arrays and scalars."""
        kind = type(obj)
        if isinstance(obj, np.ndarray) and kind is np.ndarray:
            self._array(obj, name)
        elif kind in NO_TENSORS or isinstance(obj, np.generic):
            self._value(obj, name)
        elif kind in BY_TYPE:
            self._registered(obj, BY_TYPE[kind], name, depth)
        elif isinstance(obj, dict) and kind in MAPPINGS:
            self._mapping(obj, name, depth)
        elif isinstance(obj, list | tuple) and is_sequence(obj):
            self._sequence(obj, name, depth)
        elif isinstance(obj, PerRank):
            self._refuse_per_rank(name)
            self._mapping({str(self._rank): obj.value}, name, depth)
        else:
            self._object(obj, name, depth)

    def _object(self, obj: object, name: str, depth: int) -> None:
        try:
            found = object_kind(obj)
        except UsageError as error:
            refuse(error, name)
        if found == "tensor":
            self._tensor(obj, name)
        elif found in ("stateful", "composite"):
            self._stateful(obj, name, depth)
        else:
            self._value(obj, name)  # which refuses what is no value either

    def _refuse_per_rank(self, name: str) -> None:
        if self._within is None:
            return
        raise UsageError(
            "a value of each rank's own stands in an object that is given all of its state back",
            reason="per-rank",
            where=name,
            found=f"per_rank in the state of {type(self._within).__qualname__}",
            do="mark the object: per_rank(x); or give the value a place of its own in the tree",
        )

    # -- leaves

    def _leaf(self, name: str, kind: int, row: int) -> None:
        flat = self.flat
        flat.names.append(name)
        flat.kinds.append(kind)
        flat.rows.append(row)

    def _value(self, obj: object, name: str) -> None:
        try:
            data = pack_value(obj, EXTEND)
        except UsageError as error:
            refuse(error, name)
        if len(data) <= VALUE_NBYTES_MAX:
            self.flat.values.append(data)
            self._leaf(name, LEAF_VALUE, len(self.flat.values) - 1)
            return
        raw = np.frombuffer(data, np.uint8)
        self.flat.tensors.append(TensorSource("uint8", raw.shape, partial(np.asarray, raw)))
        self._leaf(name, LEAF_PACKED, len(self.flat.tensors) - 1)

    def _array(self, array: NDArray[Any], name: str) -> None:
        """A NumPy array: `_tensor` without an object for a plain one."""
        if self._own or not is_plain(array):
            self._tensor(array, name)
            return
        tensors = self.flat.tensors
        row = self._by_identity.setdefault(id(array), len(tensors))
        if row == len(tensors):
            tensors.append(array)
        self._leaf(name, LEAF_TENSOR, row)

    def _arrays(self, obj: dict[Any, Any], prefix: str) -> bool:
        """A dict of plain arrays under plain keys, all at once; False if it is none."""
        if self._own or set(map(type, obj)) != {str}:
            return False
        text, arrays = "".join(obj), list(obj.values())
        if not text.isascii() or "/" in text or "~" in text or "" in obj or not are_plain(arrays):
            return False
        flat = self.flat
        rows = range(len(flat.tensors), len(flat.tensors) + len(arrays))
        row_of: dict[object, int] = dict(zip(map(id, arrays), rows))
        if len(row_of) < len(arrays) or not self._by_identity.keys().isdisjoint(row_of):
            return False  # one stands twice
        self._by_identity.update(row_of)
        flat.tensors.extend(arrays)
        flat.names += [prefix + key for key in obj] if prefix else obj
        flat.kinds += [LEAF_TENSOR] * len(arrays)
        flat.rows += rows
        return True

    def _tensor(self, obj: Any, name: str) -> None:
        try:
            source = array_source(obj) if type(obj) is np.ndarray else tensor_source(obj, name)
        except UsageError as error:
            refuse(error, name)
        tensors = self.flat.tensors
        row = len(tensors)
        identity = source.identity
        if identity is not None:
            # An identity holds an address: the tree, or `source.keep`, keeps the memory alive.
            row = self._by_identity.setdefault(identity, row)
        if row == len(tensors):
            tensors.append(source)
        attributes = source.attributes
        if self._own and framework_of(obj):
            # The object must get this framework's tensors again, also where it is fresh and empty.
            attributes = {**attributes, FRAMEWORK: framework_of(obj)}
        if attributes:
            self._attributes(self.flat.attributes, len(self.flat.names), attributes, name)
        self._leaf(name, LEAF_TENSOR, row)
        if source.beside:
            self._beside(source, name)

    def _beside(self, source: TensorSource, name: str) -> None:
        siblings = self._siblings
        for suffix, other in source.beside.items():
            if siblings is None or name.rpartition("/")[2] + suffix in siblings:
                warn(f"{name}: its one value is saved without {name}{suffix}, for it is in no dict")
                continue
            self._attributes(self.flat.attributes, len(self.flat.names), other.attributes, name)
            self.flat.tensors.append(other)
            self._leaf(name + suffix, LEAF_TENSOR, len(self.flat.tensors) - 1)

    # -- containers

    def _enter(self, obj: Sized, name: str, depth: int) -> None:
        self._room -= len(obj) * (len(name) + LEAF_NBYTES)
        if self._room < 0:
            raise UsageError(
                "the names of all leaves would take too much room",
                reason="tree-names",
                where=f"{name[:200]}..." if len(name) > 200 else name,
                found=f"{len(obj):,} items below a name of {len(name):,} characters",
                do="shorten the keys that are far up, or save one array instead of many values",
            )
        self._nested(obj, name, depth)

    def _nested(self, obj: object, name: str, depth: int) -> None:
        if depth >= TREE_DEPTH_MAX or id(obj) in self._active:
            try:
                too_deep()
            except UsageError as error:
                refuse(error, name)
        self._active.add(id(obj))

    def _mapping(self, obj: dict[Any, Any], name: str, depth: int, kind: str = "") -> None:
        if not obj:
            self._value(obj, name)
            return
        self._enter(obj, name, depth)
        if not kind:
            self._container_of(obj, name)
        prefix = f"{name}/" if name else ""
        if len(obj) >= _MANY and self._arrays(obj, prefix):
            self._active.discard(id(obj))
            return
        parts: set[str] = set()
        for key, item in obj.items():
            if type(key) is str and key and key.isascii() and "/" not in key and "~" not in key:
                child = prefix + key
            else:
                child = prefix + self._part(key, name, parts)
            of = type(item)
            if of is np.ndarray:
                self._array(item, child)
            elif of in SCALARS:
                self._value(item, child)
            else:
                self._siblings = None if kind else obj
                self.node(item, child, depth + 1)
        self._active.discard(id(obj))

    def _part(self, key: object, name: str, parts: set[str]) -> str:
        try:
            part = escape_key(key)
            if type(key) is not str:
                if part in parts:
                    raise UsageError(
                        "two keys of a dict have one name", reason="key", found=ascii(key)[:80]
                    )
                parts.add(part)
        except UsageError as error:
            refuse(error, name)
        return part

    def _sequence(self, obj: list[Any] | tuple[Any, ...], name: str, depth: int) -> None:
        try:
            found = holds_tensor(obj, self._memo)
        except UsageError as error:
            refuse(error, name)
        if not found:
            self._value(obj, name)
            return
        self._enter(obj, name, depth)
        self._container_of(obj, name)
        prefix = f"{name}/" if name else ""
        for position, item in enumerate(obj):
            self._siblings = None
            self.node(item, f"{prefix}{position}", depth + 1)
        self._active.discard(id(obj))

    def _container_of(self, obj: object, name: str) -> None:
        try:
            kind, argument = container_row(obj)
        except UsageError as error:
            refuse(error, name)
        if kind != "dict" or name in self._marks:
            data = _NIL if argument is None else pack_value(argument)
            self.flat.containers.append((name, kind, data))

    def _registered(self, obj: object, entry: Registered, name: str, depth: int) -> None:
        try:
            plain = packed(entry, obj)
            if not holds_tensor(plain, self._memo):
                self._value(obj, name)
                return
            self._keep.append(plain)
            if children_of(plain) is None or type(plain) in BY_TYPE:
                raise UsageError(
                    "a registered type with tensors must pack itself into a dict, list or tuple",
                    reason="register-type",
                    found=type(plain).__qualname__,
                    do=f"let pack of {entry.name!r} return a dict",
                )
            kind, argument = container_row(plain)
        except UsageError as error:
            refuse(error, name)
        self._nested(obj, name, depth)
        outer, self._within = self._within, obj
        row = pack_value([entry.name, kind, argument])
        self.flat.containers.append((name, "type", row))
        if isinstance(plain, dict):
            self._mapping(plain, name, depth, "type")
        else:
            prefix = f"{name}/" if name else ""
            for position, item in enumerate(plain):
                self._siblings = None
                self.node(item, f"{prefix}{position}", depth + 1)
        self._within = outer
        self._active.discard(id(obj))

    def _stateful(self, obj: object, name: str, depth: int) -> None:
        self._nested(obj, name, depth)
        if self._peers is None:
            self._peers = find_peers(self._root, rank=self._rank)
            self._capture_ahead()
        captured = self._captured.get(name) or self._capture(obj, name)
        self._keep.append(captured)
        for below, attributes in captured.attributes.items():
            self._marks[join_name(name, below) if below else name] = attributes
        outer = self._own, self._within
        self._own, self._within = not is_adapted(obj), obj
        self.node(captured.tree, name, depth + 1)
        self._own, self._within = outer
        self._active.discard(id(obj))

    def _capture(self, obj: object, name: str) -> Captured:
        peers = (self._peers or {}).get(id(adapter_of(obj)), [])
        try:
            return capture(obj, name, peers)
        except UsageError as error:
            refuse(error, name)

    def _capture_ahead(self) -> None:
        """Generators are read last, as they are set last: other objects may draw from them when
        they give their state (a data loader makes its iterator then)."""
        all_ = [peer for peers in (self._peers or {}).values() for peer in peers]
        if any(captures_last(obj) for _, obj in all_):
            self._captured = {
                name: self._capture(obj, name) for name, obj in all_ if not captures_last(obj)
            }

    # -- attributes

    def _attributes(
        self,
        table: dict[str, list[tuple[int, bytes]]],
        row: int,
        attributes: Mapping[str, object],
        name: str,
    ) -> None:
        for key, item in attributes.items():
            try:
                data = pack_value(item, EXTEND)
            except UsageError as error:
                refuse(error, join_name(name, key))
            table.setdefault(key, []).append((row, data))

    def finish(self) -> None:
        """Place the attributes of captured objects, which are given by name."""
        flat = self.flat
        if not self._marks:
            return
        leaves = {name: row for row, name in enumerate(flat.names) if name in self._marks}
        containers = {row[0]: at for at, row in enumerate(flat.containers)}
        for name, attributes in self._marks.items():
            if name in leaves:
                self._attributes(flat.attributes, leaves[name], attributes, name)
            elif name in containers:
                self._attributes(flat.container_attributes, containers[name], attributes, name)
            elif attributes:
                raise UsageError(
                    "an object within a nested value cannot be kept as it is",
                    reason="tree-attribute",
                    where=name,
                    found=", ".join(sorted(attributes)),
                    do="move it out of the list, or convert it to plain data",
                )
        for table in (flat.attributes, flat.container_attributes):
            for key, rows in table.items():
                table[key] = sorted(dict(rows).items())


def container_row(obj: object) -> tuple[str, object]:
    """Kind and argument of a container that holds something (spec 03 §3.3)."""
    kind = type(obj)
    if kind is list:
        return "list", None
    if kind is tuple:
        return "tuple", None
    if isinstance(obj, collections.defaultdict):
        return "defaultdict", factory_name(obj.default_factory)
    if kind is collections.OrderedDict:
        return "odict", None
    return ("dict", None) if kind is dict else ("namedtuple", list(namedtuple_parts(obj)))
