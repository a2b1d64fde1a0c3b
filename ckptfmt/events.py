"""The one stream of events: progress, hooks and reports all see these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened. `kind` is a verb of the data flow and a phase: `save.start`, `read`.

    Attributes:
        kind: What happened, `<verb>` for progress, `<verb>.<phase>` for a milestone.
        time_s: Wall-clock time, seconds since the epoch.
        checkpoint: The checkpoint's name, if one is concerned.
        step: Its step, if it has one.
        nbytes: Bytes done so far.
        total_nbytes: Bytes in all; 0 where unknown.
        seconds: Duration, where the event ends something.
        error: The error, where the event reports one.
        data: Anything else, plain values only.
    """

    kind: str
    time_s: float
    checkpoint: str | None = None
    step: int | None = None
    nbytes: int = 0
    total_nbytes: int = 0
    seconds: float | None = None
    error: BaseException | None = None
    data: Mapping[str, object] = field(default_factory=dict)


Progress = Callable[[Event], None] | bool
"""A callable that is given events, or True for a bar on stderr. Nothing is printed otherwise."""
