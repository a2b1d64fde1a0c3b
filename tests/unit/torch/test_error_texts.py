"""The words of every error that a user of tensors and modules can make, pinned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt.torch as ckt
from ckptfmt.errors import CheckpointError, MismatchError, UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

LEAVE_OUT = "give the target what is stored, or leave it out of names="
SHAPES = (
    "give the target the stored shapes, or leave these out of names= "
    "(a function name -> bool may choose)"
)


def quantized(dtype: torch.dtype = torch.qint8) -> Any:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, dtype)


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)


def mismatch(
    lines: list[str], do: str, what: str = "the target and the checkpoint disagree"
) -> str:
    body = "".join(f"\n  {line}" for line in lines) + "\n"
    return f"{what}:{body}; nothing was changed; to go on: {do}"


RESTORE: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "shape": (
        lambda: {"w": torch.ones(2, 3), "v": torch.ones(1)},
        lambda: {"w": torch.ones(3, 2), "v": torch.ones(1)},
        mismatch(["w: expected [3, 2], found [2, 3]"], SHAPES),
    ),
    "dtype": (
        lambda: {"w": torch.ones(2), "v": torch.ones(1)},
        lambda: {"w": torch.ones(2).bfloat16(), "v": torch.ones(1)},
        mismatch(["w: expected bfloat16, found float32"], "allow_cast= converts dtypes"),
    ),
    "dtype of torch alone": (
        lambda: {"w": torch.ones(2, dtype=torch.int8)},
        lambda: {"w": torch.ones(2, dtype=torch.int8).view(torch.int3)},
        mismatch(
            ["w: expected dtype int3, found dtype int8"],
            LEAVE_OUT,
            "nothing in the checkpoint matches the target",
        ),
    ),
    "missing": (
        lambda: {"w": torch.ones(2)},
        lambda: {"w": torch.ones(2), "head": torch.ones(2)},
        mismatch(["missing in the checkpoint: head"], "allow_missing='head'"),
    ),
    "extra": (
        lambda: {"w": torch.ones(2), "ema": torch.ones(2)},
        lambda: {"w": torch.ones(2)},
        mismatch(
            ["not in the target: ema"], "allow_unexpected='ema', or take part with names="
        ),
    ),
    "module shape": (
        lambda: {"m": torch.nn.Linear(2, 3)},
        lambda: {"m": torch.nn.Linear(2, 4)},
        mismatch(
            [
                "m/weight: expected [4, 2], found [3, 2]",
                "m/bias: expected [4], found [3]",
            ],
            SHAPES,
            "nothing in the checkpoint matches the target",
        ),
    ),
    "stored sparse, target dense": (
        lambda: {"w": torch.eye(2).to_sparse(), "v": torch.ones(1)},
        lambda: {"w": torch.eye(2), "v": torch.ones(1)},
        mismatch(
            [
                ("w: expected tensor float32 [2, 2], found a sparse_coo tensor (make the target "
                "one: to_sparse())")
            ],
            LEAVE_OUT,
        ),
    ),
    "stored dense, target sparse": (
        lambda: {"w": torch.eye(2), "v": torch.ones(1)},
        lambda: {"w": torch.eye(2).to_sparse(), "v": torch.ones(1)},
        mismatch(
            [
                ("w: expected a sparse_coo tensor, found tensor float32 [2, 2] (make the target a "
                "plain tensor, and convert it afterwards)")
            ],
            LEAVE_OUT,
        ),
    ),
    "another sparse layout": (
        lambda: {"w": torch.eye(2).to_sparse_csr(), "v": torch.ones(1)},
        lambda: {"w": torch.eye(2).to_sparse(), "v": torch.ones(1)},
        mismatch(
            [
                ("w: expected a sparse_coo tensor, found a sparse_csr tensor (make the target one: "
                "to_sparse_csr())")
            ],
            LEAVE_OUT,
        ),
    ),
    "sparse shape": (
        lambda: {"w": torch.eye(2).to_sparse(), "v": torch.ones(1)},
        lambda: {"w": torch.eye(3).to_sparse(), "v": torch.ones(1)},
        mismatch(["w: expected [3, 3], found [2, 2]"], SHAPES),
    ),
    "sparse dtype": (
        lambda: {"w": torch.eye(2).to_sparse(), "v": torch.ones(1)},
        lambda: {"w": torch.eye(2).double().to_sparse(), "v": torch.ones(1)},
        mismatch(["w/values: expected float64, found float32"], "allow_cast= converts dtypes"),
    ),
    "quantized dtype": (
        lambda: {"w": quantized(torch.qint8), "v": torch.ones(1)},
        lambda: {"w": quantized(torch.quint8), "v": torch.ones(1)},
        mismatch(
            [
                ("w: expected a quantized quint8 tensor, found a quantized qint8 tensor (make the "
                "target one: torch.quantize_per_tensor or quantize_per_channel)")
            ],
            LEAVE_OUT,
        ),
    ),
    "stored quantized, target plain": (
        lambda: {"m": {"w": quantized()}, "v": torch.ones(1)},
        lambda: {"m": {"w": torch.ones(2)}, "v": torch.ones(1)},
        mismatch(
            [
                ("m/w: expected tensor float32 [2], found a quantized qint8 tensor (make the target "
                "one: torch.quantize_per_tensor or quantize_per_channel)")
            ],
            LEAVE_OUT,
        ),
    ),
    "nested of other sizes": (
        lambda: {"w": nested(), "v": torch.ones(1)},
        lambda: {
            "w": torch.nested.nested_tensor([torch.ones(2, 4)] * 2, layout=torch.jagged),
            "v": torch.ones(1),
        },
        mismatch(["w/values: expected [3, 4], found [3, 3]"], SHAPES),
    ),
    "one tensor, two values": (
        lambda: {"a": torch.ones(2), "b": torch.zeros(2)},
        lambda: dict.fromkeys("ab", torch.zeros(2)),
        mismatch(
            ["b: expected one value for 'a' and 'b', which are one array, found two stored values"],
            LEAVE_OUT,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESTORE)
def test_a_restore_that_does_not_fit_says_so(name: str, tmp_path: Path) -> None:
    saved, target, text = RESTORE[name]
    ckt.save(saved(), tmp_path)
    with pytest.raises(MismatchError) as caught:
        ckt.restore(target(), tmp_path)
    assert str(caught.value) == text


def test_overlapping_targets_say_so(tmp_path: Path) -> None:
    ckt.save({"a": torch.zeros(4), "b": torch.ones(4)}, tmp_path)
    base = torch.zeros(6)
    with pytest.raises(MismatchError) as caught:
        ckt.restore({"a": base[:4], "b": base[2:]}, tmp_path)
    assert str(caught.value) == (
        "targets share memory, and what is stored for them differs there: 'a': found memory shared "
        "with 'b'; restore into tensors with memory of their own, or take part with names="
    )


SAVE: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (
        lambda: torch.empty(2, device="meta"),
        "found a meta tensor, which has no data; materialize it first: module.to_empty(...)",
    ),
    "lazy": (
        lambda: torch.nn.parameter.UninitializedParameter(),
        "found an uninitialized (lazy) tensor; run one forward pass first",
    ),
    "mkldnn": (
        lambda: torch.ones(2, 2).to_mkldnn(),
        "found a tensor of the layout torch._mkldnn; take tensor.to_dense() into the tree",
    ),
    "out of bounds": (
        lambda: torch.sparse_coo_tensor([[9]], torch.ones(1), (2,), check_invariants=False),
        "found indices[0] out of bounds: not all in [0, 2); coalesce it, or mend its indices, first",
    ),
}


@pytest.mark.parametrize("name", SAVE)
def test_what_cannot_be_saved_says_why(name: str, tmp_path: Path) -> None:
    make, text = SAVE[name]
    with pytest.raises(UsageError) as caught:
        ckt.save({"a": {"w": make()}}, tmp_path)
    assert str(caught.value) == f"tensor cannot be carried: a/w: {text}"


LOAD: dict[str, tuple[dict[str, Any], str]] = {
    "device": (
        {"device": "gpu"},
        ("device= is no device of this process: expected \"cpu\", \"cuda:0\", torch.device(...), as "
        "this build of torch has them, found 'gpu': "),
    ),
    "dtype": (
        {"dtype": torch.int8},
        ("dtype= converts floating-point tensors to a floating dtype: expected torch.bfloat16, "
        "torch.float32, ..., found torch.int8; convert other tensors after load"),
    ),
    "like": (
        {"like": {"w": 1}, "device": "cpu"},
        ("like= settles devices and dtypes: found device= or dtype= beside it; leave them out, or "
        "make like= with those"),
    ),
    "names": ({"names": "weights"}, "no leaf"),
    "mode": ({"mode": "fast"}, "unknown mode: expected auto, mmap or read, found 'fast'; choose"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOAD)
def test_a_load_that_is_asked_wrongly_says_so(name: str, tmp_path: Path) -> None:
    ckt.save({"w": torch.ones(2)}, tmp_path)
    options, text = LOAD[name]
    with pytest.raises(CheckpointError) as caught:
        ckt.load(tmp_path, **options)
    assert str(caught.value).startswith(text)
