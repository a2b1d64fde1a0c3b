"""`nn.Module`: its `state_dict()` at save; compared by name, shape and dtype, then filled in place.

A module whose own code takes part in loading (hooks, overrides, extra state) is bound through its
`load_state_dict`; see `ckptfmt/torch/custom_modules.py`. All others are plain tensor copies.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptfmt.engine import (
    ORDER_TENSOR,
    Captured,
    Comparison,
    Memory,
    Staged,
    StoredLeaf,
    Target,
)
from ckptfmt.format import escape_key, join_name
from ckptfmt.torch.composite_targets import CompositeTarget
from ckptfmt.torch.composites import kind_of
from ckptfmt.torch.custom_modules import (
    CustomModuleTarget,
    own_code,
    refuse_meta_leftovers,
    take_up,
)
from ckptfmt.torch.dtensor import DTensorTarget, is_dtensor
from ckptfmt.torch.memory import memory_of
from ckptfmt.torch.module_names import by_position, by_prefix
from ckptfmt.torch.tensors import Overwrite, ask, check, identity_of, staged_tensor
from ckptfmt.torch.trees import mark
from ckptfmt.torch.wrappers import clean_key, clean_keys, say_prefixes

VERSIONS = "torch.module_versions"


def capture(module: Any, name: str) -> Captured:
    """Keys of `state_dict()` verbatim, wrappers removed; versions as an attribute."""
    state = module.state_dict()
    keys = clean_keys(module, state, name)
    attributes: dict[str, dict[str, object]] = {}
    tree = {}
    for raw, value in state.items():
        key = keys[raw]
        tree[key] = mark(value, attributes, escape_key(key))
    if tree:
        attributes.setdefault("", {})[VERSIONS] = _versions(module, state)
    return Captured(tree, attributes)


def _versions(module: Any, state: Any) -> dict[str, object]:
    """Prefix -> version where it is not 1, which nearly all modules have."""
    metadata = getattr(state, "_metadata", None) or {}
    versions: dict[str, object] = {}
    for prefix, entry in metadata.items():
        version = entry.get("version")
        if version != 1 and (version is None or isinstance(version, int)):
            versions[clean_key(module, prefix) if prefix else ""] = version
    return versions


def module_target(module: Any, name: str) -> Target:
    """The right kind of target: with the module's own code, or plain copies."""
    reason = own_code(module)
    if reason:
        return CustomModuleTarget(module, name, reason, VERSIONS)
    return ModuleTarget(module, name)


@dataclass(slots=True)
class Entry:
    """One name of a module's state and the tensor behind it."""

    name: str
    tensor: Any
    identity: Hashable | None
    composite: CompositeTarget | DTensorTarget | None = None
    """What compares and fills a tensor that is not plain memory."""


def entries(module: Any, name: str) -> list[Entry]:
    """The names and live tensors of a module without code of its own."""
    state = module.state_dict(keep_vars=True)
    keys = clean_keys(module, state, name)
    made = []
    for raw, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            full = join_name(name, escape_key(keys[raw]))
            if is_dtensor(tensor):
                made.append(Entry(full, tensor, None, DTensorTarget(tensor, full)))
                continue
            if kind_of(tensor):
                made.append(Entry(full, tensor, None, CompositeTarget(tensor, full)))
                continue
            check(tensor, full, meta=True)
            made.append(Entry(full, tensor, identity_of(tensor)))
    return made


class ModuleTarget:
    """A module filled by tensor copies: identity, storage, device and strides stay."""

    order = ORDER_TENSOR

    def __init__(self, module: Any, name: str) -> None:
        self.name = name
        self._module = module
        self.identities: Mapping[str, Hashable | None] = {}
        self._asked: list[Entry] = []
        self._stored: Mapping[str, StoredLeaf] = {}
        self._composites: list[CompositeTarget | DTensorTarget] = []
        self._overwrites: list[Overwrite | CompositeTarget | DTensorTarget] = []

    def compare(self, comparison: Comparison) -> None:
        self._stored = stored = comparison.stored(self.name)
        own = entries(self._module, self.name)
        if comparison.match_by == "position":
            tensors = {entry.name: entry.identity for entry in own if entry.composite is None}
            sources = by_position(self.name, tensors, stored, comparison)
            own = [e for e in own if e.name in sources or e.composite is not None]
        else:
            sources = by_prefix(self.name, [e.name for e in own], stored, comparison)
        self._asked = []
        self._composites = [entry.composite for entry in own if entry.composite is not None]
        for composite in self._composites:
            composite.compare(comparison)
        for entry in own:
            if entry.composite is not None:
                continue
            source, rule = sources.get(entry.name, (None, ""))
            if ask(comparison, entry.name, entry.tensor, stored, source=source, rule=rule):
                self._asked.append(entry)
        self.identities = {entry.name: entry.identity for entry in self._asked}
        for composite in self._composites:
            self.identities = {**self.identities, **composite.identities}
        if stored:
            say_prefixes(self._module, self.name, comparison.matched_by)
            refuse_meta_leftovers(self._module, self.name, comparison)

    def memory(self) -> list[Memory]:
        made = [memory for composite in self._composites for memory in composite.memory()]
        for entry in self._asked:
            made += memory_of(entry.name, entry.tensor, entry.identity, self._attributes(entry))
        return made

    def bind(self, staged: Staged) -> None:
        wanted = [entry for entry in self._asked if entry.name in staged]
        written: dict[Hashable, Any] = {}
        for entry in wanted:
            overwrite = Overwrite(entry.tensor)
            self._overwrites.append(overwrite)
            if entry.identity in written:
                overwrite.follow(written[entry.identity])
                continue
            if entry.identity is not None:
                written[entry.identity] = entry.tensor
            value = staged_tensor(staged, entry.name, self._attributes(entry), entry.tensor)
            overwrite.apply(value, keep=staged.undoable)
        for composite in self._composites:
            self._overwrites.append(composite)
            composite.bind(staged)
        if any(isinstance(c, DTensorTarget) and c.became_real for c in self._composites):
            take_up(self._module)

    def _attributes(self, entry: Entry) -> Mapping[str, object]:
        leaf = self._stored.get(entry.name)
        return leaf.attributes if leaf is not None else {}

    def undo(self) -> None:
        while self._overwrites:
            self._overwrites[-1].undo()
            self._overwrites.pop()
