"""Manager: when to save, what to keep, how to go on after a crash: `when`, `keep`, `guard` say so."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, TypeVar

from ckptfmt.engine import (
    Checkpoint,
    RestoreRequest,
    SaveFuture,
    SaveOptions,
    SaveRequest,
    Store,
    check_metadata,
    check_metrics,
    load_like,
    load_tree,
    named_leaves,
    not_traced,
    parse_where,
    ready_staging,
    restore_tree,
    save_in_background,
    save_in_group,
    save_tree,
    settle,
    source_of,
    whole_number,
)
from ckptfmt.errors import CheckpointError, NotFoundError, UsageError, warn
from ckptfmt.events import Event
from ckptfmt.format import parse_codec, step_name
from ckptfmt.manager.abandoned import Abandoned
from ckptfmt.manager.aftermath import FIND_OUT_S, Aftermath, log, several, teller
from ckptfmt.manager.alarm import Alarm
from ckptfmt.manager.flight import Flight, Started
from ckptfmt.manager.guard import LossGuard, Verdict
from ckptfmt.manager.healing import Healing, Loaded, Validator
from ckptfmt.manager.keep import Decision, Keep, best_of, keep_of
from ckptfmt.manager.mirror import Mirror, Mirroring, annotate_either, as_mirror
from ckptfmt.manager.pace import Pace, job_of_environment
from ckptfmt.manager.preemption import Preemption
from ckptfmt.manager.pruning import WRITER
from ckptfmt.manager.steps import Steps, leave, settle_quietly, spare_s
from ckptfmt.manager.together import TIMEOUT_S, together_of
from ckptfmt.manager.watching import Watching
from ckptfmt.manager.when import When, when_of
from ckptfmt.reports import Rejected, RestoreReport
from ckptfmt.types import At, CheckpointInfo, Group, Plain, Select, StrPath

T = TypeVar("T")
_NOTHING: Mapping[str, Any] = {}


class Manager:
    """Saves when it is time, keeps what is worth keeping, and restores the newest good checkpoint.

    A context manager: leaving waits for the save in flight; an error of the body wins and carries a
    save's error as a note.

    Args:
        store: A directory, a URL or a Store.
        keep: What to keep: a policy of `ckptfmt.keep`; 3 is `keep.last(3)`; None keeps all.
        save_when: When a save is due: a policy of `ckptfmt.when`; 500 is `when.every(steps=500)`;
            None: at every call of `save`.
        asynchronous: Save in the background; the caller waits only until the state is staged.
        when_busy: A save that is due while one is in flight waits for it, or is skipped.
        hooks: Called with every Event; one that raises is logged and costs nothing.
        validate: Functions of (staged arrays by leaf name, CheckpointInfo) that raise to reject a
            checkpoint, before any target changes.
        mirror: A second store that every checkpoint is copied to in the background; `restore` looks
            there too.
        guard: Watches the loss that `observe` is told.
        preemption: Takes the signals that say the job must go.
        on_error: "continue": a failed save is an event and a logged error, training goes on.
        verify_within_s: An older checkpoint is deleted only behind a newer one of which every byte
            was read so long ago at most, in seconds.
        codec: As in `save`.
        alarm: When a stall, slow or failing saves are an event `alarm`; None: `Alarm()`.
        group: The ranks that save and restore together; each has a manager with equal arguments, and
            all call alike. Rank 0 decides when a save is due, what to restore and what the guard
            says, retains and mirrors; a signal to one of them is acted on by all, at a step's end.
    Raises:
        UsageError: A policy makes no sense.
    """

    store: Store

    def __init__(
        self,
        store: StrPath | Store,
        *,
        keep: Keep | int | None = None,
        save_when: When | int | None = None,
        asynchronous: bool = True,
        when_busy: Literal["wait", "skip"] = "wait",
        hooks: Sequence[Callable[[Event], None]] = (),
        validate: Sequence[Validator] = (),
        mirror: StrPath | Store | Mirror | None = None,
        guard: LossGuard | None = None,
        preemption: Preemption | None = None,
        on_error: Literal["raise", "continue"] = "raise",
        verify_within_s: float = 86400.0,
        codec: str | Mapping[str, str] = "raw",
        alarm: Alarm | None = None,
        group: Group = None,
    ) -> None:
        self.store, at = parse_where(store)
        if at is not None:
            raise _wrong("a store, not one checkpoint of it", f"@{at}")
        if when_busy not in ("wait", "skip"):
            raise _wrong('when_busy "wait" or "skip"', repr(when_busy))
        if on_error not in ("raise", "continue"):
            raise _wrong('on_error "raise" or "continue"', repr(on_error))
        for text in [codec] if isinstance(codec, str) else codec.values():
            parse_codec(text)  # refused now, not at the first save
        if not isinstance(preemption, Preemption | None):
            raise _wrong('preemption=Preemption(signals=("SIGTERM",))', repr(preemption))
        self._keep = keep_of(keep)
        self._pace = Pace(when_of(save_when), job_of_environment(), time.monotonic())
        self._asynchronous, self._when_busy, self._preemption = asynchronous, when_busy, preemption
        self._tell, self._validate = teller(hooks, alarm or Alarm()), several(validate, "validate")
        self._together = together_of(self.store, group, self._tell)
        self._leads = leads = self._together is None or self._together.leads
        second = as_mirror(mirror)
        self._mirror = parse_where(second.url)[0] if second else None
        self._mirroring = Mirroring(self.store, second, self._tell) if second and leads else None
        noted = self._mirroring.noted if self._mirroring is not None else None
        watched = guard if leads else None
        self._watching = Watching(self.store, watched, self._tell, mirror=self._mirror, noted=noted)
        asks = guard is not None or preemption is not None
        self._steps = Steps(self._pace, self._watching, preemption, self._together, asks=asks)
        self._on_error, self._options = on_error, SaveOptions(codec=codec)
        self._aftermath = Aftermath(
            self.store,
            self._keep,
            verify_within_s,
            self._pace,
            self._tell,
            leads=leads,
            hurry=lambda: preemption is not None and preemption.requested,
        )
        self._flight = Flight(self._aftermath.waits, alarm)
        self._abandoned = Abandoned(self.store, self._mirror)
        if self._mirroring is not None:
            self._mirroring.wake()  # what an earlier run left to do
        if preemption is not None:
            preemption.install()

    # -- going on ---------------------------------------------------------------------------------

    @not_traced
    def restore(
        self,
        target: object,
        *,
        at: At | None = None,
        required: bool = False,
        rename: Mapping[str, str] | Callable[[str], str] = _NOTHING,
        strict: bool = True,
        allow_missing: Select = (),
        allow_unexpected: Select = (),
        allow_cast: bool | Select = False,
        atomic: bool = True,
    ) -> RestoreReport:
        """Fill a target from the newest good checkpoint.

        A damaged one, one that a validator rejects, and one from which three resumes in a row went
        wrong are passed over and listed in `report.rejected`; the next save sets them aside.

        Args:
            at: That one, a step, a name or a tag, and no other; of the mirror where it is not here,
                or damaged.
            required: An empty store is a NotFoundError; else a report that is false, with step 0.
            rename, strict, allow_missing, allow_unexpected, allow_cast, atomic: As in `restore`.
        Raises:
            MismatchError: Target and checkpoint disagree: an older one would, too.
            CorruptError, or what the validator raised: there are checkpoints, and none is good.
        """
        healing = self._healing(at)

        def attempt(checkpoint: Checkpoint) -> RestoreReport:
            request = RestoreRequest(
                rename=rename,
                strict=strict,
                allow_missing=allow_missing,
                allow_unexpected=allow_unexpected,
                allow_cast=allow_cast,
                atomic=atomic,
                validate=healing.check(checkpoint.info),
            )
            if self._together is not None:
                return self._together.restore(target, checkpoint, request)
            return restore_tree(target, source_of(checkpoint), request)

        report = self._search(healing, attempt)
        if report is not None and report.info is not None:
            if not report.unexpected:
                self._was_read(report.info)
            if self._asynchronous and not (report.missing or report.unexpected):
                ready_staging(report.info.nbytes, report.info.tensors)
            return replace(report, rejected=healing.rejected)
        if required:
            raise NotFoundError(
                "there is no checkpoint to restore",
                reason="required",
                where=self.store.url,
                do="save one first, or leave out required=True to begin anew",
            )
        self._pace.restored(0, time.monotonic())
        return RestoreReport(None, 0)

    @not_traced
    def load(self, *, like: T | None = None, at: At | None = None) -> Loaded | None:
        """The tree of the newest good checkpoint, for state that is replaced whole; None where the
        store is empty.

        Args:
            like: As in `ckptfmt.load`; None: NumPy arrays.
            at: As in `restore`.
        """
        healing = self._healing(at)

        def attempt(checkpoint: Checkpoint) -> Loaded:
            info, check = checkpoint.info, healing.check(checkpoint.info)
            tree = load_tree(checkpoint)
            if check is not None:
                check(named_leaves(tree))
            made = tree if like is None else load_like(like, tree, RestoreRequest())
            return Loaded(made, info, RestoreReport(info, info.step or 0, checkpoint.names()))

        found = self._search(healing, lambda c: self._each(lambda: attempt(c)))
        if found is None:
            return None
        self._was_read(found.info)
        return replace(found, report=replace(found.report, rejected=healing.rejected))

    def _each(self, do: Callable[[], T]) -> T:
        """Do it; in a group all ranks do, and raise if one could not."""
        return do() if self._together is None else self._together.each(do)

    def _healing(self, at: At | None) -> Healing:
        return Healing(
            self.store, self._validate, self._rejected, self._mirror, at, together=self._together
        )

    def _search(self, healing: Healing, attempt: Callable[[Checkpoint], T]) -> T | None:
        """An attempt at the checkpoint asked for, or at one after another until one is good."""
        self._each(self.wait)
        started_s = time.monotonic()
        self._tell("restore.start")
        self._abandoned.look()
        chosen: list[CheckpointInfo] = []

        def noted(checkpoint: Checkpoint) -> T:
            made = attempt(checkpoint)
            chosen.append(checkpoint.info)
            return made

        made = healing.good(noted)
        if not chosen:
            return None
        info = chosen[0]
        self._abandoned.leave(info, healing)
        self._pace.restored(info.step or 0, time.monotonic())
        self._watching.resumed(info)
        self._tell("restore.done", info.name, info.step, seconds=time.monotonic() - started_s)
        return made

    def _was_read(self, info: CheckpointInfo) -> None:
        """All of it, so that it is verified; but a rank reads its part, and the mirror's is another."""
        if self._together is None and info.url == self.store.url:
            self._aftermath.pruning.was_read(info)

    def _rejected(self, one: Rejected, error: BaseException | None) -> None:
        self._tell("restore.rejected", one.checkpoint, error=error, data={"reason": one.reason})
        warn(f"{one.checkpoint} is passed over: {one.reason}")

    # -- saving -----------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether a save is due at this step; `save` at the same step agrees."""
        return self._steps.is_due(_step(step))

    @not_traced
    def save(
        self,
        tree: object,
        *,
        step: int,
        metrics: Mapping[str, float] = _NOTHING,
        metadata: Mapping[str, Plain] = _NOTHING,
        force: bool = False,
    ) -> SaveFuture | None:
        """Save if it is time; None if it is not: then nothing was looked at.

        Args:
            tree: As in `ckptfmt.save`.
            step: How many steps are finished.
            metrics: Numbers, or tensors of no axes, which become numbers only if a save is due.
            metadata: The caller's.
            force: Save in any case.
        Raises:
            What `ckptfmt.save` raises, of this save or of one before that failed in the background,
            unless `on_error="continue"`.
            SystemExit: The job is preempted, has an exit code, and the checkpoint is durable.
        """
        step = _step(step)
        due, stopping = self._steps.is_due(step), self._steps.stopping()
        if not (due or force or stopping):
            return None
        must = force or stopping is not None
        if self._when_busy == "skip" and not must and self._is_busy():
            self._tell("save.skipped", step_name(step), step)
            return None
        if stopping is not None:
            settle_quietly(self._settle)
        future = self._save(tree, step, metrics, metadata)
        if stopping is not None:
            leave(stopping, future, step, self._tell)
        return future

    def _is_busy(self) -> bool:
        busy = self._flight.is_busy
        return busy() if self._together is None else bool(self._together.lead(busy))

    def _save(
        self,
        tree: object,
        step: int,
        metrics: Mapping[str, float],
        metadata: Mapping[str, Plain],
    ) -> SaveFuture | None:
        name, backend = str(step_name(step)), self.store.backend
        together, started_s = self._together, time.monotonic()
        with nullcontext() if together is None else together.telling():
            request = SaveRequest(
                name=name,
                step=step,
                metadata={**check_metadata(metadata), **self._watching.metadata()},
                metrics=check_metrics(metrics),
                if_exists="error",
                options=self._options,
                writer=WRITER,
                ranks=None if together is None else together.ranks,
                make_room=self._aftermath.make_room,
                timeout_s=FIND_OUT_S if together is None else TIMEOUT_S,
                when_unknown=lambda error: self._aftermath.unknown(name, step, error),
            )
            self._settle()
        try:
            if together is None:
                self._abandoned.set_aside(step, self._mirroring)
            elif together.leads:
                with together.telling():
                    self._abandoned.set_aside(step, self._mirroring)
            began_s = time.monotonic()
            self._tell("save.start", name, step)
            if self._asynchronous:
                future = save_in_background(tree, backend, request)
            else:
                future = SaveFuture(name)
                future.staged = True
                write = save_tree if together is None else save_in_group
                future.set_result(write(tree, backend, request))
        except Exception as error:
            self._tell("save.error", name, step, error=error)
            self._aftermath.failed(error)
            now_s = time.monotonic()
            self._pace.failed(now_s - started_s, now_s)
            if self._on_error == "raise" or isinstance(error, UsageError):
                raise
            log.error("the save of %s failed: %s", name, error)
            return None
        now_s = time.monotonic()
        cost = {"stall_s": now_s - started_s, "stage_s": now_s - began_s}
        self._pace.saved(cost["stall_s"], now_s)
        self._tell(
            "save.staged", name, step, seconds=cost["stall_s"], data={"stage_s": cost["stage_s"]}
        )
        save = Started(step, started_s, cost, future, concurrent.futures.Future())
        self._flight.begin(save)

        def done(_: object) -> None:
            self._aftermath.finished(save, quiet=self._on_error == "continue")
            if self._mirroring is not None:
                self._mirroring.wake(self._aftermath.pruning.saved)

        future.add_done_callback(done)
        return future

    def _settle(self) -> None:
        """The save before is over, and what follows it; its error is raised if nobody has seen it."""
        self._flight.wait()
        settle(self.store.backend)

    # -- watching ---------------------------------------------------------------------------------

    def observe(self, step: int, **metrics: float) -> Verdict:
        """Tell the guard what this step gave, and hear what to do.

        Raises:
            UsageError: The watched metric is no number.
        """
        return self._steps.observe(_step(step), metrics)

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint of the store, or None."""
        return self.store.latest()

    def best(self, metric: str | None = None) -> CheckpointInfo | None:
        """The best checkpoint by a metric; None where none has it.

        Args:
            metric: None: that of the `keep.best` policy.
        Raises:
            UsageError: None is given, and no policy names one.
        """
        return best_of(self.store.checkpoints(), self._keep, metric)

    def annotate(self, step: int, **metrics: float) -> None:
        """Add metrics that come after the commit; waits for it. The mirror's, if it alone has it."""
        self._flight.wait_for_commit(_step(step))
        if not self._leads:
            return
        try:
            annotate_either(self.store, self._mirror, step, metrics)
        except CheckpointError as error:
            if self._on_error == "raise" or isinstance(error, UsageError):
                raise
            log.error("%s is not noted at step %s: %s", ", ".join(metrics), step, error)
        if self._mirroring is not None:
            self._mirroring.noted(str(step_name(step)))

    def prune(self, *, dry_run: bool = False) -> list[Decision]:
        """Delete what no rule keeps; a decision with its reason for each checkpoint, oldest first.

        Args:
            dry_run: Decide, and change nothing.
        """
        self._flight.wait()
        pruning = self._aftermath.pruning
        return pruning.decide() if dry_run or not self._leads else pruning.carry_out()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the save in flight is committed, and what follows it is done.

        Raises:
            StorageError: kind `storage-timeout`: it is not, after `timeout_s`. Else its error.
        """
        self._flight.wait(timeout_s)
        self._settle()

    def close(self) -> None:
        """Wait for the save in flight and the mirror, and put signal handlers back."""
        self._close(None)

    def _close(self, cause: BaseException | None) -> None:
        try:
            self.wait()
        finally:
            if self._together is not None and isinstance(cause, Exception | KeyboardInterrupt):
                self._together.leave(cause)
            if self._mirroring is not None:
                self._mirroring.close(spare_s(self._preemption))
            if self._preemption is not None:
                self._preemption.uninstall()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._close(error)
        except Exception as mine:
            if error is None:
                raise
            error.add_note(f"ckptfmt: besides, a save failed: {mine}")


def _step(step: int) -> int:
    found = whole_number(step)
    if found is None:
        raise _wrong("step= as a whole number", "None")
    return found


def _wrong(expected: str, found: str) -> UsageError:
    return UsageError(
        "this manager cannot be made",
        reason="manager",
        expected=expected,
        found=found,
        do="see help(ckptfmt.Manager)",
    )
