"""What must hold between the columns of a `tree` section. Spec: 07-index §7.6."""

from __future__ import annotations

import numpy as np

from ckptfmt.format.boxes import are_inside, are_tiled, products
from ckptfmt.format.columns import (
    Column,
    blocks,
    check_all,
    check_rows,
    check_unique,
    corrupt,
    first_use_order,
    is_count,
    ragged,
    starts,
)
from ckptfmt.format.limits import (
    CHUNK_NBYTES_MAX,
    CHUNK_NBYTES_MIN,
    INT63_MAX,
    TENSOR_NBYTES_MAX,
    VALUE_NBYTES_MAX,
)
from ckptfmt.format.tables import checked_names
from ckptfmt.format.tree_section import LEAF_PACKED, LEAF_VALUE, TreeSection


def check_tree(tree: TreeSection, *, whole: bool = True) -> None:
    """CorruptError unless every bound, order and relation between the columns holds.

    Args:
        whole: False for a fragment, whose regions need not tile their tensors (spec 08 §8.9).
    """
    _check_lengths(tree)
    _check_leaves(tree)
    _check_tensors(tree)
    volumes = _check_regions(tree, whole)
    _check_chunks(tree)
    _check_region_nbytes(tree, volumes)


def _check_lengths(tree: TreeSection) -> None:
    """Columns of one table have equal lengths (the ragged ones are counted where they are used)."""
    count = len(tree.names)
    check_rows("$.tree.leaves", count, kind=tree.leaf_kinds, row=tree.leaf_rows)
    kinds, arguments = tree.container_kinds, tree.container_arguments
    count = len(tree.container_names)
    check_rows("$.tree.containers", count, kind=kinds, argument=arguments)
    check_rows("$.tree.tensors", len(tree.tensor_dtypes), ndim=tree.tensor_ndims)
    check_rows("$.tree.regions", len(tree.region_tensors), nchunks=tree.region_nchunks)
    check_rows("$.tree.chunks", len(tree.chunk_raw), digest=tree.chunk_digests)


def _check_leaves(tree: TreeSection) -> None:
    kinds, rows = tree.leaf_kinds, tree.leaf_rows
    if isinstance(tree.names, list):
        checked_names(tree.names, "$.tree.leaves.name")
    check_all(
        kinds <= LEAF_PACKED, "unknown leaf kind", "column-range", "$.tree.leaves.kind", kinds
    )
    is_value = kinds == LEAF_VALUE
    for what, mine, count in (
        ("tensor", rows[~is_value] if is_value.any() else rows, len(tree.tensor_dtypes)),
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
    check_unique(tree.container_names, "$.tree.containers.name")


def _check_tensors(tree: TreeSection) -> None:
    count = len(tree.tensor_dtypes)
    if not first_use_order(tree.tensor_dtypes, len(tree.dtypes)):
        corrupt(
            "dtype rows are out of range or not numbered by first use",
            "order",
            "$.tree.tensors.dtype",
            f"0 to {len(tree.dtypes) - 1}, each used",
        )
    limits = [min((8 * TENSOR_NBYTES_MAX - 1) // max(d.bits, 1), INT63_MAX) for d in tree.dtypes]
    if count and int(tree.tensor_numel.max()) > min(limits):
        good = tree.tensor_numel <= np.array(limits, np.int64)[tree.tensor_dtypes]
        if not good.all():
            corrupt(
                "tensor is too large", "dims-overflow", "$.tree.tensors.dims", "below 2^62 bytes"
            )
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


def _check_regions(tree: TreeSection, must_tile: bool) -> Column:
    """Regions stand by tensor, then origin, and tile each tensor exactly once.

    Returns:
        Elements of each region.
    """
    count, where = len(tree.region_tensors), "$.tree.regions"
    check_all(
        tree.region_nchunks >= 1,
        "region has no chunk",
        "column-range",
        f"{where}.nchunks",
        tree.region_nchunks,
    )
    if _are_whole_tensors(tree):
        return tree.tensor_numel
    owners = tree.region_tensors.astype(np.int64)
    if count and (int(owners.max()) >= len(tree.tensor_dtypes) or (np.diff(owners) < 0).any()):
        corrupt("region rows", "column-range", f"{where}.tensor", "ascending, each a tensor's row")
    flat = int(tree.region_dims_starts[-1])
    check_rows(where, flat, origin=tree.region_origins, extent=tree.region_extents)
    per_tensor = np.diff(tree.tensor_region_starts)
    empty = tree.tensor_is_empty
    bad = (per_tensor == 0) != empty if must_tile else (per_tensor > 0) & empty
    if bad.any():
        row = int(np.argmax(bad))
        corrupt(
            "tensor without elements has a region, or one with elements has none",
            "regions",
            f"$.tree.tensors[{row}]",
        )
    dims = _dims_of_regions(tree, owners)
    # Nearly all tensors have one region, the whole of them.
    whole = (tree.region_origins == 0) & (tree.region_extents == dims)
    if not (whole.all() and (per_tensor <= 1).all()):
        _check_tilings(tree, dims, per_tensor, must_tile)
        return products(tree.tensor_ndims[owners], tree.region_extents, f"{where}.extent")
    volumes: Column = tree.tensor_numel[owners]
    return volumes


def _are_whole_tensors(tree: TreeSection) -> bool:
    """Each tensor is one region, the whole of it: then all of `_check_regions` holds."""
    return (
        len(tree.region_tensors) == len(tree.tensor_dtypes)
        and is_count(tree.region_tensors)
        and not tree.tensor_is_empty.any()
        and len(tree.region_origins) == len(tree.tensor_dims)
        and not tree.region_origins.any()
        and np.array_equal(tree.region_extents, tree.tensor_dims)
    )


def _dims_of_regions(tree: TreeSection, owners: Column) -> Column:
    """The tensor's dims, repeated for each of its regions (flat, ragged like the origins)."""
    made: Column = tree.tensor_dims[ragged(tree.dims_starts[owners], tree.tensor_ndims[owners])]
    return made


def _check_tilings(tree: TreeSection, dims: Column, per_tensor: Column, must_tile: bool) -> None:
    """Boxes stand by origin and tile their tensor; all tensors at once."""
    where = "$.tree.regions"
    owners, at = tree.region_tensors, tree.region_dims_starts
    variable = np.array([d.is_variable for d in tree.dtypes], bool)[tree.tensor_dtypes]
    _refuse_tensors(
        variable & (per_tensor > 1), "string tensor has several regions", "regions", where
    )
    inside = are_inside(tree.region_origins, tree.region_extents, dims)
    if not inside.all():
        row = int(np.searchsorted(at, int(np.argmin(inside)), "right")) - 1
        corrupt("region lies outside its tensor", "regions", f"{where}[{row}]")
    _check_order(tree)
    if not must_tile:
        return
    used = np.flatnonzero(per_tensor)
    good = np.ones(len(per_tensor), bool)
    good[used] = are_tiled(
        tree.tensor_ndims[owners],
        tree.region_origins,
        tree.region_extents,
        dims,
        tree.tensor_region_starts[used],
    )
    _refuse_tensors(~good, "regions do not tile the tensor", "regions", where)


def _refuse_tensors(bad: Column, what: str, reason: str, where: str) -> None:
    if bad.any():
        corrupt(what, reason, where, found=f"those of $.tree.tensors[{int(np.argmax(bad))}]")


def _check_order(tree: TreeSection) -> None:
    """Regions of one tensor ascend by origin, compared axis by axis."""
    at = tree.region_dims_starts
    ndim = np.diff(at)
    same = np.flatnonzero(np.diff(tree.region_tensors.astype(np.int64)) == 0) + 1
    here = ragged(at[same], ndim[same])
    before = here - np.repeat(ndim[same], ndim[same])
    steps = starts(ndim[same])
    differs = np.flatnonzero(tree.region_origins[here] != tree.region_origins[before])
    # The first axis on which a region's origin differs from that of the one before it.
    first = np.searchsorted(differs, steps[:-1])
    found = first < len(differs)
    axis = differs[np.minimum(first, max(len(differs) - 1, 0))] if len(differs) else first
    found &= axis < steps[1:]
    good = found.copy()
    chosen = axis[found]
    good[found] = tree.region_origins[here[chosen]] > tree.region_origins[before[chosen]]
    if not good.all():
        row = int(same[np.argmin(good)])
        corrupt("regions are not sorted by origin", "order", f"$.tree.regions[{row}]")


def _check_chunks(tree: TreeSection) -> None:
    raw, where = tree.chunk_raw, "$.tree.chunks"
    count = int(tree.region_nchunks.sum(dtype=np.int64))
    if count != len(raw):
        corrupt("chunks of another number", "column-length", where, count, len(raw))
    good = (raw >= 1) & (raw <= CHUNK_NBYTES_MAX)
    check_all(good, "chunk of a wrong length", "chunk-length", f"{where}.raw", raw)
    if count == len(tree.region_nchunks):  # one each, as none has less
        return
    raw, at = raw.astype(np.int64), tree.region_chunk_starts
    region = np.repeat(np.arange(len(tree.region_nchunks)), tree.region_nchunks)
    first = raw[at[:-1]][region]
    last = np.zeros(len(raw), bool)
    last[at[1:] - 1] = True
    several = (tree.region_nchunks > 1)[region]
    good = np.where(last, raw <= first, raw == first)
    good &= ~several | (first % CHUNK_NBYTES_MIN == 0)
    check_all(good, "chunks of unequal length", "chunk-length", f"{where}.raw", raw)


def _check_region_nbytes(tree: TreeSection, volume: Column) -> None:
    """Raw sizes of a region sum to its box; a string region holds at least its offsets."""
    widths = np.array([d.bits for d in tree.dtypes], np.int64)
    is_variable = np.array([d.is_variable for d in tree.dtypes], bool)
    for rows in blocks(len(volume)):
        owners = tree.tensor_dtypes[tree.region_tensors[rows]]
        bits, elements, nbytes = widths[owners], volume[rows], tree.region_nbytes[rows]
        # In this order no product passes 2^63, whatever the volume and the bits.
        exact = (elements >> 3) * bits + (((elements & 7) * bits + 7) >> 3)
        good = nbytes == exact
        if not good.all():
            good |= is_variable[owners] & (nbytes >> 3 > elements)
        if not good.all():
            row = rows.start + int(np.argmin(good))
            corrupt(
                "chunks do not sum to the region's box",
                "chunk-length",
                f"$.tree.regions[{row}]",
                found=tree.region_nbytes[row],
            )
