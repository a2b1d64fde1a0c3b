"""Tensors that lie in C order somewhere: a run of elements is what can be read of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.streaming import BoxReader


_RUN_NUMEL_MAX = 8 << 20
"""A box whose elements are spread over a longer run is put together from shorter ones."""


def box_of_runs(shape: Sequence[int], read: Callable[[int, int], NDArray[Any]]) -> BoxReader:
    """Reads a box by the runs of elements from its first to its last.

    Args:
        read: Gives the elements [first, last), flat.
    """
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

    def box(sides: tuple[slice, ...]) -> NDArray[Any]:
        extent = tuple(side.stop - side.start for side in sides)
        if not all(extent):
            return read(0, 0).reshape(extent)
        first = sum(side.start * step for side, step in zip(sides, steps, strict=True))
        last = sum((side.stop - 1) * step for side, step in zip(sides, steps, strict=True))
        if last - first >= max(_RUN_NUMEL_MAX, math.prod(extent)):
            return _in_parts(sides, extent)
        flat = np.ascontiguousarray(read(first, last + 1))
        strides = [step * flat.itemsize for step in steps]
        return np.ndarray(extent, flat.dtype, flat, 0, strides)

    def _in_parts(sides: tuple[slice, ...], extent: tuple[int, ...]) -> NDArray[Any]:
        axis = next(at for at, n in enumerate(extent) if n > 1)
        side, rows = sides[axis], max(_RUN_NUMEL_MAX // steps[axis], 1)
        made = np.empty(extent, read(0, 0).dtype)
        for begin in range(side.start, side.stop, rows):
            part = slice(begin, min(begin + rows, side.stop))
            at = (*(slice(None),) * axis, slice(begin - side.start, part.stop - side.start))
            made[at] = box((*sides[:axis], part, *sides[axis + 1 :]))
        return made

    return box
