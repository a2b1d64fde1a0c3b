"""Retention against a model: any order of saves, clock, metrics, tags, damage, roll-backs, restarts and
prunings, under any policy.

The model does by hand what a policy promises (sorting, counting), shares no code with `keep`, and
holds at every moment: never zero good checkpoints where there was one, what is tagged or foreign
stays, every rule gets what it asks for, and no more than the rules ask for stays.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ckptfmt import CheckpointInfo, keep
from ckptfmt.manager.keep import Decision, Keep, decide, decide_aside

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
MOST = 12
"""Checkpoints at once: all that can go wrong does so among few."""
METRICS = st.none() | st.sampled_from(
    [math.nan, math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 2.5]
)

SAVES = st.tuples(
    st.integers(1, 25),
    st.integers(0, 200),
    METRICS,
    st.sampled_from([True, True, True, False]),
)
"""Steps and minutes since the one before, the metric, and whether a manager saved it."""

DAYS = st.sampled_from([0.0, 0.1, 1.0])

Asked = tuple[str, int, str]
RULES = st.lists(
    st.tuples(st.just("last"), st.integers(1, 4), st.just(""))
    | st.tuples(st.just("best"), st.integers(1, 3), st.sampled_from(["min", "max"]))
    | st.tuples(st.just("steps"), st.integers(1, 40), st.just(""))
    | st.tuples(st.just("hours"), st.integers(1, 6), st.just(""))
    | st.tuples(st.just("where"), st.integers(2, 5), st.just("")),
    min_size=1,
    max_size=3,
)


def one_of(kind: str, n: int, mode: str) -> Keep:
    if kind == "last":
        return keep.last(n)
    if kind == "best":
        return keep.best("m", n, "max" if mode == "max" else "min")
    if kind == "where":
        return keep.where(lambda info: step_of(info) % n == 0)
    return keep.every(steps=n) if kind == "steps" else keep.every(hours=n)


def policy_of(rules: list[Asked]) -> Keep:
    first, *others = [one_of(*rule) for rule in rules]
    for other in others:
        first = first | other
    return first


def asked_for(rules: list[Asked], found: list[CheckpointInfo]) -> set[int]:
    """The steps that the rules want, by hand."""
    steps = sorted(step_of(info) for info in found)
    wanted: set[int] = set()
    for kind, n, mode in rules:
        if kind == "last":
            wanted |= set(steps[-n:])
        elif kind == "where":
            wanted |= {step for step in steps if step % n == 0}
        elif kind == "best":
            finite = [i for i in found if "m" in i.metrics and abs(i.metrics["m"]) < math.inf]
            strange = [i for i in found if "m" in i.metrics and not abs(i.metrics["m"]) < math.inf]
            sign = 1 if mode == "min" else -1
            finite.sort(key=lambda i: (sign * i.metrics["m"], step_of(i)))
            strange.sort(key=step_of)
            wanted |= {step_of(info) for info in (finite + strange)[:n]}
        else:

            def bucket(info: CheckpointInfo, kind: str = kind, n: int = n) -> int:
                if kind == "steps":
                    return step_of(info) // n
                return int(info.created.timestamp()) // (3600 * n)

            for _, rows in itertools.groupby(sorted(found, key=step_of), bucket):
                wanted.add(step_of(next(rows)))
    return wanted


def step_of(info: CheckpointInfo) -> int:
    assert info.step is not None
    return info.step


class Retention(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = BEGIN
        self.here: dict[int, CheckpointInfo] = {}
        self.aside: dict[str, CheckpointInfo] = {}
        self.tagged: set[int] = set()
        self.verified: set[int] = set()
        self.damaged: set[int] = set()

    @initialize(rules=RULES)
    def choose(self, rules: list[Asked]) -> None:
        self.asked, self.policy = rules, policy_of(rules)

    # -- what happens to a store --------------------------------------------------------------------

    @precondition(lambda self: len(self.here) < MOST)
    @rule(rows=st.lists(SAVES, min_size=2, max_size=6))
    def save(self, rows: list[tuple[int, int, float | None, bool]]) -> None:
        for gap, minutes, metric, ours in rows:
            step = max(self.here, default=0) + gap
            self.clock += timedelta(minutes=minutes)
            self.here[step] = CheckpointInfo(
                f"step-{step:016d}", step, 0, self.clock, "", 0, 0, 0, 0, f"{step}", {},
                {} if metric is None else {"m": metric}, None,
                "ckptfmt 1 manager" if ours else "ckptfmt 1", 0.0,
            )  # fmt: skip

    @precondition(lambda self: self.here)
    @rule(data=st.data(), metric=METRICS)
    def annotate(self, data: st.DataObject, metric: float | None) -> None:
        step = data.draw(st.sampled_from(sorted(self.here)))
        metrics = {} if metric is None else {"m": metric}
        self.here[step] = replace(self.here[step], metrics=metrics)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), on=st.sampled_from([True, True, False]))
    def tag(self, data: st.DataObject, on: bool) -> None:
        step = data.draw(
            st.sampled_from(sorted(self.tagged) if not on and self.tagged else sorted(self.here))
        )
        (self.tagged.add if on else self.tagged.discard)(step)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """What was read lately is taken for whole: rot is only found by the next reading."""
        step = data.draw(st.sampled_from(sorted(self.here)))
        if step not in self.verified:
            self.damaged.add(step)

    @rule()
    def restart(self) -> None:
        """What was verified is not known any more."""
        self.verified.clear()

    @precondition(lambda self: len(self.here) > 1)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """Training goes on from an older one: the newer ones are set aside."""
        to = data.draw(st.sampled_from(sorted(self.here)[-4:]))
        for step in [step for step in self.here if step > to]:
            info = self.here.pop(step)
            self.aside[info.name] = info
            self.verified.discard(step)
            self.damaged.discard(step)

    # -- what retention makes of it -----------------------------------------------------------------

    def decide(self, found: dict[int, CheckpointInfo]) -> list[Decision]:
        return decide(
            list(reversed(found.values())),
            self.policy,
            tags={f"t{step}": f"step-{step:016d}" for step in self.tagged},
            verified=lambda info: info.step in self.verified,
            ours=lambda info: info.writer.endswith("manager"),
        )

    @precondition(lambda self: self.here)
    @rule()
    def prune(self) -> None:
        self.here = self.pruned()

    @precondition(lambda self: self.here)
    @invariant()
    def pruning_would_be_right_at_every_moment(self) -> None:
        verified = set(self.verified)
        self.pruned()
        self.verified = verified

    def pruned(self) -> dict[int, CheckpointInfo]:
        """As the manager does: the newest is verified if older ones wait for that."""
        before = dict(self.here)
        newest = max(before)
        decisions = self.decide(before)
        if any(d.waits for d in decisions) and newest not in self.damaged:
            self.verified.add(newest)
            decisions = self.decide(before)
        gone = {d.step for d in decisions if not d.kept}
        assert {d.step for d in decisions} == set(before)
        assert all(d.reason for d in decisions)
        left = {step: info for step, info in before.items() if step not in gone}

        foreign = {s for s, info in before.items() if not info.writer.endswith("manager")}
        must = asked_for(self.asked, list(before.values())) | {newest} | foreign
        must |= self.tagged & before.keys()
        assert not gone & must
        if before.keys() - self.damaged:
            assert left.keys() - self.damaged, "the last good one is gone"
        for step in gone:
            assert step is not None
            assert any(kept > step for kept in left.keys() & self.verified)
        if newest in self.verified:  # nothing had to wait: all that stays was asked for
            assert left.keys() <= must
        assert all(d.kept for d in self.decide(left)), "a second look deletes more"
        return left

    @rule(n=st.integers(0, 3), days=DAYS)
    def prune_what_is_set_aside(self, n: int, days: float) -> None:
        for name in self.given_up(n, days):
            del self.aside[name]

    @precondition(lambda self: self.aside)
    @invariant()
    def giving_up_would_be_right_at_every_moment(self) -> None:
        verified = set(self.verified)
        self.given_up(0, 0.0)
        self.verified |= set(list(self.here)[:1])  # so that some may go
        for n in range(3):
            self.given_up(n, 0.0)
        self.given_up(0, 0.1)
        self.verified = verified

    def given_up(self, n: int, days: float) -> set[str]:
        good = max(self.verified & self.here.keys(), default=None)
        tagged = {self.aside[name].step for name in self.aside} & self.tagged
        now_s = self.clock.timestamp()
        made = decide_aside(
            self.aside,
            self.policy | keep.quarantined(n, days=days),
            tagged={(f"step-{step:016d}", f"{step}") for step in tagged},
            good="" if good is None else f"step-{good:016d}",
            ours=lambda info: info.writer.endswith("manager"),
            now_s=now_s,
        )
        gone = {d.name for d in made if not d.kept}
        assert not gone or good is not None
        newest = sorted(self.aside.values(), key=lambda info: info.created)
        for info in newest[len(newest) - n :]:
            assert info.name not in gone
        for name in gone:
            info = self.aside[name]
            assert info.writer.endswith("manager")
            assert info.step not in tagged
            assert now_s - info.created.timestamp() >= days * 86400
        if good is not None:
            free = [i for i in self.aside.values() if i.name not in gone]
            held = [
                i
                for i in free
                if i.step in tagged
                or not i.writer.endswith("manager")
                or now_s - i.created.timestamp() < days * 86400
            ]
            assert len(free) <= n + len(held)
        return gone


TestRetention = Retention.TestCase
TestRetention.settings = settings(max_examples=200, stateful_step_count=15)
