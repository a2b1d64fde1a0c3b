"""Hooks that hand events to a library: each against the real one, where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Event, Manager, NotFoundError, hooks


def run(folder: Path, *chosen: Any, steps: int = 3) -> None:
    with Manager(folder, hooks=chosen) as manager:
        mine = {"w": np.zeros(5000, np.float32)}
        manager.restore(mine)
        for step in range(1, steps + 1):
            mine["w"] += 1
            manager.save(mine, step=step, metrics={"loss": 1 / step})


def test_prometheus_counts_and_measures(tmp_path: Path) -> None:
    library = pytest.importorskip("prometheus_client")
    registry = library.CollectorRegistry()
    run(tmp_path / "a", hooks.prometheus(job="a", registry=registry))
    # A second manager of the process uses the same registry.
    other = hooks.prometheus(job="b", registry=registry)
    other(Event("mirror.lag", 1.0, data={"pending": 7}))

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(f"ckptfmt_{name}", {"job": "a"} | labels)
        return found

    assert value("events_total", kind="save.commit") == 3
    assert value("stall_seconds_count") == value("durable_seconds_count") == 3
    assert value("last_step") == 3
    assert value("state_bytes") == 20_000
    assert (value("written_bytes_total") or 0) > 60_000
    assert value("mirror_pending", job="b") == 7
    assert b"ckptfmt_last_commit_timestamp_seconds" in library.generate_latest(registry)


def test_opentelemetry_spans_have_the_real_times(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    hook = hooks.opentelemetry(provider.get_tracer("test"))
    run(tmp_path, hook, steps=1)
    hook(Event("save.error", 10.0, "step-2", 2, seconds=4.0, error=OSError("no disk")))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    failed = spans["ckptfmt.save"]  # the later one
    assert (failed.start_time, failed.end_time) == (6_000_000_000, 10_000_000_000)
    assert failed.status.status_code.name == "ERROR"
    assert failed.events[0].attributes["exception.message"] == "no disk"
    names = [span.name for span in exporter.get_finished_spans()]
    assert names.count("ckptfmt.save") == 2
    saved = next(s for s in exporter.get_finished_spans() if s.name == "ckptfmt.save")
    assert saved.attributes["ckptfmt.step"] == 1
    assert saved.attributes["ckptfmt.data.loss"] == 1.0
    assert saved.end_time > saved.start_time


def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path / "store", hooks.tensorboard(tmp_path / "board"))
    found = EventAccumulator(str(tmp_path / "board"), {"tensors": 0})
    found.Reload()
    tags = set(found.Tags()["tensors"])
    assert {"ckptfmt/stall_s", "ckptfmt/durable_s", "ckptfmt/metrics/loss"} <= tags
    assert [e.step for e in found.Tensors("ckptfmt/metrics/loss")] == [1, 2, 3]


def test_any_writer_of_scalars_will_do(tmp_path: Path) -> None:
    class Writer:
        rows: list[tuple[str, float, int]] = []  # noqa: RUF012
        flushes = 0

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.rows.append((tag, value, step))

        def flush(self) -> None:
            self.flushes += 1

    writer = Writer()
    run(tmp_path, hooks.tensorboard(writer), steps=2)
    loss = [row[1:] for row in writer.rows if row[0] == "ckptfmt/metrics/loss"]
    assert loss == [(1.0, 1), (0.5, 2)]
    assert writer.flushes == 2


@pytest.mark.filterwarnings("ignore")  # of the library itself, about its own future
def test_mlflow_finds_the_checkpoint_by_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("mlflow")
    # The library calls its store of plain files old; any other needs a database beside it.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = library.MlflowClient((tmp_path / "runs").as_uri())
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "art").as_uri())
    run_id = client.create_run(experiment).info.run_id
    with pytest.raises(NotFoundError, match="no checkpoint is logged"):
        hooks.mlflow_checkpoint(run_id, client=client)
    hook = hooks.mlflow(tmp_path / "store", run_id=run_id, client=client)
    run(tmp_path / "store", hook)
    assert hook.close(60)
    tree = ckptfmt.load(hooks.mlflow_checkpoint(run_id, client=client))
    assert (tree["w"] == 3).all()
    assert [m.step for m in client.get_metric_history(run_id, "ckptfmt.loss")] == [1, 2, 3]
    name = sorted(path.path for path in client.list_artifacts(run_id, "ckptfmt"))[-1]
    document = json.loads(Path(client.download_artifacts(run_id, name)).read_text())
    assert document["parent"].endswith("@step-0000000000000002")


class Client:
    """What the hook asks of an MlflowClient, kept in memory."""

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.metrics: list[tuple[str, float, int]] = []
        self.documents: dict[str, dict[str, Any]] = {}

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.tags[key] = value

    def log_metric(self, run_id: str, key: str, value: float, timestamp: int, step: int) -> None:
        self.metrics.append((key, value, step))

    def log_dict(self, run_id: str, document: dict[str, Any], path: str) -> None:
        self.documents[path] = document


def test_lineage_goes_on_over_a_resume(tmp_path: Path) -> None:
    client = Client()
    for first in (1, 3):
        hook = hooks.mlflow(tmp_path, run_id="r", client=client)
        with Manager(tmp_path, hooks=[hook]) as manager:
            mine = {"w": np.zeros(50, np.float32)}
            manager.restore(mine)
            for step in (first, first + 1):
                manager.save(mine, step=step, metrics={"loss": 1.0})
        assert hook.close(60)
    assert client.tags["ckptfmt.checkpoint"].endswith("@step-0000000000000004")
    assert client.tags["ckptfmt.resumed_from"].endswith("@step-0000000000000002")
    assert [d["parent"] and d["parent"][-1] for d in client.documents.values()] == [None, *"123"]
    assert ("ckptfmt.loss", 1.0, 4) in client.metrics


def test_what_the_mirror_deletes_is_not_called_deleted() -> None:
    client = Client()
    hook = hooks.mlflow("memory://x", run_id="r", client=client)
    hook(Event("delete", 1.0, "step-1", 1, data={"reason": "old", "url": "s3://mirror"}))
    hook(Event("delete", 1.0, "step-2", 2, data={"reason": "old"}))
    assert hook.close(60)
    assert client.tags == {"ckptfmt.deleted.step-2": "old"}
