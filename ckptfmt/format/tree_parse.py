"""Bytes to a checked `tree` section. Spec: 07-index."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptfmt.format.columns import (
    U8,
    U16,
    U32,
    U64,
    Table,
    check_rows,
    corrupt,
    get_column,
    get_digests,
    get_list,
    get_map,
)
from ckptfmt.format.digests import DIGEST_NBYTES
from ckptfmt.format.dtypes import Dtype, check_dtype
from ckptfmt.format.tables import PackedNames, parse_tables
from ckptfmt.format.tree_rules import check_tree
from ckptfmt.format.tree_section import Attribute, TreeSection


def parse_tree(
    data: bytes | memoryview, algorithm: str, *, lazy: bool = False, whole: bool = True
) -> TreeSection:
    """Check and take the `tree` section; its columns are views of `data`.

    Args:
        lazy: Leave the names of the leaves packed until they are asked for, and checked then: for
            a million tensors that is half of the time.
        whole: False for a fragment, whose regions need not tile their tensors (spec 08 §8.9).
    Raises:
        CorruptError: Any bound, order or relation between columns does not hold.
    """
    table = parse_tables(data, "$.tree", packed=_LAZY if lazy else ())
    leaves = get_map(table, "leaves", "$.tree")
    containers = get_map(table, "containers", "$.tree")
    tensors = get_map(table, "tensors", "$.tree")
    regions = get_map(table, "regions", "$.tree")
    chunks = get_map(table, "chunks", "$.tree")
    tree = TreeSection(
        dtypes=parse_dtypes(get_map(table, "dtypes", "$.tree"), "$.tree.dtypes"),
        names=_parse_names(leaves),
        leaf_kinds=get_column(leaves, "kind", U8, "$.tree.leaves"),
        leaf_rows=get_column(leaves, "row", U32, "$.tree.leaves"),
        values=get_list(table, "values", bytes, "$.tree"),
        container_names=get_list(containers, "name", str, "$.tree.containers"),
        container_kinds=get_list(containers, "kind", str, "$.tree.containers"),
        container_arguments=get_list(containers, "argument", bytes, "$.tree.containers"),
        tensor_dtypes=get_column(tensors, "dtype", U16, "$.tree.tensors"),
        tensor_ndims=get_column(tensors, "ndim", U8, "$.tree.tensors"),
        tensor_dims=get_column(tensors, "dims", U64, "$.tree.tensors"),
        region_tensors=get_column(regions, "tensor", U32, "$.tree.regions"),
        region_origins=get_column(regions, "origin", U64, "$.tree.regions"),
        region_extents=get_column(regions, "extent", U64, "$.tree.regions"),
        region_nchunks=get_column(regions, "nchunks", U32, "$.tree.regions"),
        chunk_raw=get_column(chunks, "raw", U32, "$.tree.chunks"),
        chunk_digests=get_digests(chunks, "digest", DIGEST_NBYTES[algorithm], "$.tree.chunks"),
        **_parse_attributes(table, len(leaves["name"]), len(containers["name"])),
    )
    check_tree(tree, whole=whole)
    return tree


_LAZY = frozenset(["$.tree.leaves.name"])


def _parse_names(leaves: Table) -> list[str] | PackedNames:
    value = leaves.get("name")
    if isinstance(value, PackedNames):
        return value
    return get_list(leaves, "name", str, "$.tree.leaves")


def parse_dtypes(table: Table, where: str) -> tuple[Dtype, ...]:
    """The `dtypes` table. CorruptError if a known name has other bits, or a name stands twice."""
    names = get_list(table, "name", str, where)
    bits = get_column(table, "bits", U32, where)
    check_rows(where, len(names), bits=bits)
    if len(set(names)) != len(names):
        corrupt("dtype stands twice", "dtype", where)
    made = tuple(Dtype(name, int(b)) for name, b in zip(names, bits))
    for dtype in made:
        check_dtype(dtype, where)
    return made


def _parse_attributes(table: Table, nleaves: int, ncontainers: int) -> dict[str, Any]:
    if "attributes" not in table:
        return {}
    both = get_map(table, "attributes", "$.tree")
    made: dict[str, Any] = {}
    for which, count in (("leaves", nleaves), ("containers", ncontainers)):
        if which not in both:
            continue
        found = {}
        for key in get_map(both, which, "$.tree.attributes"):
            where = f"$.tree.attributes.{which}.{ascii(key)[1:-1]}"
            entry = get_map(both[which], key, f"$.tree.attributes.{which}")
            rows = get_column(entry, "rows", U32, where)
            values = get_list(entry, "values", bytes, where)
            check_rows(where, len(rows), values=values)
            if len(rows) and (
                int(rows.max()) >= count or (np.diff(rows.astype(np.int64)) < 1).any()
            ):
                corrupt("attribute rows", "column-range", where, f"ascending, below {count}")
            found[key] = Attribute(rows, values)
        made["leaf_attributes" if which == "leaves" else "container_attributes"] = found
    return made
