"""A composite tensor as a target: compared part by part, then filled or exchanged in place.

The object stays. Its storage stays too where another value fits into it: equal numbers of elements,
equal offsets, a scale that torch can set. Else its inside is exchanged, as for a meta tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import chain
from typing import Any

import torch

from ckptfmt.engine import ORDER_TENSOR, Comparison, Memory, Staged, StoredLeaf, TensorSource
from ckptfmt.errors import UsageError
from ckptfmt.format import escape_key, join_name
from ckptfmt.torch import quantized
from ckptfmt.torch.composites import Parts, is_part_tensor, join, kind_of, split, text_of
from ckptfmt.torch.compressed import INDICES
from ckptfmt.torch.facts import COMPOSITE, cure_of, text_of_facts
from ckptfmt.torch.memory import memory_of
from ckptfmt.torch.tensors import bits, from_array, source, writing

_FIXED = ("dtype", "scheme", "class", "ragged_idx", "size")
"""Facts in which the target and the checkpoint must agree. The others are a part of the value."""


class CompositeTarget:
    """A tensor of the caller's tree, or of a module in it, that is made of tensors."""

    order = ORDER_TENSOR

    def __init__(self, tensor: Any, name: str) -> None:
        self.name, self.tensor = name, tensor
        self.identities: dict[str, Hashable | None] = {}
        self._parts: Parts = split(tensor)
        self._inner: dict[str, CompositeTarget] = {}
        self._asked: list[str] = []
        self._stored: Mapping[str, StoredLeaf] = {}
        self._facts: Mapping[str, Any] = {}
        self._undo: Callable[[], None] | None = None

    def _at(self, part: str) -> str:
        return join_name(self.name, escape_key(part))

    # -- compare

    def compare(self, comparison: Comparison) -> None:
        self._asked, self.identities, self._inner = [], {}, {}
        self._stored = comparison.stored(self.name)
        facts = comparison.attributes(self.name).get(COMPOSITE)
        self._facts = facts if isinstance(facts, Mapping) else {}
        if not self._stored:
            comparison.missing(self.name)
            return
        if not self._facts_fit(comparison):
            comparison.take(self.name)
            return
        for part, item in self._parts.items.items():
            at = self._at(part)
            if isinstance(item, torch.Tensor) and kind_of(item):
                inner = self._inner[part] = CompositeTarget(item, at)
                inner.compare(comparison)
                self.identities |= inner.identities
            elif is_part_tensor(item):
                one = item if isinstance(item, TensorSource) else source(item, at)
                if comparison.tensor(at, one.dtype, self._expected(part, tuple(one.shape))):
                    self._asked.append(at)
                self.identities[at] = one.identity
            else:
                # One tensor under two names has one scale.
                self.identities[at] = ("torch.value", id(self.tensor), part)
                if comparison.value(at):
                    self._asked.append(at)

    def _facts_fit(self, comparison: Comparison) -> bool:
        own = {"kind": self._parts.kind, **self._parts.facts}
        found = self._facts
        quantized_as = own["kind"] == "quantized" and "dtype"
        if any(own.get(key) != found.get(key) for key in ("kind", "class", quantized_as)):
            leaf = self._stored.get(self.name)
            text = f"tensor {leaf.dtype} {list(leaf.shape)}" if leaf is not None else ""
            if found:
                text = text_of_facts(found) + cure_of(found)
            elif leaf is not None and leaf.dtype:
                text += " (make the target a plain tensor, and convert it afterwards)"
            comparison.mismatch(self.name, text_of(self.tensor), text or "a container")
            return False
        for key in _FIXED:
            if own.get(key) != found.get(key):
                what, prefix = ("shape", "") if key == "size" else ("kind", f"{key} ")
                texts = (f"{prefix}{own.get(key)}", f"{prefix}{found.get(key)}")
                comparison.mismatch(self.name, *texts, what=what)
                return False
        shape = self._parts.items.get("shape")
        leaf = self._stored.get(self._at("shape"))
        if shape is not None and leaf is not None and leaf.value != shape:
            comparison.mismatch(self.name, str(shape), str(leaf.value), what="shape")
            return False
        return True

    def _expected(self, part: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """The part's own shape, but for the axis along which a value may be longer or shorter."""
        axis = self._parts.free.get(part)
        leaf = self._stored.get(self._at(part))
        if axis is None or leaf is None or len(leaf.shape) != len(own):
            return own
        return (*own[:axis], leaf.shape[axis], *own[axis + 1 :])

    def memory(self) -> list[Memory]:
        """Of what is written in place for sure; the inside of the others is exchanged."""
        made = [memory for inner in self._inner.values() for memory in inner.memory()]
        if self.tensor.is_meta:
            return made
        for part, item in self._parts.items.items():
            at = self._at(part)
            leaf = self._stored.get(at)
            if not isinstance(item, torch.Tensor) or at not in self._asked or leaf is None:
                continue
            if tuple(leaf.shape) == tuple(item.shape):
                made += memory_of(at, item, self.identities[at], leaf.attributes)
        return made

    # -- bind

    def make(self, staged: Staged) -> Any:
        """A new tensor with the stored values, on the target's device."""
        made = self._made(staged)
        made = made if self.tensor.is_meta else made.to(self.tensor.device)
        if isinstance(self.tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made.detach(), requires_grad=self.tensor.requires_grad)
        return made

    def _made(self, staged: Staged) -> Any:
        items: dict[str, Any] = {}
        for part, item in self._parts.items.items():
            at = self._at(part)
            if part in self._inner:
                items[part] = self._inner[part]._made(staged)
            elif is_part_tensor(item):
                leaf = self._stored.get(at)
                attributes = leaf.attributes if leaf is not None else {}
                items[part] = from_array(staged.own(at), attributes, at)
            else:
                items[part] = staged[at]
        return join({**self._facts, "requires_grad": False}, items, self.name)

    def bind(self, staged: Staged) -> None:
        if not self._asked and not self._inner:
            return
        made = self._made(staged)
        if self.tensor.device != made.device and not self.tensor.is_meta:
            made = made.to(self.tensor.device)
        self._undo = assign(self.tensor, made, keep=staged.undoable)

    def undo(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None


def assign(tensor: Any, value: Any, *, keep: bool) -> Callable[[], None] | None:
    """Give a composite another's value; what it returns puts the old one back."""
    if tensor.is_meta:
        return _exchange(tensor, value)
    kind = kind_of(tensor)
    with writing(tensor):
        live = tensor.detach()
        if kind == "quantized":
            old = quantized.copied(live) if keep else None
            if quantized.assign(tensor, value):  # a detached one has a scale of its own
                return lambda: _put_back(tensor, old)
            return _exchange(tensor, value)
        pairs = _pairs(live, value, kind)
        if pairs is None:
            return _exchange(tensor, value)
        olds = [bits(mine).clone() for mine, _ in pairs] if keep else []
        flag = live.is_coalesced() if kind == "sparse_coo" else None

        def undo() -> None:
            with writing(tensor):
                for (mine, _), old in zip(pairs, olds):
                    bits(mine).copy_(old)
                if flag is not None:
                    tensor.detach()._coalesced_(flag)

        try:
            _fill(live, [(mine, bits(new)) for mine, new in pairs], value)
        except BaseException:
            undo()
            raise
        return undo


def copied(tensor: Any) -> Any:
    """The same composite in memory of its own."""
    live = tensor.detach()
    return quantized.copied(live) if kind_of(live) == "quantized" else live.clone()


def _put_back(tensor: Any, old: Any) -> None:
    with writing(tensor):
        quantized.assign(tensor, old)


def _fill(live: Any, pairs: list[tuple[Any, Any]], value: Any) -> None:
    for mine, new in pairs:
        bits(mine).copy_(new)
    if live.layout is torch.sparse_coo:
        live._coalesced_(value.is_coalesced())


_PATTERN = {"offsets", "lengths", "sizes", *chain.from_iterable(INDICES.values())}
"""Parts that say which elements there are; sparse COO's `indices` are that too."""


def _pairs(tensor: Any, value: Any, kind: str) -> list[tuple[Any, Any]] | None:
    """(own part, new part) where all can be written in place; None where they cannot."""
    mine, new = split(tensor), split(value)
    if mine.facts != new.facts and kind != "sparse_coo":
        return None
    if mine.items.keys() != new.items.keys() or (kind == "nested" and not tensor.is_contiguous()):
        return None
    made: list[tuple[Any, Any]] = []
    for part, own in mine.items.items():
        other = new.items[part]
        if not isinstance(own, torch.Tensor):
            if own != other:
                return None
        elif kind_of(own):
            below = _pairs(own, other, kind_of(own)) if kind_of(own) == kind_of(other) else None
            if below is None or kind_of(own) in ("quantized", "sparse_coo"):
                return None  # their scale or flag lies in no memory
            made += below
        elif own.shape != other.shape or own.dtype != other.dtype:
            return None
        elif torch._debug_has_internal_overlap(own) == 1:
            return None  # expanded values
        elif part in _PATTERN or (kind, part) == ("sparse_coo", "indices"):
            # Other tensors know the ragged axis by these, or have the same pattern: they are never
            # written.
            if not torch.equal(own.cpu(), other.cpu()):
                return None
        else:
            made.append((own, other))
    return made


def _exchange(tensor: Any, value: Any) -> Callable[[], None]:
    """The object stays, its inside is another's."""
    # torch sets the data of these as it should; that of others in part, and says nothing.
    if kind_of(tensor) in ("sparse_coo", "quantized") and not tensor.is_meta:
        old = tensor.data
        tensor.data = value

        def undo() -> None:
            tensor.data = old

        return undo
    if isinstance(tensor, torch.nn.Parameter):
        value = torch.nn.Parameter(value.detach(), requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        value = value.requires_grad_(True)
    if type(tensor) is torch.nn.Parameter:
        value.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, value)
    except RuntimeError as error:
        raise UsageError(
            "the inside of this tensor cannot be exchanged in place",
            reason="torch-exchange",
            found=str(error).splitlines()[0][:200],
            do="restore before it is used in a graph or viewed, or use load(like=...)",
        ) from error
    return lambda: torch.utils.swap_tensors(tensor, value)
