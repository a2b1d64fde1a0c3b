"""Whose work this is: the process behind an open save or a running collection, dead or alive.

One promise: `Owner.is_dead` is true only where it is known. Spec: 08-protocol.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ckptfmt.storage import Process

_active: set[tuple[int, str]] = set()
"""(pid, transaction or run) that this process itself has under way: what it no longer knows of is dead."""


@dataclass(frozen=True, slots=True)
class Owner(Process):
    """The process behind an open save or a running collection. A fact the system lacks is None."""

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
        if self.is_here:
            return (self.pid, token) not in _active
        return self.has_ended()


def activate(token: str) -> None:
    """This process has the transaction or run `token` under way."""
    _active.add((os.getpid(), token))


def deactivate(token: str) -> None:
    _active.discard((os.getpid(), token))
