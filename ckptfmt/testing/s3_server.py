"""A real S3 server on loopback for tests: moto's, in a process of its own, in memory only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptfmt.errors import StorageError

_START_TIMEOUT_S = 30.0

_SERVE = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
app, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()
def one_at_a_time(environ, start):
    with lock:
        return app(environ, start)
run_simple("127.0.0.1", int(sys.argv[1]), one_at_a_time, threaded=True)
"""
"""moto looks whether an object is there, and then makes it: two threads may both make it. S3 does not."""


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where the server is, and how to reach it: `open_backend(url, storage_options=...)`."""

    endpoint: str
    bucket: str

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"

    @property
    def storage_options(self) -> Mapping[str, Any]:
        return {
            "key": "test",
            "secret": "testtest",
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }


@contextmanager
def serve_s3(bucket: str = "ckptfmt") -> Iterator[S3Server]:
    """Run a server with one bucket; it is stopped, and everything in it gone, on leaving.

    Raises:
        StorageError: kind `storage-test-server`: it did not come up (is moto[server] installed?).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _make_bucket(process, f"{endpoint}/{bucket}")
        yield S3Server(endpoint, bucket)
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _make_bucket(process: subprocess.Popen[bytes], url: str) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    # moto takes unsigned requests; a date makes it take this one for S3.
    request = urllib.request.Request(
        url,
        method="PUT",
        headers={"Authorization": "AWS4-HMAC-SHA256 Credential=test/x/us-east-1/s3/aws4_request"},
    )
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            with direct.open(request, timeout=5):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise StorageError(
                    "the S3 test server did not start",
                    reason="test-server",
                    found=str(error),
                    do='pip install "moto[server,s3]"',
                ) from error
        time.sleep(0.05)
