"""Rows never wrap: what is too long is cut in the middle, in the columns that may be."""

from __future__ import annotations

import io

from ckptfmt.cli.table import Column, Table, draw, plain_lines


def table() -> Table:
    made = Table(
        [
            Column("NAME", shrink_to=12, middle=True, keep=True),
            Column("SHAPE", shrink_to=10),
            Column("SIZE", right=True),
        ]
    )
    made.add("model/encoder.layer.11.attention.output.dense.weight", "[384, 384]", "576.0 KiB")
    made.add("b", "[]", "4 B")
    return made


def test_without_a_width_nothing_is_cut_and_columns_are_aligned() -> None:
    lines = list(plain_lines(table(), None))
    assert lines[1].startswith("model/encoder.layer.11.attention.output.dense.weight  [384, 384]")
    assert len({line.index("SIZE") + 4 if "SIZE" in line else len(line) for line in lines}) == 1


def test_at_40_columns_every_line_fits_and_the_short_cells_are_whole() -> None:
    lines = list(plain_lines(table(), 40))
    assert max(map(len, lines)) <= 40
    assert lines[1].endswith("[384, 384]  576.0 KiB")
    assert "…" in lines[1]


def test_at_20_columns_every_line_still_fits() -> None:
    assert max(map(len, plain_lines(table(), 20))) <= 20


def test_rich_draws_the_same_cells_one_line_a_row() -> None:
    for width in (20, 40, 80, 200):
        file = io.StringIO()
        draw(table(), file, width)
        lines = file.getvalue().splitlines()
        assert len(lines) == 3
        assert max(map(len, lines)) <= width
    assert "576.0 KiB" in lines[1]


def test_markup_and_escape_sequences_in_cells_are_shown_as_text() -> None:
    made = Table([Column("NAME")])
    made.add("[bold red]x[/] \x1b]0;t\x07 :smile:")
    file = io.StringIO()
    draw(made, file, 80)
    assert "[bold red]x[/] \\x1b]0;t\\x07 :smile:" in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_a_column_that_says_nothing_is_left_out() -> None:
    made = Table([Column("A"), Column("B"), Column("C")])
    made.add("1", "", "2")
    assert list(plain_lines(made, None)) == ["A  C", "1  2"]
