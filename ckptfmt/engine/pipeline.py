"""Threads for encode, write and read, within one byte budget. Tasks move megabytes and release
the GIL; nobody else in the engine starts a thread, but for `background`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from ckptfmt import config

T = TypeVar("T")
R = TypeVar("R")

BUDGET_NBYTES = 64 << 20
_SMALL_MAP = 2
"""A map of fewer items is not worth waking a thread."""


class Pipeline:
    """Runs tasks in threads; at most `budget_nbytes` of their buffers are in flight.

    The first error of a task is raised by the next `submit` or by `drain`; later tasks are dropped.
    A context manager: leaving it waits for every task, so no buffer is in use afterwards.

    Its threads are its own, and not of an executor, which takes no tasks any more while an
    interpreter that ends waits for a save in flight. They start when they are needed.
    """

    def __init__(self, threads: int | None = None, budget_nbytes: int = BUDGET_NBYTES) -> None:
        self._threads_max = config.current().threads if threads is None else threads
        self._threads: list[threading.Thread] = []
        self._queue: deque[tuple[Callable[[], object], int, bool]] = deque()
        self._idle = 0
        self._budget = budget_nbytes
        self._used = 0
        self._tasks = 0
        self._closed = False
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    @property
    def window(self) -> int:
        """How many items `map` has under way."""
        return 2 * self._threads_max

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
            self._queue.append((task, nbytes, always))
            if self._idle < len(self._queue) and len(self._threads) < self._threads_max:
                self._start()
            self._changed.notify_all()
            alone = not self._threads
        if alone:  # the system gives no thread: the caller does the work
            self._work(until_empty=True)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"ckptfmt-{len(self._threads)}")
        try:
            thread.start()
        except RuntimeError:  # no more threads here: those that run, or the caller, take the task
            return
        self._threads.append(thread)

    def _work(self, until_empty: bool = False) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._queue and not self._closed and not until_empty:
                    self._changed.wait()
                self._idle -= 1
                if not self._queue:
                    return
                task, nbytes, always = self._queue.popleft()
            try:
                if always or self._error is None:
                    task()
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            finally:
                del task
                with self._changed:
                    self._used -= nbytes
                    self._tasks -= 1
                    self._changed.notify_all()

    def drain(self) -> None:
        """Wait for all tasks; raise the first error."""
        self.wait()
        with self._changed:
            self._raise()

    def wait(self) -> None:
        """Wait for all tasks, whatever became of them."""
        with self._changed:
            while self._tasks:
                self._changed.wait()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """`function` of each item, in order; few at a time, so that results do not pile up."""
        if len(items) <= _SMALL_MAP:
            yield from map(function, items)
            return
        waiting: deque[_Result] = deque()
        for item in items:
            result = _Result(function, item)
            self.submit(result.run, 0)
            waiting.append(result)
            if len(waiting) == self.window:
                yield self._take(waiting.popleft())
        while waiting:
            yield self._take(waiting.popleft())

    def _take(self, result: _Result) -> Any:
        with self._changed:
            while not result.done:
                self._raise()
                self._changed.wait()
        return result.value

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            if error is not None:
                self._error = self._error or error
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()


class _Result:
    """An item of a map: its value, once it is there."""

    def __init__(self, function: Callable[[Any], Any], item: Any) -> None:
        self._function, self._item = function, item
        self.value: Any = None
        self.done = False

    def run(self) -> None:
        self.value = self._function(self._item)
        self.done = True
