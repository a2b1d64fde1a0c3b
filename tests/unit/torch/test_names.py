"""Names without wrappers, and names for an optimizer's parameters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ckptfmt.errors import CkptWarning, UsageError
from ckptfmt.torch.param_names import parameter_names
from ckptfmt.torch.wrappers import clean_keys, clean_parameters, unwrap


class Named(nn.Module):
    """A module with real children of the names that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)


def cleaned(module: Any) -> list[str]:
    return list(clean_keys(module, module.state_dict(), "m").values())


def wrapped(kind: str, module: Any) -> Any:
    if kind == "compile":
        return torch.compile(module, backend="eager")
    if kind == "data_parallel":
        return nn.DataParallel(module)
    if kind == "checkpoint":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            checkpoint_wrapper,
        )

        return checkpoint_wrapper(module)
    return module


KINDS = ("none", "compile", "data_parallel", "checkpoint")


@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), Named])
def test_wrappers_leave_no_trace_in_names_and_real_children_stay(
    outer: str, inner: str, make: Any
) -> None:
    if outer == inner == "compile":
        pytest.skip("torch makes no module of a module compiled twice")
    plain = make()
    expected = list(plain.state_dict())
    module = wrapped(outer, wrapped(inner, plain))
    assert cleaned(module) == expected
    assert [name for name, _ in clean_parameters(module)] == expected
    assert unwrap(module) is plain
    holder = nn.Sequential(module)
    assert cleaned(holder) == [f"0.{key}" for key in expected]
    assert [name for name, _ in clean_parameters(holder)] == [f"0.{key}" for key in expected]


def test_an_averaged_model_is_no_wrapper() -> None:
    model = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    assert cleaned(model) == ["n_averaged", "module.weight", "module.bias"]


def test_a_wrapper_with_an_entry_of_its_own_under_a_wrapped_name_is_refused() -> None:
    class Scaled(nn.DataParallel):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.weight = nn.Parameter(torch.ones(1))

    with pytest.raises(UsageError, match="two entries have one name") as caught:
        cleaned(Scaled(nn.Linear(2, 2)))
    assert "'weight'" in str(caught.value)
    assert "'module.weight'" in str(caught.value)


def names(optimizer: Any, *peers: tuple[str, object]) -> Any:
    return parameter_names(optimizer, "opt", [*peers, ("opt", optimizer)], warn=True)


def test_names_go_by_identity_in_the_trees_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    parameters = [model[1].bias, model[0].weight]
    found = names(torch.optim.SGD(parameters), ("model", torch.compile(model, backend="eager")))
    assert found.groups == [["1.bias", "0.weight"]]
    assert found.named_by == "module"


def test_tied_weights_have_aliases() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    found = names(torch.optim.SGD(model.parameters()), ("model", model))
    assert found.aliases == {"a.weight": ["b.weight"]}


def test_the_modules_name_stands_in_front_only_where_several_are_spanned() -> None:
    g, d = nn.Linear(2, 2), nn.Linear(2, 2)
    one = names(torch.optim.SGD(d.parameters()), ("G", g), ("D", d))
    assert one.groups == [["weight", "bias"]]
    both = names(torch.optim.SGD([g.weight, d.weight]), ("G", g), ("D", d))
    assert both.groups == [["G.weight", "D.weight"]]


def test_without_modules_torchs_own_names_count_then_positions_with_a_warning() -> None:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = names(torch.optim.SGD(model.named_parameters()))
    assert found.groups == [["weight", "bias"]]
    assert found.named_by == "param_names"
    with pytest.warns(CkptWarning, match="goes by position"):
        found = names(torch.optim.SGD(model.parameters()))
    assert found.groups == [["0", "1"]]


def test_parameters_that_are_only_partly_in_modules_are_refused() -> None:
    model = nn.Linear(2, 2)
    stray = nn.Parameter(torch.ones(2))
    with pytest.raises(UsageError, match="fully_shard") as caught:
        names(torch.optim.SGD([*model.parameters(), stray]), ("model", model))
    assert "param_groups[0]['params'][2]" in str(caught.value)
