"""Tensors that are made of tensors: sparse, quantized, nested, and registered wrapper subclasses.

One is stored as a dict of its parts, which every reader can open, under the container attribute
`torch.tensor`: its kind, and what else it takes to put it together again. No class is imported by
name: a subclass comes back where this process knows it, as its parts elsewhere. Spec: 07-index §7.4.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ckptfmt.engine import Captured, TensorSource
from ckptfmt.errors import CorruptError, UsageError, warn
from ckptfmt.torch import compressed, quantized
from ckptfmt.torch.compressed import refusal
from ckptfmt.torch.facts import COMPOSITE, text_of_facts

_LAYOUTS = {getattr(torch, name): name for name in ("sparse_coo", *compressed.INDICES)}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NESTED_MODULE = "torch.nested._internal.nested_tensor"
_KNOWN = {"torch.testing._internal.two_tensor.TwoTensor"}
"""Subclasses of torch's own that flatten into plain data. Looked up among what is imported."""

_registered: dict[str, type] = {}
Facts: TypeAlias = Mapping[str, Any]


@dataclass(slots=True)
class Parts:
    """A tensor taken apart.

    Attributes:
        kind: "sparse_coo", "sparse_csr", …, "quantized", "nested", "nested_jagged", "subclass".
        items: What is stored: tensors (views of the tensor's memory where there is one) and values.
        facts: What else is needed, beside the kind: plain values.
        free: Part -> the axis along which another value may have another length.
    """

    kind: str
    items: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=dict)


def register_tensor_class(cls: type, name: str | None = None) -> None:
    """Let tensors of a traceable wrapper subclass be saved, loaded and restored.

    They are stored by what `__tensor_flatten__` gives, whose context must be plain values, and put
    together by `__tensor_unflatten__`. A process that has not registered the name gets the parts.

    Args:
        cls: A subclass of `torch.Tensor` with both methods.
        name: Under which it is stored; its module and qualified name if None.
    Raises:
        UsageError: It has not both methods, or the name is another class's.
    """
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    if not issubclass(cls, torch.Tensor) or not _is_traceable(cls):
        raise UsageError(
            "a tensor class needs __tensor_flatten__ and __tensor_unflatten__",
            reason="register-tensor-class",
            found=name,
            do="add them, or take the tensor's plain parts into the tree",
        )
    if _registered.setdefault(name, cls) is not cls:
        raise UsageError(
            "this name stands for another tensor class",
            reason="register-tensor-class",
            where=name,
            found=_registered[name].__qualname__,
            do="choose another name=",
        )


def _is_traceable(cls: type) -> bool:
    return all(hasattr(cls, f"__tensor_{verb}__") for verb in ("flatten", "unflatten"))


def _name_of(cls: type) -> str:
    for name, known in _registered.items():
        if known is cls:
            return name
    name = f"{cls.__module__}.{cls.__qualname__}"
    return name if name in _KNOWN else ""


def _class_named(name: object) -> type | None:
    if name in _registered:
        return _registered[str(name)]
    if name in _KNOWN:
        module, _, attribute = str(name).rpartition(".")
        found: type | None = getattr(sys.modules.get(module), attribute, None)
        return found
    return None


def kind_of(tensor: Any) -> str:
    """The kind of a tensor that is stored in parts; "" for all others, plain or refused."""
    cls = type(tensor)
    if cls in _PLAIN:
        if tensor.layout is not torch.strided:
            return _LAYOUTS.get(tensor.layout, "")
        if tensor.is_quantized:
            return "quantized"
        return "nested" if tensor.is_nested else ""
    if cls.__module__ == _NESTED_MODULE and cls.__name__ == "NestedTensor":
        return "nested_jagged"
    return "subclass" if _is_traceable(cls) and _name_of(cls) else ""


def text_of(tensor: Any) -> str:
    """A composite in the words of a report."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return text_of_facts({"kind": kind_of(tensor), "class": _name_of(type(tensor)), "dtype": dtype})


def split(tensor: Any) -> Parts:
    """Take a composite apart, copying nothing that need not be.

    Raises:
        UsageError: It has no data, or could not be put together again.
    """
    parts = _split(tensor.detach(), kind_of(tensor))
    if tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
        parts.facts["requires_grad"] = True
    return parts


def _split(tensor: Any, kind: str) -> Parts:
    if kind == "sparse_coo":
        items = {
            "shape": list(tensor.shape),
            "indices": tensor._indices(),
            "values": tensor._values(),
        }
        return Parts(kind, items, {"coalesced": tensor.is_coalesced()}, {"indices": 1, "values": 0})
    if kind in compressed.INDICES:
        first, second = compressed.INDICES[kind]
        outer, inner = getattr(tensor, first)(), getattr(tensor, second)()
        items = {"shape": list(tensor.shape), first: outer, second: inner}
        items["values"] = tensor.values()
        batch = outer.dim() - 1
        return Parts(kind, items, {}, {second: batch, "values": batch})
    if kind == "quantized":
        return Parts(kind, quantized.items_of(tensor), quantized.facts_of(tensor))
    if kind == "nested":
        return Parts(kind, compressed.nested_items(tensor), {}, {"values": 0})
    if kind == "nested_jagged":
        axis = int(tensor._ragged_idx)
        items = {"values": tensor._values, "offsets": tensor._offsets}
        if tensor._lengths is not None:
            items["lengths"] = tensor._lengths
        return Parts(kind, items, {"ragged_idx": axis}, {"values": axis - 1})
    names, context = tensor.__tensor_flatten__()
    if not names:
        raise refusal("it flattens into no tensors", "take what it holds into the tree")
    facts = {
        "class": _name_of(type(tensor)),
        "context": context,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "size": list(map(int, tensor.shape)),
        "stride": list(map(int, tensor.stride())),
    }
    return Parts("subclass", {part: getattr(tensor, part) for part in names}, facts)


def capture(tensor: Any) -> Captured:
    """A composite at save: its parts, checked so that a load will take them."""
    if tensor.is_meta:
        raise UsageError(
            "tensor cannot be carried",
            reason="torch-tensor",
            found="a meta tensor, which has no data",
            do="materialize it first: module.to_empty(...)",
        )
    parts = split(tensor)
    _check(parts.kind, parts.facts, parts.items)
    return Captured(parts.items, {"": {COMPOSITE: {"kind": parts.kind, **parts.facts}}})


def joiner(facts: object, name: str) -> Callable[[Any], Any] | None:
    """How to put a stored composite together from the dict of its parts, torch tensors and values.

    None, with a warning, where this process cannot: it gets the parts then.
    """
    kind = facts.get("kind") if isinstance(facts, Mapping) else None
    known = isinstance(facts, Mapping) and kind in _JOINERS
    if not known or (kind == "subclass" and _class_named(facts["class"]) is None):  # type: ignore[index]
        warn(
            f"{name or 'the tree'} is {text_of_facts(facts)}, which this process does not know: you "
            "get its parts; import its module, or call ckptfmt.torch.register_tensor_class, first"
        )
        return None
    return lambda items: join(facts, items, name)


def join(facts: Any, items: Any, name: str) -> Any:
    """A composite of its parts, on the CPU.

    Raises:
        CorruptError: The parts make no such tensor; torch has not seen them then.
    """
    kind = facts["kind"]
    try:
        if type(items) is not dict:
            raise refusal("its parts are no dict", "")
        _check(kind, facts, items)
        made = _JOINERS[kind](facts, items)
    except Exception as error:
        # Refusals of ours, torch's, and whatever a registered class raises on another's context.
        raise CorruptError(
            f"the stored parts make no {text_of_facts(facts).removeprefix('a ')}",
            reason="value",
            where=name or "the tree",
            found=error.found
            if isinstance(error, UsageError)
            else f"{type(error).__name__}: {error}"[:300],
            do='load it with ckptfmt.load, which returns the parts, or run "ckptfmt verify"',
        ) from error
    return made.requires_grad_(True) if facts.get("requires_grad") is True else made


def _check(kind: str, facts: Facts, items: Facts) -> None:
    """Memory safety: what torch would believe. Nothing is checked that torch's own tensors break.

    Raises:
        UsageError: The parts make no tensor.
    """
    if kind == "sparse_coo":
        compressed.check_coo(items)
    elif kind in compressed.INDICES:
        compressed.check_compressed(kind, items)
    elif kind == "nested":
        compressed.check_nested(items)
    elif kind == "nested_jagged":
        compressed.check_jagged(items, facts.get("ragged_idx"))
    elif kind == "quantized":
        quantized.check(facts, items)


def _join_coo(facts: Facts, items: Facts) -> Any:
    made = torch.sparse_coo_tensor(
        items["indices"], items["values"], items["shape"], check_invariants=False
    )
    return made._coalesced_(facts.get("coalesced") is True)


def _join_compressed(facts: Facts, items: Facts) -> Any:
    first, second = compressed.INDICES[facts["kind"]]
    return torch.sparse_compressed_tensor(
        items[first], items[second], items["values"], items["shape"],
        layout=getattr(torch, facts["kind"]), check_invariants=False,
    )  # fmt: skip


def _join_jagged(facts: Facts, items: Facts) -> Any:
    return torch.nested.nested_tensor_from_jagged(
        items["values"], items["offsets"], items.get("lengths"), jagged_dim=facts["ragged_idx"]
    )


def _join_subclass(facts: Facts, items: Facts) -> Any:
    cls: Any = _class_named(facts["class"])
    size, stride = torch.Size(facts["size"]), tuple(facts["stride"])
    made = cls.__tensor_unflatten__(dict(items), facts["context"], size, stride)
    if type(made) is not cls or made.shape != size:
        raise refusal(f"a {type(made).__name__} of shape {list(made.shape)}", "")
    return made


_JOINERS: dict[object, Callable[[Facts, Facts], Any]] = {
    "sparse_coo": _join_coo,
    **dict.fromkeys(compressed.INDICES, _join_compressed),
    "quantized": quantized.join,
    "nested": lambda facts, items: compressed.join_nested(items),
    "nested_jagged": _join_jagged,
    "subclass": _join_subclass,
}


def is_part_tensor(item: object) -> bool:
    return isinstance(item, torch.Tensor | TensorSource)
