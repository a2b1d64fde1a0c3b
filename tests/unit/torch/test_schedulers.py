"""Learning-rate schedulers go on exactly; functions are named, never stored."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt.errors import CkptWarning, MismatchError, UsageError


class Warm:
    """A schedule that is an object with state: torch keeps its `__dict__`."""

    def __init__(self, warm: int) -> None:
        self.warm = warm

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.warm)


def decay(epoch: int) -> float:
    return 0.95**epoch


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 12, 12, 15], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 12),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=15),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 18, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 30),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 3),
    "CyclicLR with a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 3, scale_fn=decay),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=40),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR with an object": lambda o: lr_scheduler.LambdaLR(o, Warm(15)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LambdaLR(o, Warm(5)), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LambdaLR(o, decay), lr_scheduler.ConstantLR(o, 0.3, 12)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=15),
}


def build(kind: str) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "opt": optimizer, "sched": SCHEDULERS[kind](optimizer)}


def advance(tree: dict[str, Any], times: int) -> list[tuple[float, float]]:
    rates = []
    for _ in range(times):
        tree["opt"].step()
        plateau = isinstance(tree["sched"], lr_scheduler.ReduceLROnPlateau)
        tree["sched"].step(*([1.0] if plateau else []))
        group = tree["opt"].param_groups[0]
        rates.append((group["lr"], group["momentum"]))
    return rates


def test_every_scheduler_of_torch_is_in_the_table() -> None:
    classes = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    } - {"LRScheduler", "_LRScheduler"}
    assert {name.partition(" ")[0] for name in SCHEDULERS} == classes | {"SWALR"}


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_learning_rates_continue_exactly(kind: str, tmp_path: Path) -> None:
    tree, fresh = build(kind), build(kind)
    advance(tree, 10)
    ckt.save(tree, tmp_path, step=10)
    expected = advance(tree, 10)
    assert ckt.restore(fresh, tmp_path).step == 10
    assert advance(fresh, 10) == expected
    if kind == "MultiStepLR":
        assert fresh["sched"].milestones == Counter({3: 1, 12: 2, 15: 1})
        assert type(fresh["sched"].milestones) is Counter
    first, second = (t["opt"].param_groups[0].get("initial_lr") for t in (fresh, tree))
    assert first == second


def test_a_function_is_named_and_the_report_says_that_it_is_the_targets(tmp_path: Path) -> None:
    tree = build("ChainedScheduler")
    ckt.save(tree, tmp_path)
    with ckptfmt.open(tmp_path) as ckpt:
        assert "decay" not in str(ckpt.load(names="sched"))
    report = ckt.restore(build("ChainedScheduler"), tmp_path)
    said = report.matched_by["sched/_schedulers/0/lr_lambdas/0"]
    assert said == "the target's own function 'decay': code is not stored"


def test_another_function_is_a_warning_that_names_both(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    ckt.save({"sched": lr_scheduler.LambdaLR(optimizer, decay)}, tmp_path)

    def cosine(epoch: int) -> float:
        return 1.0

    target = {"sched": lr_scheduler.LambdaLR(optimizer, cosine)}
    with pytest.warns(CkptWarning, match="stored was 'decay', the target has 'cosine'"):
        ckt.restore(target, tmp_path)
    assert target["sched"].lr_lambdas == [cosine]


class Own(lr_scheduler.LRScheduler):
    """A user's scheduler that holds functions among its attributes."""

    def __init__(self, optimizer: Any, power: float) -> None:
        self.curve = functools.partial(pow, exp=power)
        self.table = {"warm": decay}
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [self.curve(base) * self.table["warm"](self.last_epoch) for base in self.base_lrs]


def test_functions_in_a_users_scheduler_stay_its_own(tmp_path: Path) -> None:
    def make() -> Any:
        return Own(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 0.5)

    stored, target = make(), make()
    for _ in range(3):
        stored.optimizer.step()
        stored.step()
    ckt.save({"sched": stored}, tmp_path)
    curve = target.curve
    ckt.restore({"sched": target}, tmp_path)
    assert target.curve is curve
    assert target.table["warm"] is decay
    assert target.last_epoch == 3


def test_a_failure_later_puts_a_scheduler_back(tmp_path: Path) -> None:
    class Late:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state == {"x": 1}:
                raise RuntimeError("no")

    tree, target = build("SequentialLR"), build("SequentialLR")
    advance(tree, 7)
    ckt.save({**tree, "late": Late()}, tmp_path)
    before = str(target["sched"].state_dict())

    class Other(Late):
        def state_dict(self) -> dict[str, Any]:
            return {"x": 2}

    with pytest.raises(RuntimeError, match="no"):
        ckt.restore({**target, "late": Other()}, tmp_path)
    assert str(target["sched"].state_dict()) == before


def test_rates_for_another_number_of_groups_are_a_mismatch(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    ckt.save({"sched": lr_scheduler.StepLR(one, 2)}, tmp_path)
    with pytest.raises(MismatchError, match="base_lrs: expected 2 parameter groups, found rates"):
        ckt.restore({"sched": lr_scheduler.StepLR(two, 2)}, tmp_path)


def test_what_is_no_plain_state_is_refused_with_its_path(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler: Any = lr_scheduler.StepLR(optimizer, 2)
    scheduler.logger = object()
    with pytest.raises(UsageError, match="sched/logger"):
        ckt.save({"sched": scheduler}, tmp_path)
