"""Restoring an optimizer: its state follows the parameters' names, its implementation stays.

What differs is listed: parameters of the target that are not stored (they keep what state they
have), stored ones that it does not have, other groups, classes and shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ckptfmt.engine import ORDER_OPTIMIZER, Comparison, Sharded, Staged, StoredLeaf
from ckptfmt.format import escape_key, join_name, parse_key, split_name
from ckptfmt.torch.dtensor import ask_state, is_dtensor, joined
from ckptfmt.torch.optimizer_match import Match, joint_problem, match_by_name, match_by_position
from ckptfmt.torch.optimizers import (
    ALIASES,
    CLASS,
    GROUP_OWN,
    MODULES,
    NAMED_BY,
    SHAPED,
    refuse_in_parts,
)
from ckptfmt.torch.param_names import ParameterNames, parameter_at, parameter_leaf, parameter_names
from ckptfmt.torch.tensors import stored_shape
from ckptfmt.torch.trees import map_tree, to_torch

_IMPLEMENTATION = ("foreach", "fused", "capturable")
_SCHEDULERS = (
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr",
)  # fmt: skip
"""What schedulers add to a group: it may be on one side alone."""
_SHAPED_BY_TORCH = frozenset(
    [
        "acc_delta",
        "ax",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "prev",
        "square_avg",
        "step_size",
        "sum",
        "variance",
    ]
)
"""Keys of torch's own optimizers with their parameter's shape, for state without that attribute."""

_BY_POSITION = (
    "state by position (saved without the modules): match_by='position' takes it, if no parameter "
    "was added, removed or reordered since"
)
_NO_MODULES = (
    "state by position, because the optimizer's modules are not in the target's tree (put them "
    "there, or use named(optimizer, module))"
)


class OptimizerTarget:
    """An optimizer whose state and groups are replaced; the old ones are kept by reference."""

    order = ORDER_OPTIMIZER

    def __init__(self, optimizer: Any, name: str, peers: Sequence[tuple[str, object]]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._peers = peers
        self._stored: Mapping[str, StoredLeaf] = {}
        self._attributes: Mapping[str, object] = {}
        self._names = ParameterNames([], "position")
        self._match = Match()
        self._entries: dict[object, str] = {}
        self._parts: list[str] = []
        self._keep: set[str] = set()
        self._old: tuple[Any, Any, Any] | None = None

    @property
    def _groups_name(self) -> str:
        return join_name(self.name, "param_groups")

    @property
    def _state_name(self) -> str:
        return join_name(self.name, "state")

    # Compare

    def compare(self, comparison: Comparison) -> None:
        refuse_in_parts(self._optimizer, self.name, self._peers)
        self._stored = comparison.stored(self.name)
        self._attributes = comparison.attributes(self.name)
        self._parts = []
        self._names = parameter_names(self._optimizer, self.name, self._peers, warn=False)
        self._entries = self._state_entries()
        groups = self._stored_groups()
        if groups is None:
            self._refuse(comparison)
            return
        problems = self._other_kind(groups, comparison)
        if not problems:
            self._match = self._matched(groups, comparison)
            problems = self._match.problems
        for where, expected, found in problems:
            name = join_name(self._groups_name, where) if where else self._groups_name
            comparison.mismatch(name, expected, found)
        if problems:
            comparison.leave(self.name)  # the mismatch says it for all of it
            return
        self._compare_hyper_parameters(groups, comparison)
        self._compare_shapes(comparison)
        self._ask(comparison)

    def _refuse(self, comparison: Comparison) -> None:
        if not self._stored:
            comparison.missing(self.name)
            return
        what = f"the state of {type(self._optimizer).__name__}"
        comparison.mismatch(self.name, what, "what is no state of an optimizer: no param_groups")
        comparison.leave(self.name)

    def _stored_groups(self) -> list[dict[str, Any]] | None:
        """The stored groups as far as they are plain: a tensor among them is left out."""
        leaf = self._stored.get(self._groups_name)
        if leaf is not None:
            groups: Any = leaf.value
            well_formed = isinstance(groups, list) and all(isinstance(g, dict) for g in groups)
            return groups if well_formed else None
        made: dict[int, dict[str, Any]] = {}
        depth = len(split_name(self._groups_name))
        for name, row in self._stored.items():
            parts = split_name(name)
            below = name.startswith(self._groups_name + "/") and len(parts) > depth + 1
            if below and parts[depth].isdigit():
                group = made.setdefault(int(parts[depth]), {})
                key = parse_key(parts[depth + 1])
                group[str(key)] = row.value if len(parts) == depth + 2 else ...
        return [made[i] for i in sorted(made)] or None

    def _other_kind(
        self, groups: list[dict[str, Any]], comparison: Comparison
    ) -> list[tuple[str, str, str]]:
        """State of another class, or with names where the other side has positions."""
        own = type(self._optimizer).__name__
        stored_class = self._attributes.get(CLASS, own)
        if stored_class != own:
            return [("", f"the state of {own}", f"the state of {stored_class}")]
        if comparison.match_by == "position":
            return []
        by_position = self._stored_by_position(groups)
        if by_position and self._names.named_by != "position":
            return [("", "state by parameter name", _BY_POSITION)]
        if not by_position and self._names.named_by == "position":
            return [("", _NO_MODULES, "state by parameter name")]
        return []

    def _stored_by_position(self, groups: list[dict[str, Any]]) -> bool:
        ids = [key for group in groups for key in group.get("params", ())]
        if ids and all(isinstance(key, int) for key in ids):
            return True  # a plain state_dict()
        return self._attributes.get(NAMED_BY, self._names.named_by) == "position"

    def _matched(self, groups: list[dict[str, Any]], comparison: Comparison) -> Match:
        names = self._names
        stored = [[str(n) for n in group.get("params", ())] for group in groups]
        if comparison.match_by == "position" or names.named_by == "position":
            match = match_by_position(stored, names)
        else:
            aliases = self._attributes.get(ALIASES)
            aliases = aliases if isinstance(aliases, dict) else {}
            match = match_by_name(stored, names, aliases, self._follower(comparison))
        if not match.problems and isinstance(self._optimizer, torch.optim.LBFGS):
            problem = joint_problem(match, stored, names)
            match.problems += [problem] if problem[1] else []
        return match

    def _follower(self, comparison: Comparison) -> Any:
        """A stored name as `rename=` leaves it: it moves along with its parameter."""
        modules = self._attributes.get(MODULES)
        modules = [m for m in modules if isinstance(m, str)] if isinstance(modules, list) else []

        def follow(name: str) -> str:
            leaf = parameter_leaf(name, modules)
            if leaf is None:
                return name
            new = comparison.renamed(leaf)
            moved = parameter_at(new, self._names.modules) if new != leaf else None
            return name if moved is None else moved

        return follow

    def _compare_hyper_parameters(
        self, groups: list[dict[str, Any]], comparison: Comparison
    ) -> None:
        other = (*GROUP_OWN, *_SCHEDULERS, *_IMPLEMENTATION)
        for position, group in enumerate(groups):
            own = self._optimizer.param_groups[position]
            for key in own:
                if key not in group and key not in other:
                    comparison.missing(
                        join_name(self._groups_name, f"{position}/{escape_key(key)}")
                    )
            for key in group:
                if key not in own and key not in other:
                    comparison.mismatch(
                        join_name(self._groups_name, f"{position}/{escape_key(key)}"),
                        f"a hyper-parameter of {type(self._optimizer).__name__}",
                        "a stored hyper-parameter that it does not have",
                    )

    def _parameters(self) -> list[tuple[str, Any]]:
        flat = [p for group in self._optimizer.param_groups for p in group["params"]]
        return list(zip(self._names.flat, flat, strict=True))

    def _compare_shapes(self, comparison: Comparison) -> None:
        """A moment that had its parameter's shape must have it again; others keep theirs."""
        recorded = self._attributes.get(SHAPED)
        shaped = set(recorded) if isinstance(recorded, list) else _SHAPED_BY_TORCH
        for own_name, parameter in self._parameters():
            entry = self._entry(self._match.stored.get(own_name, ""))
            if entry is None:
                continue
            live = self._optimizer.state.get(parameter, {})
            for key in {*shaped, *(k for k in live if isinstance(k, str))}:
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
        if isinstance(self._optimizer, torch.optim.LBFGS):
            return None
        if shaped:
            return tuple(parameter.shape)
        value = live.get(key)
        return stored_shape(value) if isinstance(value, torch.Tensor) else None

    def _state_entries(self) -> dict[object, str]:
        """Key of the stored state -> where it is now. A rename may have moved it already."""
        depth = len(split_name(self._state_name))
        made: dict[object, str] = {}
        for name, leaf in self._stored.items():
            if name.startswith(self._state_name + "/"):
                parts, stored = split_name(name), split_name(leaf.origin or name)
                key = stored[max(0, len(stored) - len(parts) + depth)]
                made.setdefault(parse_key(key), "/".join(parts[: depth + 1]))
        return made

    def _entry(self, stored_name: str) -> str | None:
        """Where a parameter's state is; None where it has none (or takes no part)."""
        by_position = int(stored_name) if stored_name.isdecimal() else None  # a plain state_dict()
        return self._entries.get(stored_name) or self._entries.get(by_position)

    def _ask(self, comparison: Comparison) -> None:
        match = self._match
        self._keep = set(match.missing)
        for name in match.missing:
            comparison.missing(join_name(self._state_name, escape_key(name)))
        for own, stored in match.stored.items():
            entry, goes = self._entry(stored), join_name(self._state_name, escape_key(own))
            if entry is None and not comparison.wanted(goes):
                self._keep.add(own)
            elif entry is not None and entry != goes:
                comparison.moved(entry, goes)
        if not match.surplus:
            self._parts = [self.name]
        else:
            self._parts = self._parts_without(match.surplus, comparison)
        for part in self._parts:
            comparison.subtree(part)
        for own_name, parameter in self._parameters():
            entry = self._entry(match.stored.get(own_name, "")) if is_dtensor(parameter) else None
            if entry is not None:
                for leaf in comparison.stored(entry).values():
                    ask_state(comparison, leaf, parameter)

    def _parts_without(self, surplus: Sequence[str], comparison: Comparison) -> list[str]:
        """The top-level entries, and of the state all but what the target has no parameter for."""
        dropped = {self._entry(name) for name in surplus}
        for name in surplus:
            if self._entry(name) is None:
                comparison.surplus(join_name(self._state_name, escape_key(name)))
        depth = len(split_name(self.name)) + 1
        parts: dict[str, None] = {}
        for name in self._stored:
            split = split_name(name)
            inside = name.startswith(self._state_name + "/")
            part = "/".join(split[: depth + 1] if inside else split[:depth])
            if part not in dropped:
                parts[part] = None
        return list(parts)

    # Bind

    def bind(self, staged: Staged) -> None:
        parts = [part for part in self._parts if part in staged]
        if parts:
            with torch.inference_mode(False):  # or no step could write to the moments
                self._bind(staged, parts)

    def _bind(self, staged: Staged, parts: Sequence[str]) -> None:
        tree: dict[str, Any] = {"state": {}, "param_groups": []}
        for part in parts:
            value = to_torch(staged.subtree(part), part, self._stored)
            if part == self.name:
                tree.update(value)
            elif part.startswith(self._state_name + "/"):
                tree["state"][parse_key(split_name(part)[-1])] = value
            else:
                tree[str(parse_key(split_name(part)[-1]))] = value
        state = self._positional(tree)
        self._join_parts(state["state"])
        optimizer = self._optimizer
        own_load = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
        spare = copy.deepcopy(optimizer.state_dict()) if own_load else None
        self._old = (optimizer.state, optimizer.param_groups, spare)
        optimizer.load_state_dict(state)
        self._put_back_as_saved(state["state"], own_load=own_load)
        self._keep_missing()

    def _join_parts(self, state: Mapping[Any, Any]) -> None:
        """Moments of which this rank has boxes become DTensors like their parameters."""
        parameters = self._parameters()
        for position, entry in state.items():
            if isinstance(position, int) and isinstance(entry, dict):
                name, parameter = parameters[position]
                for key, value in entry.items():
                    if isinstance(value, Sharded):
                        entry[key] = joined(value, parameter, name)

    def _positional(self, tree: Any) -> dict[str, Any]:
        """The stored tree in the form and order that this optimizer's `load_state_dict` takes."""
        position_of: dict[object, int] = {}
        for position, name in enumerate(self._names.flat):
            entry = self._entry(self._match.stored.get(name, ""))
            if entry is not None:
                position_of[parse_key(split_name(entry)[-1])] = position
        state: dict[str, Any] = {
            k: v for k, v in tree.items() if k not in ("state", "param_groups")
        }
        state["state"] = {position_of.get(key, key): v for key, v in tree["state"].items()}
        groups, start = [], 0
        for stored, own in zip(tree["param_groups"], self._optimizer.param_groups, strict=True):
            group = {k: v for k, v in stored.items() if k not in GROUP_OWN}
            for key in _IMPLEMENTATION:
                if key in group and key not in own:
                    del group[key]
            for key, value in own.items():
                if key in _IMPLEMENTATION or (key not in group and key not in GROUP_OWN):
                    group[key] = value
            _like_own_lr(group, own)
            # A range: torch asks for every moment whether its position is among them.
            group["params"] = range(start, start + len(own["params"]))
            start += len(own["params"])
            groups.append(group)
        state["param_groups"] = groups
        return state

    def _put_back_as_saved(self, stored: Mapping[Any, Any], *, own_load: bool) -> None:
        """Saved is saved: torch casts moments to the parameter's dtype when it loads them, also
        those in containers, and moves them to a meta device before the parameter is real."""
        parameters = self._parameters()
        for position, entry in stored.items():
            if not isinstance(position, int) or not isinstance(entry, dict):
                continue
            parameter = parameters[position][1]
            live = self._optimizer.state.get(parameter)
            for key, value in entry.items():
                there = isinstance(live, dict) and key in live
                # What an optimizer of another kind makes of containers is its own affair.
                if there and (isinstance(value, torch.Tensor) or not own_load):
                    live[key] = _as_saved(key, value, live[key], parameter)

    def _keep_missing(self) -> None:
        """Parameters of which nothing is stored, or wanted, go on with the state they had."""
        assert self._old is not None
        for name, parameter in self._parameters():
            if name in self._keep and parameter in self._old[0]:
                self._optimizer.state[parameter] = self._old[0][parameter]

    def undo(self) -> None:
        if self._old is None:
            return
        state, groups, spare = self._old
        if spare is not None:
            self._optimizer.load_state_dict(spare)
        self._optimizer.state, self._optimizer.param_groups = state, groups
        self._old = None


def _as_saved(key: object, value: Any, now: Any, parameter: Any) -> Any:
    """A stored value of a parameter's state in place of what torch made of it (`now`)."""
    if not isinstance(value, torch.Tensor):
        device = None if parameter.is_meta else parameter.device
        return now if now is value else map_tree(value, "", partial(_moved, device=device))
    if not isinstance(now, torch.Tensor):
        return now
    if key == "step":  # its dtype and device depend on the implementation
        return value.to(now.dtype) if now.is_meta else now
    if now.is_meta:
        return value
    return value.to(now.device) if now.dtype != value.dtype else now


def _moved(value: Any, _name: str, *, device: Any) -> Any:
    return value if device is None or not isinstance(value, torch.Tensor) else value.to(device)


def _like_own_lr(group: dict[str, Any], own: Mapping[str, Any]) -> None:
    """A learning rate that is a tensor in the target stays one: a compiled step holds on to it."""
    for key in ("lr", "initial_lr"):
        mine, stored = own.get(key), group.get(key)
        if isinstance(mine, torch.Tensor) and stored is not None:
            if isinstance(stored, torch.Tensor):
                group[key] = stored.to(mine.device)
            else:
                group[key] = torch.tensor(stored, dtype=mine.dtype, device=mine.device)
