"""`ckptfmt.torch.load`: a tree of torch tensors, on the device and in the dtype asked for."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt.errors import UsageError


def test_a_tree_comes_back_with_its_kinds_and_tensors(tmp_path: Path) -> None:
    tree = {
        "a": torch.arange(4, dtype=torch.bfloat16),
        "l": [torch.tensor(1.5), (torch.tensor(True), None)],
        "o": OrderedDict(x=torch.zeros(0, 3), y=2),
        3: "three",
        "size": torch.Size([2, 3]),
        "dtype": torch.float8_e4m3fn,
        "device": torch.device("cuda", 1),
        "np": np.arange(3),
    }
    ckt.save(tree, tmp_path / "s")
    loaded = ckt.load(tmp_path / "s")
    assert list(loaded) == list(tree)
    assert torch.equal(loaded["a"], tree["a"])
    assert loaded["a"].dtype == torch.bfloat16
    assert loaded["l"][0].shape == ()
    assert loaded["l"][1][1] is None
    assert isinstance(loaded["l"][1], tuple)
    assert isinstance(loaded["o"], OrderedDict)
    assert loaded["o"]["x"].shape == (0, 3)
    assert loaded[3] == "three"
    assert loaded["size"] == torch.Size([2, 3])
    assert isinstance(loaded["size"], torch.Size)
    assert loaded["dtype"] is torch.float8_e4m3fn
    assert loaded["device"] == torch.device("cuda", 1)
    assert torch.equal(loaded["np"], torch.arange(3))


def test_a_view_is_stored_at_its_own_size(tmp_path: Path) -> None:
    base = torch.randn(1_000_000)
    for name, view in {
        "head": base[:1000],
        "strided": base[::1000],
        "chunk": base.chunk(10)[3],
    }.items():
        info = ckt.save({"v": view}, tmp_path / name)
        total = sum(f.stat().st_size for f in (tmp_path / name).rglob("*") if f.is_file())
        assert total <= view.numel() * 4 + (64 << 10)
        assert info.nbytes == view.numel() * 4
        loaded = ckt.load(tmp_path / name)["v"]
        assert torch.equal(loaded, view)
    info = ckt.save({"base": base, **{str(i): c for i, c in enumerate(base.chunk(10))}},
                    tmp_path / "all")  # fmt: skip
    assert info.nbytes <= 2 * base.numel() * 4


def test_views_that_overlap_come_back_independent_and_ties_come_back_tied(
    tmp_path: Path,
) -> None:
    a = torch.arange(20.0)
    z = torch.complex(torch.arange(3.0), torch.ones(3))
    tree = {
        "head": a[:12],
        "tail": a[8:],
        "z": z,
        "re": z.real,
        "im": z.imag,
        "x": a,
        "x_int": a.view(torch.int32),
        "same": a.detach(),
    }
    ckt.save(tree, tmp_path / "s")
    loaded = ckt.load(tmp_path / "s")
    for name, value in tree.items():
        assert torch.equal(loaded[name], value)
    assert loaded["same"] is loaded["x"]
    loaded["head"][9] = -1.0
    assert float(loaded["tail"][1]) == 9.0
    loaded["x"][0] = -5.0
    assert float(loaded["head"][0]) == 0.0


def test_channels_last_and_requires_grad_come_back(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    leaf = torch.randn(3, requires_grad=True)
    ckt.save({"image": image, "leaf": leaf}, tmp_path / "s")
    loaded = ckt.load(tmp_path / "s")
    assert loaded["image"].stride() == image.stride()
    assert torch.equal(loaded["image"], image)
    assert loaded["leaf"].requires_grad
    plain = ckptfmt.load(tmp_path / "s")
    assert np.array_equal(plain["image"], image.numpy())


def test_dtype_touches_floating_tensors_only(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "w": torch.randn(3),
        "i": torch.arange(3),
        "c": torch.zeros(2, dtype=torch.complex64),
        "b": torch.tensor(True),
        "opt": {"step": torch.tensor(3.0)},
    }
    ckt.save(tree, tmp_path / "s")
    loaded = ckt.load(tmp_path / "s", dtype=torch.float16)
    assert loaded["w"].dtype == loaded["opt"]["step"].dtype == torch.float16
    assert torch.equal(loaded["w"], tree["w"].half())
    for name in "icb":
        assert loaded[name].dtype == tree[name].dtype
    some = ckt.load(tmp_path / "s", dtype={"w": torch.float64, "opt": torch.bfloat16})
    assert some["w"].dtype == torch.float64
    assert some["opt"]["step"].dtype == torch.bfloat16
    with pytest.raises(UsageError, match="floating"):
        ckt.load(tmp_path / "s", dtype=torch.int8)


def test_device_may_be_one_for_all_or_a_mapping(tmp_path: Path) -> None:
    ckt.save({"a": {"x": torch.ones(2)}, "b": torch.ones(3)}, tmp_path / "s")
    loaded = ckt.load(tmp_path / "s", device="meta")
    assert loaded["a"]["x"].is_meta
    assert loaded["b"].is_meta
    loaded = ckt.load(tmp_path / "s", device={"a": "meta"})
    assert loaded["a"]["x"].is_meta
    assert loaded["b"].device.type == "cpu"
    assert loaded["b"].tolist() == [1.0, 1.0, 1.0]


def test_names_take_a_part_and_keep_the_nesting(tmp_path: Path) -> None:
    ckt.save({"a": {"x": torch.ones(2), "y": torch.zeros(2)}, "b": 1}, tmp_path / "s")
    assert list(ckt.load(tmp_path / "s", names="a/x")) == ["a"]
    assert list(ckt.load(tmp_path / "s", names="a/x")["a"]) == ["x"]


def test_like_gives_the_callers_classes(tmp_path: Path) -> None:
    ckt.save({"w": torch.arange(4.0), "p": torch.ones(2)}, tmp_path / "s")
    like = {"w": torch.zeros(4), "p": torch.nn.Parameter(torch.zeros(2))}
    loaded = ckt.load(tmp_path / "s", like=like)
    assert isinstance(loaded["p"], torch.nn.Parameter)
    assert loaded["p"].tolist() == [1.0, 1.0]
    assert loaded["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert like["w"].tolist() == [0.0] * 4


def test_writing_to_what_was_loaded_reaches_no_file(tmp_path: Path) -> None:
    ckt.save({"w": torch.zeros(100_000)}, tmp_path / "s")
    for mode in ("auto", "read", "mmap"):
        loaded = ckt.load(tmp_path / "s", mode=mode)
        loaded["w"].fill_(1.0)
        assert float(ckt.load(tmp_path / "s")["w"].sum()) == 0.0


def test_numpy_kinds_that_torch_lacks_stay_numpy_arrays(tmp_path: Path) -> None:
    tree = {"t": np.array(["2020-01-01"], "datetime64[D]"), "w": torch.ones(1)}
    ckt.save(tree, tmp_path / "s")
    loaded = ckt.load(tmp_path / "s")
    assert isinstance(loaded["t"], np.ndarray)
    assert loaded["t"].dtype == tree["t"].dtype
    assert isinstance(loaded["w"], torch.Tensor)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 1.5, {"w": "gpu"}])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(
    device: Any, tmp_path: Path
) -> None:
    ckt.save({"w": torch.ones(2)}, tmp_path)
    with pytest.raises(UsageError, match="no device of this process"):
        ckt.load(tmp_path, device=device)
