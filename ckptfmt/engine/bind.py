"""bind: checked arrays -> the caller's tree and targets, all or nothing (I5). Spec: 08-protocol.

`Comparison` collects what matches before anything is read; `Staged` hands out what was read and
checked. The targets here are those of no framework: arrays, plain values, generators, and objects
that give and take their state themselves. Adapters bring their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.adapter import (
    ORDER_RNG,
    ORDER_TENSOR,
    ORDER_USER_CODE,
    MatchBy,
    Memory,
    StoredLeaf,
    Target,
)
from ckptfmt.engine.adapter import (
    Comparison as ComparisonProtocol,
)
from ckptfmt.engine.adapter import (
    Staged as StagedProtocol,
)
from ckptfmt.engine.cast import cast_array
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
from ckptfmt.engine.tree import Visit, capture, unflatten
from ckptfmt.errors import UsageError
from ckptfmt.reports import Mismatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


class Comparison:
    """What is wanted against what is stored, by name; see `engine/adapter`."""

    def __init__(
        self,
        leaves: Sequence[StoredLeaf],
        may_cast: Callable[[str], bool] = lambda name: False,
        *,
        wanted: Callable[[str], bool] = lambda name: True,
        containers: Mapping[str, tuple[str, bytes]] | None = None,
        attributes: Mapping[str, Mapping[str, object]] | None = None,
        renamed: Callable[[str], str] = lambda name: name,
        match_by: MatchBy = "name",
    ) -> None:
        self.renamed, self.match_by = renamed, match_by
        self.containers = containers or {}
        """Container name (renames applied) -> (kind, packed argument)."""
        self._leaves = {leaf.name: leaf for leaf in leaves}
        self.wanted = wanted
        self._attributes = attributes or {}
        self._below: dict[str, list[str]] | None = None
        self._may_cast = may_cast
        self._taken: set[str] = set()
        self.sources: dict[str, str] = {}
        """Wanted name -> stored name."""
        self.casts: dict[str, tuple[str, str]] = {}
        """Wanted name -> (stored dtype, wanted dtype)."""
        self.subtrees: dict[str, list[str]] = {}
        """Wanted name -> the stored names at and below it."""
        self.missing_names: dict[str, None] = {}
        self.pending_names: dict[str, None] = {}
        self.mismatches: dict[str, dict[str, Mismatch]] = {"shape": {}, "dtype": {}, "kind": {}}
        self.matched_by: dict[str, str] = {}
        self.ties: dict[str, str] = {}
        self.unsettled: list[tuple[list[str], int, int]] = []
        """Names of one target's tensor, and two stored tensors that may or may not be equal."""
        self.moves: dict[str, str] = {}
        """Stored container -> where its leaves go in the target."""
        self._surplus: dict[str, None] = {}

    def stored(self, below: str) -> Mapping[str, StoredLeaf]:
        if self._below is None:
            self._below = {}
            for name in self._leaves:
                parts = name.split("/")
                for depth in range(len(parts) + 1):
                    self._below.setdefault("/".join(parts[:depth]), []).append(name)
        return {name: self._leaves[name] for name in self._below.get(below, [])}

    def tensor(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        *,
        source: str | None = None,
        rule: str = "",
    ) -> bool:
        leaf = self._take(name, source, rule)
        if leaf is None:
            return False
        if not leaf.dtype:
            self.mismatch(name, f"tensor {dtype} {list(shape)}", "a plain value")
            return False
        good = True
        if leaf.shape != tuple(shape):
            self.mismatch(name, str(list(shape)), str(list(leaf.shape)), what="shape")
            good = False
        if leaf.dtype != dtype:
            if self._may_cast(name):
                self.casts[name] = (leaf.dtype, dtype)
            else:
                self.mismatch(name, dtype, leaf.dtype, what="dtype")
                good = False
        if good:
            self.sources[name] = leaf.name
        return good

    def value(self, name: str, *, source: str | None = None, rule: str = "") -> bool:
        leaf = self._take(name, source, rule)
        if leaf is None:
            return False
        if leaf.dtype:
            self.mismatch(name, "a plain value", f"tensor {leaf.dtype} {list(leaf.shape)}")
            return False
        self.sources[name] = leaf.name
        return True

    def take_empty(self, name: str) -> None:
        """An object without state (an activation, a loss) is stored as an empty dict: it matches."""
        leaf = self._leaves.get(name)
        empty = leaf is not None and isinstance(leaf.value, dict) and not leaf.value
        if empty and name not in self._taken:
            self.value(name)

    def subtree(self, name: str, *, rule: str = "") -> bool:
        below = list(self.stored(name))
        if not below:
            self.missing(name)
            return False
        self._taken.update(below)
        self.subtrees[name] = below
        if rule:
            self.matched_by[name] = rule
        return True

    def moved(self, name: str, to: str) -> None:
        self.moves[name] = to

    def surplus(self, name: str) -> None:
        if self.wanted(name):
            self._surplus[name] = None

    def leave(self, name: str) -> None:
        self._taken.update(self.stored(name))

    def _take(self, name: str, source: str | None, rule: str) -> StoredLeaf | None:
        leaf = self._leaves.get(name if source is None else source)
        if leaf is None:
            below = [] if source is not None else list(self.stored(name))
            if below:
                self._taken.update(below)
                self.mismatch(name, "one leaf", f"a container of {len(below)} leaves")
            else:
                self.missing(name)
            return None
        self._taken.add(leaf.name)
        if rule:
            self.matched_by[name] = rule
        return leaf

    def attributes(self, name: str) -> Mapping[str, object]:
        return self._attributes.get(name, {})

    def missing(self, name: str) -> None:
        if self.wanted(name):
            self.missing_names[name] = None

    def mismatch(self, name: str, expected: str, found: str, *, what: str = "kind") -> None:
        self.mismatches[what].setdefault(name, Mismatch(name, expected, found))

    def pending(self, name: str, *, source: str | None = None) -> None:
        leaf = self._leaves.get(name if source is None else source)
        if leaf is not None:
            self._taken.add(leaf.name)
            self.sources[name] = leaf.name
            self.pending_names[name] = None

    def tie(self, name: str, what: str) -> None:
        self.ties[name] = what

    # -- for the conductor ----------------------------------------------------------------------

    def leaf(self, stored: str) -> StoredLeaf:
        return self._leaves[stored]

    def unexpected(self) -> list[str]:
        """Stored names that no target asked for."""
        return [*(name for name in self._leaves if name not in self._taken), *self._surplus]

    def matched(self) -> list[str]:
        """Wanted names that will be bound; those of a subtree by their stored names."""
        made = [name for name in self.sources if name not in self.pending_names]
        return made + [name for below in self.subtrees.values() for name in below]

    def tensor_rows(self) -> dict[int, list[str]]:
        """Stored tensor row -> wanted names."""
        made: dict[int, list[str]] = {}
        for name, stored in self.sources.items():
            leaf = self._leaves[stored]
            if leaf.dtype:
                made.setdefault(leaf.tensor, []).append(name)
        for below in self.subtrees.values():
            for name in below:
                leaf = self._leaves[name]
                if leaf.dtype:
                    made.setdefault(leaf.tensor, []).append(name)
        return made


class Staged:
    """What was read and checked, by the names that were asked for.

    Args:
        arrays: Stored tensor row -> array; they may be read only when they are asked for.
        undoable: See `engine/adapter`.
    """

    def __init__(
        self, comparison: Comparison, arrays: Mapping[int, Array], *, undoable: bool = True
    ) -> None:
        self._comparison, self.arrays = comparison, arrays
        self._cast: dict[str, Array] = {}
        self.undoable = undoable

    def cast_all(self) -> None:
        """Convert what has another dtype now: a value that overflows is found before the first
        target is touched."""
        for name in self._comparison.casts:
            self._cast[name] = self[name]

    def __getitem__(self, name: str) -> Any:
        if name in self._cast:
            return self._cast[name]
        leaf = self._comparison.leaf(self._comparison.sources[name])
        if not leaf.dtype:
            return copy.deepcopy(leaf.value)
        array = self.arrays[leaf.tensor]
        if name in self._comparison.casts:
            return cast_array(array, self._comparison.casts[name][1], name)
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._comparison.sources or name in self._comparison.subtrees

    def __iter__(self) -> Any:
        return iter([*self._comparison.sources, *self._comparison.subtrees])

    def by_name(self) -> Mapping[str, Any]:
        """Every leaf that is taken, by its name; a tensor that is not in memory is read when it is
        asked for."""
        return _ByName(self, self._comparison)

    def subtree(self, name: str) -> Any:
        below = self._comparison.subtrees[name]
        prefix = len(name) + 1 if name else 0
        names = ["" if stored == name else stored[prefix:] for stored in below]
        leaves: list[Any] = []
        copies: dict[int, Array] = {}
        for stored in below:
            leaf = self._comparison.leaf(stored)
            if leaf.dtype:
                if leaf.tensor not in copies:
                    copies[leaf.tensor] = self.arrays[leaf.tensor].copy()
                leaves.append(copies[leaf.tensor])
            else:
                leaves.append(copy.deepcopy(leaf.value))
        inner = {
            "" if at == name else at[prefix:]: row
            for at, row in self._comparison.containers.items()
            if not name or at == name or at.startswith(f"{name}/")
        }
        return unflatten(names, leaves, inner, partial=True)


class _ByName(Mapping[str, Any]):
    """What validators see: arrays and plain values."""

    def __init__(self, staged: Staged, comparison: Comparison) -> None:
        self._staged, self._comparison = staged, comparison
        self._below = [name for names in comparison.subtrees.values() for name in names]

    def __getitem__(self, name: str) -> Any:
        if name in self._comparison.sources:
            return self._staged[name]
        leaf = self._comparison.leaf(name)
        return self._staged.arrays[leaf.tensor] if leaf.dtype else copy.deepcopy(leaf.value)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._comparison.sources, *self._below])

    def __len__(self) -> int:
        return len(self._comparison.sources) + len(self._below)


# -- targets of no framework ---------------------------------------------------------------------


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

    def compare(self, comparison: ComparisonProtocol) -> None:
        comparison.tensor(self.name, self._dtype, self.array.shape)

    def bind(self, staged: StagedProtocol) -> None:
        if self.name in staged:
            self._old = self.array.copy() if staged.undoable else None
            np.copyto(self.array, staged[self.name])

    def undo(self) -> None:
        if self._old is not None:
            np.copyto(self.array, self._old)


class ItemTarget:
    """A plain value, or an immutable tensor, which is replaced in the dict or list that holds it."""

    order = ORDER_TENSOR

    def __init__(self, visit: Visit, make: Callable[[Any], Any] | None = None) -> None:
        self.name = visit.name
        self._visit, self._make = visit, make
        self._bound = False
        if not isinstance(visit.parent, dict | list):
            holder = "the target itself" if visit.parent is None else type(visit.parent).__name__
            raise UsageError(
                "a plain value cannot be replaced where it stands",
                reason="target",
                where=repr(visit.name),
                found=f"in {holder}",
                do="hold it in a dict or a list, or use load(like=...)",
            )

    def compare(self, comparison: ComparisonProtocol) -> None:
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

    def bind(self, staged: StagedProtocol) -> None:
        if self.name not in staged:
            return
        try:
            made = staged[self.name]
        except KeyError:
            made = staged.subtree(self.name)
        self._bound = True
        self._visit.parent[self._visit.key] = made if self._make is None else self._make(made)

    def undo(self) -> None:
        if self._bound:
            self._visit.parent[self._visit.key] = self._visit.obj


class GeneratorTarget:
    """A generator of NumPy or of Python's random, set in place, last."""

    order = ORDER_RNG

    def __init__(self, name: str, generator: Any) -> None:
        self.name, self._generator = name, generator
        self._old: Any = None

    def compare(self, comparison: ComparisonProtocol) -> None:
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

    def bind(self, staged: StagedProtocol) -> None:
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

    def compare(self, comparison: ComparisonProtocol) -> None:
        comparison.subtree(self.name)
        self._stored = comparison.stored(self.name)

    def bind(self, staged: StagedProtocol) -> None:
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
    adapter = adapter_of(obj)
    if adapter is not None and adapter.kind(obj) in ("tensor", "stateful"):
        made = adapter.target(obj, visit.name, peers)
        return ItemTarget(visit, maker_of(obj)) if made is None else made
    if visit.kind == "tensor":
        if isinstance(obj, np.ndarray):
            return ArrayTarget(visit.name, obj)
        return ItemTarget(visit, maker_of(obj))
    if is_generator(obj):
        return GeneratorTarget(visit.name, obj)
    return StatefulTarget(visit.name, obj, peers)
