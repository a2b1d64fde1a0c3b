"""Cases 5 and 6: tied names are one tensor, overlapping views are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.testing import difference

SizeOf = Callable[[Path], int]


def test_tied_arrays_are_stored_once_under_every_name(tmp_path: Path, size_of: SizeOf) -> None:
    """Case 5: all names in the index, the bytes once, tied again on load and in a tied target."""
    weight = np.random.default_rng(0).random((500, 100))
    ckptfmt.save({"w": weight}, tmp_path / "one")
    tree = {f"copy{i}": {"w": weight} for i in range(4)}
    ckptfmt.save(tree, tmp_path / "tied")
    assert size_of(tmp_path / "tied" / "data") <= 1.1 * size_of(tmp_path / "one" / "data")
    checkpoint = ckptfmt.open(tmp_path / "tied")
    assert checkpoint.names() == [f"copy{i}/w" for i in range(4)]
    assert checkpoint.ties() == [checkpoint.names()]
    loaded = ckptfmt.load(tmp_path / "tied")
    assert len({id(part["w"]) for part in loaded.values()}) == 1
    shared = np.zeros((500, 100))
    report = ckptfmt.restore({f"copy{i}": {"w": shared} for i in range(4)}, tmp_path / "tied")
    assert report.clean
    assert (shared == weight).all()


def test_a_tied_model_of_torch_stays_tied(tmp_path: Path, size_of: SizeOf) -> None:
    """Case 5, torch: head.weight is embed.weight; one Linear under four names."""
    torch = pytest.importorskip("torch")
    import ckptfmt.torch as ckt

    def model() -> Any:
        made = torch.nn.ModuleDict()
        made["embed"] = torch.nn.Embedding(200, 50)
        made["head"] = torch.nn.Linear(50, 200, bias=False)
        made["head"].weight = made["embed"].weight
        one = torch.nn.Linear(50, 50)
        for name in ("a", "b", "c", "d"):
            made[name] = one
        return made

    saved, fresh = model(), model()
    ckt.save({"model": saved}, tmp_path)
    single = 200 * 50 * 4 + 50 * 50 * 4 + 50 * 4
    assert size_of(tmp_path / "data") <= 1.1 * single + 8192
    names = ckptfmt.open(tmp_path).names()
    assert {"model/embed.weight", "model/head.weight", "model/a.weight", "model/d.bias"} <= set(
        names
    )
    report = ckt.restore({"model": fresh}, tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert fresh["head"].weight is fresh["embed"].weight
    assert fresh["a"] is fresh["d"]
    assert torch.equal(fresh["head"].weight, saved["embed"].weight)
    loaded = ckt.load(tmp_path)["model"]
    assert set(loaded) == set(saved.state_dict())
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()


def test_equal_arrays_are_no_tie(tmp_path: Path) -> None:
    """Case 5's reverse: equal content is shared on disk, never in memory."""
    ckptfmt.save({"a": np.arange(9), "b": np.arange(9)}, tmp_path)
    assert ckptfmt.open(tmp_path).ties() == []
    loaded = ckptfmt.load(tmp_path)
    loaded["a"][0] = 99
    assert loaded["b"][0] == 0


OVERLAPS: dict[str, Callable[[], dict[str, Any]]] = {}


def overlap(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    OVERLAPS[make.__name__] = make
    return make


@overlap
def head_and_tail() -> dict[str, Any]:
    whole = np.arange(20)
    return {"head": whole[:12], "tail": whole[8:]}


@overlap
def complex_and_its_parts() -> dict[str, Any]:
    z = (np.arange(6) + 1j * np.arange(6, 12)).astype(np.complex64)
    return {"z": z, "re": z.real, "im": z.imag}


@overlap
def two_dtypes_over_one_storage() -> dict[str, Any]:
    x = np.linspace(0, 1, 8, dtype=np.float32)
    return {
        "x": x,
        "bits": x.view(np.int32),
        "bytes": x.view(np.uint8),
        "pairs": x.view(np.float64),
    }


@overlap
def shapes_and_strides_of_one_storage() -> dict[str, Any]:
    x = np.arange(12)
    return {
        "flat": x,
        "square": x.reshape(3, 4),
        "t": x.reshape(3, 4).T,
        "even": x[::2],
        "back": x[::-1],
    }


@overlap
def same_start_other_length() -> dict[str, Any]:
    x = np.arange(12)
    return {"a": x[:5], "b": x[:6], "c": x}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlapping_views_are_saved_and_come_back_independent(tmp_path: Path, name: str) -> None:
    """Case 6: each value right, none tied, none dropped, no write leaks."""
    tree = OVERLAPS[name]()
    ckptfmt.save(tree, tmp_path)
    assert ckptfmt.open(tmp_path).ties() == []
    expected = {key: array.copy() for key, array in tree.items()}
    for mode in ("auto", "read", "mmap"):
        for victim in tree:
            loaded = ckptfmt.load(tmp_path, mode=mode)
            assert not difference(loaded, expected)
            loaded[victim][...] = 77
            assert not difference(
                {k: v for k, v in loaded.items() if k != victim},
                {k: v for k, v in expected.items() if k != victim},
            )


def test_only_equal_offset_shape_stride_and_dtype_make_a_tie(tmp_path: Path) -> None:
    """Case 6: two view objects of the very same elements are one tensor."""
    x = np.arange(24).reshape(4, 6)
    ckptfmt.save({"a": x[1:3], "b": x[1:3], "c": x[1:4], "d": x[1:3].view(np.uint64)}, tmp_path)
    assert ckptfmt.open(tmp_path).ties() == [["a", "b"]]


def test_views_of_torch_come_back_independent(tmp_path: Path) -> None:
    """Case 6, torch: where torch.save raises for complex beside its real and imaginary views."""
    torch = pytest.importorskip("torch")
    import ckptfmt.torch as ckt

    whole = torch.arange(20)
    z = torch.complex(torch.arange(4.0), -torch.arange(4.0))
    x = torch.linspace(0, 1, 6)
    tree = {
        "head": whole[:12],
        "tail": whole[8:],
        "z": z,
        "re": z.real,
        "im": z.imag,
        "conj": z.conj(),
        "neg": torch._neg_view(x),
        "x": x,
        "bits": x.view(torch.int32),
    }
    expected = {name: tensor.clone().resolve_conj().resolve_neg() for name, tensor in tree.items()}
    ckt.save(tree, tmp_path)
    loaded = ckt.load(tmp_path)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    loaded["head"][9] = -1
    loaded["re"][:] = 55
    assert int(loaded["tail"][1]) == 9
    assert torch.equal(loaded["z"], expected["z"])
