"""Boxes of a stored tensor, also such that lie across its rows.

A large tensor that lies in its data file as it is in memory is checked once and then looked at through
a map. Any other is read by chunks, which are runs of rows: a box of whole rows costs what it holds, a
column costs the whole tensor. So one of which a column is asked for goes to a temporary file first.
"""

from __future__ import annotations

import math
import tempfile
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.engine import source_of
from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.streaming import STREAMED_NBYTES_MIN, boxes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.engine import Checkpoint, StoredTensor

_PIECE_NBYTES = 64 << 20
_GROUP_NBYTES = 16 << 20
_GROUPS_MAX = 4
_COPIES_MAX = 4
"""A temporary file is as large as its tensor: few are kept, for tensors that are joined."""


class Maps:
    """Tensors of one checkpoint as arrays: large ones that are not in memory, small ones in groups."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._source = source_of(checkpoint)
        nbytes = checkpoint.index.tree.tensor_nbytes
        self._sizes = nbytes.tolist()
        self._group_of = (np.cumsum(np.minimum(nbytes, _GROUP_NBYTES)) // _GROUP_NBYTES).tolist()
        self._groups: OrderedDict[int, dict[int, NDArray[Any]]] = OrderedDict()
        self._maps: dict[int, NDArray[Any]] = {}
        self._copies: OrderedDict[int, NDArray[Any]] = OrderedDict()

    def small(self, row: int) -> NDArray[Any]:
        """A whole tensor, which is read with its neighbours: one request for many."""
        number = self._group_of[row]
        group = self._groups.get(number)
        if group is None or row not in group:
            rows = [row] if self._sizes[row] >= _GROUP_NBYTES else self._neighbours(row)
            group = self._source.tensors(rows, mode="read", verify=True, progress=False)
            self._groups[number] = group
            while len(self._groups) > _GROUPS_MAX:
                self._groups.popitem(last=False)
        self._groups.move_to_end(number)
        return group[row]

    def _neighbours(self, row: int) -> list[int]:
        first = bisect_left(self._group_of, self._group_of[row])
        last = bisect_right(self._group_of, self._group_of[row])
        return [at for at in range(first, last) if self._sizes[at] < _GROUP_NBYTES]

    def is_mapped(self, stored: StoredTensor) -> bool:
        """Whether a large tensor lies in its data file as it is in memory."""
        if stored.nbytes < STREAMED_NBYTES_MIN:
            return False
        try:
            stored.mmap()
        except UnsupportedError:
            return False
        return True

    def whole(self, stored: StoredTensor) -> NDArray[Any]:
        """A map of the data file; every byte is checked when it is first asked for."""
        made = self._maps.get(stored.row)
        if made is None:
            report = self._checkpoint.verify(lambda name: name == stored.name)
            if not report.ok:
                raise CorruptError(
                    "a stored tensor is damaged",
                    reason="chunk-digest",
                    where=f"tensor {stored.name!r} in {report.problems[0].file}",
                    found=report.problems[0].reason,
                    do='restore another step or run "ckptfmt verify"',
                )
            made = self._maps[stored.row] = stored.mmap()
        return made

    def read(self, stored: StoredTensor, sides: Sequence[slice]) -> NDArray[Any]:
        """A box of a tensor that is encoded or far away, in the format's elements."""
        index: tuple[Any, ...] = (*sides, ...)
        view = self._copies.get(stored.row)
        if view is None:
            if stored.nbytes < STREAMED_NBYTES_MIN or not lies_across(stored.shape, sides):
                return stored.read(index)
            view = self._copies[stored.row] = _copied(stored)
            while len(self._copies) > _COPIES_MAX:
                self._copies.popitem(last=False)
        self._copies.move_to_end(stored.row)
        made: NDArray[Any] = view[index]
        return made


def lies_across(shape: Sequence[int], sides: Sequence[slice]) -> bool:
    """Whether a box is no run of elements in C order."""
    whole = True
    for length, side in zip(reversed(shape), reversed(sides), strict=True):
        if not whole and side.stop - side.start > 1:
            return True
        whole = whole and side.stop - side.start == length
    return False


def _copied(stored: StoredTensor) -> NDArray[Any]:
    """All of a tensor in a temporary file, every byte checked."""
    itemsize = stored.dtype.itemsize
    total, step = math.prod(stored.shape), max(_PIECE_NBYTES // itemsize, 1)
    with tempfile.TemporaryFile(prefix="ckptfmt-") as file:
        raw = np.memmap(file, np.uint8, "w+", shape=(total * itemsize,))
    view = raw.view(stored.dtype).reshape(stored.shape)
    for begin in range(0, total, step):
        for sides in boxes_of(stored.shape, begin, min(begin + step, total)):
            index: tuple[Any, ...] = (*sides, ...)
            view[index] = stored.read(index)
    return view
