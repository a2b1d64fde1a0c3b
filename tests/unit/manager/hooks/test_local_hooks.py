"""Hooks that need nothing else: log, lines in a file, webhook, command; and what a bad one costs."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Event, Manager, StorageError, UsageError, hooks


def run(folder: Path, *chosen: Any, steps: int = 3, **options: Any) -> None:
    with Manager(folder, hooks=chosen, **options) as manager:
        for step in range(1, steps + 1):
            state = {"w": np.full(5000, step, np.float32)}
            manager.save(state, step=step, metrics={"loss": 1 / step})


# -- what a hook can cost ---------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_hooks_that_fail_lose_no_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    def raises(_: Event) -> None:
        raise RuntimeError("a hook's own trouble")

    def leaves(_: Event) -> None:
        raise SystemExit(3)

    seen: list[str] = []
    run(tmp_path, raises, lambda e: seen.append(e.kind), asynchronous=asynchronous)
    assert ckptfmt.Store(tmp_path).steps() == [1, 2, 3]
    assert seen.count("save.commit") == 3
    with pytest.raises(SystemExit):
        run(tmp_path / "b", leaves)  # a hook that ends the program ends it, not in silence


def test_a_hook_that_ends_its_thread_does_not_stop_the_cleaning_up(tmp_path: Path) -> None:
    def leaves(event: Event) -> None:
        if event.kind == "save.commit":
            sys.exit("as a command-line library does")

    run(tmp_path, leaves, keep=1)
    assert ckptfmt.Store(tmp_path).steps() == [3]


def test_a_full_disk_under_the_event_file_loses_no_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, hooks.jsonl("/dev/full"))
    assert ckptfmt.Store(tmp_path).steps() == [1, 2, 3]


# -- log --------------------------------------------------------------------------------------------


def test_log_has_sentences_and_plain_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ckptfmt.events"):
        run(tmp_path, hooks.log(), steps=1)
        hooks.log()(Event("save.skipped", 1.0, "step-2", 2))
        hooks.log()(Event("save.error", 1.0, "step-3", 3, error=OSError("no disk")))
    records = [r for r in caplog.records if r.name == "ckptfmt.events"]
    commit = next(r for r in records if r.getMessage().startswith("save.commit"))
    assert commit.__dict__["ckptfmt"]["data"]["loss"] == 1.0
    assert "bytes written" in commit.getMessage()
    assert commit.levelno == logging.INFO
    assert [r.levelno for r in records[-2:]] == [logging.WARNING, logging.ERROR]
    assert "no disk" in records[-1].getMessage()


# -- lines ------------------------------------------------------------------------------------------


def test_event_file_tells_of_all_runs_and_lies_in_the_store(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    run(tmp_path, hooks.jsonl(path), steps=2, keep=1)
    with Manager(tmp_path, hooks=[hooks.jsonl(path)]) as manager:
        manager.restore({"w": np.zeros(5000, np.float32)})
    events = hooks.read_jsonl(path)
    assert [e["kind"] for e in events if e["kind"] != "save.staged"] == [
        *["save.start", "save.commit"] * 2,
        *["delete", "retention", "restore.start", "restore.done"],
    ]
    assert events[-1]["step"] == 2
    assert ckptfmt.Store(tmp_path).verify().ok
    assert path.exists()


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    hook = hooks.jsonl(path)
    hook(Event("save.start", 1.0, step=1))
    with path.open("ab") as file:
        file.write(b'{"kind":"save.com')
    hook(Event("save.commit", 2.0, step=2))
    assert [(e["kind"], e["step"]) for e in hooks.read_jsonl(path)] == [
        ("save.start", 1),
        ("save.commit", 2),
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"kind":"alarm"}',
        '{"kind":7,"time_s":1}',
        '{"kind":"alarm","time_s":NaN}',
        '{"kind":"alarm","time_s":1e300}',
        '{"kind":"alarm","time_s":"today"}',
        '{"kind":"save.commit","time_s":1,"checkpoint":5}',
        '{"kind":"save.commit","time_s":1,"checkpoint":"x","data":3}',
        '{"kind":"save.commit","time_s":1,"checkpoint":"x","seconds":"5"}',
        '["kind"]',
    ],
)
def test_lines_that_are_no_events_are_left_out(tmp_path: Path, line: str) -> None:
    """Whoever shares the file, or edits it, breaks neither `ckptfmt watch` nor `report`."""
    path = tmp_path / "events.jsonl"
    hooks.jsonl(path)(Event("alarm", 1.0))
    with path.open("a") as file:
        file.write(line + "\n")
    hooks.jsonl(path)(Event("preempt", 2.0))
    assert [event["kind"] for event in hooks.read_jsonl(path)] == ["alarm", "preempt"]


def test_an_event_file_in_the_place_of_a_store_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "run"):
        with pytest.raises(UsageError, match=r"write .*events\.jsonl"):
            hooks.jsonl(path)
    assert list(tmp_path.iterdir()) == []


def test_every_value_becomes_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    error = StorageError("no room", reason="full", where="x", do="make room")
    data = {"loss": float("nan"), "top": float("inf"), "many": (1, 2), "what": Path("x"), "ü": "ß"}
    hooks.jsonl(path)(Event("save.error", 1.0, error=error, data=data))
    event = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(text))
    assert event["data"] == {"loss": "nan", "top": "inf", "many": [1, 2], "what": "x", "ü": "ß"}
    assert event["error"]["kind"] == "storage-full"


def _write_many(path: str, who: int) -> None:
    hook = hooks.jsonl(path)
    for number in range(200):
        hook(Event("save.commit", float(number), step=number, data={"who": who, "pad": "x" * 500}))


def test_processes_share_a_file_without_tearing_lines(tmp_path: Path) -> None:
    path = str(tmp_path / "events.jsonl")
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write_many, args=(path, who)) for who in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events = hooks.read_jsonl(path)
    for who in range(3):
        assert [e["step"] for e in events if e["data"]["who"] == who] == list(range(200))


# -- webhook and command ----------------------------------------------------------------------------


class Receiver:
    """A server on loopback that fails as often as it is told."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.failures = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.failures:
                    receiver.failures -= 1
                    self.send_error(503)
                    return
                receiver.events.append(json.loads(body))
                receiver.tokens.append(self.headers["Authorization"])
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/events"
        self.thread = threading.Thread(target=self.server.serve_forever)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    made.thread.start()
    yield made
    made.server.shutdown()
    made.thread.join()
    made.server.server_close()


def test_webhook_delivers_in_order_and_once(tmp_path: Path, receiver: Receiver) -> None:
    receiver.failures = 1
    hook = hooks.webhook(receiver.url, kinds=["save.commit"], headers={"Authorization": "token"})
    run(tmp_path, hook)
    assert hook.close(30)  # the first was refused, and then given up, for nobody waits at an exit
    hook = hooks.webhook(receiver.url, kinds=["save.commit"], headers={"Authorization": "token"})
    run(tmp_path / "b", hook)
    assert hook.close(30)
    steps = [event["step"] for event in receiver.events]
    assert steps[-3:] == [1, 2, 3]
    assert steps[:-3] in ([2, 3], [1, 2, 3])
    assert set(receiver.tokens) == {"token"}


def test_a_forked_process_leaves_its_parent_s_events_to_it(receiver: Receiver) -> None:
    hook = hooks.webhook(receiver.url)
    hook._repeating.wake = lambda: None  # type: ignore[method-assign]  # nobody delivers yet
    hook(Event("alarm", 1.0))
    child = os.fork()
    if child == 0:
        del hook._repeating.wake
        hook(Event("preempt", 2.0))
        os._exit(0 if hook.close(30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del hook._repeating.wake
    assert hook.close(30)
    assert [event["kind"] for event in receiver.events] == ["preempt", "alarm"]


def test_webhook_that_nobody_answers_keeps_nobody_waiting(tmp_path: Path) -> None:
    hook = hooks.webhook("http://127.0.0.1:9/none", timeout_s=0.2)
    run(tmp_path, hook)
    assert ckptfmt.Store(tmp_path).steps() == [1, 2, 3]
    assert hook.close(30)
    assert hook.dropped > 0


def test_command_reads_the_event(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read())"
    hook = hooks.command([sys.executable, "-c", program], kinds=["save.commit"])
    run(tmp_path / "store", hook)
    assert hook.close(60)
    assert [json.loads(line)["step"] for line in out.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: hooks.webhook("ftp://x"),
        lambda: hooks.webhook("http://x", kinds="alarm"),
        lambda: hooks.command("rm -rf x"),
        lambda: hooks.command([]),
    ],
)
def test_hooks_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


def test_an_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prometheus_client", "opentelemetry.trace", "tensorboard.summary", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    rows: list[tuple[Callable[[], object], str]] = [
        (hooks.prometheus, "prometheus"),
        (hooks.opentelemetry, "opentelemetry"),
        (lambda: hooks.tensorboard(os.curdir), "tensorboard"),
        (lambda: hooks.mlflow("x", run_id="1"), "mlflow"),
    ]
    for make, extra in rows:
        with pytest.raises(ckptfmt.MissingExtraError, match=rf"ckptfmt\[{extra}\]"):
            make()
