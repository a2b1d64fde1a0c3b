"""The ranks of a torch process group, which meet through its key-value store.

Any backend will do: no tensor travels, so a group of NCCL alone serves too, a rank that is late is
told by its missing key, one that is gone by its process or its beats, and a call that failed leaves no
collective half done for the next one.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ckptfmt.engine import LOST_AFTER_S, Gone, Presence, Watch, wait_until
from ckptfmt.errors import ConflictError, UsageError
from ckptfmt.storage import Backend

CLOSE_S = 2.0
"""How long rank 0 waits for the others to have heard its last word."""
PIECE_NBYTES = 4 << 20
"""A TCPStore takes values of up to 8 MiB."""


@dataclass(slots=True)
class _Session:
    """The meetings of a group as long as it lives: a group made anew, under the same name, may have
    ranks that were not in the last one.

    Attributes:
        calls: Meetings begun.
        over: On rank 0, those that are over, though not all have heard the last word.
        presence: This rank's life; of the session that is no other line's.
    """

    store: weakref.ref[Any]
    prefix: str
    calls: int = 0
    over: list[str] = field(default_factory=list)
    presence: Presence | None = None


_sessions: dict[str, _Session] = {}
"""Name of a group -> its session in this process."""


def _session(store: Any, name: str, size: int) -> _Session:
    known = _sessions.get(name)
    if known is None or known.store() is not store:
        if known is not None and known.presence is not None:
            known.presence.end()
        number = (store.add(f"{name}/ranks", 1) - 1) // size  # of one store that several had
        known = _sessions[name] = _Session(weakref.ref(store), f"{name}/{number}")
    return known


def ranks_of(group: Any) -> ProcessRanks:
    """The ranks of a ProcessGroup, or of `"world"`: all of torch.distributed, this process alone
    where that was not initialized."""
    if group == "world":
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "torch.distributed is not initialized",
                reason="group",
                found="group='world'",
                do="call torch.distributed.init_process_group first, or leave group out",
            )
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            "this is no group of ranks, or this process is not in it",
            reason="group",
            expected='"world", a ProcessGroup of torch that has this rank, or FileGroup(rank, size)',
            found=repr(group),
            do="call on the ranks of the group only",
        )
    return ProcessRanks(group)


class ProcessRanks:
    """The ranks of one ProcessGroup; ranks count within it."""

    def __init__(self, group: Any) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._name = group, f"ckptfmt/{group.group_name}"
        self._home = self._name
        self._store = dist.distributed_c10d._get_process_group_store(group)

    def beside(self, line: str) -> ProcessRanks:
        """The same ranks; what they say is kept apart."""
        made = ProcessRanks(self._group)
        made._name = f"{self._name}/{line}"
        return made

    def leave(self, backend: Backend, error: BaseException) -> None:
        """This rank comes to no further meeting: those who wait for it hear of the error at once."""
        presence = _session(self._store, self._home, self.size).presence
        if presence is not None:
            with suppress(RuntimeError):  # the store is gone: nobody hears anything
                presence.end(error)

    def meet(self, backend: Backend, timeout_s: float) -> StoreMailbox:
        """The next meeting; all ranks count them alike."""
        home = _session(self._store, self._home, self.size)
        board = _Board(home.store, home.prefix)
        if home.presence is None or home.presence.ended:
            home.presence = Presence(board, self.rank, self.size, LOST_AFTER_S)
            board.put(_facts(self.rank), json.dumps(home.presence.facts()).encode())
        session = _session(self._store, self._name, self.size)
        session.calls += 1
        return StoreMailbox(
            self._store, session, (board, home.presence), self.size, owner=self.rank == 0
        )


class StoreMailbox:
    """Messages are keys of a torch Store, in pieces that it takes."""

    def __init__(
        self,
        store: Any,
        session: _Session,
        present: tuple[_Board, Presence],
        size: int,
        *,
        owner: bool,
    ) -> None:
        self._store, self._size, self._owner = store, size, owner
        self._session, self._prefix = session, f"{session.prefix}/{session.calls}"
        self._board, self._presence = present
        self._watch = Watch(self._presence)

    def put(self, key: str, data: bytes) -> None:
        full = f"{self._prefix}/{key}"
        pieces = range(0, len(data), PIECE_NBYTES)
        for number, at in enumerate(pieces):
            self._store.set(f"{full}#{number}", data[at : at + PIECE_NBYTES])
        self._store.set(full, str(len(pieces)))
        if self._owner:
            _said.setdefault(self._prefix, {})[full] = len(pieces)

    def get(self, key: str) -> bytes | None:
        full = f"{self._prefix}/{key}"
        if not self._store.check([full]):
            return None
        count = int(self._store.get(full))
        data = b"".join(self._store.get(f"{full}#{number}") for number in range(count))
        if self._owner:  # it alone reads what the others send: the store forgets it
            _delete(self._store, full, count)
        return data

    def has(self, keys: Sequence[str]) -> bool:
        try:
            found: bool = self._store.check([f"{self._prefix}/{key}" for key in keys])
        except RuntimeError as error:  # of which torch's own network errors are
            raise ConflictError(
                "the store of torch.distributed is gone, and the rank that kept it (0, as a rule)",
                reason="rank-gone",
                where="rank 0",
                found=str(error).splitlines()[0],
                do="nothing was committed or restored, as far as this rank knows; look at the store",
            ) from error
        return found

    def gone(self, ranks: Sequence[int]) -> list[Gone]:
        board, presence = self._board, self._presence
        for rank in ranks:
            if presence.life_of(rank) is None or presence.was_told(rank):
                with suppress(ValueError, TypeError):
                    presence.know(rank, json.loads(board.get(_facts(rank)) or b"{}"))
        return self._watch.gone(ranks)

    def came(self, rank: int, to: str) -> None:
        self._presence.came(rank, to)

    def describe(self, rank: int) -> str:
        return self._presence.describe(rank)

    def tend(self) -> None: ...
    def close(self) -> None:
        """Rank 0 stays until the others have heard its last word: it may be the one that keeps the
        store, and about to leave."""
        bye = f"{self._prefix}/bye"
        try:
            if self._owner:
                over = self._session.over
                over.append(self._prefix)
                if wait_until(lambda: self._store.add(bye, 0) >= self._size - 1, CLOSE_S):
                    while over:  # who has heard this last word came to the meetings before, too
                        _forget(self._store, over.pop())
            else:
                self._store.add(bye, 1)
        except RuntimeError:
            return  # the store is gone; all that was to be said has been


class _Board:
    """Keys of a torch Store that all ranks read, as long as the group has it."""

    def __init__(self, store: weakref.ref[Any], prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def put(self, key: str, data: bytes) -> None:
        store = self._store()
        if store is not None:
            store.set(f"{self._prefix}/{key}", data)

    def get(self, key: str) -> bytes | None:
        store, full = self._store(), f"{self._prefix}/{key}"
        if store is None or not store.check([full]):
            return None
        return bytes(store.get(full))

    def delete(self, key: str) -> None:
        store = self._store()
        if store is not None:
            _delete(store, f"{self._prefix}/{key}", 0)


def _facts(rank: int) -> str:
    return f"facts-{rank}"


_said: dict[str, dict[str, int]] = {}
"""Meeting -> what rank 0 said there, and in how many pieces."""


def _forget(store: Any, prefix: str) -> None:
    for full, count in _said.pop(prefix, {}).items():
        _delete(store, full, count)


def _delete(store: Any, full: str, count: int) -> None:
    try:
        for key in (full, *(f"{full}#{number}" for number in range(count))):
            store.delete_key(key)
    except (NotImplementedError, RuntimeError):
        return  # a FileStore keeps what it has
