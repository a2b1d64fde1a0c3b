"""The `tree` section: types, lengths, orders and relations of its columns. Spec: 07-index §7.4, §7.6."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ckptfmt.errors import CorruptError, FormatError
from ckptfmt.format import pack_tree, parse_index, parse_tree

Change = Callable[[Any], object]

COLUMNS = [
    "dtypes/bits", "leaves/kind", "leaves/row", "tensors/dtype", "tensors/ndim", "tensors/dims",
    "regions/tensor", "regions/origin", "regions/extent", "regions/nchunks", "chunks/raw",
    "chunks/digest",
]  # fmt: skip
LISTS = [
    "dtypes/name", "leaves/name", "values", "containers/name", "containers/kind",
    "containers/argument",
]  # fmt: skip
TABLES = ["dtypes", "leaves", "containers", "tensors", "regions", "chunks"]


def refused(document: Any) -> str:
    with pytest.raises(FormatError) as caught:
        parse_index(document.pack())
    return caught.value.kind


def test_columns_come_out_as_they_went_in(documents: ModuleType) -> None:
    document = documents.index()
    tree = parse_index(document.pack()).tree
    assert tree.values == document.tree["values"]
    assert tree.tensor_dims.tolist() == document.tree["tensors"]["dims"].tolist()
    assert tree.region_origins.tolist() == document.tree["regions"]["origin"].tolist()
    assert (tree.chunk_digests == document.tree["chunks"]["digest"]).all()
    assert tree.leaf_attributes["torch.requires_grad"].rows.tolist() == [0, 3]
    assert pack_tree(tree) == documents.pack(document.tree)


def test_derived_columns_say_where_things_are(documents: ModuleType) -> None:
    tree = parse_index(documents.index().pack()).tree
    assert tree.shape(0) == (1024,)
    assert tree.shape(1) == ()
    assert tree.shape(6) == (3, 3)
    assert tree.dtype(2).name == "int4"
    assert tree.tensor_numel.tolist() == [1024, 1, 15, 2, 5000, 0, 9, 2048, 4, 1]
    assert tree.tensor_nbytes.tolist() == [4096, 4, 8, 27, 5000, 0, 36, 8192, 12, 4]
    assert tree.tensor_is_empty.tolist() == [False] * 5 + [True] + [False] * 4
    assert tree.tensor_region_starts.tolist() == [0, 1, 2, 3, 4, 5, 5, 10, 11, 12, 13]
    assert tree.box(6) == ((0, 2), (2, 1))
    assert [tree.leaf_names[row] for row in tree.tensor_first_leaf] == [
        "model/a", "model/b", "nibbles", "text", "long", "empty", "cut", "packed", "rare", "same",
    ]  # fmt: skip
    assert tree.leaf_positions["model/tied"] == 3


@pytest.mark.parametrize("path", [*COLUMNS, *LISTS, *TABLES])
def test_a_part_that_is_absent_or_of_another_type_is_refused(
    documents: ModuleType, path: str
) -> None:
    others: list[Any] = [None, 3, "text", [[]], [1.5], b"" if path in TABLES else {"a": 1}]
    for wrong in others:
        document = documents.index()
        document.set(f"tree/{path}", wrong)
        assert refused(document) == "corrupt-section-entry", wrong
    document = documents.index()
    document.drop(f"tree/{path}")
    assert refused(document) == "corrupt-section-entry"


@pytest.mark.parametrize("path", COLUMNS)
def test_a_column_is_a_whole_number_of_rows(documents: ModuleType, path: str) -> None:
    document = documents.index()
    whole = document.get(f"tree/{path}").tobytes()
    if path.split("/")[-1] in ("kind", "ndim"):
        whole += b"\0"  # one byte a row: it is a row too many
    document.set(f"tree/{path}", whole[:-1] if whole[-1:] != b"\0" else whole + b"\0")
    assert refused(document) == "corrupt-column-length"


@pytest.mark.parametrize("path", [*COLUMNS, "dtypes/name", "leaves/name", *LISTS[3:]])
@pytest.mark.parametrize("change", ["short", "long", "empty"])
def test_columns_of_a_table_have_one_length(documents: ModuleType, path: str, change: str) -> None:
    document = documents.index()
    document.tree["attributes"] = {}
    path = f"tree/{path}"
    if change == "short":
        document.cut(path, -1)
    elif change == "long":
        document.repeat(path, -1)
    else:
        document.cut(path, 0)
    assert refused(document) == "corrupt-column-length"


@pytest.mark.parametrize("which", ["leaves", "containers"])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda a: a.update(rows=a["rows"][:1]), "corrupt-column-length"),
        (lambda a: a.update(values=a["values"][:1]), "corrupt-column-length"),
        (lambda a: a.update(rows=b"\0" * 7), "corrupt-column-length"),
        (lambda a: a.update(rows=[0, 1]), "corrupt-section-entry"),
        (lambda a: a.update(values=["a", "b"]), "corrupt-section-entry"),
        (lambda a: a.pop("rows"), "corrupt-section-entry"),
        (lambda a: a.pop("values"), "corrupt-section-entry"),
        (lambda a: a.update(rows=np.array([1, 0], "<u4")), "corrupt-column-range"),
        (lambda a: a.update(rows=np.array([0, 0], "<u4")), "corrupt-column-range"),
        (lambda a: a.update(rows=np.array([0, 13], "<u4")), "corrupt-column-range"),
        (lambda a: a.update(rows=np.array([0, 2**32 - 1], "<u4")), "corrupt-column-range"),
    ],
)
def test_attributes_name_rows_of_their_table(
    documents: ModuleType, which: str, change: Change, kind: str
) -> None:
    document = documents.index()
    entry = {"rows": np.array([0, 1], "<u4"), "values": [b"\xc0", b"\xc0"]}
    if which == "containers":
        document.put("tree/containers/name", 0, "model")
        document.tree["containers"]["name"].append("more")
        document.repeat("tree/containers/kind", 0)
        document.repeat("tree/containers/argument", 0)
    document.set(f"tree/attributes/{which}", {"some.key": entry})
    parse_index(document.pack())
    change(entry)
    assert refused(document) == kind


@pytest.mark.parametrize("value", [None, 1, [], {"leaves": 1}, {"leaves": {"a.b": 1}}])
def test_attributes_are_maps(documents: ModuleType, value: object) -> None:
    document = documents.index()
    document.tree["attributes"] = value
    assert refused(document) == "corrupt-section-entry"


def test_attributes_may_be_absent(documents: ModuleType) -> None:
    cases: list[Any] = [None, {}, {"leaves": {}}, {"containers": {}}]
    for attributes in cases:
        document = documents.index()
        document.tree["attributes"] = attributes
        if attributes is None:
            del document.tree["attributes"]
        assert parse_index(document.pack()).tree.leaf_attributes == {}


@pytest.mark.parametrize(
    ("path", "row", "value", "kind"),
    [
        ("leaves/name", 1, "model/a", "corrupt-duplicate-name"),
        ("leaves/name", 12, "text", "corrupt-duplicate-name"),
        ("leaves/name", 0, "x" * (2**20 + 1), "corrupt-name"),
        ("leaves/kind", 0, 3, "corrupt-column-range"),
        ("leaves/kind", 0, 255, "corrupt-column-range"),
        ("leaves/kind", 0, 1, "corrupt-order"),
        ("leaves/row", 0, 1, "corrupt-order"),
        ("leaves/row", 11, 2**32 - 1, "corrupt-order"),
        ("leaves/row", 2, 1, "corrupt-order"),
        ("leaves/row", 3, 9, "corrupt-order"),
        ("leaves/row", 11, 3, "corrupt-order"),
        ("values", 0, bytes(4097), "corrupt-value"),
        ("tensors/dtype", 0, 1, "corrupt-order"),
        ("tensors/dtype", 9, 5, "corrupt-order"),
        ("tensors/dtype", 8, 0, "corrupt-order"),
        ("dtypes/name", 1, "float32", "corrupt-dtype"),
        ("dtypes/name", 1, "", "corrupt-dtype"),
        ("dtypes/bits", 0, 64, "corrupt-dtype"),
        ("dtypes/bits", 0, 0, "corrupt-dtype"),
        ("dtypes/bits", 2, 8, "corrupt-dtype"),
        ("dtypes/bits", 4, 0, "corrupt-dtype"),
        ("dtypes/bits", 4, 23, "corrupt-dtype"),
        ("tensors/ndim", 0, 65, "corrupt-dims"),
        ("tensors/ndim", 0, 255, "corrupt-dims"),
        ("tensors/ndim", 0, 2, "corrupt-column-length"),
        ("tensors/dims", 0, 2**63, "corrupt-dims-overflow"),
        ("tensors/dims", 0, 2**64 - 1, "corrupt-dims-overflow"),
        ("tensors/dims", 0, 2**60, "corrupt-dims-overflow"),
        ("tensors/dims", 1, 2**63 - 1, "corrupt-dims-overflow"),
        ("tensors/dims", 0, 1025, "corrupt-regions"),
        ("tensors/dims", 0, 0, "corrupt-regions"),
        ("tensors/dims", 5, 1, "corrupt-regions"),
        ("regions/tensor", 0, 2, "corrupt-column-range"),
        ("regions/tensor", 12, 10, "corrupt-column-range"),
        ("regions/tensor", 12, 2**32 - 1, "corrupt-column-range"),
        ("regions/nchunks", 0, 0, "corrupt-column-range"),
        ("regions/nchunks", 0, 2, "corrupt-column-length"),
        ("regions/nchunks", 0, 2**32 - 1, "corrupt-column-length"),
        ("regions/origin", 0, 1, "corrupt-regions"),
        ("regions/origin", 0, 2**64 - 1, "corrupt-regions"),
        ("regions/extent", 0, 1023, "corrupt-regions"),
        ("regions/extent", 0, 2**64 - 1, "corrupt-regions"),
        ("regions/extent", 0, 0, "corrupt-regions"),
        ("regions/extent", 6, 2**63, "corrupt-regions"),
        ("regions/origin", 6, 2**64 - 1, "corrupt-regions"),
        ("chunks/raw", 0, 0, "corrupt-chunk-length"),
        ("chunks/raw", 0, 4095, "corrupt-chunk-length"),
        ("chunks/raw", 0, 2**30 + 1, "corrupt-chunk-length"),
        ("chunks/raw", 0, 2**32 - 1, "corrupt-chunk-length"),
        ("chunks/raw", 3, 23, "corrupt-chunk-length"),
        ("chunks/raw", 4, 4032, "corrupt-chunk-length"),
        ("chunks/raw", 4, 8192, "corrupt-chunk-length"),
        ("chunks/raw", 5, 4097, "corrupt-chunk-length"),
        ("chunks/raw", 5, 903, "corrupt-chunk-length"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused(
    documents: ModuleType, path: str, row: int, value: object, kind: str
) -> None:
    document = documents.index()
    document.put(f"tree/{path}", row, value)
    assert refused(document) == kind


def test_containers_stand_once(documents: ModuleType) -> None:
    document = documents.index()
    for key in ("name", "kind", "argument"):
        document.repeat(f"tree/containers/{key}", 0)
    assert refused(document) == "corrupt-duplicate-name"


def test_a_row_that_nothing_uses_is_refused(documents: ModuleType) -> None:
    document = documents.index()
    document.repeat("tree/values", 0)
    assert refused(document) == "corrupt-order"
    document = documents.index()
    document.tree["dtypes"] = {
        "name": [*document.tree["dtypes"]["name"], "int8"],
        "bits": np.append(document.tree["dtypes"]["bits"], np.uint32(8)),
    }
    assert refused(document) == "corrupt-order"


def test_the_longest_value_and_the_longest_name_are_taken(documents: ModuleType) -> None:
    document = documents.index()
    document.put("tree/values", 0, b"\xc5\x0f\xfd" + bytes(4093))
    document.put("tree/leaves/name", 12, "x" * 2**20)
    assert len(parse_index(document.pack()).tree.values[0]) == 4096


@pytest.mark.parametrize("wrong", ["dtype", "axes"])
def test_a_packed_value_is_a_run_of_bytes(documents: ModuleType, wrong: str) -> None:
    document = documents.index()
    assert document.get("tree/leaves/name")[6] == "long"
    if wrong == "dtype":
        document.put("tree/leaves/kind", 0, 2)
    else:
        document.put("tree/tensors/ndim", 4, 2)
        for key, value in (("tensors/dims", 1), ("regions/origin", 0), ("regions/extent", 1)):
            path = f"tree/{key}"
            document.set(path, np.insert(document.get(path), 5, value))
        document.put("tree/leaves/kind", 6, 0)
        parse_index(document.pack())
        document.put("tree/leaves/kind", 6, 2)
    assert refused(document) == "corrupt-value"


def boxes(document: Any, *rows: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Other boxes for the tensor `cut` of 3 x 3, which has five."""
    flat = slice(5, 15)
    assert len(rows) == 5
    document.get("tree/regions/origin")[flat] = [x for origin, _ in rows for x in origin]
    document.get("tree/regions/extent")[flat] = [x for _, extent in rows for x in extent]
    volumes = [extent[0] * extent[1] * 4 for _, extent in rows]
    document.get("tree/chunks/raw")[6:11] = volumes
    document.get("placement/stored")[6:11] = volumes
    return document


ROUND = (((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((1, 1), (1, 1)), ((2, 1), (1, 2)))


def test_boxes_that_no_cut_separates_are_a_tiling(documents: ModuleType) -> None:
    assert parse_index(boxes(documents.index(), *ROUND).pack()).tree.tensor_nbytes[6] == 36


@pytest.mark.parametrize(
    ("row", "box", "kind"),
    [
        (3, ((1, 1), (1, 2)), "corrupt-regions"),
        (3, ((1, 2), (1, 1)), "corrupt-regions"),
        (0, ((0, 0), (1, 1)), "corrupt-regions"),
        (0, ((0, 0), (1, 3)), "corrupt-regions"),
        (4, ((2, 1), (1, 3)), "corrupt-regions"),
        (4, ((2, 1), (2, 2)), "corrupt-regions"),
        (4, ((3, 1), (1, 2)), "corrupt-regions"),
        (3, ((1, 0), (1, 1)), "corrupt-order"),
        (1, ((0, 0), (2, 1)), "corrupt-order"),
        (2, ((0, 1), (2, 1)), "corrupt-order"),
    ],
)
def test_boxes_that_are_no_tiling_are_refused(
    documents: ModuleType, row: int, box: tuple[tuple[int, int], tuple[int, int]], kind: str
) -> None:
    rows = [*ROUND]
    rows[row] = box
    assert refused(boxes(documents.index(), *rows)) == kind


def test_volumes_that_fit_do_not_make_a_tiling(documents: ModuleType) -> None:
    # Inside, sorted, nine elements in all; one covered twice and one never.
    rows = [
        ((0, 0), (1, 2)),
        ((0, 1), (2, 1)),
        ((1, 0), (2, 1)),
        ((1, 2), (1, 1)),
        ((2, 1), (1, 2)),
    ]
    assert sum(e[0] * e[1] for _, e in rows) == 9
    assert refused(boxes(documents.index(), *rows)) == "corrupt-regions"


def test_strings_are_never_cut(documents: ModuleType) -> None:
    document = documents.index()
    bits = document.get("tree/dtypes/bits")
    bits[[0, 2]] = bits[[2, 0]]
    document.set("tree/dtypes/name", ["string", "int4", "float32", "uint8", "float24_of_tomorrow"])
    assert refused(document) == "corrupt-regions"


def test_a_tensor_without_bytes_has_no_region(documents: ModuleType) -> None:
    document = documents.index()
    document.put("tree/dtypes/name", 4, "str0")
    document.put("tree/dtypes/bits", 4, 0)
    assert refused(document) == "corrupt-regions"
    for path, rows in (
        ("regions/tensor", [11]), ("regions/nchunks", [11]), ("regions/origin", [16, 17]),
        ("regions/extent", [16, 17]), ("chunks/raw", [13]), ("chunks/digest", [13]),
    ):  # fmt: skip
        document.set(f"tree/{path}", np.delete(document.get(f"tree/{path}"), rows, axis=0))
    for key in ("file", "offset", "stored", "codec", "digest"):
        path = f"placement/{key}"
        document.set(path, np.delete(document.get(path), 13, axis=0))
    tree = parse_index(document.pack()).tree
    assert tree.tensor_is_empty.tolist() == [False] * 5 + [True] + [False] * 2 + [True, False]


def test_a_tree_that_is_one_value_has_empty_columns(documents: ModuleType) -> None:
    document = documents.index()
    for path in COLUMNS[3:]:
        document.cut(f"tree/{path}", 0)
    document.tree["dtypes"] = {"name": [], "bits": b""}
    document.tree["leaves"] = {"name": [""], "kind": b"\1", "row": bytes(4)}
    document.tree["values"] = [b"\xc0"]
    document.tree["containers"] = {"name": [], "kind": [], "argument": []}
    del document.tree["attributes"]
    made = parse_tree(documents.pack(document.tree), "xxh3-128")
    assert made.leaf_names == [""]
    assert made.tensor_nbytes.tolist() == []


def test_the_first_wrong_row_is_named(documents: ModuleType) -> None:
    document = documents.index()
    document.put("tree/leaves/kind", 5, 9)
    document.put("tree/leaves/kind", 9, 9)
    with pytest.raises(CorruptError, match=r"\$\.tree\.leaves\.kind\[5\]: found 9"):
        parse_index(document.pack())
