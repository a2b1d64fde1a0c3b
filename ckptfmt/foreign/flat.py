"""Tensors that lie in C order somewhere: a run of elements is what can be read of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.streaming import BoxReader


def box_of_runs(shape: Sequence[int], read: Callable[[int, int], NDArray[Any]]) -> BoxReader:
    """Reads a box by the run of elements from its first to its last.

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
        flat = np.ascontiguousarray(read(first, last + 1))
        strides = [step * flat.itemsize for step in steps]
        return np.ndarray(extent, flat.dtype, flat, 0, strides)

    return box
