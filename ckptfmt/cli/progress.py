"""The bar on stderr: bytes done of bytes in all, drawn by rich. Imported only for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import rich.console
import rich.progress
import rich.table
import rich.text

from ckptfmt.cli.text import format_nbytes
from ckptfmt.events import Event


class _Bytes(rich.progress.ProgressColumn):
    """`1.2 of 4.0 GiB, 310.0 MiB/s`, in the units of the tables."""

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        text = format_nbytes(int(task.completed))
        if task.total is not None:
            text += f" of {format_nbytes(int(task.total))}"
        speed = task.finished_speed or task.speed
        return rich.text.Text(text + (f", {format_nbytes(int(speed))}/s" if speed else ""))


@contextmanager
def bar(what: str, file: IO[str], *, color: bool) -> Iterator[Callable[[Event], None]]:
    """Show a bar from the first event until the block ends, then take it away."""
    console = rich.console.Console(file=file, no_color=not color, markup=False, emoji=False)
    progress = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(bar_width=24),
        _Bytes(rich.table.Column(no_wrap=True)),
        rich.progress.TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    )
    task = progress.add_task(what, total=None)

    def report(event: Event) -> None:
        # What is done at once needs no bar, and a job without bytes has nothing to show.
        if event.total_nbytes and event.nbytes < event.total_nbytes:
            progress.start()
        progress.update(task, total=event.total_nbytes or None, completed=event.nbytes)

    try:
        yield report
    finally:
        progress.stop()
