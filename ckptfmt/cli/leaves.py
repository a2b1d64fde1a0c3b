"""The leaves of a checkpoint as the commands show them, from the index's columns alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptfmt.cli.text import format_shape, value_text

if TYPE_CHECKING:
    from ckptfmt.format import Index

TENSOR, VALUE = "tensor", "value"
VALUE_SHOWN_MAX = 60


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or a plain value under a name.

    Attributes:
        name: Its whole name.
        kind: "tensor" or "value".
        dtype: The tensor's dtype, or the value's Python type.
        shape: The tensor's shape; () for a value.
        nbytes: Bytes of the tensor; of a value, 0 unless it is long enough to be stored as data.
        tied_to: The first name of the same tensor, or "" if this is it.
        value: The plain value; None for a tensor.
        remark: What to show in place of shape or value.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    tied_to: str = ""
    value: object = None
    remark: str = ""

    @property
    def counted_nbytes(self) -> int:
        """What it adds to a sum: a tied tensor counts once."""
        return 0 if self.tied_to else self.nbytes

    @property
    def content(self) -> str:
        """Shape or value, in a few words."""
        if self.remark:
            return self.remark
        if self.kind == TENSOR:
            tie = f" = {self.tied_to}" if self.tied_to else ""
            return format_shape(self.shape) + tie
        if self.nbytes:
            return "(long value)"
        text = value_text(self.value)
        return text if len(text) <= VALUE_SHOWN_MAX else text[: VALUE_SHOWN_MAX - 1] + "…"


def leaves_of_index(
    index: Index, value_of: Callable[[str], object], names: Iterable[str] | None = None
) -> list[Leaf]:
    """The leaves, in the order of the tree.

    Args:
        index: Of the checkpoint.
        value_of: Gives a plain value by its leaf's name; not asked for long values.
        names: Take part; None: all.
    """
    from ckptfmt.format import LEAF_PACKED, LEAF_TENSOR

    tree = index.tree
    wanted = None if names is None else set(names)
    kinds, rows = tree.leaf_kinds.tolist(), tree.leaf_rows.tolist()
    dtypes = [d.name for d in tree.dtypes]
    tensor_dtypes = tree.tensor_dtypes.tolist()
    nbytes, first = tree.tensor_nbytes.tolist(), tree.tensor_first_leaf.tolist()
    made = []
    for position, name in enumerate(tree.leaf_names):
        if wanted is not None and name not in wanted:
            continue
        row = rows[position]
        if kinds[position] == LEAF_TENSOR:
            tied = "" if first[row] == position else tree.leaf_names[first[row]]
            made.append(
                Leaf(name, TENSOR, dtypes[tensor_dtypes[row]], tree.shape(row), nbytes[row], tied)
            )
        elif kinds[position] == LEAF_PACKED:
            made.append(Leaf(name, VALUE, "value", nbytes=nbytes[row]))
        else:
            value = value_of(name)
            made.append(Leaf(name, VALUE, type(value).__name__, value=value))
    return made


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over leaves; each tied tensor once."""

    tensors: int
    values: int
    nbytes: int
    by_dtype: dict[str, tuple[int, int]]
    """dtype -> (tensors, bytes)."""


def totals(leaves: Sequence[Leaf]) -> Totals:
    """Count tensors, values and bytes."""
    by_dtype: dict[str, tuple[int, int]] = {}
    tensors = values = nbytes = 0
    for leaf in leaves:
        nbytes += leaf.counted_nbytes
        if leaf.kind != TENSOR:
            values += 1
        elif not leaf.tied_to:
            tensors += 1
            count, size = by_dtype.get(leaf.dtype, (0, 0))
            by_dtype[leaf.dtype] = (count + 1, size + leaf.nbytes)
    return Totals(tensors, values, nbytes, by_dtype)
