"""An Event as values that JSON has, and what is asked of an optional library."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptfmt.errors import MissingExtraError
from ckptfmt.events import Event

TROUBLE = frozenset(
    {"save.error", "save.skipped", "restore.rejected", "mirror.lag", "guard", "alarm"}
)
"""Kinds that a person should see."""


def as_plain(event: Event) -> dict[str, Any]:
    """The event's fields that say something, as values that JSON has.

    An error is `{"type", "kind", "message"}`; a number that JSON lacks is a text ("nan", "inf").
    """
    made: dict[str, Any] = {"kind": event.kind, "time_s": event.time_s}
    for name in ("checkpoint", "step", "seconds"):
        if getattr(event, name) is not None:
            made[name] = getattr(event, name)
    for name in ("nbytes", "total_nbytes"):
        if getattr(event, name):
            made[name] = getattr(event, name)
    if event.error is not None:
        made["error"] = {
            "type": type(event.error).__name__,
            "kind": getattr(event.error, "kind", ""),
            "message": str(event.error),
        }
    if event.data:
        made["data"] = event.data
    plain: dict[str, Any] = _plain(made)
    return plain


def as_json(event: Event) -> str:
    """One line of JSON, without its end."""
    return json.dumps(as_plain(event), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item) for item in value]
    return str(value)


def numbers(event: Event) -> dict[str, float]:
    """What of `data` is a number: at `save.commit`, the checkpoint's metrics and its stall."""
    return {
        key: float(value)
        for key, value in event.data.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def need(module: str, extra: str) -> Any:
    """Import an optional library.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            "this hook needs a library that is not installed",
            reason="hook",
            expected=module,
            found=str(error),
            do=f'pip install "ckptfmt[{extra}]"',
        ) from error
