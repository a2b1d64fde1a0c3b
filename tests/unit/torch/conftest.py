"""What the torch tests share: a small model, and a look at everything a restore might touch."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfmt


class Net(nn.Module):
    """Embedding tied to its head, a norm with buffers, dropout, a buffer that is not stored."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.mid = nn.Linear(width, width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.drop(self.norm(self.mid(self.embed(tokens)))))


def _make_net(seed: int, width: int = 8) -> Any:
    torch.manual_seed(seed)
    return Net(width)


def _step(model: Any, optimizer: Any) -> float:
    """One training step on data from the global generator."""
    tokens = torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def tensor_bytes(tensor: Any) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes())


def _frozen(value: Any) -> Any:
    """A value that compares equal only if every bit, dtype and shape below it is equal."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return ("meta", value.dtype, tuple(value.shape))
        return (value.dtype, tuple(value.shape), value.requires_grad, tensor_bytes(value))
    if isinstance(value, nn.Module):
        named = [*value.named_parameters(remove_duplicate=False)]
        named += [*value.named_buffers(remove_duplicate=False)]
        return [(name, id(t), 0 if t.is_meta else t.data_ptr(), _frozen(t)) for name, t in named]
    if isinstance(value, torch.optim.Optimizer):
        return _frozen(value.state_dict())
    if isinstance(value, dict):
        return [(key, _frozen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_frozen(item) for item in value]
    return copy.deepcopy(value)


@pytest.fixture(scope="session")
def make_net() -> Callable[..., Any]:
    return _make_net


@pytest.fixture(scope="session")
def train_step() -> Callable[..., float]:
    return _step


@pytest.fixture(scope="session")
def frozen() -> Callable[[Any], Any]:
    return _frozen


class Ranks:
    """Processes that form a gloo group for each job; started when the first test needs them."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[str]] = []
        self._jobs = 0

    def _start(self, count: int) -> None:
        script = str(Path(__file__).with_name("gloo_worker.py"))
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(ckptfmt.__file__).parents[1]),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        while len(self._children) < count:
            command = [sys.executable, script, str(len(self._children))]
            self._children.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )

    def answers(self, jobs: Path, job: str, world: int, **arguments: Any) -> list[dict[str, Any]]:
        """What each rank answered: `result`, or `error`, `text` and `notes`."""
        self._start(world)
        self._jobs += 1
        with tempfile.TemporaryDirectory() as folder:
            order = {
                "file": str(jobs),
                "job": job,
                "world": world,
                "meet": f"{folder}/{self._jobs}",
                "arguments": arguments,
            }
            for child in self._children[:world]:
                assert child.stdin is not None
                print(json.dumps(order), file=child.stdin, flush=True)
            made = []
            for rank, child in enumerate(self._children[:world]):
                assert child.stdout is not None
                line = child.stdout.readline()
                assert line, f"rank {rank} died in {job}"
                made.append(json.loads(line))
        return made

    def run(self, jobs: Path, job: str, world: int, **arguments: Any) -> list[Any]:
        """What each rank returned; no rank may fail."""
        made = self.answers(jobs, job, world, **arguments)
        for rank, one in enumerate(made):
            assert "error" not in one, f"rank {rank}:\n{one['trace']}"
        return [one["result"] for one in made]

    def close(self) -> None:
        for child in self._children:
            with child:
                child.kill()  # a rank that another left alone may wait for it


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Several ranks, as in a launch by torchrun."""
    made = Ranks()
    yield made
    made.close()
