"""When to save. Policies are pure: a `Look` in, yes or no out; `|` and `&` combine them.

when.every(steps=500) | when.every(minutes=30, jitter=0.1)
when.staged({1000: 50, None: 300})
when.young_daly(failures_per_day=2, max_overhead=0.01)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from ckptfmt.errors import UsageError

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What a save has cost lately, in seconds.

    Attributes:
        stall_s: How long the training loop stood still.
        slow_s: What the loop lost besides while the save ran in the background.
        persist_s: From the call until the checkpoint was committed.
    """

    stall_s: float
    slow_s: float
    persist_s: float

    @property
    def total_s(self) -> float:
        return self.stall_s + self.slow_s


@dataclass(frozen=True, slots=True)
class Look:
    """What is known when the loop asks.

    Attributes:
        step: Finished steps now.
        previous_step: At the look before; what the run began with at the first.
        now_s: A clock that only goes forward, in seconds.
        saved_s: Its reading when the last save was made, or the run began.
        saves: How many saves this run has made.
        job: Names the job: jobs that share a file system get different jitter.
        costs: Measured, or None before the first save is done.
    """

    step: int
    previous_step: int
    now_s: float
    saved_s: float
    saves: int = 0
    job: str = ""
    costs: Costs | None = None


class When(ABC):
    """A policy; `a | b` is due when one is, `a & b` when both are at the same look."""

    @abstractmethod
    def due(self, look: Look) -> bool:
        """Whether a save is due."""

    def __or__(self, other: When) -> When:
        return _Both(self, _policy(other), all_of=False)

    def __and__(self, other: When) -> When:
        return _Both(self, _policy(other), all_of=True)


@dataclass(frozen=True, slots=True)
class _Both(When):
    first: When
    second: When
    all_of: bool

    def due(self, look: Look) -> bool:
        found = (self.first.due(look), self.second.due(look))
        return all(found) if self.all_of else any(found)


@dataclass(frozen=True, slots=True)
class _Steps(When):
    """Every n steps up to a step, then every m: (last step, or None for ever; n)."""

    stages: tuple[tuple[int | None, int], ...]

    def _passed(self, step: int) -> int:
        """How many steps at which a save is due lie in (0, step]."""
        count = begin = 0
        for end, every in self.stages:
            last = step if end is None else min(step, end)
            count += max(0, last // every - begin // every)
            if end is None or step <= end:
                break
            begin = end
        return count

    def due(self, look: Look) -> bool:
        return self._passed(look.step) > self._passed(look.previous_step)


@dataclass(frozen=True, slots=True)
class _Time(When):
    seconds: float
    jitter: float

    def due(self, look: Look) -> bool:
        factor = 1 + self.jitter * unit(look.job, look.saves)
        return look.now_s - look.saved_s >= self.seconds * factor


@dataclass(frozen=True, slots=True)
class _YoungDaly(When):
    failures_per_day: float
    max_overhead: float
    jitter: float

    def due(self, look: Look) -> bool:
        if look.costs is None:
            return look.saves == 0  # the first save measures; nothing is known until it is done
        interval = young_daly_s(look.costs, DAY_S / self.failures_per_day, self.max_overhead)
        factor = 1 + self.jitter * unit(look.job, look.saves)
        return look.now_s - look.saved_s >= interval * factor


def is_by_steps(policy: When | None) -> bool:
    """Whether steps alone decide, so that all ranks of a job come to the same answer."""
    if isinstance(policy, _Both):
        return is_by_steps(policy.first) and is_by_steps(policy.second)
    return policy is None or isinstance(policy, _Steps)


def young_daly_s(costs: Costs, mean_between_failures_s: float, max_overhead: float) -> float:
    """Seconds between saves that waste the least: Daly's higher-order estimate of Young's optimum
    (J. T. Daly, 2006), never under the time that a save takes to become durable, nor so short that
    saving costs more than `max_overhead` of the run."""
    cost, mean = costs.total_s, mean_between_failures_s
    if cost >= 2 * mean:
        best = mean
    else:
        ratio = cost / (2 * mean)
        best = math.sqrt(2 * cost * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
    return max(best, costs.persist_s, cost / max_overhead)


def unit(job: str, number: int) -> float:
    """A number in [-1, 1) that is the same for the same job and save: spreads many jobs out."""
    hashed = blake2b(f"{job}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") / 2**63 - 1


def every(*, steps: int | None = None, minutes: float | None = None, jitter: float = 0.0) -> When:
    """Every so many steps, or minutes.

    Args:
        steps: Due when a multiple of it lies in (last step looked at, this step].
        minutes: Due when so long ago the last save was made.
        jitter: A share of `minutes`, below 1: each interval is longer or shorter by up to that,
            differently for each job, so that many jobs on one file system do not save at once.
    Raises:
        UsageError: Not exactly one of `steps` and `minutes`, or one below what makes sense.
    """
    if (steps is None) == (minutes is None):
        raise _wrong("every(steps=) or every(minutes=)", f"steps={steps}, minutes={minutes}")
    if steps is not None:
        if jitter:
            raise _wrong("jitter of minutes", f"jitter={jitter} of steps")
        return _Steps(((None, _count(steps, "steps")),))
    assert minutes is not None
    return _Time(_positive(minutes, "minutes") * 60, _share(jitter))


def staged(stages: Mapping[int | None, int]) -> When:
    """Often at first, then less: `{1000: 50, None: 300}` is every 50 steps up to step 1000, then
    every 300.

    Raises:
        UsageError: A stage is empty or no number of steps.
    """
    if not isinstance(stages, Mapping) or not stages:
        raise _wrong("a dict of a stage or more", repr(stages))
    ends = sorted(_count(end, "the end of a stage") for end in stages if end is not None)
    made: list[tuple[int | None, int]] = [(end, _count(stages[end], "steps")) for end in ends]
    if None in stages:
        made.append((None, _count(stages[None], "steps")))
    return _Steps(tuple(made))


def young_daly(*, failures_per_day: float, max_overhead: float = 0.01, jitter: float = 0.0) -> When:
    """As often as pays: from the measured cost of a save and how often the job fails.

    The first save is due at once, to measure. A save costs its stall and what training slowed down
    meanwhile; the interval is Young's and Daly's optimum for that cost.

    Args:
        failures_per_day: Of the whole job: all its machines together.
        max_overhead: Saving may take up to this share of the run's time.
        jitter: As in `every`.
    """
    return _YoungDaly(
        _positive(failures_per_day, "failures_per_day"),
        _share(max_overhead, zero=False),
        _share(jitter),
    )


def when_of(value: When | int | None) -> When | None:
    """A policy as people write it: an int is `every(steps=n)`."""
    return value if value is None or isinstance(value, When) else every(steps=value)


def _policy(value: object) -> When:
    if not isinstance(value, When):
        raise _wrong("a policy on both sides", repr(value))
    return value


def _count(value: object, what: str) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(f"{what} as a whole number, 1 or more", repr(value))
    return value


def _positive(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _wrong(f"{what} above 0", repr(value))
    return float(value)


def _share(value: float, *, zero: bool = True) -> float:
    if not (0 <= value < 1) or (value == 0 and not zero):
        raise _wrong(f"a share from 0 {'to' if zero else '(not 0) to'} below 1", repr(value))
    return float(value)


def _wrong(expected: str, found: str) -> UsageError:
    return UsageError(
        "this says not when to save",
        reason="when",
        expected=expected,
        found=found,
        do="for example when.every(steps=500) | when.every(minutes=30)",
    )
