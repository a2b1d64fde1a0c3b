"""The `files` and `placement` sections: where the bytes are. Spec: 07-index."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.format.columns import (
    U8,
    U32,
    U64,
    Column,
    blocks,
    check_all,
    check_rows,
    corrupt,
    get_column,
    get_digests,
    pack_map,
    parse_map,
)
from ckptfmt.format.digests import DIGEST_NBYTES
from ckptfmt.format.limits import (
    ALIGN_NBYTES,
    BLOCK_NBYTES,
    INT63_MAX,
    PIPELINE_LENGTH_MAX,
    PIPELINES_MAX,
)
from ckptfmt.format.tables import parse_tables

if TYPE_CHECKING:
    from ckptfmt.format.codecs import Pipeline
    from ckptfmt.format.tree_section import TreeSection


@dataclass(frozen=True, slots=True)
class FilesSection:
    """Every file that decoding touches: ids (hex), sorted, and their sizes."""

    ids: list[str]
    nbytes: Column


@dataclass(frozen=True, slots=True)
class PlacementSection:
    """A row per chunk: which file, at which offset, how many stored bytes, by which pipeline.

    `digests` are those of the stored bytes; None where every chunk is raw (then a chunk's stored
    digest is its raw digest).
    """

    files: Column
    offsets: Column
    stored: Column
    codecs: Column
    digests: Column | None
    pipelines: tuple[Pipeline, ...]


def pack_files(files: FilesSection) -> bytes:
    """The section's bytes; this encoding never changes within major 1."""
    ids = b"".join(bytes.fromhex(text) for text in files.ids)
    return pack_map({"id": ids, "nbytes": files.nbytes.astype(U64)})


def parse_files(data: bytes | memoryview, algorithm: str) -> FilesSection:
    """Check and take the `files` section; it needs no other section."""
    table = parse_map(data, "$.files")
    ids = get_digests(table, "id", DIGEST_NBYTES[algorithm], "$.files")
    nbytes = get_column(table, "nbytes", U64, "$.files")
    check_rows("$.files", len(ids), nbytes=nbytes)
    texts = [row.tobytes().hex() for row in ids]
    if any(a >= b for a, b in itertools.pairwise(texts)):
        corrupt("file ids are not sorted, or one stands twice", "order", "$.files.id")
    good = (nbytes >= BLOCK_NBYTES) & (nbytes % BLOCK_NBYTES == 0) & (nbytes <= INT63_MAX)
    check_all(good, "file of a wrong size", "column-range", "$.files.nbytes", nbytes)
    return FilesSection(texts, nbytes)


def pack_placement(placement: PlacementSection) -> bytes:
    """The section's raw bytes."""
    table: dict[str, Any] = {
        "file": placement.files.astype(U32),
        "offset": placement.offsets.astype(U64),
        "stored": placement.stored.astype(U32),
        "codec": placement.codecs.astype(U8),
        "pipelines": pack_pipelines(placement.pipelines),
    }
    if placement.digests is not None:
        table["digest"] = placement.digests
    return pack_map(table)


def pack_pipelines(pipelines: Iterable[Pipeline]) -> list[list[list[str | int]]]:
    """Pipelines as msgpack has them."""
    return [[list(stage) for stage in pipeline] for pipeline in pipelines]


def parse_pipelines(value: object, where: str) -> tuple[Pipeline, ...]:
    """Pipelines, pipeline 0 being raw. Unknown codecs pass: they matter only to who decodes."""
    if not isinstance(value, list) or not 1 <= len(value) <= PIPELINES_MAX or value[0] != []:
        corrupt("codec pipelines", "pipeline", where, f"1 to {PIPELINES_MAX}, the first empty")
    made: list[Pipeline] = []
    for pipeline in value:
        good = (
            isinstance(pipeline, list)
            and bool(made) <= len(pipeline) <= PIPELINE_LENGTH_MAX  # only the first is raw
            and all(
                isinstance(stage, list) and stage and type(stage[0]) is str for stage in pipeline
            )
            and all(type(item) in (str, int) for stage in pipeline for item in stage)
        )
        if not good:
            corrupt(
                "codec pipeline",
                "pipeline",
                f"{where}[{len(made)}]",
                f"at most {PIPELINE_LENGTH_MAX} stages [name, parameters...]",
            )
        made.append(tuple(tuple(stage) for stage in pipeline))
    return tuple(made)


def check_raw_digests(codecs: Column, stored: Column, raw: Column, where: str) -> None:
    """A raw chunk's stored digest is its raw digest: readers check its bytes against one of them."""
    good = (codecs != 0) | (stored == raw).all(axis=1)
    check_all(good, "raw chunk of two digests", "chunk-digest", where, codecs)


def parse_placement(
    data: bytes | memoryview, algorithm: str, tree: TreeSection, files: FilesSection
) -> PlacementSection:
    """Check and take the `placement` section against the chunks and files it places.

    Raises:
        CorruptError: A chunk lies outside its file, or two overlap without being the same range.
    """
    table = parse_tables(data, "$.placement")
    where = "$.placement"
    placement = PlacementSection(
        files=get_column(table, "file", U32, where),
        offsets=get_column(table, "offset", U64, where),
        stored=get_column(table, "stored", U32, where),
        codecs=get_column(table, "codec", U8, where),
        digests=get_digests(table, "digest", DIGEST_NBYTES[algorithm], where)
        if "digest" in table
        else None,
        pipelines=parse_pipelines(table.get("pipelines"), f"{where}.pipelines"),
    )
    count = len(tree.chunk_raw)
    check_rows(
        where,
        count,
        file=placement.files,
        offset=placement.offsets,
        stored=placement.stored,
        codec=placement.codecs,
    )
    if placement.digests is not None:
        check_rows(where, count, digest=placement.digests)
        check_raw_digests(
            placement.codecs, placement.digests, tree.chunk_digests, f"{where}.digest"
        )
    elif placement.codecs.any():
        corrupt("stored digests are missing", "section-entry", f"{where}.digest")
    check_ranges(placement, tree.chunk_raw, files.nbytes, where)
    _check_sharing(placement, tree)
    return placement


def check_ranges(placement: PlacementSection, raw: Column, file_nbytes: Column, where: str) -> None:
    """Every chunk lies between its file's head and footer; raw chunks are as long as they say."""
    used = np.zeros(len(file_nbytes), bool)
    limits = file_nbytes.astype(np.int64) - ALIGN_NBYTES
    for rows in blocks(len(raw)):
        start = rows.start
        files, codecs, stored = (
            column[rows] for column in (placement.files, placement.codecs, placement.stored)
        )
        check_all(
            codecs < len(placement.pipelines),
            "codec row",
            "column-range",
            f"{where}.codec",
            codecs,
            start=start,
        )
        check_all(
            files < len(file_nbytes),
            "file row",
            "column-range",
            f"{where}.file",
            files,
            start=start,
        )
        used[files] = True
        check_all(
            stored >= 1,
            "chunk without bytes",
            "chunk-length",
            f"{where}.stored",
            stored,
            start=start,
        )
        good = (codecs != 0) | (stored == raw[rows])
        check_all(
            good,
            "raw chunk of another length",
            "chunk-length",
            f"{where}.stored",
            stored,
            start=start,
        )
        offsets = placement.offsets[rows]
        check_all(
            offsets <= INT63_MAX, "offset", "chunk-range", f"{where}.offset", offsets, start=start
        )
        offsets, ends = offsets.astype(np.int64), limits[files]
        good = (offsets >= ALIGN_NBYTES) & (offsets <= ends) & (stored <= ends - offsets)
        check_all(
            good,
            "chunk lies outside its file",
            "chunk-range",
            f"{where}.offset",
            offsets,
            start=start,
        )
    check_all(used, "file is not used", "column-range", "$.files.id", file_nbytes)


def _check_sharing(placement: PlacementSection, tree: TreeSection) -> None:
    """Two rows may name the same stored range, with the same content; never overlapping ones."""
    if _are_apart(placement):
        return
    files, offsets = placement.files, placement.offsets.astype(np.int64)
    order = np.lexsort((offsets, files))
    a, b = order[:-1], order[1:]
    same_file = files[a] == files[b]
    same_range = same_file & (offsets[a] == offsets[b])
    overlap = same_file & (offsets[b] < offsets[a] + placement.stored[a])
    good = ~overlap | (same_range & (placement.stored[a] == placement.stored[b]))
    if not good.all():
        row = int(np.argmin(good))
        corrupt("chunks overlap", "overlap", f"$.placement[{int(a[row])}] and [{int(b[row])}]")
    if not same_range.any():
        return
    a, b = a[same_range], b[same_range]
    good = (
        (tree.chunk_digests[a] == tree.chunk_digests[b]).all(axis=1)
        & (tree.chunk_raw[a] == tree.chunk_raw[b])
        & (placement.codecs[a] == placement.codecs[b])
    )
    if not good.all():
        row = int(np.argmin(good))
        corrupt(
            "chunks share a range and differ",
            "overlap",
            f"$.placement[{int(a[row])}] and [{int(b[row])}]",
        )


def _are_apart(placement: PlacementSection) -> bool:
    """Each range ends before the next one begins, as a save without a base writes them: nothing
    is shared then."""
    for rows in blocks(len(placement.files)):
        more = slice(rows.start, rows.stop + 1)  # and the first of the next block
        files, offsets = placement.files[more], placement.offsets[more].astype(np.int64)
        ends = offsets + placement.stored[more]
        good = (files[1:] > files[:-1]) | ((files[1:] == files[:-1]) & (offsets[1:] >= ends[:-1]))
        if not good.all():
            return False
    return True
