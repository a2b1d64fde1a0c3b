"""What to keep. Policies are pure: the checkpoints in, a reason for each that is kept out; `|` is the
union.

    keep.last(3) | keep.every(hours=1) | keep.best("val_loss", n=2)

What is set aside stays, whatever the rules, unless one of them is `keep.quarantined(n)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptfmt.errors import UsageError
from ckptfmt.types import CheckpointInfo


class Keep(ABC):
    """A policy; `a | b` keeps what one of them keeps."""

    @abstractmethod
    def reasons(self, found: Sequence[CheckpointInfo]) -> dict[str, str]:
        """Name -> why it is kept, of those that are.

        Args:
            found: All checkpoints, oldest first: by step, those without one first.
        """

    def __or__(self, other: Keep) -> Keep:
        if not isinstance(other, Keep):
            raise _wrong("a policy on both sides of |", repr(other))
        return _Union(self, other)


@dataclass(frozen=True, slots=True)
class _Union(Keep):
    first: Keep
    second: Keep

    def reasons(self, found: Sequence[CheckpointInfo]) -> dict[str, str]:
        one, two = self.first.reasons(found), self.second.reasons(found)
        both = {name: f"{one[name]}; {two[name]}" for name in one.keys() & two.keys()}
        return {**one, **two, **both}


@dataclass(frozen=True, slots=True)
class _Last(Keep):
    n: int

    def reasons(self, found: Sequence[CheckpointInfo]) -> dict[str, str]:
        return {info.name: f"one of the last {self.n}" for info in found[-self.n :]}


@dataclass(frozen=True, slots=True)
class _EverySteps(Keep):
    steps: int

    def reasons(self, found: Sequence[CheckpointInfo]) -> dict[str, str]:
        made: dict[int, CheckpointInfo] = {}
        for info in found:
            if info.step is not None:
                made.setdefault(info.step // self.steps, info)
        return {
            info.name: f"the first at or after step {number * self.steps}"
            for number, info in made.items()
        }


@dataclass(frozen=True, slots=True)
class _EveryTime(Keep):
    seconds: float

    def reasons(self, found: Sequence[CheckpointInfo]) -> dict[str, str]:
        made: dict[int, CheckpointInfo] = {}
        for info in sorted(found, key=lambda info: info.created):
            made.setdefault(int(info.created.timestamp() // self.seconds), info)
        hours = self.seconds / 3600
        return {info.name: f"the first in its {hours:g} h" for info in made.values()}


@dataclass(frozen=True, slots=True)
class _Best(Keep):
    metric: str
    n: int
    mode: Literal["min", "max"]

    def reasons(self, found: Sequence[CheckpointInfo]) -> dict[str, str]:
        return {
            info.name: f"among the best {self.n} by {self.metric}"
            for info in ranked(found, self.metric, self.mode)[: self.n]
        }


@dataclass(frozen=True, slots=True)
class _Where(Keep):
    predicate: Callable[[CheckpointInfo], bool]

    def reasons(self, found: Sequence[CheckpointInfo]) -> dict[str, str]:
        name = getattr(self.predicate, "__name__", "a predicate")
        return {info.name: f"{name} says so" for info in found if self.predicate(info)}


@dataclass(frozen=True, slots=True)
class _Quarantined(Keep):
    n: int
    days: float

    def reasons(self, found: Sequence[CheckpointInfo]) -> dict[str, str]:
        return {}  # those that `found` has are not set aside

    def aside(self, found: Sequence[CheckpointInfo], now_s: float) -> dict[str, str]:
        """As `reasons`, of those that are set aside."""
        newest = sorted(found, key=lambda info: info.created)[-self.n :] if self.n else []
        made = {info.name: f"one of the last {self.n} set aside" for info in newest}
        for info in found:
            if now_s - info.created.timestamp() < self.days * 86400:
                made.setdefault(info.name, f"made less than {self.days:g} days ago")
        return made


def ranked(
    found: Sequence[CheckpointInfo], metric: str, mode: Literal["min", "max"]
) -> list[CheckpointInfo]:
    """Those that have the metric, best first; what is not finite last; of equal ones the older first."""

    def key(info: CheckpointInfo) -> tuple[bool, float]:
        value = info.metrics[metric]
        if not math.isfinite(value):  # a loss of minus infinity has diverged, too
            return True, 0.0
        return False, value if mode == "min" else -value

    return sorted((info for info in found if metric in info.metrics), key=key)


def best_of(
    found: Sequence[CheckpointInfo], policy: Keep | None, metric: str | None
) -> CheckpointInfo | None:
    """The best by a metric, in the direction that the policy gives it ("min" if it gives none).

    Raises:
        UsageError: `metric` is None and the policy has none.
    """
    rules = {rule.metric: rule for rule in _rules(policy) if isinstance(rule, _Best)}
    if metric is None:
        if len(rules) != 1:
            raise _wrong("a metric's name", f"None, and {len(rules)} metrics in keep=")
        metric = next(iter(rules))
    ordered = ranked(found, metric, rules[metric].mode if metric in rules else "min")
    return ordered[0] if ordered else None


def _rules(policy: Keep | None) -> list[Keep]:
    if isinstance(policy, _Union):
        return _rules(policy.first) + _rules(policy.second)
    return [] if policy is None else [policy]


def keep_of(value: Keep | int | None) -> Keep | None:
    """A policy as people write it: an int is `last(n)`."""
    if value is None or isinstance(value, Keep):
        return value
    return last(value)


def last(n: int) -> Keep:
    """The newest n. UsageError below 1."""
    return _Last(_count(n, "last(n)"))


def every(*, steps: int | None = None, hours: float | None = None) -> Keep:
    """One of each so many steps, or hours: the first of each, so that what is kept once stays.

    Raises:
        UsageError: Not exactly one of the two, or not above 0.
    """
    if (steps is None) == (hours is None):
        raise _wrong("every(steps=) or every(hours=)", f"steps={steps}, hours={hours}")
    if steps is not None:
        return _EverySteps(_count(steps, "every(steps=)"))
    assert hours is not None
    if isinstance(hours, bool) or not 0 < hours < math.inf:
        raise _wrong("hours above 0", repr(hours))
    return _EveryTime(hours * 3600)


def best(metric: str, n: int = 1, mode: Literal["min", "max"] = "min") -> Keep:
    """The best n by a metric; those without it are not among them, what is not finite ranks
    last.

    Raises:
        UsageError: n is below 1, or mode neither "min" nor "max".
    """
    if mode not in ("min", "max"):
        raise _wrong('mode "min" or "max"', repr(mode))
    if not isinstance(metric, str):
        raise _wrong("a metric's name", repr(metric))
    return _Best(metric, _count(n, "best(n=)"), mode)


def where(predicate: Callable[[CheckpointInfo], bool]) -> Keep:
    """Those of which a function says True."""
    if not callable(predicate):
        raise _wrong("a function of a CheckpointInfo", repr(predicate))
    return _Where(predicate)


def quarantined(n: int, *, days: float = 0.0) -> Keep:
    """Of the checkpoints that a manager set aside only the newest n, and those made less than so
    many days ago. The one rule that lets them go: without it all of them stay.

    Raises:
        UsageError: n or days is below 0.
    """
    if type(n) is not int or n < 0:
        raise _wrong("quarantined(n) of 0 or more", repr(n))
    if isinstance(days, bool) or not 0 <= days < math.inf:
        raise _wrong("days of 0 or more", repr(days))
    return _Quarantined(n, days)


@dataclass(frozen=True, slots=True)
class Decision:
    """What retention decided about one checkpoint, and why.

    Attributes:
        name: The checkpoint's.
        step: Its step, or None.
        kept: Whether it stays.
        reason: For people.
        waits: It stays only until a newer one is verified.
        quarantined: It is about what is set aside under this name.
    """

    name: str
    step: int | None
    kept: bool
    reason: str
    waits: bool = False
    quarantined: bool = False


def decide(
    found: Sequence[CheckpointInfo],
    policy: Keep | None,
    *,
    tags: Mapping[str, str],
    verified: Callable[[CheckpointInfo], bool],
    ours: Callable[[CheckpointInfo], bool],
    saved: str = "",
) -> list[Decision]:
    """Which checkpoints stay, oldest first. Never dropped: the newest, the one saved last, a tagged
    one, one that no manager wrote, and one behind which no newer verified one stands.

    Args:
        found: All readable checkpoints, in any order.
        policy: None keeps all; so does one whose rules are only about what is set aside.
        tags: Tag -> checkpoint's name.
        verified: Whether every chunk of it was read lately.
        ours: Whether a manager wrote it.
        saved: The name that this run has saved last: of lower step than others if it has begun anew.
    """
    ordered = sorted(found, key=lambda i: (i.step is not None, i.step or 0, i.name))
    if policy is None or all(isinstance(rule, _Quarantined) for rule in _rules(policy)):
        return [Decision(info.name, info.step, True, "all are kept") for info in ordered]
    reasons = policy.reasons(ordered)
    tagged: dict[str, list[str]] = {}
    for tag, name in tags.items():
        tagged.setdefault(name, []).append(tag)
    made: list[Decision] = []
    verified_newer = ""
    for info in reversed(ordered):
        if info is ordered[-1]:
            reason = "the newest"
        elif info.name == saved:
            reason = "the last that was saved"
        elif info.name in tagged:
            reason = "tagged " + ", ".join(sorted(tagged[info.name]))
        elif not ours(info):
            reason = "no manager wrote it"
        else:
            reason = reasons.get(info.name, "")
        kept = bool(reason)
        waits = not kept and not verified_newer
        if waits:
            kept, reason = True, "no newer one is verified yet"
        elif not kept:
            reason = f"no rule keeps it, and {verified_newer} is newer and verified"
        made.append(Decision(info.name, info.step, kept, reason, waits))
        if kept and not verified_newer and verified(info):
            verified_newer = info.name
    return made[::-1]


def decides_aside(policy: Keep | None) -> bool:
    """Whether a policy has a rule about what is set aside."""
    return any(isinstance(rule, _Quarantined) for rule in _rules(policy))


def decide_aside(
    found: Mapping[str, CheckpointInfo | None],
    policy: Keep | None,
    *,
    tagged: Collection[tuple[str, str]],
    good: str,
    ours: Callable[[CheckpointInfo], bool],
    now_s: float,
) -> list[Decision]:
    """Which of those that are set aside stay, by name. Never dropped: a tagged one, one that no
    manager wrote, and any as long as no checkpoint of the store is verified.

    Args:
        found: Name -> the newest that is set aside under it; None: it cannot be read.
        tagged: (name, digest of the tree) of each tag.
        good: A checkpoint, not set aside, of which every chunk was read lately; "": there is none.
        now_s: Seconds since the epoch.
    """
    infos = [info for info in found.values() if info is not None]
    reasons: dict[str, str] = {}
    for rule in _rules(policy):
        if isinstance(rule, _Quarantined):
            reasons |= rule.aside(infos, now_s)
    made = []
    for name, info in sorted(found.items()):
        if info is not None and (name, info.digest) in tagged:
            reason = "set aside, but tagged"
        elif info is not None and not ours(info):
            reason = "set aside, and no manager wrote it"
        else:
            reason = reasons.get(name, "")
        kept, waits = bool(reason), not reason and not good
        if waits:
            kept, reason = True, "set aside, and no good checkpoint is verified yet"
        elif not kept:
            why = "set aside" if info is not None else "set aside, cannot be read"
            reason = f"{why}, no rule keeps it, and {good} is verified"
        step = info.step if info is not None else None
        made.append(Decision(name, step, kept, reason, waits, quarantined=True))
    return made


def _count(value: object, what: str) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(f"{what} of 1 or more; None keeps all", repr(value))
    return value


def _wrong(expected: str, found: str) -> UsageError:
    return UsageError(
        "this says not what to keep",
        reason="keep",
        expected=expected,
        found=found,
        do='for example keep.last(3) | keep.best("val_loss", n=2)',
    )
