"""plan: leaves -> chunks, sizes, order (save); wanted leaves -> byte ranges (restore). Pure.

Works on NumPy columns. Spec: 05-data-files, 07-index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.adapter import TensorSource
from ckptfmt.engine.arena import StagedMemory
from ckptfmt.engine.plan_cache import PLANS, Layout, Structure
from ckptfmt.engine.select import Matcher
from ckptfmt.engine.sources import Sources
from ckptfmt.engine.tree import FlatTree
from ckptfmt.errors import UsageError
from ckptfmt.format import (
    CHUNK_NBYTES_DEFAULT,
    CHUNK_NBYTES_MAX,
    CHUNK_NBYTES_MIN,
    DIGEST_NBYTES,
    SECTIONS_NBYTES_MAX,
    Attribute,
    Dtype,
    PackedNames,
    Pipeline,
    PlacementSection,
    TreeSection,
    dtype_named,
    dtype_of,
    pack_array,
    parse_codec,
    starts,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Codec = tuple[Pipeline, int | None]
Column: TypeAlias = "NDArray[np.generic]"


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What decides bytes: codec and chunk size (by leaf name, first match wins), digest, reuse."""

    codec: str | Mapping[str, str] = "raw"
    chunk_nbytes: int | Mapping[str, int] = CHUNK_NBYTES_DEFAULT
    digest: str = "xxh3-128"
    durable: bool = True
    encoded_region_nbytes: int | None = None
    """Cut regions that a codec may encode to about this size: where a file's chunks are kept in
    memory until its id is known."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Columns of the tree section, but for the digests (zeros until encode fills them in).

    Attributes:
        tree: The section; `chunk_digests` is a writable array.
        sources: One per tensor, in row order.
        payloads: Tensor row -> packed bytes, for strings, whose size is known only packed.
        codecs: Codec of each tensor, or one for all.
        names: First leaf name of each tensor.
        staged: The arena that holds the payloads, if they were staged.
        vouched: Tensor rows whose digests are those of a base: their bytes are not looked at.
    """

    tree: TreeSection
    sources: Sources
    payloads: Mapping[int, memoryview]
    codecs: Sequence[Codec]
    names: Sequence[str]
    options: SaveOptions
    staged: StagedMemory | None = None
    vouched: frozenset[int] = frozenset()


def dtype_of_source(source: TensorSource) -> Dtype:
    """The format's dtype of a source; an opaque one's bits are told by its array."""
    dtype = _named(source.dtype)
    return dtype_of(source.fetch()) if dtype is None else dtype


_named = lru_cache(maxsize=None)(dtype_named)


def packed_bytes(source: TensorSource, name: str) -> memoryview:
    """The packed bytes of a tensor, a view of its own memory where that has them.

    Raises:
        UsageError: kind `usage-memory`: there is no memory for the copy that it needs.
    """
    try:
        return pack_array(source.fetch())
    except MemoryError as error:
        raise UsageError(
            "no memory for a copy of this tensor",
            reason="memory",
            where=repr(name),
            found=f"{source.dtype} of shape {source.shape}",
            do="save what it is made of (a broadcast view is as large as its shape says), "
            "or a contiguous tensor, which needs no copy",
        ) from error


def plan_save(flat: FlatTree, options: SaveOptions) -> SavePlan:
    """Cut every tensor into one region and its chunks; no tensor's bytes are touched (strings
    excepted).

    Raises:
        UsageError: A chunk size or codec is not legal, or the index would pass 1 GiB.
    """
    _check_digest(options.digest)
    sources, names = flat.tensors, _first_names(flat)
    table, rows = _dtype_rows(sources)
    ndims, dims, numel = _shape_columns(sources)
    variable = np.array([d.is_variable for d in table], bool)[rows] & (numel > 0)
    payloads = {
        row: packed_bytes(sources[row], names[row]) for row in np.flatnonzero(variable).tolist()
    }
    packed = PackedNames.of(flat.names)
    structure = Structure(
        names=bytes(packed.packed),
        kinds=np.array(flat.kinds, np.uint8),
        rows=np.array(flat.rows, np.uint32),
        dtypes=table,
        tensor_dtypes=rows,
        ndims=ndims,
        dims=dims,
        nbytes=_tensor_nbytes(table, rows, numel, payloads),
        options=(
            _frozen(options.codec),
            _frozen(options.chunk_nbytes),
            options.digest,
            options.encoded_region_nbytes,
        ),
    )
    layout = PLANS.find(structure)
    if layout is None:
        layout = _lay_out(structure, names, options)
        PLANS.keep(structure, layout)
    tree = TreeSection(
        dtypes=table,
        names=packed,
        leaf_kinds=structure.kinds,
        leaf_rows=structure.rows,
        values=flat.values,
        container_names=[row[0] for row in flat.containers],
        container_kinds=[row[1] for row in flat.containers],
        container_arguments=[row[2] for row in flat.containers],
        tensor_dtypes=rows,
        tensor_ndims=ndims,
        tensor_dims=structure.dims,
        region_tensors=layout.region_tensors,
        region_origins=layout.region_origins,
        region_extents=layout.region_extents,
        region_nchunks=layout.region_nchunks,
        chunk_raw=layout.chunk_raw,
        chunk_digests=np.zeros((len(layout.chunk_raw), DIGEST_NBYTES[options.digest]), np.uint8),
        leaf_attributes=_attributes(flat.attributes),
        container_attributes=_attributes(flat.container_attributes),
    )
    return SavePlan(tree, sources, payloads, layout.codecs, names, options)


def _frozen(choice: object) -> object:
    """An option that the caller cannot change any more; of a mapping the order counts."""
    return tuple(choice.items()) if isinstance(choice, Mapping) else choice


def _shape_columns(
    sources: Sources,
) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.int64]]:
    """ndim and dims of each tensor, and its elements; a few tuples at a time, for all of them would
    set off the garbage collector."""
    ndims: list[int] = []
    dims: list[int] = []
    numel: list[int] = []
    shapes = sources.shapes()
    while some := list(islice(shapes, _SHAPES)):
        ndims += map(len, some)
        dims += chain.from_iterable(some)
        numel += map(math.prod, some)
    return np.array(ndims, np.uint8), np.array(dims, np.uint64), np.array(numel, np.int64)


_SHAPES = 500


def _lay_out(structure: Structure, names: Sequence[str], options: SaveOptions) -> Layout:
    """Regions and chunks of every tensor."""
    nbytes, ndims, dims = structure.nbytes, structure.ndims, structure.dims
    chunk_nbytes = _chunk_nbytes(options.chunk_nbytes, names, len(nbytes))
    codecs = _codecs(options.codec, names)
    cuts = _cuts(structure, codecs, options.encoded_region_nbytes)
    regions = _plan_regions(ndims, dims, nbytes, cuts)
    chunk_nbytes = chunk_nbytes[regions.owners]
    nchunks = -(-regions.nbytes // chunk_nbytes)
    _check_size(len(structure.kinds), len(structure.names), int(nchunks.sum()), options.digest)
    return Layout(
        region_tensors=regions.owners.astype(np.uint32),
        region_origins=regions.origins,
        region_extents=regions.extents,
        region_nchunks=nchunks.astype(np.uint32),
        chunk_raw=_cut(regions.nbytes, chunk_nbytes, nchunks).astype(np.uint32),
        codecs=codecs,
    )


def _dtype_rows(sources: Sources) -> tuple[tuple[Dtype, ...], NDArray[np.uint16]]:
    """The dtypes by first use, and each tensor's. Each is looked up once: a million look-ups of
    dtypes would take half a second."""
    found = sources.dtypes()
    ids = list(map(id, found))
    first = dict(zip(reversed(ids), range(len(ids) - 1, -1, -1)))
    table: dict[Dtype, int] = {}
    if any(_is_opaque(found[position]) for position in first.values()):
        rows = [table.setdefault(dtype_of_source(source), len(table)) for source in sources]
    else:
        known = {
            key: table.setdefault(dtype_of_source(sources[position]), len(table))
            for key, position in sorted(first.items(), key=itemgetter(1))
        }
        rows = list(map(known.__getitem__, ids))
    return tuple(table), np.array(rows, np.uint16)


def _is_opaque(dtype: str | np.dtype[Any]) -> bool:
    """A name that does not tell its bits: each tensor of it is asked."""
    return isinstance(dtype, str) and _named(dtype) is None


def _check_digest(algorithm: str) -> None:
    if algorithm not in DIGEST_NBYTES:
        raise UsageError(
            "unknown digest",
            reason="digest",
            expected=" or ".join(DIGEST_NBYTES),
            found=repr(algorithm),
            do="choose one of these",
        )


def _first_names(flat: FlatTree) -> list[str]:
    if flat.rows == list(range(len(flat.tensors))) and not flat.values:
        return flat.names  # no leaf is a value, and none is tied
    names = [""] * len(flat.tensors)
    for name, kind, row in zip(reversed(flat.names), reversed(flat.kinds), reversed(flat.rows)):
        if kind != 1:
            names[row] = name
    return names


def _tensor_nbytes(
    table: Sequence[Dtype],
    rows: NDArray[np.uint16],
    numel: NDArray[np.int64],
    payloads: Mapping[int, memoryview],
) -> NDArray[np.int64]:
    bits = np.array([d.bits for d in table], np.int64)
    nbytes = (numel * bits[rows] + 7) // 8 if len(table) else numel
    for row, payload in payloads.items():
        nbytes[row] = len(payload)
    made: NDArray[np.int64] = nbytes
    return made


@dataclass(frozen=True, slots=True)
class _Regions:
    owners: NDArray[np.int64]
    origins: NDArray[np.uint64]
    extents: NDArray[np.uint64]
    nbytes: NDArray[np.int64]


def _plan_regions(
    ndims: NDArray[np.uint8],
    dims: NDArray[np.uint64],
    nbytes: NDArray[np.int64],
    cuts: Mapping[int, tuple[int, int]],
) -> _Regions:
    """A region for every tensor that has bytes; several of `rows` along `axis` where `cuts` says."""
    keep = nbytes > 0
    at = starts(ndims)
    if not cuts:
        extents = dims[np.repeat(keep, ndims)]
        owners = np.flatnonzero(keep).astype(np.int64)
        return _Regions(owners, np.zeros(len(extents), np.uint64), extents, nbytes[keep])
    owned: list[int] = []
    origins: list[int] = []
    extents_list: list[int] = []
    sizes: list[int] = []
    for tensor in np.flatnonzero(keep).tolist():
        shape = dims[at[tensor] : at[tensor + 1]].tolist()
        axis, rows = cuts.get(tensor, (0, shape[0] if shape else 1))
        length = shape[axis] if shape else 1
        for begin in range(0, length, rows):
            stop = min(begin + rows, length)
            owned.append(tensor)
            origins += [begin if d == axis else 0 for d in range(len(shape))]
            extents_list += [stop - begin if d == axis else n for d, n in enumerate(shape)]
            sizes.append(int(nbytes[tensor]) * (stop - begin) // length)
    return _Regions(
        np.array(owned, np.int64),
        np.array(origins, np.uint64),
        np.array(extents_list, np.uint64),
        np.array(sizes, np.int64),
    )


def _cuts(
    structure: Structure, codecs: Sequence[Codec], limit: int | None
) -> dict[int, tuple[int, int]]:
    """Tensor -> (axis, rows of a region), for those that are cut along their first axis over 1."""
    made: dict[int, tuple[int, int]] = {}
    if limit is None:
        return made
    nbytes, at = structure.nbytes, starts(structure.ndims)
    for tensor in np.flatnonzero(nbytes > limit).tolist():
        shape = structure.dims[at[tensor] : at[tensor + 1]].tolist()
        dtype = structure.dtypes[structure.tensor_dtypes[tensor]]
        axis = next((a for a, d in enumerate(shape) if d > 1), None)
        if axis is None or dtype.is_variable or codecs[tensor][0] == ():
            continue
        if dtype.bits * (math.prod(shape) // shape[axis]) % 8:
            continue  # a row that ends inside a byte: each region packs for itself
        row_nbytes = int(nbytes[tensor]) // shape[axis]
        made[tensor] = axis, max(1, limit // row_nbytes)
    return made


def _cut(
    nbytes: NDArray[np.int64], chunk_nbytes: NDArray[np.int64], nchunks: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The raw size of each chunk of regions of `nbytes`."""
    raw = np.repeat(chunk_nbytes, nchunks)
    if len(nbytes):
        raw[np.cumsum(nchunks) - 1] = nbytes - (nchunks - 1) * chunk_nbytes
    return raw


def _chunk_nbytes(
    choice: int | Mapping[str, int], names: Sequence[str], count: int
) -> NDArray[np.int64]:
    rules = dict(choice) if isinstance(choice, Mapping) else {"**": choice}
    for nbytes in rules.values():
        if (
            type(nbytes) is not int
            or not CHUNK_NBYTES_MIN <= nbytes <= CHUNK_NBYTES_MAX
            or nbytes % CHUNK_NBYTES_MIN
        ):
            raise UsageError(
                "chunk_nbytes is not legal",
                reason="chunk-nbytes",
                expected="a multiple of 4096 from 4 KiB to 1 GiB",
                found=repr(nbytes),
                do="choose such a size",
            )
    if not isinstance(choice, Mapping):
        return np.full(count, choice, np.int64)
    made = np.full(count, CHUNK_NBYTES_DEFAULT, np.int64)
    for position, found in enumerate(_first_match(rules, names)):
        if found is not None:
            made[position] = rules[found]
    return made


def _codecs(choice: str | Mapping[str, str], names: Sequence[str]) -> Sequence[Codec]:
    if not isinstance(choice, Mapping):
        return [parse_codec(choice)] * len(names)
    parsed = {select: parse_codec(text) for select, text in choice.items()}
    raw = parse_codec("raw")
    return [raw if f is None else parsed[f] for f in _first_match(parsed, names)]


def _first_match(rules: Mapping[str, object], names: Sequence[str]) -> list[str | None]:
    matchers = {select: Matcher(select) for select in rules}
    found = [next((s for s, m in matchers.items() if m(name)), None) for name in names]
    for select, matcher in matchers.items():
        if names and not any(matcher(name) for name in names):
            raise UsageError(
                "pattern matches no leaf",
                reason="pattern",
                where=repr(select),
                do="check it against the leaf names",
            )
    return found


def _attributes(table: Mapping[str, Sequence[tuple[int, bytes]]]) -> dict[str, Attribute]:
    made = {}
    for key, pairs in table.items():
        ordered = sorted(pairs)
        made[key] = Attribute(
            np.array([row for row, _ in ordered], np.uint32), [value for _, value in ordered]
        )
    return made


def _check_size(nleaves: int, name_nbytes: int, nchunks: int, digest: str) -> None:
    row = 4 + 2 * DIGEST_NBYTES[digest] + 17
    estimate = name_nbytes + nleaves * 10 + nchunks * row
    if estimate > SECTIONS_NBYTES_MAX:
        raise UsageError(
            "the index would be too large",
            reason="index-size",
            expected=f"at most {SECTIONS_NBYTES_MAX} bytes",
            found=f"about {estimate} bytes for {nchunks} chunks",
            do="raise chunk_nbytes",
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of one data file that is read into one buffer.

    Attributes:
        file: Row in the index's `files`.
        start, stop: Bytes of the file, end-exclusive.
        chunks: Chunk rows inside, by offset.
    """

    file: int
    start: int
    stop: int
    chunks: NDArray[np.int64]


GAP_NBYTES = 64 << 10
"""Reading on over a gap of this size costs less than another request."""
RUN_NBYTES = 256 << 20
"""A buffer that lives as long as any array in it is at most this large, unless a region is larger."""


def plan_runs(
    placement: PlacementSection,
    chunks: NDArray[np.int64],
    *,
    gap_nbytes: int = GAP_NBYTES,
    run_nbytes: int = RUN_NBYTES,
    groups: NDArray[np.int64] | None = None,
) -> list[Run]:
    """Join the ranges of the wanted chunks into runs, reading no byte twice.

    Args:
        placement: Already checked: every range lies inside its file, none overlap in part.
        chunks: Chunk rows, any order, no row twice.
        groups: For each of `chunks` a region number; a run is not cut inside one if it can be
            avoided: neighbours of one group stay together.
    """
    if len(chunks) == 0:
        return []
    files = placement.files[chunks].astype(np.int64)
    offsets = placement.offsets[chunks].astype(np.int64)
    ends = offsets + placement.stored[chunks]
    order = np.lexsort((chunks, offsets, files))
    files, offsets, ends, rows = files[order], offsets[order], ends[order], chunks[order]
    breaks = np.empty(len(rows), bool)
    breaks[0] = True
    breaks[1:] = (files[1:] != files[:-1]) | (offsets[1:] - ends[:-1] > gap_nbytes)
    inside = None if groups is None else groups[order][1:] == groups[order][:-1]
    runs, first = [], 0
    bounds = [*np.flatnonzero(breaks)[1:].tolist(), len(rows)]
    for bound in bounds:
        while first < bound:
            last = (
                int(np.searchsorted(ends[first:bound], offsets[first] + run_nbytes, "right"))
                + first
            )
            last = max(last, first + 1)
            while inside is not None and last < bound and inside[last - 1]:
                last += 1
            runs.append(
                Run(int(files[first]), int(offsets[first]), int(ends[last - 1]), rows[first:last])
            )
            first = last
    return runs
