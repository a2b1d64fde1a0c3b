"""One look at a store for the collector: what there is, who is at work, what is referred to.

One promise: what a `Survey` calls garbage was, at one moment of the look, referred to by no index, by
no base of an open save, and older than every open save. Spec: 08-protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptfmt.engine.catalog import Listed, read_head, read_index
from ckptfmt.engine.coordinate import OpenSave, is_abandoned, is_file_id, open_saves
from ckptfmt.errors import (
    CorruptError,
    FormatError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from ckptfmt.format import parse_index_key
from ckptfmt.storage import Backend, Entry
from ckptfmt.types import Key

SLACK_S = 2.0
"""Two times of one store are different only if they differ by more than this."""


@dataclass(frozen=True, slots=True)
class References:
    """What an index refers to: all that the collector wants of it."""

    txn: str
    files: Mapping[str, int]


Refer = Callable[[Backend, Entry], References]
"""Reads the references of an index. Raises a FormatError where it cannot: then nothing is deleted."""


def read_references(backend: Backend, entry: Entry) -> References:
    """From the first small range of an index: `about` and `files`, digests checked."""
    head = read_head(backend, entry.key, entry.nbytes)
    return References(head.about.txn.hex(), dict(zip(head.files.ids, head.files.nbytes.tolist())))


def is_acceptable(backend: Backend, entry: Entry) -> bool:
    """Whether a reader takes this index as the checkpoint of its name."""
    parsed = index_of(entry.key)
    if parsed is None:
        return False
    try:
        read_index(backend, Listed(*parsed, entry.key, entry.nbytes))
    except (FormatError, NotFoundError):
        return False
    return True


def index_of(key: str) -> tuple[str, int] | None:
    """(name, generation) of a key directly under checkpoints/ or quarantine/; None for others."""
    return parse_index_key(key) if key.count("/") == 1 else None


def age_of(time_s: float | None, now: float | None) -> float | None:
    return None if time_s is None or now is None else now - time_s


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look found.

    Attributes:
        data: id -> data file.
        notes: Everything under notes/.
        live: Saves in flight.
        dead: Saves that are over: abandoned, or their txn is committed.
        indexes: Key -> references, in checkpoints/ and quarantine/.
        referred: Ids that some index refers to.
        garbage: id -> nbytes of what may be listed, or deleted if it is listed.
        oldest: Time of the oldest save in flight; None if there is none.
    """

    data: Mapping[str, Entry]
    notes: Sequence[Entry]
    live: Sequence[OpenSave]
    dead: Sequence[OpenSave]
    indexes: Mapping[Key, References]
    referred: frozenset[str]
    garbage: Mapping[str, int]
    oldest: float | None

    @property
    def txns(self) -> set[str]:
        return {refs.txn for refs in self.indexes.values()}

    def is_older(self, entry: Entry) -> bool:
        """Older than every save in flight."""
        return _is_before(entry.time_s, self.oldest)

    def generations(self) -> dict[str, list[Key]]:
        """Name -> its keys under checkpoints/, lowest generation first."""
        found: dict[str, list[tuple[int, Key]]] = {}
        for key in self.indexes:
            parsed = index_of(key)
            if parsed is not None and key.startswith("checkpoints/"):
                found.setdefault(parsed[0], []).append((parsed[1], key))
        return {name: [key for _, key in sorted(keys)] for name, keys in found.items()}


def survey(backend: Backend, refer: Refer, now: float | None) -> Survey:
    """Look at the store, in this order: notes and data, open saves, indexes.

    A file (or note) of the first listings whose writer is not among the open saves listed next was
    committed or given up by then, so that the last listings show its index. Indexes move from
    checkpoints/ to quarantine/ and back by a put and then a delete: one that moves meanwhile is in
    one of three listings.

    Args:
        now: The store's time, from an object just put; None where it tells none.
    """
    notes = list(backend.list("notes/"))
    data = {e.key[5:]: e for e in list(backend.list("data/")) if is_file_id(e.key[5:])}
    saves = open_saves(backend)
    indexes: dict[Key, References] = {}
    for folder in ("checkpoints/", "quarantine/", "checkpoints/"):
        _read_indexes(backend, folder, refer, indexes)
    committed = {refs.txn for refs in indexes.values()}
    live: list[OpenSave] = []
    dead: list[OpenSave] = []
    for save in saves:
        over = save.txn in committed or is_abandoned(save, age_of(save.time_s, now))
        (dead if over else live).append(save)
    referred = frozenset(i for refs in indexes.values() for i in refs.files)
    oldest = _oldest(live)
    garbage = {
        i: entry.nbytes
        for i, entry in data.items()
        if i not in referred and _is_before(entry.time_s, oldest)
    }
    here = {index_of(key) for key in indexes}
    if any(save.bases is None or not here.issuperset(save.bases) for save in live):
        # It may reuse files of an index that is deleted by now: which, nobody can say.
        garbage = {}
    return Survey(data, notes, live, dead, indexes, referred, garbage, oldest)


def _read_indexes(
    backend: Backend, folder: str, refer: Refer, indexes: dict[Key, References]
) -> None:
    for entry in list(backend.list(folder)):
        if entry.key in indexes or index_of(entry.key) is None:
            continue
        try:
            indexes[entry.key] = refer(backend, entry)
        except NotFoundError:
            continue  # deleted or moved since the listing
        except FormatError as error:
            raise _unreadable(error, entry.key) from error


def _unreadable(error: FormatError, key: Key) -> FormatError:
    found = UnsupportedError if isinstance(error, UnsupportedError) else CorruptError
    name = index_of(key)
    cure = "delete this file"
    if key.startswith("quarantine/") and name is not None:
        cure = f"Store.delete({name[0]!r}, quarantined=True)"
    return found(
        "gc deleted nothing: an index cannot be read, so what it refers to is not known",
        reason="unreadable-index",
        where=key,
        found=error,
        do=f"upgrade ckptfmt if the index is newer; else give the checkpoint up: {cure}",
    )


def _oldest(live: Sequence[OpenSave]) -> float | None:
    times = [save.time_s for save in live if save.time_s is not None]
    if len(times) < len(live):
        raise UsageError(
            "a save is in flight, and this store tells no times",
            reason="open-save",
            where=", ".join(f"parts/{save.txn}/open" for save in live if save.time_s is None),
            do="call gc when no save is in flight; if that save is dead, delete its folder",
        )
    return min(times, default=None)


def _is_before(time_s: float | None, oldest: float | None) -> bool:
    return oldest is None or (time_s is not None and time_s + SLACK_S < oldest)
