"""Boxes of a stored tensor, also such that lie across its rows.

A large tensor that lies in its data file as it is in memory is checked once and then looked at through
a map. Any other is read by chunks, which are runs of rows: a box of whole rows costs what it holds, a
column costs the whole tensor. So one of which a column is asked for goes to a temporary file first.
"""

from __future__ import annotations

import math
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.streaming import STREAMED_NBYTES_MIN, boxes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.engine import Checkpoint, StoredTensor

_PIECE_NBYTES = 64 << 20
_COPIES_MAX = 4
"""A temporary file is as large as its tensor: few are kept, for tensors that are joined."""


class Maps:
    """Large tensors of one checkpoint as arrays that are not in memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._maps: dict[int, NDArray[Any]] = {}
        self._copies: OrderedDict[int, NDArray[Any]] = OrderedDict()

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
