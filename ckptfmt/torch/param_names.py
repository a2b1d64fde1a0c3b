"""Names for an optimizer's parameters: by identity in the tree's modules.

A position says nothing once a layer is added; torch's own `param_names` go stale when a state is
loaded. So the modules that stand in the same tree are asked first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ckptfmt.errors import UsageError
from ckptfmt.errors import warn as give_warning
from ckptfmt.format import escape_key, join_name, parse_key
from ckptfmt.torch.wrappers import clean_parameters

NamedBy = Literal["module", "param_names", "position"]


@dataclass(slots=True)
class ParameterNames:
    """Names per parameter group, in the group's order.

    Attributes:
        groups: One name for each parameter.
        named_by: Where the names come from.
        aliases: Name -> the other names of the same parameter (tied weights).
        modules: Where in the tree the modules stand in which the names were found. With more than
            one, a name begins with its module's and a dot.
    """

    groups: list[list[str]]
    named_by: NamedBy
    aliases: dict[str, list[str]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)

    @property
    def flat(self) -> list[str]:
        return [name for group in self.groups for name in group]


def parameter_names(
    optimizer: Any, name: str, peers: Sequence[tuple[str, object]], *, warn: bool
) -> ParameterNames:
    """Name every parameter of an optimizer.

    Raises:
        UsageError: Some parameters are in the tree's modules and some are not.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    wanted = {id(p) for group in groups for p in group}
    found, modules = _in_modules(wanted, peers)
    if found and len(found) < len(wanted):
        missing = [f"param_groups[{g}]['params'][{i}]" for g, group in enumerate(groups)
                   for i, p in enumerate(group) if id(p) not in found]  # fmt: skip
        raise UsageError(
            "some of the optimizer's parameters are in no module of the tree",
            reason="torch-optimizer-parameters",
            where=name,
            expected=f"all {len(wanted)} parameters, or none, in the tree's modules",
            found=f"{len(missing)} in no module: {', '.join(missing[:5])}",
            do="add the module that holds them; if the optimizer was built before fully_shard "
            "or another call that replaces parameters, build it afterwards",
        )
    if found:
        names = [[found[id(p)][0] for p in group] for group in groups]
        _refuse_one_name(names, name)
        aliases = {all_[0]: all_[1:] for all_ in found.values() if len(all_) > 1}
        return ParameterNames(names, "module", aliases, modules)
    own = [group.get("param_names") for group in optimizer.param_groups]
    own_names = [str(n) for group in own for n in group or ()]
    # Those of two modules, named by each alone, name nothing.
    if wanted and all(own) and len(set(own_names)) == len(own_names):
        return ParameterNames([[str(n) for n in group] for group in own], "param_names")
    if warn and wanted:
        give_warning(
            f"{name}: the optimizer's parameters are in no module of the tree, so its state "
            "goes by position; put the module into the tree, or build the optimizer from "
            "named_parameters()"
        )
    return ParameterNames(_positions(groups), "position")


def _refuse_one_name(groups: list[list[str]], name: str) -> None:
    """Of two parameters, as `a` with a child `b` and a module `a.b` would give: one's state would
    take the other's place."""
    counts = Counter(n for group in groups for n in group)
    twice = [n for n, count in counts.items() if count > 1]
    if twice:
        raise UsageError(
            "two parameters of the optimizer have one name",
            reason="torch-optimizer-parameters",
            where=name,
            found=", ".join(map(repr, twice[:5])),
            do="give the modules keys in the tree that are no beginnings of one another",
        )


def _positions(groups: list[list[Any]]) -> list[list[str]]:
    names, start = [], 0
    for group in groups:
        names.append([str(start + i) for i in range(len(group))])
        start += len(group)
    return names


def parameter_leaf(name: str, modules: Sequence[str]) -> str | None:
    """The leaf of the tree that a parameter's name stands for."""
    if len(modules) == 1:
        return join_name(modules[0], escape_key(name))
    for module in sorted(modules, key=len, reverse=True):
        if name.startswith(f"{module}."):
            return join_name(module, escape_key(name[len(module) + 1 :]))
    return None


def parameter_at(leaf: str, modules: Sequence[str]) -> str | None:
    """The reverse: the name of the parameter at a leaf, None where it is in none of the modules."""
    above, _, last = leaf.rpartition("/")
    if above not in modules or not last:
        return None
    key = str(parse_key(last))
    return key if len(modules) == 1 else f"{above}.{key}"


def _in_modules(
    wanted: set[int], peers: Sequence[tuple[str, object]]
) -> tuple[dict[int, list[str]], list[str]]:
    """id of a parameter -> its names; with the module's name in front if one is not enough."""
    modules = [(name, peer) for name, peer in peers if isinstance(peer, torch.nn.Module)]
    found_in: list[tuple[str, dict[int, list[str]]]] = []
    for name, module in modules:
        names: dict[int, list[str]] = {}
        for key, parameter in clean_parameters(module):
            if id(parameter) in wanted:
                known = names.setdefault(id(parameter), [])
                if key not in known:
                    known.append(key)
        if len(names) == len(wanted) and names:
            return names, [name]
        found_in.append((name, names))
    merged: dict[int, list[str]] = {}
    for name, names in found_in:
        for parameter_id, keys in names.items():
            merged.setdefault(parameter_id, []).extend(f"{name}.{k}" for k in keys)
    return merged, [name for name, names in found_in if names]
