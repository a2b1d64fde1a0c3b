"""What to keep: rules alone, together, and what no rule may ever drop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import CheckpointInfo, UsageError, keep
from ckptfmt.manager.keep import Decision, Keep, best_of, decide, decide_aside
from ckptfmt.manager.pruning import is_ours

MakeInfo = Callable[..., CheckpointInfo]


def steps_kept(policy: Keep, found: Sequence[CheckpointInfo]) -> list[int | None]:
    names = policy.reasons(found).keys()
    return [info.step for info in found if info.name in names]


def test_last_keeps_the_newest_by_step(info: MakeInfo) -> None:
    found = [info(step) for step in (999, 1000, 9000, 10000)]
    assert steps_kept(keep.last(2), found) == [9000, 10000]


def test_every_keeps_the_first_of_each_so_many_steps(info: MakeInfo) -> None:
    found = [info(step) for step in (0, 300, 600, 900, 1200, 1500, 2000, 2300)]
    assert steps_kept(keep.every(steps=1000), found) == [0, 1200, 2000]


def test_every_keeps_the_first_of_each_hour(info: MakeInfo) -> None:
    found = [info(n, minutes=25 * n) for n in range(8)]
    assert steps_kept(keep.every(hours=1), found) == [0, 3, 5]


def test_best_ranks_nan_last_and_leaves_out_what_has_no_metric(info: MakeInfo) -> None:
    values = [0.5, math.nan, 0.1, 0.1, None, 0.9]
    found = [info(n, {} if v is None else {"loss": v}) for n, v in enumerate(values)]
    assert steps_kept(keep.best("loss", 2), found) == [2, 3]
    assert steps_kept(keep.best("loss", 1), found) == [2]  # of equal ones the older
    assert steps_kept(keep.best("loss", 2, "max"), found) == [0, 5]
    assert steps_kept(keep.best("loss", 5), found) == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_metric_that_has_diverged_is_never_the_best(
    info: MakeInfo, mode: Literal["min", "max"]
) -> None:
    values = [math.nan, math.inf, -math.inf, 2.0]
    found = [info(step, {"loss": value}) for step, value in enumerate(values)]
    assert list(keep.best("loss", mode=mode).reasons(found)) == [found[3].name]


def test_a_union_keeps_what_one_of_its_rules_keeps_and_says_both_reasons(info: MakeInfo) -> None:
    found = [info(n, {"loss": -n}) for n in range(4)]
    policy = keep.last(1) | keep.best("loss") | keep.where(lambda i: i.step == 1)
    reasons = policy.reasons(found)
    assert sorted(reasons) == [found[1].name, found[3].name]
    assert reasons[found[3].name] == "one of the last 1; among the best 1 by loss"


@pytest.mark.parametrize(
    "make",
    [
        lambda: keep.last(0),
        lambda: keep.last(True),
        lambda: keep.last(-1),
        lambda: keep.every(),
        lambda: keep.every(steps=3, hours=1),
        lambda: keep.every(hours=0),
        lambda: keep.every(steps=0),
        lambda: keep.best("loss", 0),
        lambda: keep.best("loss", mode="most"),  # type: ignore[arg-type]
        lambda: keep.where(3),  # type: ignore[arg-type]
        lambda: keep.quarantined(-1),
        lambda: keep.quarantined(1, days=math.nan),
    ],
)
def test_rules_that_make_no_sense_are_refused_with_an_example(make: Callable[[], Keep]) -> None:
    with pytest.raises(UsageError, match=r"for example keep\.last\(3\)"):
        make()


def test_the_best_follows_the_policy_s_direction(info: MakeInfo) -> None:
    found = [info(n, {"acc": float(n)}) for n in range(3)]
    policy = keep.last(1) | keep.best("acc", mode="max")
    best = best_of(found, policy, None)
    assert best is not None
    assert best.step == 2
    assert best_of(found, None, "loss") is None
    with pytest.raises(UsageError, match="a metric's name"):
        best_of(found, keep.last(1), None)


def plan(found: Sequence[CheckpointInfo], policy: Keep | None, **o: Any) -> list[Decision]:
    asked: dict[str, Any] = {"tags": {}, "verified": lambda i: True, "ours": lambda i: True}
    return decide(found, policy, **{**asked, **o})


def kept(decisions: Sequence[Decision]) -> list[int | None]:
    return [decision.step for decision in decisions if decision.kept]


def test_a_tagged_one_and_one_of_another_writer_stay(info: MakeInfo) -> None:
    found = [info(step) for step in range(5)]
    decisions = plan(found, keep.last(1), tags={"good": found[1].name}, ours=lambda i: i.step != 2)
    assert kept(decisions) == [1, 2, 4]
    assert [d.reason for d in decisions[1:3]] == ["tagged good", "no manager wrote it"]


def test_old_ones_wait_until_a_newer_one_is_verified(info: MakeInfo) -> None:
    found = [info(step) for step in range(4)]
    waiting = plan(found, keep.last(1), verified=lambda i: False)
    assert kept(waiting) == [0, 1, 2, 3]
    assert [d.waits for d in waiting] == [True, True, True, False]
    # The newest verified one is kept itself as long as nothing newer is verified.
    assert kept(plan(found, keep.last(1), verified=lambda i: i.step == 1)) == [1, 2, 3]


def test_no_policy_keeps_all(info: MakeInfo) -> None:
    assert kept(plan([info(2), info(1), info(None)], None)) == [None, 1, 2]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[tuple[int, float | None]], int, set[int], set[int]]:
    steps = draw(st.lists(st.integers(0, 60), unique=True, max_size=12))
    metric = st.none() | st.floats(allow_infinity=True, allow_nan=True, width=16)
    rows = [(step, draw(metric)) for step in steps]
    pick = st.sets(st.sampled_from(steps)) if steps else st.just(set())
    return rows, draw(st.integers(1, 4)), draw(pick), draw(pick)


@given(worlds())
def test_whatever_happened_a_verified_one_or_all_stay_and_the_count_is_bounded(
    world: tuple[list[tuple[int, float | None]], int, set[int], set[int]],
) -> None:
    rows, n, tagged, verified = world
    make = _info_of
    found = [make(step, metric) for step, metric in rows]
    policy = keep.last(n) | keep.best("m", n) | keep.every(steps=20)
    tags = {f"t{step}": f"step-{step:016d}" for step in tagged}
    decisions = plan(found, policy, tags=tags, verified=lambda i: i.step in verified)
    stay = {d.step for d in decisions if d.kept}
    assert [d.step for d in decisions] == sorted(step for step, _ in rows)
    assert tagged <= stay
    if rows:
        assert max(step for step, _ in rows) in stay  # the newest
    for dropped in (d for d in decisions if not d.kept):
        assert any(s in verified and s in stay for s in stay if s is not None and s > dropped.step)  # type: ignore[operator]
    if verified == {step for step, _ in rows}:
        assert len(stay - tagged) <= n + n + 4 + 1
    # What is decided again after the deletion is the same: nothing more goes.
    again = plan(
        [i for i in found if i.step in stay],
        policy,
        tags=tags,
        verified=lambda i: i.step in verified,
    )
    assert {d.step for d in again if d.kept} == stay


def _info_of(step: int, metric: float | None) -> CheckpointInfo:
    from datetime import UTC, datetime

    return CheckpointInfo(
        f"step-{step:016d}", step, 0, datetime(2026, 1, 1, tzinfo=UTC), "", 0, 0, 0, 0, "", {},
        {} if metric is None else {"m": metric}, None, "ckptfmt 1 manager", 0.0,
    )  # fmt: skip


NOW_S = 1_767_312_000.0  # 2026-01-02, midnight


def plan_aside(
    found: Mapping[str, CheckpointInfo | None], policy: Keep | None, **o: Any
) -> dict[str, str]:
    """Name -> reason of those that go."""
    asked: dict[str, Any] = {"tagged": (), "good": "step-9", "ours": lambda i: True, "now_s": NOW_S}
    made = decide_aside(found, policy, **{**asked, **o})
    assert all(decision.quarantined for decision in made)
    return {decision.name: decision.reason for decision in made if not decision.kept}


def test_of_those_set_aside_the_newest_and_the_young_stay(info: MakeInfo) -> None:
    found = {f"step-{n}": info(n, minutes=60 * n, name=f"step-{n}") for n in range(5)}
    assert list(plan_aside(found, keep.last(1) | keep.quarantined(2))) == [
        "step-0",
        "step-1",
        "step-2",
    ]
    assert list(plan_aside(found, keep.quarantined(0, days=22 / 24))) == [
        "step-0",
        "step-1",
        "step-2",
    ]
    assert plan_aside(found, keep.quarantined(5)) == {}
    reason = plan_aside(found, keep.quarantined(0))["step-0"]
    assert reason == "set aside, no rule keeps it, and step-9 is verified"


def test_of_those_set_aside_none_goes_without_a_good_one_and_tags_hold(info: MakeInfo) -> None:
    one, other, broken = info(1, name="a"), info(2, name="b", writer="ckptfmt 1"), None
    found = {"a": one, "b": other, "c": broken}
    assert list(plan_aside(found, keep.quarantined(0))) == ["a", "b", "c"]
    assert list(
        plan_aside(found, keep.quarantined(0), ours=is_ours, tagged={("a", one.digest)})
    ) == ["c"]
    assert list(plan_aside(found, keep.quarantined(0), ours=is_ours)) == ["a", "c"]
    assert plan_aside(found, keep.quarantined(0), good="") == {}


def test_a_rule_about_those_set_aside_alone_keeps_all_others(info: MakeInfo) -> None:
    found = [info(n) for n in range(4)]
    assert kept(plan(found, keep.quarantined(0))) == [0, 1, 2, 3]
    assert kept(plan(found, keep.quarantined(0) | keep.last(1))) == [3]
    assert best_of(found, keep.quarantined(0) | keep.best("x"), None) is None
