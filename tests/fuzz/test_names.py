"""Any text is a name or refused; keys and names are in one-to-one relation. Spec: 03-names, 02."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import CorruptError, UsageError
from ckptfmt.format import (
    check_checkpoint_name,
    escape_key,
    index_key,
    join_name,
    parse_index_key,
    parse_key,
    split_name,
)

PIECES = st.sampled_from(
    ["~", "/", "~0", "~1", "~2", "~3", "~3i", "~3f", "~3t[", "~3x", "~3b", "~3n", "0", "-", "+", "1",
     "00", "e", ".", "nan", "inf", "0x", "p", '"', "[", "]", ",", "a", "\x00", "\u0660", "é", "\\ud800", "\\u0061", "~3t["]
)  # fmt: skip
# A document's text is UTF-8: it has no lone surrogates.
UTF8 = st.text(st.characters(codec="utf-8"), max_size=12)
TEXT = st.one_of(
    UTF8, st.lists(PIECES, max_size=8).map("".join), st.text("~3itbnfx01[],\"-", max_size=14)
)  # fmt: skip
KEYS = st.recursive(
    st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Equal in type too, so that 1, 1.0 and True are three keys, and 0.0 and -0.0 two."""
    return type(a) is type(b) and repr(a) == repr(b)


@settings(max_examples=500)
@given(TEXT)
def test_any_part_is_a_key_that_gives_it_back_or_is_refused(part: str) -> None:
    check_part(part)


def check_part(part: str) -> None:
    try:
        key = parse_key(part)
    except CorruptError as error:
        assert error.kind in ("corrupt-name", "corrupt-structure")  # noqa: PT017
        return
    # One key has one text: a reader that took two would take two leaves for one.
    assert escape_key(key) == part
    assert same(parse_key(escape_key(key)), key)


@settings(max_examples=300)
@given(TEXT)
def test_the_reference_reader_takes_the_same_parts(reference: ModuleType, part: str) -> None:
    compare_part(reference, part)


def compare_part(reference: ModuleType, part: str) -> None:
    if "/" in part:
        return  # not one part of a name
    try:
        mine = repr(parse_key(part))
    except CorruptError:
        mine = "refused"
    try:
        theirs = repr(reference.parse_part(part))
    except reference.Refused:
        theirs = "refused"
    assert mine == theirs


@settings(max_examples=300)
@given(KEYS)
def test_any_key_has_one_text(key: Any) -> None:
    try:
        part = escape_key(key)
    except UsageError:
        return
    assert "/" not in part
    assert part
    assert same(parse_key(part), key)


@given(st.lists(KEYS, max_size=4))
def test_a_path_comes_back_from_its_name(path: list[Any]) -> None:
    name = ""
    try:
        for key in path:
            name = join_name(name, escape_key(key))
    except UsageError:
        return
    assert [repr(parse_key(part)) for part in split_name(name)] == [repr(key) for key in path]


@settings(max_examples=300)
@given(TEXT | st.from_regex(r"[a-z0-9._-]{1,10}(~[0-9]{1,3})?(\.index)?", fullmatch=True))
def test_any_key_of_a_store_is_an_index_or_ignored(text: str) -> None:
    for key in (text, f"checkpoints/{text}", f"checkpoints/{text}~0.index", f"{text}.index"):
        found = parse_index_key(key)
        if found is None:
            continue
        name, generation = found
        check_checkpoint_name(name)
        assert index_key(name, generation).endswith(key.rpartition("/")[2])


@pytest.mark.slow
@settings(max_examples=20_000)
@given(TEXT)
def test_twenty_thousand_parts(reference: ModuleType, part: str) -> None:
    check_part(part)
    compare_part(reference, part)
