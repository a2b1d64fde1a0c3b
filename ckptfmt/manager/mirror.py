"""Mirror: every checkpoint that a manager commits, copied to a second store in the background."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptfmt.engine import (
    CopyRequest,
    Repeating,
    Store,
    abandon_strangers,
    copy_checkpoints,
    list_checkpoints,
    list_indexes,
    newest_readable,
    parse_where,
)
from ckptfmt.errors import CheckpointError, FormatError, NotFoundError, UsageError
from ckptfmt.manager.aftermath import Tell, log
from ckptfmt.manager.keep import Decision, Keep, decide, keep_of
from ckptfmt.manager.pruning import Pruning, is_ours
from ckptfmt.types import CheckpointInfo, StrPath

BACKOFF_MAX_S = 60.0
CLOSE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Mirror:
    """A second store that gets what the first one has.

    Attributes:
        url: Where it is.
        keep: What it keeps, as `Manager(keep=)`; None: all.
        bytes_per_s: Not faster than that; None: as fast as it goes.
    """

    url: StrPath | Store
    keep: Keep | int | None = None
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        rate = self.bytes_per_s
        keep_of(self.keep)  # refused here, not when the first copy is through
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate < math.inf):
            raise UsageError(
                "no mirror can be that fast",
                reason="mirror",
                expected="bytes_per_s above 0",
                found=repr(rate),
                do="leave it out for no limit",
            )


class Mirroring:
    """Copies in a thread of its own, one checkpoint after another, oldest first; what fails is tried
    again, later and later."""

    def __init__(self, store: Store, mirror: Mirror, tell: Tell) -> None:
        self._source, self._tell = store, tell
        self.store = parse_where(mirror.url)[0]
        if self.store.url == store.url:
            raise UsageError(
                "a store is not its own mirror",
                reason="mirror",
                where=store.url,
                do="give another directory or URL, or leave mirror= out",
            )
        self._request = CopyRequest(replace=True, bytes_per_s=mirror.bytes_per_s)
        policy = keep_of(mirror.keep)
        self._policy = policy
        self._pruning = Pruning(self.store, policy, math.inf, self._deleted, self._unverified)
        self._done: set[tuple[str, str]] = set()
        self._aside: list[tuple[str, str]] = []
        self._noted: list[str] = []
        self._begun = False
        self._pid = os.getpid()
        self._failures = 0
        self._repeating = Repeating(self._work, "ckptfmt-mirror")

    def wake(self, saved: str = "") -> None:
        """Something may be new in the first store.

        Args:
            saved: What this run has saved there last.
        """
        self._pruning.saved = saved or self._pruning.saved
        self._pid = os.getpid()
        self._repeating.wake()

    def set_aside(self, name: str, reason: str) -> None:
        """What is quarantined in the first store is no line of the mirror's either."""
        self._aside.append((name, reason))

    def noted(self, name: str) -> None:
        """Something was noted at a checkpoint of the first store: metrics that came later."""
        self._noted.append(name)
        self.wake()

    def _work(self) -> float | None:
        """One round; gives the seconds until the next try, or None if all is there."""
        pending: list[CheckpointInfo] = []
        try:
            self._set_aside()
            while self._noted:
                self._forget(self._noted.pop(0))  # notes go over with the checkpoint
            found = self._source.checkpoints()
            self._done &= {(info.name, info.digest) for info in found}
            pending = self._wanted([i for i in found if (i.name, i.digest) not in self._done])
            while pending:
                self._copy(pending[0], len(pending) - 1)
                pending.pop(0)
            self._failures = 0
            return None
        except Exception as error:
            self._failures += 1
            pause_s = min(BACKOFF_MAX_S, 2.0 ** (self._failures - 1))
            log.warning("the mirror %s is behind: %s", self.store.url, error)
            self._tell(
                "mirror.lag",
                pending[-1].name if pending else None,
                pending[-1].step if pending else None,
                error=error,
                data={"pending": len(pending), "retry_s": pause_s, "failures": self._failures},
            )
            # Whoever leaves waits for what goes well, not for a store that does not answer.
            return None if self._repeating.closing else pause_s

    def _wanted(self, pending: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Those that the mirror would not delete again at once."""
        if self._policy is None or not pending:
            return list(pending)
        found = {info.name: info for info in [*self.store.checkpoints(), *pending]}
        tags = self.store.tags()
        decisions = decide(
            list(found.values()),
            self._policy,
            tags=tags,
            verified=lambda _: True,
            ours=is_ours,
            saved=self._pruning.saved,
        )
        kept = {decision.name for decision in decisions if decision.kept}
        return [info for info in pending if info.name in kept]

    def _set_aside(self) -> None:
        if not self._begun:  # what a run that was killed has set aside there alone
            aside = list_indexes(self._source.backend, "quarantine/").keys()
            there = aside & list_checkpoints(self.store.backend).keys() if aside else ()
            self._aside += [(name, "set aside in the first store") for name in there]
            self._begun = True
        while self._aside:
            name, reason = self._aside[0]
            abandon_strangers(self.store.backend, name, self._source.backend, reason)
            self._forget(name)
            self._aside.pop(0)

    def _forget(self, name: str) -> None:
        self._done = {row for row in self._done if row[0] != name}

    def _copy(self, info: CheckpointInfo, behind: int) -> None:
        """One checkpoint, with so many others still to come."""
        started_s = time.monotonic()
        key = (info.name, info.digest)
        try:
            backend = self._source.backend
            found = newest_readable(backend, list_checkpoints(backend).get(info.name, []))
            chosen = [] if found is None else [found[0]]  # deleted since the listing
            report = copy_checkpoints(backend, self.store.backend, chosen, self._request)
        except NotFoundError:
            self._done.add(key)  # deleted under our hands
            return
        except FormatError as error:
            # It is damaged here: trying again does not help, and the others can go over, one of them
            # that would not have been kept behind it, too.
            self._done.add(key)
            self._repeating.wake()
            self._tell("mirror.lag", info.name, info.step, error=error, data={"pending": 0})
            return
        self._done.add(key)
        if report.copied:
            with self.store.open(info.name) as there:
                self._pruning.was_read(there.info)  # every byte of it was checked on the way
            self._tell(
                "mirror.done",
                info.name,
                info.step,
                seconds=time.monotonic() - started_s,
                nbytes=report.nbytes,
                data={"pending": behind, "lag_s": time.time() - info.created.timestamp()},
            )
        if self._policy is not None and any(not d.kept for d in self._pruning.carry_out()):
            self.store.gc()

    def _deleted(self, decision: Decision) -> None:
        data = {"reason": decision.reason, "url": self.store.url}
        self._tell("delete", decision.name, decision.step, data=data)

    def _unverified(self, info: CheckpointInfo, error: CheckpointError) -> None:
        self._tell("mirror.lag", info.name, info.step, error=error, data={"pending": 0})

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until the mirror has all, or does not answer; not longer than `timeout_s`. A forked
        process that has saved nothing leaves the mirror to its parent."""
        if self._pid != os.getpid():
            return
        self._repeating.wake()
        limit_s = CLOSE_TIMEOUT_S if timeout_s is None else min(CLOSE_TIMEOUT_S, timeout_s)
        if not self._repeating.close(limit_s):
            log.warning("left before the mirror %s had everything", self.store.url)


def as_mirror(value: StrPath | Store | Mirror | None) -> Mirror | None:
    return value if isinstance(value, Mirror) or value is None else Mirror(value)


def annotate_either(
    store: Store, mirror: Store | None, step: int, metrics: Mapping[str, float]
) -> None:
    """In the first store, or in the mirror where that alone has the step still.

    Raises:
        NotFoundError: Neither has it.
    """
    try:
        store.annotate(step, metrics=metrics)
    except NotFoundError:
        if mirror is None or step not in mirror.steps():
            raise
        mirror.annotate(step, metrics=metrics)
