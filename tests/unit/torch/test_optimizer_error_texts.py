"""What a user reads when a training state does not fit: each text in full, each a row of a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ckptfmt.torch as ckt
from ckptfmt.errors import MismatchError, UsageError

Tree = dict[str, Any]


def net(*layers: str) -> Any:
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in layers})


def stepped(model: Any, optimizer: Any) -> Any:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: 0.0)
    return optimizer


def job(model: Any, optimizer: Any, schedule: Any = None) -> Tree:
    scheduler = schedule(optimizer) if schedule else lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "opt": optimizer, "sched": scheduler}


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters())


def saved() -> Tree:
    model = net("a", "b")
    return job(model, stepped(model, adam(model)))


def two_groups(model: Any) -> Any:
    a, b = (list(model[name].parameters()) for name in "ab")
    return torch.optim.Adam([{"params": a}, {"params": b}])


def other_class() -> Tree:
    model = net("a", "b")
    return job(model, torch.optim.SGD(model.parameters(), lr=0.1))


def other_groups() -> Tree:
    model = net("a", "b")
    return job(model, two_groups(model))


def removed() -> Tree:
    model = net("a")
    return job(model, adam(model))


def added() -> Tree:
    model = net("a", "b", "c")
    return job(model, adam(model))


def wider() -> Tree:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(3, 2)})
    return job(model, adam(model))


def other_scheduler() -> Tree:
    model = net("a", "b")
    return job(model, adam(model), lambda o: lr_scheduler.ExponentialLR(o, 0.9))


def without_modules() -> Tree:
    model = net("a", "b")
    tree = job(model, adam(model))
    return {"opt": tree["opt"]}


GO_ON = "; nothing was changed; to go on: "
GIVE = "give the target what is stored, or leave it out of names="
TEXTS: dict[str, tuple[Callable[[], Tree], str]] = {
    "another class": (
        other_class,
        "  opt/param_groups: expected the state of SGD, found the state of Adam\n" + GO_ON + GIVE,
    ),
    "other groups": (
        other_groups,
        "  sched/base_lrs: expected 2 parameter groups, found rates for 1\n"
        "  opt/param_groups: expected 2 groups, found 1 group\n" + GO_ON + GIVE,
    ),
    "a removed parameter": (
        removed,
        "  not in the target: model/b.weight\n"
        "  not in the target: model/b.bias\n"
        "  not in the target: opt/state/b.weight/** (3 leaves)\n"
        "  not in the target: opt/state/b.bias/** (3 leaves)\n"
        + GO_ON + "allow_unexpected=('model/b.weight', 'model/b.bias', 'opt/state/b.weight', "
        "'opt/state/b.bias'), or take part with names=",
    ),
    "an added parameter": (
        added,
        "  missing in the checkpoint: opt/state/c.weight\n"
        "  missing in the checkpoint: opt/state/c.bias\n"
        "  missing in the checkpoint: model/c.weight\n"
        "  missing in the checkpoint: model/c.bias\n"
        + GO_ON + "allow_missing=('opt/state/c.weight', 'opt/state/c.bias', 'model/c.weight', "
        "'model/c.bias')",
    ),
    "a parameter of another shape": (
        wider,
        "  opt/state/b.weight/exp_avg: expected (2, 3), found (2, 2)\n"
        "  opt/state/b.weight/exp_avg_sq: expected (2, 3), found (2, 2)\n"
        "  model/b.weight: expected [2, 3], found [2, 2]\n"
        + GO_ON + "give the target the stored shapes, or leave these out of names= "
        "(a function name -> bool may choose)",
    ),
    "another scheduler": (
        other_scheduler,
        "  sched: expected the state of ExponentialLR, found the state of StepLR\n" + GO_ON + GIVE,
    ),
    "without its modules": (
        without_modules,
        "  opt/param_groups: expected state by position, because the optimizer's modules are not "
        "in the target's tree (put them there, or use named(optimizer, module)), found state by "
        "parameter name\n" + GO_ON + GIVE,
    ),
}  # fmt: skip


def lines_of(text: str) -> list[str]:
    return sorted(text.splitlines())


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_says_what_differs_and_how_to_go_on(name: str, tmp_path: Path) -> None:
    make, text = TEXTS[name]
    ckt.save(saved(), tmp_path)
    names = "opt" if name == "without its modules" else None
    with pytest.raises(MismatchError) as caught:
        ckt.restore(make(), tmp_path, names=names)
    expected = "the target and the checkpoint disagree:\n" + text
    if names:
        expected = "nothing in the checkpoint matches the target:\n" + text
    assert lines_of(str(caught.value)) == lines_of(expected)


def states() -> dict[str, Any]:
    tree = saved()
    return {
        "a module": tree["model"].state_dict(),
        "an optimizer": tree["opt"].state_dict(),
        "a scheduler": tree["sched"].state_dict(),
        "generators": {"python": 1, "numpy": 2},
    }


WRONG: dict[tuple[str, str], str] = {
    ("optimizer", "a module"): "expected the state of Adam, found what is no state of an "
    "optimizer: no param_groups",
    ("optimizer", "a scheduler"): "expected the state of Adam, found what is no state of an "
    "optimizer: no param_groups",
    ("scheduler", "an optimizer"): "expected the state of StepLR, found what is no state of a "
    "scheduler: param_groups, state",
    ("scheduler", "generators"): "expected the state of StepLR, found what is no state of a "
    "scheduler: numpy, python",
    ("optimizer", "an optimizer"): "expected state by parameter name, found state by position "
    "(saved without the modules): match_by='position' takes it, if no parameter was added, "
    "removed or reordered since",
}


@pytest.mark.parametrize(("target", "stored"), WRONG)
def test_state_of_another_kind_of_object_is_told_by_its_kind(
    target: str, stored: str, tmp_path: Path
) -> None:
    ckt.save({"x": states()[stored]}, tmp_path)
    model = net("a", "b")
    optimizer = adam(model)
    holder = optimizer if target == "optimizer" else lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(MismatchError) as caught:
        ckt.restore({"x": holder, "model": model}, tmp_path, allow_missing="model")
    assert f": {WRONG[target, stored]}\n" in str(caught.value)
    assert not optimizer.state


def test_lbfgs_says_what_its_joint_vector_wants(tmp_path: Path) -> None:
    def lbfgs(model: Any) -> Tree:
        return {"model": model, "opt": torch.optim.LBFGS(model.parameters())}

    stored = lbfgs(net("a", "b"))
    stepped(stored["model"], stored["opt"])
    ckt.save(stored, tmp_path)
    wanted = "the same parameters in the same order (its state is one vector over all of them)"
    for model, found in (
        (net("b", "a"), "another order"),
        (net("a", "c"), "without c.weight, c.bias; with b.weight, b.bias"),
    ):
        with pytest.raises(MismatchError) as caught:
            ckt.restore(lbfgs(model), tmp_path, strict=False)
        assert f"opt/param_groups: expected {wanted}, found {found}\n" in str(caught.value)


def test_an_optimizer_of_which_a_part_is_in_no_module_says_which(tmp_path: Path) -> None:
    model, other = net("a"), net("x")
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(UsageError) as caught:
        ckt.save({"model": model, "opt": optimizer}, tmp_path)
    assert str(caught.value) == (
        "some of the optimizer's parameters are in no module of the tree: opt: expected all 4 "
        "parameters, or none, in the tree's modules, found 2 in no module: "
        "param_groups[0]['params'][2], param_groups[0]['params'][3]; add the module that holds "
        "them; if the optimizer was built before fully_shard or another call that replaces "
        "parameters, build it afterwards"
    )


def test_an_error_of_the_users_code_says_during_what(tmp_path: Path) -> None:
    ckt.save({"scaler": {"x": 1}}, tmp_path)
    with pytest.raises(KeyError) as caught:
        ckt.restore({"scaler": torch.amp.GradScaler("cpu")}, tmp_path)
    assert caught.value.__notes__ == ["while 'scaler' was restored; what was bound is rolled back"]
