"""Leaves of an index: their values, and back into the tree that was saved. Spec: 03-names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ckptfmt.engine.arrays import read_tensors
from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.tree import ABSENT, EXTEND, unflatten
from ckptfmt.format import Attribute, Index, parse_value
from ckptfmt.storage import Backend


def parse_leaf_value(data: bytes, name: str) -> Any:
    """A plain value from its packed bytes; kinds of frameworks and registered types included."""
    return parse_value(data, EXTEND, where=name)


def packed_values(backend: Backend, index: Index, positions: Sequence[int]) -> dict[int, Any]:
    """Long values, which are stored as tensors of their packed bytes: leaf position -> value."""
    tree = index.tree
    rows = {p: int(tree.leaf_rows[p]) for p in positions}
    with Reporter(False, "read", 0) as reporter:
        arrays = read_tensors(backend, index, list(rows.values()), verify=True, reporter=reporter)
    return {
        p: parse_leaf_value(arrays[row].tobytes(), tree.leaf_names[p]) for p, row in rows.items()
    }


def containers_of(index: Index) -> dict[str, tuple[str, bytes]]:
    """Name -> (kind, packed argument) of every container that is no plain dict."""
    tree = index.tree
    rows = zip(tree.container_names, tree.container_kinds, tree.container_arguments)
    return {name: (kind, argument) for name, kind, argument in rows}


def nest(
    index: Index,
    positions: Sequence[int],
    leaves: Sequence[Any],
    *,
    partial: bool = False,
    makers: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
) -> Any:
    """Leaves back into the tree that was saved; `partial` where some are left out."""
    names = index.tree.leaf_names
    if partial:
        # What was not selected is marked, so that a list that lost its end is seen to have.
        every: list[Any] = [ABSENT] * len(names)
        for position, leaf in zip(positions, leaves):
            every[position] = leaf
        leaves = every
    return unflatten(names, leaves, containers_of(index), partial=partial, makers=makers)


def build_tree(
    names: Sequence[str],
    leaves: Sequence[object],
    containers: Iterable[tuple[str, str, bytes]],
    *,
    partial: bool = False,
    makers: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
    registered: bool = True,
) -> Any:
    """The tree of leaves that were flattened elsewhere, or renamed; `containers` as in a `FlatTree`,
    the rest as in `unflatten`."""
    rows = {name: (kind, data) for name, kind, data in containers}
    return unflatten(names, leaves, rows, partial=partial, makers=makers, registered=registered)


def attributes_by_row(
    table: Mapping[str, Attribute], names: Sequence[str]
) -> dict[int, dict[str, Any]]:
    """Row -> its attributes, for leaves or containers that have any."""
    made: dict[int, dict[str, Any]] = {}
    for key, attribute in table.items():
        for position, value in zip(attribute.rows.tolist(), attribute.values):
            made.setdefault(position, {})[key] = parse_leaf_value(value, names[position])
    return made
