"""A run resumed at any step equals one that was never interrupted, bit for bit.

Shuffled loader with workers, dropout, batch norm, gradient accumulation and a schedule; fresh
objects and scrambled generators stand for the new process (`test_resume` starts real ones).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ckptfmt.torch as ckt

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

STEPS, ACCUMULATE = 20, 2
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=STEPS + 1),
    "SGD with momentum": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 16)],
        [4],
    ),
    "Adafactor": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
}


class Rows(torch.utils.data.Dataset[Any]):
    """Rows that tell their position."""

    def __len__(self) -> int:
        return 36

    def __getitem__(self, position: int) -> Any:
        return torch.full((6,), position / 36.0), torch.tensor(position % 3)


class Run:
    """One training job: everything that it needs stands in `tree`."""

    def __init__(self, kind: str, seed: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3)
        )
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.schedule = SCHEDULES[kind](self.optimizer)
        self.loader = StatefulDataLoader(Rows(), batch_size=3, shuffle=True, num_workers=2)
        self.losses: list[float] = []
        self.tree: dict[str, Any] = {
            "rng": ckt.rng_state(),  # first: it is read and set last, wherever it stands
            "model": self.model,
            "opt": self.optimizer,
            "sched": self.schedule,
            "data": self.loader,
            "losses": self.losses,
        }

    def batches(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train(self, start: int, save: Callable[[int], None] = lambda step: None) -> None:
        batches = self.batches()
        for step in range(start, STEPS):
            self.optimizer.zero_grad()
            total = 0.0
            for _ in range(ACCUMULATE):
                x, y = next(batches)
                noise = torch.from_numpy(np.random.rand(*x.shape)).float() * random.random()
                loss = nn.functional.cross_entropy(self.model(x + noise), y) / ACCUMULATE
                loss.backward()
                total += loss.item()
            self.optimizer.step()
            self.schedule.step()
            self.tree["losses"].append((total, *self.schedule.get_last_lr()))
            save(step + 1)

    def end(self) -> Any:
        draws = [torch.rand(2).tolist(), random.random(), np.random.rand()]
        state = self.optimizer.state_dict()["state"]
        tensors = [*self.model.state_dict().values()]
        tensors += [v for entry in state.values() for v in entry.values() if torch.is_tensor(v)]
        return [
            self.tree["losses"],
            draws,
            [(str(t.dtype), t.detach().contiguous().view(-1).tolist()) for t in tensors],
        ]


def check(kind: str, kills: list[int], root: Path) -> None:
    pytest.importorskip("torchdata")
    whole = Run(kind, 0)
    whole.train(0)
    expected = whole.end()
    saving = Run(kind, 0)
    saving.train(0, lambda step: void(ckt.save(saving.tree, root, step=step)))
    assert saving.end() == expected  # a save draws nothing and changes nothing
    for step in kills:
        resumed = Run(kind, 1000 + step)
        start = ckt.restore(resumed.tree, root, step=step).step
        resumed.train(start)
        assert resumed.end() == expected, f"resumed at step {step}"


def void(value: object) -> None:
    """For a callback that returns nothing."""


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_run_equals_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    check(kind, [2, 6], tmp_path)  # 6: an epoch has 12 batches, so this is its end


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_does_so_at_every_kill_point(kind: str, tmp_path: Path) -> None:
    check(kind, list(range(1, STEPS + 1)), tmp_path)
