"""Modules: names, ties, wrappers, hooks, extra state; a restore binds all or nothing."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt.errors import MismatchError, UsageError


def test_a_module_is_stored_under_its_state_dicts_keys_verbatim(
    make_net: Callable[..., Any], tmp_path: Path
) -> None:
    net = make_net(0)
    ckt.save({"model": net}, tmp_path / "s")
    with ckptfmt.open(tmp_path / "s") as ckpt:
        names = ckpt.names()
    assert names == [f"model/{key}" for key in net.state_dict()]


def test_a_restored_module_keeps_its_objects_storages_and_ties(
    make_net: Callable[..., Any], tmp_path: Path
) -> None:
    saved, target = make_net(0), make_net(1)
    ckt.save({"model": saved}, tmp_path / "s")
    kept = [(id(p), p.data_ptr()) for p in target.parameters()]
    report = ckt.restore({"model": target}, tmp_path / "s")
    assert report.clean
    assert not report.ties
    assert set(report.matched) == {f"model/{key}" for key in saved.state_dict()}
    assert [(id(p), p.data_ptr()) for p in target.parameters()] == kept
    assert target.head.weight is target.embed.weight
    for key, value in saved.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)
    assert target.embed.weight.requires_grad


def test_tied_weights_are_stored_once_and_tied_again_when_loaded(
    make_net: Callable[..., Any], tmp_path: Path
) -> None:
    info = ckt.save({"model": make_net(0)}, tmp_path / "s")
    assert info.tensors == len(make_net(0).state_dict()) - 1
    loaded = ckt.load(tmp_path / "s")["model"]
    assert loaded["embed.weight"] is loaded["head.weight"]
    make_net(1).load_state_dict(loaded)


def test_a_lost_tie_is_reported(tmp_path: Path) -> None:
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    ckt.save({"m": tied}, tmp_path / "s")
    loose = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    report = ckt.restore({"m": loose}, tmp_path / "s")
    assert list(report.ties) == ["m/b.weight"]
    assert torch.equal(loose["a"].weight, tied["a"].weight)
    assert torch.equal(loose["b"].weight, tied["a"].weight)


def test_a_tied_target_with_two_stored_values_is_a_mismatch(
    frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    loose = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    ckt.save({"m": loose}, tmp_path / "s")
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    before = frozen(tied)
    with pytest.raises(MismatchError, match="two stored values"):
        ckt.restore({"m": tied}, tmp_path / "s")
    assert frozen(tied) == before
    with torch.no_grad():
        loose["b"].weight.copy_(loose["a"].weight)
    ckt.save({"m": loose}, tmp_path / "equal")
    ckt.restore({"m": tied}, tmp_path / "equal")
    assert torch.equal(tied["b"].weight, loose["a"].weight)


def test_every_wrong_shape_is_listed_and_nothing_changes(
    frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    class Bag(nn.Module):
        def __init__(self, *shapes: tuple[int, ...]) -> None:
            super().__init__()
            for i, shape in enumerate(shapes):
                self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))

    stored = Bag((5,), (1,), (1, 1), (1, 4), (4, 3), (3, 4), (2,))
    target = Bag((), (), (), (32, 4), (3, 4), (12,), (2,))
    ckt.save({"m": stored}, tmp_path / "s")
    before = frozen(target)
    with pytest.raises(MismatchError) as caught:
        ckt.restore({"m": target}, tmp_path / "s")
    assert frozen(target) == before
    report = caught.value.report
    assert isinstance(report, ckptfmt.RestoreReport)
    assert [m.name for m in report.shapes] == [f"m/p{i}" for i in range(6)]
    assert "m/p3" in str(caught.value)


@pytest.mark.parametrize("kind", ["dtype", "missing", "unexpected"])
def test_what_differs_is_named_and_nothing_changes(
    kind: str, frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    stored: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    target: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if kind == "dtype":
        target[1].to(torch.bfloat16)
    elif kind == "missing":
        target.append(nn.Linear(2, 2, bias=False))
    else:
        stored.append(nn.Linear(2, 2, bias=False))
    ckt.save({"m": stored}, tmp_path / "s")
    before = frozen(target)
    with pytest.raises(MismatchError) as caught:
        ckt.restore({"m": target}, tmp_path / "s")
    assert frozen(target) == before
    report: Any = caught.value.report
    if kind == "dtype":
        assert [m.name for m in report.dtypes] == ["m/1.weight", "m/1.bias"]
        assert (report.dtypes[0].expected, report.dtypes[0].found) == ("bfloat16", "float32")
    else:
        assert list(getattr(report, kind)) == ["m/2.weight"]


def test_a_part_of_a_module_can_be_restored(tmp_path: Path) -> None:
    stored, target = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    kept = target[1].weight.detach().clone()
    ckt.save({"m": stored}, tmp_path / "s")
    ckt.restore({"m": target}, tmp_path / "s", names="m/0.*")
    assert torch.equal(target[0].weight, stored[0].weight)
    assert torch.equal(target[1].weight, kept)


@pytest.mark.parametrize("way", ["wrapped to plain", "plain to wrapped", "inside", "real child"])
def test_compiled_modules_match_plain_ones_with_their_optimizer(way: str, tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        if way == "real child":
            model: Any = nn.Module()
            model._orig_mod = nn.Linear(2, 2)
            model.module = nn.Linear(2, 2)
        else:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return model, torch.optim.Adam(model.parameters())

    def compiled(model: Any) -> Any:
        if way == "inside":
            model[0] = torch.compile(model[0], backend="eager")
            return model
        return nn.DataParallel(torch.compile(model, backend="eager"))

    stored, optimizer = build()
    for parameter in stored.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    target, fresh = build()
    outer = stored if way == "plain to wrapped" else compiled(stored)
    inner = compiled(target) if way in ("plain to wrapped", "real child") else target
    ckt.save({"model": outer, "opt": optimizer}, tmp_path / "s")
    report = ckt.restore({"model": inner, "opt": fresh}, tmp_path / "s")
    assert report.clean
    for a, b in zip(stored.parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg"], fresh.state[b]["exp_avg"])


def test_a_plain_state_dict_of_a_wrapped_module_is_taken_and_reported(tmp_path: Path) -> None:
    stored = nn.DataParallel(nn.Linear(2, 2))
    ckt.save({"model": dict(stored.state_dict())}, tmp_path / "s")
    target = nn.Linear(2, 2)
    report = ckt.restore({"model": target}, tmp_path / "s")
    assert torch.equal(target.weight, stored.module.weight)
    assert "module." in report.matched_by["model/weight"]


def test_a_meta_model_becomes_real_with_its_ties(
    make_net: Callable[..., Any], tmp_path: Path
) -> None:
    stored = make_net(0)
    ckt.save({"model": stored}, tmp_path / "s")
    with torch.device("meta"):
        target = make_net(1)
    with pytest.raises(MismatchError, match="table"):
        ckt.restore({"model": target}, tmp_path / "s")
    assert all(p.is_meta for p in target.parameters())
    target.table = torch.arange(3.0)
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    ckt.restore({"model": target}, tmp_path / "s")
    assert not any(t.is_meta for t in [*target.parameters(), *target.buffers()])
    assert target.head.weight is target.embed.weight
    assert optimizer.param_groups[0]["params"][0] is target.embed.weight
    for key, value in stored.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)


class Extra(nn.Module):
    """Keeps something beside its tensors, and what it was given."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.extra = extra
        self.calls = 0

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state
        self.calls += 1


EXTRAS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"a": 1, "b": [1, 2.5, None], 3: (1, "x")},
    "nested tensor": lambda: {"t": torch.arange(3), "n": np.arange(3), "k": "v"},
    "bytes": lambda: b"\x00\xff",
    "BytesIO": lambda: io.BytesIO(b"blob"),
    "None": lambda: None,
    "empty dict": dict,
    "longer tensor": lambda: torch.arange(9, dtype=torch.uint8),
}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("torch", value.dtype, value.tolist())
    if isinstance(value, np.ndarray):
        return ("numpy", value.dtype, value.tolist())
    if isinstance(value, io.BytesIO):
        return ("BytesIO", value.getvalue())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("kind", EXTRAS)
def test_extra_state_arrives_as_an_equal_object(kind: str, tmp_path: Path) -> None:
    stored, target = Extra(EXTRAS[kind]()), Extra(torch.zeros(2, dtype=torch.uint8))
    ckt.save({"m": stored}, tmp_path / "s")
    report = ckt.restore({"m": target}, tmp_path / "s")
    assert report.clean
    assert target.calls == 1
    assert type(target.extra) is type(stored.extra)
    assert plain(target.extra) == plain(stored.extra)
    assert torch.equal(target.lin.weight, stored.lin.weight)


class Renaming(nn.Module):
    """Takes the names of its older releases, as its pre-hook says."""

    def __init__(self, key: str = "weight") -> None:
        super().__init__()
        self.key = key
        self.register_parameter(key, nn.Parameter(torch.randn(3)))
        if key == "weight":
            self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "old_weight" in state:
            state[prefix + "weight"] = state.pop(prefix + "old_weight")


def test_a_modules_own_load_hooks_take_stored_names(tmp_path: Path) -> None:
    stored = nn.Sequential(Renaming("old_weight"), nn.Linear(2, 2))
    target = nn.Sequential(Renaming(), nn.Linear(2, 2))
    ckt.save({"m": stored}, tmp_path / "s")
    report = ckt.restore({"m": target}, tmp_path / "s")
    assert torch.equal(target[0].weight, stored[0].old_weight)
    assert torch.equal(target[1].weight, stored[1].weight)
    assert report.matched_by["m/0.old_weight"] == "the module's own load hooks"


def test_hooks_that_do_not_help_leave_a_mismatch_and_an_untouched_module(
    frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    ckt.save({"m": nn.Sequential(Renaming("other"))}, tmp_path / "s")
    target = nn.Sequential(Renaming())
    before = frozen(target)
    with pytest.raises(MismatchError) as caught:
        ckt.restore({"m": target}, tmp_path / "s")
    report: Any = caught.value.report
    assert list(report.missing) == ["m/0.weight"]
    assert list(report.unexpected) == ["m/0.other"]
    assert frozen(target) == before


class Failing(nn.Module):
    """Changes its tensors, then fails, as a bad hook does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.w = nn.Parameter(torch.randn(2))

    def _load_from_state_dict(self, *arguments: Any) -> None:
        with torch.no_grad():
            self.w.fill_(float("nan"))
        self.register_buffer("added", torch.ones(1))
        raise RuntimeError("cannot load")


def test_a_hook_that_fails_half_way_leaves_everything_as_it_was(
    frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    failing = Failing()
    other, extra = nn.Linear(2, 2), Extra({"a": 1})
    tree = {"extra": extra, "bad": failing, "other": other, "t": torch.zeros(3)}
    ckt.save(tree, tmp_path / "s")
    extra.extra = {"a": 2}
    with torch.no_grad():
        other.weight.fill_(7.0)
        tree["t"].fill_(7.0)
    before = frozen([failing, other, extra, tree["t"]])
    with pytest.raises(Exception, match="cannot load"):
        ckt.restore(tree, tmp_path / "s")
    assert frozen([failing, other, extra, tree["t"]]) == before
    assert extra.extra == {"a": 2}


def test_versions_of_modules_come_back_to_their_hooks(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Versioned(nn.Module):
        _version = 7

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *rest: Any) -> None:
            seen.append(local.get("version"))
            super()._load_from_state_dict(state, prefix, local, *rest)

    stored = nn.Sequential(Versioned(), nn.BatchNorm1d(2))
    ckt.save({"m": stored}, tmp_path / "s")
    ckt.restore({"m": nn.Sequential(Versioned(), nn.BatchNorm1d(2))}, tmp_path / "s")
    assert seen[-1] == 7


def test_tensor_leaves_of_the_tree_are_filled_in_place(tmp_path: Path) -> None:
    stored = {"a": torch.arange(6.0).reshape(2, 3), "b": [torch.tensor(1), torch.tensor(2)]}
    ckt.save(stored, tmp_path / "s")
    a = torch.zeros(3, 2).t()
    target: dict[str, Any] = {"a": a, "b": [torch.tensor(0), torch.tensor(0)]}
    ckt.restore(target, tmp_path / "s")
    assert target["a"] is a
    assert torch.equal(a, stored["a"])
    assert [int(t) for t in target["b"]] == [1, 2]


def test_a_lazy_module_is_refused_at_save_and_restore_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="forward pass") as caught:
        ckt.save({"m": nn.LazyLinear(3)}, tmp_path / "s")
    assert "m/weight" in str(caught.value)
    ckt.save({"m": nn.Linear(2, 3)}, tmp_path / "s")
    with pytest.raises(UsageError, match="forward pass"):
        ckt.restore({"m": nn.LazyLinear(3)}, tmp_path / "s")


def test_allow_cast_converts_by_value_in_place(tmp_path: Path) -> None:
    stored, target = nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16)
    ckt.save({"m": stored}, tmp_path / "s")
    weight = target.weight
    report = ckt.restore({"m": target}, tmp_path / "s", allow_cast=True)
    assert target.weight is weight
    assert torch.equal(weight, stored.weight.to(torch.bfloat16))
    assert report.cast["m/weight"] == "float32 -> bfloat16"


def test_plan_touches_nothing_and_says_what_a_restore_would_do(
    make_net: Callable[..., Any], frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    ckt.save({"m": make_net(0)}, tmp_path / "s")
    target = make_net(1, width=4)
    before = frozen(target)
    report = ckptfmt.plan({"m": target}, tmp_path / "s")
    assert frozen(target) == before
    assert "m/mid.weight" in {m.name for m in report.shapes}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)),
        lambda: nn.LSTM(3, 4, 2, bidirectional=True),
        lambda: nn.ParameterDict({"a/b": nn.Parameter(torch.randn(2))}),
        lambda: nn.ModuleDict({"~": nn.Linear(1, 1), "x y": nn.Linear(1, 1)}),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2))),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),
        lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5),
        lambda: nn.BatchNorm2d(3, momentum=None),
        lambda: nn.Transformer(8, 2, 1, 1, 8),
    ],
    ids=["weight_norm", "spectral_norm", "lstm", "parameter_dict", "odd names", "script",
         "orthogonal", "old weight_norm", "old spectral_norm", "pruned", "norm", "transformer"],
)  # fmt: skip
def test_modules_of_all_sorts_are_restored(make: Callable[[], Any], tmp_path: Path) -> None:
    stored, target = make(), make()
    ckt.save({"m": stored}, tmp_path / "s")
    assert ckt.restore({"m": target}, tmp_path / "s").clean
    for key, value in stored.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)


def calibrated(fit: bool) -> Any:
    """Quantization-aware training: observers whose buffers grow when they first see data."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    model.train().qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    model = torch.ao.quantization.prepare_qat(model)
    if fit:
        model(torch.randn(2, 2, 4, 4))
    return model


@pytest.mark.filterwarnings("ignore")
def test_buffers_that_a_modules_own_code_resizes_arrive_and_go_back(
    frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    class Broken(torch.Generator):
        def set_state(self, state: Any) -> Any:
            raise RuntimeError("no device")

    torch.manual_seed(0)
    stored, target = calibrated(True), calibrated(False)
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (stored, target)]
    assert shapes[0] != shapes[1]
    ckt.save({"m": stored, "z": torch.Generator()}, tmp_path)
    before = frozen({k: v.clone() for k, v in target.state_dict().items()})
    with pytest.raises(RuntimeError, match="no device"):
        ckt.restore({"m": target, "z": Broken()}, tmp_path)
    assert frozen({k: v.clone() for k, v in target.state_dict().items()}) == before
    ckt.restore({"m": target, "z": torch.Generator()}, tmp_path)
    assert frozen(dict(target.state_dict())) == frozen(dict(stored.state_dict()))


class Listing(nn.Module):
    """Its state holds a list, and what it does not know it ignores, as torchmetrics does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.held = name, [torch.ones(2)]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kw: Any) -> Any:
        state = super().state_dict(destination=destination, prefix=prefix, **kw)
        state[prefix + self.name] = list(self.held)
        return state

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.held = state.pop(prefix + self.name, self.held)


def test_a_list_in_a_modules_state_under_another_name_is_a_mismatch(tmp_path: Path) -> None:
    stored, target = Listing("a"), Listing("b")
    stored.held = [torch.zeros(3)]
    ckt.save({"m": stored}, tmp_path)
    with pytest.raises(MismatchError, match="missing in the checkpoint: m/b"):
        ckt.restore({"m": target}, tmp_path)
    same = Listing("a")
    ckt.restore({"m": same}, tmp_path)
    assert torch.equal(same.held[0], torch.zeros(3))


def test_a_module_with_hooks_on_meta_becomes_real_and_keeps_its_ties(tmp_path: Path) -> None:
    def build() -> Any:
        model = nn.ModuleDict({"r": Renaming(), "a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        model["b"].weight = model["a"].weight
        return model

    stored = build()
    ckt.save({"m": stored}, tmp_path / "s")
    with torch.device("meta"):
        target = build()
    weight = target["a"].weight
    ckt.restore({"m": target}, tmp_path / "s")
    assert target["a"].weight is target["b"].weight is weight
    for key, value in stored.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)


def test_a_tied_module_with_hooks_and_two_stored_values_is_a_mismatch(tmp_path: Path) -> None:
    loose = nn.ModuleDict({"r": Renaming(), "a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    ckt.save({"m": loose}, tmp_path / "s")
    tied = nn.ModuleDict({"r": Renaming(), "a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(MismatchError, match="two stored values"):
        ckt.restore({"m": tied}, tmp_path / "s")


def test_a_module_that_stands_twice_in_the_tree_is_stored_once(tmp_path: Path) -> None:
    module = nn.Linear(4, 4)
    info = ckt.save({"a": module, "b": module}, tmp_path / "s")
    assert info.tensors == 2
    target = nn.Linear(4, 4)
    assert ckt.restore({"a": target, "b": target}, tmp_path / "s").clean
    assert torch.equal(target.weight, module.weight)
    other = nn.Linear(4, 4)
    ckt.save({"a": module, "b": other}, tmp_path / "two")
    with pytest.raises(MismatchError, match="two stored values"):
        ckt.restore({"a": target, "b": target}, tmp_path / "two")
    assert torch.equal(target.weight, module.weight)


def test_a_state_with_keys_of_another_type_comes_back_with_them(tmp_path: Path) -> None:
    class Numbered(nn.Module):
        got: Any = None

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {1: torch.ones(2), (2, "a"): torch.zeros(1)}

        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            self.got = dict(state)

    ckt.save({"model": Numbered()}, tmp_path)
    target = Numbered()
    ckt.restore({"model": target}, tmp_path)
    assert list(target.got) == [1, (2, "a")]
