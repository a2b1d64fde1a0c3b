"""What a loop asks at the end of a step: is a save due, is the loss right, must the job go?

In a group rank 0 answers for all, in one round a step, for its clock and its loss are its own. Where
steps alone decide there is none: all ranks come to the same answer.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptfmt.engine import SaveFuture
from ckptfmt.format import step_name
from ckptfmt.manager.aftermath import Tell, log
from ckptfmt.manager.guard import Verdict
from ckptfmt.manager.pace import Pace
from ckptfmt.manager.preemption import Preemption
from ckptfmt.manager.together import Together
from ckptfmt.manager.watching import Watching
from ckptfmt.manager.when import is_by_steps


class Steps:
    """Of one manager.

    Args:
        asks: Whether some rank has a guard or a preemption, so that each step is talked about.
    """

    def __init__(
        self,
        pace: Pace,
        watching: Watching,
        preemption: Preemption | None,
        together: Together | None,
        *,
        asks: bool,
    ) -> None:
        self._pace, self._watching = pace, watching
        self._preemption, self._together = preemption, together
        self._asks, self._stops = asks, False

    def is_due(self, step: int) -> bool:
        is_new = self._together is not None and self._pace.step != step
        if is_new and (self._asks or not is_by_steps(self._pace.policy)):
            self._look(step, None)
        return self._pace.is_due(step, time.monotonic())

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Verdict:
        if self._together is not None and self._asks:
            return self._look(step, metrics)
        if self._preemption is not None and self._preemption.requested:
            return _preempted(self._preemption.left_s)
        return self._watching.observe(step, metrics)

    def stopping(self) -> Preemption | None:
        """The preemption, if the job must go; in a group, once all ranks know of it."""
        told = self._preemption
        if told is None or not (told.requested if self._together is None else self._stops):
            return None
        return told

    def _look(self, step: int, metrics: Mapping[str, Any] | None) -> Verdict:
        assert self._together is not None
        mine = self._preemption
        left_s = mine.left_s if mine is not None and mine.requested else None

        def decide(left_s: float | None) -> tuple[bool, Verdict]:
            due = self._pace.is_due(step, time.monotonic())
            if left_s is not None:
                return due, _preempted(left_s)
            return due, Verdict() if metrics is None else self._watching.observe(step, metrics)

        agreed = self._together.look(step, left_s, decide)
        self._pace.told(step, agreed.due, time.monotonic())
        if agreed.left_s is not None and mine is not None:
            mine.request(agreed.left_s)
            self._stops = True
        return agreed.verdict


def settle_quietly(settle: Callable[[], None]) -> None:
    """Before the last save of a job that must go: the error of one before it, which was told when it
    failed, does not cost this one."""
    try:
        settle()
    except Exception as error:
        log.error("before the last save, one failed: %s", error)


def spare_s(preemption: Preemption | None) -> float | None:
    """What a job that must go may spend on more than its last checkpoint, in seconds; None: it need
    not go."""
    if preemption is None or not preemption.requested:
        return None
    return max(0.0, preemption.left_s - preemption.deadline_s / 10)


def leave(preemption: Preemption, future: SaveFuture | None, step: int, tell: Tell) -> None:
    """The job must go: wait for the last save, within the deadline.

    Raises:
        SystemExit: It is durable, and the preemption has an exit code.
    """
    if future is not None:
        concurrent.futures.wait([future], timeout=preemption.left_s)
    durable = (
        future is not None
        and future.done()
        and not future.cancelled()
        and concurrent.futures.Future.exception(future) is None
    )
    tell("preempt", step_name(step), step, data={"durable": durable})
    if preemption.exit_code is not None and durable:
        raise SystemExit(preemption.exit_code)


def _preempted(left_s: float) -> Verdict:
    return Verdict(stop=True, reason=f"preempted, {left_s:.0f} s are left")
