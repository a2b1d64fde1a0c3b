"""Reads a bundle: index, data files, names. Everything that can be checked without values is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import NotFoundError
from ckptfmt.foreign.base import ForeignTree, Importer
from ckptfmt.foreign.bundle.entries import check_size
from ckptfmt.foreign.bundle.graph import GRAPH_KEY, Node, parse_graph, record_in
from ckptfmt.foreign.bundle.index import BundleIndex, parse_index
from ckptfmt.foreign.bundle.names import name_plainly, settle
from ckptfmt.foreign.bundle.object_names import name_objects
from ckptfmt.foreign.bundle.paths import (
    INDEX_SUFFIX,
    data_path,
    find_prefix,
    missing_shards,
    read_index_bytes,
    resolve_prefix,
)
from ckptfmt.foreign.bundle.slices import slice_keys
from ckptfmt.foreign.bundle.tensors import BundleTensors, NameKeys
from ckptfmt.foreign.bundle.types import STRING, TYPES
from ckptfmt.foreign.bundle.values import DataFiles
from ckptfmt.foreign.sstable import corrupt
from ckptfmt.foreign.tree_record import with_record

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = "tensorbundle"
GRAPH_NBYTES_MAX = 1 << 30
_LISTED_MAX = 20


class TensorBundleImporter(Importer):
    """Row `tensorbundle` of IMPORTERS."""

    def detect(self, path: str) -> bool:
        return find_prefix(path) is not None

    def read(self, path: str) -> ForeignTree:
        prefix = resolve_prefix(path)
        name, opened = os.path.basename(prefix), prefix + INDEX_SUFFIX
        index = parse_index(read_index_bytes(prefix), name + INDEX_SUFFIX)
        files = _open_files(prefix, index)
        _check_ranges(index, files)
        for row in index.columns.wrong_sizes():
            if row not in index.sliced:
                where = f"{name}{INDEX_SUFFIX}, entry {ascii(index.names[row])[:200]}"
                check_size(index.columns.entry(row), where)
        rows = {key: row for row, key in enumerate(index.names)}
        nodes, text = _graph(index, files, rows.pop(GRAPH_KEY, -1))
        skipped = _skipped(index)
        rows = {key: row for key, row in rows.items() if key not in skipped} if skipped else rows
        named = name_objects(rows, nodes) if nodes else name_plainly(rows)
        settle(named, name)
        tensors = BundleTensors(index, files, rows, named)
        flat = ForeignTree(FORMAT, tensors, skipped=skipped, keys=NameKeys(tensors), file=opened)
        return with_record(flat, name, text)


def _open_files(prefix: str, index: BundleIndex) -> DataFiles:
    """The data files that hold a tensor. All that are missing are named."""
    missing = missing_shards(prefix, index.shards)
    if missing:
        more = f" and {len(missing) - _LISTED_MAX:,} more" if len(missing) > _LISTED_MAX else ""
        raise NotFoundError(
            f"{len(missing)} of {index.shards} data files are missing",
            reason="shards",
            where=f"{prefix}: {', '.join(missing[:_LISTED_MAX])}{more}",
            do="get the missing files",
        )
    used = np.unique(_ranges(index)[0]).tolist()
    paths = {shard: data_path(prefix, shard, index.shards) for shard in used}
    return DataFiles(paths, big_endian=index.big_endian)


def _ranges(index: BundleIndex) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(shards, starts, stops) of all that has bytes: whole tensors, then slices."""
    columns = index.columns
    has = columns.nbytes > 0
    has[list(index.sliced)] = False
    pieces = [entry for entry in index.slices.values() if entry.nbytes]
    table = np.array([(e.shard, e.offset, e.nbytes) for e in pieces], np.int64).reshape(-1, 3)
    shards = np.concatenate([columns.shards[has], table[:, 0]])
    starts = np.concatenate([columns.offsets[has], table[:, 1]])
    return shards, starts, starts + np.concatenate([columns.nbytes[has], table[:, 2]])


def _check_ranges(index: BundleIndex, files: DataFiles) -> None:
    """Every range lies in its file, and no two overlap: a small file cannot be a large checkpoint."""
    shards, starts, stops = _ranges(index)
    sizes = np.zeros(index.shards, np.int64)
    for shard, nbytes in files.sizes.items():
        sizes[shard] = nbytes
    for row in np.flatnonzero(stops > sizes[shards])[:1]:
        raise corrupt(
            "a tensor ends behind its file (truncated?)",
            "truncated",
            files.span(int(shards[row]), int(starts[row]), int(stops[row])),
            f"a file of at least {stops[row]} bytes",
            int(sizes[shards[row]]),
        )
    order = np.lexsort((stops, starts, shards))
    shards, starts, stops = shards[order], starts[order], stops[order]
    over = (shards[1:] == shards[:-1]) & (starts[1:] < stops[:-1])
    for row in np.flatnonzero(over)[:1] + 1:
        at = files.span(int(shards[row]), int(starts[row]), int(stops[row]))
        raise corrupt("two tensors overlap", "overlap", at)


def _skipped(index: BundleIndex) -> dict[str, str]:
    """What is not carried, with the reason."""
    without = [number for number, kind in TYPES.items() if not kind.dtype]
    types = index.columns.types
    skipped = {
        index.names[row]: f"dtype {TYPES[types.item(row)].name} has no values outside of TensorFlow"
        for row in np.flatnonzero(np.isin(types, without)).tolist()
    }
    claimed = {
        key for row, entry in index.sliced.items() for key in slice_keys(index.names[row], entry)
    }
    for key in index.slices.keys() - claimed:
        skipped[ascii(key)[2:-1]] = "slice of no tensor"
    return skipped


def _graph(index: BundleIndex, files: DataFiles, row: int) -> tuple[list[Node], str | None]:
    """The object graph, or nothing in a bundle that has none; and what an export added to it."""
    if row < 0:
        return [], None
    entry = index.entry(row)
    if entry.type != STRING or entry.shape or entry.slices:
        raise corrupt("the object graph is no string", "graph", index.names[row])
    if entry.nbytes > GRAPH_NBYTES_MAX:
        raise corrupt("the object graph is too long", "limit", files.where(entry))
    (data,) = files.fetch(entry, GRAPH_KEY).reshape(-1).tolist()
    where = f"{files.where(entry)}, object graph"
    return parse_graph(data, where), record_in(data, where)
