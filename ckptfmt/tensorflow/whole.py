"""Objects of several leaves, which are saved and restored together or not at all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from ckptfmt.engine import Comparison, TensorSource

if TYPE_CHECKING:
    from numpy.typing import NDArray


def takes_part(comparison: Comparison, name: str, leaves: Sequence[str]) -> bool:
    """Whether `names=` takes all of an object's leaves; a part of them is a mismatch."""
    wanted = [leaf for leaf in leaves if comparison.wanted(leaf)]
    if 0 < len(wanted) < len(leaves):
        comparison.take(name)
        comparison.mismatch(name, "all of its parts in names=", ", ".join(wanted))
        return False
    return bool(wanted) or not leaves


def part_source(array: NDArray[Any], owner: object, part: str) -> TensorSource:
    """A leaf with values of an object: tied with the same leaf of the same object elsewhere."""
    dtype = "bytes" if array.dtype == object else array.dtype.name
    return TensorSource(dtype, array.shape, lambda: array, identity(owner, part, array), {}, owner)


def identity(owner: object, part: str, array: NDArray[Any] | None = None) -> Hashable | None:
    """Of a part of an object; None where there is nothing in it."""
    return None if array is not None and not array.size else ("tensorflow.part", id(owner), part)
