"""Fragments: what one rank of a save by several holds and has written. Spec: 08-protocol §8.9.

A fragment is an index document whose regions are those that its rank wrote; they need not tile
their tensors. What the rank holds and left to another is listed as *replicas*: boxes and the digest
of their content, by which the committer knows that both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptfmt.format.boxes import are_inside
from ckptfmt.format.columns import (
    U32,
    U64,
    Column,
    check_all,
    check_rows,
    corrupt,
    get_column,
    get_digests,
    get_map,
    get_scalar,
    ragged,
)
from ckptfmt.format.digests import DIGEST_NBYTES, digest
from ckptfmt.format.head import About
from ckptfmt.format.index import Index, pack_index, parse_index
from ckptfmt.format.placement import FilesSection, PlacementSection
from ckptfmt.format.tree_section import TreeSection, pack_tree

_KEY, _WHERE = "ckptfmt.fragment", "$.about.metadata['ckptfmt.fragment']"


@dataclass(frozen=True, slots=True)
class Replicas:
    """Boxes that a rank holds and did not write; `origins` and `extents` are ragged by tensor.

    `digests` are `region_digest` of each.
    """

    tensors: Column
    origins: Column
    extents: Column
    digests: Column


@dataclass(frozen=True, slots=True)
class Fragment:
    """A checked fragment of rank `rank` of `size`, which wrote `written_nbytes` of data files."""

    index: Index
    rank: int
    size: int
    written_nbytes: int
    replicas: Replicas


def region_digest(chunk_digests: Column, algorithm: str) -> bytes:
    """Digest of a region's content as it is cut: of its chunks' digests, one after another."""
    return digest(np.ascontiguousarray(chunk_digests).data, algorithm)


def pack_fragment(
    about: About,
    tree: TreeSection,
    replicas: Replicas,
    *,
    files: FilesSection,
    placement: PlacementSection,
    of: tuple[int, int, int],
) -> bytes:
    """A rank's document.

    Args:
        about: Name, step and txn are those of the save; `tree_digest` is filled in here.
        tree: Leaves in the rank's order; regions are those it wrote.
        of: The rank, how many there are, and the bytes of data files that it wrote.
    """
    packed = pack_tree(tree)
    metadata = {
        "rank": of[0],
        "size": of[1],
        "written_nbytes": of[2],
        "replicas": {
            "tensor": replicas.tensors.astype(U32).tobytes(),
            "origin": replicas.origins.astype(U64).tobytes(),
            "extent": replicas.extents.astype(U64).tobytes(),
            "digest": replicas.digests.tobytes(),
        },
    }
    about = replace(
        about, tree_digest=digest(packed, about.algorithm), metadata={_KEY: metadata}, metrics={}
    )
    return pack_index(about, files, placement, packed, about.txn, kept=False)


def parse_fragment(data: bytes | memoryview, where: str = "fragment") -> Fragment:
    """Check and take a rank's document.

    Raises:
        CorruptError: Anything that the spec says must hold does not.
        UnsupportedError: As for an index.
    """
    index = parse_index(data, where, whole=False)
    entry = index.about.metadata.get(_KEY)
    if not isinstance(entry, dict):
        corrupt("an index, but not a fragment", "fragment", where, f"metadata {_KEY!r}")
    rank, size, written = (
        get_scalar(entry, key, int, _WHERE) for key in ("rank", "size", "written_nbytes")
    )
    if not 0 <= rank < size < 1 << 31:
        corrupt("rank", "fragment", _WHERE, f"0 to {size - 1}", rank)
    replicas = _parse_replicas(get_map(entry, "replicas", _WHERE), index)
    return Fragment(index, rank, size, written, replicas)


def _parse_replicas(table: dict[str, Any], index: Index) -> Replicas:
    where, tree = f"{_WHERE}.replicas", index.tree
    tensors = get_column(table, "tensor", U32, where)
    origins = get_column(table, "origin", U64, where)
    extents = get_column(table, "extent", U64, where)
    digests = get_digests(table, "digest", DIGEST_NBYTES[index.header.algorithm], where)
    check_rows(where, len(tensors), digest=digests)
    good = tensors < len(tree.tensor_dtypes)
    check_all(good, "replica of no tensor", "column-range", f"{where}.tensor", tensors)
    ndims = tree.tensor_ndims[tensors]
    check_rows(where, int(ndims.sum()), origin=origins, extent=extents)
    dims = tree.tensor_dims[ragged(tree.dims_starts[tensors], ndims)]
    if not are_inside(origins, extents, dims).all():
        corrupt("replica lies outside its tensor", "regions", where)
    return Replicas(tensors, origins, extents, digests)
