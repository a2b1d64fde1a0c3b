"""The tensors of a flat tree: an array that is stored as it lies in memory stands for itself.

A hundred thousand small arrays would otherwise cost an object with seven fields each, and the passes
of the garbage collector over them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from ckptfmt.engine.adapter import TensorSource
from ckptfmt.engine.dispatch import array_source

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

_PLAIN = (
    {
        np.dtype(name)
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    }
    if sys.byteorder == "little"
    else set()
)
_CONTIGUOUS, _OWN_DATA, _WRITE_BACK = 0x1, 0x4, 0x2000
_FLAGS = _CONTIGUOUS | _OWN_DATA | _WRITE_BACK
_GOOD = _CONTIGUOUS | _OWN_DATA


def is_plain(array: Array) -> bool:
    """A C-contiguous array of exactly NumPy's class, with elements in memory of its own, whose bytes
    are those of its region. It is tied to nothing but itself."""
    return (
        type(array) is np.ndarray
        and array.dtype in _PLAIN
        and array.flags.num & _FLAGS == _GOOD
        and array.size > 0
    )


def are_plain(arrays: Sequence[object]) -> bool:
    """Whether all of them are."""
    if set(map(type, arrays)) != {np.ndarray}:
        return False
    return (
        set(map(_dtype_of, arrays)) <= _PLAIN
        and all(flags & _FLAGS == _GOOD for flags in set(map(_flags_of, arrays)))
        and all(map(_size_of, arrays))
    )


_dtype_of, _size_of, _shape_of = attrgetter("dtype"), attrgetter("size"), attrgetter("shape")
_flags_of = attrgetter("flags.num")


class Sources(Sequence[TensorSource]):
    """Tensor sources by row. `items` are they, or plain arrays for which one is made when asked."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[TensorSource | Array] = ()) -> None:
        self.items: list[TensorSource | Array] = list(items)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, row: int) -> TensorSource: ...
    @overload
    def __getitem__(self, row: slice) -> Sources: ...
    def __getitem__(self, row: int | slice) -> TensorSource | Sources:
        if isinstance(row, slice):
            return Sources(self.items[row])
        item = self.items[row]
        return item if isinstance(item, TensorSource) else array_source(item)

    def __iter__(self) -> Iterator[TensorSource]:
        for row in range(len(self.items)):
            yield self[row]

    def others(self) -> list[tuple[int, TensorSource]]:
        """Row and source of those that are no plain arrays: whoever looks for what only these may
        have, a device or parts, need not make an object of each array."""
        if not any(issubclass(kind, TensorSource) for kind in set(map(type, self.items))):
            return []
        return [
            (row, item) for row, item in enumerate(self.items) if isinstance(item, TensorSource)
        ]

    def far(self) -> set[int]:
        """Rows of the tensors that are on a device."""
        return {row for row, source in self.others() if source.device is not None}

    def append(self, item: TensorSource | Array) -> None:
        self.items.append(item)

    def extend(self, items: Iterable[TensorSource | Array] | Sources) -> None:
        self.items += items.items if isinstance(items, Sources) else items

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """Of each, in order; no object is made for a plain array."""
        return map(_shape_of, self.items)

    def dtypes(self) -> list[str | np.dtype[Any]]:
        """Of each: the format's name, or a plain array's dtype."""
        return list(map(_dtype_of, self.items))
