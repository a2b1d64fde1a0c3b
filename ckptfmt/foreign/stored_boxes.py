"""Boxes of a stored tensor, also such that lie across its rows.

A checkpoint is read by chunks, which are runs of rows: a box of whole rows costs what it holds, a
column costs the whole tensor. So a large tensor of which a column is asked for is read once, checked,
and then looked at through a map: of the data file where the bytes lie there as they are, else of a
temporary file.
"""

from __future__ import annotations

import math
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.streaming import STREAMED_NBYTES_MIN, boxes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.engine import StoredTensor

_PIECE_NBYTES = 64 << 20
_MAPS_MAX = 4
"""A temporary file is as large as its tensor: few are kept, for tensors that are joined."""


class Maps:
    """The maps of one checkpoint's tensors, the last few."""

    def __init__(self) -> None:
        self._maps: OrderedDict[int, NDArray[Any]] = OrderedDict()

    def read(self, stored: StoredTensor, sides: Sequence[slice]) -> NDArray[Any]:
        """A box of a tensor, in the format's elements."""
        index: tuple[Any, ...] = (*sides, ...)
        view = self._maps.get(stored.row)
        if view is None:
            if stored.nbytes < STREAMED_NBYTES_MIN or not lies_across(stored.shape, sides):
                return stored.read(index)
            view = self._maps[stored.row] = _mapped(stored)
            while len(self._maps) > _MAPS_MAX:
                self._maps.popitem(last=False)
        self._maps.move_to_end(stored.row)
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


def _mapped(stored: StoredTensor) -> NDArray[Any]:
    """All of a tensor, every byte checked, without a copy in memory."""
    itemsize = stored.dtype.itemsize
    total, step = math.prod(stored.shape), max(_PIECE_NBYTES // itemsize, 1)
    copy: NDArray[Any] | None = None
    try:
        view = stored.mmap()
    except UnsupportedError:
        with tempfile.TemporaryFile(prefix="ckptfmt-") as file:
            raw = np.memmap(file, np.uint8, "w+", shape=(total * itemsize,))
        view = copy = raw.view(stored.dtype).reshape(stored.shape)
    for begin in range(0, total, step):
        for sides in boxes_of(stored.shape, begin, min(begin + step, total)):
            index: tuple[Any, ...] = (*sides, ...)
            values = stored.read(index)  # which checks them
            if copy is not None:
                copy[index] = values
    return view
