"""Restoring the newest checkpoint that is good: what is damaged, rejected or led to bad resumes is
passed over, with its reason; nothing is moved by looking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptfmt.engine import Checkpoint, Store
from ckptfmt.errors import FormatError, NotFoundError, StorageError
from ckptfmt.format import step_name
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
        rejected: Those, newest first.
        names: Of all that are newer than the one found, these included.
    """

    store: Store
    validate: Sequence[Validator]
    note: Callable[[Rejected, BaseException | None], None]
    rejected: list[Rejected] = field(default_factory=list)
    newer: list[str] = field(default_factory=list)
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
        for name in _newest_first(self.store)[:ATTEMPTS_MAX]:
            self._refusal = None
            try:
                with self.store.open(name) as checkpoint:
                    bad = checkpoint.info.metadata.get(BAD_RESUMES, 0)
                    if isinstance(bad, int) and bad >= BAD_RESUMES_MAX:
                        self._reject(name, f"{bad} resumes from it in a row went wrong", None)
                        continue
                    return attempt(checkpoint)
            except (FormatError, NotFoundError, StorageError) as error:
                if isinstance(error, StorageError) and error.retryable:
                    raise  # the medium, not the checkpoint: an older one would be a silent loss
                last = error
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
        self.newer.append(name)
        self.note(rejected, error)


def _newest_first(store: Store) -> list[str]:
    steps = [str(step_name(step)) for step in reversed(store.steps())]
    return steps + [name for name in store.names() if name == "main"]
