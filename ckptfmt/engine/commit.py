"""commit: put the index last; now the checkpoint is visible. Spec: 08-protocol.

Write order: data files durable, then `data/`, then the index, if its key is free. Before and after,
the collector's lists are read and every file referred to is sized (I4): a file that is condemned
before is written anew, one that is condemned after withdraws the index.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ckptfmt.engine.catalog import Listed, list_indexes, read_head
from ckptfmt.engine.coordinate import unusable
from ckptfmt.errors import CheckpointError, ConflictError, NotFoundError, StorageError
from ckptfmt.format import (
    HEADER_NBYTES,
    About,
    FilesSection,
    PlacementSection,
    index_key,
    pack_index,
    parse_header,
)
from ckptfmt.storage import Backend
from ckptfmt.types import Key

log = logging.getLogger("ckptfmt.engine")

UNKNOWN_AFTER_S = 5.0
"""How long the outcome of a commit may be unknown before a person is told: the store is gone, and
somebody waits."""


@dataclass(frozen=True, slots=True)
class Document:
    """All that an index is made of; the commit id is drawn when it is put."""

    about: About
    files: FilesSection
    placement: PlacementSection
    tree: bytes

    @property
    def name(self) -> str:
        return self.about.name

    def pack(self, commit_id: bytes) -> bytes:
        return pack_index(self.about, self.files, self.placement, self.tree, commit_id)

    def sizes(self) -> dict[str, int]:
        return dict(zip(self.files.ids, self.files.nbytes.tolist()))


class Packable(Protocol):
    """What a commit puts."""

    @property
    def name(self) -> str: ...
    def pack(self, commit_id: bytes) -> bytes:
        """The whole index."""

    def sizes(self) -> dict[str, int]:
        """Data file -> bytes, of all that it refers to."""


def sync_files(backend: Backend, files: Mapping[str, int]) -> None:
    """Make every file referred to durable, reused ones too, and `data/` (I1)."""
    backend.sync([*(Key(f"data/{file}") for file in files), Key("data/")])


def put_index(
    backend: Backend,
    document: Packable,
    generation: int,
    *,
    durable: bool,
    timeout_s: float,
    when_unknown: Callable[[StorageError], None] = lambda error: None,
) -> Listed | None:
    """Put one generation if its key is free; None if another writer took it.

    Args:
        timeout_s: How long an unknown outcome is looked into.
        when_unknown: Called once, with why, if it stays unknown for more than a moment.
    Raises:
        StorageError: kind `storage-commit-unknown`: whether it was put could not be found out in
            time. Nothing may be cleaned up then.
    """
    key = Key(index_key(document.name, generation))
    commit_id = os.urandom(16)
    data = document.pack(commit_id)
    listed = Listed(document.name, generation, key, len(data))
    deadline = time.monotonic() + timeout_s
    try:
        if backend.put_if_absent(key, data, durable=durable):
            return listed
        won = _holds(backend, key, commit_id)
    except StorageError as error:
        if not error.outcome_unknown:
            raise
        won = _find_out(backend, key, commit_id, deadline, error, when_unknown=when_unknown)
        if won and durable:
            backend.sync([key])  # it is there: whether its name is durable, the error left open
    except BaseException:
        # An interrupt, which may come just after the name was taken: it leaves nothing visible.
        with suppress(CheckpointError):
            if _holds(backend, key, commit_id):
                withdraw(backend, listed)
        raise
    return listed if won else None


def _holds(backend: Backend, key: Key, commit_id: bytes) -> bool:
    """Whether the document at a key is ours: a lost reply looks like a lost race."""
    try:
        return parse_header(backend.get(key, 0, HEADER_NBYTES), key).commit_id == commit_id
    except (NotFoundError, ValueError):
        return False


def _find_out(
    backend: Backend,
    key: Key,
    commit_id: bytes,
    deadline: float,
    cause: StorageError,
    *,
    when_unknown: Callable[[StorageError], None],
) -> bool:
    pause_s, tell_s = 0.05, time.monotonic() + UNKNOWN_AFTER_S
    while True:
        try:
            return _holds(backend, key, commit_id)
        except StorageError as error:
            cause = error
        if time.monotonic() >= tell_s:
            tell_s = float("inf")
            left_s = max(0.0, deadline - time.monotonic())
            log.warning(
                "whether %s was committed is not known, for the store does not answer; asking for up "
                "to %.0f s more: %s", key, left_s, cause
            )  # fmt: skip
            when_unknown(cause)
        if time.monotonic() + pause_s > deadline:
            raise StorageError(
                "the outcome of the commit is unknown",
                reason="commit-unknown",
                where=key,
                found=str(cause),
                do="look at this key when the store answers again; nothing was cleaned up, "
                "so the checkpoint is whole if it is there",
                retryable=False,
                outcome_unknown=True,
            ) from cause
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)


def check_or_withdraw(backend: Backend, document: Packable, listed: Listed) -> None:
    """After the put: if a collector has condemned a file meanwhile, take the index back.

    Raises:
        ConflictError: kind `conflict-collected`.
    """
    try:
        bad = unusable(backend, document.sizes())
    except BaseException as error:
        # Not checked is not committed: a call that fails leaves nothing visible.
        _withdraw_unchecked(backend, listed, error)
        raise
    if bad:
        withdraw(backend, listed)
        raise ConflictError(
            "a collector took files of this save while it committed",
            reason="collected",
            where=f"data/{min(bad)}",
            found=f"{len(bad)} of {len(document.sizes())} files",
            do="save again; nothing of this save is visible",
        )


def _withdraw_unchecked(backend: Backend, listed: Listed, cause: BaseException) -> None:
    try:
        withdraw(backend, listed)
    except StorageError as error:
        raise StorageError(
            "the commit could neither be checked nor taken back",
            reason="commit-unknown",
            where=listed.key,
            found=str(error),
            do="look at this key when the store answers again; nothing was cleaned up",
            outcome_unknown=True,
        ) from cause


def withdraw(backend: Backend, listed: Listed) -> None:
    """Delete an index, durably, before anything that it refers to may go."""
    backend.delete(listed.key)
    backend.sync([Key("checkpoints/")])


def delete_lower(backend: Backend, listed: Listed) -> None:
    """After a commit: the generations below it go, lowest first."""
    lower = [
        found
        for found in list_indexes(backend, f"checkpoints/{listed.name}~").get(listed.name, [])
        if found.generation < listed.generation
    ]
    for found in lower:
        backend.delete(found.key)
    if lower:
        backend.sync([Key("checkpoints/")])


def delete_notes(backend: Backend, txn: bytes) -> None:
    """The notes of a save whose last index is gone; its index goes first."""
    for entry in list(backend.list(f"notes/{txn.hex()}~")):
        backend.delete(entry.key)


def still_used(backend: Backend, txn: bytes) -> bool:
    """Whether some index (in checkpoints/ or quarantine/) is of this save."""
    for prefix in ("checkpoints/", "quarantine/"):
        for generations in list_indexes(backend, prefix).values():
            for listed in generations:
                try:
                    if read_head(backend, listed.key, listed.nbytes).about.txn == txn:
                        return True
                except NotFoundError:
                    continue
                except ValueError:
                    return True  # unreadable: it may be
    return False
