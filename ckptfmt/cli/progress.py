"""The bar on stderr: bytes done of bytes in all, drawn by rich. Imported only for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import rich.console
import rich.progress

from ckptfmt.events import Event


@contextmanager
def bar(what: str, file: IO[str], *, color: bool) -> Iterator[Callable[[Event], None]]:
    """Show a bar until the block ends, then take it away. The bar moves with each event's bytes."""
    console = rich.console.Console(file=file, no_color=not color, markup=False, emoji=False)
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(bar_width=None),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(compact=True),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def report(event: Event) -> None:
            if event.total_nbytes:
                progress.update(task, total=event.total_nbytes, completed=event.nbytes)
            elif event.nbytes:
                progress.update(task, completed=event.nbytes)

        yield report
