"""Events as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ckptfmt.events import Event
from ckptfmt.manager.hooks.plain import need

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Buckets of durations."""

_made: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def prometheus(*, job: str = "", registry: Any = None) -> Callable[[Event], None]:
    """Count events and measure saves, in a registry of `prometheus_client`.

    `ckptfmt_events_total{kind}`, `ckptfmt_stall_seconds`, `ckptfmt_durable_seconds` and
    `ckptfmt_restore_seconds` (histograms), `ckptfmt_written_bytes_total`, `ckptfmt_state_bytes`,
    `ckptfmt_last_step`, `ckptfmt_last_commit_timestamp_seconds`, `ckptfmt_mirror_pending`; each
    with the label `job`. Alert on `time() - ckptfmt_last_commit_timestamp_seconds`.

    Args:
        job: Tells managers of one process apart.
        registry: None: the library's own, which `start_http_server` serves.
    Raises:
        MissingExtraError: `prometheus_client` is not installed.
    """
    library = need("prometheus_client", "prometheus")
    chosen = library.REGISTRY if registry is None else registry
    made = _made.get(chosen)
    if made is None:
        made = _made[chosen] = _metrics(library, chosen)  # a registry takes each name once
    of = {name: metric for name, metric in made.items() if name != "events"}
    mine = {name: metric.labels(job=job) for name, metric in of.items()}
    events = made["events"]

    def hook(event: Event) -> None:
        events.labels(job=job, kind=event.kind).inc()
        if event.kind == "save.staged" and event.seconds is not None:
            mine["stall"].observe(event.seconds)
        elif event.kind == "save.commit":
            mine["durable"].observe(event.seconds or 0.0)
            mine["written"].inc(event.nbytes)
            mine["state"].set(event.total_nbytes)
            mine["step"].set(event.step or 0)
            mine["time"].set(event.time_s)
        elif event.kind == "restore.done" and event.seconds is not None:
            mine["restore"].observe(event.seconds)
        elif event.kind in ("mirror.done", "mirror.lag"):
            pending = event.data.get("pending", 0)
            mine["pending"].set(pending if isinstance(pending, int) else 0)

    return hook


def _metrics(library: Any, registry: Any) -> dict[str, Any]:
    def make(kind: str, name: str, text: str, **more: Any) -> Any:
        labels = more.pop("labels", ("job",))
        return getattr(library, kind)(f"ckptfmt_{name}", text, labels, registry=registry, **more)

    def seconds(name: str, text: str) -> Any:
        return make("Histogram", f"{name}_seconds", text, buckets=SECONDS)

    return {
        "events": make("Counter", "events", "Events by kind.", labels=("job", "kind")),
        "stall": seconds("stall", "How long a save held the training loop."),
        "durable": seconds("durable", "From the call of save until the checkpoint was durable."),
        "restore": seconds("restore", "How long a restore took."),
        "written": make("Counter", "written_bytes", "Bytes that saves wrote."),
        "state": make("Gauge", "state_bytes", "Bytes of the last checkpoint's state."),
        "step": make("Gauge", "last_step", "Step of the last checkpoint."),
        "time": make("Gauge", "last_commit_timestamp_seconds", "When the last one was durable."),
        "pending": make("Gauge", "mirror_pending", "Checkpoints that the mirror lacks."),
    }
