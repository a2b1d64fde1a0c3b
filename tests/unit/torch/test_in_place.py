"""What stays when a restore fills tensors, and where the memory of meta tensors comes from."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt.torch as ckt
from ckptfmt.engine import arrays as arrays_module
from ckptfmt.engine import load as load_module
from ckptfmt.engine.bind import Staged
from ckptfmt.errors import MismatchError, UsageError


def facts(tensor: Any) -> Any:
    """All that a restore in place must leave alone."""
    return (
        id(tensor), type(tensor), tensor.untyped_storage().data_ptr(), tensor.storage_offset(),
        tensor.stride(), tensor.requires_grad, tensor.device, tensor.dtype,
    )  # fmt: skip


def test_identity_storage_strides_and_requires_grad_stay(tmp_path: Path) -> None:
    def tree(x: float) -> dict[str, Any]:
        image = torch.full((2, 3, 4, 5), x).contiguous(memory_format=torch.channels_last)
        volume = torch.full((2, 3, 4, 5, 6), x).contiguous(memory_format=torch.channels_last_3d)
        return {
            "parameter": torch.nn.Parameter(torch.full((3, 4), x)),
            "frozen": torch.nn.Parameter(torch.full((3,), x), requires_grad=False),
            "leaf": torch.full((2,), x, requires_grad=True),
            "image": image,
            "volume": torch.nn.Parameter(volume),
            "view": torch.full((10, 10), x)[2:4, ::2],
            "transposed": torch.full((3, 5), x).t(),
            "buffer": torch.nn.Buffer(torch.full((2,), x)),
            "0-d": torch.tensor(x),
            "none": torch.zeros(0, 3),
            "module": torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        }

    saved, target = tree(5.0), tree(1.0)
    ckt.save(saved, tmp_path)
    tensors = [t for t in target.values() if isinstance(t, torch.Tensor)]
    tensors += target["module"].parameters()
    before = [facts(t) for t in tensors]
    assert ckt.restore(target, tmp_path).clean
    assert [facts(t) for t in tensors] == before
    for name, tensor in saved.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(target[name], tensor), name
    assert torch.equal(target["module"].weight, saved["module"].weight)


def test_a_meta_module_takes_the_memory_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256))
    ckt.save({"m": model, "t": torch.ones(99_999)}, tmp_path)
    with torch.device("meta"):
        target = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256))
        lone = torch.empty(99_999)
    read: set[int] = set()
    original = Staged.__getitem__

    def spy(self: Staged, name: str) -> Any:
        array = original(self, name)
        read.add(array.__array_interface__["data"][0])
        return array

    monkeypatch.setattr(Staged, "__getitem__", spy)
    assert ckt.restore({"m": target, "t": lone}, tmp_path).clean
    state = model.state_dict()
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, state[name])
        assert (tensor.data_ptr() in read) == (name == "0.weight"), name
    target[1].num_batches_tracked.resize_(7)  # what is small is torch's own
    target[1].num_batches_tracked.resize_(())
    assert lone.data_ptr() in read
    assert target[0].weight.requires_grad
    assert isinstance(target[0].weight, torch.nn.Parameter)
    target(torch.randn(4, 256)).sum().backward()
    torch.optim.SGD(target.parameters(), 0.1).step()
    assert torch.equal(ckt.load(tmp_path)["m"]["0.weight"], model[0].weight)


def test_meta_tensors_that_are_not_tied_share_no_memory_though_they_were_when_saved(
    tmp_path: Path,
) -> None:
    w = torch.arange(30_000.0)
    ckt.save({"a": w, "b": w}, tmp_path)
    one = torch.nn.Parameter(torch.empty(30_000, device="meta"))
    two = torch.nn.Parameter(torch.empty(30_000, device="meta"))
    report = ckt.restore({"a": one, "b": two}, tmp_path)
    assert report.ties
    assert one.data_ptr() != two.data_ptr()
    with torch.no_grad():
        one.zero_()
    assert torch.equal(two, w)
    tied = torch.nn.Parameter(torch.empty(30_000, device="meta"))
    target = {"a": tied, "b": tied}
    assert not ckt.restore(target, tmp_path).ties
    assert target["a"] is target["b"] is tied
    assert torch.equal(tied, w)


def test_a_meta_tensor_keeps_its_memory_format_and_is_cast(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5)
    ckt.save({"w": image}, tmp_path)
    with torch.device("meta"):
        meta = torch.empty(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    ckt.restore({"w": meta}, tmp_path, allow_cast=True)
    assert meta.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(meta, image.double())


def test_a_buffer_that_is_not_persistent_and_on_meta_is_a_mismatch(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    ckt.save({"m": Net()}, tmp_path)
    with torch.device("meta"):
        target = Net()
    with pytest.raises(MismatchError, match="m/table: expected a buffer with data"):
        ckt.restore({"m": target}, tmp_path)
    assert target.w.is_meta
    target.table = torch.arange(3.0)
    assert ckt.restore({"m": target}, tmp_path).clean


@pytest.mark.parametrize("mode", ["auto", "read", "mmap"])
def test_a_converting_load_drops_what_it_has_converted(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree: dict[str, Any] = {str(i): torch.full((1000,), float(i)) for i in range(20)}
    tree |= {"count": torch.arange(1000), "tied": tree["3"]}
    ckt.save(tree, tmp_path)
    alive: list[weakref.ref[Any]] = []
    most = 0
    original = arrays_module.read_tensors

    def spy(*args: Any, **options: Any) -> Any:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        arrays = original(*args, **options)
        alive.extend(map(weakref.ref, arrays.values()))
        return arrays

    monkeypatch.setattr("ckptfmt.engine.source.GROUP_NBYTES", 8000)
    monkeypatch.setattr(load_module, "read_tensors", spy)
    loaded = ckt.load(tmp_path, dtype=torch.bfloat16, mode=mode)
    assert len(alive) == 21
    assert most <= 2  # of a group, at most the one in hand; the integers are kept
    for name, tensor in tree.items():
        wanted = tensor if name == "count" else tensor.bfloat16()
        assert torch.equal(loaded[name], wanted)
    assert loaded["tied"] is loaded["3"]


def test_dtype_never_touches_the_state_of_generators(tmp_path: Path) -> None:
    import random

    random.gauss(0.0, 1.0)
    state = {"rng": ckt.rng_state(), "g": torch.Generator().manual_seed(3), "w": torch.ones(2)}
    ckt.save(state, tmp_path)
    plain, loaded = ckt.load(tmp_path), ckt.load(tmp_path, dtype=torch.bfloat16)
    assert loaded["w"].dtype == torch.bfloat16

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and bool(torch.equal(a, b))
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(same, a, b))
        return bool(np.all(a == b))

    assert same(plain["rng"], loaded["rng"])
    assert same(plain["g"], loaded["g"])


def test_a_dtype_that_torch_cannot_convert_names_the_leaf(tmp_path: Path) -> None:
    packed = torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    ckt.save({"a": {"w": packed}, "v": torch.ones(2)}, tmp_path)
    with pytest.raises(UsageError, match="a/w") as caught:
        ckt.load(tmp_path, dtype=torch.float32)
    assert "mapping" in str(caught.value.do)
    loaded = ckt.load(tmp_path, dtype={"v": torch.float64})
    assert loaded["a"]["w"].dtype == torch.float4_e2m1fn_x2
    assert loaded["v"].dtype == torch.float64


def test_expanded_buffers_that_are_one_stay_one_and_are_all_filled(tmp_path: Path) -> None:
    def module(x: float) -> Any:
        made, row = torch.nn.Module(), torch.full((4,), x)
        made.register_buffer("first", row.expand(3, 4))
        made.register_buffer("second", row.expand(3, 4))
        return made

    ckt.save({"model": module(5.0)}, tmp_path)
    target = module(1.0)
    assert ckt.restore({"model": target}, tmp_path).clean
    assert torch.equal(target.first, torch.full((3, 4), 5.0))
    assert torch.equal(target.second, target.first)
    assert target.second.data_ptr() == target.first.data_ptr()


@pytest.mark.parametrize("nbytes", [0, 16])
def test_a_tensor_without_its_memory_is_refused_by_name(nbytes: int, tmp_path: Path) -> None:
    """A sharding wrapper frees storages under its tensors; to read on would be to read wild."""
    whole, freed = torch.ones(10), torch.ones(10)
    freed.untyped_storage().resize_(nbytes)
    with pytest.raises(UsageError, match="storage was freed or is too small"):
        ckt.save({"weight": freed}, tmp_path)
    ckt.save({"weight": whole}, tmp_path)
    with pytest.raises(UsageError, match="weight: found a tensor whose storage was freed"):
        ckt.restore({"weight": freed}, tmp_path)
