"""The data file: head, footer, table, gaps. Spec: 05-data-files."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ckptfmt.errors import CorruptError, FormatError
from ckptfmt.format import (
    DataTable,
    Footer,
    digest,
    finish_file,
    gaps,
    pack_footer,
    pack_head,
    pack_table,
    parse_footer,
    parse_head,
    parse_table,
)

Change = Callable[[Any], object]


def parse(data: bytes) -> tuple[DataTable, Footer, list[tuple[int, int]]]:
    """A whole file: head, footer, table; its gaps must be zero."""
    algorithm = parse_head(data[:64])
    footer = parse_footer(data[-64:], len(data))
    assert footer.algorithm == algorithm
    at = slice(footer.table_offset, footer.table_offset + footer.table_nbytes)
    table = parse_table(data[at], footer)
    return table, footer, gaps(table, footer, len(data))


def refused(file: Any) -> str:
    with pytest.raises(FormatError) as caught:
        parse(file.pack())
    return caught.value.kind


@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_a_whole_file_is_taken_and_packs_back(documents: ModuleType, algorithm: str) -> None:
    file = documents.data_file(algorithm)
    data = file.pack()
    table, footer, zero = parse(data)
    assert table.region_names == ["a", "b", "c"]
    assert table.region_nchunks.tolist() == [1, 1, 2]
    assert table.stored_digest(2) == digest(file.chunks[8256], algorithm)
    assert pack_table(table) == documents.pack(file.table)
    assert pack_head(algorithm) == data[:64]
    assert pack_footer(footer) == data[-64:]
    chunks_end = max(offset + len(stored) for offset, stored in file.chunks.items())
    assert finish_file(pack_table(table), chunks_end, algorithm) == (
        footer.table_offset,
        data[footer.table_offset :],
        footer.id,
    )
    assert all(not any(data[start:stop]) for start, stop in zero)


def test_head_chunks_table_footer_and_gaps_cover_the_file_once(documents: ModuleType) -> None:
    data = documents.data_file().pack()
    table, footer, zero = parse(data)
    ends = table.chunk_offsets + table.chunk_stored
    parts = [
        (0, 64), (len(data) - 64, len(data)), *zero,
        (footer.table_offset, footer.table_offset + footer.table_nbytes),
        *zip(table.chunk_offsets.tolist(), ends.tolist()),
    ]  # fmt: skip
    position = 0
    for start, stop in sorted(parts):
        assert start == position
        position = stop
    assert position == len(data)


@pytest.mark.parametrize("extra", [0, 1, 63, 64, 4000, 4095, 4096, 4097])
def test_a_file_is_a_whole_number_of_blocks(extra: int) -> None:
    for chunks_end in (64, 4096, 4096 + extra):
        table = bytes(extra)
        offset, tail, name = finish_file(table, chunks_end, "xxh3-128")
        nbytes = offset + len(tail)
        assert offset % 64 == 0
        assert chunks_end <= offset < chunks_end + 64
        assert nbytes % 4096 == 0
        assert nbytes - (offset + extra + 64) < 4096
        footer = parse_footer(tail[-64:], nbytes)
        assert (footer.table_offset, footer.table_nbytes) == (offset, extra)
        assert footer.id == name == digest(table, "xxh3-128").hex()


@pytest.mark.parametrize("nbytes", [0, 1, 63])
def test_a_head_that_is_cut_is_refused(nbytes: int) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_head(pack_head("sha256")[:nbytes])
    assert caught.value.kind == "corrupt-truncated"


@pytest.mark.parametrize("nbytes", [0, 64, 4095, 4097, 8191])
def test_a_file_of_another_size_is_refused(documents: ModuleType, nbytes: int) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_footer(documents.data_file().pack()[-64:], nbytes)
    assert caught.value.kind == "corrupt-truncated"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda f: f.head.update(magic=b"\x89CKI\r\n\x1a\0"), "corrupt-magic"),
        (lambda f: f.head.update(major=0), "unsupported-major"),
        (lambda f: f.head.update(major=2), "unsupported-major"),
        (lambda f: f.head.update(code=0), "unsupported-digest"),
        (lambda f: f.head.update(code=255), "unsupported-digest"),
        (lambda f: f.head.update(zeros=b"\1"), "corrupt-padding"),
        (lambda f: f.head.update(zeros=bytes(50) + b"\1"), "corrupt-padding"),
        (lambda f: f.footer.update(magic=bytes(8)), "corrupt-magic"),
        (lambda f: f.footer.update(code=9), "unsupported-digest"),
        (lambda f: f.footer.update(zeros=b"\0\0\0\0\0\0\1"), "corrupt-padding"),
        (lambda f: f.footer.update(digest=b"\1" * 32), "corrupt-padding"),
        (lambda f: f.footer.update(digest=bytes(16)), "corrupt-table-digest"),
        (lambda f: f.footer.update(offset=0), "corrupt-table-range"),
        (lambda f: f.footer.update(offset=65), "corrupt-table-range"),
        (lambda f: f.footer.update(offset=2**64 - 64), "corrupt-table-range"),
        (lambda f: f.footer.update(nbytes=2**64 - 1), "corrupt-table-range"),
        (lambda f: f.footer.update(nbytes=2**30 + 1), "corrupt-table-range"),
        (lambda f: f.footer.update(nbytes=12288), "corrupt-table-range"),
    ],
)  # fmt: skip
def test_a_head_or_footer_that_breaks_a_rule_is_refused(
    documents: ModuleType, change: Change, kind: str
) -> None:
    file = documents.data_file()
    change(file)
    assert refused(file) == kind


def test_any_minor_is_taken_and_unknown_keys_are_ignored(documents: ModuleType) -> None:
    file = documents.data_file()
    file.head["minor"] = 9
    for path in ("table", "table/dtypes", "table/regions", "table/chunks"):
        file.set(path, {"of tomorrow": [1, {"a": b""}], **file.get(path)})
    assert parse(file.pack())[0].salt == 0


@pytest.mark.parametrize(
    "path",
    [
        "salt", "dtypes", "dtypes/name", "dtypes/bits", "regions", "regions/name", "regions/dtype",
        "regions/ndim", "regions/shape", "regions/origin", "regions/extent", "regions/nchunks",
        "chunks", "chunks/start", "chunks/offset", "chunks/stored", "chunks/raw", "chunks/codec",
        "chunks/digest", "chunks/stored_digest",
    ],
)  # fmt: skip
def test_a_part_that_is_absent_or_of_another_type_is_refused(
    documents: ModuleType, path: str
) -> None:
    others: list[Any] = [None, 1.5, True, "text", [[]], [1.5]]
    for wrong in others:
        file = documents.data_file()
        file.set(f"table/{path}", wrong)
        assert refused(file) == "corrupt-section-entry"
    file = documents.data_file()
    file.drop(f"table/{path}")
    assert refused(file) == "corrupt-section-entry"


@pytest.mark.parametrize(
    "path",
    [
        "dtypes/bits", "regions/dtype", "regions/ndim", "regions/shape", "regions/origin",
        "regions/extent", "regions/nchunks", "chunks/start", "chunks/offset", "chunks/stored",
        "chunks/raw", "chunks/codec", "chunks/digest", "chunks/stored_digest",
    ],
)  # fmt: skip
def test_columns_of_a_table_have_one_length(documents: ModuleType, path: str) -> None:
    path = f"table/{path}"
    for rows in (-1, 0):
        file = documents.data_file()
        file.cut(path, rows)
        assert refused(file) == "corrupt-column-length"
    file = documents.data_file()
    file.repeat(path, -1)
    assert refused(file) == "corrupt-column-length"
    file = documents.data_file()
    file.set(path, file.get(path).tobytes() + b"\0")
    assert refused(file) == "corrupt-column-length"


@pytest.mark.parametrize(
    ("path", "row", "value", "kind"),
    [
        ("dtypes/name", 1, "float32", "corrupt-dtype"),
        ("dtypes/bits", 0, 31, "corrupt-dtype"),
        ("regions/dtype", 0, 2, "corrupt-column-range"),
        ("regions/ndim", 0, 65, "corrupt-dims"),
        ("regions/ndim", 0, 2, "corrupt-column-length"),
        ("regions/shape", 0, 2**63, "corrupt-dims-overflow"),
        ("regions/shape", 1, 2**62, "corrupt-dims-overflow"),
        ("regions/shape", 0, 1033, "corrupt-regions"),
        ("regions/origin", 0, 1, "corrupt-regions"),
        ("regions/origin", 0, 2**64 - 1, "corrupt-regions"),
        ("regions/origin", 1, 8, "corrupt-regions"),
        ("regions/extent", 0, 1035, "corrupt-regions"),
        ("regions/extent", 0, 2**64 - 1, "corrupt-dims-overflow"),
        ("regions/nchunks", 0, 0, "corrupt-column-range"),
        ("regions/nchunks", 0, 2**32 - 1, "corrupt-column-length"),
        ("chunks/start", 1, 2**63, "corrupt-chunk-range"),
        ("chunks/offset", 0, 63, "corrupt-chunk-range"),
        ("chunks/offset", 0, 4097, "corrupt-chunk-range"),
        ("chunks/offset", 3, 2**63, "corrupt-chunk-range"),
        ("chunks/offset", 3, 2**63 - 1, "corrupt-chunk-range"),
        ("chunks/offset", 3, 8448 - 99, "corrupt-chunk-range"),
        ("chunks/offset", 2, 64, "corrupt-chunk-range"),
        ("chunks/stored", 0, 0, "corrupt-chunk-length"),
        ("chunks/stored", 0, 4095, "corrupt-chunk-length"),
        ("chunks/stored", 2, 0, "corrupt-chunk-length"),
        ("chunks/stored", 2, 65, "corrupt-chunk-range"),
        ("chunks/raw", 0, 0, "corrupt-chunk-length"),
        ("chunks/raw", 2, 2**30 + 1, "corrupt-chunk-length"),
        ("chunks/raw", 2, 0, "corrupt-chunk-length"),
        ("chunks/codec", 0, 2, "corrupt-column-range"),
        ("chunks/codec", 2, 0, "corrupt-chunk-digest"),
        ("chunks/stored_digest", 0, 0, "corrupt-chunk-digest"),
        ("pipelines", 0, [["zstd"]], "corrupt-pipeline"),
        ("pipelines", 1, [["zstd"]] * 5, "corrupt-pipeline"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused(
    documents: ModuleType, path: str, row: int, value: object, kind: str
) -> None:
    file = documents.data_file()
    file.put(f"table/{path}", row, value)
    assert refused(file) == kind


def test_a_salt_is_not_negative(documents: ModuleType) -> None:
    file = documents.data_file()
    file.table["salt"] = -1
    assert refused(file) == "corrupt-section-entry"


def test_stored_digests_may_be_absent_where_all_is_raw(documents: ModuleType) -> None:
    file = documents.data_file()
    del file.table["chunks"]["stored_digest"]
    assert refused(file) == "corrupt-section-entry"
    file.chunks[8256] = bytes([3]) * 4096
    file.chunks[12352] = file.chunks.pop(8320)
    file.table["chunks"] |= {
        "codec": bytes(4), "stored": file.get("table/chunks/raw"),
        "offset": np.array([4096, 8192, 8256, 12352], "<u8"),
    }  # fmt: skip
    table = parse(file.pack())[0]
    assert table.stored_digest(2) == digest(bytes([3]) * 4096, "xxh3-128")


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x80\x80", b"\x81\xa1a", b"\xdf\xff\xff\xff\xff"])
def test_a_table_is_one_map(documents: ModuleType, data: bytes) -> None:
    file = documents.data_file()
    file.table = data
    assert refused(file) == "corrupt-msgpack"


def test_a_file_without_chunks_is_all_gap(documents: ModuleType) -> None:
    file = documents.data_file()
    file.chunks = {}
    for table in ("regions", "chunks"):
        for key in file.table[table]:
            file.cut(f"table/{table}/{key}", 0)
    made, footer, zero = parse(file.pack())
    assert len(made.chunk_raw) == 0
    assert footer.table_offset == 64
    assert zero == [(64 + footer.table_nbytes, 4096 - 64)]


def test_every_flipped_bit_of_head_table_or_footer_is_found(documents: ModuleType) -> None:
    data = documents.data_file().pack()
    _, footer, _ = parse(data)
    at = range(footer.table_offset, footer.table_offset + footer.table_nbytes)
    minor = range(10, 12)
    for position in [*range(64), *at, *range(len(data) - 64, len(data))]:
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        if position in minor:
            parse(bytes(flipped))
            continue
        with pytest.raises((FormatError, AssertionError)):
            parse(bytes(flipped))
