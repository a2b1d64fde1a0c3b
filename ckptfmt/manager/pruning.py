"""Carrying out what `keep` decides: delete behind a newer checkpoint that was read whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field

from ckptfmt import __version__
from ckptfmt.engine import Store, list_indexes, read_tags
from ckptfmt.errors import CorruptError, NotFoundError, StorageError, UsageError
from ckptfmt.events import Event
from ckptfmt.manager.keep import Decision, Keep, decide, decide_aside, decides_aside
from ckptfmt.types import CheckpointInfo

MARK = "manager"
"""In `CheckpointInfo.writer`: a manager wrote it, and may delete it."""
WRITER = f"ckptfmt {__version__} {MARK}"


@dataclass(slots=True)
class Pruning:
    """What was verified when, by (name, digest), and what follows for the old ones.

    Attributes:
        deleted: Told of each checkpoint that was deleted, and why.
        damaged: Told of a newer one that did not verify: nothing is deleted behind it.
        hurry: Whether there is no time to verify: then nothing is deleted either.
        saved: The name of what was saved last.
    """

    store: Store
    policy: Keep | None
    verify_within_s: float
    deleted: Callable[[Decision], None]
    damaged: Callable[[CheckpointInfo, CorruptError], None]
    hurry: Callable[[], bool] = lambda: False
    saved: str = ""
    _verified_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _unsure: list[Decision] = field(default_factory=list)

    def was_read(self, info: CheckpointInfo) -> None:
        """Every byte of it was read and checked just now."""
        self._verified_s[info.name, info.digest] = time.monotonic()

    def decide(self) -> list[Decision]:
        """Of all that are there now; changes nothing and reads no data."""
        found = self.store.checkpoints()
        there = {(info.name, info.digest) for info in found}
        self._verified_s = {row: at for row, at in self._verified_s.items() if row in there}
        made = decide(
            found,
            self.policy,
            tags=self.store.tags(),
            verified=self._is_verified,
            ours=is_ours,
            saved=self.saved,
        )
        return made + self._decide_aside(found) if decides_aside(self.policy) else made

    def _decide_aside(self, found: Sequence[CheckpointInfo]) -> list[Decision]:
        aside: dict[str, CheckpointInfo | None] = dict.fromkeys(
            list_indexes(self.store.backend, "quarantine/")
        )
        for info in self.store.checkpoints(quarantined=True):
            aside[info.name] = info  # of one name the highest generation comes last
        good = [info.name for info in found if self._is_verified(info)]
        return decide_aside(
            aside,
            self.policy,
            tagged={(tag.name, tag.digest) for tag in read_tags(self.store.backend).values()},
            good=good[-1] if good else "",
            ours=is_ours,
            now_s=time.time(),
        )

    def _is_verified(self, info: CheckpointInfo) -> bool:
        read_s = self._verified_s.get((info.name, info.digest))
        return read_s is not None and time.monotonic() - read_s <= self.verify_within_s

    def carry_out(self) -> list[Decision]:
        """Verify the newest if old ones wait for that, then delete what no rule keeps."""
        self._find_out()
        decisions = self.decide()
        if any(decision.waits for decision in decisions) and self._verify_newest():
            decisions = self.decide()
        for decision in decisions:
            if not decision.kept:
                try:
                    self.store.delete(decision.name, quarantined=decision.quarantined)
                except (NotFoundError, UsageError):
                    continue  # deleted, or tagged, by somebody else meanwhile
                except StorageError:
                    self._unsure.append(decision)
                    with suppress(StorageError):
                        self._find_out()
                    raise
                self.deleted(decision)
        return decisions

    def _find_out(self) -> None:
        """A deletion that the store answered by an error may have taken effect: then it is told."""
        while self._unsure:
            decision = self._unsure[0]
            folder = "quarantine/" if decision.quarantined else "checkpoints/"
            if decision.name not in list_indexes(self.store.backend, folder):
                self.deleted(decision)
            self._unsure.pop(0)

    def _verify_newest(self) -> bool:
        info = self.store.latest()
        if info is None:
            return False

        def look(_: Event) -> None:
            if self.hurry():
                raise CancelledError

        try:
            report = self.store.verify(info.name, progress=look)
        except CancelledError:
            return False
        if report.ok:
            self.was_read(info)
            return True
        damage = report.problems[0]
        self.damaged(
            info,
            CorruptError(
                "the newest checkpoint is damaged: no older one is deleted",
                reason="unverified",
                where=info.name,
                found=f"{damage.file}: {damage.reason}",
                do="the next save writes the damaged data anew; see ckptfmt verify",
            ),
        )
        return False


def is_ours(info: CheckpointInfo) -> bool:
    """Whether a manager wrote it."""
    return info.writer.endswith(MARK)
