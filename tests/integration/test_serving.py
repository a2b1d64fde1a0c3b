"""docs/examples/serving.py under load: the weights are swapped, and nobody who asks notices."""

from __future__ import annotations

import http.client
import importlib.util
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Store, Watcher

EXAMPLE = Path(__file__).parents[2] / "docs/examples/serving.py"
SWAPS, CLIENTS, WIDE = 20, 3, 4_000


@pytest.fixture
def serving() -> Any:
    spec = importlib.util.spec_from_file_location("serving", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["serving"]


def publish(store: Store, step: int) -> None:
    """Every element says which step it is of: a torn answer would have two."""
    model = {"weight": np.full((2, WIDE), step, np.float64), "bias": np.full(2, step / 2)}
    ckptfmt.save({"model": model, "optimizer": np.zeros(3)}, store, step=step, durable=False)
    store.tag("production", step)


class Client:
    """Asks as fast as it is answered; what it asks for has one right answer per step."""

    def __init__(self, port: int, stop: threading.Event) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.stop, self.failed, self.served = stop, list[Any](), list[int]()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        body = json.dumps({"x": [1.0] + [0.0] * (WIDE - 2) + [1.0]})
        while not self.stop.is_set() and len(self.served) < 20_000:
            try:
                self.connection.request("POST", "/", body)
                answer = self.connection.getresponse()
                document = json.loads(answer.read())
                step = int(document["checkpoint"].removeprefix("step-"))
                if answer.status != 200 or document["y"] != [2.5 * step] * 2:
                    self.failed.append((answer.status, document))
                self.served.append(step)
            except Exception as error:
                self.failed.append(error)
                return
        self.connection.close()


def test_no_request_fails_and_none_is_torn_over_twenty_swaps(tmp_path: Path, serving: Any) -> None:
    store, stop = Store(tmp_path), threading.Event()
    publish(store, 1)
    with (
        Watcher(store, load=serving.load, poll_s=0.005) as current,
        serving.Server(("127.0.0.1", 0), current) as server,
    ):
        serve = threading.Thread(target=server.serve_forever)
        serve.start()
        clients = [Client(server.server_port, stop) for _ in range(CLIENTS)]
        try:
            for client in clients:
                client.thread.start()
            for step in range(2, SWAPS + 2):
                publish(store, step)
                store.delete(step - 1)
                store.gc(grace_s=0)
                # Until somebody was served by the new one: each swap happens under load.
                wait_for(lambda step=step: any(step in c.served[-50:] or c.failed for c in clients))
        finally:
            stop.set()
            for client in clients:
                client.thread.join()
            server.shutdown()
            serve.join()
    assert [client.failed for client in clients] == [[]] * CLIENTS
    assert {step for client in clients for step in client.served} >= set(range(2, SWAPS + 2))
    for client in clients:
        assert client.served == sorted(client.served)  # never back to an older one


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_request_that_makes_no_sense_is_answered(tmp_path: Path, serving: Any) -> None:
    publish(Store(tmp_path), 1)
    with (
        Watcher(tmp_path, load=serving.load) as current,
        serving.Server(("127.0.0.1", 0), current) as server,
    ):
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        for body in ("no JSON", "{}", '{"x": "a"}', "[]"):
            connection.request("POST", "/", body)
            answer = connection.getresponse()
            assert (answer.status, b"error" in answer.read()) == (400, True)
        connection.close()
        server.shutdown()
        thread.join()
