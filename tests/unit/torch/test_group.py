"""Processes of torch.distributed that save and restore together: gloo on this machine."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptfmt
import ckptfmt.torch as ckt

TIMEOUT_S = 60.0
pytestmark = pytest.mark.filterwarnings("ignore")


def _child(call: Callable[..., Any], rank: int, size: int, port: int, args: Any, out: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        found = call(rank, size, *args)
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        found = f"{type(error).__name__}: {error}"
    out.put((rank, found))
    out.close()
    out.join_thread()
    os._exit(0)  # a group whose ranks are gone cannot be destroyed in order


def together(call: Callable[..., Any], size: int, *args: Any) -> dict[int, Any]:
    """What each rank returns, or its error; those that die say nothing."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port  # kept by this process, which outlives all of them
    processes = [
        context.Process(target=_child, args=(call, rank, size, port, args, out))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    for process in processes:
        process.join(180)
    while not out.empty():
        rank, value = out.get(timeout=5)
        found[rank] = value
    return found


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.BatchNorm1d(3))


def trained(sharded: bool, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    net = model()
    if sharded:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(steps):
        net(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def full(tree: Any) -> Any:
    """Plain tensors of a state dict, gathered from all ranks."""
    if isinstance(tree, dict):
        return {k: full(v) for k, v in tree.items()}
    if isinstance(tree, torch.Tensor):
        value = tree.full_tensor() if hasattr(tree, "full_tensor") else tree
        return value.detach().clone().numpy()
    return tree


def save_fsdp(rank: int, size: int, path: Path) -> Any:
    net, optimizer = trained(sharded=True)
    state = {
        "model": net,
        "optimizer": optimizer,
        "rng": ckt.per_rank({"seed": rank}),
        "step": 3,
    }
    info = ckt.save(state, path, step=3, group="world", timeout_s=TIMEOUT_S)
    return info.digest, full(net.state_dict()), full(optimizer.state_dict()["state"])


def restore_fsdp(rank: int, size: int, path: Path, meta: bool) -> Any:
    with torch.device("meta" if meta else "cpu"):
        net, optimizer = trained(sharded=True, steps=0 if meta else 1)
    if meta:  # moments go where their parameters are: those become real first
        ckt.restore({"model": net}, path, names="model", group="world")
    state = {"model": net, "optimizer": optimizer}
    report = ckt.restore(state, path, names=("model", "optimizer"), group="world")
    found = bool(report), full(net.state_dict()), full(optimizer.state_dict()["state"])
    net(torch.randn(4, 5)).sum().backward()  # the module works with what it got
    return found


def equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            equal(a[key], b[key])
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    else:
        assert a == b


@pytest.mark.slow
def test_fsdp2_and_adamw_are_saved_and_resharded_bit_for_bit(tmp_path: Path) -> None:
    saved = together(save_fsdp, 3, tmp_path / "run")
    assert sorted(saved) == [0, 1, 2], saved
    assert not isinstance(saved[0], str), saved
    _, weights, moments = saved[0]
    loaded = ckt.load(tmp_path / "run")
    equal({k: v.numpy() for k, v in loaded["model"].items()}, weights)
    assert loaded["rng"] == {str(r): {"seed": r} for r in range(3)}
    for name, entry in zip(loaded["optimizer"]["state"], moments.values(), strict=True):
        equal({k: v.numpy() for k, v in loaded["optimizer"]["state"][name].items()}, entry)
    assert ckptfmt.Store(tmp_path / "run").verify().ok
    for size, meta in ((2, False), (2, True), (1, False)):
        for rank, found in together(restore_fsdp, size, tmp_path / "run", meta).items():
            assert found[0] is True, (size, rank, found)
            equal(found[1], weights)
            equal(found[2], moments)


def save_ddp(rank: int, size: int, path: Path, differ: bool) -> Any:
    net = nn.parallel.DistributedDataParallel(model())
    if differ and rank == 1:
        with torch.no_grad():
            net.module[0].bias[2] += 1
    info = ckt.save({"m": net}, path, step=1, group=dist.group.WORLD, timeout_s=TIMEOUT_S)
    return info.written_nbytes


def test_the_functions_are_those_of_ckptfmt() -> None:
    assert (ckt.save, ckt.save_async, ckt.restore) == (
        ckptfmt.save,
        ckptfmt.save_async,
        ckptfmt.restore,
    )


def test_ddp_is_written_once_and_must_be_equal(tmp_path: Path) -> None:
    found = together(save_ddp, 2, tmp_path / "run", False)
    assert found[0] == found[1], found
    assert len(list((tmp_path / "run" / "data").iterdir())) == 2  # each rank wrote some of it
    alone = tmp_path / "alone"
    ckt.save({"m": model()}, alone, step=1)
    assert ckptfmt.open(tmp_path / "run").info.digest == ckptfmt.open(alone).info.digest
    for error in together(save_ddp, 2, tmp_path / "bad", True).values():
        assert "'m/0.bias': expected equal bytes" in error
        assert "ranks 0, 1" in error or "ranks 1, 0" in error
    assert ckptfmt.Store(tmp_path / "bad").names() == []


def die_in_the_middle(rank: int, size: int, path: Path, how: str) -> Any:
    dist.barrier()
    module: Any = importlib.import_module("ckptfmt.engine.group_save")
    if rank == 1 and how == "dies":
        module.write_part = lambda *_: os._exit(9)
    elif rank == 1:
        real = module.write_part

        def late(*part: Any) -> bytes:
            time.sleep(12)
            return bytes(real(*part))

        module.write_part = late
    return ckt.save({"m": model()}, path, step=1, group="world", timeout_s=4.0).name


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "is late"])
def test_a_rank_that_goes_missing_in_the_middle_is_named(tmp_path: Path, how: str) -> None:
    found = together(die_in_the_middle, 3, tmp_path, how)
    assert ("is gone: rank 1 (" if how == "dies" else "in time: rank 1") in found[0]
    assert found[2] == found[0]
    assert (1 in found) == (how == "is late")
    store = ckptfmt.Store(tmp_path)
    assert store.names() == []
    store.gc(grace_s=0)
    assert list((tmp_path / "data").iterdir()) == []
    assert [p for p in (tmp_path / "parts").rglob("*") if p.is_file()] == []


def placements(rank: int, size: int, path: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(7.0 * 5).reshape(7, 5)
    cases: dict[str, Sequence[Any]] = {
        "rows": (Shard(0), Replicate()),
        "both": (Shard(0), Shard(1)),
        "twice": (Shard(0), Shard(0)),
        "none": (Replicate(), Replicate()),
        "few": (Replicate(), Shard(1)),
    }
    tree: dict[str, Any] = {k: distribute_tensor(whole, mesh, p) for k, p in cases.items()}
    ckt.save(tree, path, step=1, group="world", timeout_s=TIMEOUT_S)
    fresh = {k: distribute_tensor(torch.zeros(7, 5), mesh, cases[k][::-1]) for k in cases}
    ckt.restore(fresh, path, group="world")
    same = all(torch.equal(t.full_tensor(), whole) for t in fresh.values())
    partial = DTensor.from_local(whole, mesh, [Partial(), Replicate()], run_check=False)
    try:
        ckt.save({"p": partial}, path, step=2, group="world", timeout_s=TIMEOUT_S)
        refused = ""
    except ckptfmt.UsageError as error:
        refused = str(error)
    return same, refused


@pytest.mark.slow
def test_placements_of_a_mesh_become_boxes(tmp_path: Path) -> None:
    found = together(placements, 4, tmp_path)
    for rank in range(4):
        assert not isinstance(found[rank], str), found
        same, refused = found[rank]
        assert same
        assert "placement" in refused
        assert "p" in refused
    whole = np.arange(35, dtype=np.float32).reshape(7, 5)
    for array in ckptfmt.load(tmp_path).values():
        np.testing.assert_array_equal(array, whole)


def two_dimensions(rank: int, size: int, path: Path) -> Any:
    """FSDP2 over tensor parallelism: strided shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 4))
        parallelize_module(made, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fully_shard(made, mesh=mesh["dp"])

    one, other = net(0), net(1)
    kinds = [str(p.placements) for p in one.parameters()]
    ckt.save({"m": one}, path, step=1, group="world", timeout_s=TIMEOUT_S)
    ckt.restore({"m": other}, path, group="world")
    return kinds, full(one.state_dict()), full(other.state_dict())


@pytest.mark.slow
def test_fsdp_over_tensor_parallelism_is_kept_bit_for_bit(tmp_path: Path) -> None:
    found = together(two_dimensions, 4, tmp_path)
    assert not isinstance(found[0], str), found
    kinds, weights, restored = found[0]
    assert any("Strided" in kind or "_S" in kind for kind in kinds), kinds
    equal(weights, restored)
    equal({k: v.numpy() for k, v in ckt.load(tmp_path)["m"].items()}, weights)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 4))
    equal({k: v.numpy() for k, v in plain.state_dict().items()}, weights)


def restore_badly(rank: int, size: int, path: Path) -> Any:
    w = torch.full((3,), -1.0)
    target = {"w": w if rank == 0 else torch.full((4,), -1.0)}
    try:
        ckt.restore(target, path, step=1, group="world")
    except ckptfmt.MismatchError as error:
        first = str(error)
    try:
        ckt.restore({"w": w}, path, step=1 + rank, group="world")
    except ckptfmt.ConflictError as error:
        return first, str(error), w.tolist()
    return "nothing was raised"


def test_ranks_restore_the_same_step_all_or_none(tmp_path: Path) -> None:
    for step in (1, 2):
        ckt.save({"w": torch.full((3,), float(step))}, tmp_path, step=step)
    found = together(restore_badly, 2, tmp_path)
    for rank in range(2):
        first, second, left = found[rank]
        assert "shape" in first
        assert "ranks see different checkpoints" in second
        assert "step-0000000000000001 (" in second
        assert "on rank 0; step-0000000000000002" in second
        assert left == [-1.0] * 3


def save_in_a_new_world(rank: int, size: int, path: Path) -> Any:
    """One rank has had meetings under the name of the group that the other has not."""
    base = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ckt.save({"a": 1}, path / "alone", group="world")
        dist.destroy_process_group()
    second = dist.PrefixStore("second", base)
    dist.init_process_group("gloo", store=second, rank=rank, world_size=size)
    return [
        ckt.save(
            {"w": torch.ones(3)}, path / "both", step=s, group="world", timeout_s=TIMEOUT_S
        ).name
        for s in (1, 2, 3)
    ]


def test_a_group_made_anew_counts_its_meetings_from_the_start(tmp_path: Path) -> None:
    found = together(save_in_a_new_world, 2, tmp_path)
    assert found[0] == found[1] == [f"step-{s:016d}" for s in (1, 2, 3)], found


def keep_old_fsdp(rank: int, size: int, path: Path) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = FullyShardedDataParallel(
            nn.Linear(4, 2), device_id=torch.device("cpu"), use_orig_params=True
        )
        return net, torch.optim.AdamW(net.parameters())

    net, optimizer = made(0)
    try:
        ckt.save({"m": net, "o": optimizer}, path, group="world", timeout_s=TIMEOUT_S)
    except ckptfmt.UsageError as error:
        refused = str(error)
    ckt.save({"m": net}, path, group="world", timeout_s=TIMEOUT_S)
    other, _ = made(1)
    ckt.restore({"m": other}, path, group="world")
    return refused, full(net.state_dict()), full(other.state_dict())


def test_an_old_fsdp_module_is_restored_and_its_optimizer_refused(tmp_path: Path) -> None:
    found = together(keep_old_fsdp, 2, tmp_path)
    for rank in range(2):
        assert not isinstance(found[rank], str), found
        refused, expected, restored = found[rank]
        assert "holds a part of the state on each rank" in refused
        equal(restored, expected)
