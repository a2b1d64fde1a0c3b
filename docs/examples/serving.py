"""A server that takes new weights while it answers: no request fails, none sees half of a swap.

    python docs/examples/serving.py runs/a --at production --port 8000
    curl -d '{"x": [1, 2, 3, 4]}' http://127.0.0.1:8000/

`Watcher` follows the tag. What it makes of a checkpoint is one object, mapped from the files without a
copy and checked; a request takes `watcher.value` once and holds it until it has answered. The training
side publishes with `Store.tag("production", step)`, and may delete what it published before: the old
arrays live as long as a request holds them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

import ckptfmt


@dataclass(frozen=True)
class Model:
    """A linear layer, and which checkpoint it is of."""

    name: str
    weight: Any
    bias: Any

    def __call__(self, x: list[float]) -> list[float]:
        made: list[float] = (self.weight @ np.asarray(x, self.weight.dtype) + self.bias).tolist()
        return made


def load(checkpoint: ckptfmt.Checkpoint) -> Model:
    tree = checkpoint.load(names="model", mode="mmap")["model"]
    return Model(checkpoint.info.name, tree["weight"], tree["bias"])


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], current: ckptfmt.Watcher[Model]) -> None:
        super().__init__(address, Handler)
        self.current = current


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        model = self.server.current.value  # once: the whole answer is of one checkpoint
        try:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = {"y": model(json.loads(body)["x"]), "checkpoint": model.name}
        except (ValueError, KeyError, TypeError) as error:
            self.answer(400, {"error": str(error)})
            return
        self.answer(200, answer)

    def answer(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """A line for each request would be the slowest part of this server."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model that is replaced while it serves.")
    parser.add_argument("store", help="a directory or a URL")
    parser.add_argument("--at", default="production", help="a tag, a name, or latest")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    with (
        ckptfmt.Watcher(asked.store, at=asked.at, load=load, poll_s=1.0) as current,
        Server(("127.0.0.1", asked.port), current) as server,
    ):
        print(f"serving {current.name} on port {server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
