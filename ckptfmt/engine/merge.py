"""The fragments of all ranks as one index: boxes tile each tensor, replicas are equal. Pure.

Spec: 08-protocol §8.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.engine.merge_leaves import Leaves, merge_leaves, refuse
from ckptfmt.errors import CorruptError, MismatchError
from ckptfmt.format import (
    RAW,
    FilesSection,
    Fragment,
    Pipeline,
    PlacementSection,
    TreeSection,
    are_tiled,
    ragged,
    region_digest,
    starts,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Merged:
    """What the committer makes an index of."""

    tree: TreeSection
    files: FilesSection
    placement: PlacementSection


@dataclass(frozen=True, slots=True)
class Boxes:
    """All boxes that ranks hold: those they wrote, then those they did not, of each rank in turn.

    Attributes:
        tensors: The merged tensor of each.
        origins, extents: `(boxes, axes)`, zeros beyond a tensor's axes.
        ranks, rows: Whose it is, and its row among the rank's regions or replicas.
        written: Whether that rank wrote it.
        order: Sorted by tensor and origin, written ones before replicas, lower ranks first.
        group: For each position of `order`, a number; equal for one and the same box.
    """

    tensors: Rows
    origins: NDArray[np.uint64]
    extents: NDArray[np.uint64]
    ranks: Rows
    rows: Rows
    written: NDArray[np.bool_]
    order: Rows
    group: Rows

    @property
    def firsts(self) -> Rows:
        """Positions in `order` where a box stands for the first time."""
        made: Rows = np.flatnonzero(np.diff(self.group, prepend=-1))
        return made


def merge_fragments(fragments: Sequence[Fragment]) -> Merged:
    """Merge the fragments of all ranks, in rank order.

    Raises:
        MismatchError: Ranks disagree about a leaf (see `merge_leaves`), hold replicas that differ,
            or their boxes do not tile a tensor. The leaf and ranks are named.
    """
    leaves = merge_leaves(fragments)
    boxes = gather_boxes(fragments, leaves)
    _check_replicas(fragments, leaves, boxes)
    chosen = boxes.order[boxes.firsts]
    check_tiled(leaves, boxes)
    return _assemble(fragments, leaves, boxes, chosen)


def gather_boxes(fragments: Sequence[Fragment], leaves: Leaves) -> Boxes:
    """Every box that some rank holds, sorted."""
    width = max(int(leaves.ndims.max(initial=0)), 1)
    columns: dict[str, list[Any]] = {key: [] for key in ("t", "o", "e", "rank", "row", "w")}
    for rank, fragment in enumerate(fragments):
        tree, replicas = fragment.index.tree, fragment.replicas
        for tensors, origins, extents, written in (
            (tree.region_tensors, tree.region_origins, tree.region_extents, True),
            (replicas.tensors, replicas.origins, replicas.extents, False),
        ):
            ndims = tree.tensor_ndims[tensors].astype(np.int64)
            columns["t"].append(leaves.tensor_of[rank][tensors])
            columns["o"].append(_padded(origins, ndims, width))
            columns["e"].append(_padded(extents, ndims, width))
            columns["rank"].append(np.full(len(tensors), rank))
            columns["row"].append(np.arange(len(tensors)))
            columns["w"].append(np.full(len(tensors), written))
    joined = {key: np.concatenate(parts) for key, parts in columns.items()}
    tensors, origins, extents = joined["t"], joined["o"], joined["e"]
    keys = [joined["rank"], ~joined["w"], *extents.T[::-1], *origins.T[::-1], tensors]
    order = np.lexsort(keys)
    a, b = order[:-1], order[1:]
    new = (tensors[a] != tensors[b]) | (origins[a] != origins[b]).any(axis=1)
    new |= (extents[a] != extents[b]).any(axis=1)
    group = np.concatenate([np.zeros(min(len(order), 1), np.int64), np.cumsum(new)])
    return Boxes(
        tensors, origins, extents, joined["rank"], joined["row"], joined["w"], order, group
    )


def _padded(flat: Any, ndims: Rows, width: int) -> NDArray[np.uint64]:
    made = np.zeros((len(ndims), width), np.uint64)
    made[np.arange(width) < ndims[:, None]] = flat
    return made


def _check_replicas(fragments: Sequence[Fragment], leaves: Leaves, boxes: Boxes) -> None:
    """A replica is dropped only if its digest is that of the box that was written."""
    firsts = boxes.firsts
    alone = boxes.order[firsts]
    missing = alone[~boxes.written[alone]]
    if len(missing):
        box = int(missing[0])
        refuse(
            "nobody wrote this box, which a rank holds",
            "ranks-box",
            leaves.name_of(int(boxes.tensors[box])),
            [int(boxes.ranks[box])],
            expected=_box_text(boxes, box, leaves),
        )
    later = np.flatnonzero(np.diff(boxes.group, prepend=-1) == 0)
    digests: dict[int, bytes] = {}
    for position in later.tolist():
        box, first = int(boxes.order[position]), int(alone[boxes.group[position]])
        if first not in digests:
            digests[first] = _digest_of(fragments, boxes, first)
        if _digest_of(fragments, boxes, box) != digests[first]:
            _replica_differs(fragments, leaves, boxes, first)


def _digest_of(fragments: Sequence[Fragment], boxes: Boxes, box: int) -> bytes:
    fragment, row = fragments[int(boxes.ranks[box])], int(boxes.rows[box])
    if not boxes.written[box]:
        return bytes(fragment.replicas.digests[row].tobytes())
    tree = fragment.index.tree
    rows = slice(*tree.region_chunk_starts[row : row + 2].tolist())
    return region_digest(tree.chunk_digests[rows], fragment.index.header.algorithm)


def _replica_differs(
    fragments: Sequence[Fragment], leaves: Leaves, boxes: Boxes, first: int
) -> None:
    """Name the ranks whose content is not that of the first."""
    group = int(boxes.group[np.flatnonzero(boxes.order == first)[0]])
    members = boxes.order[boxes.group == group].tolist()
    expected = _digest_of(fragments, boxes, first)
    others = [b for b in members if _digest_of(fragments, boxes, b) != expected]
    leaf = int(leaves.first_leaf[int(boxes.tensors[first])])
    what = "a tensor that several ranks hold differs between them"
    if leaves.kinds[leaf] != 0:
        what = "a plain value differs on different ranks"
    ranks = [int(boxes.ranks[b]) for b in (first, *others[:8])]
    refuse(what, "ranks-replica", leaves.names[leaf], ranks, expected="equal bytes")


def _box_text(boxes: Boxes, box: int, leaves: Leaves) -> str:
    ndim = int(leaves.ndims[int(boxes.tensors[box])])
    pairs = zip(boxes.origins[box, :ndim].tolist(), boxes.extents[box, :ndim].tolist())
    return "[" + ", ".join(f"{begin}:{begin + length}" for begin, length in pairs) + "]"


def check_tiled(leaves: Leaves, boxes: Boxes) -> None:
    """Each element of each tensor is held, in one cut.

    Raises:
        MismatchError: kind `mismatch-ranks-tiling`.
    """
    chosen = boxes.order[boxes.firsts]
    owners = boxes.tensors[chosen]
    count = len(leaves.ndims)
    at = starts(leaves.ndims)
    hollow = np.array([d.bits == 0 and not d.is_variable for d in leaves.dtypes], bool)
    empty = hollow[leaves.tensor_dtypes] if count else np.zeros(0, bool)
    axis_owner = np.repeat(np.arange(count), leaves.ndims)
    empty[axis_owner[leaves.dims == 0]] = True
    held = np.bincount(owners, minlength=count)
    bad = (held == 0) & ~empty
    variable = np.array([d.is_variable for d in leaves.dtypes], bool)
    if count:
        bad |= variable[leaves.tensor_dtypes] & (held > 1)
    used = np.flatnonzero(held)
    ndims = leaves.ndims[owners]
    mask = np.arange(boxes.origins.shape[1]) < ndims[:, None]
    dims = leaves.dims[ragged(at[owners], ndims)]
    first = np.searchsorted(owners, used)
    if len(used):
        good = are_tiled(
            ndims, boxes.origins[chosen][mask], boxes.extents[chosen][mask], dims, first
        )
        bad[used[~good]] = True
    if bad.any():
        _refuse_tiling(leaves, boxes, int(np.argmax(bad)))


def _refuse_tiling(leaves: Leaves, boxes: Boxes, tensor: int) -> None:
    at = starts(leaves.ndims)
    shape = tuple(leaves.dims[at[tensor] : at[tensor + 1]].tolist())
    mine = np.flatnonzero(boxes.tensors == tensor)
    held = [f"rank {boxes.ranks[b]} {_box_text(boxes, int(b), leaves)}" for b in mine[:8]]
    raise MismatchError(
        "what the ranks hold does not cover the tensor exactly once",
        reason="ranks-tiling",
        where=repr(leaves.name_of(tensor)),
        expected=f"boxes that tile {shape}",
        found="; ".join(held) + ("; ..." if len(mine) > 8 else "") if held else "nothing",
        do="nothing was committed; check that all ranks of the group saved, with their own parts",
    )


def _assemble(fragments: Sequence[Fragment], leaves: Leaves, boxes: Boxes, chosen: Rows) -> Merged:
    """Columns of the chosen regions, gathered from the ranks that wrote them."""
    trees = [fragment.index.tree for fragment in fragments]
    placements = [fragment.index.placement for fragment in fragments]
    ranks, rows = boxes.ranks[chosen], boxes.rows[chosen]
    region_base = starts(np.array([len(t.region_tensors) for t in trees], np.int64))
    chunk_base = starts(np.array([len(t.chunk_raw) for t in trees], np.int64))
    nchunks = np.concatenate([t.region_nchunks for t in trees]).astype(np.int64)
    begins = np.concatenate(
        [t.region_chunk_starts[:-1] + base for t, base in zip(trees, chunk_base.tolist())]
    )
    regions = region_base[ranks] + rows
    chunks = ragged(begins[regions], nchunks[regions])
    ndims = leaves.ndims[boxes.tensors[chosen]]
    mask = np.arange(boxes.origins.shape[1]) < ndims[:, None]
    tree = leaves.tree(
        region_tensors=boxes.tensors[chosen],
        region_origins=boxes.origins[chosen][mask],
        region_extents=boxes.extents[chosen][mask],
        region_nchunks=nchunks[regions],
        chunk_raw=np.concatenate([t.chunk_raw for t in trees])[chunks],
        chunk_digests=np.concatenate([t.chunk_digests for t in trees])[chunks],
    )
    files, file_rows = _merge_files(fragments, chunks)
    pipelines, codecs = _merge_pipelines(placements)
    digests = None
    if codecs[chunks].any():
        digests = np.concatenate(
            [t.chunk_digests if p.digests is None else p.digests for t, p in zip(trees, placements)]
        )[chunks]
    placement = PlacementSection(
        files=file_rows,
        offsets=np.concatenate([p.offsets for p in placements])[chunks],
        stored=np.concatenate([p.stored for p in placements])[chunks],
        codecs=codecs[chunks],
        digests=digests,
        pipelines=pipelines,
    )
    return Merged(tree, files, placement)


def _merge_files(
    fragments: Sequence[Fragment], chunks: Rows
) -> tuple[FilesSection, NDArray[np.uint32]]:
    """The files that the chosen chunks are in, and the row of each chunk's."""
    sizes: dict[str, int] = {}
    for fragment in fragments:
        files = fragment.index.files
        for file, nbytes in zip(files.ids, files.nbytes.tolist()):
            if sizes.setdefault(file, nbytes) != nbytes:
                raise CorruptError(
                    "a data file has two sizes",
                    reason="fragment",
                    where=f"data/{file}",
                    expected=sizes[file],
                    found=nbytes,
                    do="nothing was committed; save again",
                )
    ids = sorted(sizes)
    place = {file: row for row, file in enumerate(ids)}
    rows = np.concatenate(
        [
            np.array([place[file] for file in f.index.files.ids], np.int64)[f.index.placement.files]
            for f in fragments
        ]
    )[chunks]
    used = np.unique(rows)
    files = FilesSection(
        [ids[row] for row in used.tolist()],
        np.array([sizes[ids[row]] for row in used.tolist()], np.uint64),
    )
    return files, np.searchsorted(used, rows).astype(np.uint32)


def _merge_pipelines(
    placements: Sequence[PlacementSection],
) -> tuple[tuple[Pipeline, ...], NDArray[np.uint8]]:
    known: dict[Pipeline, int] = {RAW: 0}
    columns = []
    for placement in placements:
        rows = [known.setdefault(pipeline, len(known)) for pipeline in placement.pipelines]
        columns.append(np.array(rows, np.uint8)[placement.codecs])
    return tuple(known), np.concatenate(columns)
