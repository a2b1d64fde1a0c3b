"""Ranks that meet through files in the store: any launcher, any number of machines.

They are introduced once. A rank says *hello*, by the name of its life; rank 0 answers with its own, which
no earlier attempt can have known, and from then on both count their meetings: line and number name the
*session* of each, so that a rank which is late finds what became of its own meeting, and comes to no
other. Who is started again alone has another life: it is introduced anew when the others have heard that
the old one is gone, and goes on with rank 0's count.
Spec: 08-protocol §8.9.
"""

from __future__ import annotations

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckptfmt.engine.coordinate import begin, end, ensure_store_marker, open_key, remove_parts
from ckptfmt.engine.group import LOOK_S, Gone, gone_error, late_error, wait_until
from ckptfmt.engine.owner import Owner, deactivate
from ckptfmt.engine.presence import LOST_AFTER_S, Presence, Watch, check_lost_after
from ckptfmt.errors import CheckpointError, NotFoundError, UsageError
from ckptfmt.format import digest
from ckptfmt.storage import Backend
from ckptfmt.types import Key

CLOSE_S = 2.0
"""How long rank 0 waits for the others to have read its last answer, before it leaves the files to
the next meeting."""
_TEND_S = 0.05


class FileGroup:
    """Ranks that meet through files in the store.

    Args:
        rank, size: This rank, from 0, and how many there are.
        attempt: How often the job was restarted. Ranks of two attempts that may be alive at one time
            must have different ones; files of dead ones are told apart without it.
        lost_after_s: A rank on another machine that gave no sign of life for so long, in seconds, is
            gone, and those who wait for it raise. One on the same machine is asked about directly.
    Raises:
        UsageError: kind `usage-group`.
    """

    def __init__(
        self, rank: int, size: int, *, attempt: int = 0, lost_after_s: float = LOST_AFTER_S
    ) -> None:
        if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
            raise UsageError(
                "no such rank",
                reason="group",
                expected="0 <= rank < size",
                found=f"rank {rank!r} of {size!r}",
                do="pass the launcher's rank and world size",
            )
        check_lost_after(lost_after_s)
        self.rank: int = rank
        self.size: int = size
        self.attempt: int = attempt
        self.lost_after_s: float = lost_after_s
        self._line = ""

    def __repr__(self) -> str:
        return f"FileGroup({self.rank}, {self.size}, attempt={self.attempt})"

    def beside(self, line: str) -> FileGroup:
        """The same ranks, for meetings that have nothing to do with those of this group."""
        made = FileGroup(self.rank, self.size, attempt=self.attempt, lost_after_s=self.lost_after_s)
        made._line = line
        return made

    def meet(self, backend: Backend, timeout_s: float) -> FileMailbox:
        """The next meeting, of one save or restore; all ranks count them alike.

        Raises:
            ConflictError: kind `conflict-rank-late`, `conflict-rank-gone`: of rank 0.
        """
        ensure_store_marker(backend)
        key = self._key(backend)
        with _lock:
            member = _members.get(key)
            if member is None or member.presence.ended:
                made = _HostMember if self.rank == 0 else _GuestMember
                member = _members[key] = made(self, backend)
        return member.meet(self._line, timeout_s)

    def leave(self, backend: Backend, error: BaseException) -> None:
        """This rank comes to no further meeting: those who wait for it hear of the error at once. It
        may come back, as one that was started again."""
        with _lock:
            member = _members.pop(self._key(backend), None)
        if member is not None:
            member.presence.end(error)

    def _key(self, backend: Backend) -> tuple[int, str, str, int]:
        return os.getpid(), backend.url, place_of(self.size, self.attempt), self.rank


def place_of(size: int, attempt: int) -> str:
    """Where the ranks of a group find each other: the same for all of them, without a word."""
    return digest(f"FileGroup {size} {attempt}".encode(), "xxh3-128").hex()


def _get(backend: Backend, key: Key) -> bytes | None:
    try:
        return bytes(backend.get(key))
    except NotFoundError:
        return None


def _json(data: bytes | None) -> dict[str, Any]:
    """A document of another rank's; empty if there is none, or none that can be understood."""
    with suppress(ValueError, RecursionError):
        found = json.loads(data or b"")
        if isinstance(found, dict):
            return found
    return {}


class _Files:
    """Files under one folder."""

    def __init__(self, backend: Backend, folder: str) -> None:
        self.backend, self.folder = backend, folder

    def key(self, name: str) -> Key:
        return Key(self.folder + name)

    def put(self, name: str, data: bytes) -> None:
        self.backend.put(self.key(name), data)

    def get(self, name: str) -> bytes | None:
        return _get(self.backend, self.key(name))

    def delete(self, name: str) -> None:
        self.backend.delete(self.key(name))

    def names(self, prefix: str = "") -> list[str]:
        whole = self.folder + prefix
        return [entry.key.removeprefix(self.folder) for entry in list(self.backend.list(whole))]


class _Member(ABC):
    """One rank of a group in this process, from its first meeting on."""

    def __init__(self, group: FileGroup, backend: Backend) -> None:
        self.rank, self.size = group.rank, group.size
        self.backend, place = backend, place_of(group.size, group.attempt)
        self.home = _Files(backend, f"parts/{place}/")
        self.presence = Presence(self.home, self.rank, self.size, group.lost_after_s, self.end)
        self.lock = threading.RLock()
        self.next: dict[str, int] = {}
        """Line -> number of its next meeting."""

    @abstractmethod
    def meet(self, line: str, timeout_s: float) -> FileMailbox:
        """The next meeting of a line."""

    @abstractmethod
    def end(self, error: BaseException | None) -> None:
        """This life is over."""

    def number(self, line: str) -> int:
        with self.lock:
            number = self.next.get(line, 0)
            self.next[line] = number + 1
            return number


class FileMailbox:
    """Messages are `parts/<session>/<key>`."""

    def __init__(self, member: _Member, host: str, line: str, number: int) -> None:
        session = digest(f"FileGroup {host} {line} {number}".encode(), "xxh3-128").hex()
        self._member, self._session = member, session
        self._files = _Files(member.backend, f"parts/{session}/")
        self._watch = Watch(member.presence, line)

    def put(self, key: str, data: bytes) -> None:
        self._files.put(key, data)

    def get(self, key: str) -> bytes | None:
        return self._files.get(key)

    def has(self, keys: Sequence[str]) -> bool:
        if len(keys) == 1:
            return self._member.backend.stat(self._files.key(keys[0])) is not None
        return set(self._files.names()).issuperset(keys)

    def gone(self, ranks: Sequence[int]) -> list[Gone]:
        return self._watch.gone(ranks)

    def came(self, rank: int, to: str) -> None:
        self._member.presence.came(rank, to)

    def describe(self, rank: int) -> str:
        return self._member.presence.describe(rank)

    def tend(self) -> None: ...
    def close(self) -> None: ...


# -- rank 0 --------------------------------------------------------------------------------------


class _HostMember(_Member):
    """Rank 0: introduces the others to itself, and keeps what they have not heard yet."""

    def __init__(self, group: FileGroup, backend: Backend) -> None:
        super().__init__(group, backend)
        self.guests: dict[int, dict[str, Any]] = {}
        """Rank -> what its newest life said of itself; all of them are in the answer."""
        self.came: set[int] = set()
        """Ranks that have spoken, in some life."""
        self.open: dict[str, _Host] = {}
        """Line -> its newest meeting, while it lasts."""
        self.kept: dict[str, list[str]] = {}
        """Line -> sessions that are over, and that a rank may still come to."""
        self._answers: dict[int, list[object]] = {}

    def meet(self, line: str, timeout_s: float) -> _Host:
        host = _Host(self, line, self.number(line))
        with self.lock:
            self.open[line] = host
        host.tend()
        return host

    def answer(self) -> None:
        """Introduce those who say hello, but for dead ones, as far as that is known."""
        with self.lock:
            is_new = False
            for name in self.home.names("hello-"):
                text, _, life = name.removeprefix("hello-").partition("-")
                rank = int(text) if text.isdecimal() else 0
                if not 0 < rank < self.size or self._is_known(rank, life):
                    continue
                hello = _json(self.home.get(name))
                if hello.get("life") != life or Owner.of_json(hello).has_ended():
                    continue
                is_new = True
                # One that has met nobody counts for itself: it may be late to a meeting that is over.
                has_met = rank in self.came or hello.get("has_met")
                self._answers[rank] = [life, self._counts_for(rank) if has_met else None]
                self.guests[rank] = hello
                self.presence.forget(rank)
            if is_new:
                answer = {"host": self.presence.facts(), "ranks": self._answers}
                self.home.put("answer", json.dumps(answer).encode())

    def _is_known(self, rank: int, life: str) -> bool:
        known = self.guests.get(rank)
        if known is None or known["life"] == life:
            return known is not None
        # All others hear that the old one is gone before the new one may come among them.
        return rank in self.came and not self.presence.was_told_everywhere(rank)

    def _counts_for(self, rank: int) -> dict[str, int]:
        """The next meetings of one that was started again: those that wait for it, or those to come."""
        waiting = {
            line: host.number for line, host in self.open.items() if rank not in host.who_came()
        }
        return {**self.next, **waiting}

    def heard(self, rank: int) -> None:
        """It has spoken in a session of ours: it has read our answer, and lives."""
        if rank in self.guests:
            self.came.add(rank)
            self.presence.know(rank, self.guests[rank])

    def end(self, error: BaseException | None) -> None:
        with suppress(CheckpointError):
            for line in list(self.kept):
                self.forget(line)
            if error is not None:
                return  # the others come to hear why
            for name in self.home.names():
                if name.startswith(("left-", "alive-")):  # nobody waits for anybody any more
                    self.home.delete(name)
            if _json(self.home.get("answer")).get("host", {}).get("life") == self.presence.life:
                self.home.delete("answer")

    def all_came(self, line: str) -> None:
        """All have heard what became of the meetings before this one."""
        self.forget(line)
        with self.lock:
            lives = {rank: self.presence.life_of(rank) for rank in self._answers}
            have_read = all(
                life is not None and life.life == self._answers[rank][0]
                for rank, life in lives.items()
            )
            if self._answers and have_read:
                self._answers.clear()
                self.home.delete("answer")

    def forget(self, line: str) -> None:
        for session in self.kept.pop(line, []):
            remove_parts(self.backend, session)


class _Host(FileMailbox):
    """Rank 0's side of a meeting."""

    def __init__(self, member: _HostMember, line: str, number: int) -> None:
        super().__init__(member, member.presence.life, line, number)
        self._host, self._line, self.number = member, line, number
        self._tended_s = 0.0
        begin(member.backend, self._session, step=None, name="main", bases=())

    def get(self, key: str) -> bytes | None:
        data, rank = super().get(key), key.rpartition("-")[2]
        if data is not None and rank.isdecimal():
            self._host.heard(int(rank))
            self._watch.spoke(int(rank))
        return data

    def tend(self) -> None:
        # Once all have come, a hello can only be that of one that was started again.
        pause_s = _TEND_S if len(self._host.came) < self._host.size - 1 else LOOK_S
        if self._host.size > 1 and time.monotonic() - self._tended_s >= pause_s:
            self._tended_s = time.monotonic()
            self._host.answer()

    def who_came(self) -> set[int]:
        said = (name.rpartition("-") for name in self._files.names())
        return {int(rank) for what, _, rank in said if what != "bye" and rank.isdecimal()}

    def close(self) -> None:
        host, presence, everyone = self._host, self._host.presence, set(range(1, self._host.size))
        with host.lock:
            if host.open.get(self._line) is self:
                del host.open[self._line]
        try:
            came = self.who_came() - {0} if everyone else set()
            presence.saw(sorted(came))
            reads = sorted(rank for rank in came if not presence.was_told(rank))
            byes = [f"bye-{rank}" for rank in reads]
            heard = not byes or wait_until(lambda: self.has(byes), CLOSE_S, self.tend)
            comes = {rank for rank in everyone - came if not presence.was_told(rank)}
            if heard and not comes:
                end(host.backend, self._session)
                if everyone and came == everyone:
                    host.all_came(self._line)
                return
            # No open save any more, which a collector would wait for: an answer, for who is late.
            host.backend.delete(open_key(self._session))
            host.kept.setdefault(self._line, []).append(self._session)
        finally:
            deactivate(self._session)  # what it leaves is cleaned by the next save


# -- the others ----------------------------------------------------------------------------------


class _GuestMember(_Member):
    """Another rank."""

    host: str | None = None
    """The life of rank 0."""

    def end(self, error: BaseException | None) -> None:
        self.host = None

    def meet(self, line: str, timeout_s: float) -> _Guest:
        number = self.number(line)
        if self.host is None or self.presence.was_told_everywhere(0):
            counts = self._introduce(timeout_s)
            if counts is not None:
                self.next = counts
                number = self.number(line)
        assert self.host is not None
        return _Guest(self, self.host, line, number)

    def _introduce(self, timeout_s: float) -> dict[str, int] | None:
        """Find rank 0; None if both have counted from the beginning.

        Raises:
            ConflictError: kind `conflict-rank-late`, or `conflict-rank-gone`: the one that this rank
                knew, and no other came in its stead.
        """
        hello = f"hello-{self.rank}-{self.presence.life}"
        for name in self.home.names(f"hello-{self.rank}-"):
            self.home.delete(name)  # of an earlier life
        said = {**self.presence.facts(), "has_met": self.host is not None}
        self.home.put(hello, json.dumps(said).encode())
        answer: list[Mapping[str, Any]] = []
        gone: list[Gone] = []
        watch = Watch(self.presence)

        def is_over() -> bool:
            found = _json(self.home.get("answer"))
            with suppress(KeyError, TypeError, IndexError):
                if found["ranks"][str(self.rank)][0] == self.presence.life:
                    answer.append(found)
                    return True
            gone.extend(watch.gone([0]))
            return bool(gone)

        try:
            wait_until(is_over, timeout_s)
        finally:
            with suppress(CheckpointError):
                self.home.delete(hello)
        if gone:
            raise gone_error(gone)
        if not answer:
            raise late_error([0], timeout_s)
        facts = answer[0]["host"]
        self.host = str(facts["life"])
        self.presence.know(0, facts)
        counts = answer[0]["ranks"][str(self.rank)][1]
        return None if counts is None else {str(line): int(n) for line, n in counts.items()}


class _Guest(FileMailbox):
    """Another rank's side of a meeting."""

    def __init__(self, member: _GuestMember, host: str, line: str, number: int) -> None:
        super().__init__(member, host, line, number)
        self._mine: list[str] = []
        self._watch.spoke(0)

    def put(self, key: str, data: bytes) -> None:
        self._mine.append(key)
        super().put(key, data)

    def close(self) -> None:
        presence = self._member.presence
        with suppress(CheckpointError):
            if not presence.was_told(0):
                presence.saw([0])
                self._files.put(f"bye-{self._member.rank}", b"")
                return
            for key in self._mine:  # nobody else will clean up
                self._files.delete(key)


_members: dict[tuple[int, str, str, int], _Member] = {}
_lock = threading.Lock()
