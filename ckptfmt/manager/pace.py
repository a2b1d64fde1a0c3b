"""What the run has told about itself: steps looked at, time between them, what saves cost."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field

from ckptfmt.manager.when import Costs, Look, When

_WEIGHT = 0.3
"""Of the newest measurement in a running mean."""


@dataclass(slots=True)
class Pace:
    """Remembers looks and measures costs. Times are readings of one monotonic clock, in seconds."""

    policy: When | None
    job: str
    saved_s: float
    step: int | None = None
    due: bool = False
    saves: int = 0
    costs: Costs | None = None
    _looked_s: float = field(init=False)
    _stall_s: float = 0.0
    _step_s: float | None = None
    _lost_s: float = 0.0
    _busy: bool = False

    def __post_init__(self) -> None:
        self._looked_s = self.saved_s

    def restored(self, step: int, now_s: float) -> None:
        """The run goes on from here: this step is looked at, and not due."""
        self.step, self.due = step, False
        self.saved_s = self._looked_s = now_s
        self._step_s = None

    def is_due(self, step: int, now_s: float) -> bool:
        """Whether a save is due at this step; asked again, the answer stays the same."""
        if step == self.step:
            return self.due
        previous = self.step if self.step is not None else step - 1
        self._measure(step - previous, now_s)
        look = Look(step, previous, now_s, self.saved_s, self.saves, self.job, self.costs)
        self.step = step
        self.due = self.policy is None or self.policy.due(look)
        return self.due

    def told(self, step: int, due: bool, now_s: float) -> None:
        """Rank 0 has decided about this step."""
        self.is_due(step, now_s)
        self.due = due

    def _measure(self, steps: int, now_s: float) -> None:
        """How long steps take, with a save in flight and without."""
        spent = now_s - self._looked_s - self._stall_s
        self._looked_s, self._stall_s = now_s, 0.0
        if steps < 1:
            return
        if self._busy:
            if self._step_s is not None:
                self._lost_s += spent - steps * self._step_s
        else:
            self._step_s = _mean(self._step_s, spent / steps)

    def saved(self, stall_s: float, now_s: float) -> None:
        """A save was staged; it runs in the background now."""
        self.due, self.saved_s = False, now_s
        self.saves += 1
        self._stall_s += stall_s
        self._lost_s, self._busy = 0.0, True

    def failed(self, stall_s: float, now_s: float) -> None:
        """A save could not begin: the next try is as far off as the next save would be, though this
        step may be tried again."""
        due = self.due
        self.saved(stall_s, now_s)
        self.done(stall_s, stall_s)
        self.due = due

    def done(self, stall_s: float, persist_s: float) -> None:
        """It is committed (or not): what it has cost."""
        self._busy = False
        slow_s, old = max(0.0, self._lost_s), self.costs
        self.costs = Costs(
            _mean(old.stall_s if old else None, stall_s),
            _mean(old.slow_s if old else None, slow_s),
            _mean(old.persist_s if old else None, persist_s),
        )


def job_of_environment() -> str:
    """What tells this job from others on the same file system."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "TORCHELASTIC_RUN_ID"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    return f"{platform.node()}/{os.getpid()}"


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - _WEIGHT) * old + _WEIGHT * new
