"""Maps, columns, and what is computed of them. Spec: 07-index §7.4."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.errors import CorruptError
from ckptfmt.format.columns import (
    U16,
    U64,
    check_all,
    check_rows,
    check_unique,
    first_use_order,
    get_column,
    get_digests,
    get_list,
    get_map,
    get_scalar,
    pack_map,
    parse_map,
    ragged,
    starts,
)

KEYS = st.text(max_size=3)
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4)
    | st.binary(max_size=4) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(KEYS, PLAIN, max_size=4))
def test_a_map_comes_back(table: dict[str, Any]) -> None:
    assert parse_map(pack_map(table), "$") == table


def test_a_column_comes_back_as_it_lies_in_memory() -> None:
    column = np.arange(10, dtype="<u8")[::2]
    table = parse_map(pack_map({"a": column}), "$")
    made = get_column(table, "a", U64, "$")
    assert made.tolist() == [0, 2, 4, 6, 8]
    assert not made.flags.writeable


def test_a_key_twice_is_named() -> None:
    data = b"\x83\xa1a\xc0\xa1b\xc0\xa1a\xc0"
    with pytest.raises(CorruptError, match="key 'a'"):
        parse_map(data, "$")


def test_a_key_twice_among_very_many_is_found_at_once() -> None:
    count = 200_000
    keys = [msgpack.packb(f"{i}") for i in range(count - 1)]
    data = b"\xdf" + count.to_bytes(4, "big") + b"\xc0".join([*keys, keys[-1]]) + b"\xc0"
    before = time.process_time()
    with pytest.raises(CorruptError, match="duplicate key"):
        parse_map(data, "$")
    # Comparing all pairs would take minutes.
    assert time.process_time() - before < 10


def test_a_long_text_in_an_error_is_cut() -> None:
    key = "k" * 100_000
    data = b"\x82" + (msgpack.packb(key) + b"\xc0") * 2
    with pytest.raises(CorruptError) as caught:
        parse_map(data, "$")
    assert len(str(caught.value)) < 400
    with pytest.raises(CorruptError) as caught:
        check_unique([key, key], "$.name")
    assert len(str(caught.value)) < 400


TABLE: dict[str, Any] = {
    "map": {"a": 1}, "column": bytes(16), "list": ["a", "b"], "bytes": [b"a"], "int": 3,
    "flag": True, "none": None,
}  # fmt: skip


def test_entries_of_the_right_type_are_given() -> None:
    assert get_map(TABLE, "map", "$") == {"a": 1}
    assert get_column(TABLE, "column", U64, "$").tolist() == [0, 0]
    assert get_digests(TABLE, "column", 16, "$").shape == (1, 16)
    assert get_list(TABLE, "list", str, "$") == ["a", "b"]
    assert get_list(TABLE, "bytes", bytes, "$") == [b"a"]
    assert get_scalar(TABLE, "int", int, "$") == 3


@pytest.mark.parametrize("key", [*TABLE, "absent"])
def test_entries_of_another_type_are_refused_with_their_path(key: str) -> None:
    gets: dict[str, Any] = {
        "map": lambda: get_map(TABLE, key, "$.x"),
        "column": lambda: get_column(TABLE, key, U64, "$.x"),
        "list": lambda: get_list(TABLE, key, str, "$.x"),
        "bytes": lambda: get_list(TABLE, key, bytes, "$.x"),
        "int": lambda: get_scalar(TABLE, key, int, "$.x"),
    }
    for right, get in gets.items():
        if right == key:
            get()
            continue
        with pytest.raises(CorruptError) as caught:
            get()
        assert caught.value.kind == "corrupt-section-entry"
        assert f"$.x.{key}" in str(caught.value)


def test_columns_are_whole_numbers_of_rows_and_of_one_length() -> None:
    for get in (
        lambda: get_column({"a": bytes(7)}, "a", U64, "$"),
        lambda: get_column({"a": bytes(3)}, "a", U16, "$"),
        lambda: get_digests({"a": bytes(17)}, "a", 16, "$"),
        lambda: check_rows("$", 3, a=[1, 2, 3], b=[1, 2]),
    ):
        with pytest.raises(CorruptError) as caught:
            get()
        assert caught.value.kind == "corrupt-column-length"


def test_the_first_row_that_is_not_good_is_named() -> None:
    column = np.array([1, 2, 30, 40])
    check_all(column < 50, "too large", "column-range", "$.a", column)
    with pytest.raises(CorruptError, match=r"too large: \$\.a\[2\]: found 30"):
        check_all(column < 10, "too large", "column-range", "$.a", column)


@given(st.lists(st.text(max_size=2), max_size=30))
def test_names_are_unique_or_refused(names: list[str]) -> None:
    if len(set(names)) == len(names):
        check_unique(names, "$")
        return
    with pytest.raises(CorruptError) as caught:
        check_unique(names, "$")
    assert caught.value.kind == "corrupt-duplicate-name"


def test_names_with_one_hash_are_told_apart() -> None:
    class Same(str):
        __slots__ = ()
        __hash__ = lambda self: 7  # noqa: E731

    check_unique([Same("a"), Same("b")], "$")
    with pytest.raises(CorruptError):
        check_unique([Same("a"), Same("a")], "$")


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(0, 7))
def test_numbering_by_first_use(rows: list[int], count: int) -> None:
    seen: list[int] = []
    for row in rows:
        if row not in seen:
            seen.append(row)
    expected = seen == list(range(count))
    assert first_use_order(np.array(rows, np.uint32), count) is expected


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), max_size=8))
def test_ragged_ranges_follow_one_another(ranges: list[tuple[int, int]]) -> None:
    begins = np.array([b for b, _ in ranges], np.uint64)
    counts = np.array([n for _, n in ranges], np.uint8)
    expected = [i for b, n in ranges for i in range(b, b + n)]
    assert ragged(begins, counts).tolist() == expected
    assert starts(counts).tolist() == [
        sum(n for _, n in ranges[:i]) for i in range(len(ranges) + 1)
    ]


def test_sums_of_narrow_columns_do_not_wrap() -> None:
    assert starts(np.full(3, 2**32 - 1, np.uint32)).tolist()[-1] == 3 * (2**32 - 1)
    assert starts(np.full(3, 255, np.uint8)).tolist()[-1] == 765
