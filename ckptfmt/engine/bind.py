"""bind: checked arrays -> the caller's tree and targets, all or nothing (I5). Spec: 08-protocol.

`Comparison` collects what matches before anything is read; `Staged` hands out what was read and
checked. What they are handed to is in `targets`, and in the adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.adapter import SPARE, Box, MatchBy, StoredLeaf
from ckptfmt.engine.cast import cast_array
from ckptfmt.engine.composites import Composites, is_below
from ckptfmt.engine.sharded import Sharded
from ckptfmt.engine.unflatten import unflatten
from ckptfmt.engine.walk import read_only
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
        self.boxes: dict[str, Sequence[Box]] = {}
        """Stored name -> what of the tensor is taken, where that is not all of it."""
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
        self.strangers: dict[str, Mismatch] = {}
        """Objects of which no name matches, though something is stored under their own."""
        self._surplus: dict[str, None] = {}
        self._spare: list[str] = []

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
        boxes: Sequence[Box] | None = None,
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
            if boxes is not None:
                self.boxes[leaf.name] = boxes
        return good

    def in_parts(self, stored: str, boxes: Sequence[Box]) -> None:
        self.boxes[stored] = boxes

    def value(self, name: str, *, source: str | None = None, rule: str = "") -> bool:
        leaf = self._take(name, source, rule)
        if leaf is None:
            return False
        if leaf.dtype:
            self.mismatch(name, "a plain value", f"tensor {leaf.dtype} {list(leaf.shape)}")
            return False
        self.sources[name] = leaf.name
        return True

    def take(self, name: str) -> None:
        self._taken.update(self.stored(name))

    def take_empty(self, name: str) -> None:
        """An object without state (an activation, a loss) is stored as an empty dict: it matches."""
        leaf = self._leaves.get(name)
        empty = leaf is not None and isinstance(leaf.value, dict) and not leaf.value
        if empty and name not in self._taken:
            self.value(name)

    def subtree(self, name: str) -> bool:
        below = list(self.stored(name))
        if not below:
            self.missing(name)
            return False
        self._taken.update(below)
        self.subtrees[name] = below
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

    def composites(self, below: str) -> Composites:
        """Those among the stored containers at and below a name."""
        return Composites({n: a for n, a in self._attributes.items() if is_below(n, below)})

    def missing(self, name: str, *, spare: bool = False) -> None:
        if self.wanted(name):
            self.missing_names[name] = None
            if spare:
                self._spare.append(name)

    def spare(self) -> list[str]:
        """What is missing or unexpected, and may be."""
        return [*self._spare, *(n for n in self.unexpected() if self._is_spare(n))]

    def _is_spare(self, name: str) -> bool:
        leaf = self._leaves.get(name)
        return leaf is not None and leaf.attributes.get(SPARE) is True

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

    def answered(self) -> int:
        """How much has been decided, other than by being missing."""
        return (
            len(self.sources)
            + len(self.subtrees)
            + len(self.pending_names)
            + sum(len(found) for found in self.mismatches.values())
        )

    def found_nothing(self, name: str, missing: int) -> None:
        """An object of which all names are missing; no exception helps if others are stored."""
        others = len(self.stored(name))
        if others:
            self.strangers[name] = Mismatch(
                name, f"{missing} names", f"{others} others, of which none matches"
            )

    def unexpected(self) -> list[str]:
        """Stored names that no target asked for."""
        return [*(name for name in self._leaves if name not in self._taken), *self._surplus]

    def matched(self) -> list[str]:
        """Wanted names that will be bound; those of a subtree by their stored names."""
        made = [name for name in self.sources if name not in self.pending_names]
        made += [name for below in self.subtrees.values() for name in below]
        return list(dict.fromkeys(made))

    def tensor_rows(self) -> dict[int, list[str]]:
        """Stored tensor row -> wanted names."""
        made: dict[int, list[str]] = {}
        for name, stored in self.sources.items():
            leaf = self._leaves[stored]
            if leaf.dtype and stored not in self.boxes:
                made.setdefault(leaf.tensor, []).append(name)
        for below in self.subtrees.values():
            for name in below:
                leaf = self._leaves[name]
                if leaf.dtype and name not in self.boxes:
                    made.setdefault(leaf.tensor, []).append(name)
        return made

    def wanted_boxes(self) -> dict[str, list[tuple[int, Box]]]:
        """Stored name -> the boxes that are taken of it, each with the tensor's row."""
        return {
            name: [(self._leaves[name].tensor, box) for box in boxes]
            for name, boxes in self.boxes.items()
        }


class Staged:
    """What was read and checked, by the names that were asked for.

    Args:
        arrays: Stored tensor row -> array; they may be read only when they are asked for.
        boxes: Stored name -> the boxes that are taken of it, likewise.
        undoable: See `engine/adapter`.
    """

    def __init__(
        self,
        comparison: Comparison,
        arrays: Mapping[int, Array],
        *,
        boxes: Mapping[str, list[Array]] | None = None,
        undoable: bool = True,
    ) -> None:
        self._comparison, self.arrays = comparison, arrays
        self._cast: dict[str, Array] = {}
        self._boxes = boxes or {}
        self._given: set[int] = set()
        self.undoable = undoable

    def cast_all(self) -> None:
        """Convert what has another dtype now: a value that overflows is found before the first
        target is touched."""
        for name in self._comparison.casts:
            if self._comparison.sources.get(name) in self._comparison.boxes:
                self.parts(name)
            else:
                self._cast[name] = self[name]

    def __getitem__(self, name: str) -> Any:
        if name in self._cast:
            return self._cast[name]
        leaf = self._comparison.leaf(self._comparison.sources[name])
        if not leaf.dtype:
            return copy.deepcopy(leaf.value)
        array = self.arrays[leaf.tensor]
        self._given.add(leaf.tensor)
        if name in self._comparison.casts:
            return cast_array(array, self._comparison.casts[name][1], name)
        return array

    def own(self, name: str) -> Any:
        row = self._comparison.leaf(self._comparison.sources[name]).tensor
        cast, fresh = name in self._comparison.casts, row not in self._given
        array = self[name]
        # Tied names are one array here, and a cast one may be asked for twice.
        return array if fresh and not cast else array.copy()

    def parts(self, name: str) -> list[Array]:
        arrays = self._boxes[self._comparison.sources[name]]
        if name in self._comparison.casts:
            return [cast_array(a, self._comparison.casts[name][1], name) for a in arrays]
        return arrays

    def __contains__(self, name: object) -> bool:
        return name in self._comparison.sources or name in self._comparison.subtrees

    def __iter__(self) -> Any:
        return iter([*self._comparison.sources, *self._comparison.subtrees])

    def sharded(self, stored: str) -> Sharded:
        """The boxes that are taken of a stored tensor."""
        leaf, boxes = self._comparison.leaf(stored), self._comparison.boxes[stored]
        arrays = self._boxes[stored]
        parts = [(origin, array) for (origin, _), array in zip(boxes, arrays)]
        return Sharded(leaf.shape, parts, None if arrays else np.uint8)

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
        composites = self._comparison.composites(name)
        tensors: dict[int, Any] = {}
        for stored in below:
            leaf = self._comparison.leaf(stored)
            if not leaf.dtype:
                leaves.append(copy.deepcopy(leaf.value))
                continue
            if stored in self._comparison.boxes:
                leaves.append(self.sharded(stored))
                continue
            row = leaf.tensor
            if row not in copies:
                copies[row] = self.arrays[row].copy()
                tensors[row] = composites.part(stored, copies[row], leaf.attributes)
            part = composites.adapter_of(stored) is not None
            leaves.append(tensors[row] if part else copies[row])
        inner = {
            "" if at == name else at[prefix:]: row
            for at, row in self._comparison.containers.items()
            if is_below(at, name)
        }
        makers = {at[prefix:] if at != name else "": m for at, m in composites.makers.items()}
        return unflatten(names, leaves, inner, partial=True, makers=makers)


class _ByName(Mapping[str, Any]):
    """What validators see: plain values, and arrays, read-only as they will be bound."""

    def __init__(self, staged: Staged, comparison: Comparison) -> None:
        self._staged, self._comparison = staged, comparison
        self._below = [name for names in comparison.subtrees.values() for name in names]

    def __getitem__(self, name: str) -> Any:
        stored = self._comparison.sources.get(name, name)
        if stored in self._comparison.boxes:
            return self._staged.sharded(stored)
        if name in self._comparison.sources:
            return read_only(self._staged[name])
        leaf = self._comparison.leaf(name)
        if not leaf.dtype:
            return copy.deepcopy(leaf.value)
        return read_only(self._staged.arrays[leaf.tensor])

    def __iter__(self) -> Iterator[str]:
        return iter([*self._comparison.sources, *self._below])

    def __len__(self) -> int:
        return len(self._comparison.sources) + len(self._below)
