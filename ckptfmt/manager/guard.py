"""LossGuard: watches a metric, and says when training has gone wrong. It decides nothing: the loop
reads the `Verdict`, and `Manager.restore` reads what is noted at the checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckptfmt.errors import UsageError

BAD_RESUMES_MAX = 3
"""After so many bad resumes in a row, `restore` chooses the next older checkpoint."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the manager advises at a step; false if there is nothing to do.

    Attributes:
        rollback_to: The step of the checkpoint to go back to, or None.
        stop: Whether the loop is to end after a last save (a preemption).
        reason: For people; empty if there is nothing to say.
    """

    rollback_to: int | None = None
    stop: bool = False
    reason: str = ""

    def __bool__(self) -> bool:
        return self.stop or self.rollback_to is not None


Finding = Literal[
    "", "not finite", "not finite after the resume", "spike", "bad resume", "good resume"
]


@dataclass(frozen=True, slots=True)
class LossGuard:
    """Watches a metric (experimental).

    - A value that is not finite, or a mean over the last tenth of the window above `ratio` times the
      mean of the window before it, is a spike: go back.
    - After a resume, the mean of the next `window` values is compared with the mean of the last
      `window` before the checkpoint: above `ratio` times is a bad resume, and so is a value that is not
      finite before that. Three in a row, and `Manager.restore` chooses the next older checkpoint, as
      `Verdict.rollback_to` does.

    Attributes:
        metric: The name it has in `observe`; smaller is better, and it is positive (a loss).
        window: How many values a mean is over.
        ratio: How much worse is wrong.
    """

    metric: str = "loss"
    window: int = 50
    ratio: float = 1.5

    def __post_init__(self) -> None:
        if type(self.window) is not int or self.window < 1:
            raise _wrong("window of 1 or more values", repr(self.window))
        if not self.ratio > 1:
            raise _wrong("ratio above 1", repr(self.ratio))

    @property
    def recent(self) -> int:
        """How many of the newest values a spike is judged by."""
        return max(1, self.window // 10)


class LossWatch:
    """What a guard has seen so far."""

    def __init__(self, guard: LossGuard) -> None:
        self._guard = guard
        self._values: deque[float] = deque(maxlen=guard.window + guard.recent)
        self._baseline: float | None = None
        self._since_resume: list[float] | None = None

    def mean(self) -> float | None:
        """Of the last `window` values, or of what there is; None if there are none."""
        values = list(self._values)[-self._guard.window :]
        return _mean(values) if values else None

    def resumed(self, baseline: float | None) -> None:
        """Training goes on from a checkpoint.

        Args:
            baseline: The mean that was noted when it was saved; None where none was.
        """
        self._values.clear()
        self._baseline = baseline
        self._since_resume = []

    def see(self, value: float) -> Finding:
        """Take the next value, and say what it shows."""
        if not math.isfinite(value):
            judging, self._since_resume = self._since_resume is not None, None
            return "not finite after the resume" if judging else "not finite"
        self._values.append(value)
        found = self._resume(value)
        if found:
            return found
        older = list(self._values)[: -self._guard.recent]
        if len(older) == self._guard.window:
            newer = list(self._values)[-self._guard.recent :]
            if _mean(newer) > self._guard.ratio * _mean(older):
                self._values.clear()  # said once: what follows is another state, or the same trouble
                return "spike"
        return ""

    def _resume(self, value: float) -> Finding:
        if self._since_resume is None:
            return ""
        self._since_resume.append(value)
        if len(self._since_resume) < self._guard.window:
            return ""
        mean, self._since_resume = _mean(self._since_resume), None
        if self._baseline is None:
            return ""  # nothing was noted to compare with
        return "bad resume" if mean > self._guard.ratio * self._baseline else "good resume"


def _mean(values: Sequence[float]) -> float:
    """Without the sum, which may be too large for a number though no value is."""
    return sum(value / len(values) for value in values)


def _wrong(expected: str, found: str) -> UsageError:
    return UsageError(
        "this guard cannot watch",
        reason="guard",
        expected=expected,
        found=found,
        do='for example LossGuard(metric="loss", window=50, ratio=1.5)',
    )
