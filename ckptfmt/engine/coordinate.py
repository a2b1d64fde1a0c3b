"""Open saves, the collector's lists and the store's marker: who may touch what, whatever the clocks.

One promise: a save that checks with `unusable` before its commit and again after it never reports
success over a missing data file (I4). The order inside `unusable` is the proof: gc's lists are read
*first*, sizes after. A collector deletes a file only while a list that names it stands, so a file that
is not named when the lists are read is either gone by the time its size is asked for, or is deleted by
nobody who has not seen our index. `tests/property/test_gc_model.py` explores every interleaving.
Spec: 08-protocol, 02-store (the marker).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ckptfmt.engine.owner import Owner, activate, deactivate
from ckptfmt.errors import ConflictError, CorruptError, NotFoundError, UnsupportedError
from ckptfmt.storage import Backend, Entry, is_abandoned_temporary
from ckptfmt.types import Key

ABANDONED_AFTER_S = 86400.0
"""Where nothing can be said about a process, its open save or collection counts for this long."""
MARKER = Key("ckptfmt.json")
MARKER_TEXT = b'{"format": "ckptfmt", "version": [1, 0], "requires_to_write": []}\n'
_MAJOR = 1
_KNOWN_TO_WRITE: frozenset[str] = frozenset()

_FILE_ID = re.compile(r"[0-9a-f]{32}(?:[0-9a-f]{32})?")
_OPEN_KEY = re.compile(r"parts/([0-9a-f]{32})/open")
_LIST_KEY = re.compile(r"gc/([0-9a-f]{32})")
_JSON_NBYTES_MAX = 1 << 20
_LIST_NBYTES_MAX = 1 << 28
_STATS_MAX = 64  # above this many files one listing of data/ is cheaper than a stat of each


# -- open saves ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSave:
    """A save in flight, from `parts/<txn>/open`.

    Attributes:
        txn: Its transaction.
        step, name: What it is going to commit.
        bases: (name, generation) of the checkpoints whose chunks it may reuse; None where the file
            cannot be understood: it may reuse anything.
        owner: The process.
        time_s: The store's time of the file, or None.
        torn: The file's bytes never reached the disk: its machine crashed, and the save with it.
    """

    txn: str
    step: int | None
    name: str | None
    bases: tuple[tuple[str, int], ...] | None
    owner: Owner
    time_s: float | None
    torn: bool = False


def new_txn() -> str:
    """128 random bits in hex: names a save (or a run of the collector) for ever."""
    return os.urandom(16).hex()


def open_key(txn: str) -> Key:
    return Key(f"parts/{txn}/open")


def begin(
    backend: Backend,
    txn: str,
    *,
    step: int | None,
    name: str,
    bases: Sequence[tuple[str, int]],
) -> None:
    """Announce a save: before it opens a base, before it writes a byte of data.

    Not durable on purpose: after a power cut there is no save left to protect.
    """
    document = {
        "step": step,
        "name": name,
        "bases": [[base, generation] for base, generation in bases],
        **Owner.here().to_json(),
    }
    activate(txn)
    try:
        backend.put(open_key(txn), json.dumps(document).encode())
    except BaseException:
        deactivate(txn)
        raise


def end(backend: Backend, txn: str) -> None:
    """The save is over, committed or not: remove `parts/<txn>/`, `open` last.

    Not to be called where a commit's outcome is unknown: its data must stay (I2).
    """
    try:
        remove_parts(backend, txn)
    finally:
        deactivate(txn)


def remove_parts(backend: Backend, txn: str) -> None:
    last = open_key(txn)
    for entry in list(backend.list(f"parts/{txn}/")):
        if entry.key != last:
            backend.delete(entry.key)
    backend.delete(last)


def parse_open(txn: str, data: bytes | memoryview, time_s: float | None = None) -> OpenSave:
    """Understand `parts/<txn>/open`, whatever is in it: what is not understood counts as open."""
    unknown = OpenSave(txn, None, None, None, Owner(), time_s)
    document = _parse_json(data)
    if not isinstance(document, dict):
        return unknown
    step, name = document.get("step"), document.get("name")
    return OpenSave(
        txn=txn,
        step=step if type(step) is int else None,
        name=name if isinstance(name, str) else None,
        bases=_parse_bases(document.get("bases")),
        owner=Owner.of_json(document),
        time_s=time_s,
    )


def _parse_bases(value: object) -> tuple[tuple[str, int], ...] | None:
    if not isinstance(value, list):
        return None
    bases = []
    for item in value:
        if not isinstance(item, list) or len(item) != 2:
            return None
        base, generation = item
        if not isinstance(base, str) or type(generation) is not int:
            return None
        bases.append((base, generation))
    return tuple(bases)


def _parse_json(data: bytes | memoryview) -> object:
    try:
        return json.loads(bytes(data).decode("utf-8"))
    except (ValueError, RecursionError):  # decode errors and absurd numbers are ValueErrors
        return None


def open_saves(backend: Backend) -> list[OpenSave]:
    """Every `parts/<txn>/open`, with the store's times; dead ones too (see `is_abandoned`)."""
    capabilities = backend.capabilities
    local_disk = capabilities.local and not capabilities.network_fs
    found = []
    for entry in list(backend.list("parts/")):
        match = _OPEN_KEY.fullmatch(entry.key)
        if match is None:
            continue
        data: bytes | memoryview = b""
        if entry.nbytes <= _JSON_NBYTES_MAX:
            try:
                data = backend.get(entry.key)
            except NotFoundError:
                continue  # ended since the listing
            except CorruptError:
                pass
        save = parse_open(match.group(1), data, entry.time_s)
        # The name is put when the bytes are complete, but neither is synced: after a power cut a
        # local disk may have the name and only the beginning of the bytes, or none.
        torn = local_disk and save.bases is None and _is_cut_off(bytes(data))
        found.append(replace(save, torn=torn))
    return found


def _is_cut_off(data: bytes) -> bool:
    """Whether this is the beginning of a document of `begin`."""
    text, first = data.rstrip(b"\0"), b'{"step": '
    return text[: len(first)] == first[: len(text)] and not text.endswith(b"}")


def is_abandoned(save: OpenSave, age_s: float | None) -> bool:
    """True if nobody will finish this save.

    Args:
        save: From `open_saves`.
        age_s: How old its file is by the store's time; None where that is not known.
    """
    if save.torn or save.owner.is_dead(save.txn):
        return True
    return age_s is not None and age_s > ABANDONED_AFTER_S


def clean_abandoned(backend: Backend) -> list[str]:
    """Remove what saves left that are known to be dead: their files under tmp/ and parts/, and what
    any process of this machine began to put and died over.

    Every save does this first, so that litter never outlives the next one. Their finished data
    files are left to gc. Returns the transactions.
    """
    dead = [save.txn for save in open_saves(backend) if is_abandoned(save, None)]
    for txn in dead:
        for entry in list(backend.list(f"tmp/{txn}-")):
            backend.delete(entry.key)
        remove_parts(backend, txn)
    if backend.capabilities.local:  # elsewhere nothing is begun under tmp/, and a listing costs
        for entry in list(backend.list("tmp/")):
            if is_abandoned_temporary(entry.key):
                backend.delete(entry.key)
    return dead


# -- the collector's lists ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GcList:
    """`gc/<run>`: ids that a collector means to delete.

    A list without an owner waits for its grace to pass; anyone may take it up, by copying its ids to
    a list of his own. A list with an owner is being worked on: only its owner removes it, so that it
    outlives every deletion made on its authority, however long the collector is stalled.
    """

    run: str
    ids: frozenset[str]
    owner: Owner | None
    time_s: float | None
    readable: bool = True

    @property
    def key(self) -> Key:
        return Key(f"gc/{self.run}")


def put_list(backend: Backend, run: str, ids: frozenset[str], owner: Owner | None) -> Entry:
    """Write `gc/<run>` and give its entry: its time is the store's time now.

    Synced, for a list that a power cut leaves without its bytes would stop every save.
    """
    document = {"ids": sorted(ids), "owner": None if owner is None else owner.to_json()}
    key = Key(f"gc/{run}")
    backend.put(key, json.dumps(document).encode(), durable=True)
    entry = backend.stat(key)
    if entry is None:
        raise ConflictError(
            "another collector removed the list of this one, which was stalled for a day",
            reason="gc-list",
            where=key,
            do="nothing was deleted; run gc again",
        )
    return entry


def gc_lists(backend: Backend) -> Iterator[GcList]:
    for entry in list(backend.list("gc/")):
        match = _LIST_KEY.fullmatch(entry.key)
        if match is None:
            continue
        data: bytes | memoryview = b""
        if entry.nbytes <= _LIST_NBYTES_MAX:
            try:
                data = backend.get(entry.key)
            except NotFoundError:
                continue  # finished since the listing: what it named is deleted or spared by now
            except CorruptError:
                pass
        yield _parse_list(match.group(1), data, entry.time_s)


def _parse_list(run: str, data: bytes | memoryview, time_s: float | None) -> GcList:
    document = _parse_json(data)
    ids = document.get("ids") if isinstance(document, dict) else None
    if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
        return GcList(run, frozenset(), None, time_s, readable=False)
    assert isinstance(document, dict)
    owner = document.get("owner")
    return GcList(
        run, frozenset(ids), Owner.of_json(owner) if isinstance(owner, dict) else None, time_s
    )


def condemned(backend: Backend) -> set[str]:
    """Ids named in any list of a collector: not to be reused, nor to be written under that id.

    Raises:
        CorruptError: kind `corrupt-gc-list`: a list cannot be read, so nobody knows what it names.
    """
    ids: set[str] = set()
    for found in gc_lists(backend):
        if not found.readable:
            raise CorruptError(
                "a list of the collector cannot be read, so what it deletes is not known",
                reason="gc-list",
                where=found.key,
                do="delete this file when no gc is running on this store",
            )
        ids |= found.ids
    return ids


def unusable(backend: Backend, files: Mapping[str, int]) -> set[str]:
    """Of the data files `files` (id -> nbytes): those named in gc/, missing, or of another size.

    Called before a commit (they are written anew, under other ids) and after it (the index is
    withdrawn). Never the other way round inside: sizes before lists lose data.
    """
    if not files:
        return set()
    named = condemned(backend)
    bad = {i for i in files if i in named}
    # A listing that may be stale can show what is deleted; stat never does.
    if len(files) > _STATS_MAX and backend.capabilities.list_stale_s == 0.0:
        sizes = {entry.key[5:]: entry.nbytes for entry in backend.list("data/")}
    else:
        sizes = {}
        for i in files:
            found = backend.stat(Key(f"data/{i}"))
            if found is not None:
                sizes[i] = found.nbytes
    bad |= {i for i, nbytes in files.items() if sizes.get(i) != nbytes}
    return bad


def is_file_id(text: str) -> bool:
    return _FILE_ID.fullmatch(text) is not None


# -- the store's marker -------------------------------------------------------------------------


def check_store_marker(backend: Backend, for_write: bool = True) -> bool:
    """Refuse to write to, delete from or collect a store that asks for more than this version knows.

    A reader never needs the file. Returns whether the store has one.

    Raises:
        UnsupportedError: A newer major version, or an unknown entry in `requires_to_write`.
        CorruptError: It is not a marker.
    """
    if not for_write:
        return True
    entry = backend.stat(MARKER)
    if entry is None:
        return False
    data: bytes | memoryview = b""
    if entry.nbytes <= _JSON_NBYTES_MAX:
        with suppress(NotFoundError):
            data = backend.get(MARKER)
    document = _parse_json(data)
    if not isinstance(document, dict):
        document = {}
    version, requires = document.get("version"), document.get("requires_to_write")
    if (
        document.get("format") != "ckptfmt"
        or not isinstance(version, list)
        or len(version) != 2
        or not all(type(part) is int and part >= 0 for part in version)
        or not isinstance(requires, list)
    ):
        raise CorruptError(
            "the store's marker is not what ckptfmt writes",
            reason="store-marker",
            where=MARKER,
            expected=MARKER_TEXT.decode().strip(),
            found=bytes(data[:100]),
            do="if this is a ckptfmt store, put the expected text there; else choose another folder",
        )
    if version[0] > _MAJOR:
        raise UnsupportedError(
            "this store is of a newer format",
            reason="version",
            where=f"{MARKER}: $.version",
            expected=f"major version at most {_MAJOR}",
            found=version[0],
            do="upgrade ckptfmt; nothing was changed",
        )
    unknown = [item for item in requires if str(item) not in _KNOWN_TO_WRITE]
    if unknown:
        raise UnsupportedError(
            "whoever writes to this store must know something this version does not",
            reason="requires-to-write",
            where=f"{MARKER}: $.requires_to_write",
            expected=sorted(_KNOWN_TO_WRITE),
            found=unknown,
            do="upgrade ckptfmt; reading works, and nothing was changed",
        )
    return True


def ensure_store_marker(backend: Backend) -> None:
    """Make the folder a store, at its first save; check the marker that is there otherwise."""
    if check_store_marker(backend):
        return
    if not backend.put_if_absent(MARKER, MARKER_TEXT, durable=True):
        check_store_marker(backend)
