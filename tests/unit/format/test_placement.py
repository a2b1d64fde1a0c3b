"""`files` and `placement`: where the bytes are. Spec: 07-index §7.4, §7.5, §7.6."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ckptfmt.errors import FormatError
from ckptfmt.format import pack_placement, parse_files, parse_index

PLACEMENT = ["file", "offset", "stored", "codec", "digest"]


def refused(document: Any) -> str:
    with pytest.raises(FormatError) as caught:
        parse_index(document.pack())
    return caught.value.kind


def test_rows_come_out_as_they_went_in(documents: ModuleType) -> None:
    document = documents.index()
    index = parse_index(document.pack())
    assert index.files.ids == ["01" * 16, "02" * 16]
    assert index.placement.pipelines == ((), (("zstd",),))
    for key, column in (
        ("file", index.placement.files), ("offset", index.placement.offsets),
        ("stored", index.placement.stored), ("codec", index.placement.codecs),
    ):  # fmt: skip
        assert column.tolist() == document.placement[key].tolist()
    assert pack_placement(index.placement) == documents.pack(document.placement)


def test_without_an_encoded_chunk_stored_digests_may_be_absent(documents: ModuleType) -> None:
    document = documents.index()
    document.placement["codec"][:] = 0
    document.placement["stored"] = document.tree["chunks"]["raw"].copy()
    document.placement["offset"][11:14] = [64, 4160, 8256]
    document.files["nbytes"][1] = 12288
    del document.placement["digest"]
    assert parse_index(document.pack()).placement.digests is None


def test_files_need_no_other_section(documents: ModuleType) -> None:
    document = documents.index("sha256")
    files = parse_files(documents.pack(document.files), "sha256")
    assert files.ids == ["01" * 32, "02" * 32]
    assert files.nbytes.tolist() == [16384, 8192]


@pytest.mark.parametrize(
    "path", ["files/id", "files/nbytes", *(f"placement/{k}" for k in PLACEMENT)]
)
def test_a_column_that_is_absent_wrong_or_of_another_length_is_refused(
    documents: ModuleType, path: str
) -> None:
    wrong: list[Any] = [None, 3, "text", [1], {"a": 1}]
    for value in wrong:
        document = documents.index()
        document.set(path, value)
        assert refused(document) == "corrupt-section-entry"
    document = documents.index()
    document.drop(path)
    assert refused(document) == "corrupt-section-entry"
    for cut in (1, 0):
        document = documents.index()
        document.cut(path, cut)
        assert refused(document) == "corrupt-column-length"
    document = documents.index()
    document.repeat(path, -1)
    assert refused(document) in ("corrupt-column-length", "corrupt-order")
    document = documents.index()
    document.set(path, document.get(path).tobytes()[:-1])
    assert refused(document) == "corrupt-column-length"


@pytest.mark.parametrize(
    "value",
    [
        None, 3, b"", {}, [], [[["zstd"]]], [[]] * 257, [[], [["zstd"]] * 5], [[], "zstd"],
        [[], ["zstd"]], [[], [[]]], [[], [[1]]], [[], [["zstd", 1.5]]], [[], [["zstd", None]]],
        [[], [[b"zstd"]]], [[], [["zstd", ["x"]]]], [None, []], [[[]]],
    ],
    ids=str,
)  # fmt: skip
def test_pipelines_that_are_none_are_refused(documents: ModuleType, value: object) -> None:
    document = documents.index()
    document.placement["pipelines"] = value
    assert refused(document) == "corrupt-pipeline"
    if value is None:
        del document.placement["pipelines"]
        assert refused(document) == "corrupt-pipeline"


def test_unknown_codecs_and_unused_pipelines_pass(documents: ModuleType) -> None:
    document = documents.index()
    document.placement["pipelines"] = [
        [], [["of tomorrow", 3, "x"]], *[[["zstd"]] * 4] * 254
    ]  # fmt: skip
    assert len(parse_index(document.pack()).placement.pipelines) == 256


@pytest.mark.parametrize(
    ("path", "row", "value", "kind"),
    [
        ("files/nbytes", 0, 0, "corrupt-column-range"),
        ("files/nbytes", 0, 4095, "corrupt-column-range"),
        ("files/nbytes", 0, 4097, "corrupt-column-range"),
        ("files/nbytes", 1, 2**63, "corrupt-column-range"),
        ("files/nbytes", 1, 2**64 - 4096, "corrupt-column-range"),
        ("files/nbytes", 0, 4096, "corrupt-chunk-range"),
        ("files/id", 0, 2, "corrupt-order"),
        ("files/id", 0, 3, "corrupt-order"),
        ("placement/file", 0, 2, "corrupt-column-range"),
        ("placement/file", 14, 2**32 - 1, "corrupt-column-range"),
        ("placement/codec", 0, 2, "corrupt-column-range"),
        ("placement/codec", 0, 255, "corrupt-column-range"),
        ("placement/codec", 11, 0, "corrupt-chunk-digest"),
        ("placement/digest", 0, 0, "corrupt-chunk-digest"),
        ("placement/stored", 0, 0, "corrupt-chunk-length"),
        ("placement/stored", 11, 0, "corrupt-chunk-length"),
        ("placement/stored", 0, 4095, "corrupt-chunk-length"),
        ("placement/stored", 11, 2**32 - 1, "corrupt-chunk-range"),
        ("placement/stored", 12, 4032, "corrupt-chunk-range"),
        ("placement/offset", 0, 0, "corrupt-chunk-range"),
        ("placement/offset", 0, 63, "corrupt-chunk-range"),
        ("placement/offset", 0, 16384 - 64 - 4095, "corrupt-chunk-range"),
        ("placement/offset", 0, 16384, "corrupt-chunk-range"),
        ("placement/offset", 0, 2**63 - 1, "corrupt-chunk-range"),
        ("placement/offset", 0, 2**63, "corrupt-chunk-range"),
        ("placement/offset", 0, 2**64 - 1, "corrupt-chunk-range"),
        ("placement/offset", 0, 65, "corrupt-overlap"),
        ("placement/offset", 3, 4224, "corrupt-overlap"),
        ("placement/offset", 2, 4163, "corrupt-overlap"),
        ("placement/offset", 14, 4161, "corrupt-overlap"),
        ("placement/codec", 14, 1, "corrupt-overlap"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused(
    documents: ModuleType, path: str, row: int, value: int, kind: str
) -> None:
    document = documents.index()
    assert document.placement["offset"][:4].tolist() == [64, 4160, 4224, 4288]
    document.put(path, row, value)
    assert refused(document) == kind


def test_a_chunk_may_reach_the_footer_and_not_enter_it(documents: ModuleType) -> None:
    document = documents.index()
    document.placement["offset"][0] = 16384 - 64 - 4096
    parse_index(document.pack())
    document.placement["offset"][0] += 1
    assert refused(document) == "corrupt-chunk-range"


def test_every_file_is_used(documents: ModuleType) -> None:
    document = documents.index()
    document.files = {
        "id": np.concatenate([document.files["id"], np.full((1, 16), 3, np.uint8)]),
        "nbytes": np.append(document.files["nbytes"], np.uint64(4096)),
    }
    assert refused(document) == "corrupt-column-range"


def test_stored_digests_are_there_if_a_chunk_is_encoded(documents: ModuleType) -> None:
    document = documents.index()
    del document.placement["digest"]
    assert refused(document) == "corrupt-section-entry"


@pytest.mark.parametrize("change", ["digest", "raw", "stored"])
def test_rows_share_a_range_only_with_equal_content(documents: ModuleType, change: str) -> None:
    document = documents.index()
    assert document.placement["offset"][14] == document.placement["offset"][1]
    if change == "digest":
        document.put("tree/chunks/digest", 14, 7)
        document.put("placement/digest", 14, 7)
    elif change == "stored":
        document.put("placement/codec", 1, 1)
        document.put("placement/codec", 14, 1)
        document.put("placement/stored", 1, 3)
    else:
        document.put("placement/codec", 1, 1)
        document.put("placement/codec", 14, 1)
        document.put("tree/chunks/raw", 14, 8)
        document.put("tree/tensors/ndim", 9, 1)
        for key, value in (("tensors/dims", 2), ("regions/origin", 0), ("regions/extent", 2)):
            path = f"tree/{key}"
            document.set(path, np.append(document.get(path), np.uint64(value)))
    assert refused(document) == "corrupt-overlap"


def test_many_overlapping_ranges_are_refused_wherever_they_stand(documents: ModuleType) -> None:
    rng = np.random.default_rng(0)
    count = 5000
    for trial in range(20):
        document = many(documents, count)
        order = rng.permutation(count) if trial % 2 else np.arange(count)
        document.placement["offset"] = (64 + 64 * order).astype("<u8")
        parse_index(document.pack())
        row, other = rng.choice(count, 2, replace=False)
        document.placement["offset"][row] = document.placement["offset"][other] + 1
        assert refused(document) == "corrupt-overlap"


def many(documents: ModuleType, count: int) -> Any:
    """An index of `count` tensors of 64 bytes, all in one file."""
    document = documents.index()
    zeros = np.zeros(count, "<u8")
    document.tree |= {
        "dtypes": {"name": ["uint8"], "bits": np.array([8], "<u4")},
        "leaves": {
            "name": [str(i) for i in range(count)], "kind": zeros.astype("u1"),
            "row": np.arange(count, dtype="<u4"),
        },
        "values": [],
        "tensors": {
            "dtype": zeros.astype("<u2"), "ndim": zeros.astype("u1") + np.uint8(1),
            "dims": zeros + np.uint64(64),
        },
        "regions": {
            "tensor": np.arange(count, dtype="<u4"), "origin": zeros,
            "extent": zeros + np.uint64(64), "nchunks": np.ones(count, "<u4"),
        },
        "chunks": {
            "raw": np.full(count, 64, "<u4"),
            "digest": np.arange(16 * count, dtype="<u8").astype("u1").reshape(-1, 16),
        },
    }  # fmt: skip
    del document.tree["attributes"]
    document.files = {
        "id": bytes(16), "nbytes": np.array([-(-(64 * count + 128) // 4096) * 4096], "<u8")
    }  # fmt: skip
    document.placement = {
        "file": zeros.astype("<u4"), "offset": 64 + 64 * np.arange(count, dtype="<u8"),
        "stored": np.full(count, 64, "<u4"), "codec": zeros.astype("u1"), "pipelines": [[]],
    }  # fmt: skip
    return document
