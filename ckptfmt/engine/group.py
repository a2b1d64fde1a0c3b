"""Ranks that act together: who they are, how their bytes travel, and rounds that fail for all at once.

In a *round* every rank sends what it made, or its error; rank 0 makes one answer of all, or one error,
and every rank gets it. So a rank that fails, dies or is late makes all living ranks raise, by the
same error, and nobody waits longer than the timeout; for one that is known to be gone (`presence`), not
even that long. Nothing is pickled.

`FileGroup` meets through files in the store. Spec: 08-protocol §8.9.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckptfmt import errors
from ckptfmt.errors import CheckpointError, ConflictError, UsageError
from ckptfmt.format import pack_value, parse_value
from ckptfmt.storage import Backend

log = logging.getLogger("ckptfmt.engine")

PAUSE_S = (0.002, 0.1)
"""Between two looks for a message: at first, and at most."""
LOOK_S = 1.0
"""Between two looks whether who is waited for still lives."""
TELL_S = 15.0
"""After how long a wait for others is told: who has not come, and what is known of it."""
_GOOD, _BAD = b"\0", b"\1"
_ALARM = "alarm"


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank that will not come: which, on which machine, and how that is known."""

    rank: int
    where: str
    found: str


class Mailbox(Protocol):
    """Carries the messages of one meeting between its ranks."""

    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str) -> bytes | None:
        """The message, or None if it is not there yet."""

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""

    def tend(self) -> None:
        """Called while somebody waits."""

    def gone(self, ranks: Sequence[int]) -> list[Gone]:
        """Which of them will not come any more."""

    def came(self, rank: int, to: str) -> None:
        """A rank has just spoken in a call that all ranks make."""

    def describe(self, rank: int) -> str:
        """One that has not come: which, on which machine, whether it lives, and its last call."""

    def close(self) -> None:
        """This rank is done: every message that it needed has arrived, or never will."""


class Ranks(Protocol):
    """The ranks of a group, as seen by one of them."""

    rank: int
    size: int

    def meet(self, backend: Backend, timeout_s: float) -> Mailbox:
        """A mailbox for one save or restore. All ranks call in the same order."""

    def beside(self, line: str) -> Ranks:
        """The same ranks, whose meetings have nothing to do with these, nor with another line's."""

    def leave(self, backend: Backend, error: BaseException) -> None:
        """This rank comes to no further meeting, of any line, and the others are to know why."""


class Meeting:
    """One save or restore of all ranks: a context manager around its rounds.

    Args:
        what: The call, for people: "the save of step 120".
        when_late: Called once, with a sentence, when a rank has not come for `TELL_S`.
    """

    def __init__(
        self,
        ranks: Ranks,
        backend: Backend,
        timeout_s: float,
        *,
        what: str = "a call of all ranks",
        when_late: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.rank, self.size, self._timeout_s = ranks.rank, ranks.size, timeout_s
        self._what, self._when_late = what, when_late
        self._mailbox = ranks.meet(backend, timeout_s)
        self._round = 0

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._mailbox.close()

    def round(
        self, mine: Callable[[], bytes], answer: Callable[[list[bytes]], bytes] = lambda all_: b""
    ) -> bytes:
        """Send what `mine` makes; get what rank 0's `answer` makes of all, by rank.

        Raises:
            ConflictError: kind `conflict-rank-late`: some rank sent nothing in time;
                `conflict-rank-gone`: it will not come; it is named.
                Else the error of `answer`, or that of the lowest rank whose `mine` failed.
        """
        at, self._round = self._round, self._round + 1
        own: BaseException | None = None
        try:
            message = _GOOD + mine()
        except BaseException as error:
            own, message = error, _BAD + pack_error(error, self.rank)
        if self.rank:
            self._mailbox.put(f"{at}-{self.rank}", message)
            if own is not None:  # after the message: who hears the alarm reads it at once
                self._mailbox.put(f"{at}-{_ALARM}", b"")
            verdict = self._receive(at) if own is None else b""
        else:
            verdict = self._answer(at, message, own, answer)
        if own is not None:
            raise own
        if verdict[:1] == _BAD:
            raise unpack_error(verdict[1:])
        return verdict[1:]

    def _answer(
        self,
        at: int,
        message: bytes,
        own: BaseException | None,
        answer: Callable[[list[bytes]], bytes],
    ) -> bytes:
        """Rank 0: the answer, which the others get, or an error, which they get too."""
        raised = own
        if own is not None:
            verdict = message
        else:
            try:
                others = self._gather(at)
                verdict = _first_bad(others) or _GOOD + answer([m[1:] for m in [message, *others]])
            except BaseException as error:
                raised, verdict = error, _BAD + pack_error(error, None)
        self._mailbox.put(f"{at}-answer", verdict)
        if raised is not None:
            raise raised
        return verdict

    def _gather(self, at: int) -> list[bytes]:
        keys = {rank: f"{at}-{rank}" for rank in range(1, self.size)}
        alarm = f"{at}-{_ALARM}"
        if keys:
            wait_for(
                self._mailbox,
                keys,
                self._timeout_s,
                or_when=lambda: self._mailbox.has([alarm]),
                late=self._late,
            )
        found = {rank: self._mailbox.get(key) for rank, key in keys.items()}
        for rank, message in found.items():
            if message is not None:
                self._mailbox.came(rank, self._what)
        there = [message for message in found.values() if message is not None]
        bad = [message for message in there if message[:1] == _BAD]
        if bad:
            return bad
        late = [rank for rank, message in found.items() if message is None]
        if late:
            raise late_error(late, self._timeout_s, self._who(late))
        return there

    def _late(self, ranks: Sequence[int], waited_s: float) -> None:
        text = f"waiting for {waited_s:.0f} s in {self._what} for {self._who(ranks)}"
        if self.rank:
            text += " (it hangs, or waits itself for another, which its own log names)"
        log.warning("%s", text)
        self._when_late(text)

    def _who(self, ranks: Sequence[int]) -> str:
        more = f"; and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return "; ".join(self._mailbox.describe(rank) for rank in ranks[:8]) + more

    def _receive(self, at: int) -> bytes:
        # Rank 0 may come as late as is allowed, and then waits as long for others: its verdict, which
        # names who is late, should be heard before it is taken for late itself.
        key = f"{at}-answer"
        limit_s = 2 * self._timeout_s + 1.0
        if not wait_for(self._mailbox, {0: key}, limit_s, late=self._late):
            error = late_error([0], self._timeout_s, self._who([0]))
            # Should it come after all: it need not wait for one that has given up.
            self._mailbox.put(f"{at}-{self.rank}", _BAD + pack_error(error, self.rank))
            self._mailbox.put(f"{at}-{_ALARM}", b"")
            raise error
        found = self._mailbox.get(key)
        assert found is not None
        self._mailbox.came(0, self._what)
        return found


def wait_for(
    mailbox: Mailbox,
    keys: Mapping[int, str],
    timeout_s: float,
    *,
    or_when: Callable[[], bool] = lambda: False,
    late: Callable[[Sequence[int], float], None] = lambda ranks, waited_s: None,
) -> bool:
    """Until each rank's message is there, or `or_when` is true; False when the time is up.

    Args:
        late: Called once with those who have not come in `TELL_S`, and how long that is.
    Raises:
        ConflictError: kind `conflict-rank-gone`: one of them will not come.
    """
    began_s = looked_s = time.monotonic()
    told = False
    gone: list[Gone] = []

    def is_over() -> bool:
        nonlocal looked_s, told
        if mailbox.has([*keys.values()]) or or_when():
            return True
        now_s = time.monotonic()
        if now_s - looked_s >= LOOK_S:
            looked_s = now_s
            missing = [rank for rank, key in keys.items() if not mailbox.has([key])]
            lost = mailbox.gone(missing)
            # It may have said its last word between these two looks.
            gone.extend(one for one in lost if not mailbox.has([keys[one.rank]]))
            if missing and not (gone or told) and now_s - began_s >= TELL_S:
                told = True
                late(missing, now_s - began_s)
        return bool(gone)

    in_time = wait_until(is_over, timeout_s, mailbox.tend)
    if gone:
        raise gone_error(gone)
    return in_time


def wait_until(
    ready: Callable[[], bool], timeout_s: float, tend: Callable[[], None] = lambda: None
) -> bool:
    """Look again and again, more and more seldom; False when the time is up."""
    deadline, pause_s = time.monotonic() + timeout_s, PAUSE_S[0]
    while not ready():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        tend()
        time.sleep(min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, PAUSE_S[1])
    return True


def late_error(ranks: Sequence[int], timeout_s: float, found: str | None = None) -> ConflictError:
    """Some ranks did not come in time.

    Args:
        found: What is known of them.
    """
    names = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
    return ConflictError(
        "a rank of the group did not answer in time",
        reason="rank-late",
        where=f"rank{'s' if len(ranks) > 1 else ''} {names}",
        expected=f"all ranks to call within {timeout_s:g} s of each other",
        found=found,
        do="nothing was committed or restored; look whether it lives, and whether every rank of the "
        "group calls",
    )


def gone_error(gone: Sequence[Gone]) -> ConflictError:
    """Some ranks will not come."""
    more = f"; and {len(gone) - 8} more" if len(gone) > 8 else ""
    return ConflictError(
        "a rank of the group is gone",
        reason="rank-gone",
        where=", ".join(one.where for one in gone[:8]),
        found="; ".join(one.found for one in gone[:8]) + more,
        do="nothing was committed or restored; its own output says more. Start the job again: it goes on "
        "from the last checkpoint",
    )


def _first_bad(messages: Sequence[bytes]) -> bytes | None:
    return next((message for message in messages if message[:1] == _BAD), None)


# -- errors, as plain data ----------------------------------------------------------------------


def pack_error(error: BaseException, rank: int | None) -> bytes:
    """An error for other ranks; of one that is not ours, its class and text."""
    where = "" if rank is None else f"rank {rank}"
    if isinstance(error, CheckpointError) and type(error).__name__ in vars(errors):
        parts: Mapping[str, object] = {
            "class": type(error).__name__,
            "what": f"{where}: {error.what}" if where else error.what,
            "reason": error.reason,
            "where": error.where,
            "expected": None if error.expected is None else str(error.expected),
            "found": None if error.found is None else str(error.found),
            "do": error.do,
        }
    else:
        parts = {
            "class": "ConflictError",
            "what": "a rank of the group failed",
            "reason": "rank-failed",
            "where": where,
            "expected": None,
            "found": f"{type(error).__name__}: {error}",
            "do": "nothing was committed or restored; its own output says more",
        }
    return pack_value(dict(parts))


def error_in(message: bytes) -> CheckpointError | None:
    """The error that a message of a round brings; None if it brings none."""
    return unpack_error(message[1:]) if message[:1] == _BAD else None


def unpack_error(data: bytes) -> CheckpointError:
    """The error that another rank had."""
    parts: dict[str, Any] = parse_value(data)
    cls = getattr(errors, str(parts.pop("class")), ConflictError)
    if not (isinstance(cls, type) and issubclass(cls, CheckpointError)):
        cls = ConflictError
    error: CheckpointError = cls(parts.pop("what"), **parts)
    return error


# -- which ranks a caller means ------------------------------------------------------------------


RESOLVERS: dict[str, str] = {
    "torch": "ckptfmt.torch.group:ranks_of",
    "tensorflow": "ckptfmt.tensorflow.strategy_group:ranks_of",
}
"""Root module of a group's type -> "module:function", which makes the ranks of it."""


def ranks_of(group: object) -> Ranks:
    """The ranks that a caller of `group=` means: `"world"` is torch.distributed's, if it is there.

    Raises:
        UsageError: kind `usage-group`.
    """
    if hasattr(group, "meet") and hasattr(group, "rank") and hasattr(group, "size"):
        made: Any = group
        return made  # type: ignore[no-any-return]
    is_world = isinstance(group, str) and group == "world"
    roots = ["torch"] if is_world else [c.__module__.split(".")[0] for c in type(group).__mro__]
    for root in roots:
        if root in RESOLVERS:
            module, _, function = RESOLVERS[root].partition(":")
            resolved: Ranks = getattr(importlib.import_module(module), function)(group)
            return resolved
    raise UsageError(
        "this is no group of ranks",
        reason="group",
        expected='"world", a ProcessGroup of torch, a tf.distribute.Strategy, or FileGroup(rank, size)',
        found=repr(group),
        do="pass one of these, or leave group out for this process alone",
    )
