"""What follows a save, in the save's own thread: say what came of it, and clean up behind it."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from threading import current_thread, main_thread
from typing import Any, Protocol, TypeVar

from ckptfmt.engine import Store, annotate_newest
from ckptfmt.errors import CheckpointError, StorageError, UsageError
from ckptfmt.events import Event
from ckptfmt.manager.alarm import Alarm, AlarmWatch
from ckptfmt.manager.flight import Started
from ckptfmt.manager.keep import Decision, Keep
from ckptfmt.manager.pace import Pace
from ckptfmt.manager.pruning import Pruning
from ckptfmt.types import CheckpointInfo

log = logging.getLogger("ckptfmt.manager")

SAVE_COST = "ckptfmt.save_cost"
"""Metadata, as a note: what the save cost: `{"stall_s", "stage_s", "durable_s", "written_nbytes"}`."""


class Tell(Protocol):
    def __call__(
        self, kind: str, checkpoint: str | None = None, step: int | None = None, **parts: Any
    ) -> None: ...


F = TypeVar("F", bound="Callable[..., object]")


def several(functions: Iterable[F], argument: str) -> tuple[F, ...]:
    """The functions that were given as a list.

    Raises:
        UsageError: It is no list, or something in it cannot be called.
    """
    made = tuple(functions) if isinstance(functions, Iterable) else (None,)
    if not all(callable(function) for function in made):
        raise UsageError(
            f"{argument}= takes a list of functions",
            reason="manager",
            found=repr(functions)[:80],
            do=f"for example {argument}=[{getattr(functions, '__name__', 'function')}]",
        )
    return made


def teller(hooks: Sequence[Callable[[Event], None]], alarm: Alarm | None = None) -> Tell:
    """Gives an event to every hook, and an alarm that it raises; none can cost a checkpoint."""
    hooks = several(hooks, "hooks")
    watch = AlarmWatch(alarm) if alarm is not None else None

    def tell(
        kind: str, checkpoint: str | None = None, step: int | None = None, **parts: Any
    ) -> None:
        event = Event(kind, time.time(), checkpoint, step, **parts)
        for hook in hooks:
            try:
                hook(event)
            except BaseException as error:
                if not isinstance(error, Exception) and current_thread() is main_thread():
                    raise  # an interrupt of the loop, or its own way to end
                log.exception("a hook failed at %s", kind)
        raised = watch.see(event) if watch is not None else None
        if raised is not None:
            log.warning("alarm: %s", raised["reason"])
            tell("alarm", checkpoint, step, data=raised)

    return tell


FIND_OUT_S = 300.0
"""How long a manager asks a store that is gone whether a checkpoint was committed: the next save waits."""


class Aftermath:
    """Of one manager's saves."""

    def __init__(
        self,
        store: Store,
        policy: Keep | None,
        verify_within_s: float,
        pace: Pace,
        tell: Tell,
        *,
        leads: bool = True,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """`leads`: False on a rank of a group that is not 0: it says what came of a save, and changes
        nothing in the store. `hurry`: whether the process must end soon: cleaning up can wait."""
        self._store, self._policy, self._pace, self._tell = store, policy, pace, tell
        self.pruning = Pruning(
            store, policy, verify_within_s, self._deleted, self._unverified, hurry
        )
        self._collected, self._leads, self._hurry = False, leads, hurry

    def finished(self, save: Started, *, quiet: bool) -> None:
        """Call it once the save's future is done.

        Args:
            quiet: A failed save is told and logged here, and nobody else is to ask for its error.
        """
        future, name = save.future, save.future.name
        seconds = time.monotonic() - save.started_s
        self._pace.done(save.cost["stall_s"], seconds)
        try:
            if future.cancelled():
                self._tell("save.skipped", name, save.step, data={"reason": "cancelled"})
                return
            error = concurrent.futures.Future.exception(future)
            if error is not None:
                self._failed(save, error, quiet=quiet)
                return
            info = concurrent.futures.Future.result(future)
            self._tell(
                "save.commit",
                info.name,
                save.step,
                seconds=seconds,
                nbytes=info.written_nbytes,
                total_nbytes=info.nbytes,
                data={**save.cost, **info.metrics},
            )
            if self._leads:
                self._note_cost(save, info, seconds)
                self.pruning.saved = info.name
                if not self._hurry():
                    self._clean_up()
        except Exception as error:
            ours = isinstance(error, CheckpointError)
            log.error("cleaning up after %s failed: %s", name, error, exc_info=not ours)
            reason = f"cleaning up after {name} failed, so the disk fills"
            data = {"alarm": "cleanup", "reason": reason}
            self._tell("alarm", name, save.step, error=error, data=data)
        finally:
            save.after.set_result(None)

    def _note_cost(self, save: Started, info: CheckpointInfo, seconds: float) -> None:
        """Keep it with the checkpoint, for whoever looks at the store later."""
        cost = {
            **save.cost,
            "durable_s": seconds,
            "written_nbytes": info.written_nbytes,
        }
        try:
            note = {SAVE_COST: cost}
            annotate_newest(self._store.backend, info.name, metrics={}, metadata=note)
        except CheckpointError as error:
            log.warning("what the save of %s cost is not noted: %s", info.name, error)

    def _failed(self, save: Started, error: BaseException, *, quiet: bool) -> None:
        self._tell("save.error", save.future.name, save.step, error=error)
        if quiet:
            save.future.exception()
            log.error("the save of %s failed: %s", save.future.name, error)
        self.failed(error)

    def unknown(self, name: str, step: int, error: BaseException) -> None:
        """The store does not answer, and nobody knows whether the checkpoint was committed."""
        reason = f"whether {name} was committed is not known: the store does not answer"
        self._tell("alarm", name, step, error=error, data={"alarm": "unknown", "reason": reason})
        log.warning("alarm: %s", reason)

    def waits(self, save: Started, waited_s: float) -> None:
        """The loop stands still: the next save, or the end of the run, waits for this one."""
        name = save.future.name
        what = "what follows it" if save.future.done() else "it"
        reason = f"the loop waits for {name} for {waited_s:g} s by now: {what} is not done"
        log.warning("alarm: %s", reason)
        data = {"alarm": "stall", "reason": reason, "limit_s": waited_s}
        self._tell("alarm", name, save.step, data=data)

    def failed(self, error: BaseException) -> None:
        """A save failed: where the disk was full, the next one is to find room."""
        if isinstance(error, StorageError) and error.reason == "no-space":
            self.make_room()

    def make_room(self) -> bool:
        """The disk is full: what is deleted already gives its space back at once, for a save needs it.
        Whether there was any."""
        if not self._leads:
            return False
        try:
            report = self._store.gc(grace_s=0)
        except CheckpointError as error:
            log.error("no room could be made in %s: %s", self._store.url, error)
            return False
        if not (report.deleted or report.abandoned):
            return False
        reason = f"the disk was full, and {report.freed_nbytes:,} bytes of what is deleted already"
        data = {"alarm": "full", "reason": f"{reason} had to go before their time"}
        self._tell("alarm", data=data)
        return True

    def _clean_up(self) -> None:
        decisions = self.pruning.carry_out() if self._policy is not None else []
        gone = [decision for decision in decisions if not decision.kept]
        if gone:
            kept = {d.name: d.reason for d in decisions if d.kept and not d.quarantined}
            self._tell("retention", data={"deleted": len(gone), "kept": kept})
        if gone or not self._collected:
            self._collected = True  # the first time too: for what a run that was killed left behind
            self._store.gc()

    def _deleted(self, decision: Decision) -> None:
        data = {"reason": decision.reason}
        if decision.quarantined:
            data["fate"] = "set aside before"
        self._tell("delete", decision.name, decision.step, data=data)

    def _unverified(self, info: CheckpointInfo, error: Exception) -> None:
        data = {"alarm": "damaged", "reason": "the newest checkpoint does not verify"}
        self._tell("alarm", info.name, info.step, error=error, data=data)
        log.error("%s", error)
