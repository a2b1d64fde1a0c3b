"""Two checkpoints compared by the digests in their indexes: no data is read.

Two tensors of one dtype and shape are the same if all their chunks have equal digests. That can be
said only where both are cut alike and name the same digest algorithm; else the answer is "unknown".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.cli.leaves import TENSOR, Leaf

if TYPE_CHECKING:
    from ckptfmt.format import Index, TreeSection

ADDED, REMOVED, CHANGED, UNKNOWN, SAME = "added", "removed", "changed", "unknown", "same"


@dataclass(frozen=True, slots=True)
class Difference:
    """One leaf that is not the same on both sides.

    Attributes:
        status: added, removed, changed or unknown.
        leaf: The leaf, of B where it is there, else of A.
        what: What differs, in a few words.
        changed_nbytes: Bytes of the chunks that differ; of a whole leaf where it was added, removed,
            or has another dtype or shape.
    """

    status: str
    leaf: Leaf
    what: str = ""
    changed_nbytes: int = 0


@dataclass(slots=True)
class Comparison:
    """All differences; `structure` is what differs beside leaves, `notes` what may be ignored."""

    differences: list[Difference] = field(default_factory=list)
    same: int = 0
    same_nbytes: int = 0
    structure: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count(self, status: str) -> int:
        return sum(d.status == status for d in self.differences)

    def nbytes(self, status: str) -> int:
        return sum(d.changed_nbytes for d in self.differences if d.status == status)

    @property
    def equal(self) -> bool | None:
        """None: nothing is known to differ, and not everything is known."""
        statuses = {d.status for d in self.differences}
        if statuses - {UNKNOWN} or self.structure:
            return False
        return None if statuses else True


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: its leaves by name, and its index; None where there is none (a foreign file)."""

    leaves: Mapping[str, Leaf]
    index: Index | None


def compare(a: Side, b: Side, *, part: bool = False) -> Comparison:
    """Compare two sides. `part`: the leaves were selected, and only they are looked at."""
    found = Comparison()
    counted: set[str] = set()
    for name, leaf in a.leaves.items():
        other = b.leaves.get(name)
        if other is None:
            found.differences.append(Difference(REMOVED, leaf, "", leaf.counted_nbytes))
            continue
        difference = _compare_leaf(a.index, b.index, leaf, other)
        if difference is not None:
            found.differences.append(difference)
            continue
        found.same += 1
        if (tensor := leaf.tied_to or name) not in counted:
            counted.add(tensor)
            found.same_nbytes += leaf.nbytes
    for name, leaf in b.leaves.items():
        if name not in a.leaves:
            found.differences.append(Difference(ADDED, leaf, "", leaf.counted_nbytes))
    if a.index is not None and b.index is not None:
        _compare_ties(found, a.leaves, b.leaves)
        if not part:
            _compare_order(found, a.leaves, b.leaves)
            _compare_containers(found, a.index.tree, b.index.tree)
            _compare_attributes(found, a.index.tree, b.index.tree)
    return found


def _compare_leaf(a: Index | None, b: Index | None, one: Leaf, other: Leaf) -> Difference | None:
    if one.kind != other.kind:
        return Difference(CHANGED, other, f"{one.kind} -> {other.kind}", other.counted_nbytes)
    if one.kind != TENSOR and not (one.nbytes and other.nbytes):
        if a is not None and b is not None:
            return _compare_value(a.tree, b.tree, one, other)
        # A foreign file has no packed values. By repr: a NaN is equal to itself.
        same = one.dtype == other.dtype and repr(one.value) == repr(other.value)
        return None if same else Difference(CHANGED, other, "value", other.counted_nbytes)
    for what, before, after in (
        ("dtype", one.dtype, other.dtype),
        ("shape", _shape(one), _shape(other)),
    ):
        if before != after:
            return Difference(CHANGED, other, f"{what} {before} -> {after}", other.counted_nbytes)
    if a is None or b is None:
        return Difference(UNKNOWN, other, "no digests", other.counted_nbytes)
    changed = changed_nbytes(a, b, one.name)
    if changed is None:
        why = "cut differently"
        if a.about.algorithm != b.about.algorithm:
            why = f"digests {a.about.algorithm} and {b.about.algorithm}"
        return Difference(UNKNOWN, other, why, other.counted_nbytes)
    if changed:
        return Difference(CHANGED, other, "values", 0 if other.tied_to else changed)
    return None


def _shape(leaf: Leaf) -> str:
    return str(list(leaf.shape))


def _compare_value(a: TreeSection, b: TreeSection, one: Leaf, other: Leaf) -> Difference | None:
    if bool(one.nbytes) == bool(other.nbytes):
        packed = [t.values[int(t.leaf_rows[t.leaf_positions[one.name]])] for t in (a, b)]
        if packed[0] == packed[1]:
            return None
    return Difference(CHANGED, other, f"{one.content} -> {other.content}", other.counted_nbytes)


def changed_nbytes(a: Index, b: Index, name: str) -> int | None:
    """Raw bytes of the chunks of a tensor that differ; None where the cuts cannot be compared."""
    if a.about.algorithm != b.about.algorithm:
        return None
    cuts, digests, raw = [], [], None
    for tree in (a.tree, b.tree):
        tensor = int(tree.leaf_rows[tree.leaf_positions[name]])
        at = tree.tensor_region_starts
        regions = slice(int(at[tensor]), int(at[tensor + 1]))
        dims = tree.region_dims_starts
        box = slice(int(dims[regions.start]), int(dims[regions.stop]))
        chunk_at = tree.region_chunk_starts
        chunks = slice(int(chunk_at[regions.start]), int(chunk_at[regions.stop]))
        raw = tree.chunk_raw[chunks]
        cuts.append(
            (
                tree.region_nchunks[regions].tobytes(),
                tree.region_origins[box].tobytes(),
                tree.region_extents[box].tobytes(),
                raw.tobytes(),
            )
        )
        digests.append(tree.chunk_digests[chunks])
    if cuts[0] != cuts[1]:
        return None
    assert raw is not None
    differs = (digests[0] != digests[1]).any(axis=1)
    return int(raw[differs].astype(np.int64).sum())


def _compare_order(found: Comparison, a: Mapping[str, Leaf], b: Mapping[str, Leaf]) -> None:
    if [name for name in a if name in b] != [name for name in b if name in a]:
        found.structure.append("the leaves stand in another order")


def _compare_ties(found: Comparison, a: Mapping[str, Leaf], b: Mapping[str, Leaf]) -> None:
    """Equal leaves that are tied otherwise are another tree."""
    for name, leaf in a.items():
        before, after = leaf.tied_to, b[name].tied_to if name in b else ""
        if name in b and before != after and (before in b or after in a):
            found.structure.append(f"{name}: tied to {before or 'nothing'} -> {after or 'nothing'}")


def _compare_containers(found: Comparison, a: TreeSection, b: TreeSection) -> None:
    def table(tree: TreeSection) -> dict[str, tuple[str, bytes]]:
        rows = zip(tree.container_names, tree.container_kinds, tree.container_arguments)
        return {name: (kind, argument) for name, kind, argument in rows}

    before, after = table(a), table(b)
    for name in dict.fromkeys([*before, *after]):
        # A dict needs no row. Only a row that differs is worth the look for what lies below it.
        one, other = before.get(name, ("dict", b"")), after.get(name, ("dict", b""))
        if one == other or not (_has_below(a, name) and _has_below(b, name)):
            continue
        what = f"{one[0]} -> {other[0]}" if one[0] != other[0] else f"another {one[0]}"
        found.structure.append(f"{name or '(root)'}: {what}")


def _has_below(tree: TreeSection, name: str) -> bool:
    """A container that is absent on one side is told by its leaves already."""
    prefix = f"{name}/" if name else ""
    return any(leaf.startswith(prefix) for leaf in tree.leaf_names)


def _compare_attributes(found: Comparison, a: TreeSection, b: TreeSection) -> None:
    def table(tree: TreeSection, key: str) -> dict[str, Any]:
        attribute = tree.leaf_attributes.get(key)
        if attribute is None:
            return {}
        names = (tree.leaf_names[row] for row in attribute.rows.tolist())
        return dict(zip(names, attribute.values))

    for key in sorted({*a.leaf_attributes, *b.leaf_attributes}):
        before, after = table(a, key), table(b, key)
        common = [n for n in {**before, **after} if n in a.leaf_positions and n in b.leaf_positions]
        differs = sum(before.get(name) != after.get(name) for name in common)
        if differs:
            found.notes.append(f"attribute {key} differs on {differs:,} leaves")
