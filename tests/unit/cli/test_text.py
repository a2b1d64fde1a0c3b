"""Words for people: harmless, short enough, in the right units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.cli.text import (
    cell_width,
    escape,
    format_age,
    format_nbytes,
    pad,
    parse_duration,
    truncate_end,
    truncate_middle,
)
from ckptfmt.errors import UsageError


@given(st.text())
def test_escaped_text_has_no_character_that_moves_or_colours_anything(text: str) -> None:
    escaped = escape(text)
    assert escaped.isprintable()
    assert escape(escaped) == escaped


def test_controls_bidi_marks_and_newlines_are_shown_as_escapes() -> None:
    assert escape("a\x1b[31mb\n\u202e\U000e0001") == "a\\x1b[31mb\\x0a\\u202e\\U000e0001"


def test_printable_text_of_any_script_stays_as_it_is() -> None:
    assert escape("модель/слой 層") == "модель/слой 層"


@given(st.text(), st.integers(0, 30))
def test_truncated_text_never_takes_more_columns_than_asked(text: str, width: int) -> None:
    text = escape(text)
    for cut in (truncate_middle(text, width), truncate_end(text, width)):
        assert cell_width(cut) <= width
        if cell_width(text) <= width:
            assert cut == text


def test_a_name_is_cut_in_the_middle_so_that_both_ends_stay() -> None:
    assert truncate_middle("model/encoder.layer.11.output.weight", 15) == "model/e….weight"


def test_wide_characters_count_two_columns() -> None:
    assert cell_width("層a") == 3
    assert pad("層", 4, right=True) == "  層"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (4 << 20, "4.0 MiB"),
        (5 << 40, "5.0 TiB"),
        (1 << 62, "4.0 EiB"),
        (1 << 74, "16384.0 EiB"),
    ],
)
def test_sizes_are_in_iec_units_and_never_show_1024(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("600", 600), ("0", 0), ("90s", 90), ("10m", 600), ("1.5H", 5400)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1", "1y", "nan", "inf", "1e300"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a duration"):
        parse_duration(text)


def test_ages_are_short() -> None:
    ages = [format_age(seconds) for seconds in (-3, 42, 3000, 10_000, 1e6)]
    assert ages == ["0 s", "42 s", "50 min", "2.8 h", "11.6 d"]
