"""Tables that never wrap: rows are cut to the width before they are drawn.

On a terminal rich draws them, elsewhere they are plain text in aligned columns. Without a width (a
pipe) nothing is cut, so that `ckptfmt show run | grep weight` sees whole names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO

from ckptfmt.cli.text import cell_width, escape, pad, truncate_end, truncate_middle

_GAP = 2
_DRAWN_MAX = 500


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        title: Its heading.
        right: Numbers stand at the right.
        shrink_to: The least width to which it may be cut; 0: never.
        middle: Cut in the middle: the end of a name says more than its middle.
        keep: Cut only when no other column can give more.
    """

    title: str
    right: bool = False
    shrink_to: int = 0
    middle: bool = False
    keep: bool = False


@dataclass(slots=True)
class Table:
    """Rows of text. Cells are escaped as they come in."""

    columns: Sequence[Column]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        self.rows.append(tuple(escape(cell) for cell in cells))


def layout(table: Table, width: int | None) -> tuple[list[int], list[tuple[str, ...]]]:
    """Column widths and rows that fit them; the widest column that may be cut is cut first."""
    columns, rows = _without_empty_columns(table)
    widths = [cell_width(c.title) for c in columns]
    for row in rows:
        widths = [max(w, cell_width(cell)) for w, cell in zip(widths, row)]
    if width is not None:
        _shrink(widths, columns, width)
        cuts = [truncate_middle if c.middle else truncate_end for c in columns]
        rows = [tuple(cut(cell, w) for cut, cell, w in zip(cuts, row, widths)) for row in rows]
    return widths, rows


def _without_empty_columns(table: Table) -> tuple[list[Column], list[tuple[str, ...]]]:
    """A column in which no row says anything is not drawn."""
    used = [
        i for i in range(len(table.columns)) if not table.rows or any(row[i] for row in table.rows)
    ]
    return [table.columns[i] for i in used], [tuple(row[i] for i in used) for row in table.rows]


def _shrink(widths: list[int], columns: Sequence[Column], width: int) -> None:
    excess = sum(widths) + _GAP * (len(widths) - 1) - width
    while excess > 0:
        able = [i for i, c in enumerate(columns) if c.shrink_to and widths[i] > c.shrink_to]
        if not able:
            return
        widest = max(able, key=lambda i: (not columns[i].keep, widths[i]))
        widths[widest] -= 1
        excess -= 1


def plain_lines(table: Table, width: int | None) -> Iterable[str]:
    """The table as lines of text: a row of titles, then the rows."""
    columns = _without_empty_columns(table)[0]
    widths, rows = layout(table, width)
    for cells in ([c.title for c in columns], *rows):
        line = (
            (" " * _GAP)
            .join(pad(cell, w, right=c.right) for cell, w, c in zip(cells, widths, columns))
            .rstrip()
        )
        yield line if width is None else truncate_end(line, width)


def draw(table: Table, file: IO[str], width: int) -> None:
    """Draw the table with rich, on a terminal."""
    # Imported here: a pipe, --json and --help do without rich.
    import rich.console
    import rich.table
    import rich.text

    columns = _without_empty_columns(table)[0]
    widths, rows = layout(table, width)
    if len(rows) > _DRAWN_MAX or sum(widths) + _GAP * (len(widths) - 1) > width:
        # Too narrow even for cut columns: rich would squeeze them to nothing. Too many rows: rich
        # takes 0.5 ms for each, and bold titles have scrolled away long before the end.
        file.writelines(line + "\n" for line in plain_lines(table, width))
        return
    drawn = rich.table.Table(
        box=None, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold"
    )
    for column, w in zip(columns, widths):
        drawn.add_column(
            rich.text.Text(column.title),
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="crop",
            min_width=w,
            max_width=w,
        )
    for row in rows:
        drawn.add_row(*(rich.text.Text(cell) for cell in row))
    console = rich.console.Console(
        file=file, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False
    )
    console.print(drawn)
