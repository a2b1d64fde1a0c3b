"""A Keras fit that is killed ends, when it is started again, as the one that nobody killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

POINTS = 20


class Server:
    """The process that has TensorFlow."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fit_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )

    def fit(self, folder: Path, out: Path, kill: int = 0) -> dict[str, Any] | None:
        """What it ended with; None: it was killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"folder": str(folder), "kill": kill, "out": str(out)}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if answer["signal"]:
            assert answer["signal"] == signal.SIGKILL
            return None
        found: dict[str, Any] = json.loads(out.read_text())
        return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    assert made.process.stdin is not None
    assert made.process.stdout is not None
    made.process.stdin.close()
    made.process.wait(timeout=60)
    made.process.stdout.close()


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    found = server.fit(folder / "backup", folder / "out")
    assert found is not None
    return found


def check(server: Server, whole: dict[str, Any], folder: Path, kill: int) -> int:
    """Kill it and start it again; how many batches were left to do."""
    folder.mkdir(exist_ok=True)
    assert server.fit(folder / "backup", folder / "out", kill) is None
    found = server.fit(folder / "backup", folder / "out")
    assert found is not None
    assert found["values"] == whole["values"], f"killed at point {kill}"
    assert found["history"] == whole["history"]
    assert found["batches"] == whole["batches"][-len(found["batches"]) :]
    return len(found["batches"])


def test_a_fit_that_was_killed_goes_on_bit_for_bit(
    server: Server, whole: dict[str, Any], tmp_path: Path
) -> None:
    left = check(server, whole, tmp_path, whole["points"] * 2 // 3)
    assert 0 < left < len(whole["batches"])


@pytest.mark.slow
def test_a_fit_goes_on_from_wherever_it_was_killed(
    server: Server, whole: dict[str, Any], tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    # A tenth less: how often the background asks for what differs a little from run to run.
    points = random.Random(seed).sample(range(1, whole["points"] * 9 // 10), POINTS)
    left = [check(server, whole, tmp_path / str(kill), kill) for kill in sorted(points)]
    assert len(set(left)) > 3, "all of them went on from the same few batches"


@pytest.mark.slow
def test_a_fit_that_is_killed_again_and_again_comes_to_the_same_end(
    server: Server, whole: dict[str, Any], tmp_path: Path
) -> None:
    found = None
    for step in range(40):
        found = server.fit(tmp_path / "backup", tmp_path / "out", whole["points"] // 3 + step)
        if found is not None:
            break
    assert found is not None
    assert found["values"] == whole["values"]
    assert found["history"] == whole["history"]
