"""Checkpoints at an MLflow run: where they are, what they measured, what they came from."""

from __future__ import annotations

from typing import Any

from ckptfmt.engine import Store, parse_where
from ckptfmt.errors import NotFoundError
from ckptfmt.events import Event
from ckptfmt.manager.hooks.delivery import Delivery
from ckptfmt.manager.hooks.plain import as_plain, need, numbers
from ckptfmt.types import StrPath

POINTER = "ckptfmt.checkpoint"
RESUMED = "ckptfmt.resumed_from"
_KINDS = ("save.commit", "restore.done", "delete")


def mlflow(store: StrPath | Store, *, run_id: str, client: Any = None) -> Delivery:
    """Log at each commit, in the background: the metrics, by step; a tag `ckptfmt.checkpoint` that
    points at the newest; an artifact `ckptfmt/<checkpoint>.json` with what it came from. No tensor
    is copied: a pointer costs nothing.

    Args:
        store: That of the manager.
        run_id: Of a run that exists.
        client: An `MlflowClient`; None: one of the tracking server in force.
    Raises:
        MissingExtraError: MLflow is not installed.
    """
    chosen = need("mlflow", "mlflow").MlflowClient() if client is None else client
    url = parse_where(store)[0].url
    before: list[str] = []

    def deliver(event: Event) -> None:
        if event.checkpoint is None or "url" in event.data:
            return  # the mirror's: this store still has it
        pointer = f"{url}@{event.checkpoint}"
        if event.kind == "delete":
            chosen.set_tag(run_id, f"ckptfmt.deleted.{event.checkpoint}", str(event.data["reason"]))
            return
        if event.kind == "restore.done":
            chosen.set_tag(run_id, RESUMED, pointer)
        else:
            _committed(chosen, run_id, event, {"checkpoint": pointer, "parent": before[-1:]})
            chosen.set_tag(run_id, POINTER, pointer)
        before[:] = [pointer]

    return Delivery(deliver, "MLflow", _KINDS)


def _committed(client: Any, run_id: str, event: Event, lineage: dict[str, Any]) -> None:
    when_ms = round(event.time_s * 1000)
    measured = {
        "durable_s": event.seconds or 0.0,
        "written_nbytes": float(event.nbytes),
        "state_nbytes": float(event.total_nbytes),
        **numbers(event),
    }
    for name, value in measured.items():
        client.log_metric(run_id, f"ckptfmt.{name}", value, timestamp=when_ms, step=event.step or 0)
    parent = lineage.pop("parent")
    document = {**lineage, "parent": parent[0] if parent else None, "event": as_plain(event)}
    client.log_dict(run_id, document, f"ckptfmt/{event.checkpoint}.json")


def mlflow_checkpoint(run_id: str, *, client: Any = None) -> str:
    """Where the newest checkpoint of a run is, as `ckptfmt.restore` and `load` take it.

    Raises:
        MissingExtraError: MLflow is not installed.
        NotFoundError: The run has none.
    """
    chosen = need("mlflow", "mlflow").MlflowClient() if client is None else client
    pointer = chosen.get_run(run_id).data.tags.get(POINTER)
    if pointer is None:
        raise NotFoundError(
            "no checkpoint is logged at this run",
            reason="mlflow",
            where=run_id,
            expected=f"the tag {POINTER}",
            do="give hooks.mlflow(store, run_id=...) to the Manager that trains",
        )
    return str(pointer)
