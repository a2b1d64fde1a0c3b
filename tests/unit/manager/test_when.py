"""When to save: policies over runs whose clock and steps are made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import UsageError, when
from ckptfmt.manager.pace import Pace
from ckptfmt.manager.when import Costs, Look, When, unit, young_daly_s


def due_at(policy: When, steps: Iterable[int], *, step_s: float = 1.0, start: int = 0) -> list[int]:
    """The steps at which a run that takes `step_s` a step is told to save."""
    pace = Pace(policy, "job", 0.0)
    pace.restored(start, start * step_s)
    made = []
    for step in steps:
        if pace.is_due(step, step * step_s):
            made.append(step)
            pace.saved(0.0, step * step_s)
    return made


def test_every_so_many_steps_counts_multiples() -> None:
    assert due_at(when.every(steps=500), range(1, 1700)) == [500, 1000, 1500]
    assert due_at(when.every(steps=500), range(1001, 1700), start=1000) == [1500]


def test_a_multiple_that_is_stepped_over_is_not_missed() -> None:
    assert due_at(when.every(steps=100), range(30, 400, 70)) == [100, 240, 310]


def test_every_so_many_minutes_counts_from_the_last_save() -> None:
    assert due_at(when.every(minutes=1), range(1, 200), step_s=7.0) == list(range(9, 200, 9))


def test_jitter_spreads_jobs_and_stays_in_its_bounds() -> None:
    policy = when.every(minutes=1, jitter=0.2)
    first = set()
    for job in range(50):
        look = [Look(1, 0, now, 0.0, 0, f"job-{job}") for now in range(40, 80)]
        first.add(next(at.now_s for at in look if policy.due(at)))
    assert min(first) >= 48
    assert max(first) <= 72
    assert len(first) > 10


def test_stages_are_dense_first() -> None:
    policy = when.staged({1000: 50, None: 300})
    assert due_at(policy, range(1, 1900)) == [*range(50, 1001, 50), 1200, 1500, 1800]
    assert due_at(when.staged({10: 5}), range(1, 40)) == [5, 10]


def test_or_is_due_when_one_is_and_and_when_both_are() -> None:
    steps, time = when.every(steps=10), when.every(minutes=1)
    assert due_at(steps | time, range(1, 31), step_s=4.0) == [10, 20, 30]
    assert due_at(steps | time, range(1, 31), step_s=8.0) == [8, 10, 18, 20, 28, 30]
    assert due_at(steps & time, range(1, 61), step_s=4.0) == [20, 40, 60]


def test_asked_twice_at_one_step_the_answer_is_the_same_until_it_saves() -> None:
    pace = Pace(when.every(steps=5), "job", 0.0)
    pace.restored(0, 0.0)
    assert [pace.is_due(5, 1.0), pace.is_due(5, 2.0)] == [True, True]
    pace.saved(0.1, 2.0)
    assert not pace.is_due(5, 3.0)


def test_young_daly_measures_with_its_first_save_and_then_keeps_the_optimum() -> None:
    policy = when.young_daly(failures_per_day=24, max_overhead=0.1)
    assert policy.due(Look(1, 0, 1.0, 0.0))
    assert not policy.due(Look(2, 1, 9e9, 0.0, saves=1))  # the first is still in flight
    costs = Costs(stall_s=2.0, slow_s=0.0, persist_s=10.0)
    interval = young_daly_s(costs, 3600.0, 0.1)
    assert interval == pytest.approx(math.sqrt(2 * 2 * 3600), rel=0.05)
    assert not policy.due(Look(9, 8, interval - 1, 0.0, 1, "", costs))
    assert policy.due(Look(9, 8, interval + 1, 0.0, 1, "", costs))


def test_young_daly_is_bound_by_the_overhead_and_by_how_long_a_save_takes() -> None:
    assert young_daly_s(Costs(10.0, 10.0, 30.0), 1e3, 0.01) == 2000.0
    assert young_daly_s(Costs(0.001, 0.0, 500.0), 1e4, 0.5) == 500.0
    assert young_daly_s(Costs(500.0, 0.0, 1.0), 100.0, 0.9) == pytest.approx(500 / 0.9)


@given(st.floats(0.01, 15), st.floats(60, 1e6))
def test_no_other_fixed_interval_wastes_much_less_than_young_daly(cost: float, mean: float) -> None:
    """Waste per second of a fixed interval under exponential failures, in closed form."""

    def waste(interval: float) -> float:
        # Expected time to get `interval` seconds of work done, with restarts at no cost.
        return mean * math.expm1(min(600.0, (interval + cost) / mean)) / interval - 1

    best = min(waste(cost * 1.1**n) for n in range(-20, 160))
    assert waste(young_daly_s(Costs(cost, 0, 0), mean, 0.999)) <= best * 1.05 + 1e-9


STAGES = st.dictionaries(st.integers(1, 200), st.integers(1, 40), min_size=1, max_size=3)
LOOKS = st.lists(st.integers(1, 60), min_size=1, max_size=25)


@given(STAGES, st.integers(1, 40), LOOKS)
def test_stages_are_due_where_a_multiple_of_theirs_lies_between_two_looks(
    stages: dict[int, int], last: int, gaps: list[int]
) -> None:
    policy = when.staged(dict([*stages.items(), (None, last)]))
    ends = [*sorted(stages), math.inf]
    every = [stages[end] for end in sorted(stages)] + [last]
    marks, begin = set[int](), 0.0
    for end, n in zip(ends, every, strict=True):
        marks |= {at for at in range(1, 2000) if begin < at <= end and at % n == 0}
        begin = end
    step = 0
    for gap in gaps:
        before, step = step, step + gap
        due = policy.due(Look(step, before, 0.0, 0.0))
        assert due == any(before < mark <= step for mark in marks)
    assert when.staged({None: last}).due(Look(step, before, 0.0, 0.0)) == when.every(
        steps=last
    ).due(Look(step, before, 0.0, 0.0))


@given(
    st.floats(0.01, 100), st.floats(0, 0.99), st.text(max_size=8), st.integers(0, 99),
    st.floats(0, 1e4), st.floats(0, 1e4),
)  # fmt: skip
def test_minutes_are_due_within_their_jitter_and_combinations_are_what_they_say(
    minutes: float, jitter: float, job: str, saves: int, saved_s: float, passed_s: float
) -> None:
    time, steps = when.every(minutes=minutes, jitter=jitter), when.every(steps=3)
    look = Look(4, 2, saved_s + passed_s, saved_s, saves, job)
    due, passed_s = time.due(look), look.now_s - look.saved_s
    if passed_s < minutes * 60 * (1 - jitter):
        assert not due
    if passed_s > minutes * 60 * (1 + jitter):
        assert due
    never = Look(2, 1, look.now_s, saved_s, saves, job)  # no multiple of three lies there
    assert (time | steps).due(look) is True
    assert (time & steps).due(look) == due
    assert (time | steps).due(never) == due
    assert (time & steps).due(never) is False


def test_costs_are_measured_with_and_without_a_save_in_flight() -> None:
    pace = Pace(when.every(steps=10), "job", 0.0)
    pace.restored(0, 0.0)
    now = 0.0
    for step in range(1, 11):
        now += 1.0
        pace.is_due(step, now)
    now += 0.5  # the stall
    pace.saved(0.5, now)
    for step in range(11, 15):
        now += 1.25  # a quarter slower while the save runs
        pace.is_due(step, now)
    pace.done(0.5, 6.0)
    assert pace.costs is not None
    assert pace.costs.stall_s == 0.5
    assert pace.costs.slow_s == pytest.approx(1.0)
    assert pace.costs.persist_s == 6.0


def test_units_are_the_same_for_the_same_job_and_spread_over_the_range() -> None:
    found = [unit(f"job-{n}", 0) for n in range(1000)]
    assert found == [unit(f"job-{n}", 0) for n in range(1000)]
    assert -1 <= min(found) < -0.9
    assert 0.9 < max(found) < 1
    assert abs(sum(found) / 1000) < 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda: when.every(),
        lambda: when.every(steps=0),
        lambda: when.every(steps=1.5),  # type: ignore[arg-type]
        lambda: when.every(minutes=0),
        lambda: when.every(minutes=1, jitter=1),
        lambda: when.every(steps=10, jitter=0.1),
        lambda: when.staged({}),
        lambda: when.staged({0: 5}),
        lambda: when.young_daly(failures_per_day=0),
        lambda: when.young_daly(failures_per_day=1, max_overhead=0),
    ],
)
def test_policies_that_make_no_sense_are_refused(make: Callable[[], When]) -> None:
    with pytest.raises(UsageError, match=r"for example when\.every"):
        make()


def test_a_save_that_cannot_begin_is_not_tried_at_every_step() -> None:
    pace = Pace(when.every(minutes=1), "job", 0.0)
    assert pace.is_due(1, 60.0)
    pace.failed(0.5, 61.0)
    assert pace.is_due(1, 61.0)  # the same step may be tried again
    assert not pace.is_due(2, 62.0)
    assert pace.is_due(3, 121.0)
    pace = Pace(when.young_daly(failures_per_day=24, max_overhead=0.1), "job", 0.0)
    assert pace.is_due(1, 1.0)
    pace.failed(1.0, 2.0)
    assert not pace.is_due(2, 3.0)
    assert pace.is_due(3, 200.0)
