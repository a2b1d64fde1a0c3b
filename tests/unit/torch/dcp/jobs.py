"""What each rank does in the tests with several: see `gloo_worker.py`."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as Shard_
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ckptfmt.torch.dcp as cdcp
from ckptfmt.types import CheckpointInfo


def whole(seed: int) -> dict[str, Any]:
    """The state that all ranks hold together."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model": {
            "rows": normal(17, 6),
            "columns": normal(5, 9).bfloat16(),
            "grid": normal(8, 8),
            "few": normal(2, 3),
            "all": normal(4),
            "plain": normal(3, 3),
            "scalar": torch.tensor(float(seed)),
            "empty": torch.zeros(0, 4),
        },
        "list": [normal(2), {"deep": normal(12, 2)}],
        "optim": {
            "state": {0: {"step": torch.tensor(seed), "exp_avg": normal(17, 6)}},
            "param_groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.99), "params": [0]}],
        },
        "epoch": seed,
        "words": ["a", None, {"x": 1.5}],
    }


PLACEMENTS: dict[str, list[Placement]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "few": [Shard(0)],
    "all": [Replicate()],
    "deep": [Shard(0)],
    "exp_avg": [Shard(0)],
}


def _place(obj: Any, key: str, mesh: DeviceMesh, grid: DeviceMesh | None) -> Any:
    if isinstance(obj, dict):
        return {k: _place(item, str(k), mesh, grid) for k, item in obj.items()}
    if isinstance(obj, list):
        return [_place(item, str(at), mesh, grid) for at, item in enumerate(obj)]
    if not isinstance(obj, torch.Tensor):
        return obj
    if key == "grid" and grid is not None:
        return distribute_tensor(obj, grid, [Shard(0), Shard(1)])
    if key in PLACEMENTS:
        return distribute_tensor(obj, mesh, PLACEMENTS[key])
    return obj.clone()


def placed(seed: int, world: int) -> Any:
    """What this rank holds of it."""
    grid = init_device_mesh("cpu", (2, 2)) if world == 4 else None
    return _place(whole(seed), "", init_device_mesh("cpu", (world,)), grid)


def zeroed(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {key: zeroed(item) for key, item in obj.items()}
    if isinstance(obj, list):
        return [zeroed(item) for item in obj]
    return torch.zeros_like(obj) if isinstance(obj, torch.Tensor) else None


def flat(obj: Any, name: str = "") -> dict[str, Any]:
    """Text of everything, gathered from all ranks."""
    if isinstance(obj, dict):
        return {k: v for key, item in obj.items() for k, v in flat(item, f"{name}.{key}").items()}
    if isinstance(obj, list) and any(isinstance(i, dict | list | torch.Tensor) for i in obj):
        return {k: v for at, item in enumerate(obj) for k, v in flat(item, f"{name}.{at}").items()}
    if isinstance(obj, DTensor):
        obj = obj.full_tensor()
    if isinstance(obj, torch.Tensor):
        raw = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {name: f"{obj.dtype} {list(obj.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"}
    return {name: repr(obj)}


def told(info: CheckpointInfo) -> dict[str, Any]:
    return {"name": info.name, "written": info.written_nbytes, "nbytes": info.nbytes}


def save(rank: int, world: int, path: str, step: int, seed: int, torchs: bool) -> Any:
    state = placed(seed, world)
    if torchs:
        made = dcp.save(state, storage_writer=cdcp.CkptfmtWriter(path, step=step))
        return told(made.storage_data)
    return told(cdcp.save(state, path, step=step))


def load(rank: int, world: int, path: str, step: int, seed: int, torchs: bool) -> Any:
    """Everything of step `step`, from targets that held something else."""
    state = zeroed(placed(seed, world))
    if torchs:
        dcp.load(state, storage_reader=cdcp.CkptfmtReader(path, step=step))
    else:
        cdcp.load(state, path, step=step)
    return flat(state), flat(whole(seed))


def move(rank: int, world: int, path: str, step: int) -> Any:
    """Load at this number of ranks and save again as the next step."""
    state = zeroed(placed(step, world))
    cdcp.load(state, path, step=step)
    return told(cdcp.save(state, path, step=step + 1, bases=()))


# -- FSDP2 ---------------------------------------------------------------------------------------


def _model(seed: int, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * seed)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


def train_and_save(rank: int, world: int, path: str, background: bool) -> Any:
    model, optimizer = _model(1, world)
    _train(model, optimizer, 2)
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    expected = flat(state)
    if background:
        future = cdcp.async_save(state, path, step=2)
        _train(model, optimizer, 2)  # what is saved is what was there
        future.result()
    else:
        cdcp.save(state, path, step=2)
    return expected


def resume(rank: int, world: int, path: str) -> Any:
    model, optimizer = _model(2, world)
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    report = cdcp.load(state, path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    model_state, optim_state = get_state_dict(model, optimizer)
    return flat({"model": model_state, "optim": optim_state}), report.step, list(report.unexpected)


# -- errors --------------------------------------------------------------------------------------


class Breaks(DefaultSavePlanner):
    """Fails on one rank while it writes."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 2:
            raise OSError(28, "no space left on the third machine")
        return super().resolve_data(write_item)


def fail_in_write(rank: int, world: int, path: str, background: bool) -> Any:
    state = placed(1, world)
    if not background:
        return told(cdcp.save(state, path, step=9, planner=Breaks()))
    return told(cdcp.async_save(state, path, step=9, planner=Breaks()).result())


def fail_to_pack(rank: int, world: int, path: str) -> Any:
    state = {"fine": torch.ones(3), f"of {rank}": [1, {"x": threading.Lock()} if rank == 3 else 2]}
    return told(cdcp.save(state, path, step=9))


def open_saves(rank: int, world: int, path: str) -> Any:
    import os

    return os.listdir(f"{path}/parts") if os.path.isdir(f"{path}/parts") else []


def damaged(rank: int, world: int, path: str) -> Any:
    """A load that one rank cannot finish; what the targets hold afterwards."""
    state = zeroed(placed(1, world))
    before = flat(state)
    try:
        cdcp.load(state, path, step=1)
    except Exception as error:
        return type(error).__name__, str(error), flat(state) == before
    return "", "", False


# -- other ways ----------------------------------------------------------------------------------


def own_keys(rank: int, world: int, path: str, torchs: bool) -> Any:
    """Stages of a pipeline: each rank has layers of its own, and one list by parts."""
    state = {
        "model": {f"layer{rank}.weight": torch.full((3,), float(rank))},
        "rank": {rank: [rank, {"x": rank}]},
        "pair": {f"of{rank}": (torch.full((2,), rank), rank)},
    }
    planner = DefaultSavePlanner() if torchs else None
    return told(cdcp.save(state, path, step=1, planner=planner))


def without_collectives(rank: int, world: int, path: str) -> Any:
    state = {"w": torch.full((2,), float(rank)), "n": rank}
    dcp.save(state, storage_writer=cdcp.CkptfmtWriter(path, step=3), use_collectives=False)
    target: dict[str, Any] = {"w": torch.zeros(2), "n": -1}
    dcp.load(target, storage_reader=cdcp.CkptfmtReader(path, step=3))
    return target["w"].tolist(), target["n"]


def replicated(rank: int, world: int, path: str) -> Any:
    """Every rank has all of it."""
    generator = torch.Generator().manual_seed(0)
    state = {f"t{i}": torch.randn(50_000, generator=generator) for i in range(8)}
    return told(cdcp.save(state, path, step=1))


def agree(rank: int, world: int, path: str) -> Any:
    """All ranks load the checkpoint that the first one found, even if the latest changes."""
    state = {"n": 0}
    if rank == 0:
        report = cdcp.load(state, path)
    else:
        report = cdcp.load(state, f"{path}@1")
    return state["n"], report.step


def nothing_there(rank: int, world: int, path: str) -> Any:
    return cdcp.load({"n": 0}, path).step


def in_a_group(rank: int, world: int, path: str) -> Any:
    """Two of four ranks save and load, by a group of their own."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    info = cdcp.save({"w": torch.full((4,), 7.0)}, path, step=1, process_group=group)
    target = {"w": torch.zeros(4)}
    cdcp.load(target, path, process_group=group)
    return info.name, target["w"].tolist()


# -- the state dicts of torch's own planner tests --------------------------------------------------


def _sharded(rank: int, world: int, per_rank: int, *, filled: bool) -> ShardedTensor:
    """A ShardedTensor of 64 elements: shards of equal size, neighbours on one rank."""
    size = 64 // (world * per_rank)
    rows = [
        ShardMetadata([at * size], [size], f"rank:{at // per_rank}/cpu")
        for at in range(world * per_rank)
    ]
    mine = rows[rank * per_rank : (rank + 1) * per_rank]
    shards = [Shard_(torch.arange(64.0)[r.shard_offsets[0] :][:size] * filled, r) for r in mine]
    metadata = ShardedTensorMetadata(
        rows, torch.Size([64]), TensorProperties(torch.float32, torch.strided, False)
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)


def planner_state(rank: int, world: int, per_rank: int, *, filled: bool) -> dict[str, Any]:
    def tensor(*shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.rand(*shape, generator=generator) * filled

    return {
        "tensor": tensor(10),
        "value": [1, 2, 3] if filled else None,
        "st": _sharded(rank, world, per_rank, filled=filled),
        "nested": {
            "list": [tensor(2), {"deep": {"er": tensor(3, 4)}}],
            "st": _sharded(rank, world, 1, filled=filled),
            "object": {"n": None, "text": "t", "complex": 1j}
            if filled
            else {"n": 1, "text": "", "complex": 0},
        },
        "bytes": b"\0raw" if filled else b"",
        "module": nn.Linear(2, 3).state_dict(),
        "empty": tensor(0, 4),
    }


def _seen(state: Any) -> Any:
    if isinstance(state, ShardedTensor):
        return [(s.metadata.shard_offsets, s.tensor.tolist()) for s in state.local_shards()]
    if isinstance(state, torch.Tensor):
        return str(state.dtype), state.tolist()
    if isinstance(state, dict):
        return {key: _seen(item) for key, item in state.items()}
    return [_seen(item) for item in state] if isinstance(state, list) else repr(state)


def save_planner_state(rank: int, world: int, path: str, per_rank: int) -> Any:
    torch.manual_seed(0)
    state = planner_state(rank, world, per_rank, filled=True)
    dcp.save(state, storage_writer=cdcp.CkptfmtWriter(path, step=1), planner=DefaultSavePlanner())


def load_planner_state(rank: int, world: int, path: str, per_rank: int, torchs: bool) -> Any:
    torch.manual_seed(1)
    state = planner_state(rank, world, per_rank, filled=False)
    if torchs:
        dcp.load(state, storage_reader=cdcp.CkptfmtReader(path), planner=DefaultLoadPlanner())
    else:
        cdcp.load(state, path)
    torch.manual_seed(0)
    return repr(_seen(state)), repr(_seen(planner_state(rank, world, per_rank, filled=True)))
