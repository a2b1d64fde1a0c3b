"""Restoring the newest checkpoint that is good: what is damaged, rejected or led to bad resumes is
passed over, with its reason; nothing is moved by looking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptfmt.engine import Checkpoint, Store
from ckptfmt.errors import CheckpointError, FormatError, NotFoundError, StorageError
from ckptfmt.format import step_name, step_of
from ckptfmt.manager.aftermath import log
from ckptfmt.manager.guard import BAD_RESUMES_MAX
from ckptfmt.reports import Rejected
from ckptfmt.types import CheckpointInfo

Validator = Callable[[Mapping[str, Any], CheckpointInfo], None]
T = TypeVar("T")

BAD_RESUMES = "ckptfmt.bad_resumes"
"""Metadata, as a note: how many resumes from this checkpoint in a row went wrong."""
ATTEMPTS_MAX = 10
"""How many checkpoints are tried: where so many are bad, the trouble is elsewhere."""


@dataclass(slots=True)
class Healing:
    """One search for a good checkpoint.

    Attributes:
        validate: Called with the staged arrays by leaf name, before any target changes.
        note: Told each checkpoint passed over, with the error where there was one.
        mirror: Where a good copy may be of what is damaged here, or a newer one.
        rejected: Those passed over, newest first.
        generations: Name -> which generation of it was passed over, of those that could be opened.
    """

    store: Store
    validate: Sequence[Validator]
    note: Callable[[Rejected, BaseException | None], None]
    mirror: Store | None = None
    rejected: list[Rejected] = field(default_factory=list)
    generations: dict[str, int] = field(default_factory=dict)
    _refusal: Exception | None = None

    def check(self, info: CheckpointInfo) -> Callable[[Mapping[str, Any]], None] | None:
        """What the engine is to call with the staged arrays."""
        if not self.validate:
            return None

        def call(arrays: Mapping[str, Any]) -> None:
            for validator in self.validate:
                try:
                    validator(arrays, info)
                except Exception as error:
                    self._refusal = error
                    raise

        return call

    def newest(self, attempt: Callable[[Checkpoint], T]) -> T | None:
        """The outcome of the first attempt that succeeds; None where there is no checkpoint.

        Raises:
            The last error, where there are checkpoints and none is good.
        """
        last: Exception | None = None
        tried: set[tuple[bool, str]] = set()
        while len(self.rejected) < ATTEMPTS_MAX:
            # Listed anew each time: others commit and delete while we look.
            rows = [
                row for row in self._candidates() if (row[0] is self.mirror, row[1]) not in tried
            ]
            if not rows:
                break
            store, name = rows[0]
            tried.add((store is self.mirror, name))
            self._refusal = None
            try:
                with store.open(name) as checkpoint:
                    if store is self.store:
                        self.generations[name] = checkpoint.info.generation
                    bad = checkpoint.info.metadata.get(BAD_RESUMES, 0)
                    if isinstance(bad, int) and bad >= BAD_RESUMES_MAX:
                        self._reject(name, f"{bad} resumes from it in a row went wrong", None)
                        continue
                    made = attempt(checkpoint)
                if store is self.mirror:
                    self._heal(name)
                return made
            except (FormatError, NotFoundError, StorageError) as error:
                if isinstance(error, StorageError) and error.retryable:
                    raise  # the medium, not the checkpoint: an older one would be a silent loss
                last = error
                if isinstance(error, NotFoundError) and name not in store.names():
                    continue  # deleted by somebody since the listing: nothing is wrong with it
                self._reject(name, str(error), error)
            except Exception as error:
                if self._refusal is None or error is not self._refusal:
                    raise
                last = error
                self._reject(name, f"a validator says: {error}", error)
        if last is not None:
            raise last
        if self.rejected:
            raise NotFoundError(
                "no good checkpoint is left",
                reason="good",
                where=self.store.url,
                found="; ".join(f"{bad.checkpoint}: {bad.reason}" for bad in self.rejected[:3]),
                do="look at what the training does after a resume, or choose one with at=",
            )
        return None

    def _reject(self, name: str, reason: str, error: Exception | None) -> None:
        rejected = Rejected(name, reason)
        self.rejected.append(rejected)
        self.note(rejected, error)

    def _candidates(self) -> list[tuple[Store, str]]:
        """Newest first; of one name the copy here before the mirror's."""
        here = _newest_first(self.store)
        there = _newest_first(self.mirror) if self.mirror is not None else []
        rows = [(self.store, name) for name in here]
        if self.mirror is not None:
            rows += [(self.mirror, name) for name in there]
        order = {name: n for n, name in enumerate(sorted({*here, *there}, key=_by_step))}
        return sorted(rows, key=lambda row: (order[row[1]], row[0] is self.mirror))

    def _heal(self, name: str) -> None:
        """The mirror's copy was good: what is damaged here is fetched from it."""
        if self.mirror is None or name not in self.store.names():
            return
        try:
            if not self.store.verify(name).ok:  # which marks the files that are damaged
                self.store.pull(self.mirror, name)
        except CheckpointError as error:
            log.warning("%s could not be healed from the mirror: %s", name, error)


def _by_step(name: str) -> tuple[bool, int]:
    step = step_of(name)
    return (step is None, -(step or 0))


def _newest_first(store: Store) -> list[str]:
    steps = [str(step_name(step)) for step in reversed(store.steps())]
    return steps + [name for name in store.names() if name == "main"]
