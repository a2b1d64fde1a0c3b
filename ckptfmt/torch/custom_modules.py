"""Modules whose own code takes part in loading: hooks, overrides, extra state.

They are compared by name like others; where names differ, their hooks are tried on a shadow whose
tensors have no data. They are bound through `load_state_dict`, after a copy of what they hold.
"""

from __future__ import annotations

import copy
import io
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ckptfmt.engine import (
    ORDER_USER_CODE,
    Comparison,
    Memory,
    Staged,
    StoredLeaf,
    copy_state,
    keep_generators,
)
from ckptfmt.errors import UnsupportedError
from ckptfmt.format import escape_key, join_name, parse_key, split_name
from ckptfmt.torch.composite_targets import CompositeTarget, assign, copied
from ckptfmt.torch.composites import kind_of, text_of
from ckptfmt.torch.dtypes import CARRIED, torch_dtype
from ckptfmt.torch.memory import memory_of
from ckptfmt.torch.module_names import by_position
from ckptfmt.torch.tensors import (
    Overwrite,
    ask,
    bits,
    check,
    host_copy,
    identity_of,
    stored_shape,
    writing,
)
from ckptfmt.torch.trees import to_torch
from ckptfmt.torch.wrappers import clean_key, clean_keys, clean_modules, say_prefixes, wrapper_of

EXTRA_STATE = "_extra_state"
_METHODS = (
    "state_dict",
    "_save_to_state_dict",
    "load_state_dict",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
)
_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


def is_fsdp_hook(hook: object) -> bool:
    """One by which FSDP takes up parameters that were exchanged: `take_up` does the same."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def take_up(module: Any) -> None:
    """FSDP looks at its parameters again, after meta ones became real."""
    for child in module.modules():
        for hook in list(child._load_state_dict_post_hooks.values()):
            if is_fsdp_hook(hook):
                hook(child, None)


def own_code(module: Any) -> str:
    """Why a module must be loaded by its own code, or "" if plain copies do the same."""
    for prefix, child in clean_modules(module):
        row = wrapper_of(child)
        if row is not None and not row[1]:
            continue  # it takes its child out of the keys by hooks of its own
        where = prefix[:-1] or "the module"
        for method in _METHODS if row is None else ():
            function = getattr(type(child), method)
            origin = getattr(function, "__module__", "") or ""
            if method in child.__dict__ or not (origin + ".").startswith("torch.nn."):
                return f"{where} overrides {method}"
        for hooks in _HOOKS:
            if any(not is_fsdp_hook(hook) for hook in (getattr(child, hooks, None) or {}).values()):
                return f"{where} has {hooks.strip('_')}"
    return "" if _is_live(module) else "state_dict() gives copies, as a wrapper's hooks make them"


def _is_live(module: Any) -> bool:
    """Whether the state is the module's own tensors: what is copied into others would be lost."""
    own = {
        id(tensor)
        for child in module.modules()
        for table in (child._parameters, child._buffers)
        for tensor in table.values()
    }
    state = module.state_dict(keep_vars=True)
    return all(id(t) in own for t in state.values() if isinstance(t, torch.Tensor))


class CustomModuleTarget:
    """A module bound through its `load_state_dict`; undone by its old tensors and extra state."""

    order = ORDER_USER_CODE

    def __init__(self, module: Any, name: str, reason: str, versions: str) -> None:
        self.name = name
        self._module = module
        self._reason = reason
        self._versions_key = versions
        self._raw: dict[str, str] = {}
        self._root = "".join(_root_prefix(module))
        self._stored: Mapping[str, StoredLeaf] = {}
        self._tensors: list[str] = []
        self._subtrees: list[str] = []
        self._versions: Mapping[str, object] = {}
        self._owners: set[str] = set()
        self._state: Any = None
        self._live: Mapping[str, Any] = {}
        self.identities: Mapping[str, Hashable | None] = {}
        self._strict = False
        self._snapshot: Snapshot | None = None
        self._made_real: list[Overwrite] = []

    def compare(self, comparison: Comparison) -> None:
        self._stored = comparison.stored(self.name)
        versions = comparison.attributes(self.name).get(self._versions_key)
        self._versions = versions if isinstance(versions, dict) else {}
        self._tensors, self._subtrees = [], []
        self._owners = {self._owner(name) for name in self._stored}
        # Kept: hooks may make tensors, and an identity means something only while they live.
        self._state = state = self._module.state_dict()
        keys = clean_keys(self._module, state, self.name)
        self._raw = {keys[raw]: raw for raw in state}
        own = {join_name(self.name, escape_key(keys[raw])): value for raw, value in state.items()}
        tensors = {name: value for name, value in own.items() if _is_tensor_state(name, value)}
        for name, value in tensors.items():
            check(value, name, meta=True)
        self.identities = {name: identity_of(value) for name, value in tensors.items()}
        self._live = tensors
        if comparison.match_by == "position":
            self._ask_in_order(own, comparison)
            return
        self._strict = self._fits(own)
        if self._strict or self._others_differ(own) or not self._try_shadow():
            self._ask_by_name(own, comparison)
        else:
            self._ask_as_stored(comparison)
        if self._stored:
            say_prefixes(self._module, self.name, comparison.matched_by)
            refuse_meta_leftovers(self._module, self.name, comparison)

    def _fits(self, own: Mapping[str, Any]) -> bool:
        """Both sides have the same names, and every tensor its stored shape and dtype."""
        for name, value in own.items():
            if _is_tensor_state(name, value):
                leaf = self._stored.get(name)
                if leaf is None or tuple(leaf.shape) != stored_shape(value):
                    return False
                if leaf.dtype != CARRIED[value.dtype].stored:
                    return False
            elif name not in self._owners:
                return False
        return self._owners.issubset(own)

    def _others_differ(self, own: Mapping[str, Any]) -> bool:
        """Entries that are no tensors have other names: no shadow without data can try those."""
        stored = {n for n in self._owners if n not in self._stored or not self._stored[n].dtype}
        mine = {name for name, value in own.items() if not isinstance(value, torch.Tensor)}
        return bool({n for n in stored | mine if not _is_extra(n)} - (self._owners & own.keys()))

    def _owner(self, name: str) -> str:
        """The entry of `state_dict()` that a stored leaf belongs to."""
        depth = len(split_name(self.name))
        return "/".join(split_name(name)[: depth + 1])

    def _ask_by_name(self, own: Mapping[str, Any], comparison: Comparison) -> None:
        for name, value in own.items():
            if _is_tensor_state(name, value):
                if ask(comparison, name, value, self._stored):
                    self._tensors.append(name)
            elif name in self._owners:
                if isinstance(value, torch.Tensor) and not _is_extra(name):
                    CompositeTarget(value, name).compare(comparison)
                    if value.is_meta:
                        comparison.mismatch(name, text_of(value), "one on the meta device")
                comparison.subtree(name)
                self._subtrees.append(name)
            else:
                comparison.missing(name)

    def _ask_in_order(self, own: Mapping[str, Any], comparison: Comparison) -> None:
        """Tensors as they come; extra state has no place in an order and stays as it is."""
        self._strict = False
        sources = by_position(self.name, self.identities, self._stored, comparison)
        for name, (source, rule) in sources.items():
            if ask(comparison, name, own[name], self._stored, source=source, rule=rule):
                self._tensors.append(name)

    def _ask_as_stored(self, comparison: Comparison) -> None:
        """The module's hooks take the stored names, as they did on the shadow."""
        rule = "the module's own load hooks"
        for name, leaf in self._stored.items():
            owner = self._owner(name)
            if owner == name and leaf.dtype and not _is_extra(name):
                if comparison.tensor(name, leaf.dtype, leaf.shape, rule=rule):
                    self._tensors.append(name)
            elif owner not in self._subtrees:
                comparison.subtree(owner)
                self._subtrees.append(owner)

    def _try_shadow(self) -> bool:
        """Would the hooks take what is stored? Tried on a copy whose tensors have no data."""
        put_back = keep_generators()
        try:
            memo: dict[int, Any] = {}
            for tensor in _all_tensors(self._module):
                memo[id(tensor)] = _meta_twin(tensor)
            shadow = copy.deepcopy(self._module, memo)
            before = {key: value.dtype for key, value in _tensor_items(shadow.state_dict())}
            state = self._state_dict(
                {
                    self._key(name): torch.empty(
                        leaf.shape, dtype=torch_dtype(leaf.dtype), device="meta"
                    )
                    for name, leaf in self._stored.items()
                    if leaf.dtype and self._owner(name) == name
                }
            )
            shadow.load_state_dict(state, assign=True)
            after = {key: value.dtype for key, value in _tensor_items(shadow.state_dict())}
        except UnsupportedError:
            return False
        except Exception:
            # Code of the user's: whatever it raises, the names do not fit by themselves, and the
            # comparison by name says how.
            return False
        finally:
            put_back()
        return before == after

    def _key(self, name: str) -> Any:
        """A stored name as the key that this module's `load_state_dict` takes."""
        key = parse_key(split_name(name)[-1])
        if not isinstance(key, str):  # of a `state_dict` of the module's own
            return key
        return self._raw.get(key, self._root + key)

    def _state_dict(self, items: Mapping[str, Any]) -> Any:
        state: Any = OrderedDict(items)
        metadata: Any = OrderedDict()
        for prefix, _ in self._module.named_modules(remove_duplicate=False):
            clean = clean_key(self._module, prefix) if prefix else ""
            version = self._versions.get(clean, 1)
            metadata[prefix] = {} if version is None else {"version": version}
        state._metadata = metadata
        return state

    def memory(self) -> list[Memory]:
        """Where all names fit; what a hook makes of other names is not known beforehand."""
        if not self._strict:
            return []
        return [
            memory
            for name, tensor in self._live.items()
            if name in self._tensors
            for memory in memory_of(
                name, tensor, self.identities[name], self._stored[name].attributes
            )
        ]

    def bind(self, staged: Staged) -> None:
        items: dict[str, Any] = {}
        for name in self._tensors:
            if name in staged:
                items[self._key(name)] = to_torch(staged[name], name, self._stored)
        for name in self._subtrees:
            if name in staged:
                value = staged.subtree(name)
                items[self._key(name)] = to_torch(value, name, self._stored)
        if not items:
            return
        self._snapshot = Snapshot(self._module)
        self._materialize(items)
        state = self._state_dict(items)
        if type(self._module).load_state_dict is not torch.nn.Module.load_state_dict:
            self._module.load_state_dict(state)
        else:
            complete = len(items) == len(self._tensors) + len(self._subtrees)
            self._module.load_state_dict(state, strict=self._strict and complete)

    def _materialize(self, items: Mapping[str, Any]) -> None:
        """Meta tensors that will be filled become real first, each once: ties stay ties."""
        for key, tensor in self._module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor) or not tensor.is_meta or kind_of(tensor):
                continue
            if key in items or not self._strict:
                overwrite = Overwrite(tensor)
                self._made_real.append(overwrite)
                overwrite.apply(torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"))

    def undo(self) -> None:
        if self._snapshot is not None:
            self._snapshot.restore()
            self._snapshot = None
        while self._made_real:
            self._made_real.pop().undo()


class Snapshot:
    """All that a module's tensors hold and where they hang, to be put back bit for bit; and its
    attributes, since code that loads may set any of them."""

    def __init__(self, module: Any) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        for child in module.modules():
            self._keep_attributes(child)
            for attribute in ("_parameters", "_buffers"):
                self._keep_dict(getattr(child, attribute))
                for tensor in getattr(child, attribute).values():
                    self._keep_tensor(tensor)
            self._keep_extra_state(child)

    def _keep_attributes(self, child: Any) -> None:
        """By reference, what plain containers among them hold, and the bytes of tensors and arrays."""
        old = dict(vars(child))
        for name, value in old.items():
            if isinstance(value, torch.Tensor):
                self._keep_tensor(value)
            elif isinstance(value, np.ndarray):
                self._undo.append(partial(value.__setitem__, ..., value.copy()))
            elif type(value) is list:
                self._undo.append(partial(value.__setitem__, slice(None), list(value)))
            elif type(value) in (dict, set, OrderedDict) and name not in (
                "_parameters",
                "_buffers",
            ):
                self._keep_dict(value)

        def put_back() -> None:
            live = vars(child)
            for name in live.keys() - old.keys():
                del live[name]
            live.update(old)

        self._undo.append(put_back)

    def _keep_dict(self, live: Any) -> None:
        old = set(live) if isinstance(live, set) else dict(live)

        def put_back() -> None:
            live.clear()
            live.update(old)

        self._undo.append(put_back)

    def _keep_tensor(self, tensor: Any) -> None:
        if tensor is None or id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        if tensor.is_meta or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            return
        if kind_of(tensor):
            old = copied(tensor)
            self._undo.append(partial(assign, tensor, old, keep=False))
            return
        data, spare = tensor.data, host_copy(tensor)

        def put_back() -> None:
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
            with writing(tensor):
                bits(tensor).copy_(spare)

        self._undo.append(put_back)

    def _keep_extra_state(self, child: Any) -> None:
        if type(child).get_extra_state is torch.nn.Module.get_extra_state:
            return
        state = child.get_extra_state()
        # A stream is no state of a tree by itself; it is copied with its position.
        old = copy.deepcopy(state) if isinstance(state, io.BytesIO) else copy_state(state)
        self._undo.append(lambda: child.set_extra_state(old))

    def restore(self) -> None:
        for put_back in self._undo:
            put_back()


def _is_tensor_state(name: str, value: object) -> bool:
    # Extra state may be a tensor of any length: it is the module's own affair.
    return isinstance(value, torch.Tensor) and not _is_extra(name) and not kind_of(value)


def _is_extra(name: str) -> bool:
    return re.split("[./]", name)[-1] == EXTRA_STATE


def _root_prefix(module: Any) -> list[str]:
    parts = []
    row = wrapper_of(module)
    while row is not None:
        if row[1]:
            parts.append(row[0] + ".")
        module = module._modules[row[0]]
        row = wrapper_of(module)
    return parts


def _all_tensors(module: Any) -> list[Any]:
    tensors = [*module.parameters(), *module.buffers()]
    return [t for t in tensors if not isinstance(t, torch.nn.parameter.UninitializedTensorMixin)]


def _meta_twin(tensor: Any) -> Any:
    twin = tensor.detach().to("meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin


def _tensor_items(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]


def refuse_meta_leftovers(module: Any, name: str, comparison: Comparison) -> None:
    """A buffer that is not stored and has no data stays without data: a mismatch."""
    for prefix, child in clean_modules(module):
        for key in child._non_persistent_buffers_set:
            buffer = child._buffers.get(key)
            if buffer is not None and buffer.is_meta:
                comparison.mismatch(
                    join_name(name, escape_key(prefix + key)),
                    "a buffer with data (it is not persistent, so no checkpoint has it)",
                    "a buffer on the meta device",
                )
