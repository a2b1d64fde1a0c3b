"""What each rank does with its manager: see `gloo_worker.py`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptfmt.torch as ckt
from ckptfmt import ConflictError, Event, Manager, Preemption, when


def _state(world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    mesh = init_device_mesh("cpu", (world,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return {
        "model": net,
        "optimizer": torch.optim.AdamW(net.parameters(), lr=0.01),
        "rng": ckt.per_rank(ckt.rng_state()),
    }


def _train(state: dict[str, Any], step: int) -> None:
    net, optimizer = state["model"], state["optimizer"]
    optimizer.zero_grad()
    net(torch.randn(4, 6) + step).square().mean().backward()
    optimizer.step()


def _digest(state: dict[str, Any]) -> str:
    whole = [p.full_tensor() for p in state["model"].parameters()]
    moments = [m["exp_avg"].full_tensor() for m in state["optimizer"].state.values()]
    raw = b"".join(t.detach().numpy().tobytes() for t in [*whole, *moments])
    return hashlib.sha256(raw).hexdigest()


def train(rank: int, world: int, path: str, steps: int, told_at: int) -> Any:
    """Until `steps`, or the step at which rank 1 is told to go."""
    state, preemption, events = _state(world), Preemption(), list[str]()

    def hook(event: Event) -> None:
        events.append(event.kind)

    policy = when.every(steps=2) | when.every(minutes=1000)  # a clock: rank 0's
    with Manager(
        path, group="world", keep=2, save_when=policy, preemption=preemption, hooks=[hook]
    ) as manager:
        step = first = manager.restore(state).step
        while step < steps:
            _train(state, step)
            step += 1
            if (rank, step) == (1, told_at):
                preemption.request()
            verdict = manager.observe(step)
            manager.save(state, step=step, force=step == steps)
            if verdict.stop:
                break
    return first, step, _digest(state), "delete" in events


def fail(rank: int, world: int, path: str) -> Any:
    """Rank 1's loop ends by an error of its own; the others are told by whom, and why."""
    state = {"w": torch.zeros(3), "rng": ckt.per_rank(ckt.rng_state())}
    try:
        with Manager(path, group="world", save_when=2, preemption=Preemption()) as manager:
            for step in range(1, 6):
                if (rank, step) == (1, 4):
                    raise ZeroDivisionError("bad batch")
                manager.observe(step)
                manager.save(state, step=step)
    except (ZeroDivisionError, ConflictError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"
