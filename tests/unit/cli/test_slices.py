"""`NAME[0:8,3]` is read as NumPy would read it."""

from __future__ import annotations

import pytest

from ckptfmt.cli.slices import parse_region, parse_subject
from ckptfmt.errors import UsageError


@pytest.mark.parametrize(
    ("text", "region"),
    [
        ("0", (0,)),
        ("-1", (-1,)),
        ("0:8,3", (slice(0, 8), 3)),
        (":, 0", (slice(None), 0)),
        ("..., -1", (..., -1)),
        ("::2", (slice(None, None, 2),)),
        ("1:,", (slice(1, None),)),
    ],
)
def test_a_region_is_what_numpy_takes(text: str, region: tuple[object, ...]) -> None:
    assert parse_region(text) == region


@pytest.mark.parametrize(
    "text", ["", "1:2:3:4", "...,...", "::0", "- 1", "1 2", "--1", ",", "9" * 30]
)
def test_what_is_no_region_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a slice"):
        parse_region(text)


def test_the_name_and_the_region_are_split_at_the_last_bracket() -> None:
    assert parse_subject("a[0]/w[1:2]", {"a[0]/w"}) == ("a[0]/w", (slice(1, 2),))


def test_a_leaf_that_is_really_called_so_wins() -> None:
    assert parse_subject("w[0]", {"w[0]", "w"}) == ("w[0]", None)
    assert parse_subject("w[0]", {"w"}) == ("w", (0,))


def test_words_in_brackets_belong_to_the_name() -> None:
    assert parse_subject("w[abc]", set()) == ("w[abc]", None)
