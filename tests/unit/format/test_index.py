"""The index's header, its sections' digests and lengths, `about`. Spec: 07-index §7.1 to §7.3."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgpack
import pytest
import zstandard

from ckptfmt.errors import CorruptError, FormatError, UnsupportedError
from ckptfmt.format import (
    ABOUT,
    TREE,
    About,
    digest,
    pack_index,
    pack_notes,
    pack_tree,
    parse_about,
    parse_header,
    parse_index,
    parse_section,
)

Change = Callable[[Any], object]


@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_a_whole_document_is_taken(documents: ModuleType, algorithm: str) -> None:
    document = documents.index(algorithm)
    index = parse_index(document.pack())
    assert index.header.algorithm == algorithm
    assert index.header.commit_id == bytes(range(16))
    assert index.about.name == "step-0000000000000007"
    assert index.about.step == 7
    assert index.about.parent == ("step-0000000000000006", bytes(documents.SIZES[algorithm]))
    assert index.about.metrics == {"loss": 0.5, "epoch": 3.0}
    assert index.about.metadata == {"commit": "abc", "lr": [0.1, 0.2]}
    assert index.tree.leaf_names == document.tree["leaves"]["name"]
    assert index.files.nbytes.tolist() == [16384, 8192]


def test_a_whole_document_packs_back_to_the_same_bytes(documents: ModuleType) -> None:
    document = documents.index()
    document.about["metrics"]["epoch"] = 3.0
    data = document.pack()
    index = parse_index(data)
    tree = pack_tree(index.tree)
    again = pack_index(index.about, index.files, index.placement, tree, index.header.commit_id)
    assert parse_index(again) is not None
    assert tree == documents.pack(document.tree)
    for position in (1, 2, 3):
        row, mine = index.header.sections[position], parse_header(again).sections[position]
        assert (row.digest, row.stored_nbytes) == (mine.digest, mine.stored_nbytes)


@pytest.mark.parametrize("position", [2, 3])
def test_tree_and_placement_may_be_compressed(documents: ModuleType, position: int) -> None:
    document = documents.index()
    plain = parse_index(document.pack())
    document.encodings[position] = 1
    made = parse_index(document.pack())
    assert made.header.sections[position].encoding == 1
    assert pack_tree(made.tree) == pack_tree(plain.tree)
    assert made.placement.offsets.tolist() == plain.placement.offsets.tolist()


def test_header_and_about_are_read_without_the_rest(documents: ModuleType) -> None:
    data = documents.index().pack()
    header = parse_header(data[:288])
    assert header.nbytes == len(data)
    row = header.sections[ABOUT]
    about = parse_about(
        parse_section(header, ABOUT, data[row.offset : row.offset + row.stored_nbytes]),
        header.algorithm,
    )
    assert about.step == 7


def test_any_minor_is_taken_and_unknown_keys_are_ignored(documents: ModuleType) -> None:
    document = documents.index()
    document.header["minor"] = 65535
    for path in ("about", "files", "tree", "tree/leaves", "tree/chunks", "placement"):
        part = document.get(path)
        document.set(path, {"of tomorrow": [1, {"a": b""}], **part, "zz": None})
    assert parse_index(document.pack()).about.step == 7


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda d: d.header.update(magic=b"\x89CKD\r\n\x1a\0"), "corrupt-magic"),
        (lambda d: d.header.update(major=2), "unsupported-major"),
        (lambda d: d.header.update(major=0), "unsupported-major"),
        (lambda d: d.header.update(code=0), "unsupported-digest"),
        (lambda d: d.header.update(code=3), "unsupported-digest"),
        (lambda d: d.header.update(zeros=b"\0\0\1"), "corrupt-padding"),
        (lambda d: d.rows.update({0: {"zeros": b"\1"}}), "corrupt-padding"),
        (lambda d: d.rows.update({3: {"zeros": b"\0\0\0\0\0\0\1"}}), "corrupt-padding"),
        (lambda d: d.rows.update({2: {"digest": b"\1" * 32}}), "corrupt-padding"),
        (lambda d: d.rows.update({2: {"digest": b"\1" * 16}}), "corrupt-section-digest"),
        (lambda d: d.rows.update({0: {"encoding": 1}}), "unsupported-encoding"),
        (lambda d: d.rows.update({1: {"encoding": 1}}), "unsupported-encoding"),
        (lambda d: d.rows.update({2: {"encoding": 2}}), "unsupported-encoding"),
        (lambda d: d.rows.update({3: {"encoding": 255}}), "unsupported-encoding"),
        (lambda d: d.rows.update({2: {"raw": 1}}), "corrupt-section-length"),
        (lambda d: d.rows.update({2: {"stored": 1}}), "corrupt-section-length"),
        (lambda d: d.rows.update({2: {"stored": 5, "raw": 5}}), "corrupt-trailing-bytes"),
        (lambda d: d.rows.update({3: {"stored": 5000, "raw": 5000}}), "corrupt-truncated"),
        (
            lambda d: d.rows.update({3: {"stored": (1 << 30) + 1, "raw": (1 << 30) + 1}}),
            "corrupt-limit",
        ),
        (
            lambda d: d.rows.update({3: {"stored": (1 << 64) - 1, "raw": (1 << 64) - 1}}),
            "corrupt-limit",
        ),
        (lambda d: d.rows.update({3: {"encoding": 1, "raw": 1 << 30}}), "corrupt-limit"),
        (
            lambda d: d.rows.update({2: {"stored": 1 << 29, "raw": 1 << 29},
                                     3: {"stored": 1 << 29, "raw": 1 << 29}}),
            "corrupt-limit",
        ),
    ],
)  # fmt: skip
def test_a_header_that_breaks_a_rule_is_refused(
    documents: ModuleType, change: Change, kind: str
) -> None:
    document = documents.index()
    change(document)
    with pytest.raises(FormatError) as caught:
        parse_index(document.pack())
    assert caught.value.kind == kind


def test_a_section_is_at_most_a_thousand_times_its_stored_bytes(documents: ModuleType) -> None:
    document = documents.index()
    document.rows[2] = {"encoding": 1, "stored": 17 << 10, "raw": 17 << 20}
    with pytest.raises(CorruptError) as caught:
        parse_header(document.pack())
    assert caught.value.kind == "corrupt-limit"
    document.rows[2] = {"encoding": 1, "stored": 1, "raw": 16 << 20}
    assert parse_header(document.pack()).sections[2].raw_nbytes == 16 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 8, 287])
def test_a_document_that_ends_within_its_header_is_refused(
    documents: ModuleType, nbytes: int
) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_index(documents.index().pack()[:nbytes])
    assert caught.value.kind == "corrupt-truncated"


def test_a_document_cut_or_extended_anywhere_is_refused(documents: ModuleType) -> None:
    data = documents.index().pack()
    for nbytes in range(288, len(data), 37):
        with pytest.raises(CorruptError) as caught:
            parse_index(data[:nbytes])
        assert caught.value.kind == "corrupt-truncated"
    with pytest.raises(CorruptError) as caught:
        parse_index(data + b"\0")
    assert caught.value.kind == "corrupt-trailing-bytes"


def test_every_flipped_bit_is_found(documents: ModuleType) -> None:
    data = documents.index().pack()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        with pytest.raises(FormatError):
            parse_index(bytes(flipped))


def test_a_tree_of_another_checkpoint_is_refused(documents: ModuleType) -> None:
    document = documents.index()
    document.about["tree_digest"] = bytes(16)
    with pytest.raises(CorruptError) as caught:
        parse_index(document.pack())
    assert caught.value.kind == "corrupt-tree-digest"


def frame(data: bytes, **options: Any) -> bytes:
    made: bytes = zstandard.ZstdCompressor(level=1, **options).compress(data)
    return made


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        (lambda raw: frame(raw)[:-1], "corrupt-zstd-frame"),
        (lambda raw: frame(raw) + b"\0", "corrupt-zstd-frame"),
        (lambda raw: frame(raw) + frame(b""), "corrupt-zstd-frame"),
        (lambda raw: b"\x50\x2a\x4d\x18\4\0\0\0abcd" + frame(raw), "corrupt-zstd-frame"),
        (lambda raw: raw, "corrupt-zstd-frame"),
        (lambda raw: b"", "corrupt-zstd-frame"),
        (lambda raw: frame(raw, write_content_size=False), "corrupt-zstd-size"),
        (lambda raw: frame(raw + b"\0"), "corrupt-zstd-size"),
        (lambda raw: frame(raw[:-1]), "corrupt-zstd-size"),
        (lambda raw: frame(bytes(256 << 20)), "corrupt-zstd-size"),
    ],
    ids=["cut", "more", "two", "skippable", "plain", "empty", "no-size", "longer", "shorter", "bomb"],
)  # fmt: skip
def test_a_compressed_section_is_one_frame_of_the_stated_size(
    documents: ModuleType, stored: Callable[[bytes], bytes], kind: str
) -> None:
    document = documents.index()
    raw = documents.pack(document.tree)
    data = stored(raw)
    document.rows[TREE] = {
        "encoding": 1, "stored": len(data), "raw": len(raw),
        "digest": digest(data, "xxh3-128"), "data": data,
    }  # fmt: skip
    with pytest.raises(CorruptError) as caught:
        parse_index(document.pack())
    assert caught.value.kind == kind


@pytest.mark.parametrize("section", ["about", "files", "tree", "placement"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\xc1",
        b"\x81\xa1a",
        b"\x81\xa1\xff\xc0",
        b"\x80\xc0",
        b"\x82\xa1a\xc0\xa1a\xc0",
        b"\x81\xa1a\x82\xa1b\x00\xa1b\x00",
        b"\x81\x01\xc0",
        b"\x81\xc4\x01a\xc0",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
        b"\x81\xa1a\xd6\xff\0\0\0",
        b"\x81\xa1a" + b"\x91" * 1100 + b"\xc0",
        b"\xde\xff\xff" + b"".join(msgpack.packb(str(i % 65534)) + b"\xc0" for i in range(65535)),
    ],
    ids=[
        "nothing", "nil", "array", "never", "cut", "not-utf8", "trailing", "twice", "twice-below",
        "int-key", "bytes-key", "array-header", "map-header", "bin-header", "timestamp", "deep",
        "long-and-twice",
    ],
)  # fmt: skip
def test_a_section_is_one_map_with_each_key_once(
    documents: ModuleType, section: str, data: bytes
) -> None:
    document = documents.index()
    document.set(section, data)
    if section == "tree":
        document.about["tree_digest"] = digest(data, "xxh3-128")
    with pytest.raises(CorruptError) as caught:
        parse_index(document.pack())
    assert caught.value.kind == "corrupt-msgpack"


KEYS = ("name", "created", "txn", "writer", "digest", "tree_digest", "requires", "metrics")


@pytest.mark.parametrize("key", [*KEYS, "metadata"])
def test_about_has_its_keys_with_their_types(documents: ModuleType, key: str) -> None:
    right = type(documents.index().about[key])
    others = [None, 5, "text", b"0123456789abcdef", [1], {"a": "b"}]
    for wrong in ["absent", *(other for other in others if type(other) is not right)]:
        document = documents.index()
        document.about[key] = wrong
        if wrong == "absent":
            del document.about[key]
        with pytest.raises(CorruptError) as caught:
            parse_index(document.pack())
        assert caught.value.kind == "corrupt-section-entry"
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("step", -1, "corrupt-section-entry"),
        ("step", 1 << 53, "corrupt-section-entry"),
        ("step", True, "corrupt-section-entry"),
        ("step", 7.0, "corrupt-section-entry"),
        ("step", "7", "corrupt-section-entry"),
        ("step", 8, "corrupt-name"),
        ("step", None, "corrupt-name"),
        ("name", "step-0000000000000008", "corrupt-name"),
        ("name", "step-7", "corrupt-name"),
        ("name", "../x", "corrupt-name"),
        ("name", "", "corrupt-name"),
        ("name", "a" * 121, "corrupt-name"),
        ("name", "latest", "corrupt-name"),
        ("name", "123", "corrupt-name"),
        ("name", "nul", "corrupt-name"),
        ("name", "Main", "corrupt-name"),
        ("name", "a\n", "corrupt-name"),
        ("txn", b"", "corrupt-section-entry"),
        ("txn", bytes(15), "corrupt-section-entry"),
        ("tree_digest", bytes(15), "corrupt-section-entry"),
        ("tree_digest", bytes(32), "corrupt-section-entry"),
        ("digest", "sha256", "corrupt-section-entry"),
        ("digest", "md5", "corrupt-section-entry"),
        ("parent", [], "corrupt-section-entry"),
        ("parent", ["main"], "corrupt-section-entry"),
        ("parent", ["main", "x"], "corrupt-section-entry"),
        ("parent", [b"main", b"x"], "corrupt-section-entry"),
        ("parent", ["main", b"x", 1], "corrupt-section-entry"),
        ("parent", "main", "corrupt-section-entry"),
        ("requires", ["xor-delta"], "unsupported-requires"),
        ("requires", ["index-parts", "x"], "unsupported-requires"),
        ("requires", [b"x"], "corrupt-section-entry"),
        ("metrics", {"loss": "low"}, "corrupt-section-entry"),
        ("metrics", {"loss": True}, "corrupt-section-entry"),
        ("metrics", {"loss": None}, "corrupt-section-entry"),
        ("metadata", {"a": msgpack.ExtType(7, b"")}, "corrupt-value"),
        ("metadata", {"a": msgpack.ExtType(1, b"\x92\xa5never\xc0")}, "unsupported-value-tag"),
        ("metadata", {"a": {1: 2}}, "corrupt-msgpack"),
        ("nbytes", -1, "corrupt-section-entry"),
        ("nbytes", 1 << 63, "corrupt-section-entry"),
        ("tensors", 1.0, "corrupt-section-entry"),
        ("tensors", True, "corrupt-section-entry"),
    ],
)
def test_about_obeys_its_bounds(documents: ModuleType, key: str, value: object, kind: str) -> None:
    document = documents.index()
    document.about[key] = value
    with pytest.raises(FormatError) as caught:
        parse_index(document.pack())
    assert caught.value.kind == kind


@pytest.mark.parametrize("depth", [64, 400, 1000, 1022])
def test_deep_metadata_is_refused_by_its_depth(documents: ModuleType, depth: int) -> None:
    document = documents.index()
    nested: Any = 0
    for _ in range(depth):
        nested = [nested]
    about = documents.pack({**document.about, "tree_digest": bytes(16), "metadata": 0})
    packed = b"\x81\xa1a" + b"\x91" * depth + b"\0"
    document.about = about.replace(b"\xa8metadata\x00", b"\xa8metadata" + packed)
    with pytest.raises(CorruptError) as caught:
        parse_index(document.pack())
    assert caught.value.kind in ("corrupt-value-depth", "corrupt-msgpack")


def test_step_parent_and_totals_may_be_absent(documents: ModuleType) -> None:
    document = documents.index()
    document.about["name"] = "main"
    for key in ("step", "parent", "nbytes", "tensors"):
        del document.about[key]
    about = parse_index(document.pack()).about
    assert (about.step, about.parent, about.nbytes, about.tensors) == (None, None, 0, 0)


def test_an_error_names_the_document(documents: ModuleType) -> None:
    document = documents.index()
    document.put("tree/leaves/kind", 0, 9)
    with pytest.raises(CorruptError) as caught:
        parse_index(document.pack(), "checkpoints/main~0.index")
    assert "in checkpoints/main~0.index" in caught.value.__notes__
    assert "$.tree.leaves.kind[0]" in str(caught.value)


def test_notes_are_an_index_without_content() -> None:
    about = About(
        name="main", step=None, created="2026-01-02T03:04:05.678901Z", txn=bytes(16), parent=None,
        writer="test", algorithm="xxh3-128", tree_digest=b"", metrics={"val": 1.0},
        metadata={"note": (1, 2)},
    )  # fmt: skip
    index = parse_index(pack_notes(about, bytes(16)))
    assert index.about.metrics == {"val": 1.0}
    assert index.about.metadata == {"note": (1, 2)}
    assert index.tree.leaf_names == []
    assert index.files.ids == []


def test_an_unsupported_document_is_no_damage(documents: ModuleType) -> None:
    document = documents.index()
    document.header["major"] = 7
    with pytest.raises(UnsupportedError, match="format 7"):
        parse_index(document.pack())
