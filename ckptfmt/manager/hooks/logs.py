"""Events as records of the standard library's logging."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckptfmt.events import Event
from ckptfmt.manager.hooks.plain import TROUBLE, as_plain


def log(
    logger: str | logging.Logger = "ckptfmt.events", level: int = logging.INFO
) -> Callable[[Event], None]:
    """A record for each event: trouble as WARNING, with an error as ERROR, the rest at `level`.

    The text is for people; `record.ckptfmt` is the event as plain values, for a JSON formatter.
    """
    chosen = logging.getLogger(logger) if isinstance(logger, str) else logger

    def hook(event: Event) -> None:
        of = max(level, logging.WARNING) if event.kind in TROUBLE else level
        if event.error is not None:
            of = logging.ERROR
        chosen.log(of, "%s", _sentence(event), extra={"ckptfmt": as_plain(event)})

    return hook


def _sentence(event: Event) -> str:
    parts = [event.kind]
    if event.checkpoint is not None:
        parts.append(event.checkpoint)
    elif event.step is not None:
        parts.append(f"step {event.step}")
    if event.seconds is not None:
        parts.append(f"in {event.seconds:.3g} s")
    if event.nbytes or event.total_nbytes:
        parts.append(f"{event.nbytes:,} of {event.total_nbytes:,} bytes written")
    parts += [f"{key}={value}" for key, value in event.data.items()]
    if event.error is not None:
        parts.append(f"{type(event.error).__name__}: {event.error}")
    return " ".join(parts)
