"""Progress of long work, as events to a callable or a bar on stderr."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from ckptfmt.errors import UsageError
from ckptfmt.events import Event, Progress


def check_progress(progress: Progress) -> Progress:
    """UsageError unless it is a callable or a bool."""
    if isinstance(progress, bool) or callable(progress):
        return progress
    raise UsageError(
        "progress is neither a callable nor a bool",
        reason="progress",
        found=type(progress).__name__,
        do="pass True for a bar, or a function of an Event",
    )


class Reporter:
    """Counts bytes and tells `progress` about them, at most ten times a second, and at the end.

    A context manager. `advance` may be called from several threads; the callable is called from
    the calling thread of `advance`, one call at a time. An error it raises cancels the work.
    """

    def __init__(
        self,
        progress: Progress,
        kind: str,
        total_nbytes: int,
        *,
        checkpoint: str | None = None,
        step: int | None = None,
    ) -> None:
        self._kind, self._total = kind, total_nbytes
        self._checkpoint, self._step = checkpoint, step
        self._done = 0
        self._next_s = 0.0
        self._lock = threading.Lock()
        check_progress(progress)
        self._bar: _Bar | None = None
        self._call: Callable[[Event], None] | None = None
        if progress is True:
            self._bar = _Bar(kind)
            self._call = self._bar
        elif callable(progress):
            self._call = progress

    def advance(self, nbytes: int) -> None:
        if self._call is None:
            return
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now >= self._next_s:
                self._next_s = now + 0.1
                self._tell()

    def _tell(self) -> None:
        assert self._call is not None
        self._call(
            Event(
                kind=self._kind,
                time_s=time.time(),
                checkpoint=self._checkpoint,
                step=self._step,
                nbytes=self._done,
                total_nbytes=self._total,
            )
        )

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._call is not None and error is None:
                with self._lock:
                    self._done = max(self._done, self._total)
                    self._tell()
        finally:
            if self._bar is not None:
                self._bar.close()


class _Bar:
    """A rich progress bar on stderr."""

    def __init__(self, kind: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(kind, total=None)
        self._progress.start()

    def __call__(self, event: Event) -> None:
        self._progress.update(self._task, completed=event.nbytes, total=event.total_nbytes or None)

    def close(self) -> None:
        self._progress.stop()
