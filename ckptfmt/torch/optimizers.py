"""Optimizers: DCP's form, by parameter name: `optimizer/state/encoder.0.weight/exp_avg`.

`Optimizer.load_state_dict` takes the same form, so that plain torch, DCP and ckptfmt read one. At
restore the state follows the names, whatever the order of the target's parameters; the target keeps
its implementation (`foreach`, `fused`, `capturable`), and moments keep their stored dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckptfmt.engine import Captured
from ckptfmt.errors import UsageError
from ckptfmt.torch.param_names import ParameterNames, parameter_names
from ckptfmt.torch.trees import mark
from ckptfmt.torch.wrappers import holds_parts

CLASS = "torch.optimizer"
ALIASES = "torch.param_aliases"
NAMED_BY = "torch.param_named_by"
SHAPED = "torch.param_shaped"
MODULES = "torch.param_modules"

GROUP_OWN = ("params", "param_names")


def capture(
    optimizer: Any, name: str, peers: Sequence[tuple[str, object]], *, in_tree: bool = True
) -> Captured:
    """The optimizer's `state_dict()`, positions replaced by names.

    `in_tree`: the names of `peers` are those of the tree, so that a rename can follow them.
    """
    refuse_in_parts(optimizer, name, peers)
    names = parameter_names(optimizer, name, peers, warn=True)
    state = optimizer.state_dict()
    by_id = _names_by_id(state, names, name)
    attributes: dict[str, dict[str, object]] = {}
    tree = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    tree["state"] = {by_id.get(key, key): entry for key, entry in state["state"].items()}
    if len(tree["state"]) < len(state["state"]):
        raise UsageError(
            "two entries of the optimizer's state have one name",
            reason="torch-optimizer-form",
            where=name,
            found=", ".join(repr(k) for k in state["state"] if k in by_id.values()),
            do="give what belongs to no parameter a key that is no parameter's name",
        )
    tree["param_groups"] = [
        {
            **{k: v for k, v in group.items() if k not in GROUP_OWN},
            "params": [by_id[key] for key in group["params"]],
        }
        for group in state["param_groups"]
    ]
    tree = mark(tree, attributes)
    attributes.setdefault("", {}).update(
        {
            CLASS: type(optimizer).__name__,
            NAMED_BY: names.named_by,
            SHAPED: _shaped(optimizer),
        }
    )
    if names.aliases:
        attributes[""][ALIASES] = names.aliases
    if names.modules and in_tree:
        attributes[""][MODULES] = names.modules
    return Captured(tree, attributes)


def groups_of(
    optimizer: Any, name: str, peers: Sequence[tuple[str, object]]
) -> list[dict[str, Any]]:
    """Its groups as `capture` has them, a constant that is a tensor as its number."""
    names = parameter_names(optimizer, name, peers, warn=False)
    return [
        {
            **{k: _number(v) for k, v in group.items() if k not in GROUP_OWN},
            "params": list(named),
        }
        for group, named in zip(optimizer.param_groups, names.groups, strict=True)
    ]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def refuse_in_parts(optimizer: Any, name: str, peers: Sequence[tuple[str, object]]) -> None:
    """An optimizer of which each rank holds a part under positions, or names, of its own."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise UsageError(
            "a ZeroRedundancyOptimizer holds a part of the state on each rank",
            reason="torch-optimizer-parts",
            where=name,
            do="shard the module with fully_shard and use the plain optimizer; or, on every rank, "
            "consolidate_state_dict(0), and put its state_dict() into the tree of rank 0",
        )
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for at, peer in peers:
        if (
            isinstance(peer, torch.nn.Module)
            and any(id(p) in own for p in peer.parameters())
            and holds_parts(peer)
        ):
            raise UsageError(
                "an optimizer of a FullyShardedDataParallel holds a part of the state on each rank",
                reason="torch-optimizer-parts",
                where=name,
                found=f"sharded parameters of {at!r}",
                do="shard the module with fully_shard; or save what get_state_dict(model, "
                "optimizer) gives, by ckptfmt.torch.dcp",
            )


def _names_by_id(state: Mapping[str, Any], names: ParameterNames, name: str) -> dict[Any, str]:
    try:
        ids = [key for group in state["param_groups"] for key in group["params"]]
        if isinstance(state["state"], dict) and len(set(ids)) == len(names.flat):
            return dict(zip(ids, names.flat, strict=True))
    except (TypeError, KeyError, ValueError):
        pass
    raise UsageError(
        "the optimizer's state_dict() has another form than torch's",
        reason="torch-optimizer-form",
        where=name,
        expected="state by position, and param_groups with all parameters",
        found=", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__,
        do="put an object with state_dict and load_state_dict into the tree that holds it",
    )


def _shaped(optimizer: Any) -> list[str]:
    """Keys of the state whose tensors always have their parameter's shape."""
    yes: set[str] = set()
    no: set[str] = set()
    for parameter, entry in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(entry, dict):
            continue
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and isinstance(key, str):
                (yes if value.shape == parameter.shape else no).add(key)
    return sorted(yes - no)
