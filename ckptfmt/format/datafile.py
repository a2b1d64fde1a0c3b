"""The data file: a head, chunks, a table, a footer, in whole blocks. Spec: 05-data-files.

The file's id is the digest of its table's bytes; the table holds the digest of every stored byte,
so equal ids mean equal bytes, and a file found alone can be read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ckptfmt.errors import UnsupportedError
from ckptfmt.format.boxes import products
from ckptfmt.format.codecs import Pipeline
from ckptfmt.format.columns import (
    U8,
    U16,
    U32,
    U64,
    Column,
    check_all,
    check_rows,
    corrupt,
    get_column,
    get_digests,
    get_list,
    get_map,
    get_scalar,
    pack_map,
    parse_map,
    starts,
)
from ckptfmt.format.digests import ALGORITHM_CODES, DIGEST_NBYTES, algorithm_name, digest
from ckptfmt.format.dtypes import Dtype
from ckptfmt.format.limits import (
    ALIGN_NBYTES,
    BLOCK_NBYTES,
    CHUNK_NBYTES_MAX,
    INT63_MAX,
    MAJOR,
    MINOR,
    SECTIONS_NBYTES_MAX,
)
from ckptfmt.format.placement import check_raw_digests, pack_pipelines, parse_pipelines
from ckptfmt.format.tree_parse import parse_dtypes

MAGIC = bytes.fromhex("89434B440D0A1A00")
HEAD_NBYTES = 64
FOOTER_NBYTES = 64
_HEAD = struct.Struct("<8sHHB51s")
_FOOTER = struct.Struct("<QQB7s32s8s")


@dataclass(frozen=True, slots=True)
class Footer:
    """Where the table is, and its digest."""

    table_offset: int
    table_nbytes: int
    algorithm: str
    table_digest: bytes

    @property
    def id(self) -> str:
        """What the file must be called."""
        return self.table_digest[: DIGEST_NBYTES[self.algorithm]].hex()


@dataclass(frozen=True, slots=True)
class DataTable:
    """A row per region (with chunks in this file), a row per chunk.

    `chunk_starts` are offsets in the region's raw bytes; `stored_digests` is None where all are raw.
    """

    salt: int
    dtypes: tuple[Dtype, ...]
    region_names: list[str]
    region_dtypes: Column
    region_ndims: Column
    region_shapes: Column
    region_origins: Column
    region_extents: Column
    region_nchunks: Column
    chunk_starts: Column
    chunk_offsets: Column
    chunk_stored: Column
    chunk_raw: Column
    chunk_codecs: Column
    chunk_digests: Column
    stored_digests: Column | None
    pipelines: tuple[Pipeline, ...]

    def stored_digest(self, chunk: int) -> bytes:
        column = self.chunk_digests if self.stored_digests is None else self.stored_digests
        return bytes(column[chunk].tobytes())


def pack_head(algorithm: str) -> bytes:
    """The first 64 bytes."""
    return _HEAD.pack(MAGIC, MAJOR, MINOR, ALGORITHM_CODES[algorithm], b"")


def parse_head(data: bytes | memoryview, where: str = "data file") -> str:
    """Check the first 64 bytes; returns the digest algorithm's name."""
    if len(data) < HEAD_NBYTES:
        corrupt("data file is too short", "truncated", where, f"{HEAD_NBYTES} bytes", len(data))
    magic, major, _minor, code, zeros = _HEAD.unpack(memoryview(data)[:HEAD_NBYTES])
    if magic != MAGIC:
        corrupt("not a data file", "magic", f"{where}[0:8)", MAGIC.hex(), magic.hex())
    if major != MAJOR:
        raise UnsupportedError(
            "data file of another major version",
            reason="major",
            where=where,
            expected=MAJOR,
            found=major,
            do=f"use a ckptfmt that reads format {major}",
        )
    if any(zeros):
        corrupt("head has bytes that are not zero", "padding", f"{where}[13:64)")
    return algorithm_name(code, where)


def pack_footer(footer: Footer) -> bytes:
    """The last 64 bytes."""
    return _FOOTER.pack(
        footer.table_offset,
        footer.table_nbytes,
        ALGORITHM_CODES[footer.algorithm],
        b"",
        footer.table_digest,
        MAGIC,
    )


def parse_footer(data: bytes | memoryview, file_nbytes: int, where: str = "data file") -> Footer:
    """Check and take the last 64 bytes of a file of `file_nbytes`."""
    if len(data) < FOOTER_NBYTES or file_nbytes < BLOCK_NBYTES or file_nbytes % BLOCK_NBYTES:
        corrupt(
            "data file is not a whole number of blocks",
            "truncated",
            where,
            f"a multiple of {BLOCK_NBYTES} bytes",
            file_nbytes,
        )
    at = f"{where}[{file_nbytes - FOOTER_NBYTES}:{file_nbytes})"
    offset, nbytes, code, zeros, table_digest, magic = _FOOTER.unpack(
        memoryview(data)[-FOOTER_NBYTES:]
    )
    if magic != MAGIC:
        corrupt("data file has no footer", "magic", at, MAGIC.hex(), magic.hex())
    algorithm = algorithm_name(code, at)
    if any(zeros) or any(table_digest[DIGEST_NBYTES[algorithm] :]):
        corrupt("footer has bytes that are not zero", "padding", at)
    good = (
        offset % ALIGN_NBYTES == 0
        and offset >= HEAD_NBYTES
        and nbytes <= min(SECTIONS_NBYTES_MAX, file_nbytes)
        and offset + nbytes <= file_nbytes - FOOTER_NBYTES
    )
    if not good:
        corrupt("table lies outside its file", "table-range", at, found=f"[{offset}, +{nbytes})")
    return Footer(offset, nbytes, algorithm, table_digest[: DIGEST_NBYTES[algorithm]])


def pack_table(table: DataTable) -> bytes:
    """The table's bytes: their digest is the file's id."""
    chunks = {
        "start": table.chunk_starts.astype(U64),
        "offset": table.chunk_offsets.astype(U64),
        "stored": table.chunk_stored.astype(U32),
        "raw": table.chunk_raw.astype(U32),
        "codec": table.chunk_codecs.astype(U8),
        "digest": table.chunk_digests,
    }
    if table.stored_digests is not None:
        chunks["stored_digest"] = table.stored_digests
    return pack_map(
        {
            "salt": table.salt,
            "dtypes": {
                "name": [d.name for d in table.dtypes],
                "bits": np.array([d.bits for d in table.dtypes], U32),
            },
            "regions": {
                "name": table.region_names,
                "dtype": table.region_dtypes.astype(U16),
                "ndim": table.region_ndims.astype(U8),
                "shape": table.region_shapes.astype(U64),
                "origin": table.region_origins.astype(U64),
                "extent": table.region_extents.astype(U64),
                "nchunks": table.region_nchunks.astype(U32),
            },
            "chunks": chunks,
            "pipelines": pack_pipelines(table.pipelines),
        }
    )


def salted_table(data: bytes | memoryview, salt: int) -> bytes:
    """The same table with another salt: the same content under another id. What is unknown stays."""
    return pack_map({**parse_map(data, "$"), "salt": salt})


def finish_file(table: bytes, chunks_end: int, algorithm: str) -> tuple[int, bytes, str]:
    """What follows the chunks: (offset of the table, bytes from there to the end, the file's id)."""
    offset = -(-chunks_end // ALIGN_NBYTES) * ALIGN_NBYTES
    end = -(-(offset + len(table) + FOOTER_NBYTES) // BLOCK_NBYTES) * BLOCK_NBYTES
    footer = Footer(offset, len(table), algorithm, digest(memoryview(table), algorithm))
    zeros = bytes(end - offset - len(table) - FOOTER_NBYTES)
    return offset, b"".join([table, zeros, pack_footer(footer)]), footer.id


def parse_table(data: bytes | memoryview, footer: Footer, where: str = "data file") -> DataTable:
    """Check and take the table.

    Raises:
        CorruptError: Its digest differs from the footer's, or a bound or order does not hold.
    """
    found = digest(memoryview(data), footer.algorithm)
    if found != footer.table_digest:
        corrupt(
            "table digest differs", "table-digest", where, footer.table_digest.hex(), found.hex()
        )
    table = parse_map(data, "$")
    regions, chunks = get_map(table, "regions", "$"), get_map(table, "chunks", "$")
    nbytes = DIGEST_NBYTES[footer.algorithm]
    made = DataTable(
        salt=get_scalar(table, "salt", int, "$"),
        dtypes=parse_dtypes(get_map(table, "dtypes", "$"), "$.dtypes"),
        region_names=get_list(regions, "name", str, "$.regions"),
        region_dtypes=get_column(regions, "dtype", U16, "$.regions"),
        region_ndims=get_column(regions, "ndim", U8, "$.regions"),
        region_shapes=get_column(regions, "shape", U64, "$.regions"),
        region_origins=get_column(regions, "origin", U64, "$.regions"),
        region_extents=get_column(regions, "extent", U64, "$.regions"),
        region_nchunks=get_column(regions, "nchunks", U32, "$.regions"),
        chunk_starts=get_column(chunks, "start", U64, "$.chunks"),
        chunk_offsets=get_column(chunks, "offset", U64, "$.chunks"),
        chunk_stored=get_column(chunks, "stored", U32, "$.chunks"),
        chunk_raw=get_column(chunks, "raw", U32, "$.chunks"),
        chunk_codecs=get_column(chunks, "codec", U8, "$.chunks"),
        chunk_digests=get_digests(chunks, "digest", nbytes, "$.chunks"),
        stored_digests=get_digests(chunks, "stored_digest", nbytes, "$.chunks")
        if "stored_digest" in chunks
        else None,
        pipelines=parse_pipelines(table.get("pipelines"), "$.pipelines"),
    )
    if made.salt < 0:
        corrupt("salt is negative", "section-entry", "$.salt", "0 or more", made.salt)
    _check_regions(made)
    _check_chunks(made, footer)
    return made


def _check_regions(table: DataTable) -> None:
    count, where = len(table.region_names), "$.regions"
    check_rows(
        where,
        count,
        dtype=table.region_dtypes,
        ndim=table.region_ndims,
        nchunks=table.region_nchunks,
    )
    good = table.region_dtypes < len(table.dtypes)
    check_all(good, "dtype row", "column-range", f"{where}.dtype", table.region_dtypes)
    for key, column in (("shape", table.region_shapes), ("extent", table.region_extents)):
        products(table.region_ndims, column, f"{where}.{key}")
    check_rows(where, len(table.region_shapes), origin=table.region_origins)
    good = (table.region_origins <= table.region_shapes) & (
        table.region_extents <= table.region_shapes - table.region_origins
    )
    check_all(
        good, "region lies outside its tensor", "regions", f"{where}.extent", table.region_extents
    )
    nchunks = table.region_nchunks
    check_all(nchunks >= 1, "region has no chunk", "column-range", f"{where}.nchunks", nchunks)
    if int(starts(nchunks)[-1]) != len(table.chunk_raw):
        corrupt(
            "chunks of another number", "column-length", "$.chunks.raw", found=len(table.chunk_raw)
        )


def _check_chunks(table: DataTable, footer: Footer) -> None:
    count, where = len(table.chunk_raw), "$.chunks"
    check_rows(
        where,
        count,
        start=table.chunk_starts,
        offset=table.chunk_offsets,
        stored=table.chunk_stored,
        codec=table.chunk_codecs,
        digest=table.chunk_digests,
    )
    if table.stored_digests is not None:
        check_rows(where, count, stored_digest=table.stored_digests)
        check_raw_digests(
            table.chunk_codecs, table.stored_digests, table.chunk_digests, f"{where}.stored_digest"
        )
    elif table.chunk_codecs.any():
        corrupt("stored digests are missing", "section-entry", f"{where}.stored_digest")
    raw, stored, codecs = table.chunk_raw, table.chunk_stored, table.chunk_codecs
    good = codecs < len(table.pipelines)
    check_all(good, "codec row", "column-range", f"{where}.codec", codecs)
    good = (raw >= 1) & (raw <= CHUNK_NBYTES_MAX) & (stored >= 1)
    good &= (codecs != 0) | (stored == raw)
    check_all(good, "chunk of a wrong length", "chunk-length", f"{where}.stored", stored)
    offsets = table.chunk_offsets
    check_all(offsets <= INT63_MAX, "offset", "chunk-range", f"{where}.offset", offsets)
    wide = offsets.astype(np.int64)
    limits = np.concatenate([wide[1:], np.array([footer.table_offset], np.int64)])[:count]
    # A difference of two offsets is exact; the end of a chunk at 2^63 - 1 would wrap around.
    good = (wide >= HEAD_NBYTES) & (stored.astype(np.int64) <= limits - wide)
    check_all(
        good, "chunks overlap, or lie outside the file", "chunk-range", f"{where}.offset", offsets
    )
    check_all(
        table.chunk_starts <= INT63_MAX,
        "start",
        "chunk-range",
        f"{where}.start",
        table.chunk_starts,
    )


def gaps(table: DataTable, footer: Footer, file_nbytes: int) -> list[tuple[int, int]]:
    """The ranges of a file that must be zero: between chunks, before and after the table."""
    made, position = [], HEAD_NBYTES
    ends = table.chunk_offsets.astype(np.int64) + table.chunk_stored.astype(np.int64)
    for offset, end in zip(table.chunk_offsets.tolist(), ends.tolist()):
        if offset > position:
            made.append((position, offset))
        position = end
    table_end = footer.table_offset + footer.table_nbytes
    for start, stop in (
        (position, footer.table_offset),
        (table_end, file_nbytes - FOOTER_NBYTES),
    ):
        if stop > start:
            made.append((start, stop))
    return made
