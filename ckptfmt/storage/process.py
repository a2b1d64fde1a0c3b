"""Processes: which one wrote a file under `tmp/`, and whether it is dead. Spec: 08-protocol.

One promise: `Process.has_ended` is true only where it is known.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

P = TypeVar("P", bound="Process")

_NAMESPACE = re.compile(r"pid:\[([0-9]+)\]")
_TEMPORARY = re.compile(
    r"tmp/(?:put|probe)-([0-9a-f]{32})-([0-9]{1,20})-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{16}"
    r"(?:-[abc])?"
)


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its machine. A fact the system lacks is None."""

    host: str | None = None
    boot_id: str | None = None
    pid_namespace: str | None = None
    pid: int | None = None
    start_time: int | None = None

    @classmethod
    def here(cls: type[P]) -> P:
        return cls(*_facts(os.getpid()))

    @property
    def is_here(self) -> bool:
        """It is known to be this process."""
        facts = _facts(os.getpid())
        return None not in facts and facts == (
            *(self.host, self.boot_id, self.pid_namespace),
            *(self.pid, self.start_time),
        )

    @property
    def is_on_this_machine(self) -> bool:
        """The kernel here knows it: the same host, boot and pid namespace."""
        facts = (self.host, self.boot_id, self.pid_namespace)
        is_known = None not in (*facts, self.pid, self.start_time)
        return is_known and facts == _facts(os.getpid())[:3]

    def has_ended(self) -> bool:
        """True only where it is known: on this machine, and no such process."""
        if not self.is_on_this_machine:
            return False
        assert self.pid is not None
        return not _lives(self.pid, self.start_time)


def temporary_name(kind: str) -> str:
    """A new name for a file under `tmp/`: it says which process writes it, where the system can.

    The boot id stands for the host too: no two kernels share one, and no two namespaces of one
    kernel share a number.
    """
    _, boot_id, namespace, pid, start_time = _facts(os.getpid())
    boot, match = (boot_id or "").replace("-", ""), _NAMESPACE.fullmatch(namespace or "")
    name = ""
    if match and start_time is not None:
        name = f"{kind}-{boot}-{match[1]}-{pid}-{start_time}-{os.urandom(8).hex()}"
    return name if _TEMPORARY.fullmatch(f"tmp/{name}") else f"{kind}-{os.urandom(16).hex()}"


def is_abandoned_temporary(key: str) -> bool:
    """Whether this is the key of a file that a process of this machine began and died over."""
    match = _TEMPORARY.fullmatch(key)
    if match is None:
        return False
    here = Process.here()
    if (here.boot_id or "").replace("-", "") != match[1]:
        return False
    writer = Process(here.host, here.boot_id, f"pid:[{match[2]}]", int(match[3]), int(match[4]))
    return writer.has_ended()


@lru_cache(maxsize=1)
def _facts(pid: int) -> tuple[str | None, str | None, str | None, int, int | None]:
    """Of this process: cached by its number, for a fork has another."""
    return (
        os.uname().nodename if hasattr(os, "uname") else None,
        _read_text("/proc/sys/kernel/random/boot_id"),
        _read_link("/proc/self/ns/pid"),
        pid,
        _start_time(pid),
    )


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
