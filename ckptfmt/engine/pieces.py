"""plan: what one rank of several holds, piece by piece, and what of it that rank writes.

A *piece* is a box of a tensor that lies in this rank's memory: the whole of it, or a part. The plan
has a tensor row per piece, so that stage, encode and write work on pieces as on tensors.
Spec: 08-protocol §8.9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.engine.adapter import TensorSource
from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.engine.plan import SaveOptions, SavePlan, plan_save
from ckptfmt.engine.sources import Sources
from ckptfmt.engine.stage import stage_tensor
from ckptfmt.engine.tree import FlatTree
from ckptfmt.format import (
    PlacementSection,
    Replicas,
    TreeSection,
    digest_function,
    ragged,
    region_digest,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a rank holds.

    Attributes:
        plan: One tensor row per piece, whose dims are those of the whole tensor.
        tensor_of: Piece -> tensor of the rank's tree.
        first: Tensor -> its first piece.
        leaf_rows: As in the rank's tree: tensors, not pieces.
        leaves: How many leaves the tree has; the plan repeats some of them for further pieces.
    """

    plan: SavePlan
    tensor_of: Rows
    first: Rows
    leaf_rows: Rows
    leaves: int

    @property
    def held(self) -> NDArray[np.bool_]:
        """Pieces that have bytes."""
        made: NDArray[np.bool_] = np.diff(self.plan.tree.tensor_region_starts) > 0
        return made


def plan_pieces(flat: FlatTree, options: SaveOptions) -> Pieces:
    """Cut what a rank holds into regions and chunks, as `plan_save` does.

    Raises:
        UsageError: As `plan_save`.
    """
    if all(source.parts is None for _, source in flat.tensors.others()):
        plan = plan_save(flat, options)
        tensors = np.arange(len(flat.tensors))
        return Pieces(plan, tensors, tensors, np.array(flat.rows, np.int64), len(flat.rows))
    sources = Sources()
    origins: list[tuple[int, ...]] = []
    tensor_of: list[int] = []
    first: list[int] = []
    shapes = list(flat.tensors.shapes())
    hollow: dict[str, TensorSource] = {}
    for row, source in enumerate(flat.tensors.items):
        first.append(len(sources.items))
        none = (0,) * len(shapes[row])
        if not isinstance(source, TensorSource) or source.parts is None:
            sources.append(source)
            origins.append(none)
        elif source.parts:
            for part in sorted(source.parts, key=lambda part: part.origin):
                sources.append(part.source)
                origins.append(part.origin)
        else:  # none of it is here: its dtype and shape are told all the same
            dtype = source.dtype
            if dtype not in hollow:
                hollow[dtype] = TensorSource(dtype, (0,), partial(np.zeros, 0))
            sources.append(hollow[dtype])
            origins.append(none)
        tensor_of += [row] * (len(sources.items) - first[-1])
    plan = plan_save(_expanded(flat, sources, first, tensor_of), options)
    tree = plan.tree
    ndims = np.fromiter((len(shapes[row]) for row in tensor_of), np.uint8, len(tensor_of))
    whole = (d for row in tensor_of for d in shapes[row])
    dims = np.fromiter(whole, np.uint64, int(ndims.sum()))
    # From here on a tensor of which none is here has its own axes, a 0-d one none.
    tree = replace(tree, tensor_ndims=ndims, tensor_dims=dims)
    flat_origins = np.array([o for origin in origins for o in origin], np.uint64)
    owners = tree.region_tensors.astype(np.int64)
    at = ragged(tree.dims_starts[owners], tree.tensor_ndims[owners])
    moved = tree.region_origins + flat_origins[at] if len(at) else tree.region_origins
    plan = replace(plan, tree=replace(tree, region_origins=moved))
    rows = np.array(flat.rows, np.int64)
    return Pieces(plan, np.array(tensor_of, np.int64), np.array(first, np.int64), rows, len(rows))


def _expanded(flat: FlatTree, sources: Sources, first: list[int], tensor_of: list[int]) -> FlatTree:
    """The tree with a tensor per piece; a piece after a tensor's first gets a leaf of its name, by
    which codec and chunk size are chosen."""
    rows = [row if kind == 1 else first[row] for kind, row in zip(flat.kinds, flat.rows)]
    further = sorted(set(range(len(sources))) - set(first)) if len(sources) > len(first) else []
    names: dict[int, str] = {}
    if further:
        for name, kind, row in zip(flat.names, flat.kinds, flat.rows):
            if kind != 1:
                names.setdefault(row, name)
    return FlatTree(
        names=[*flat.names, *(names[tensor_of[piece]] for piece in further)],
        kinds=[*flat.kinds, *(0 for _ in further)],
        rows=[*rows, *further],
        values=flat.values,
        tensors=sources,
        containers=flat.containers,
        attributes=flat.attributes,
        container_attributes=flat.container_attributes,
    )


def owned_plan(pieces: Pieces, owned: NDArray[np.bool_]) -> SavePlan:
    """The plan of those pieces that this rank writes."""
    tree = pieces.plan.tree
    keep = owned[tree.region_tensors]
    if keep.all():
        return pieces.plan
    # Not as it lies in the arena: between what is written lies what others write.
    return replace(pieces.plan, tree=_regions(tree, np.flatnonzero(keep)), staged=None)


def _regions(tree: TreeSection, rows: Rows) -> TreeSection:
    """The tree with some of its regions, in this order."""
    boxes = ragged(tree.region_dims_starts[rows], np.diff(tree.region_dims_starts)[rows])
    chunks = ragged(tree.region_chunk_starts[rows], tree.region_nchunks[rows])
    return replace(
        tree,
        region_tensors=tree.region_tensors[rows],
        region_origins=tree.region_origins[boxes],
        region_extents=tree.region_extents[boxes],
        region_nchunks=tree.region_nchunks[rows],
        chunk_raw=tree.chunk_raw[chunks],
        chunk_digests=tree.chunk_digests[chunks],
    )


def fragment_tree(
    pieces: Pieces, plan: SavePlan, placement: PlacementSection
) -> tuple[TreeSection, PlacementSection]:
    """The rank's tree with the regions of `plan`, by tensor and origin, and where their chunks are."""
    tree = plan.tree
    owners = pieces.tensor_of[tree.region_tensors]
    order = _sorted_regions(tree, owners)
    chunks = ragged(tree.region_chunk_starts[order], tree.region_nchunks[order])
    made = _regions(tree, order)
    count = pieces.leaves
    ndims = tree.tensor_ndims[pieces.first]
    made = replace(
        made,
        names=tree.leaf_names[:count],
        leaf_kinds=tree.leaf_kinds[:count],
        leaf_rows=pieces.leaf_rows,
        tensor_dtypes=tree.tensor_dtypes[pieces.first],
        tensor_ndims=ndims,
        tensor_dims=tree.tensor_dims[ragged(tree.dims_starts[pieces.first], ndims)],
        region_tensors=owners[order],
    )
    digests = placement.digests
    return made, replace(
        placement,
        files=placement.files[chunks],
        offsets=placement.offsets[chunks],
        stored=placement.stored[chunks],
        codecs=placement.codecs[chunks],
        digests=None if digests is None else digests[chunks],
    )


def _sorted_regions(tree: TreeSection, owners: Rows) -> Rows:
    ndims = np.diff(tree.region_dims_starts)
    width = int(ndims.max(initial=0))
    origins = np.zeros((len(owners), width), np.uint64)
    origins[np.arange(width) < ndims[:, None]] = tree.region_origins
    return np.lexsort([*origins.T[::-1], owners])


def claim_replicas(pieces: Pieces, digest_nbytes: int) -> Replicas:
    """All pieces with bytes, as boxes whose content is not known yet."""
    held = np.flatnonzero(pieces.held)
    tree = pieces.plan.tree
    region = tree.tensor_region_starts[held]
    ndims = tree.tensor_ndims[held]
    origins = tree.region_origins[ragged(tree.region_dims_starts[region], ndims)]
    # A piece may be cut into several regions: its box is that of its source.
    extents = [d for piece in held.tolist() for d in pieces.plan.sources[piece].shape]
    return Replicas(
        pieces.tensor_of[held],
        origins,
        np.array(extents, np.uint64),
        np.zeros((len(held), digest_nbytes), np.uint8),
    )


def digest_replicas(pieces: Pieces, owned: NDArray[np.bool_]) -> Replicas:
    """The boxes that this rank holds and does not write, by the digest of their content."""
    plan, tree = pieces.plan, pieces.plan.tree
    algorithm = plan.options.digest
    function = digest_function(algorithm)
    sizes = tree.tensor_nbytes.tolist()
    digests: list[bytes] = []
    regions: list[int] = []
    with Threads() as threads:
        for piece in np.flatnonzero(pieces.held & ~owned).tolist():
            data = stage_tensor(
                plan.sources[piece], plan.names[piece], sizes[piece], plan.payloads.get(piece)
            )
            mine = range(*tree.tensor_region_starts[piece : piece + 2].tolist())
            chunks = range(
                int(tree.region_chunk_starts[mine.start]), int(tree.region_chunk_starts[mine.stop])
            )
            ends = np.cumsum(tree.chunk_raw[chunks.start : chunks.stop], dtype=np.int64).tolist()
            views = [data[a:b] for a, b in zip([0, *ends[:-1]], ends)]
            found = np.frombuffer(b"".join(threads.map(function, views)), np.uint8)
            rows = found.reshape(len(views), -1)
            for region in mine:
                begin, stop = (
                    tree.region_chunk_starts[region : region + 2] - chunks.start
                ).tolist()
                digests.append(region_digest(rows[begin:stop], algorithm))
                regions.append(region)
    return _replicas(pieces, np.array(regions, np.int64), digests)


def _replicas(pieces: Pieces, regions: Rows, digests: list[bytes]) -> Replicas:
    tree = pieces.plan.tree
    boxes = ragged(tree.region_dims_starts[regions], np.diff(tree.region_dims_starts)[regions])
    width = tree.chunk_digests.shape[1]
    return Replicas(
        pieces.tensor_of[tree.region_tensors[regions]],
        tree.region_origins[boxes],
        tree.region_extents[boxes],
        np.frombuffer(b"".join(digests), np.uint8).reshape(-1, width),
    )


def no_placement() -> PlacementSection:
    """Of a document without chunks."""
    none: NDArray[Any] = np.zeros(0, np.uint8)
    return PlacementSection(none, none, none, none, None, ((),))
