"""Threads for encode, write and read, within one byte budget. Tasks move megabytes and release
the GIL; nobody else in the engine starts a thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS_DEFAULT = min(8, max(4, os.cpu_count() or 4))
"""More threads than cores: most of them wait for the disk."""
BUDGET_NBYTES = 64 << 20


class Pipeline:
    """Runs tasks in threads; at most `budget_nbytes` of their buffers are in flight.

    The first error of a task is raised by the next `submit` or by `drain`; later tasks are dropped.
    A context manager: leaving it waits for every task, so no buffer is in use afterwards.
    """

    def __init__(self, threads: int = THREADS_DEFAULT, budget_nbytes: int = BUDGET_NBYTES) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ckptfmt")
        self._budget = budget_nbytes
        self._used = 0
        self._tasks = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def submit(self, task: Callable[[], object], nbytes: int, *, always: bool = False) -> None:
        """Run `task` soon; waits while the budget is used up.

        Args:
            always: Also after another's error: the task gives something back that others wait for.
        """
        with self._changed:
            while self._tasks and self._used + nbytes > self._budget and self._error is None:
                self._changed.wait()
            self._raise()
            self._used += nbytes
            self._tasks += 1
        self._pool.submit(self._run, task, nbytes, always)

    def _run(self, task: Callable[[], object], nbytes: int, always: bool) -> None:
        try:
            if always or self._error is None:
                task()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._used -= nbytes
                self._tasks -= 1
                self._changed.notify_all()

    def drain(self) -> None:
        """Wait for all tasks; raise the first error."""
        with self._changed:
            while self._tasks:
                self._changed.wait()
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterable[R]:
        """`function` of each item, in order; few at a time, so that results do not pile up."""
        if len(items) == 1:
            yield function(items[0])
            return
        window = 2 * THREADS_DEFAULT
        waiting = [self._pool.submit(function, item) for item in items[:window]]
        for position in range(len(items)):
            yield waiting[position].result()
            if position + window < len(items):
                waiting.append(self._pool.submit(function, items[position + window]))

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            with self._changed:
                self._error = self._error or error
        self._pool.shutdown(wait=True, cancel_futures=False)
