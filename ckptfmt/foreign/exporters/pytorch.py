"""`.pt`: what `torch.load(weights_only=True)` opens, written without torch.

The tree is as it is: nested dicts and lists, ints as keys, ties one tensor. Only names that torch's
restricted unpickler takes are written.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ckptfmt.engine import ABSENT
from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.exporters.base import Exporter, ExportPlan
from ckptfmt.foreign.exporters.pickle_writer import Call, Named, WithState, pack_pickle
from ckptfmt.foreign.exporters.record import record_of
from ckptfmt.foreign.exporters.staging import Staging
from ckptfmt.foreign.exporters.torch_layout import Layout, torch_dtype, write_archive
from ckptfmt.foreign.exporters.torch_values import plain
from ckptfmt.foreign.exporters.tree import (
    PIECE_NBYTES,
    ExportTensor,
    ExportTree,
    Value,
)
from ckptfmt.foreign.pytorch.composites import INDICES

_COMPOSITE = "torch.tensor"
_SPARSE = ("sparse_coo", *INDICES)
_SCHEMES = {
    name: f"torch.{name}"
    for name in (
        *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine"),
        *("per_channel_symmetric", "per_channel_affine_float_qparams"),
    )
}


class PytorchExporter(Exporter):
    """Row `pytorch` of EXPORTERS."""

    format = "pytorch"
    keeps_composites = True
    has_record = False

    def plan(self, tree: ExportTree, options: Mapping[str, Any]) -> ExportPlan:
        return _Planning(tree).done()

    def write(self, plan: ExportPlan, staging: Staging) -> Sequence[tuple[str, str]]:
        # torch takes a name without dots for the archive's folder.
        top = os.path.basename(self.name).split(".")[0] or "archive"
        room = plan.nbytes + len(plan.state.pickle) + 4096
        with staging.stream(self.name, room) as stream:
            read = plan.tree.read(plan.tensors)
            data = (
                (layout.nbytes, layout.bytes_of(pieces))
                for (_, pieces), (_, layout) in zip(read, plan.state.storages, strict=True)
            )
            record = record_of(plan, has_tree=True)
            write_archive(stream, top, plan.state.pickle, data, record)
        return [(self.name, self.name)]


class _Written:
    """What `write` needs: the pickle, and each tensor with its storage."""

    __slots__ = ("pickle", "storages")

    def __init__(self, pickle: bytes, storages: list[tuple[ExportTensor, Layout]]) -> None:
        self.pickle, self.storages = pickle, storages


class _Planning:
    """Makes the pickle of a tree, and finds out what torch cannot hold."""

    def __init__(self, tree: ExportTree) -> None:
        self._plan = ExportPlan(tree)
        self._storages: list[tuple[ExportTensor, Layout]] = []
        self._made: dict[int, Any] = {}
        self._composites = {
            name: attributes[_COMPOSITE]
            for name, attributes in tree.container_attributes.items()
            if isinstance(attributes.get(_COMPOSITE), dict)
        }

    def done(self) -> ExportPlan:
        tree, plan = self._plan.tree, self._plan
        makers: dict[str, Callable[[Any], Any]] = {}
        for name, facts in self._composites.items():
            kind = facts.get("kind")
            if kind in _SPARSE:
                makers[name] = partial(_composite, name, partial(_sparse, str(kind)))
            elif kind == "quantized":
                makers[name] = partial(_composite, name, partial(_quantized, facts))
        for name, attributes in tree.container_attributes.items():
            versions = attributes.get("torch.module_versions")
            if isinstance(versions, dict):
                makers[name] = partial(_with_versions, versions)
        for name, (kind, _) in tree.containers.items():
            if kind in ("defaultdict", "namedtuple", "type"):
                other = "a dict" if kind == "defaultdict" else "a tuple"
                plan.transformed[name or "(root)"] = other if kind != "type" else "its plain data"
        root = tree.nested(self._leaf, makers)
        plan.tensors = [tensor for tensor, _ in self._storages]
        plan.state = _Written(pack_pickle(root), self._storages)
        return plan

    def _leaf(self, name: str, leaf: ExportTensor | Value) -> Any:
        inside = self._composite_of(name)
        if inside is not None and inside.get("kind") not in (*_SPARSE, "quantized"):
            self._plan.skipped[name] = f"part of a tensor of the kind {inside.get('kind')}"
            return ABSENT
        if isinstance(leaf, Value):
            return self._value(name, leaf.value)
        if leaf.row not in self._made:
            is_part = inside is not None and name.endswith("/int_repr")
            quantized = str(inside["dtype"]) if inside is not None and is_part else ""
            self._made[leaf.row] = self._tensor(leaf, quantized)
        made = self._made[leaf.row]
        if isinstance(made, str):
            self._plan.skipped[name] = made
            return ABSENT
        self._plan.names[name] = name
        return made

    def _composite_of(self, name: str) -> Mapping[str, Any] | None:
        """What makes one tensor of the dict that a leaf is in."""
        if not self._composites:
            return None
        parts = name.split("/")
        above = ("/".join(parts[:n]) for n in range(len(parts) - 1, -1, -1))
        return next((self._composites[n] for n in above if n in self._composites), None)

    def _value(self, name: str, value: Any) -> Any:
        try:
            made, remark = plain(value)
            pack_pickle(made)
        except UnsupportedError as error:
            self._plan.skipped[name] = f"a value of the type {error.found}, which is code for torch"
            return ABSENT
        if remark:
            self._plan.transformed[name] = remark
        self._plan.names[name] = name
        return made

    def _tensor(self, tensor: ExportTensor, quantized: str) -> Any:
        """The call that rebuilds it, or why there is none."""
        dtype = torch_dtype(tensor, quantized)
        if isinstance(dtype, str):
            return dtype
        memory_format = str(tensor.attributes.get("torch.memory_format") or "")
        if memory_format and not _fits(tensor, memory_format):
            self._plan.transformed[tensor.name] = f"not in {memory_format}, but in C order"
            memory_format = ""
        layout = Layout(tensor.shape, dtype, memory_format)
        key = str(len(self._storages))
        self._storages.append((tensor, layout))
        if quantized:
            return layout.place(key)
        return layout.call(key, requires_grad=tensor.attributes.get("torch.requires_grad") is True)


def _fits(tensor: ExportTensor, memory_format: str) -> bool:
    """Whether the values can be written in this order, piece by piece."""
    axes = {"channels_last": 4, "channels_last_3d": 5}.get(memory_format)
    one = tensor.nbytes // max(tensor.shape[0], 1) if tensor.shape else 0
    return axes == len(tensor.shape) and (tensor.nbytes <= PIECE_NBYTES or one <= PIECE_NBYTES)


def _with_versions(versions: Mapping[str, Any], made: Any) -> Any:
    """A `state_dict`, which is an OrderedDict in torch, with the versions of its modules: 1 where
    nothing else is said."""
    prefixes = {"": 1}
    for key in made:
        parts = str(key).split(".")[:-1]
        prefixes.update({".".join(parts[:n]): 1 for n in range(1, len(parts) + 1)})
    every = {**prefixes, **versions}
    metadata = OrderedDict(
        (prefix, {} if version is None else {"version": version})
        for prefix, version in every.items()
    )
    return WithState(made, {"_metadata": metadata})


def _composite(name: str, make: Callable[[Any], Any], made: Any) -> Any:
    """One tensor of its parts; a file from strangers may call anything its parts."""
    try:
        return make(made)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedError(
            "the parts make no tensor",
            reason="export-value",
            where=name,
            found=f"{type(error).__name__}: {error}"[:200],
            do="leave it out: names=",
        ) from error


def _sparse(kind: str, made: dict[str, Any]) -> Any:
    layout = Call("torch.serialization._get_layout", (f"torch.{kind}",))
    size = Call("torch.Size", (tuple(made["shape"]),))
    if kind == "sparse_coo":
        parts: tuple[Any, ...] = (made["indices"], made["values"], size)
        if made.get("coalesced") is not None:
            parts = (*parts, made["coalesced"])
    else:
        first, second = INDICES[kind]
        parts = (made[first], made[second], made["values"], size)
    return Call("torch._utils._rebuild_sparse_tensor", (layout, parts))


def _quantized(facts: Mapping[str, Any], made: dict[str, Any]) -> Any:
    scheme = Named(_SCHEMES[facts["scheme"]])
    if "scale" in made:
        parameters: tuple[Any, ...] = (scheme, float(made["scale"]), int(made["zero_point"]))
    else:
        parameters = (scheme, made["scales"], made["zero_points"], made["axis"])
    grad = facts.get("requires_grad") is True
    place = made["int_repr"]
    return Call("torch._utils._rebuild_qtensor", (*place, parameters, grad, OrderedDict()))
