"""Who of a group is there, and who has gone: noticed in seconds, not when the time is up.

A rank's *life* begins with its first meeting. It ends with its process, or when its loop leaves by an
error; then it says why on the *board*, which all ranks read. Of a process on this machine the kernel
knows whether it lives. Ranks of other machines *beat*: they put a number on the board that counts up,
and one that stands still, for as long as it is watched, is the number of a rank that is gone. What is
only slow is never gone: its beats have a thread of their own.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from ckptfmt.engine.background import Repeating
from ckptfmt.engine.group import LOOK_S, Gone
from ckptfmt.engine.owner import Owner
from ckptfmt.errors import UsageError

log = logging.getLogger("ckptfmt.engine")

LOST_AFTER_S = 60.0
"""How long the beats of a rank on another machine may stand still."""
_BEATS = 6
"""In that time."""
_BEATS_PER_S = 20
"""Of all ranks of a group together, at most: a board is a file system, too."""
_TEXT_MAX = 500


class Board(Protocol):
    """What all ranks of a group read."""

    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def delete(self, key: str) -> None: ...


@dataclass(slots=True)
class Life:
    """Another rank's, as far as it is known here.

    Attributes:
        seen_s: When it was last known to live, by the wall clock.
        beat: What it last put on the board.
        silent_s: How long that has been watched to stand still.
        lines: On which it has spoken, of those that keep them apart.
        told_s: Line -> when the callers of a meeting there have heard that it is over, by a clock that
            only goes forward.
    """

    life: str
    owner: Owner
    lost_after_s: float
    seen_s: float
    beat: bytes | None = None
    silent_s: float = 0.0
    watched_s: float = -math.inf
    lines: set[str] = field(default_factory=set)
    told_s: dict[str, float] = field(default_factory=dict)


class Presence:
    """One rank's life, and what it knows of the others'.

    Args:
        lost_after_s: See `LOST_AFTER_S`; longer where a group is so large that its beats are seldom.
        at_end: Called when this life is over.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        size: int,
        lost_after_s: float,
        at_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self._board, self._rank, self._at_end = board, rank, at_end
        self._beat_s = max(lost_after_s / _BEATS, size / _BEATS_PER_S)
        self._lost_after_s = max(lost_after_s, _BEATS * self._beat_s)
        self.life = secrets.token_hex(16)
        self.ended = False
        self._pid, self._count = os.getpid(), 0
        self._others: dict[int, Life] = {}
        self._last: dict[int, tuple[float, str]] = {}
        self._beats: Repeating | None = None
        _here.append(self)

    def facts(self) -> dict[str, object]:
        """What the others have to know, as JSON."""
        return {
            "life": self.life,
            "lost_after_s": self._lost_after_s,
            **Owner.here().to_json(),
        }

    # -- the others -------------------------------------------------------------------------------

    def know(self, rank: int, facts: Mapping[str, object]) -> None:
        """A rank has spoken: it is watched from now on."""
        life, lost_after_s = facts.get("life"), facts.get("lost_after_s")
        known = self._others.get(rank)
        if not isinstance(life, str) or (known is not None and known.life == life):
            return
        usable = isinstance(lost_after_s, int | float) and lost_after_s > 0
        seconds = float(lost_after_s) if usable else LOST_AFTER_S  # type: ignore[arg-type]
        other = self._others[rank] = Life(life, Owner.of_json(facts), seconds, time.time())
        if not other.owner.is_on_this_machine and math.isfinite(self._beat_s):
            if self._beats is None:
                self._beats = Repeating(self._beat, "ckptfmt-alive")
            self._beats.wake()

    def forget(self, rank: int) -> None:
        """Its process is another one now, which has not spoken yet."""
        self._others.pop(rank, None)

    def saw(self, ranks: Sequence[int]) -> None:
        """They have just spoken."""
        for rank in ranks:
            if rank in self._others:
                self._others[rank].seen_s = time.time()

    def came(self, rank: int, to: str) -> None:
        """It has just spoken in a call that all ranks make; it is the last one that is known."""
        self._last[rank] = time.monotonic(), to

    def describe(self, rank: int) -> str:
        """One that is waited for: who it is, whether it lives, and when it last called, and what.

        A rank calls nothing that the others do not call, so no message is needed for that.
        """
        life, last = self.life_of(rank), self._last.get(rank)
        if life is None:
            return f"rank {rank}, which has not been heard of yet"
        if life.owner.is_on_this_machine:
            alive = "its process has ended" if life.owner.has_ended() else "its process is alive"
        else:
            alive = f"last sign of life at {_utc(life.seen_s)}"
        called = "it has not called yet"
        if last is not None:
            called = f"its last call was {last[1]}, {time.monotonic() - last[0]:.0f} s ago"
        return f"rank {rank} ({_process(life)}): {called}; {alive}"

    def life_of(self, rank: int) -> Life | None:
        """The newest life of a rank, if it has spoken."""
        return self._others.get(rank)

    def was_told(self, rank: int) -> bool:
        """Whether a meeting has named it as gone."""
        return rank in self._others and bool(self._others[rank].told_s)

    def was_told_everywhere(self, rank: int) -> bool:
        """Whether all have heard who met it: the loop, and the save that was in flight. One that is
        started again would meet the others where they are, if one of them did not know."""
        return self.was_told(rank) and self._others[rank].lines <= self._others[rank].told_s.keys()

    def why_gone(self, rank: int, other: Life) -> str | None:
        """How it is known that a life is over; None as long as it is not."""
        left = self._board.get(f"left-{rank}-{other.life}")
        if left is not None:
            with suppress(ValueError, KeyError, TypeError, OverflowError):
                said = json.loads(left)
                return f"it left at {_utc(said['time_s'])}: {said['error']}"
            return "it left"
        if other.owner.is_on_this_machine:
            if other.owner.has_ended():
                return f"its process has ended; last heard of at {_utc(other.seen_s)}"
            other.seen_s = time.time()
            return None
        return self._why_silent(rank, other)

    def _why_silent(self, rank: int, other: Life) -> str | None:
        beat, now_s = self._board.get(f"alive-{rank}-{other.life}"), time.monotonic()
        # Only what was watched counts: all of us may have been stopped and sent on together.
        watched_s = min(now_s - other.watched_s, 3 * LOOK_S)
        other.watched_s = now_s
        if beat is None and other.beat is not None:
            return f"its process has ended in order; last heard of at {_utc(other.seen_s)}"
        if beat != other.beat:
            other.beat, other.silent_s, other.seen_s = beat, 0.0, time.time()
            return None
        other.silent_s += watched_s
        if other.silent_s <= other.lost_after_s:
            return None
        return f"no sign of life for {other.silent_s:.0f} s; last heard of at {_utc(other.seen_s)}"

    # -- this rank --------------------------------------------------------------------------------

    def _beat(self) -> float | None:
        if self.ended or os.getpid() != self._pid:
            return None
        self._count += 1
        try:
            self._board.put(f"alive-{self._rank}-{self.life}", b"%d" % self._count)
        except Exception as error:
            log.warning("rank %d could not give a sign of life: %s", self._rank, error)
        return self._beat_s

    def end(self, error: BaseException | None = None) -> None:
        """This life is over.

        Args:
            error: What ended it, for the others. None: in order.
        """
        if self.ended:
            return
        self.ended = True
        with suppress(ValueError):
            _here.remove(self)
        if os.getpid() != self._pid:
            return
        if error is not None:
            text = f"{type(error).__name__}: {error}"[:_TEXT_MAX]
            said = {"error": text, "time_s": time.time()}
            self._board.put(f"left-{self._rank}-{self.life}", json.dumps(said).encode())
        if self._beats is not None:
            self._beats.close(1.0)
            self._board.delete(f"alive-{self._rank}-{self.life}")
        self._at_end(error)


class Watch:
    """Who of one meeting will not come any more. It is made when the meeting begins.

    Args:
        line: The meetings of which this is one, where a rank may have heard on one line what it has
            not on another.
    """

    def __init__(self, presence: Presence, line: str | None = None) -> None:
        self._presence, self._line, self._began_s = presence, line, time.monotonic()
        self._lives: dict[int, Life] = {}

    def spoke(self, rank: int) -> None:
        """This life of it takes part, and no later one."""
        life = self._presence.life_of(rank)
        if life is not None:
            self._lives.setdefault(rank, life)
            if self._line is not None:
                life.lines.add(self._line)

    def _told_s(self, life: Life) -> float | None:
        if self._line in life.lines:
            return life.told_s.get(str(self._line))
        return max(life.told_s.values(), default=None)

    def gone(self, ranks: Sequence[int]) -> list[Gone]:
        """Which of them will not come, as far as that is known."""
        found = []
        for rank in ranks:
            life = self._lives.get(rank) or self._presence.life_of(rank)
            if life is None:
                continue
            told_s = self._told_s(life)
            if told_s is None or told_s >= self._began_s:
                self._lives[rank] = life
            elif time.monotonic() - self._began_s < life.lost_after_s:
                continue  # it was named before, and may have been started again
            why = self._presence.why_gone(rank, life)
            if why is None and self._presence.life_of(rank) is not life:
                why = "it was started again"
            if why is None:
                life.told_s.clear()
                continue
            life.told_s.setdefault(self._line or "", time.monotonic())
            found.append(Gone(rank, f"rank {rank} ({_process(life)})", why))
        return found


def check_lost_after(lost_after_s: float) -> None:
    """Raises:
    UsageError: kind `usage-group`.
    """
    is_number = isinstance(lost_after_s, int | float) and not isinstance(lost_after_s, bool)
    if not is_number or not lost_after_s > 0:
        raise UsageError(
            "a rank that is silent so long is not lost",
            reason="group",
            where="lost_after_s",
            expected="seconds, above 0",
            found=repr(lost_after_s),
            do="leave it out for a minute; math.inf waits for timeout_s",
        )


def _process(life: Life) -> str:
    return f"{life.owner.host or 'a machine without a name'}, process {life.owner.pid}"


def _utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


_here: list[Presence] = []
"""Lives of this process."""


def _at_exit() -> None:
    """The last moment at which the others can be told what ended this process."""
    error = getattr(sys, "last_value", None)
    for presence in list(_here):
        try:
            presence.end(error if isinstance(error, BaseException) else None)
        except Exception as second:  # the interpreter is half gone
            log.warning("the other ranks were not told that this one ends: %s", second)


atexit.register(_at_exit)
