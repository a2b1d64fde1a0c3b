"""Optimizers: state by parameter name, moments in their stored dtype, the target's own switches."""

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


def stepped(module: Any, optimizer: Any, times: int = 2) -> Any:
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for seed in range(times):
        generator = torch.Generator().manual_seed(seed)
        for parameter in module.parameters():
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = grad.to_sparse(1) if sparse else grad.to(parameter.dtype)
        optimizer.step(lambda: 0.0) if isinstance(
            optimizer, torch.optim.LBFGS
        ) else optimizer.step()
    return optimizer


def pair(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def test_the_stored_form_is_dcps(tmp_path: Path) -> None:
    model = pair()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    with ckptfmt.open(tmp_path / "s") as ckpt:
        names = set(ckpt.names("opt"))
        groups = ckpt["opt/param_groups"]
    assert "opt/state/0.weight/exp_avg" in names
    assert "opt/state/1.bias/step" in names
    assert isinstance(groups, list)
    assert groups[0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    fresh = torch.optim.AdamW(model.parameters(), lr=0.2)
    fresh.load_state_dict(ckt.load(tmp_path / "s")["opt"])
    assert fresh.param_groups[0]["lr"] == 0.1


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2]),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True, maximize=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "Adam with a tensor as learning rate": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.1), foreach=False
    ),
}


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    classes = {
        name
        for name in dir(torch.optim)
        if isinstance(kind := getattr(torch.optim, name), type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    assert {name.partition(" ")[0] for name in OPTIMIZERS} == classes


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_as_the_saved_one(
    kind: str, frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    model, target = pair(), pair(1)
    optimizer = stepped(model, OPTIMIZERS[kind](model.parameters()))
    fresh = OPTIMIZERS[kind](target.parameters())
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    assert ckt.restore({"model": target, "opt": fresh}, tmp_path / "s").clean
    assert frozen(fresh.state_dict()) == frozen(optimizer.state_dict())
    stepped(model, optimizer, 1)
    stepped(target, fresh, 1)
    assert frozen(dict(target.state_dict())) == frozen(dict(model.state_dict()))
    assert frozen(fresh.state_dict()) == frozen(optimizer.state_dict())


def test_state_follows_names_not_positions(tmp_path: Path) -> None:
    model, target = pair(), pair(1)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    fresh = torch.optim.Adam(list(reversed(list(target.parameters()))))
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    ckt.restore({"model": target, "opt": fresh}, tmp_path / "s")
    for a, b in zip(model.parameters(), target.parameters(), strict=True):
        assert torch.equal(optimizer.state[a]["exp_avg"], fresh.state[b]["exp_avg"])


def test_an_alias_of_a_tied_weight_is_a_name_too(tmp_path: Path) -> None:
    def tied(first: str, second: str) -> Any:
        model = nn.ModuleDict({first: nn.Linear(2, 2, bias=False)})
        model[second] = nn.Linear(2, 2, bias=False)
        model[second].weight = model[first].weight
        return model

    model, target = tied("embed", "head"), tied("head", "embed")
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    fresh = torch.optim.Adam(target.parameters())
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    ckt.restore({"model": target, "opt": fresh}, tmp_path / "s")
    (a,), (b,) = optimizer.state.values(), fresh.state.values()
    assert torch.equal(a["exp_avg"], b["exp_avg"])


def test_moments_keep_their_stored_dtype(tmp_path: Path) -> None:
    model, target = pair().to(torch.bfloat16), pair(1).to(torch.bfloat16)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    for entry in optimizer.state.values():
        entry["exp_avg"] = entry["exp_avg"].float() + 1e-6
    fresh = torch.optim.Adam(target.parameters())
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    ckt.restore({"model": target, "opt": fresh}, tmp_path / "s")
    for a, b in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert b["exp_avg"].dtype == torch.float32
        assert b["exp_avg_sq"].dtype == torch.bfloat16
        assert torch.equal(a["exp_avg"], b["exp_avg"])


def test_the_target_keeps_its_implementation_and_takes_hyper_parameters(tmp_path: Path) -> None:
    model, target = pair(), pair(1)
    optimizer = stepped(model, torch.optim.Adam(model.parameters(), lr=0.5, foreach=True))
    fresh = torch.optim.Adam(target.parameters(), lr=0.1, fused=True)
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    ckt.restore({"model": target, "opt": fresh}, tmp_path / "s")
    group = fresh.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"]) == (0.5, True, None)
    stepped(target, fresh, 1)


def test_a_fresh_checkpoint_empties_a_stepped_optimizer(tmp_path: Path) -> None:
    model, target = pair(), pair(1)
    ckt.save({"model": model, "opt": torch.optim.Adam(model.parameters())}, tmp_path / "s")
    optimizer = stepped(target, torch.optim.Adam(target.parameters()))
    ckt.restore({"model": target, "opt": optimizer}, tmp_path / "s")
    assert not optimizer.state


def test_a_tensor_learning_rate_stays_one(tmp_path: Path) -> None:
    model, target = pair(), pair(1)
    lr = torch.tensor(0.25)
    optimizer = stepped(model, torch.optim.Adam(model.parameters(), lr=lr, foreach=False))
    fresh = torch.optim.Adam(target.parameters(), lr=torch.tensor(0.5), foreach=False)
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    ckt.restore({"model": target, "opt": fresh}, tmp_path / "s")
    assert torch.equal(fresh.param_groups[0]["lr"], lr)
    assert isinstance(fresh.param_groups[0]["lr"], torch.Tensor)


def other_class(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def other_groups(model: Any) -> Any:
    return torch.optim.Adam([{"params": [p]} for p in model.parameters()])


def other_parameters(model: Any) -> Any:
    return torch.optim.Adam(list(model.parameters())[:2])


@pytest.mark.parametrize("make", [other_class, other_groups, other_parameters])
def test_another_optimizer_is_a_mismatch_and_nothing_changes(
    make: Callable[[Any], Any], frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    model, target = pair(), pair(1)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    wrong = stepped(target, make(target))
    before = frozen([target, wrong])
    with pytest.raises(MismatchError, match="opt/"):
        ckt.restore({"model": target, "opt": wrong}, tmp_path / "s")
    assert frozen([target, wrong]) == before


def test_lbfgs_goes_on_with_the_history_of_its_joint_vector(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[Any, Any]:
        model = pair(seed)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, history_size=3, max_iter=4)

    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(7))

    def advance(model: Any, optimizer: Any) -> float:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    (model, optimizer), (target, fresh) = build(0), build(1)
    advance(model, optimizer)
    ckt.save({"model": model, "opt": optimizer}, tmp_path)
    assert ckt.restore({"model": target, "opt": fresh}, tmp_path).clean
    for _ in range(3):
        assert advance(target, fresh) == advance(model, optimizer)


def test_an_optimizer_in_parts_is_refused_with_the_cure(tmp_path: Path) -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """Known by its name: the real one needs a process group to be built."""

    model = pair()
    optimizer = ZeroRedundancyOptimizer(model.parameters())
    with pytest.raises(UsageError, match="consolidate_state_dict"):
        ckt.save({"model": model, "opt": optimizer}, tmp_path)
    ckt.save({"model": model}, tmp_path)
    with pytest.raises(UsageError, match="holds a part of the state on each rank"):
        ckt.restore({"model": model, "opt": optimizer}, tmp_path)


def test_lbfgs_over_another_order_is_a_mismatch(tmp_path: Path) -> None:
    model, target = pair(), pair(1)
    optimizer = stepped(model, torch.optim.LBFGS(model.parameters()))
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    other = torch.optim.LBFGS(list(reversed(list(target.parameters()))))
    with pytest.raises(MismatchError, match="order"):
        ckt.restore({"model": target, "opt": other}, tmp_path / "s")


def test_a_moment_of_another_shape_is_a_mismatch_also_for_a_fresh_optimizer(
    tmp_path: Path,
) -> None:
    model, target = nn.Linear(3, 2), nn.Linear(4, 2)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    fresh = torch.optim.Adam(target.parameters())
    with pytest.raises(MismatchError) as caught:
        ckt.restore({"model": target, "opt": fresh}, tmp_path / "s")
    report: Any = caught.value.report
    assert "opt/state/weight/exp_avg" in {m.name for m in report.shapes}


def test_an_unknown_hyper_parameter_is_a_mismatch_and_a_schedulers_is_not(
    tmp_path: Path,
) -> None:
    model = pair()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s", step=1)
    fresh = torch.optim.Adam(model.parameters())
    ckt.restore({"model": model, "opt": fresh}, tmp_path / "s")
    assert fresh.param_groups[0]["initial_lr"] == 0.1
    optimizer.param_groups[0]["trust"] = 0.5
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s", step=2)
    with pytest.raises(MismatchError, match="trust"):
        ckt.restore({"model": model, "opt": fresh}, tmp_path / "s")


def test_without_its_module_an_optimizer_goes_by_position_and_says_so(tmp_path: Path) -> None:
    model, target = pair(), pair(1)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    with pytest.warns(CkptWarning, match="by position"):
        ckt.save({"opt": optimizer}, tmp_path / "s")
    fresh = torch.optim.Adam(target.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CkptWarning)
        ckt.restore({"opt": fresh}, tmp_path / "s")
    assert len(fresh.state) == 4
    with pytest.raises(MismatchError, match="position"):
        ckt.restore({"opt": fresh, "model": target}, tmp_path / "s", names="opt")


def test_a_plain_state_dict_of_an_optimizer_goes_by_position_only(tmp_path: Path) -> None:
    model, target = pair(), pair(1)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    ckt.save({"opt": optimizer.state_dict()}, tmp_path / "s")
    loaded = ckt.load(tmp_path / "s")["opt"]
    assert list(loaded["state"]) == [0, 1, 2, 3]
    fresh = torch.optim.Adam(target.parameters())
    fresh.load_state_dict(loaded)
    other = torch.optim.Adam(target.parameters())
    with pytest.raises(MismatchError, match="by position"):
        ckt.restore({"model": target, "opt": other}, tmp_path / "s", names="opt")
    ckt.restore({"model": target, "opt": other}, tmp_path / "s", names="opt", match_by="position")
    assert len(other.state) == 4


def test_an_optimizer_with_a_form_of_its_own_is_refused_with_the_cure(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": 1}

    model = pair()
    with pytest.raises(UsageError, match="another form"):
        ckt.save({"model": model, "opt": Own(model.parameters())}, tmp_path / "s")
    assert not (tmp_path / "s" / "checkpoints").exists()


def test_a_part_of_the_whole_state_leaves_the_rest_alone(
    frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    model, target = pair(), pair(1)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    saved = {"model": model, "opt": optimizer, "rng": ckt.rng_state()}
    ckt.save(saved, tmp_path / "s")
    other = stepped(target, torch.optim.Adam(target.parameters(), lr=0.3))
    state = {"model": target, "opt": other, "rng": ckt.rng_state()}
    before, generator = frozen(other), torch.get_rng_state()
    report = ckt.restore(state, tmp_path / "s", names="model")
    assert {name.partition("/")[0] for name in report.matched} == {"model"}
    assert not report.missing
    assert frozen(other) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(target[0].weight, model[0].weight)


def test_a_hyper_parameter_that_an_old_checkpoint_lacks_can_be_allowed(tmp_path: Path) -> None:
    model, target = pair(), pair(1)
    optimizer = stepped(model, torch.optim.Adam(model.parameters(), lr=0.5))
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    ckt.save({"model": model, "opt": optimizer}, tmp_path / "s")
    fresh = torch.optim.Adam(target.parameters())
    missing = "opt/param_groups/0/decoupled_weight_decay"
    with pytest.raises(MismatchError, match=missing):
        ckt.restore({"model": target, "opt": fresh}, tmp_path / "s")
    ckt.restore({"model": target, "opt": fresh}, tmp_path / "s", allow_missing=missing)
    assert fresh.param_groups[0]["lr"] == 0.5
    assert fresh.param_groups[0]["decoupled_weight_decay"] is False


@pytest.mark.parametrize("atomic", [True, False])
def test_renamed_layers_and_one_pass_restores(atomic: bool, tmp_path: Path) -> None:
    stored = nn.ModuleDict({"old": nn.Linear(2, 2)})
    target = nn.ModuleDict({"new": nn.Linear(2, 2)})
    ckt.save({"m": stored}, tmp_path / "s")
    rename = {f"m/old.{k}": f"m/new.{k}" for k in ("weight", "bias")}
    ckt.restore({"m": target}, tmp_path / "s", rename=rename, atomic=atomic)
    assert torch.equal(target["new"].weight, stored["old"].weight)


def test_an_unchanged_state_writes_no_data_again(tmp_path: Path) -> None:
    model = pair()
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    tree = {"model": model, "opt": optimizer}
    first = ckt.save(tree, tmp_path / "s", step=1)
    second = ckt.save(tree, tmp_path / "s", step=2)
    assert first.written_nbytes > 0
    assert second.written_nbytes == 0
    assert second.digest == first.digest


def test_two_optimizers_and_one_over_two_modules(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        g, d = nn.Linear(2, 2), nn.Linear(2, 2)
        return {
            "G": g,
            "D": d,
            "opt_g": torch.optim.Adam(g.parameters()),
            "both": torch.optim.SGD([*g.parameters(), *d.parameters()], momentum=0.9),
        }

    stored, target = build(), build()
    stepped(stored["D"], stepped(stored["G"], stored["opt_g"]))
    stored["both"].step()
    ckt.save(stored, tmp_path / "s")
    ckt.restore(target, tmp_path / "s")
    a, b = stored["both"], target["both"]
    for x, y in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
        assert torch.equal(a.state[x]["momentum_buffer"], b.state[y]["momentum_buffer"])


def test_a_failure_after_the_optimizer_brings_its_old_state_back(
    frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    class Late:
        """Fails when it is given its state."""

        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("no")

    model, target = pair(), pair(1)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    generator = torch.Generator()
    ckt.save({"model": model, "opt": optimizer, "g": generator}, tmp_path / "s")
    other = stepped(target, torch.optim.Adam(target.parameters(), lr=0.7))
    state, groups = other.state, other.param_groups
    before = frozen([target, other])

    class Broken(torch.Generator):
        def set_state(self, state: Any) -> Any:
            raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        ckt.restore({"model": target, "opt": other, "g": Broken()}, tmp_path / "s")
    assert frozen([target, other]) == before
    assert other.state is state
    assert other.param_groups is groups


def test_a_warning_points_at_the_callers_line(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], momentum=0.9)
    with pytest.warns(CkptWarning, match="by position") as caught:
        ckt.save({"optimizer": optimizer}, tmp_path)
    assert caught[0].filename == __file__


def test_moments_in_containers_come_back_as_they_were_saved(tmp_path: Path) -> None:
    def optimizer() -> Any:
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return torch.optim.SGD([("w", parameter)], lr=0.1)

    saved = optimizer()
    exact, count = torch.tensor([1.0001, 2.0002, 3.0]), torch.tensor([123456789])
    saved.state[saved.param_groups[0]["params"][0]] = {
        "parts": {"row": exact, "count": count}, "list": [exact], "mode": "factored",
    }  # fmt: skip
    ckt.save({"optimizer": saved}, tmp_path)
    target = optimizer()
    ckt.restore({"optimizer": target}, tmp_path)
    (entry,) = target.state.values()
    assert torch.equal(entry["parts"]["row"], exact)
    assert torch.equal(entry["parts"]["count"], count)
    assert entry["list"][0].dtype == torch.float32
    assert entry["mode"] == "factored"


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_over_meta_parameters_gets_real_moments(fused: bool, tmp_path: Path) -> None:
    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    step(model, optimizer)
    ckt.save({"model": model, "optimizer": optimizer}, tmp_path)
    with torch.device("meta"):
        target = nn.Linear(4, 4)
    fresh = torch.optim.AdamW(target.parameters(), foreach=not fused)
    if fused:
        fresh.param_groups[0].update(fused=True, foreach=None)
    ckt.restore({"model": target, "optimizer": fresh}, tmp_path)
    assert not any(x.is_meta for entry in fresh.state.values() for x in entry.values())
    step(model, optimizer)
    step(target, fresh)
    assert torch.equal(target.weight, model.weight)


def test_an_optimizer_restored_in_inference_mode_can_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckt.save({"model": model, "optimizer": optimizer}, tmp_path)
    with torch.inference_mode():
        ckt.restore({"model": model, "optimizer": optimizer}, tmp_path)
    optimizer.step()


def stepped_over(modules: list[nn.Module], parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(parameters)
    for scale, module in enumerate(modules, 1):
        (module(torch.ones(1, 2)).sum() * scale).backward()
    optimizer.step()
    return optimizer


def test_names_that_two_modules_share_name_no_parameter(tmp_path: Path) -> None:
    """torch takes `named_parameters()` of two modules as they are; by these names one's moments
    would take the place of the other's."""
    nets: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    groups = [{"params": list(net.named_parameters())} for net in nets]
    optimizer = stepped_over(nets, groups)
    with pytest.warns(CkptWarning, match="goes by position"):
        ckt.save({"optimizer": optimizer}, tmp_path)
    fresh = torch.optim.Adam([{"params": list(net.named_parameters())} for net in nets])
    ckt.restore({"optimizer": fresh}, tmp_path)
    for net in nets:
        for parameter in net.parameters():
            expected = optimizer.state[parameter]["exp_avg"]
            assert torch.equal(fresh.state[parameter]["exp_avg"], expected)


def test_two_parameters_of_one_name_are_refused(tmp_path: Path) -> None:
    one, other = nn.ModuleDict({"b": nn.Linear(2, 2)}), nn.Linear(2, 2)
    optimizer = stepped_over([one["b"], other], [*one.parameters(), *other.parameters()])
    with pytest.raises(UsageError, match="two parameters of the optimizer have one name"):
        ckt.save({"a": one, "a.b": other, "optimizer": optimizer}, tmp_path)
    net: Any = nn.Module()
    net.register_parameter("count", nn.Parameter(torch.ones(2)))
    own: Any = torch.optim.SGD(net.parameters(), momentum=0.9)
    net.count.sum().backward()
    own.step()
    own.state["count"] = {"steps": 3}
    with pytest.raises(UsageError, match="two entries of the optimizer's state have one name"):
        ckt.save({"net": net, "optimizer": own}, tmp_path)
