"""A file of events: one line of JSON each, whole or not there, over all the runs of a job."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptfmt.errors import StorageError, UsageError
from ckptfmt.events import Event
from ckptfmt.manager.hooks.plain import as_json


def jsonl(path: str | os.PathLike[str]) -> Callable[[Event], None]:
    """Append each event to a file, as one line.

    A line is one `write` in append mode, so that several processes can share a file; it is opened
    for each event, so that it may be rotated or removed at any time. After a line that a crash or
    a full disk tore, the next one begins anew. A store ignores files that are not its own:
    `jsonl(folder / "events.jsonl")` beside the checkpoints is fine.

    Raises:
        UsageError: A folder is there, or nothing and the name has no ending: a file there would be in
            the way of a store.
        StorageError: When called: the line could not be written whole.
    """
    target = os.path.abspath(path)
    if os.path.isdir(target) or not (os.path.exists(target) or os.path.splitext(target)[1]):
        raise UsageError(
            "no file of events can be here",
            reason="event-file",
            where=target,
            found="a folder" if os.path.isdir(target) else "a name that may be a store's",
            do=f"write {os.path.join(os.fspath(path), 'events.jsonl')}",
        )

    def hook(event: Event) -> None:
        line = as_json(event).encode("utf-8", "surrogatepass") + b"\n"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        file = os.open(target, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            end = os.fstat(file).st_size
            if end and os.pread(file, 1, end - 1) != b"\n":
                line = b"\n" + line
            written = os.write(file, line)
        finally:
            os.close(file)
        if written != len(line):
            raise StorageError(
                "an event was written in part",
                reason="full",
                where=target,
                expected=f"{len(line)} bytes",
                found=f"{written} bytes",
                do="make room",
                errno=errno.ENOSPC,
            )

    return hook


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a file that `jsonl` wrote, in its order; torn lines, and those that somebody else
    wrote, are left out.

    Raises:
        FileNotFoundError: There is no such file.
    """
    events = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and _is_event(event):
            events.append(event)
    return events


_FIELDS = {
    "checkpoint": str,
    "step": int,
    "seconds": int | float,
    "nbytes": int,
    "total_nbytes": int,
    "error": dict,
    "data": dict,
}
_TIME_MAX_S = 253402300800.0  # the year 10000: no date is later


def _is_event(row: dict[str, Any]) -> bool:
    """Whether it is what `as_plain` makes."""
    time_s = row.get("time_s")
    return (
        isinstance(row.get("kind"), str)
        and isinstance(time_s, int | float)
        and 0 <= time_s < _TIME_MAX_S
        and all(isinstance(row[name], kind) for name, kind in _FIELDS.items() if name in row)
    )
