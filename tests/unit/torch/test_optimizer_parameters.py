"""Parameters that were added, removed, reordered, renamed or saved without a name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt.errors import CkptWarning, MismatchError, UsageError

Frozen = Callable[[Any], Any]


def net(*layers: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in layers})


def stepped(model: Any, optimizer: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return optimizer


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters())


def moment(model: Any, optimizer: Any, name: str) -> Any:
    return optimizer.state[dict(model.named_parameters())[name]]["exp_avg"]


def test_added_and_removed_parameters_are_listed_and_never_swapped(
    frozen: Frozen, tmp_path: Path
) -> None:
    model, target = net("a", "b", "c"), net("a", "new", "c", seed=1)
    optimizer, other = stepped(model, adam(model)), stepped(target, adam(target), 5)
    ckt.save({"model": model, "opt": optimizer}, tmp_path)
    before = frozen([target, other])
    with pytest.raises(MismatchError) as caught:
        ckt.restore({"model": target, "opt": other}, tmp_path)
    assert frozen([target, other]) == before
    report: Any = caught.value.report
    assert set(report.missing) == {
        f"{at}new.{k}" for at in ("model/", "opt/state/") for k in ("weight", "bias")
    }
    assert {n.rpartition("/")[0] for n in report.unexpected if n.startswith("opt")} == {
        "opt/state/b.weight", "opt/state/b.bias",
    }  # fmt: skip
    kept = moment(target, other, "new.weight").clone()
    report = ckt.restore(
        {"model": target, "opt": other}, tmp_path,
        allow_missing=("model/new.*", "opt/state/new.*"),
        allow_unexpected=("model/b.*", "opt/state/b.*"),
    )  # fmt: skip
    for name in ("a.weight", "a.bias", "c.weight", "c.bias"):
        assert torch.equal(moment(target, other, name), moment(model, optimizer, name))
    assert torch.equal(moment(target, other, "new.weight"), kept)
    stepped(target, other)


def test_a_parameter_without_any_state_is_listed_too(tmp_path: Path) -> None:
    model, target = net("a", "b"), net("a")
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, target)]
    ckt.save({"model": model, "opt": sgd[0]}, tmp_path)
    with pytest.raises(MismatchError, match=r"not in the target: opt/state/b\.weight"):
        ckt.restore({"model": target, "opt": sgd[1]}, tmp_path)
    report = ckt.restore({"model": target, "opt": sgd[1]}, tmp_path, strict=False)
    assert {"opt/state/b.weight", "opt/state/b.bias"} <= set(report.unexpected)


def test_a_failure_after_a_partial_restore_brings_all_state_back(
    frozen: Frozen, tmp_path: Path
) -> None:
    model, target = net("a", "b"), net("a", "new", seed=1)
    generator = torch.Generator()
    ckt.save({"model": model, "opt": stepped(model, adam(model)), "g": generator}, tmp_path)
    other = stepped(target, adam(target), 5)
    before = frozen([target, other])

    class Broken(torch.Generator):
        def set_state(self, state: Any) -> Any:
            raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        ckt.restore({"model": target, "opt": other, "g": Broken()}, tmp_path, strict=False)
    assert frozen([target, other]) == before


def test_a_parameter_in_another_group_is_a_mismatch(tmp_path: Path) -> None:
    model = net("a", "b")
    a, b = list(model["a"].parameters()), list(model["b"].parameters())
    optimizer = torch.optim.SGD([{"params": a}, {"params": b, "lr": 0.5}], lr=0.1)
    ckt.save({"model": model, "opt": optimizer}, tmp_path)
    other = torch.optim.SGD([{"params": a[:1]}, {"params": [*b, a[1]], "lr": 0.5}], lr=0.1)
    text = r"expected a\.bias in group 1, found a\.bias in group 0"
    with pytest.raises(MismatchError, match=text):
        ckt.restore({"model": model, "opt": other}, tmp_path, strict=False)


RENAMES: dict[str, Any] = {
    "names": {f"model/old.{k}": f"model/new.{k}" for k in ("weight", "bias")},
    "a function of the model's names": lambda n: n.replace("model/old.", "model/new."),
    "a function of all names": lambda n: n.replace("old.", "new."),
}


@pytest.mark.parametrize("rule", RENAMES)
def test_optimizer_state_follows_its_renamed_parameter(rule: str, tmp_path: Path) -> None:
    model, target = net("a", "old"), net("new", "a", seed=1)
    optimizer, other = stepped(model, adam(model)), adam(target)
    ckt.save({"model": model, "opt": optimizer}, tmp_path)
    report = ckt.restore({"model": target, "opt": other}, tmp_path, rename=RENAMES[rule])
    assert report.clean
    for new, old in (("new.weight", "old.weight"), ("a.bias", "a.bias")):
        assert torch.equal(moment(target, other, new), moment(model, optimizer, old))
    assert report.renamed["opt/state/old.weight/exp_avg"] == "opt/state/new.weight/exp_avg"


def test_state_follows_a_module_that_moves_in_the_tree(tmp_path: Path) -> None:
    def build(seed: int, g: str, d: str) -> dict[str, Any]:
        nets = {g: net("x", seed=seed), d: net("x", seed=seed + 1)}
        both = [*nets[g].parameters(), *nets[d].parameters()]
        return {"nets": nets, "opt": torch.optim.Adam(both)}

    stored, target = build(0, "g", "d"), build(5, "gen", "disc")
    stepped(nn.ModuleList(stored["nets"].values()), stored["opt"])
    ckt.save({"run": stored}, tmp_path)
    rename = {"run": "", "run/nets/g": "nets/gen", "run/nets/d": "nets/disc"}
    report = ckt.restore(target, tmp_path, rename=rename)
    assert report.clean
    for new, old in (("gen", "g"), ("disc", "d")):
        a = moment(stored["nets"][old], stored["opt"], "x.weight")
        assert torch.equal(moment(target["nets"][new], target["opt"], "x.weight"), a)
    name = "run/opt/state/run~1nets~1d.x.weight/step"
    assert report.renamed[name] == "opt/state/nets~1disc.x.weight/step"


def test_a_tie_that_was_cut_gives_the_state_to_one_and_misses_the_other(tmp_path: Path) -> None:
    def build(tied: bool) -> Any:
        model = net("embed", "head")
        if tied:
            model["head"].weight = model["embed"].weight
        return model

    model, target = build(True), build(False)
    optimizer = stepped(model, adam(model))
    ckt.save({"model": model, "opt": optimizer}, tmp_path)
    with pytest.raises(MismatchError, match=r"missing in the checkpoint: opt/state/head\.weight"):
        ckt.restore({"model": target, "opt": adam(target)}, tmp_path)


def test_state_without_names_goes_by_position_only_if_asked(tmp_path: Path) -> None:
    model, target = net("a", "b"), net("x", "y", seed=1)
    optimizer, other = stepped(model, adam(model)), adam(target)
    plain = {"model": [p.detach() for p in model.parameters()], "opt": optimizer.state_dict()}
    ckt.save(plain, tmp_path)
    tree = {"model": target, "opt": other}
    with pytest.raises(MismatchError, match="match_by='position'"):
        ckt.restore(tree, tmp_path)
    planned = ckt.restore(tree, tmp_path, match_by="position")
    assert planned.clean
    assert planned.matched_by["model/x.weight"] == "position"
    assert planned.renamed["opt/state/~3i0/exp_avg"] == "opt/state/x.weight/exp_avg"
    for a, b in zip(model.parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg"], other.state[b]["exp_avg"])
    assert ckptfmt.plan(tree, tmp_path, match_by="position").clean


def test_position_wants_equal_counts_shapes_and_groups(frozen: Frozen, tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 2)})
    optimizer = stepped(model, adam(model))
    ckt.save({"opt": optimizer.state_dict(), "model": list(model.state_dict().values())}, tmp_path)
    swapped = nn.ModuleDict({"b": nn.Linear(3, 2), "a": nn.Linear(2, 3)})
    fewer = nn.ModuleDict({"a": nn.Linear(2, 3)})
    grouped = torch.optim.Adam([{"params": list(m.parameters())} for m in model.values()])
    for target, other, text in (
        (swapped, adam(swapped), r"model/b\.weight: expected \[2, 3\], found \[3, 2\]"),
        (swapped, adam(swapped), r"opt/state/~3i0/exp_avg: expected \(2, 3\), found \(3, 2\)"),
        (fewer, adam(fewer), "expected 2 tensors, for match_by='position', found 4 tensors"),
        (fewer, adam(fewer), "opt/param_groups/0: expected 2 parameters, found 4 parameters"),
        (model, grouped, "opt/param_groups: expected 2 groups, found 1 group"),
    ):
        before = frozen([target, other])
        with pytest.raises(MismatchError, match=text):
            ckt.restore({"model": target, "opt": other}, tmp_path, match_by="position")
        assert frozen([target, other]) == before


def test_position_takes_tied_weights_once_or_under_each_name(tmp_path: Path) -> None:
    def tied(seed: int) -> Any:
        model = net("a", "b", seed=seed)
        model["b"].weight = model["a"].weight
        return model

    model = tied(0)
    for step, stored in enumerate((list(model.parameters()), list(model.state_dict().values()))):
        ckt.save({"m": stored}, tmp_path, step=step)
        target = tied(1)
        ckt.restore({"m": target}, tmp_path, match_by="position")
        assert torch.equal(target["a"].weight, model["a"].weight)
        assert torch.equal(target["b"].bias, model["b"].bias)
        assert target["b"].weight is target["a"].weight


def test_a_module_with_hooks_goes_by_position_too(tmp_path: Path) -> None:
    model, target = net("a"), net("b", seed=1)
    target.register_load_state_dict_post_hook(lambda module, keys: None)
    ckt.save({"m": list(model.parameters())}, tmp_path)
    ckt.restore({"m": target}, tmp_path, match_by="position")
    assert torch.equal(target["b"].weight, model["a"].weight)


def test_an_unknown_way_to_match_is_refused(tmp_path: Path) -> None:
    ckptfmt.save({"x": 1}, tmp_path)
    with pytest.raises(UsageError, match="match_by"):
        ckptfmt.restore({"x": 0}, tmp_path, match_by="order")  # type: ignore[arg-type]


def test_named_gives_names_to_an_optimizer_whose_module_is_elsewhere(tmp_path: Path) -> None:
    model, target = net("a", "b"), net("b", "a", seed=1)
    optimizer, other = stepped(model, adam(model)), adam(target)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CkptWarning)
        ckt.save({"opt": ckt.named(optimizer, model)}, tmp_path)
    ckt.restore({"opt": ckt.named(other, target)}, tmp_path)
    assert torch.equal(moment(target, other, "a.weight"), moment(model, optimizer, "a.weight"))
    third = net("b", "a", seed=2)
    beside = adam(third)
    ckt.restore({"opt": beside, "model": third}, tmp_path, allow_missing="model")
    assert torch.equal(moment(third, beside, "a.weight"), moment(model, optimizer, "a.weight"))


def test_named_is_an_object_with_a_state_by_itself() -> None:
    g, d = net("x"), net("x", seed=1)
    both = [*g.parameters(), *d.parameters()]
    optimizer = torch.optim.Adam(both)
    stepped(nn.ModuleList([g, d]), optimizer)
    state = ckt.named(optimizer, g, d).state_dict()
    assert list(state["state"]) == ["0.x.weight", "0.x.bias", "1.x.weight", "1.x.bias"]
    fresh = torch.optim.Adam(list(reversed(both)))
    ckt.named(fresh, g, d).load_state_dict(state)
    for p in both:
        assert torch.equal(fresh.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_named_refuses_modules_without_the_parameters() -> None:
    model, other = net("a"), net("a")
    with pytest.raises(UsageError, match="none of the modules"):
        ckt.named(adam(model), other)
    with pytest.raises(UsageError, match="none of the modules"):
        ckt.named(adam(model))
    mixed = torch.optim.Adam([*model.parameters(), *other.parameters()])
    with pytest.raises(UsageError, match="2 in no module"):
        ckt.named(mixed, model)


def test_names_that_take_a_part_leave_the_other_parameters_state(tmp_path: Path) -> None:
    model, target = net("a", "b"), net("a", "b", seed=1)
    optimizer, other = stepped(model, adam(model)), stepped(target, adam(target), 5)
    ckt.save({"model": model, "opt": optimizer}, tmp_path)
    kept = moment(target, other, "b.weight").clone()
    ckt.restore({"model": target, "opt": other}, tmp_path, names=lambda n: "b." not in n)
    assert torch.equal(moment(target, other, "a.weight"), moment(model, optimizer, "a.weight"))
    assert torch.equal(moment(target, other, "b.weight"), kept)
