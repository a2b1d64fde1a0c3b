"""A run that is stopped and resumed in a fresh process ends bit for bit as one that was not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import ckptfmt.torch as ckt

TOTAL = 12

PROGRAM = """
import hashlib, json, random, sys
import numpy as np, torch
from torch import nn
import ckptfmt, ckptfmt.torch as ckt

root, stop, total = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)

def train(kind, schedule, store):
    torch.manual_seed(0); random.seed(0); np.random.seed(0)
    model = nn.Sequential(
        nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Dropout(0.4), nn.Linear(16, 20),
    )
    if kind == "sgd":
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    elif kind == "adamw":
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        opt = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.01)
    else:
        opt = torch.optim.RMSprop(model.parameters(), lr=0.01)
    sched = {
        "multistep": lambda: torch.optim.lr_scheduler.MultiStepLR(opt, [3, 3, 9], 0.5),
        "onecycle": lambda: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=30),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20),
    }[schedule]()
    state = {"model": model, "opt": opt, "sched": sched, "rng": ckt.rng_state(), "losses": []}
    try:
        start = ckt.restore(state, store).step
    except ckptfmt.NotFoundError:
        start = 0
    for step in range(start, stop):
        x = torch.randint(0, 20, (8, 4))
        y = torch.from_numpy(np.random.randint(0, 20, 8))
        loss = nn.functional.cross_entropy(model(x), y) * (1 + random.random())
        opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        state["losses"].append([loss.item(), *sched.get_last_lr()])
    if stop < total:
        ckt.save(state, store, step=stop)
    h = hashlib.sha256()
    for t in [*model.state_dict().values()] + [
        v for entry in opt.state.values() for v in entry.values() if isinstance(v, torch.Tensor)
    ]:
        h.update(t.detach().contiguous().numpy().tobytes())
    h.update(repr(state["losses"]).encode())
    return [h.hexdigest(), len(state["losses"]), torch.rand(3).tolist()]

print(json.dumps([train(*case, f"{root}/{case[0]}") for case in (
    ("adamw", "onecycle"), ("sgd", "multistep"), ("rmsprop", "cosine"))]))
"""


def run(root: Path, stop: int) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), str(stop), str(TOTAL)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", TOTAL)
    assert [steps for _, steps, _ in whole] == [TOTAL] * 3
    for stop in (1, 7):
        run(tmp_path / "cut", stop)
    assert run(tmp_path / "cut", TOTAL) == whole


def test_a_gradient_scaler_continues(tmp_path: Path) -> None:
    def build() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = build()

    def advance(scaler: Any, times: int) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    advance(scaler, 4)
    ckt.save({"scaler": scaler}, tmp_path / "s")
    fresh = build()
    ckt.restore({"scaler": fresh}, tmp_path / "s")
    assert fresh.state_dict() == scaler.state_dict()
    advance(scaler, 3)
    advance(fresh, 3)
    assert fresh.get_scale() == scaler.get_scale()


class Ema:
    """A user's object with tensors in its state."""

    def __init__(self, module: Any) -> None:
        self.shadow = {k: v.clone() for k, v in module.state_dict().items()}
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state["shadow"].items():
            self.shadow[key].copy_(value)
        self.count = state["count"]


def test_a_users_object_gets_torch_tensors_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, target = Ema(nn.Linear(2, 2)), Ema(nn.Linear(2, 2))
    saved.count = 3
    ckt.save({"ema": saved}, tmp_path / "s")
    ckt.restore({"ema": target}, tmp_path / "s")
    assert target.count == 3
    for key, value in saved.shadow.items():
        assert torch.equal(target.shadow[key], value)


class Lazy:
    """Keeps tensors that it has not got when it is new, and NumPy arrays beside them."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_fresh_object_without_tensors_gets_the_kinds_that_were_saved(tmp_path: Path) -> None:
    saved, target = Lazy(), Lazy()
    image = torch.randn(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    saved.state = {
        "t": [torch.arange(3), {"h": torch.ones(2, dtype=torch.bfloat16)}],
        "n": np.arange(2),
        "image": image,
        "x": 1,
    }
    ckt.save({"lazy": saved}, tmp_path / "s")
    ckt.restore({"lazy": target}, tmp_path / "s")
    assert torch.equal(target.state["t"][0], torch.arange(3))
    assert target.state["t"][1]["h"].dtype == torch.bfloat16
    assert isinstance(target.state["n"], np.ndarray)
    assert torch.equal(target.state["image"], image)
    assert target.state["image"].stride() == image.stride()
    assert target.state["x"] == 1


def test_swa_models_and_their_scheduler_are_restored(tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {
            "model": model,
            "opt": optimizer,
            "swa": torch.optim.swa_utils.AveragedModel(model),
            "sched": torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05),
        }

    stored, target = build(0), build(1)
    stored["swa"].update_parameters(stored["model"])
    ckt.save(stored, tmp_path / "s")
    assert ckt.restore(target, tmp_path / "s").clean
    assert torch.equal(target["swa"].module.weight, stored["swa"].module.weight)
    assert int(target["swa"].n_averaged) == 1


def test_a_loss_that_has_its_graph_is_a_metric(tmp_path: Path) -> None:
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    info = ckt.save({"w": torch.ones(1)}, tmp_path, metrics={"loss": loss})  # warnings are errors
    assert info.metrics == {"loss": 4.0}
