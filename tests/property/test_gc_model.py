"""The collector and the saves, as a model: every interleaving, and variants that must fail.

Two savers of the same content, retention that deletes checkpoints at any time, and two collectors
take their steps in every order, with any delay, and any of them may die at any point. A file with
the savers' content has id 0; written under a salt it has id 1. Sets of ids are bit masks.

A saver may be a group of ranks, each with content of its own: one opens the save for all, each writes
and checks its file, and one commits after it has checked the files of all.

Nothing here is timed: `grace` decides nothing, ages only by the order of events. The steps are those
of `engine/coordinate` (unusable: the lists, then the sizes) and `engine/gc` (a list of its own, data,
open saves, indexes, deletions, the lists it took up, its own list last).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

# Where a saver is.
IDLE, OPENED, CHOOSE, WRITE, PRE_A, PRE_B, COMMIT, POST_A, POST_B, WITHDRAW, SUCCESS = range(11)
DONE, FAILED, DEAD = range(11, 14)
IN_FLIGHT = range(OPENED, SUCCESS + 1)
# Where a rank of a group is, while the group's saver is OPENED.
R_START, R_CHOOSE, R_WRITE, R_CHECK_A, R_CHECK_B, R_GIVEN = range(6)
# Where a collector is.
REST, PUT, DATA, OPENS, REFS, DELETE, REMOVE, LIST, END, GONE = range(10)


class Saver(NamedTuple):
    pc: int = IDLE
    target: int = 0  # the id, as a mask
    bad: bool = False  # what the first half of a check found
    visible: bool = False  # its index
    young: int = 0  # ids written since it opened


class Collector(NamedTuple):
    pc: int = REST
    rounds: int = 0
    waiting: int = 0  # its list that anybody may take up
    own: int = 0  # its list that only it removes
    take: int = 0  # ids it means to delete
    taken: int = 0  # whose waiting lists these came from, as a mask of collectors
    data: int = 0
    opens: int = 0  # savers seen open, as a mask
    old: int = 0  # ids older than every open save, when data was listed
    garbage: int = 0


class Rank(NamedTuple):
    pc: int = R_START
    target: int = 0
    bad: bool = False


class State(NamedTuple):
    base: bool
    files: int
    savers: tuple[Saver, ...]
    collectors: tuple[Collector, ...]
    ranks: tuple[Rank, ...] = ()


@dataclass(frozen=True)
class Rules:
    """A configuration, and which steps are left out or misplaced."""

    savers: int = 1
    ranks: int = 0  # of the only saver, if it is a group
    checks_all: bool = True  # the committer checks the files of all ranks, not those of its own
    reusers: int = 1  # how many of the savers (or ranks) have the base as their base
    rounds: tuple[int, ...] = (2,)  # of each collector
    atomic_look: bool = False  # the three listings of a look in one step
    crashes: bool = True
    listed: bool = False  # start with the base deleted and its file on a waiting list
    honoured: bool = True  # open saves count; else each may be overlooked (24 h are over)
    hasty: bool = False  # grace_s=0: list, look again and delete in one go
    sizes_before_lists: bool = False
    check_after_commit: bool = True
    two_phases: bool = True
    own_list: bool = True
    own_list_before_look: bool = True

    @property
    def ids(self) -> int:
        return (1 << 2 * max(self.ranks, 1)) - 1

    @property
    def base_ids(self) -> int:
        return sum(1 << 2 * rank for rank in range(self.reusers if self.ranks else 1))


def named(state: State) -> int:
    ids = 0
    for collector in state.collectors:
        ids |= collector.waiting | collector.own
    return ids


def saver_steps(state: State, w: int, rules: Rules) -> Iterator[State]:
    me = state.savers[w]

    def go(pc: int, **changes: object) -> State:
        now = me._replace(pc=pc, **changes)  # type: ignore[arg-type]
        return state._replace(savers=(*state.savers[:w], now, *state.savers[w + 1 :]))

    present = bool(state.files & me.target)
    is_named = bool(named(state) & me.target)
    first, second = (not present, is_named) if rules.sizes_before_lists else (is_named, not present)
    if me.pc == IDLE:
        yield go(OPENED, young=0)
    elif me.pc == OPENED:
        # The base's file may be reused; a saver without a base writes.
        yield go(PRE_A, target=1) if w < rules.reusers and state.base else go(CHOOSE)
    elif me.pc == CHOOSE:
        free = [i for i in (1, 2) if not named(state) & i]
        yield go(WRITE, target=free[0]) if free else go(FAILED, young=0, target=0)
    elif me.pc == WRITE:
        after = go(PRE_A)
        yield after._replace(
            files=state.files | me.target,
            savers=tuple(
                s._replace(young=s.young | me.target) if s.pc in IN_FLIGHT else s
                for s in after.savers
            ),
        )
    elif me.pc == PRE_A:
        yield go(PRE_B, bad=first)
    elif me.pc == PRE_B:
        yield go(CHOOSE if me.bad or second else COMMIT, bad=False)
    elif me.pc == COMMIT:
        yield go(POST_A if rules.check_after_commit else SUCCESS, visible=True)
    elif me.pc == POST_A:
        yield go(POST_B, bad=first)
    elif me.pc == POST_B:
        yield go(WITHDRAW if me.bad or second else SUCCESS, bad=False)
    elif me.pc == WITHDRAW:
        yield go(FAILED, visible=False, young=0, target=0)
    elif me.pc == SUCCESS:
        yield go(DONE, young=0)
    elif me.pc == DONE and me.visible:
        yield go(DONE, visible=False, target=0)  # retention deletes this checkpoint too
    if rules.crashes and me.pc in IN_FLIGHT and me.pc != SUCCESS:
        yield go(DEAD, young=0, bad=False, target=me.target if me.visible else 0)


def group_steps(state: State, rules: Rules) -> Iterator[State]:
    """A save by several ranks: what differs from one by a saver alone."""
    (me,), in_file = state.savers, named(state)

    def go(pc: int, **changes: object) -> State:
        now = me._replace(pc=pc, **changes)  # type: ignore[arg-type]
        return state._replace(savers=(now,), ranks=state.ranks if pc == OPENED else ())

    checked = me.target if rules.checks_all else me.target & 3
    gone, is_named = bool(checked & ~state.files), bool(checked & in_file)
    first, second = (gone, is_named) if rules.sizes_before_lists else (is_named, gone)
    if me.pc == IDLE:
        yield go(OPENED, young=0)._replace(ranks=(Rank(),) * rules.ranks)
    elif me.pc == OPENED:
        if all(rank.pc == R_GIVEN for rank in state.ranks):
            yield go(PRE_A, target=sum(rank.target for rank in state.ranks))
        for r in range(rules.ranks):
            yield from rank_steps(state, r, rules)
        if rules.crashes:
            yield go(FAILED, young=0)  # a rank died or failed: the others give up
    elif me.pc in (PRE_A, POST_A):
        yield go(me.pc + 1, bad=first)
    elif me.pc in (PRE_B, POST_B) and (me.bad or second):
        yield go(WITHDRAW if me.visible else FAILED, bad=False, **({} if me.visible else NOTHING))
    elif me.pc in (PRE_B, POST_B):
        yield go(COMMIT if me.pc == PRE_B else SUCCESS, bad=False)
    else:
        yield from saver_steps(state, 0, replace(rules, crashes=False))
    if rules.crashes and me.pc in IN_FLIGHT and me.pc != SUCCESS:
        yield go(DEAD, young=0, bad=False, target=me.target if me.visible else 0)


NOTHING: dict[str, Any] = {"young": 0, "target": 0}


def rank_steps(state: State, r: int, rules: Rules) -> Iterator[State]:
    me, saver, own = state.ranks[r], state.savers[0], 1 << 2 * r

    def go(pc: int, **changes: object) -> State:
        now = me._replace(pc=pc, **changes)  # type: ignore[arg-type]
        return state._replace(ranks=(*state.ranks[:r], now, *state.ranks[r + 1 :]))

    gone, is_named = bool(me.target & ~state.files), bool(me.target & named(state))
    first, second = (gone, is_named) if rules.sizes_before_lists else (is_named, gone)
    if me.pc == R_START:
        yield go(R_CHECK_A, target=own) if r < rules.reusers and state.base else go(R_CHOOSE)
    elif me.pc == R_CHOOSE:
        free = [i for i in (own, 2 * own) if not named(state) & i]
        if free:
            yield go(R_WRITE, target=free[0])
        else:
            yield state._replace(savers=(saver._replace(pc=FAILED, **NOTHING),), ranks=())
    elif me.pc == R_WRITE:
        young = (saver._replace(young=saver.young | me.target),)
        yield go(R_CHECK_A)._replace(files=state.files | me.target, savers=young)
    elif me.pc == R_CHECK_A:
        yield go(R_CHECK_B, bad=first)
    elif me.pc == R_CHECK_B:
        yield go(R_CHOOSE if me.bad or second else R_GIVEN, bad=False)


def collector_steps(state: State, c: int, rules: Rules) -> Iterator[State]:
    me = state.collectors[c]

    def go(pc: int, **changes: object) -> State:
        now = me._replace(pc=pc, **changes)  # type: ignore[arg-type]
        row = (*state.collectors[:c], now, *state.collectors[c + 1 :])
        return state._replace(collectors=row)

    if me.pc == REST and me.rounds < rules.rounds[c]:
        yield go(PUT if rules.own_list_before_look else DATA, rounds=me.rounds + 1)  # none is due
        take, taken = 0, 0
        for i, other in enumerate(state.collectors):
            ids = other.waiting | (other.own if other.pc == GONE else 0)
            take, taken = take | ids, taken | (1 << i if ids else 0)
        if take:
            yield go(
                PUT if rules.own_list_before_look else DATA,
                rounds=me.rounds + 1,
                take=take,
                taken=taken,
            )
    elif me.pc == PUT:
        yield go(
            DATA if rules.own_list_before_look else DELETE, own=me.take if rules.own_list else 0
        )
    elif me.pc == DATA:
        seen_data = go(OPENS, data=state.files)
        yield from collector_steps(seen_data, c, rules) if rules.atomic_look else [seen_data]
    elif me.pc == OPENS:
        opens = sum(1 << i for i, s in enumerate(state.savers) if s.pc in IN_FLIGHT)
        seen = {opens}
        if not rules.honoured:
            seen = {part for part in range(1 << rules.savers) if part & ~opens == 0}
        for part in sorted(seen):
            old = rules.ids
            for i, s in enumerate(state.savers):
                if part >> i & 1:
                    old &= ~s.young
            seen_opens = go(REFS, opens=part, old=old)
            yield from collector_steps(seen_opens, c, rules) if rules.atomic_look else [seen_opens]
    elif me.pc == REFS:
        yield after_look(state, me, go, rules)
    elif me.pc == DELETE:
        doomed = me.take & me.garbage
        if doomed:
            one = doomed & -doomed
            yield go(DELETE, take=me.take & ~one)._replace(files=state.files & ~one)
        else:
            yield go(REMOVE, take=0)
    elif me.pc == REMOVE:
        row = tuple(
            x._replace(waiting=0, own=0 if x.pc == GONE else x.own) if me.taken >> i & 1 else x
            for i, x in enumerate(state.collectors)
        )
        yield go(LIST, taken=0)._replace(
            collectors=(*row[:c], row[c]._replace(pc=LIST, taken=0), *row[c + 1 :])
        )
    elif me.pc == LIST:
        new = 0 if rules.hasty or not rules.two_phases else me.garbage & state.files
        yield go(END, waiting=me.waiting | new, garbage=0)
    elif me.pc == END:
        yield go(REST, own=0)
    if rules.crashes and me.pc not in (REST, GONE, *((OPENS, REFS) if rules.atomic_look else ())):
        yield go(GONE, rounds=0, take=0, taken=0, data=0, opens=0, old=0, garbage=0)


def after_look(state: State, me: Collector, go: object, rules: Rules) -> State:
    assert callable(go)
    referred = rules.base_ids if state.base else 0
    for s in state.savers:
        referred |= s.target if s.visible else 0
    garbage = me.data & me.old & ~referred
    committed = [s.visible for s in state.savers]
    for i in range(min(rules.reusers, rules.savers)):
        if me.opens >> i & 1 and not committed[i] and not state.base:
            garbage = 0  # a base of an open save is gone: what it refers to is not known
    looked = {"garbage": garbage, "data": 0, "opens": 0, "old": 0}
    if not rules.two_phases:
        return go(DELETE, take=garbage, **looked)  # type: ignore[no-any-return]
    if rules.hasty and garbage & ~me.take:
        return go(PUT, take=me.take | garbage)  # type: ignore[no-any-return]
    if not rules.own_list_before_look:
        return go(PUT, **looked)  # type: ignore[no-any-return]
    return go(DELETE, **looked)  # type: ignore[no-any-return]


def steps(state: State, rules: Rules) -> Iterator[State]:
    if state.base:
        yield state._replace(base=False)  # retention
    if rules.ranks:
        yield from group_steps(state, rules)
    for w in range(0 if rules.ranks else rules.savers):
        yield from saver_steps(state, w, rules)
    for c in range(len(rules.rounds)):
        yield from collector_steps(state, c, rules)


def is_lost(state: State, base_ids: int = 1) -> bool:
    """A committed checkpoint has a hole: a saver reported success, or the base stands."""
    return (state.base and bool(base_ids & ~state.files)) or any(
        s.visible and s.pc in (SUCCESS, DONE) and bool(s.target & ~state.files)
        for s in state.savers
    )


def is_torn(state: State) -> bool:
    """An index is visible whose file is not there."""
    return any(s.visible and bool(s.target & ~state.files) for s in state.savers)


@dataclass(frozen=True)
class Result:
    states: int
    lost: bool
    torn: bool
    freed: bool  # a collector did delete something somewhere: the model is not idle
    saved: bool


def explore(rules: Rules, *, stop_when_lost: bool = False) -> Result:
    collectors = [Collector() for _ in rules.rounds]
    if rules.listed:
        collectors[0] = Collector(waiting=rules.base_ids)
    start = State(not rules.listed, rules.base_ids, (Saver(),) * rules.savers, tuple(collectors))
    seen, todo = {start}, [start]
    # Equal parts of states are kept once, so that millions of them fit in memory.
    saver_rows: dict[tuple[Saver, ...], tuple[Saver, ...]] = {}
    collector_rows: dict[tuple[Collector, ...], tuple[Collector, ...]] = {}
    lost = torn = freed = saved = False
    while todo:
        state = todo.pop()
        lost |= is_lost(state, rules.base_ids)
        torn |= is_torn(state)
        freed |= not state.files
        saved |= any(s.pc == DONE and s.visible for s in state.savers)
        if lost and stop_when_lost:
            break
        for after in steps(state, rules):
            if after not in seen:
                kept = after._replace(
                    savers=saver_rows.setdefault(after.savers, after.savers),
                    collectors=collector_rows.setdefault(after.collectors, after.collectors),
                )
                seen.add(kept)
                todo.append(kept)
    return Result(len(seen), lost, torn, freed, saved)


CONFIGURATIONS = {
    "one saver, one collector": Rules(),
    "one saver, two collectors": Rules(rounds=(1, 1)),
    "one saver, two collectors on one list": Rules(rounds=(1, 1), listed=True),
    "two savers, one collector": Rules(savers=2),
    "two savers, two collectors": Rules(savers=2, rounds=(1, 1), atomic_look=True, crashes=False),
    "no grace, one saver": Rules(hasty=True),
    "no grace, two collectors": Rules(hasty=True, rounds=(1, 1)),
    "two ranks, one collector": Rules(ranks=2, atomic_look=True),
    "two ranks, one list": Rules(ranks=2, rounds=(2,), listed=True, atomic_look=True),
    "two ranks, no grace": Rules(ranks=2, hasty=True, rounds=(1,)),
}
LARGE = {
    "two ranks that reuse, one collector": Rules(ranks=2, reusers=2),
    "two ranks, two collectors": Rules(ranks=2, rounds=(1, 1), atomic_look=True, crashes=False),
    "three ranks, one collector": Rules(ranks=3, atomic_look=True, crashes=False),
    "two savers, two collectors on one list": Rules(
        savers=2, rounds=(1, 1), listed=True, atomic_look=True, crashes=False
    ),
    "one saver, two collectors, again": Rules(rounds=(2, 2), atomic_look=True),
    "two savers, two collectors that die": Rules(
        savers=2, rounds=(1, 1), listed=True, atomic_look=True
    ),
    "two savers, two collectors, again": Rules(
        savers=2, rounds=(2, 1), atomic_look=True, crashes=False
    ),
    "no grace, two savers": Rules(
        savers=2, hasty=True, rounds=(1, 1), atomic_look=True, crashes=False
    ),
}


def check(rules: Rules) -> None:
    result = explore(rules)
    assert result.saved, "the model never saves"
    assert result.freed, "the model never collects"
    assert not result.lost
    # While open saves count, a hole is never even visible; else it is withdrawn before success.
    assert result.torn is not rules.honoured


@pytest.mark.parametrize("honoured", [True, False], ids=["honoured", "overlooked"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_order_of_steps_loses_a_file_of_a_committed_save(name: str, honoured: bool) -> None:
    check(replace(CONFIGURATIONS[name], honoured=honoured))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("honoured", [True, False], ids=["honoured", "overlooked"])
@pytest.mark.parametrize("name", LARGE)
def test_no_order_of_steps_loses_a_file_in_large_configurations(name: str, honoured: bool) -> None:
    check(replace(LARGE[name], honoured=honoured))


@pytest.mark.parametrize(
    "rules",
    [
        Rules(honoured=False, sizes_before_lists=True),
        Rules(honoured=False, check_after_commit=False),
        Rules(two_phases=False),
        Rules(own_list=False, listed=True, rounds=(1, 1)),
        Rules(own_list_before_look=False, listed=True, rounds=(1, 1)),
        Rules(ranks=2, atomic_look=True, honoured=False, checks_all=False),
        Rules(ranks=2, atomic_look=True, honoured=False, check_after_commit=False),
        Rules(ranks=2, atomic_look=True, honoured=False, sizes_before_lists=True),
    ],
    ids=[
        "sizes before lists",
        "no check after the commit",
        "one phase",
        "the faster of two collectors removes the list",
        "a list of its own after the look",
        "a committer that checks its own rank's files",
        "ranks, and no check after the commit",
        "ranks, and sizes before lists",
    ],
)
def test_a_protocol_with_a_step_out_of_place_loses_data(rules: Rules) -> None:
    assert explore(rules, stop_when_lost=True).lost
    intact = replace(
        Rules(honoured=rules.honoured, listed=rules.listed, rounds=rules.rounds),
        ranks=rules.ranks, atomic_look=rules.atomic_look,
    )  # fmt: skip
    assert not explore(intact).lost
