"""Who of a group is gone, judged by a board, a clock and the kernel."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from ckptfmt import FileGroup, UsageError
from ckptfmt.engine import wait_until
from ckptfmt.engine.owner import Owner
from ckptfmt.engine.presence import Presence, Watch


class Board(dict[str, bytes]):
    def put(self, key: str, data: bytes) -> None:
        self[key] = data

    def delete(self, key: str) -> None:
        self.pop(key, None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def step(seconds: float) -> None:
        now_s[0] += seconds

    return step


def elsewhere(life: str = "a" * 32, lost_after_s: object = 60.0) -> dict[str, Any]:
    facts = Owner.here().to_json()
    return {**facts, "life": life, "lost_after_s": lost_after_s, "host": "elsewhere"}


def knowing(board: Board, facts: dict[str, Any]) -> Presence:
    made = Presence(board, 0, 2, math.inf)  # it does not beat itself
    made.know(1, facts)
    return made


def watching(board: Board, facts: dict[str, Any]) -> Watch:
    return Watch(knowing(board, facts))


def test_beats_that_stand_still_while_they_are_watched_are_those_of_a_lost_rank(
    clock: Callable[[float], None],
) -> None:
    board = Board({f"alive-1-{'a' * 32}": b"1"})
    watch = watching(board, elsewhere())
    for _ in range(61):
        assert watch.gone([1]) == []
        clock(1.0)
    board[f"alive-1-{'a' * 32}"] = b"2"
    for _ in range(61):  # it was only slow
        assert watch.gone([1]) == []
        clock(1.0)
    (gone,) = watch.gone([1])
    assert gone.rank == 1
    assert "rank 1 (elsewhere, process " in gone.where
    assert "no sign of life for 61 s" in gone.found


def test_time_in_which_this_rank_was_stopped_itself_does_not_count(
    clock: Callable[[float], None],
) -> None:
    watch = watching(Board({f"alive-1-{'a' * 32}": b"1"}), elsewhere())
    for _ in range(3):
        assert watch.gone([1]) == []
        clock(3600.0)
    assert watch.gone([1]) == []


def test_a_rank_that_was_named_may_have_been_started_again_and_gets_time_to_come(
    clock: Callable[[float], None],
) -> None:
    board = Board()
    presence = knowing(board, elsewhere())
    board[f"left-1-{'a' * 32}"] = json.dumps({"error": "E: x", "time_s": 0.0}).encode()
    (gone,) = Watch(presence).gone([1])
    assert gone.found == "it left at 1970-01-01 00:00:00Z: E: x"
    assert presence.was_told(1)
    clock(1.0)
    later = Watch(presence)  # of a meeting that began when all had heard
    clock(59.0)
    assert later.gone([1]) == []
    clock(1.0)
    assert later.gone([1]) == [gone]
    presence.know(1, elsewhere("b" * 32))
    assert not presence.was_told(1)
    assert Watch(presence).gone([1]) == []


def test_a_meeting_that_is_under_way_waits_for_no_later_life(
    clock: Callable[[float], None],
) -> None:
    """The save in flight, whose thread hears of it after the loop."""
    board = Board()
    presence = knowing(board, elsewhere())
    old, older = Watch(presence), Watch(presence)
    older.spoke(1)
    clock(5.0)
    board[f"left-1-{'a' * 32}"] = b"{}"
    assert Watch(presence).gone([1])
    assert old.gone([1])
    presence.know(1, elsewhere("b" * 32))
    assert old.gone([1])
    del board[f"left-1-{'a' * 32}"]
    assert older.gone([1])[0].found == "it was started again"
    assert Watch(presence).gone([1]) == []


def test_a_rank_that_ended_in_order_is_gone_and_one_that_never_spoke_is_not(
    clock: Callable[[float], None],
) -> None:
    board = Board({f"alive-1-{'a' * 32}": b"1"})
    watch = watching(board, elsewhere())
    assert watch.gone([1]) == []
    board.clear()
    assert "ended in order" in watch.gone([1])[0].found
    assert watch.gone([7]) == []


@pytest.mark.parametrize("said", [b"", b"[]", b"{}", b'{"time_s": 1e300, "error": 1}', b"\xff"])
def test_a_last_word_that_cannot_be_read_is_a_last_word(said: bytes) -> None:
    watch = watching(Board({f"left-1-{'a' * 32}": said}), elsewhere())
    assert "it left" in watch.gone([1])[0].found


@pytest.mark.parametrize("seconds", [None, -1, 0, "60", math.nan])
def test_facts_that_make_no_sense_do_not_make_a_rank_lost(seconds: object) -> None:
    presence = knowing(Board(), elsewhere(lost_after_s=seconds))
    assert Watch(presence).gone([1]) == []
    presence.know(1, {"life": 7})
    life = presence.life_of(1)
    assert life is not None
    assert life.life == "a" * 32


def test_ranks_of_two_machines_beat_and_leave_nothing_behind() -> None:
    board = Board()
    mine = Presence(board, 0, 2, 0.06)
    mine.know(1, {**Owner.here().to_json(), "life": "b" * 32, "lost_after_s": 60.0})
    assert not board  # of one machine: the kernel knows
    mine.know(1, elsewhere())
    key = f"alive-0-{mine.life}"
    assert wait_until(lambda: int(board.get(key, b"0")) > 2, 60)
    mine.end()
    assert wait_until(lambda: not board, 60)
    assert mine.ended


def test_so_many_ranks_beat_less_often() -> None:
    few, many = (Presence(Board(), 0, size, 60.0).facts()["lost_after_s"] for size in (2, 10000))
    assert (few, many) == (60.0, 3000.0)


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, "60", True, None])
def test_a_lease_that_makes_no_sense_is_refused(seconds: Any) -> None:
    with pytest.raises(UsageError, match="lost_after_s"):
        FileGroup(0, 2, lost_after_s=seconds)
