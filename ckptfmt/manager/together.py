"""The managers of a group, one in each rank: rank 0 decides what clocks and listings tell, all hear it.

They talk beside the saves and restores, so that a save in flight and a question never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptfmt.engine import (
    Checkpoint,
    Meeting,
    Ranks,
    RestoreRequest,
    Store,
    fail_in_group,
    ranks_of,
    restore_in_group,
    source_of,
)
from ckptfmt.errors import ConflictError, UsageError
from ckptfmt.format import pack_value, parse_value
from ckptfmt.manager.aftermath import Tell, log
from ckptfmt.manager.guard import Verdict
from ckptfmt.reports import RestoreReport
from ckptfmt.types import Group

T = TypeVar("T")

TIMEOUT_S = 1800.0
"""How long ranks wait for each other: one may evaluate meanwhile."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What holds for all ranks at a step.

    Attributes:
        due: A save.
        left_s: Some rank's job must go in so many seconds; None: none's.
        verdict: Of the guard of rank 0, or of the preemption.
    """

    due: bool
    left_s: float | None
    verdict: Verdict


class Together:
    """One rank's side. All ranks call each method, in the same order."""

    def __init__(self, store: Store, ranks: Ranks, tell: Tell) -> None:
        self._store, self.ranks, self._tell = store, ranks, tell
        self._beside = ranks.beside("manager")
        self.leads = ranks.rank == 0

    def _round(
        self,
        mine: Callable[[], bytes],
        answer: Callable[[list[bytes]], bytes],
        what: str = "a question of the manager",
    ) -> bytes:
        meeting = Meeting(
            self._beside, self._store.backend, TIMEOUT_S, what=what, when_late=self._late
        )
        try:
            with meeting:
                return meeting.round(mine, answer)
        except ConflictError as error:
            if error.reason in ("rank-late", "rank-gone"):
                reason = "a rank of the group is missing, so the job stands still"
                self._tell("alarm", error=error, data={"alarm": "rank", "reason": reason})
            raise

    def _late(self, text: str) -> None:
        """The job stands still, and nobody has raised yet: whoever looks is to know which rank."""
        self._tell("alarm", data={"alarm": "rank", "reason": text})

    def look(
        self,
        step: int,
        left_s: float | None,
        decide: Callable[[float | None], tuple[bool, Verdict]],
    ) -> Agreed:
        """At a step's end.

        Args:
            left_s: Of this rank's deadline, if its job must go.
            decide: On rank 0, given the least of these: whether a save is due, and the verdict.
        Raises:
            UsageError: kind `usage-group-step`: ranks are at different steps.
        """

        def answer(all_: list[bytes]) -> bytes:
            rows = [parse_value(row) for row in all_]
            _refuse_steps([row[0] for row in rows])
            left = min((row[1] for row in rows if row[1] is not None), default=None)
            due, verdict = decide(left)
            return pack_value([due, left, verdict.rollback_to, verdict.stop, verdict.reason])

        due, left, rollback_to, stop, reason = parse_value(
            self._round(lambda: pack_value([step, left_s]), answer, f"the end of step {step}")
        )
        return Agreed(due, left, Verdict(rollback_to=rollback_to, stop=stop, reason=reason))

    def lead(self, say: Callable[[], Any]) -> Any:
        """What rank 0 says: plain data. Its error is that of all."""
        return parse_value(
            self._round(lambda: pack_value(say()) if self.leads else b"", lambda all_: all_[0])
        )

    def each(self, do: Callable[[], T]) -> T:
        """What this rank makes, if all ranks could make theirs; else all raise."""
        made: list[T] = []

        def mine() -> bytes:
            made.append(do())
            return b""

        self._round(mine, lambda all_: b"")
        return made[0]

    def leave(self, error: BaseException) -> None:
        """This rank's loop is over, by an error: those who wait for it hear of it at once."""
        try:
            self.ranks.leave(self._store.backend, error)
        except Exception as second:
            log.warning("the other ranks were not told that this one leaves: %s", second)

    def restore(
        self, target: object, checkpoint: Checkpoint, request: RestoreRequest
    ) -> RestoreReport:
        """Fill the targets of all ranks, or of none."""
        source = source_of(checkpoint)
        return restore_in_group(target, lambda: source, self._store.backend, request, self.ranks)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Before a save: an error of this rank is heard by the others, who begin to save."""
        try:
            yield
        except Exception as error:
            fail_in_group(self.ranks, self._store.backend, error, TIMEOUT_S)
            raise

    def judge(self, error: Exception, reason: str | None) -> str | None:
        """After an attempt failed on all ranks: why all of them pass the checkpoint over.

        Args:
            error: What this rank raised, its own or another's.
            reason: Why this rank would pass it over, "" if it was only deleted; None: it would not.
        Returns:
            None: the error is to be raised.
        """
        if isinstance(error, ConflictError) and error.reason in ("rank-late", "rank-gone"):
            return None  # nobody is there to be asked
        heard = isinstance(error, ConflictError) and error.reason == "rank-failed"

        def answer(all_: list[bytes]) -> bytes:
            found = [row for row in map(parse_value, all_) if row != "heard"]
            if not found or None in found:
                return pack_value(None)
            return pack_value(next((row for row in found if row), ""))

        made: str | None = parse_value(
            self._round(lambda: pack_value("heard" if heard else reason), answer)
        )
        return made


def together_of(store: Store, group: Group, tell: Tell) -> Together | None:
    """The managers of a caller's `group=`; None for a process alone."""
    return None if group is None else Together(store, ranks_of(group), tell)


def _refuse_steps(steps: Sequence[int]) -> None:
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise UsageError(
                "ranks of a manager are at different steps",
                reason="group-step",
                where=f"rank {rank}",
                expected=steps[0],
                found=step,
                do="call observe, should_save and save at the same steps on every rank",
            )
