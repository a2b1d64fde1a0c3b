"""Targets of torch over one memory, and of torch and NumPy: no byte is given two values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt.errors import MismatchError


def refuse(target: Any, path: Path, memory: Any) -> None:
    """The restore is refused, and the memory is what it was."""
    before = memory.numpy().tobytes() if isinstance(memory, torch.Tensor) else memory.tobytes()
    with pytest.raises(MismatchError) as caught:
        ckt.restore(target, path)
    assert caught.value.kind == "mismatch-overlap"
    after = memory.numpy().tobytes() if isinstance(memory, torch.Tensor) else memory.tobytes()
    assert after == before


def test_views_that_overlap_take_equal_values_and_refuse_others(tmp_path: Path) -> None:
    a = torch.arange(20.0)
    ckt.save({"head": a[:12], "tail": a[8:]}, tmp_path / "good")
    ckt.save({"head": torch.zeros(12), "tail": torch.ones(12)}, tmp_path / "bad")
    b = torch.full((20,), 7.0)
    refuse({"head": b[:12], "tail": b[8:]}, tmp_path / "bad", b)
    assert ckt.restore({"head": b[:12], "tail": b[8:]}, tmp_path / "good").clean
    assert torch.equal(a, b)


def test_a_tensor_and_an_array_over_one_memory_are_seen(tmp_path: Path) -> None:
    ckt.save({"n": np.zeros(4, np.float32), "t": torch.ones(4)}, tmp_path / "bad")
    ckt.save({"n": np.arange(4, dtype=np.float32), "t": torch.arange(4.0)}, tmp_path / "good")
    array = np.full(4, 9, np.float32)
    for target in (
        {"n": array, "t": torch.from_numpy(array)},
        {"t": torch.from_numpy(array), "n": array},
    ):
        refuse(target, tmp_path / "bad", array)
    assert ckt.restore({"n": array, "t": torch.from_numpy(array)}, tmp_path / "good").clean
    assert array.tolist() == [0, 1, 2, 3]


def test_views_of_other_dtypes_are_compared_by_their_bytes(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    ckt.save({"f": whole, "i": whole.view(torch.int32)}, tmp_path / "good")
    ckt.save({"f": whole, "i": torch.arange(4, dtype=torch.int32)}, tmp_path / "bad")
    b = torch.zeros(4)
    refuse({"f": b, "i": b.view(torch.int32)}, tmp_path / "bad", b)
    assert ckt.restore({"f": b, "i": b.view(torch.int32)}, tmp_path / "good").clean
    assert torch.equal(b, whole)


def test_lazy_views_and_packed_types_are_compared_as_they_lie(tmp_path: Path) -> None:
    z = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    pairs = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    view = pairs.view(torch.float4_e2m1fn_x2)
    ckt.save({"z": z, "c": z.conj(), "n": z.conj().imag, "p": pairs, "v": view}, tmp_path)
    w, raw = torch.zeros(3, dtype=torch.complex64), torch.zeros(1, 2, dtype=torch.uint8)
    target = {
        "z": w,
        "c": w.conj(),
        "n": w.conj().imag,
        "p": raw,
        "v": raw.view(torch.float4_e2m1fn_x2),
    }
    assert ckt.restore(target, tmp_path).clean
    assert torch.equal(w, z)
    assert torch.equal(raw, pairs)
    ckt.save({"z": z, "c": z}, tmp_path / "bad")
    w = torch.zeros(3, dtype=torch.complex64)
    refuse({"z": w, "c": w.conj()}, tmp_path / "bad", w)


def test_parameters_that_are_slices_of_one_flat_buffer_are_no_overlap(tmp_path: Path) -> None:
    def model(fill: float) -> tuple[Any, Any]:
        flat = torch.full((30,), fill)
        module = torch.nn.Linear(5, 3)
        module.weight = torch.nn.Parameter(flat[:15].view(3, 5))
        module.bias = torch.nn.Parameter(flat[20:26:2])
        return flat, module

    flat, module = model(0.0)
    with torch.no_grad():
        module.weight.copy_(torch.randn(3, 5))
        module.bias.copy_(torch.randn(3))
    ckt.save({"m": module, "flat": flat}, tmp_path)
    new, other = model(1.0)
    ckt.restore({"m": other}, tmp_path, names="m")
    assert torch.equal(other.weight, module.weight)
    assert new[16:20].tolist() == [1.0] * 4
    new, other = model(1.0)
    assert ckt.restore({"m": other, "flat": new}, tmp_path).clean
    assert torch.equal(new, flat)


def test_a_module_whose_parameters_overlap_refuses_values_that_differ_there(
    tmp_path: Path,
) -> None:
    class Windows(torch.nn.Module):
        def __init__(self, own: bool) -> None:
            super().__init__()
            self.base = torch.zeros(6)
            a, b = (torch.zeros(4), torch.ones(4)) if own else (self.base[:4], self.base[2:])
            self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

    ckt.save({"m": Windows(True)}, tmp_path)
    target = Windows(False)
    refuse({"m": target}, tmp_path, target.base)


def test_elements_that_lie_over_each_other_take_equal_values_only(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    ckt.save({"w": base.unfold(0, 3, 1)}, tmp_path / "good")
    ckt.save({"w": torch.arange(12.0).reshape(4, 3)}, tmp_path / "bad")
    b = torch.zeros(6)
    refuse({"w": b.unfold(0, 3, 1)}, tmp_path / "bad", b)
    assert ckt.restore({"w": b.unfold(0, 3, 1)}, tmp_path / "good").clean
    assert torch.equal(b, base)


def test_a_tied_parameter_takes_two_stored_copies_that_are_cut_differently(tmp_path: Path) -> None:
    w = torch.randn(64, 64)
    tree = {"m": {"a": w, "b": w.clone()}, "c": {"a": w, "b": w + 1}}
    ckptfmt.save(tree, tmp_path, chunk_nbytes={"**/a": 4096, "**/b": 8192})
    p = torch.nn.Parameter(torch.zeros(64, 64))
    assert ckt.restore({"m": {"a": p, "b": p}}, tmp_path, names="m").clean
    assert torch.equal(p, w)
    with pytest.raises(MismatchError, match="two stored values"):
        ckt.restore({"c": {"a": p, "b": p}}, tmp_path, names="c")
    assert torch.equal(p, w)


def test_dtypes_that_torch_alone_has_are_restored_from_a_tree_in_memory() -> None:
    value = torch.tensor([1, 2, 3], dtype=torch.int8).view(torch.int3)
    target = torch.zeros(3, dtype=torch.int8).view(torch.int3)
    assert ckt.restore({"w": target}, {"w": value}).clean
    assert target.view(torch.int8).tolist() == [1, 2, 3]
