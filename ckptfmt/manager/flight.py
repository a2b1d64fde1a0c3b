"""The save in flight, and what follows it: a manager has one at a time."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckptfmt.engine import SaveFuture
from ckptfmt.errors import StorageError
from ckptfmt.manager.alarm import Alarm


@dataclass(frozen=True, slots=True)
class Started:
    """A save that is under way.

    Attributes:
        started_s: When the loop called, by a clock that only goes forward.
        cost: `stall_s`: how long the loop was held, the wait for a save before it included;
            `stage_s`: how long of that this save took to stage.
        after: Done once all that follows the save is.
        pid: Whose save it is: a forked process has no thread that would end it.
    """

    step: int
    started_s: float
    cost: Mapping[str, float]
    future: SaveFuture
    after: concurrent.futures.Future[None]
    pid: int = field(default_factory=os.getpid)

    @property
    def over(self) -> bool:
        """Whether another save would not have to wait for this one, or for its cleaning up."""
        return self.future.done() and self.after.done()


class Flight:
    """Of one manager. A process that is forked has none of its parent's threads to wait for.

    Args:
        waits: Called with a save, and for how long it has been waited for, while that goes on.
        alarm: After how long.
    """

    def __init__(self, waits: Callable[[Started, float], None], alarm: Alarm | None) -> None:
        self._last: Started | None = None
        self._waits, self._limit_s = waits, (alarm or Alarm()).stall_s

    def begin(self, save: Started) -> None:
        self._last = save

    @property
    def last(self) -> Started | None:
        """The last save that this process began."""
        return self._last if self._last is not None and self._last.pid == os.getpid() else None

    def is_busy(self) -> bool:
        return self.last is not None and not self.last.over

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it is committed (or not), and what follows it is done. A long wait is an alarm while
        it lasts: nobody knows how long that will be.

        Raises:
            StorageError: kind `storage-timeout`: it is not, after `timeout_s`.
        """
        if self.last is None:
            return
        limit_s = self._limit_s
        if limit_s is not None and (timeout_s is None or limit_s < timeout_s):
            if concurrent.futures.wait([self.last.after], timeout=limit_s).done:
                return
            self._waits(self.last, limit_s)
            timeout_s = None if timeout_s is None else timeout_s - limit_s
        done, _ = concurrent.futures.wait([self.last.after], timeout=timeout_s)
        if not done:
            raise StorageError(
                "the save in flight is not done yet",
                reason="timeout",
                where=self.last.future.name,
                retryable=True,
                do="wait longer",
            )

    def wait_for_commit(self, step: int) -> None:
        """Until the save of that step, if it is the last one, is committed (or not)."""
        if self.last is not None and self.last.step == step:
            concurrent.futures.wait([self.last.future])
