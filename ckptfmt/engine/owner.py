"""Whose work this is: the process behind an open save or a running collection, dead or alive.

One promise: `Owner.is_dead` is true only where it is known. Spec: 08-protocol.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_active: set[tuple[int, str]] = set()
"""(pid, transaction or run) that this process itself has under way: what it no longer knows of is dead."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process behind an open save or a running collection. A fact the system lacks is None."""

    host: str | None = None
    boot_id: str | None = None
    pid_namespace: str | None = None
    pid: int | None = None
    start_time: int | None = None

    @staticmethod
    def here() -> Owner:
        pid = os.getpid()
        return Owner(
            host=os.uname().nodename if hasattr(os, "uname") else None,
            boot_id=_read_text("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_read_link("/proc/self/ns/pid"),
            pid=pid,
            start_time=_start_time(pid),
        )

    def to_json(self) -> dict[str, object]:
        return {
            "host": self.host,
            "boot_id": self.boot_id,
            "pid_namespace": self.pid_namespace,
            "pid": self.pid,
            "start_time": self.start_time,
        }

    @staticmethod
    def of_json(value: Mapping[str, object]) -> Owner:
        def text(key: str) -> str | None:
            found = value.get(key)
            return found if isinstance(found, str) else None

        def number(key: str) -> int | None:
            found = value.get(key)
            # A pid outside this range is no process, and kill(0) or kill(-1) mean whole groups.
            return found if type(found) is int and 0 < found < 1 << 62 else None

        return Owner(
            text("host"),
            text("boot_id"),
            text("pid_namespace"),
            number("pid"),
            number("start_time"),
        )

    def is_dead(self, token: str) -> bool:
        """True only where it is known: the same host, boot and pid namespace, and no such process.

        `token` is the transaction or run: the living process that no longer knows of it (a save that
        failed and could not clean up) has abandoned it too.
        """
        here = Owner.here()
        where = (self.host, self.boot_id, self.pid_namespace)
        if None in (*where, self.pid, self.start_time) or where != (
            here.host,
            here.boot_id,
            here.pid_namespace,
        ):
            return False
        assert self.pid is not None
        if (self.pid, self.start_time) == (here.pid, here.start_time):
            return (self.pid, token) not in _active
        return not _lives(self.pid, self.start_time)


def _read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip() or None
    except (OSError, ValueError):
        return None


def _read_link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third on: the second holds a name with any bytes."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 19 else None


def _start_time(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[19]) if fields is not None else None


def _lives(pid: int, start_time: int | None) -> bool:
    try:
        os.kill(pid, 0)  # the kernel's word: /proc may hide other users' processes (hidepid)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    fields = _stat_fields(pid)
    if fields is None:
        return True
    if int(fields[19]) != start_time:
        return False
    if fields[0] in ("Z", "X"):
        # Killed and not yet waited for; unless only its first thread has ended and others go on.
        try:
            return len(os.listdir(f"/proc/{pid}/task")) > 1
        except OSError:
            return False
    return True


def activate(token: str) -> None:
    """This process has the transaction or run `token` under way."""
    _active.add((os.getpid(), token))


def deactivate(token: str) -> None:
    _active.discard((os.getpid(), token))
