"""Cases 10 to 12: wrong shapes, prefixes of wrappers, extra state that is no tensor."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt.errors import MismatchError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # torch.compile

# -- 10: a wrong shape is never taken ------------------------------------------------------------

SHAPES = [
    ((), (5,)), ((), (1,)), ((), (1, 1)), ((1,), ()), ((32, 4), (1, 4)), ((3, 4), (4, 3)),
    ((12,), (3, 4)), ((0, 3), (0,)),
]  # fmt: skip


class Weights(nn.Module):
    """Parameters of given shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(("target", "stored"), SHAPES)
@pytest.mark.parametrize("strict", [True, False])
def test_every_unequal_shape_is_a_mismatch(
    target: tuple[int, ...], stored: tuple[int, ...], strict: bool, tmp_path: Path
) -> None:
    ckt.save({"m": {"a": torch.ones(stored), "b": torch.ones(2)}}, tmp_path)
    module = Weights(a=target, b=(2,))
    with pytest.raises(MismatchError) as caught:
        ckt.restore({"m": module}, tmp_path, strict=strict, allow_cast=True)
    report: Any = caught.value.report
    assert [(m.name, m.expected, m.found) for m in report.shapes] == [
        ("m/a", str(list(target)), str(list(stored)))
    ]
    assert not module.b.any()


def test_all_wrong_shapes_are_told_at_once_and_nothing_changes(tmp_path: Path) -> None:
    ckt.save({"m": {n: torch.ones(2, 3) for n in "abcd"}}, tmp_path)
    module = Weights(a=(3, 2), b=(6,), c=(1, 3), d=(2, 3))
    with pytest.raises(MismatchError) as caught:
        ckt.restore({"m": module}, tmp_path)
    for name, shape in (("a", "[3, 2]"), ("b", "[6]"), ("c", "[1, 3]")):
        assert f"m/{name}: expected {shape}, found [2, 3]" in str(caught.value)
    assert not any(p.any() for p in module.parameters())


# -- 11: "_orig_mod." ----------------------------------------------------------------------------


class Inner(nn.Module):
    """A model with children that are called like wrappers'."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)


def compiled_part(module: Any) -> Any:
    module[0] = torch.compile(module[0])
    return module


WRAPPINGS: dict[str, Any] = {
    "eager": lambda m: m,
    "compiled": torch.compile,
    "a compiled part": compiled_part,
    "DataParallel": nn.DataParallel,
    "compiled DataParallel": lambda m: torch.compile(nn.DataParallel(m)),
    "DataParallel of a compiled one": lambda m: nn.DataParallel(torch.compile(m)),
}


def job(wrapping: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = WRAPPINGS[wrapping](nn.Sequential(nn.Linear(2, 2), Inner()))
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    return {"model": module, "opt": optimizer}


@pytest.mark.parametrize("saved", WRAPPINGS)
@pytest.mark.parametrize("restored", ["eager", "compiled", "a compiled part", "DataParallel"])
def test_wrappers_change_no_name_and_optimizer_state_follows(
    saved: str, restored: str, tmp_path: Path
) -> None:
    stored, target = job(saved, 0), job(restored, 1)
    ckt.save(stored, tmp_path)
    with ckptfmt.open(tmp_path) as ckpt:
        assert "model/1._orig_mod.weight" in ckpt.names("model")
        assert "model/1.module.bias" in ckpt.names("model")
        assert "model/0.weight" in ckpt.names("model")
    report = ckt.restore(target, tmp_path)
    assert report.clean
    assert ("model" in report.matched_by) == (restored != "eager")
    pairs = zip(stored["model"].parameters(), target["model"].parameters(), strict=True)
    for a, b in pairs:
        assert torch.equal(a, b)
        moments = (t["opt"].state[p]["exp_avg"] for t, p in ((stored, a), (target, b)))
        assert torch.equal(*moments)


def test_a_plain_dict_under_two_prefixes_is_ambiguous_and_both_are_named(tmp_path: Path) -> None:
    inner = nn.Linear(2, 2)
    both = {f"{p}{k}": v for p in ("module.", "_orig_mod.") for k, v in inner.state_dict().items()}
    ckt.save({"m": both}, tmp_path)
    with pytest.raises(MismatchError, match=r"'_orig_mod\.' and 'module\.'"):
        ckt.restore({"m": nn.Linear(2, 2)}, tmp_path, strict=False)


def test_an_average_of_a_model_goes_into_the_plain_model(tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    ckt.save({"m": average}, tmp_path)
    target = nn.Linear(2, 2)
    with pytest.raises(MismatchError, match="not in the target: m/n_averaged"):
        ckt.restore({"m": target}, tmp_path)
    report = ckt.restore({"m": target}, tmp_path, allow_unexpected="m/n_averaged")
    assert report.matched_by["m/weight"] == "wrapper prefix 'module.' removed"
    assert torch.equal(target.weight, average.module.weight)


@pytest.mark.parametrize("wrap", ["eager", "compiled"])
def test_a_lax_restore_that_matches_nothing_raises(wrap: str, tmp_path: Path) -> None:
    ckt.save({"m": {"x.weight": torch.ones(2, 2), "x.bias": torch.ones(2)}, "step": 3}, tmp_path)
    target: dict[str, Any] = {"m": WRAPPINGS[wrap](nn.Linear(2, 2)), "step": 0}
    text = "m: expected 2 names, found 2 others, of which none matches"
    with pytest.raises(MismatchError, match=text):
        ckt.restore(target, tmp_path, strict=False)
    with pytest.raises(MismatchError, match=text):
        ckt.restore(target, tmp_path, allow_missing="m", allow_unexpected="m")
    assert target["step"] == 0
    ckt.save({"step": 3}, tmp_path)  # nothing of the model is stored: that can be allowed
    assert ckt.restore(target, tmp_path, allow_missing="m").missing


# -- 12: extra state that is no tensor -----------------------------------------------------------


class Extra(nn.Module):
    """A module with state beside its tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRA: dict[str, tuple[Any, Any]] = {
    "a dict": ({"scale": 2.0, 3: [1, "x"]}, {}),
    "bytes": (b"\x00\xff" * 5000, b""),
    "None": (None, {"something": 1}),
    "a longer tensor": (torch.arange(9, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)),
    "a tensor in a dict": ({"amax": torch.ones(3), "n": 4}, {}),
}


@pytest.mark.parametrize("kind", EXTRA)
def test_extra_state_of_any_length_arrives_as_an_equal_object(kind: str, tmp_path: Path) -> None:
    stored, before = EXTRA[kind]
    ckt.save({"m": nn.Sequential(Extra(stored))}, tmp_path)
    target = nn.Sequential(Extra(before))
    assert ckt.restore({"m": target}, tmp_path).clean
    found = target[0].extra
    assert type(found) is type(stored)
    if isinstance(stored, torch.Tensor):
        assert torch.equal(found, stored)
        assert found.dtype == stored.dtype
    else:
        assert str(found) == str(stored)


def test_a_bytes_io_arrives_at_its_beginning(tmp_path: Path) -> None:
    written = io.BytesIO(b"abc")
    written.seek(2)
    ckt.save({"m": Extra(written)}, tmp_path)
    target: Any = Extra(io.BytesIO())
    ckt.restore({"m": target}, tmp_path)
    assert target.extra.read() == b"abc"
