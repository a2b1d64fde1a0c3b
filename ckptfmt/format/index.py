"""The index: a checked header, then the sections `about`, `files`, `tree`, `placement`.

`parse_index` believes nothing before it is checked; `head` serves those who need only the first
small range (ls, latest, gc). Spec: 07-index.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.format.columns import corrupt
from ckptfmt.format.digests import ALGORITHM_CODES, DIGEST_NBYTES, digest
from ckptfmt.format.head import (
    ABOUT,
    FILES,
    HEAD,
    MAGIC,
    PLACEMENT,
    PLAIN,
    SECTION,
    TREE,
    ZSTD,
    About,
    Header,
    pack_about,
    parse_about,
    parse_header,
    parse_section,
)
from ckptfmt.format.limits import MAJOR, MINOR
from ckptfmt.format.placement import (
    FilesSection,
    PlacementSection,
    pack_files,
    pack_placement,
    parse_files,
    parse_placement,
)
from ckptfmt.format.tables import PackedNames
from ckptfmt.format.tree_parse import parse_tree
from ckptfmt.format.tree_section import TreeSection, pack_tree

_COMPRESS_NBYTES_MIN, _COMPRESS_NBYTES_MAX = 64 << 10, 16 << 20
_TIGHT_NBYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Index:
    """A whole document, checked."""

    header: Header
    about: About
    files: FilesSection
    tree: TreeSection
    placement: PlacementSection


def parse_index(
    data: bytes | memoryview, where: str = "index", *, lazy: bool = False, whole: bool = True
) -> Index:
    """Check and take a whole document; its columns are views of `data`.

    Args:
        lazy: The leaf names are left packed, and checked when they are first asked for.
        whole: False for a fragment, whose regions need not tile their tensors (spec 08 §8.9).
    Raises:
        CorruptError: Anything that the spec says must hold does not.
        UnsupportedError: A newer major, an unknown `requires` entry, digest or encoding.
    """
    header = parse_header(data, where)
    if len(data) < header.nbytes:
        corrupt("index is cut off", "truncated", where, f"{header.nbytes} bytes", len(data))
    if len(data) > header.nbytes:
        corrupt("bytes after the index", "trailing-bytes", where, header.nbytes, len(data))
    view = memoryview(data).toreadonly()
    raw = [
        parse_section(header, i, view[row.offset : row.offset + row.stored_nbytes], where)
        for i, row in enumerate(header.sections)
    ]
    try:
        about = parse_about(raw[ABOUT], header.algorithm)
        files = parse_files(raw[FILES], header.algorithm)
        found = _tree_digest(header, raw[TREE])
        if found != about.tree_digest:
            corrupt(
                "tree digest differs", "tree-digest", "$.tree", about.tree_digest.hex(), found.hex()
            )
        tree = parse_tree(raw[TREE], header.algorithm, lazy=lazy, whole=whole)
        if isinstance(tree.names, PackedNames):
            tree.names.document = where
        placement = parse_placement(raw[PLACEMENT], header.algorithm, tree, files)
    except (CorruptError, UnsupportedError) as error:
        error.add_note(f"in {where}")
        raise
    return Index(header, about, files, tree, placement)


def _tree_digest(header: Header, raw: bytes | memoryview) -> bytes:
    """Of the raw section; where it is plain, that of its stored bytes, which were just checked."""
    row = header.sections[TREE]
    if row.encoding == PLAIN:
        return row.digest[: DIGEST_NBYTES[header.algorithm]]
    return digest(memoryview(raw), header.algorithm)


def pack_index(
    about: About,
    files: FilesSection,
    placement: PlacementSection,
    tree: bytes,
    commit_id: bytes,
    *,
    kept: bool = True,
) -> bytes:
    """A whole document; `tree` is the packed tree section, whose digest `about` holds.

    `kept`: False for a fragment, which is read once: it may be larger and takes less time.
    """
    algorithm = about.algorithm
    stored, rows = [], b""
    for position, raw in enumerate(
        (pack_about(about), pack_files(files), tree, pack_placement(placement))
    ):
        encoding, data = _encode_section(position, raw, tight=kept)
        stored.append(data)
        rows += SECTION.pack(
            encoding, b"", len(data), len(raw), digest(memoryview(data), algorithm)
        )
    head = HEAD.pack(MAGIC, MAJOR, MINOR, ALGORITHM_CODES[algorithm], b"", commit_id) + rows
    return b"".join([head, digest(memoryview(head), algorithm).ljust(32, b"\0"), *stored])


def moved_index(
    data: bytes | memoryview,
    commit_id: bytes,
    files: FilesSection,
    placement: PlacementSection,
) -> bytes:
    """The same content elsewhere: `about` and `tree` go over byte for byte, what is unknown in them
    included; `files` and `placement` are written anew, under a new header (spec 09).

    Args:
        data: A whole document that was checked.
    """
    header = parse_header(data)
    made: list[tuple[bytes, bytes]] = []
    for position, row in enumerate(header.sections):
        if position in (FILES, PLACEMENT):
            raw = pack_files(files) if position == FILES else pack_placement(placement)
            encoding, stored = _encode_section(position, raw)
            row_digest = digest(memoryview(stored), header.algorithm)
            made.append((SECTION.pack(encoding, b"", len(stored), len(raw), row_digest), stored))
        else:
            stored = bytes(data[row.offset : row.offset + row.stored_nbytes])
            made.append(
                (SECTION.pack(row.encoding, b"", len(stored), row.raw_nbytes, row.digest), stored)
            )
    code = ALGORITHM_CODES[header.algorithm]
    head = HEAD.pack(MAGIC, MAJOR, MINOR, code, b"", commit_id) + b"".join(r for r, _ in made)
    check = digest(memoryview(head), header.algorithm).ljust(32, b"\0")
    return b"".join([head, check, *(stored for _, stored in made)])


def _encode_section(position: int, raw: bytes, *, tight: bool = True) -> tuple[int, bytes]:
    if position >= TREE and _COMPRESS_NBYTES_MIN <= len(raw) < _COMPRESS_NBYTES_MAX:
        compressor = _compressor(tight and len(raw) <= _TIGHT_NBYTES_MAX)
        data = compressor.compress(raw)
        # Names compress, digests do not: a frame that saves little only costs whoever opens it.
        if len(data) < 0.75 * len(raw):
            return ZSTD, data
    return PLAIN, raw


def _compressor(tight: bool) -> Any:
    """A tree is rows that count up, texts that repeat, and digests that nothing compresses. Level 1
    makes 2.2 bytes of such a row, matches of 3 bytes found by a search that weighs them make 1: of
    5,000 tensors 90.2 instead of 99.6 KB, in 10 ms instead of 0.4 (level 19: 89.9 KB, 153 ms)."""
    import zstandard  # here: small documents, most of all listed ones, do without

    if not tight:
        return zstandard.ZstdCompressor(level=1, write_checksum=False)
    parameters = zstandard.ZstdCompressionParameters(
        window_log=20,
        strategy=zstandard.STRATEGY_BTOPT,
        search_log=1,
        min_match=3,
        target_length=4,
        hash_log=16,
        chain_log=14,
        write_checksum=False,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def empty_tree() -> TreeSection:
    """The tree of a notes document."""
    none = np.zeros(0, np.uint8)
    return TreeSection(
        dtypes=(), names=[], leaf_kinds=none, leaf_rows=none, values=[], container_names=[],
        container_kinds=[], container_arguments=[], tensor_dtypes=none, tensor_ndims=none,
        tensor_dims=none, region_tensors=none, region_origins=none, region_extents=none,
        region_nchunks=none, chunk_raw=none, chunk_digests=none,
    )  # fmt: skip


def pack_notes(about: About, commit_id: bytes) -> bytes:
    """A notes document: an index with empty tree, files and placement (spec 02)."""
    none = np.zeros(0, np.uint8)
    files = FilesSection([], none)
    placement = PlacementSection(none, none, none, none, None, ((),))
    tree = pack_tree(empty_tree())
    about = replace(about, tree_digest=digest(tree, about.algorithm))
    return pack_index(about, files, placement, tree, commit_id)
