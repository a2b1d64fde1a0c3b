"""The leaves of several ranks as those of one tree: names, values, containers, tensors. Pure.

Spec: 08-protocol §8.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ckptfmt.errors import MismatchError
from ckptfmt.format import (
    LEAF_VALUE,
    Attribute,
    Dtype,
    Fragment,
    TreeSection,
    ragged,
    split_name,
    starts,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]


_REGION_COLUMNS = (
    "region_tensors",
    "region_origins",
    "region_extents",
    "region_nchunks",
    "chunk_raw",
    "chunk_digests",
)


def refuse(
    what: str, reason: str, leaf: str, ranks: Sequence[int], *, expected: object = None
) -> NoReturn:
    """The error of ranks that disagree about a leaf."""
    raise MismatchError(
        what,
        reason=reason,
        where=repr(leaf),
        expected=expected,
        found=f"ranks {', '.join(map(str, ranks))}",
        do="nothing was committed; what is each rank's own is saved under a name of its own "
        "(per_rank of ckptfmt.torch, or the rank in the key)",
    )


@dataclass(slots=True)
class Leaves:
    """The merged tree's columns but for regions and chunks, and where each rank's rows are in it.

    Attributes:
        names, kinds, rows, values: As in the tree section.
        containers: (name, kind, argument) in the order of the first leaf below each.
        dtypes, tensor_dtypes, ndims, dims: Of the tensors.
        leaf_of: Per rank: its leaf -> the merged leaf.
        tensor_of: Per rank: its tensor -> the merged tensor.
        first_leaf: Merged tensor -> its first leaf.
    """

    names: list[str]
    kinds: NDArray[np.uint8]
    leaf_of: list[Rows]
    rows: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    values: list[bytes] = field(default_factory=list)
    containers: list[tuple[str, str, bytes]] = field(default_factory=list)
    dtypes: tuple[Dtype, ...] = ()
    tensor_dtypes: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    ndims: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    dims: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    tensor_of: list[Rows] = field(default_factory=list)
    first_leaf: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    leaf_attributes: Mapping[str, Attribute] = field(default_factory=dict)
    container_attributes: Mapping[str, Attribute] = field(default_factory=dict)

    def name_of(self, tensor: int) -> str:
        return self.names[int(self.first_leaf[tensor])]

    def tree(self, **regions: NDArray[Any]) -> TreeSection:
        """The section; without `regions` it has none, and tells the structure only."""
        none = np.zeros(0, np.uint8)
        return TreeSection(
            dtypes=self.dtypes,
            names=self.names,
            leaf_kinds=self.kinds,
            leaf_rows=self.rows,
            values=self.values,
            container_names=[row[0] for row in self.containers],
            container_kinds=[row[1] for row in self.containers],
            container_arguments=[row[2] for row in self.containers],
            tensor_dtypes=self.tensor_dtypes,
            tensor_ndims=self.ndims,
            tensor_dims=self.dims,
            leaf_attributes=self.leaf_attributes,
            container_attributes=self.container_attributes,
            **(dict.fromkeys(_REGION_COLUMNS, none) | regions),
        )


def merge_leaves(fragments: Sequence[Fragment]) -> Leaves:
    """Merge in rank order: a dict has the keys of the lower ranks first, each in its own order.

    Raises:
        MismatchError: Ranks disagree about a leaf's kind, plain value, dtype, shape or ties, or
            about a container. The leaf and two ranks are named.
    """
    trees = [fragment.index.tree for fragment in fragments]
    names, order = _merge_names(trees)
    if names is trees[0].leaf_names and all(tree.leaf_names == names for tree in trees):
        leaf_of = [np.arange(len(names)) for _ in trees]
    else:
        at = {name: row for row, name in enumerate(names)}
        leaf_of = [np.array([at[n] for n in tree.leaf_names], np.int64) for tree in trees]
    kinds = np.full(len(names), 255, np.uint8)
    for tree, mine in zip(reversed(trees), reversed(leaf_of)):
        kinds[mine] = tree.leaf_kinds
    leaves = Leaves(names, kinds, leaf_of)
    for rank, tree in enumerate(trees):
        wrong = np.flatnonzero(kinds[leaf_of[rank]] != tree.leaf_kinds)
        if len(wrong):
            leaf = int(leaf_of[rank][wrong[0]])
            _disagree("this is another kind of leaf, or another value", leaves, leaf, rank)
    leaves.values = _merge_values(leaves, trees)
    leaves.containers = _merge_containers(trees, order)
    _merge_tensors(leaves, trees, [_is_held(fragment) for fragment in fragments])
    _merge_attributes(leaves, trees)
    return leaves


def _disagree(what: str, leaves: Leaves, leaf: int, rank: int, reason: str = "ranks") -> NoReturn:
    first = next(r for r, mine in enumerate(leaves.leaf_of) if (mine == leaf).any())
    refuse(f"{what} on different ranks", reason, leaves.names[leaf], [first, rank])


def _merge_names(trees: Sequence[TreeSection]) -> tuple[list[str], list[str] | None]:
    """The leaves' names in depth-first order, and the inner nodes' likewise if they were needed."""
    held = [tree.leaf_names for tree in trees if len(tree.leaf_names)] or [trees[0].leaf_names]
    if all(names == held[0] for names in held[1:]):
        return held[0], None
    root: dict[str, object] = {}
    for name in dict.fromkeys(chain.from_iterable(tree.leaf_names for tree in trees)):
        parts = split_name(name)
        if not parts:
            _leaf_and_container(trees, name)
        node = root
        for depth, part in enumerate(parts[:-1], 1):
            below = node.setdefault(part, {})
            if not isinstance(below, dict):
                _leaf_and_container(trees, "/".join(parts[:depth]))
            node = below
        if isinstance(node.setdefault(parts[-1], None), dict):
            _leaf_and_container(trees, name)
    leaves: list[str] = []
    inner: list[str] = []
    _emit(root, "", leaves, inner)
    return leaves, inner


def _emit(node: dict[str, object], prefix: str, leaves: list[str], inner: list[str]) -> None:
    for part, below in node.items():
        name = f"{prefix}/{part}" if prefix else part
        if isinstance(below, dict):
            inner.append(name)
            _emit(below, name, leaves, inner)
        else:
            leaves.append(name)


def _leaf_and_container(trees: Sequence[TreeSection], name: str) -> NoReturn:
    rank = next(r for r, tree in enumerate(trees) if name in tree.leaf_positions)
    refuse("this is a leaf on one rank and holds leaves on another", "ranks", name, [rank])


def _merge_values(leaves: Leaves, trees: Sequence[TreeSection]) -> list[bytes]:
    found: dict[int, bytes] = {}
    for rank, tree in enumerate(trees):
        mine = np.flatnonzero(tree.leaf_kinds == LEAF_VALUE)
        merged = leaves.leaf_of[rank][mine].tolist()
        for leaf, row in zip(merged, tree.leaf_rows[mine].tolist()):
            if found.setdefault(leaf, tree.values[row]) != tree.values[row]:
                _disagree("a plain value differs", leaves, leaf, rank, "ranks-value")
    return [found[leaf] for leaf in sorted(found)]


def _merge_containers(
    trees: Sequence[TreeSection], inner: list[str] | None
) -> list[tuple[str, str, bytes]]:
    per_rank = [
        list(zip(t.container_names, t.container_kinds, t.container_arguments)) for t in trees
    ]
    if all(rows == per_rank[0] for rows in per_rank):
        return per_rank[0]
    found: dict[str, tuple[str, str, bytes]] = {}
    for rank, rows in enumerate(per_rank):
        for row in rows:
            if found.setdefault(row[0], row) != row:
                refuse("containers of two kinds on different ranks", "ranks", row[0], [rank])
    for rank, (tree, rows) in enumerate(zip(trees, per_rank)):
        absent = found.keys() - {row[0] for row in rows}
        for name in sorted(absent):
            prefix = f"{name}/" if name else ""
            if found[name][1] != "dict" and any(n.startswith(prefix) for n in tree.leaf_names):
                refuse("a container here is a plain dict there", "ranks", name, [rank])
    if inner is None:
        inner = list(found)
    return [found[name] for name in ["", *inner] if name in found]


def _is_held(fragment: Fragment) -> NDArray[np.bool_]:
    """Tensors of which the rank holds bytes."""
    made = np.zeros(len(fragment.index.tree.tensor_dtypes), bool)
    made[fragment.index.tree.region_tensors] = True
    made[fragment.replicas.tensors] = True
    return made


def _merge_tensors(
    leaves: Leaves, trees: Sequence[TreeSection], held: Sequence[NDArray[np.bool_]]
) -> None:
    """Number the tensors by first use; one tensor on some rank is one tensor."""
    representative = np.arange(len(leaves.names))
    if any(len(t.tensor_dtypes) != int((t.leaf_kinds != LEAF_VALUE).sum()) for t in trees):
        representative = _join_ties(leaves, trees)
    is_tensor = leaves.kinds != LEAF_VALUE
    leaves.first_leaf, rows = np.unique(representative[is_tensor], return_inverse=True)
    leaves.rows = np.cumsum(~is_tensor) - 1
    leaves.rows[is_tensor] = rows
    leaves.tensor_of = [
        leaves.rows[mine[tree.tensor_first_leaf]] for tree, mine in zip(trees, leaves.leaf_of)
    ]
    _check_ties(leaves, trees, held)
    _merge_shapes(leaves, trees)


def _join_ties(leaves: Leaves, trees: Sequence[TreeSection]) -> Rows:
    """Merged leaf -> the first leaf of its tensor."""
    made = np.arange(len(leaves.names))

    def first(leaf: int) -> int:
        while made[leaf] != leaf:
            leaf = int(made[leaf])
        return leaf

    for tree, mine in zip(trees, leaves.leaf_of):
        tensor_leaves = np.flatnonzero(tree.leaf_kinds != LEAF_VALUE)
        owners = mine[tree.tensor_first_leaf[tree.leaf_rows[tensor_leaves]]]
        tied = mine[tensor_leaves]
        for leaf, other in zip(*(c[owners != tied].tolist() for c in (tied, owners))):
            a, b = first(leaf), first(other)
            made[max(a, b)] = min(a, b)
    for leaf in np.flatnonzero(made != np.arange(len(made))).tolist():
        made[leaf] = first(leaf)
    return made


def _check_ties(
    leaves: Leaves, trees: Sequence[TreeSection], held: Sequence[NDArray[np.bool_]]
) -> None:
    """What is one tensor on a rank is not two on another, unless they have no bytes there: memory
    that is not there cannot be told apart."""
    for rank, (tree, tensors) in enumerate(zip(trees, leaves.tensor_of)):
        order = np.argsort(tensors, kind="stable")
        twice = np.flatnonzero(np.diff(tensors[order]) == 0)
        for position in twice.tolist():
            both = order[position : position + 2]
            if held[rank][both].all():
                leaf = int(leaves.leaf_of[rank][tree.tensor_first_leaf[both[1]]])
                _disagree("tied to another tensor, or not,", leaves, leaf, rank, "ranks-tie")


def _merge_shapes(leaves: Leaves, trees: Sequence[TreeSection]) -> None:
    """Dtypes and shapes, equal on all ranks that have the tensor."""
    count = len(leaves.first_leaf)
    known: dict[Dtype, int] = {}
    dtype_rows = [
        np.array([known.setdefault(d, len(known)) for d in t.dtypes], np.int64)[t.tensor_dtypes]
        if len(t.dtypes)
        else np.zeros(0, np.int64)
        for t in trees
    ]
    dtypes, ndims = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for tree, rows, mine in zip(reversed(trees), reversed(dtype_rows), reversed(leaves.tensor_of)):
        dtypes[mine], ndims[mine] = rows, tree.tensor_ndims
    at = starts(ndims)
    dims = np.zeros(int(at[-1]), np.uint64)
    for rank in reversed(range(len(trees))):
        tree, mine = trees[rank], leaves.tensor_of[rank]
        good = ndims[mine] == tree.tensor_ndims
        targets = ragged(at[mine[good]], ndims[mine[good]])
        dims[targets] = tree.tensor_dims[ragged(tree.dims_starts[:-1][good], ndims[mine[good]])]
    for rank, (tree, rows, mine) in enumerate(zip(trees, dtype_rows, leaves.tensor_of)):
        bad = (dtypes[mine] != rows) | (ndims[mine] != tree.tensor_ndims)
        if not bad.any():
            differs = dims[ragged(at[mine], ndims[mine])] != tree.tensor_dims
            bad[np.searchsorted(tree.dims_starts, np.flatnonzero(differs), "right") - 1] = True
        if bad.any():
            leaf = int(leaves.first_leaf[mine[np.argmax(bad)]])
            what = "a tensor has another dtype or shape"
            if leaves.kinds[leaf] != 0:
                what = "a plain value differs"
            _disagree(what, leaves, leaf, rank, "ranks-shape")
    table = {row: dtype for dtype, row in known.items()}
    used, first, inverse = np.unique(dtypes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    leaves.dtypes = tuple(table[row] for row in used[order].tolist())
    leaves.tensor_dtypes = place[inverse] if count else dtypes
    leaves.ndims, leaves.dims = ndims, dims


def _merge_attributes(leaves: Leaves, trees: Sequence[TreeSection]) -> None:
    """An attribute of several ranks is that of the lowest: they are ignorable."""
    leaves.leaf_attributes = _joined(
        [(tree.leaf_attributes, mine) for tree, mine in zip(trees, leaves.leaf_of)]
    )
    at = {row[0]: position for position, row in enumerate(leaves.containers)}
    leaves.container_attributes = _joined(
        [
            (tree.container_attributes, np.array([at[n] for n in tree.container_names], np.int64))
            for tree in trees
        ]
    )


def _joined(tables: Sequence[tuple[Mapping[str, Attribute], Rows]]) -> dict[str, Attribute]:
    made: dict[str, dict[int, bytes]] = {}
    for table, mine in tables:
        for key, attribute in table.items():
            into = made.setdefault(key, {})
            for row, value in zip(mine[attribute.rows].tolist(), attribute.values):
                into.setdefault(row, value)
    return {
        key: Attribute(np.array(sorted(rows), np.uint32), [rows[row] for row in sorted(rows)])
        for key, rows in made.items()
    }
