"""A model in shards: saved by several processes through torch.distributed.checkpoint, resumed by others.

    python docs/examples/dcp.py [folder]

Four processes on this machine train an FSDP2 model and save it in the background; two others load it.
A launcher (torchrun) takes the place of `launch` on a cluster.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptfmt
import ckptfmt.torch.dcp as cdcp


def build(world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def train(store: str, rank: int, world: int) -> None:
    model, optimizer = build(world)
    for number in range(3):
        step(model, optimizer, number)
    future = cdcp.async_save(state_of(model, optimizer), store, step=3)  # returns once it is copied
    step(model, optimizer, 3)  # training goes on
    info = future.result()
    if rank == 0:
        print(f"{world} processes saved {info.name}, {info.nbytes} bytes")


def resume(store: str, rank: int, world: int) -> None:
    model, optimizer = build(world)
    state = state_of(model, optimizer)
    report = cdcp.load(state, store)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    step(model, optimizer, report.step)
    if rank == 0:
        print(f"{world} processes went on from step {report.step}")


def enter(rank: int, world: int, meet: str, run: Callable[[int, int], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    run(rank, world)
    dist.destroy_process_group()


def launch(world: int, run: Callable[[int, int], None]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(enter, (world, f"{folder}/meet", run), nprocs=world)


def main() -> None:
    store = sys.argv[1] if len(sys.argv) > 1 else "dcp-example"
    launch(4, partial(train, store))
    launch(2, partial(resume, store))
    weights = ckptfmt.load(store, names="model")["model"]  # anybody opens it, whole
    print({name: array.shape for name, array in weights.items()})


if __name__ == "__main__":
    main()
