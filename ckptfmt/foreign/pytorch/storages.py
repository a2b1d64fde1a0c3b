"""A storage: a run of bytes in the file that tensors are views of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import InternalError
from ckptfmt.foreign.file_map import view
from ckptfmt.foreign.pickle_tree import Node, TreeMaker
from ckptfmt.foreign.pytorch.dtypes import TorchDtype

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray

Raw = Callable[[int, int], "NDArray[np.uint8]"]
"""Bytes of a storage: (start, how many)."""


def _unplaced(start: int, nbytes: int) -> NDArray[np.uint8]:
    raise InternalError("a storage without a place was read", reason="foreign-storage")


@dataclass(slots=True, eq=False)
class Storage(Node):
    """A storage, or a part of one.

    Attributes:
        key: Equal for what is one storage in the file.
        dtype: Of its elements; of an untyped one `uint8`.
        nbytes: Of this storage or part.
        where: File, and entry or range.
        start: Byte of the storage where this part begins.
        raw: Reads bytes of the storage, unchecked.
        swapped: Whether its components have the other byte order than the format's little one.
        is_untyped: It has no dtype of its own.
        is_inflated: Its bytes are read as a stream, best in their order.
    """

    key: object
    dtype: TorchDtype
    nbytes: int
    where: str
    start: int = 0
    raw: Raw = _unplaced
    swapped: bool = False
    is_untyped: bool = False
    is_inflated: bool = False

    def bytes_of(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of this part; the caller has checked the range."""
        return self.raw(self.start + start, nbytes)

    def part(self, start: int, nbytes: int) -> Storage:
        """A storage that is a view of this one; the caller has checked the range."""
        made = Storage(self.key, self.dtype, nbytes, self.where, self.start + start)
        # Its bytes are the whole's, also where they are placed later.
        made.raw, made.swapped = (lambda at, n: self.raw(at, n)), self.swapped
        made.is_inflated = self.is_inflated
        return made

    def carry(self, maker: TreeMaker, name: str) -> Any:
        """A storage that stands alone is the tensor of all its elements."""
        from ckptfmt.foreign.pytorch.tensors import Strided

        numel = self.nbytes // self.dtype.itemsize
        return Strided(self, self.dtype, 0, (numel,), (1,)).carry(maker, name)


def mapped(data: bytes | mmap.mmap, start: int) -> Raw:
    """A storage in a mapped file, without a copy."""
    return lambda at, nbytes: view(data, start + at, nbytes)
