"""The targets of no framework: arrays, plain values, generators, objects that take their own state.

Adapters bring theirs. Spec: 08-protocol.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.adapter import (
    ORDER_RNG,
    ORDER_TENSOR,
    ORDER_USER_CODE,
    Comparison,
    Memory,
    Staged,
    StoredLeaf,
    Target,
)
from ckptfmt.engine.dispatch import adapter_of, array_source, tensor_source
from ckptfmt.engine.overlap import overlaps_itself
from ckptfmt.engine.own_tensors import as_own_tensors, copy_state, maker_of
from ckptfmt.engine.rng import (
    generator_kind,
    generator_state,
    is_generator,
    set_generator_state,
    state_kind,
)
from ckptfmt.engine.sharded import Sharded
from ckptfmt.engine.tree import Visit, capture
from ckptfmt.errors import UsageError
from ckptfmt.format import dtype_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


class ArrayTarget:
    """A NumPy array, filled in place."""

    order = ORDER_TENSOR

    def __init__(self, name: str, array: Array) -> None:
        self.name, self.array = name, array
        self._old: Array | None = None
        source = array_source(array)
        self.identities, self._dtype = {name: source.identity}, source.dtype
        if overlaps_itself(array.shape, array.strides, array.itemsize):
            raise UsageError(
                "elements of the target array share memory",
                reason="target",
                where=repr(name),
                found=f"strides {array.strides} of shape {array.shape}",
                do="pass an array with memory of its own for each element",
            )
        if not array.flags.writeable:
            raise UsageError(
                "target array is read-only",
                reason="target",
                where=repr(name),
                do="pass a writable array, or use load(like=...)",
            )

    @property
    def owns_memory(self) -> bool:
        return self.array.base is None

    def memory(self) -> list[Memory]:
        array = self.array
        if array.dtype.hasobject or array.itemsize == 0:
            return []
        address = array.__array_interface__["data"][0]
        place = (address, array.shape, array.strides, array.itemsize)
        return [Memory(self.name, "cpu", *place, self._encode, self.identities[self.name])]

    def _encode(self, staged: Array) -> Array:
        return staged.astype(self.array.dtype, copy=False)

    def compare(self, comparison: Comparison) -> None:
        comparison.tensor(self.name, self._dtype, self.array.shape)

    def bind(self, staged: Staged) -> None:
        if self.name in staged:
            self._old = self.array.copy() if staged.undoable else None
            np.copyto(self.array, staged[self.name])

    def undo(self) -> None:
        if self._old is not None:
            np.copyto(self.array, self._old)


class ShardedTarget:
    """Boxes of a tensor that the caller holds, each filled in place."""

    order = ORDER_TENSOR

    def __init__(self, name: str, leaf: Sharded) -> None:
        self.name, self._leaf = name, leaf
        for _, array in leaf.parts:
            ArrayTarget(name, array)  # refuses what cannot be filled
        self._old: list[Array] = []

    def compare(self, comparison: Comparison) -> None:
        leaf = self._leaf
        boxes = [(tuple(origin), array.shape) for origin, array in leaf.parts]
        comparison.tensor(self.name, dtype_of(leaf.dtype).name, leaf.shape, boxes=boxes)

    def bind(self, staged: Staged) -> None:
        if self.name in staged:
            for (_, array), value in zip(self._leaf.parts, staged.parts(self.name)):
                if staged.undoable:
                    self._old.append(array.copy())
                np.copyto(array, value)

    def undo(self) -> None:
        for (_, array), old in zip(self._leaf.parts, self._old):
            np.copyto(array, old)


class ItemTarget:
    """A plain value, or an immutable tensor, which is replaced in the dict or list that holds it."""

    order = ORDER_TENSOR

    def __init__(self, visit: Visit, make: Callable[[Any], Any] | None = None) -> None:
        self.name = visit.name
        self._visit, self._make = visit, make
        self._bound = False
        if visit.parent is None:
            raise UsageError(
                "the target has nothing that could be filled",
                reason="target",
                found=f"{type(visit.obj).__name__} {visit.obj!r}"[:80],
                do="pass a dict or list of what is to be filled, or use load()",
            )
        if not isinstance(visit.parent, dict | list):
            raise UsageError(
                "a plain value cannot be replaced where it stands",
                reason="target",
                where=repr(visit.name),
                found=f"in {type(visit.parent).__name__}",
                do="hold it in a dict or a list, or use load(like=...)",
            )

    def compare(self, comparison: Comparison) -> None:
        obj = self._visit.obj
        if self._make is not None:
            source = tensor_source(obj, self.name)
            comparison.tensor(self.name, source.dtype, source.shape)
            return
        below = comparison.stored(self.name)
        whole = self.name not in below and not any(leaf.dtype for leaf in below.values())
        if below and whole and isinstance(obj, dict | list | tuple) and not obj:
            comparison.subtree(self.name)  # an empty container takes whatever plain tree is stored
        else:
            comparison.value(self.name)

    def bind(self, staged: Staged) -> None:
        if self.name not in staged:
            return
        try:
            made = staged[self.name]
        except KeyError:
            made = staged.subtree(self.name)
        self.replace(made)

    def replace(self, made: Any) -> None:
        value = made if self._make is None else self._make(made)
        self._bound = True
        self._visit.parent[self._visit.key] = value

    def undo(self) -> None:
        if self._bound:
            self._visit.parent[self._visit.key] = self._visit.obj


class CompositeItemTarget:
    """An immutable composite, replaced in the dict or list that holds it by what its adapter makes
    of the stored parts."""

    order = ORDER_TENSOR

    def __init__(self, visit: Visit, inner: Any) -> None:
        self.name, self._inner = visit.name, inner
        self._item = ItemTarget(visit, inner.make)

    @property
    def identities(self) -> Mapping[str, Any]:
        made: Mapping[str, Any] = self._inner.identities
        return made

    def compare(self, comparison: Comparison) -> None:
        self._inner.compare(comparison)

    def bind(self, staged: Staged) -> None:
        if any(f"{self.name}/{part}" in staged for part in self._inner.parts):
            self._item.replace(staged)

    def undo(self) -> None:
        self._item.undo()


class GeneratorTarget:
    """A generator of NumPy or of Python's random, set in place, last."""

    order = ORDER_RNG

    def __init__(self, name: str, generator: Any) -> None:
        self.name, self._generator = name, generator
        self._old: Any = None

    def compare(self, comparison: Comparison) -> None:
        below = comparison.stored(self.name)
        if not comparison.subtree(self.name):
            return
        state = {
            key: below[f"{self.name}/{key}" if self.name else key].value
            for key in ("kind", "bit_generator", "has_gauss")
            if (f"{self.name}/{key}" if self.name else key) in below
        }
        expected, found = generator_kind(self._generator), state_kind(state)
        if expected != found:
            comparison.mismatch(self.name, expected, found or "no generator's state")

    def bind(self, staged: Staged) -> None:
        if self.name in staged:
            self._old = copy.deepcopy(generator_state(self._generator))
            set_generator_state(self._generator, staged.subtree(self.name), self.name)

    def undo(self) -> None:
        if self._old is not None:
            set_generator_state(self._generator, self._old, self.name)


class StatefulTarget:
    """An object that takes its state itself; it is given a deep copy, replaced whole."""

    order = ORDER_USER_CODE

    def __init__(self, name: str, obj: Any, peers: Sequence[tuple[str, object]] = ()) -> None:
        self.name, self._obj, self._peers = name, obj, peers
        self._load = obj.load_state_dict if hasattr(obj, "load_state_dict") else obj.set_state
        self._old: Any = None
        self._bound = False
        self._stored: Mapping[str, StoredLeaf] = {}

    def compare(self, comparison: Comparison) -> None:
        comparison.subtree(self.name)
        self._stored = comparison.stored(self.name)

    def bind(self, staged: Staged) -> None:
        if self.name not in staged:
            return
        current = capture(self._obj, self.name, self._peers).tree
        self._old = copy_state(current)
        below = len(self.name) + 1 if self.name else 0
        stored = {name[below:]: leaf for name, leaf in self._stored.items()}
        state = as_own_tensors(staged.subtree(self.name), current, stored)
        self._bound = True
        self._load(state)

    def undo(self) -> None:
        if self._bound:
            self._load(self._old)


def make_target(visit: Visit, peers: Sequence[tuple[str, object]]) -> Target:
    """The target of an object of the caller's tree."""
    obj = visit.obj
    if visit.kind == "value":
        return ItemTarget(visit)
    if isinstance(obj, Sharded):
        return ShardedTarget(visit.name, obj)
    adapter = adapter_of(obj)
    if adapter is not None and adapter.kind(obj) in ("tensor", "composite", "stateful"):
        made = adapter.target(obj, visit.name, peers)
        if visit.kind == "composite" and not hasattr(made, "bind"):
            return CompositeItemTarget(visit, made)
        return ItemTarget(visit, maker_of(obj)) if made is None else made
    if visit.kind == "tensor":
        if isinstance(obj, np.ndarray):
            return ArrayTarget(visit.name, obj)
        return ItemTarget(visit, maker_of(obj))
    if is_generator(obj):
        return GeneratorTarget(visit.name, obj)
    return StatefulTarget(visit.name, obj, peers)
