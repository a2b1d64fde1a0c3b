"""Ranks that meet through files in the store: any launcher, any number of machines.

Every rank says *hello* in a file with a number that it drew; rank 0 opens a session (announced like a
save, so that what it leaves is cleaned when it is dead) and answers with the numbers it saw. A rank
goes on only if its own is among them, so that files of an earlier attempt lead nowhere.
Spec: 08-protocol §8.9.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

from ckptfmt.engine.coordinate import begin, end, ensure_store_marker, new_txn
from ckptfmt.engine.group import wait_until
from ckptfmt.engine.owner import Owner, deactivate
from ckptfmt.errors import CheckpointError, ConflictError, NotFoundError, UsageError
from ckptfmt.format import digest
from ckptfmt.storage import Backend
from ckptfmt.types import Key

CLOSE_S = 2.0
"""How long rank 0 waits for the others to have read its last answer, before it leaves the files to
the next save."""
_TEND_S = 0.05


class FileGroup:
    """Ranks that meet through files in the store.

    Args:
        rank, size: This rank, from 0, and how many there are.
        attempt: How often the job was restarted. Ranks of two attempts that may be alive at one time
            must have different ones; files of dead ones are told apart without it.
    Raises:
        UsageError: kind `usage-group`.
    """

    def __init__(self, rank: int, size: int, *, attempt: int = 0) -> None:
        if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
            raise UsageError(
                "no such rank",
                reason="group",
                expected="0 <= rank < size",
                found=f"rank {rank!r} of {size!r}",
                do="pass the launcher's rank and world size",
            )
        self.rank: int = rank
        self.size: int = size
        self.attempt: int = attempt
        self._line = ""

    def __repr__(self) -> str:
        return f"FileGroup({self.rank}, {self.size}, attempt={self.attempt})"

    def beside(self, line: str) -> FileGroup:
        """The same ranks, for meetings that have nothing to do with those of this group."""
        made = FileGroup(self.rank, self.size, attempt=self.attempt)
        made._line = line
        return made

    def meet(self, backend: Backend, timeout_s: float) -> FileMailbox:
        """The session of one save or restore.

        Raises:
            ConflictError: kind `conflict-rank-late`.
        """
        ensure_store_marker(backend)
        place = place_of(self.size, self.attempt, self._line)
        if self.rank == 0:
            return _Host(backend, place, self.size)
        return _Guest(backend, place, self.rank, timeout_s)


def place_of(size: int, attempt: int, line: str = "") -> str:
    """Where the ranks of a group say hello: the same for all of them, without a word."""
    return digest(f"FileGroup {size} {attempt}{line and f' {line}'}".encode(), "xxh3-128").hex()


def _get(backend: Backend, key: Key) -> bytes | None:
    try:
        return bytes(backend.get(key))
    except NotFoundError:
        return None


class FileMailbox:
    """Messages are `parts/<session>/<key>`."""

    def __init__(self, backend: Backend, session: str) -> None:
        self._backend, self._session = backend, session

    def _key(self, key: str) -> Key:
        return Key(f"parts/{self._session}/{key}")

    def put(self, key: str, data: bytes) -> None:
        self._backend.put(self._key(key), data)

    def get(self, key: str) -> bytes | None:
        return _get(self._backend, self._key(key))

    def has(self, keys: Sequence[str]) -> bool:
        if len(keys) == 1:
            return self._backend.stat(self._key(keys[0])) is not None
        prefix = f"parts/{self._session}/"
        there = {entry.key.removeprefix(prefix) for entry in self._backend.list(prefix)}
        return there.issuperset(keys)

    def tend(self) -> None: ...
    def close(self) -> None: ...


class _Host(FileMailbox):
    """Rank 0's: answers hellos, also those that come late or again."""

    def __init__(self, backend: Backend, place: str, size: int) -> None:
        super().__init__(backend, new_txn())
        self._place, self._size = place, size
        self._seen: dict[str, str] = {}
        self._tended_s = 0.0
        begin(backend, self._session, step=None, name="main", bases=())
        self.tend()

    def _hellos(self) -> dict[str, str]:
        prefix = f"parts/{self._place}/hello-"
        made = {}
        for entry in list(self._backend.list(prefix)):
            data = _get(self._backend, entry.key)
            with suppress(ValueError, KeyError, AttributeError):
                hello = json.loads(data or b"")
                if not Owner.of_json(hello).is_dead(hello["number"]) or _is_here(hello):
                    made[entry.key.removeprefix(prefix)] = hello["number"]
        return made

    def tend(self) -> None:
        if time.monotonic() - self._tended_s < _TEND_S:
            return
        self._tended_s = time.monotonic()
        new = {
            rank: number
            for rank, number in self._hellos().items()
            if self._seen.get(rank) != number and not self._has_spoken(rank)
        }
        if new:
            self._seen |= new
            answer = {"session": self._session, "numbers": self._seen}
            key = Key(f"parts/{self._place}/answer")
            self._backend.put(key, json.dumps(answer).encode())

    def _has_spoken(self, rank: str) -> bool:
        """It was here, and has left: its next hello is to the meeting after this one."""
        return rank in self._seen and self.has([f"0-{rank}"])

    def close(self) -> None:
        def are_here() -> bool:
            return bool(self._seen.items() & self._hellos().items())

        # Who has not come yet must hear what became of this meeting: to a later one it would bring
        # the message of this.
        def is_over() -> bool:
            return len(self._seen) == self._size - 1 and not are_here()

        try:
            if wait_until(is_over, CLOSE_S, self.tend) or not are_here():
                self._backend.delete(Key(f"parts/{self._place}/answer"))
                end(self._backend, self._session)
        finally:
            deactivate(self._session)  # what it leaves is cleaned by the next save


def _is_here(hello: dict[str, object]) -> bool:
    """Of this very process (several ranks in threads): alive, though no open save of ours."""
    here = Owner.here()
    return (hello.get("pid"), hello.get("start_time")) == (here.pid, here.start_time)


class _Guest(FileMailbox):
    """Another rank's."""

    def __init__(self, backend: Backend, place: str, rank: int, timeout_s: float) -> None:
        number = secrets.token_hex(16)
        self._hello = Key(f"parts/{place}/hello-{rank}")
        self._backend = backend
        hello = {"number": number, **Owner.here().to_json()}
        backend.put(self._hello, json.dumps(hello).encode())
        session: list[str] = []

        def is_answered() -> bool:
            data = _get(backend, Key(f"parts/{place}/answer"))
            with suppress(ValueError, KeyError, AttributeError):
                answer = json.loads(data or b"")
                if answer["numbers"].get(str(rank)) == number:
                    session.append(answer["session"])
            return bool(session)

        if not wait_until(is_answered, timeout_s):
            self.close()
            raise ConflictError(
                "a rank of the group did not answer in time",
                reason="rank-late",
                where="rank 0",
                expected=f"all ranks to call within {timeout_s:g} s of each other",
                do="look whether it lives, and whether every rank of the group calls",
            )
        super().__init__(backend, session[0])

    def close(self) -> None:
        with suppress(CheckpointError):
            self._backend.delete(self._hello)
