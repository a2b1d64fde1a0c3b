"""The `tree` section: all content of a checkpoint, and nothing about where bytes are.

Spec: 07-index.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ckptfmt.format.boxes import products, tiles
from ckptfmt.format.columns import (
    U8,
    U16,
    U32,
    U64,
    Column,
    Table,
    check_all,
    check_rows,
    corrupt,
    first_use_order,
    get_column,
    get_digests,
    get_list,
    get_map,
    pack_map,
    parse_map,
    ragged,
    starts,
)
from ckptfmt.format.digest import DIGEST_NBYTES
from ckptfmt.format.dtypes import Dtype, check_dtype
from ckptfmt.format.limits import (
    CHUNK_NBYTES_MAX,
    CHUNK_NBYTES_MIN,
    INT63_MAX,
    NAME_NBYTES_MAX,
    TENSOR_NBYTES_MAX,
    VALUE_NBYTES_MAX,
)

LEAF_TENSOR, LEAF_VALUE, LEAF_PACKED = 0, 1, 2

CONTAINER_KINDS = frozenset({"dict", "list", "tuple", "namedtuple", "odict", "defaultdict", "type"})


@dataclass(frozen=True, slots=True)
class Attribute:
    """Rows (leaf or container positions, ascending) and a packed value for each."""

    rows: Column
    values: list[bytes]


@dataclass(frozen=True)
class TreeSection:
    """Columns of the `tree` section, checked; derived columns are made on first use.

    `tensor_dims`, `region_origin` and `region_extent` are ragged: row r is
    `[starts[r], starts[r + 1])` of the flat column.
    """

    dtypes: tuple[Dtype, ...]
    leaf_names: list[str]
    leaf_kinds: Column
    leaf_rows: Column
    values: list[bytes]
    container_names: list[str]
    container_kinds: list[str]
    container_arguments: list[bytes]
    tensor_dtypes: Column
    tensor_ndims: Column
    tensor_dims: Column
    region_tensors: Column
    region_origins: Column
    region_extents: Column
    region_nchunks: Column
    chunk_raw: Column
    chunk_digests: Column
    leaf_attributes: Mapping[str, Attribute] = field(default_factory=dict)
    container_attributes: Mapping[str, Attribute] = field(default_factory=dict)

    @cached_property
    def dims_starts(self) -> Column:
        return starts(self.tensor_ndims)

    @cached_property
    def tensor_numel(self) -> Column:
        return products(self.tensor_ndims, self.tensor_dims, "$.tree.tensors.dims")

    @cached_property
    def tensor_is_empty(self) -> Column:
        """Tensors without elements, or without bytes (`str0`): they have no region."""
        hollow = np.array([d.bits == 0 and not d.is_variable for d in self.dtypes], bool)
        none = np.zeros(len(self.tensor_dtypes), bool)
        made: Column = (self.tensor_numel == 0) | (
            hollow[self.tensor_dtypes] if len(hollow) else none
        )
        return made

    @cached_property
    def tensor_region_starts(self) -> Column:
        """Regions of tensor t are [starts[t], starts[t + 1])."""
        counts = np.bincount(self.region_tensors, minlength=len(self.tensor_dtypes))
        return starts(counts)

    @cached_property
    def region_chunk_starts(self) -> Column:
        """Chunks of region r are [starts[r], starts[r + 1])."""
        return starts(self.region_nchunks)

    @cached_property
    def region_dims_starts(self) -> Column:
        return starts(self.tensor_ndims[self.region_tensors])

    @cached_property
    def region_nbytes(self) -> Column:
        """Raw bytes of each region."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.chunk_raw, dtype=np.int64)])
        at = self.region_chunk_starts
        made: Column = ends[at[1:]] - ends[at[:-1]]
        return made

    @cached_property
    def tensor_nbytes(self) -> Column:
        """Raw bytes of each tensor: the sum over its regions."""
        made = np.zeros(len(self.tensor_dtypes), np.int64)
        np.add.at(made, self.region_tensors, self.region_nbytes)
        return made

    @cached_property
    def leaf_positions(self) -> dict[str, int]:
        """Leaf name -> position; made on first use: it costs a third of a second per million."""
        return dict(zip(self.leaf_names, range(len(self.leaf_names))))

    @cached_property
    def tensor_first_leaf(self) -> Column:
        """Position of each tensor's first leaf."""
        made = np.zeros(len(self.tensor_dtypes), np.int64)
        positions = np.flatnonzero(self.leaf_kinds != LEAF_VALUE)[::-1]
        made[self.leaf_rows[positions]] = positions
        return made

    def shape(self, tensor: int) -> tuple[int, ...]:
        at = self.dims_starts
        return tuple(self.tensor_dims[at[tensor] : at[tensor + 1]].tolist())

    def dtype(self, tensor: int) -> Dtype:
        return self.dtypes[int(self.tensor_dtypes[tensor])]

    def box(self, region: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(origin, extent) of a region."""
        at = self.region_dims_starts
        rows = slice(int(at[region]), int(at[region + 1]))
        return tuple(self.region_origins[rows].tolist()), tuple(self.region_extents[rows].tolist())


def pack_tree(tree: TreeSection) -> bytes:
    """The section's raw bytes: key order and widths are fixed, so equal content gives equal bytes."""

    def attributes(table: Mapping[str, Attribute]) -> dict[str, Any]:
        return {
            key: {"rows": attribute.rows.astype(U32), "values": attribute.values}
            for key, attribute in sorted(table.items())
        }

    return pack_map(
        {
            "dtypes": {
                "name": [d.name for d in tree.dtypes],
                "bits": np.array([d.bits for d in tree.dtypes], U32),
            },
            "leaves": {
                "name": tree.leaf_names,
                "kind": tree.leaf_kinds.astype(U8),
                "row": tree.leaf_rows.astype(U32),
            },
            "values": tree.values,
            "containers": {
                "name": tree.container_names,
                "kind": tree.container_kinds,
                "argument": tree.container_arguments,
            },
            "tensors": {
                "dtype": tree.tensor_dtypes.astype(U16),
                "ndim": tree.tensor_ndims.astype(U8),
                "dims": tree.tensor_dims.astype(U64),
            },
            "regions": {
                "tensor": tree.region_tensors.astype(U32),
                "origin": tree.region_origins.astype(U64),
                "extent": tree.region_extents.astype(U64),
                "nchunks": tree.region_nchunks.astype(U32),
            },
            "chunks": {"raw": tree.chunk_raw.astype(U32), "digest": tree.chunk_digests},
            "attributes": {
                "leaves": attributes(tree.leaf_attributes),
                "containers": attributes(tree.container_attributes),
            },
        }
    )


def parse_tree(data: bytes | memoryview, algorithm: str) -> TreeSection:
    """Check and take the `tree` section.

    Raises:
        CorruptError: Any bound, order or relation between columns does not hold.
    """
    table = parse_map(data, "$.tree")
    leaves = get_map(table, "leaves", "$.tree")
    containers = get_map(table, "containers", "$.tree")
    tensors = get_map(table, "tensors", "$.tree")
    regions = get_map(table, "regions", "$.tree")
    chunks = get_map(table, "chunks", "$.tree")
    tree = TreeSection(
        dtypes=parse_dtypes(get_map(table, "dtypes", "$.tree"), "$.tree.dtypes"),
        leaf_names=get_list(leaves, "name", str, "$.tree.leaves"),
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
    _check_leaves(tree)
    _check_tensors(tree)
    check_regions(tree)
    _check_chunks(tree)
    return tree


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
            where = f"$.tree.attributes.{which}.{key}"
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


def _check_leaves(tree: TreeSection) -> None:
    names, kinds, rows = tree.leaf_names, tree.leaf_kinds, tree.leaf_rows
    check_rows("$.tree.leaves", len(names), kind=kinds, row=rows)
    if len(set(names)) != len(names):
        seen: set[str] = set()
        twice = next(n for n in names if n in seen or seen.add(n))  # type: ignore[func-returns-value]
        corrupt("duplicate name", "duplicate-name", "$.tree.leaves.name", found=repr(twice))
    if names and max(map(len, names)) > NAME_NBYTES_MAX:
        corrupt("name is too long", "name", "$.tree.leaves.name", f"at most {NAME_NBYTES_MAX}")
    check_all(
        kinds <= LEAF_PACKED, "unknown leaf kind", "column-range", "$.tree.leaves.kind", kinds
    )
    is_value = kinds == LEAF_VALUE
    for what, mine, count in (
        ("tensor", rows[~is_value], len(tree.tensor_dtypes)),
        ("value", rows[is_value], len(tree.values)),
    ):
        if not first_use_order(mine, count):
            corrupt(
                f"{what} rows are out of range or not numbered by first use",
                "order",
                "$.tree.leaves.row",
                f"0 to {count - 1}, each used",
            )
    for position, value in enumerate(tree.values):
        if len(value) > VALUE_NBYTES_MAX:
            corrupt(
                "value is too long",
                "value",
                f"$.tree.values[{position}]",
                VALUE_NBYTES_MAX,
                len(value),
            )
    count = len(tree.container_names)
    where = "$.tree.containers"
    check_rows(where, count, kind=tree.container_kinds, argument=tree.container_arguments)
    if len(set(tree.container_names)) != count:
        corrupt("duplicate name", "duplicate-name", f"{where}.name")


def _check_tensors(tree: TreeSection) -> None:
    count = len(tree.tensor_dtypes)
    check_rows("$.tree.tensors", count, ndim=tree.tensor_ndims)
    if not first_use_order(tree.tensor_dtypes, len(tree.dtypes)):
        corrupt(
            "dtype rows are out of range or not numbered by first use",
            "order",
            "$.tree.tensors.dtype",
            f"0 to {len(tree.dtypes) - 1}, each used",
        )
    numel = tree.tensor_numel
    # Of a string tensor each element has an offset of 64 bits at least.
    bits = np.array([d.bits or 64 for d in tree.dtypes], np.float64)
    if count and (numel * bits[tree.tensor_dtypes] / 8 >= float(TENSOR_NBYTES_MAX)).any():
        corrupt("tensor is too large", "dims-overflow", "$.tree.tensors.dims", "below 2^56 bytes")
    packed = tree.leaf_rows[tree.leaf_kinds == LEAF_PACKED]
    for row in packed.tolist():
        if tree.dtype(row).name != "uint8" or tree.tensor_ndims[row] != 1:
            corrupt(
                "packed value is no run of bytes",
                "value",
                f"$.tree.tensors[{row}]",
                "uint8 of one axis",
                f"{tree.dtype(row).name} of {tree.tensor_ndims[row]}",
            )


def check_regions(tree: TreeSection) -> None:
    """Regions stand by tensor, then origin, and tile each tensor exactly once."""
    count, where = len(tree.region_tensors), "$.tree.regions"
    check_rows(where, count, nchunks=tree.region_nchunks)
    owners = tree.region_tensors.astype(np.int64)
    if count and (int(owners.max()) >= len(tree.tensor_dtypes) or (np.diff(owners) < 0).any()):
        corrupt("region rows", "column-range", f"{where}.tensor", "ascending, each a tensor's row")
    flat = int(tree.region_dims_starts[-1])
    check_rows(where, flat, origin=tree.region_origins, extent=tree.region_extents)
    check_all(
        tree.region_nchunks >= 1,
        "region has no chunk",
        "column-range",
        f"{where}.nchunks",
        tree.region_nchunks,
    )
    per_tensor = np.diff(tree.tensor_region_starts)
    bad = (per_tensor == 0) != tree.tensor_is_empty
    if bad.any():
        row = int(np.argmax(bad))
        corrupt(
            "tensor without elements has a region, or one with elements has none",
            "regions",
            f"$.tree.tensors[{row}]",
        )
    single = np.repeat((per_tensor == 1)[owners], tree.tensor_ndims[owners]) if count else owners
    dims = _dims_of_regions(tree, owners)
    whole = (tree.region_origins == 0) & (tree.region_extents == dims)
    wrong = single.astype(bool) & ~whole
    if wrong.any():
        row = int(np.searchsorted(tree.region_dims_starts, int(np.argmax(wrong)), "right")) - 1
        corrupt("regions do not tile the tensor", "regions", f"{where}[{row}]")
    for tensor in np.flatnonzero(per_tensor > 1).tolist():
        _check_tiling(tree, tensor)


def _dims_of_regions(tree: TreeSection, owners: Column) -> Column:
    """The tensor's dims, repeated for each of its regions (flat, ragged like the origins)."""
    made: Column = tree.tensor_dims[ragged(tree.dims_starts[owners], tree.tensor_ndims[owners])]
    return made


def _check_tiling(tree: TreeSection, tensor: int) -> None:
    first, last = (int(x) for x in tree.tensor_region_starts[tensor : tensor + 2])
    ndim = int(tree.tensor_ndims[tensor])
    at = slice(int(tree.region_dims_starts[first]), int(tree.region_dims_starts[last]))
    origins = tree.region_origins[at].reshape(last - first, ndim)
    extents = tree.region_extents[at].reshape(last - first, ndim)
    where = f"$.tree.regions[{first}:{last}]"
    if tree.dtype(tensor).is_variable:
        corrupt("string tensor has several regions", "regions", where)
    rows = origins.tolist()
    if any(a >= b for a, b in itertools.pairwise(rows)):
        corrupt("regions are not sorted by origin", "order", where)
    dims = np.array(tree.shape(tensor), U64)
    if int(max(origins.max(), extents.max())) > INT63_MAX or not tiles(origins, extents, dims):
        corrupt(
            "regions do not tile the tensor",
            "regions",
            where,
            f"boxes that tile {tree.shape(tensor)}",
        )


def _check_chunks(tree: TreeSection) -> None:
    raw, where = tree.chunk_raw.astype(np.int64), "$.tree.chunks"
    at = tree.region_chunk_starts
    check_rows(where, len(raw), digest=tree.chunk_digests)
    if int(at[-1]) != len(raw):
        corrupt("chunks of another number", "column-length", where, int(at[-1]), len(raw))
    good = (raw >= 1) & (raw <= CHUNK_NBYTES_MAX)
    check_all(good, "chunk of a wrong length", "chunk-length", f"{where}.raw", raw)
    if len(raw) == 0:
        return
    region = np.repeat(np.arange(len(tree.region_nchunks)), tree.region_nchunks)
    first = raw[at[:-1]][region]
    last = np.zeros(len(raw), bool)
    last[at[1:] - 1] = True
    several = (tree.region_nchunks > 1)[region]
    good = np.where(last, raw <= first, raw == first)
    good &= ~several | (first % CHUNK_NBYTES_MIN == 0)
    check_all(good, "chunks of unequal length", "chunk-length", f"{where}.raw", raw)
    _check_region_nbytes(tree)


def _check_region_nbytes(tree: TreeSection) -> None:
    """Raw sizes of a region sum to its box; a string region holds at least its offsets."""
    volume = products(
        tree.tensor_ndims[tree.region_tensors], tree.region_extents, "$.tree.regions.extent"
    )
    owners = tree.tensor_dtypes[tree.region_tensors]
    bits = np.array([d.bits for d in tree.dtypes], np.int64)[owners]
    variable = np.array([d.is_variable for d in tree.dtypes], bool)[owners]
    exact = volume * (bits // 8) + (volume * (bits % 8) + 7) // 8
    good = np.where(variable, tree.region_nbytes >= 8 * (volume + 1), tree.region_nbytes == exact)
    check_all(
        good,
        "chunks do not sum to the region's box",
        "chunk-length",
        "$.tree.regions",
        tree.region_nbytes,
    )
