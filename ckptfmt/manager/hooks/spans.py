"""Saves and restores as spans of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptfmt.events import Event
from ckptfmt.manager.hooks.plain import need

_SPANS = {
    "save.staged": "ckptfmt.save.stage",
    "save.commit": "ckptfmt.save",
    "save.error": "ckptfmt.save",
    "restore.done": "ckptfmt.restore",
    "mirror.done": "ckptfmt.mirror",
}


def opentelemetry(tracer: Any = None) -> Callable[[Event], None]:
    """A span for each save (`ckptfmt.save`, and its stall as `ckptfmt.save.stage`), restore and copy
    to a mirror, from its real start to its end; what else happens is a span of no length.

    Args:
        tracer: None: that of the global provider, named "ckptfmt".
    Raises:
        MissingExtraError: `opentelemetry-api` is not installed.
    """
    trace = need("opentelemetry.trace", "opentelemetry")
    chosen = tracer if tracer is not None else trace.get_tracer("ckptfmt")

    def hook(event: Event) -> None:
        if event.kind in ("save.start", "restore.start"):
            return  # the span that ends has the beginning
        end_ns = round(event.time_s * 1e9)
        span = chosen.start_span(
            _SPANS.get(event.kind, f"ckptfmt.{event.kind}"),
            start_time=end_ns - round((event.seconds or 0.0) * 1e9),
            attributes=_attributes(event),
        )
        if event.error is not None:
            span.record_exception(event.error, timestamp=end_ns)
            span.set_status(trace.Status(trace.StatusCode.ERROR, str(event.error)))
        span.end(end_time=end_ns)

    return hook


def _attributes(event: Event) -> dict[str, str | int | float | bool]:
    found: dict[str, Any] = {
        "ckptfmt.checkpoint": event.checkpoint,
        "ckptfmt.step": event.step,
        "ckptfmt.written_nbytes": event.nbytes or None,
        "ckptfmt.nbytes": event.total_nbytes or None,
    } | {f"ckptfmt.data.{key}": value for key, value in event.data.items()}
    return {key: value for key, value in found.items() if isinstance(value, str | int | float)}
