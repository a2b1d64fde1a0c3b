"""Wrappers of torch.distributed, with one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptfmt.torch as ckt
from ckptfmt.errors import UsageError


@pytest.fixture
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_a_ddp_model_and_its_optimizer_match_plain_ones_both_ways(tmp_path: Path) -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
    optimizer = torch.optim.Adam(wrapped.parameters())
    wrapped(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckt.save({"m": wrapped, "o": optimizer}, tmp_path / "s")
    plain = nn.Sequential(nn.Linear(2, 2))
    fresh = torch.optim.Adam(plain.parameters())
    assert ckt.restore({"m": plain, "o": fresh}, tmp_path / "s").clean
    assert torch.equal(plain[0].weight, wrapped.module[0].weight)
    assert torch.equal(
        fresh.state[plain[0].weight]["exp_avg"],
        optimizer.state[wrapped.module[0].weight]["exp_avg"],
    )
    other = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
    assert ckt.restore({"m": other}, tmp_path / "s", names="m").clean
    assert torch.equal(other.module[0].weight, plain[0].weight)


@pytest.mark.usefixtures("_one_process")
def test_a_sharded_tensor_is_refused_with_the_cure(tmp_path: Path) -> None:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0])
    sharded = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    with pytest.raises(UsageError, match="full_tensor") as caught:
        ckt.save({"w": sharded}, tmp_path / "s")
    assert "w" in str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_one_process")
def test_a_wrapper_whose_state_is_a_copy_is_restored_by_its_own_code(tmp_path: Path) -> None:
    """What is copied into the copies that its `state_dict()` gives would be lost in silence."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    saved, target = (
        FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu")) for _ in range(2)
    )
    assert not torch.equal(saved.state_dict()["weight"], target.state_dict()["weight"])
    ckt.save({"m": saved}, tmp_path)
    assert ckt.restore({"m": target}, tmp_path).clean
    assert torch.equal(saved.state_dict()["weight"], target.state_dict()["weight"])
    plain = nn.Linear(3, 2)
    assert ckt.restore({"m": plain}, tmp_path).clean
    assert torch.equal(plain.weight, saved.state_dict()["weight"])


@pytest.mark.usefixtures("_one_process")
def test_load_hooks_of_a_wrapper_are_called(tmp_path: Path) -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    ckt.save({"m": wrapped}, tmp_path)
    called: list[int] = []
    wrapped.register_load_state_dict_post_hook(lambda *_: called.append(1))
    assert ckt.restore({"m": wrapped}, tmp_path).clean
    assert called == [1]
