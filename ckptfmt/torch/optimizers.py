"""Optimizers: DCP's form, by parameter name: `optimizer/state/encoder.0.weight/exp_avg`.

`Optimizer.load_state_dict` takes the same form, so that plain torch, DCP and ckptfmt read one. At
restore the state follows the names, whatever the order of the target's parameters; the target keeps
its implementation (`foreach`, `fused`, `capturable`), and moments keep their stored dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckptfmt.engine import (
    ORDER_OPTIMIZER,
    Captured,
    Comparison,
    Staged,
    StoredLeaf,
)
from ckptfmt.errors import UsageError
from ckptfmt.format import escape_key, join_name, parse_key, split_name
from ckptfmt.torch.param_names import ParameterNames, parameter_names
from ckptfmt.torch.tensors import stored_shape
from ckptfmt.torch.trees import mark, to_torch

CLASS = "torch.optimizer"
ALIASES = "torch.param_aliases"
NAMED_BY = "torch.param_named_by"
SHAPED = "torch.param_shaped"

_IMPLEMENTATION = ("foreach", "fused", "capturable")
_SCHEDULERS = (
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr",
)  # fmt: skip
"""What schedulers add to a group: it may be on one side alone."""
_GROUP_OWN = ("params", "param_names")


def capture(optimizer: Any, name: str, peers: Sequence[tuple[str, object]]) -> Captured:
    """The optimizer's `state_dict()`, positions replaced by names."""
    names = parameter_names(optimizer, name, peers, warn=True)
    state = optimizer.state_dict()
    by_id = _names_by_id(state, names, name)
    attributes: dict[str, dict[str, object]] = {}
    tree = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    tree["state"] = {by_id.get(key, key): entry for key, entry in state["state"].items()}
    tree["param_groups"] = [
        {
            **{k: v for k, v in group.items() if k not in _GROUP_OWN},
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
    return Captured(tree, attributes)


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


class OptimizerTarget:
    """An optimizer whose state and groups are replaced; the old ones are kept by reference."""

    order = ORDER_OPTIMIZER

    def __init__(self, optimizer: Any, name: str, peers: Sequence[tuple[str, object]]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._peers = peers
        self._stored: Mapping[str, StoredLeaf] = {}
        self._attributes: Mapping[str, object] = {}
        self._names: ParameterNames | None = None
        self._stored_name: dict[str, str] = {}
        self._old: tuple[Any, Any, Any] | None = None

    # Compare

    def compare(self, comparison: Comparison) -> None:
        self._stored = comparison.stored(self.name)
        self._attributes = comparison.attributes(self.name)
        names = parameter_names(self._optimizer, self.name, self._peers, warn=False)
        self._names = names
        groups_name = join_name(self.name, "param_groups")
        groups = self._stored_groups(groups_name)
        if groups is None:
            comparison.missing(groups_name)
            return
        problems = self._problems(groups, names)
        for where, expected, found in problems:
            comparison.mismatch(join_name(groups_name, where) if where else groups_name,
                                expected, found)  # fmt: skip
        if problems:
            return
        self._compare_hyper_parameters(groups, groups_name, comparison)
        self._compare_state(names, comparison)
        comparison.subtree(self.name)

    def _stored_groups(self, groups_name: str) -> list[dict[str, Any]] | None:
        """The stored groups as far as they are plain: a tensor among them is left out."""
        leaf = self._stored.get(groups_name)
        if leaf is not None:
            return leaf.value if isinstance(leaf.value, list) else None
        groups: dict[int, dict[str, Any]] = {}
        depth = len(split_name(groups_name))
        for name, row in self._stored.items():
            parts = split_name(name)
            if name.startswith(groups_name + "/") and parts[depth].isdigit():
                group = groups.setdefault(int(parts[depth]), {})
                key = parse_key(parts[depth + 1])
                group[str(key)] = row.value if len(parts) == depth + 2 else ...
        return [groups[i] for i in sorted(groups)] or None

    def _problems(
        self, groups: list[dict[str, Any]], names: ParameterNames
    ) -> list[tuple[str, str, str]]:
        """What makes the two sides different optimizers: (where, expected, found)."""
        own = type(self._optimizer).__name__
        stored_class = self._attributes.get(CLASS, own)
        if stored_class != own:
            return [("", f"the state of {own}", f"the state of {stored_class}")]
        ids = [key for group in groups for key in group.get("params", ())]
        by_position = ids and all(isinstance(key, int) for key in ids)  # a plain state_dict()
        stored_by = "position" if by_position else self._attributes.get(NAMED_BY, names.named_by)
        if "position" in (stored_by, names.named_by) and stored_by != names.named_by:
            words = {
                "position": "by position (its modules were not in the tree)",
                "module": "by parameter name",
                "param_names": "by parameter name",
            }
            return [("", f"state {words[names.named_by]}", f"state {words[str(stored_by)]}")]
        if len(groups) != len(names.groups):
            return [("", f"{len(names.groups)} groups", f"{len(groups)} groups")]
        self._stored_name = self._match_names(groups, names)
        problems = []
        for position, (group, wanted) in enumerate(zip(groups, names.groups, strict=True)):
            stored_names = [str(n) for n in group.get("params", ())]
            matched = [self._stored_name.get(n, n) for n in wanted]
            if sorted(matched) != sorted(stored_names):
                problems.append(_names_differ(position, matched, stored_names))
            elif isinstance(self._optimizer, torch.optim.LBFGS) and matched != stored_names:
                problems.append(
                    (
                        str(position),
                        "the same parameters in the same order (LBFGS keeps one flat vector)",
                        "another order",
                    )
                )
        return problems

    def _match_names(self, groups: list[dict[str, Any]], names: ParameterNames) -> dict[str, str]:
        """Target's name -> stored name: the name itself, else by aliases of tied weights."""
        stored = {str(n) for group in groups for n in group.get("params", ())}
        aliases = self._attributes.get(ALIASES)
        by_alias = {
            str(alias): str(name)
            for name, others in (aliases.items() if isinstance(aliases, dict) else ())
            for alias in others
        }
        matched = {}
        for name in names.flat:
            for candidate in (name, *names.aliases.get(name, ())):
                found = candidate if candidate in stored else by_alias.get(candidate)
                if found in stored:
                    matched[name] = str(found)
                    break
        return matched

    def _compare_hyper_parameters(
        self, groups: list[dict[str, Any]], groups_name: str, comparison: Comparison
    ) -> None:
        for position, group in enumerate(groups):
            own = self._optimizer.param_groups[position]
            for key in own:
                if key not in group and key not in (*_GROUP_OWN, *_SCHEDULERS, *_IMPLEMENTATION):
                    comparison.missing(join_name(groups_name, f"{position}/{escape_key(key)}"))
            for key in group:
                if key not in own and key not in (*_GROUP_OWN, *_SCHEDULERS, *_IMPLEMENTATION):
                    comparison.mismatch(
                        join_name(groups_name, f"{position}/{escape_key(key)}"),
                        f"a hyper-parameter of {type(self._optimizer).__name__}",
                        "a stored hyper-parameter that it does not have",
                    )

    def _compare_state(self, names: ParameterNames, comparison: Comparison) -> None:
        """A moment that had its parameter's shape must have it again; others keep theirs."""
        shaped = self._attributes.get(SHAPED)
        shaped = shaped if isinstance(shaped, list) else []
        state_name = join_name(self.name, "state")
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for own_name, parameter in zip(names.flat, parameters, strict=True):
            stored_name = self._stored_name.get(own_name, own_name)
            entry = join_name(state_name, escape_key(stored_name))
            live = self._optimizer.state.get(parameter, {})
            keys = {*shaped, *(k for k in live if isinstance(k, str))}
            for key in keys:
                leaf = self._stored.get(join_name(entry, escape_key(key)))
                if leaf is None or not leaf.dtype:
                    continue
                expected = self._expected_shape(key, key in shaped, parameter, live)
                if expected is not None and tuple(leaf.shape) != expected:
                    comparison.mismatch(
                        leaf.name, str(expected), str(tuple(leaf.shape)), what="shape"
                    )

    def _expected_shape(
        self, key: str, shaped: bool, parameter: Any, live: Mapping[str, Any]
    ) -> tuple[int, ...] | None:
        if shaped:
            return tuple(parameter.shape)
        value = live.get(key)
        if isinstance(value, torch.Tensor) and not isinstance(self._optimizer, torch.optim.LBFGS):
            return stored_shape(value)
        return None

    # Bind

    def bind(self, staged: Staged) -> None:
        if self.name not in staged:
            return
        assert self._names is not None  # compare came first
        tree = to_torch(staged.subtree(self.name), self.name, self._stored)
        state = self._positional(tree, self._names)
        optimizer = self._optimizer
        own_load = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
        spare = copy.deepcopy(optimizer.state_dict()) if own_load else None
        self._old = (optimizer.state, optimizer.param_groups, spare)
        optimizer.load_state_dict(state)
        self._put_dtypes_back(state["state"])

    def _positional(self, tree: Any, names: ParameterNames) -> dict[str, Any]:
        """The stored tree in the form and order that this optimizer's `load_state_dict` takes."""
        position_of = {self._stored_name.get(n, n): i for i, n in enumerate(names.flat)}
        state: dict[str, Any] = {
            k: v for k, v in tree.items() if k not in ("state", "param_groups")
        }
        state["state"] = {position_of.get(key, key): v for key, v in tree["state"].items()}
        groups, start = [], 0
        for stored, own in zip(tree["param_groups"], self._optimizer.param_groups, strict=True):
            group = {k: v for k, v in stored.items() if k not in _GROUP_OWN}
            for key in _IMPLEMENTATION:
                if key in group and key not in own:
                    del group[key]
            for key, value in own.items():
                if key in _IMPLEMENTATION or (key not in group and key not in _GROUP_OWN):
                    group[key] = value
            _like_own_lr(group, own)
            # A range: torch asks for every moment whether its position is among them.
            group["params"] = range(start, start + len(own["params"]))
            start += len(own["params"])
            groups.append(group)
        state["param_groups"] = groups
        return state

    def _put_dtypes_back(self, stored: Mapping[Any, Any]) -> None:
        """torch casts moments to the parameter's dtype when it loads them; saved is saved."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for position, entry in stored.items():
            if not isinstance(position, int) or not isinstance(entry, dict):
                continue
            live = self._optimizer.state.get(parameters[position])
            for key, value in entry.items():
                now = live.get(key) if isinstance(live, dict) else None
                if (
                    key != "step"
                    and isinstance(value, torch.Tensor)
                    and isinstance(now, torch.Tensor)
                    and now.dtype != value.dtype
                ):
                    live[key] = value.to(now.device)

    def undo(self) -> None:
        if self._old is None:
            return
        state, groups, spare = self._old
        if spare is not None:
            self._optimizer.load_state_dict(spare)
        self._optimizer.state, self._optimizer.param_groups = state, groups
        self._old = None


def _like_own_lr(group: dict[str, Any], own: Mapping[str, Any]) -> None:
    """A learning rate that is a tensor in the target stays one: a compiled step holds on to it."""
    for key in ("lr", "initial_lr"):
        mine, stored = own.get(key), group.get(key)
        if isinstance(mine, torch.Tensor) and stored is not None:
            if isinstance(stored, torch.Tensor):
                group[key] = stored.to(mine.device)
            else:
                group[key] = torch.tensor(stored, dtype=mine.dtype, device=mine.device)


def _names_differ(
    position: int, expected: Sequence[str], found: Sequence[str]
) -> tuple[str, str, str]:
    lacking = [n for n in expected if n not in set(found)]
    extra = [n for n in found if n not in set(expected)]

    def words(names: list[str]) -> str:
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    return (
        str(position),
        f"{len(expected)} parameters" + (f", among them {words(lacking)}" if lacking else ""),
        f"{len(found)} parameters" + (f", among them {words(extra)}" if extra else ""),
    )
