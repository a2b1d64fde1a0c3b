"""The `tree` section: all content of a checkpoint, and nothing about where bytes are.

Spec: 07-index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ckptfmt.format.boxes import products
from ckptfmt.format.columns import (
    U8,
    U16,
    U32,
    U64,
    Column,
    pack_map,
    starts,
)
from ckptfmt.format.dtypes import Dtype
from ckptfmt.format.tables import PackedNames

LEAF_TENSOR, LEAF_VALUE, LEAF_PACKED = 0, 1, 2

CONTAINER_KINDS = frozenset({"dict", "list", "tuple", "namedtuple", "odict", "defaultdict", "type"})


@dataclass(frozen=True, slots=True)
class Attribute:
    """Rows (leaf or container positions, ascending) and a packed value for each."""

    rows: Column
    values: list[bytes]


@dataclass(frozen=True)
class TreeSection:
    """Columns of the `tree` section, checked; derived columns are made on first use, and so are the
    leaf names of an index that was opened: `names` has them as they came.

    `tensor_dims`, `region_origin` and `region_extent` are ragged: row r is
    `[starts[r], starts[r + 1])` of the flat column.
    """

    dtypes: tuple[Dtype, ...]
    names: list[str] | PackedNames
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
    def leaf_names(self) -> list[str]:
        """Of the leaves, in order; where they are packed, this unpacks and checks them.

        Raises:
            CorruptError: They are no names; the only thing that may still be found in a section
                that was parsed with `lazy=True`.
        """
        return self.names if isinstance(self.names, list) else self.names.names()

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
        made: Column = self.tensor_numel == 0
        if hollow.any():
            made |= hollow[self.tensor_dtypes]
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
        if len(self.chunk_raw) == len(self.region_nchunks):  # none has less than one
            return self.chunk_raw.astype(np.int64)
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
                "name": tree.names,
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
