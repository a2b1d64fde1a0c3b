"""Restoring the newest checkpoint that is good, or the one asked for, of the store or of its mirror:
what is damaged, rejected or led to bad resumes is passed over, with its reason; nothing is moved by
looking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptfmt.engine import Checkpoint, Store, list_indexes, read_tags, whole_number
from ckptfmt.errors import CheckpointError, FormatError, NotFoundError, StorageError
from ckptfmt.format import step_name, step_of
from ckptfmt.manager.aftermath import log
from ckptfmt.manager.guard import BAD_RESUMES_MAX
from ckptfmt.manager.together import Together
from ckptfmt.reports import Rejected, RestoreReport
from ckptfmt.types import At, CheckpointInfo

Validator = Callable[[Mapping[str, Any], CheckpointInfo], None]
T = TypeVar("T")

BAD_RESUMES = "ckptfmt.bad_resumes"
"""Metadata, as a note: how many resumes from this checkpoint in a row went wrong."""
ATTEMPTS_MAX = 10
"""How many checkpoints are tried: where so many are bad, the trouble is elsewhere."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `Manager.load` gives: the tree, the checkpoint, and a report of what was passed over."""

    tree: Any
    info: CheckpointInfo
    report: RestoreReport


@dataclass(slots=True)
class Healing:
    """One search for a good checkpoint.

    Attributes:
        validate: Called with the staged arrays by leaf name, before any target changes.
        note: Told each checkpoint passed over, with the error where there was one.
        mirror: Where a good copy may be of what is damaged here, or a newer one.
        at: That one, and no other; None: the newest that is good.
        together: The managers of a group: rank 0 chooses, and what one passes over, all do.
        rejected: Those passed over, newest first.
        generations: Name -> which generation of it was passed over, of those that could be opened.
    """

    store: Store
    validate: Sequence[Validator]
    note: Callable[[Rejected, BaseException | None], None]
    mirror: Store | None = None
    at: At | None = None
    together: Together | None = None
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

    def good(self, attempt: Callable[[Checkpoint], T]) -> T | None:
        """The outcome of the first attempt that succeeds; None where there is no checkpoint.

        Raises:
            The last error, where there are checkpoints and none is good.
            NotFoundError: The one asked for is nowhere.
        """
        last: Exception | None = None
        tried: set[tuple[bool, str]] = set()
        while len(self.rejected) < ATTEMPTS_MAX:
            row = self._next(tried)
            if row is None:
                break
            store, name = row
            tried.add((store is self.mirror, name))
            self._refusal = None
            try:
                with self._open(store, name) as checkpoint:
                    if store is self.store:
                        self.generations[name] = checkpoint.info.generation
                    bad = self._bad_resumes(checkpoint) if self.at is None else 0
                    if bad >= BAD_RESUMES_MAX:
                        tried.add((True, name))  # the mirror's copy is no better
                        self._reject(name, f"{bad} resumes from it in a row went wrong", None)
                        continue
                    made = attempt(checkpoint)
            except Exception as error:
                reason = self._reason(error, store, name)
                if self.together is not None:
                    reason = self.together.judge(error, reason)
                if reason is None or (self.at is not None and self.mirror is None):
                    raise
                last = error
                if error is self._refusal:
                    tried.add((True, name))
                if reason:
                    self._reject(name, reason, error)
                continue
            if store is self.mirror and (self.together is None or self.together.leads):
                self._heal(name)
            return made
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
        if self.at is not None:
            at = self.at
            self._each(lambda: self.store.open(at).close())  # which says what there is instead
        return None

    def _next(self, tried: set[tuple[bool, str]]) -> tuple[Store, str] | None:
        """The newest that was not tried yet; in a group that of rank 0."""

        def look() -> list[Any]:
            # Listed anew each time: others commit and delete while we look.
            found = self._candidates() if self.at is None else self._copies(self.at)
            rows = ((store is self.mirror, name) for store, name in found)
            return next(([*row] for row in rows if row not in tried), [])

        found = look() if self.together is None else self.together.lead(look)
        if not found:
            return None
        store = self.mirror if found[0] else self.store
        assert store is not None
        return store, found[1]

    def _open(self, store: Store, name: str) -> Checkpoint:
        return self._each(lambda: store.open(name))

    def _each(self, do: Callable[[], T]) -> T:
        return do() if self.together is None else self.together.each(do)

    def _bad_resumes(self, checkpoint: Checkpoint) -> int:
        count = bad_resumes(checkpoint.info)
        return count if self.together is None else int(self.together.lead(lambda: count))

    def _reason(self, error: Exception, store: Store, name: str) -> str | None:
        """Why a checkpoint is passed over after an attempt; "" where somebody deleted it since the
        listing, and nothing is wrong with it; None: it is not, and the error is raised."""
        if isinstance(error, FormatError | NotFoundError | StorageError):
            passing = isinstance(error, StorageError) and error.retryable
            if passing or error.reason == "access-denied":
                return None  # not the checkpoint's fault: an older one would be a silent loss
            gone = isinstance(error, NotFoundError) and name not in store.names()
            return "" if gone else str(error)
        return f"a validator says: {error}" if error is self._refusal else None

    def _reject(self, name: str, reason: str, error: Exception | None) -> None:
        rejected = Rejected(name, reason)
        self.rejected.append(rejected)
        self.note(rejected, error)

    def _copies(self, at: At) -> Iterator[tuple[Store, str]]:
        """Of the one asked for; the mirror is looked at only where this store's is not good."""
        digest = ""
        if isinstance(at, str):
            name = at
            tag = read_tags(self.store.backend).get(at)
            if tag is not None and at not in self.store.names():
                name, digest = tag.name, tag.digest
            elif at == "latest":
                name = next((name for _, name in self._candidates()), at)
        else:
            name = str(step_name(whole_number(at) or 0))
        for store in (self.store, self.mirror):
            if store is None:
                continue
            if digest:
                found = [info.name for info in store.checkpoints() if info.digest == digest]
            else:
                found = store.names()
            if name in found:
                yield store, name

    def _candidates(self) -> list[tuple[Store, str]]:
        """Newest first; of one name the copy here before the mirror's."""
        here = _restorable(self.store)
        rows = [(self.store, name) for name in here]
        if self.mirror is not None:
            try:
                there = _left(self.store, self.mirror, here)
            except StorageError as error:
                raise StorageError(
                    "the mirror cannot be looked at, and may have a newer checkpoint",
                    reason=error.reason,
                    where=self.mirror.url,
                    found=str(error),
                    do="try again later; to go on with what is here: restore(at=...), or no mirror=",
                    retryable=error.retryable,
                ) from error
            rows += [(self.mirror, name) for name in there]
        return sorted(rows, key=lambda row: (*_by_step(row[1]), row[0] is self.mirror))

    def _heal(self, name: str) -> None:
        """The mirror's copy was good: what is damaged here is fetched from it."""
        if self.mirror is None or name not in self.store.names():
            return
        try:
            if not self.store.verify(name).ok:  # which marks the files that are damaged
                self.store.pull(self.mirror, name)
        except CheckpointError as error:
            log.warning("%s could not be healed from the mirror: %s", name, error)


def bad_resumes(info: CheckpointInfo) -> int:
    """How many resumes from it in a row went wrong."""
    found = info.metadata.get(BAD_RESUMES, 0)
    return found if isinstance(found, int) else 0


def _by_step(name: str) -> tuple[bool, int]:
    step = step_of(name)
    return (step is None, -(step or 0))


def _left(store: Store, mirror: Store, here: Sequence[str]) -> list[str]:
    """Names in the mirror without those that were set aside in the store: a run that
    was killed may have left the mirror to be told."""
    there = _restorable(mirror)
    told = list_indexes(store.backend, "quarantine/").keys() & set(there) - set(here)
    if told:
        aside = {(info.name, info.digest) for info in store.checkpoints(quarantined=True)}
        told = {
            i.name for i in mirror.checkpoints() if i.name in told and (i.name, i.digest) in aside
        }
    return [name for name in there if name not in told]


def _restorable(store: Store) -> list[str]:
    """Names of what a run goes on from: steps, and `main`."""
    return [name for name in store.names() if step_of(name) is not None or name == "main"]
