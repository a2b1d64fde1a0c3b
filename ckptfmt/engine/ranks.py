"""A value that each rank has for itself: its random generators, its position in the data.

Stored as a dict from rank to value (`rng/0/torch`), also by a process that is alone: rank 0 of 1.
A group of another size has no use for it, so the number of ranks is compared. Spec: 03-names.
"""

from __future__ import annotations

from ckptfmt.engine.adapter import ORDER_USER_CODE, Comparison, Staged
from ckptfmt.format import join_name, split_name


class PerRank:
    """Marks a part of a tree as each rank's own. A restore puts a plain value into `value`."""

    __slots__ = ("held",)

    def __init__(self, value: object) -> None:
        self.held: dict[str, object] = {"": value}
        """One item, so that a restore can replace it as it does a dict's."""

    @property
    def value(self) -> object:
        return self.held[""]

    def __repr__(self) -> str:
        return f"per_rank({self.value!r})"


def per_rank(obj: object) -> PerRank:
    """Say that a part of the tree is each rank's own: its generators, its position in the data.

    With `group=` every rank stores and gets its own; a process without one is rank 0 of 1. A group
    of another size than the one that saved: MismatchError. What was a plain value, or a dict that
    was replaced whole, is in `.value` after a restore.
    """
    return PerRank(obj)


class PerRankTarget:
    """Compares the number of ranks; what is below has targets of its own."""

    order = ORDER_USER_CODE

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self._rank, self._size = name, rank, size

    def compare(self, comparison: Comparison) -> None:
        stored = comparison.stored(self.name)
        depth = len(split_name(self.name)) if self.name else 0
        found = {split_name(name)[depth] for name in stored if name != self.name}
        expected = {str(rank) for rank in range(self._size)}
        if stored and found != expected:
            comparison.mismatch(self.name, _words(expected), _words(found))
        for rank in expected - {str(self._rank)}:
            comparison.leave(join_name(self.name, rank))

    def bind(self, staged: Staged) -> None: ...
    def undo(self) -> None: ...


def _words(ranks: set[str]) -> str:
    if ranks == {"0"}:
        return "the value of one process"
    if all(rank.isdigit() for rank in ranks) and ranks:
        return f"a value for each of {len(ranks)} ranks"
    return "a value that belongs to no rank"
