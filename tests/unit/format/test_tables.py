"""Sections of large tables: columns are views, names stay packed until they are asked for."""

from __future__ import annotations

import tracemalloc
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.errors import CorruptError
from ckptfmt.format import PackedNames, parse_index, parse_tables
from ckptfmt.format.columns import parse_map

LAZY = frozenset(["$.leaves.name"])

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=40)
values = st.recursive(
    scalars | st.binary(max_size=300) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=70),
    max_leaves=40,
)


def plain(value: Any) -> Any:
    """Views as the bytes they are of."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return bytes(value) if isinstance(value, memoryview) else value


@given(st.dictionaries(st.text(), values, max_size=70))
def test_tables_are_what_msgpack_makes_of_them(table: dict[str, Any]) -> None:
    data = msgpack.packb(table)
    assert plain(parse_tables(data, "$")) == parse_map(data, "$") == table


@given(st.dictionaries(st.text(), values, max_size=5), st.data())
def test_damaged_tables_are_refused_as_by_msgpack(table: dict[str, Any], data: Any) -> None:
    packed = bytearray(msgpack.packb(table))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    bad = bytes(packed[: data.draw(st.integers(0, len(packed)))])

    def outcome(parse: Any) -> Any:
        try:
            return repr(plain(parse(bad, "$")))  # a NaN is as good as itself
        except CorruptError as error:
            return error.kind

    assert outcome(parse_tables) == outcome(parse_map)


def test_a_column_is_a_view_of_the_section() -> None:
    data = msgpack.packb({"rows": np.arange(1000, dtype="<u4").tobytes(), "n": {"x": bytes(9)}})
    table = parse_tables(data, "$")
    for view in (table["rows"], table["n"]["x"]):
        assert isinstance(view, memoryview)
        assert view.obj is data
        assert view.readonly


def test_names_stay_packed_until_they_are_asked_for() -> None:
    names = ["a", "b/c", "ü" * 5000, ""]
    table = parse_tables(msgpack.packb({"leaves": {"name": names}, "x": 1}), "$", LAZY)
    packed = table["leaves"]["name"]
    assert isinstance(packed, PackedNames)
    assert len(packed) == 4
    assert bytes(packed.packed) == msgpack.packb(names)
    assert packed.names() == names
    assert packed.names() is packed.names()


@pytest.mark.parametrize("count", [0, 15, 16, 65535, 65536])
def test_the_number_of_packed_names_is_told_by_their_header(count: int) -> None:
    data = msgpack.packb({"leaves": {"name": list(map(str, range(count)))}})
    assert len(parse_tables(data, "$", LAZY)["leaves"]["name"]) == count


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (msgpack.packb(["a", "b", "a"]), "corrupt-duplicate-name"),
        (msgpack.packb(["a", 1]), "corrupt-section-entry"),
        (msgpack.packb(["a", b"b"]), "corrupt-section-entry"),
        (msgpack.packb(["a", {"a": {"a": []}}]), "corrupt-section-entry"),
        (b"\x92\xa1a\xa1\xff", "corrupt-msgpack"),
        (b"\x91\x82\xa1a\xc0\xa1a\xc0", "corrupt-msgpack"),
        (msgpack.packb(["a" * ((1 << 20) + 1)]), "corrupt-name"),
    ],
)
def test_packed_names_are_checked_when_they_are_asked_for(names: bytes, kind: str) -> None:
    data = b"\x81\xa6leaves\x81\xa4name" + names
    packed = parse_tables(data, "$", LAZY)["leaves"]["name"]
    packed.document = "checkpoints/x~0.index"
    for _ in range(2):  # not only the first time
        with pytest.raises(CorruptError) as caught:
            packed.names()
        assert caught.value.kind == kind
        assert caught.value.__notes__ == ["in checkpoints/x~0.index"]


@pytest.mark.parametrize(
    "names",
    [
        b"\xdd\xff\xff\xff\xff\xa1a",  # more names than there are bytes
        b"\xdd\x00\x0f\xff\xff" * 500,  # lists that claim to be long, in each other
        b"\x92\xa1a\xdb\xff\xff\xff\xffa",
        b"\xc6\xff\xff\xff\xff",
        b"\xc6\x00",
        b"\xdd\x00",
        b"\xc1",
        b"",
    ],
)
def test_names_that_claim_more_than_there_is_are_refused_at_once(names: bytes) -> None:
    data = b"\x81\xa6leaves\x81\xa4name" + names
    tracemalloc.start()
    with pytest.raises(CorruptError) as caught:
        parse_tables(data, "$", LAZY)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.kind == "corrupt-msgpack"
    assert peak < 1 << 20


def test_names_that_are_no_array_are_refused_when_the_index_is_parsed(
    documents: ModuleType,
) -> None:
    for wrong in (b"ab", "ab", 7, {"a": "b"}, None):
        document = documents.index()
        document.tree["leaves"]["name"] = wrong
        with pytest.raises(CorruptError) as caught:
            parse_index(document.pack(), lazy=True)
        assert caught.value.kind == "corrupt-section-entry"


def test_an_index_of_many_tensors_is_parsed_without_an_object_for_each(
    documents: ModuleType,
) -> None:
    """And beside the document little memory is needed, whatever its size (M07-30)."""
    few, many = (documents.many(count) for count in (1_000, 100_000))
    parse_index(few, lazy=True)

    def measure(data: bytes) -> tuple[int, int]:
        tracemalloc.start()
        index = parse_index(data, lazy=True)
        _, peak = tracemalloc.get_traced_memory()
        blocks = sum(s.count for s in tracemalloc.take_snapshot().statistics("filename"))
        tracemalloc.stop()
        assert len(index.tree.names) == len(index.tree.leaf_kinds)
        return blocks, peak

    blocks_of_few, _ = measure(few)
    blocks_of_many, peak = measure(many)
    assert blocks_of_many < blocks_of_few + 200
    assert peak < len(many) // 2 + (4 << 20)
    assert parse_index(many, lazy=True).tree.leaf_names == parse_index(many).tree.leaf_names
