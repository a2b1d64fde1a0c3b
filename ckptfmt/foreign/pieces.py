"""A tensor in pieces: boxes that cover it, and what is read of several of them at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.mapping import corrupt

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.streaming import BoxReader

_CELLS_MAX = 1 << 22
_PAIRS_MAX = 1 << 24
_GAP = "no slice holds a part of the tensor"


def check_coverage(
    shape: Sequence[int], boxes: Sequence[tuple[slice, ...]], form: str, where: str
) -> bool:
    """Whether boxes overlap; an error if they leave a gap.

    Args:
        boxes: Those that are not empty, sorted by where they begin.
        form: The format, whose name the error's kind begins with.
    """
    total = math.prod(shape)
    if total == 0:
        return False
    covered = sum(math.prod(s.stop - s.start for s in box) for box in boxes)
    axes = [
        axis
        for axis, dim in enumerate(shape)
        if any(box[axis].start or box[axis].stop != dim for box in boxes)
    ]
    if len(axes) <= 1:
        # Cut along one axis, as nearly all are: any number of slices.
        axis = axes[0] if axes else 0
        position = 0
        for box in boxes if shape else []:
            if box[axis].start > position:
                raise _gap(shape, (axis, position, box[axis].start), form, where)
            position = max(position, box[axis].stop)
        if shape and position < shape[axis]:
            raise _gap(shape, (axis, position, shape[axis]), form, where)
        if not boxes:
            raise _gap(shape, (0, 0, 1), form, where)
        return bool(covered > total)
    _check_grid(shape, boxes, axes, form, where=where)
    return bool(covered > total)


def _check_grid(
    shape: Sequence[int],
    boxes: Sequence[tuple[slice, ...]],
    axes: list[int],
    form: str,
    *,
    where: str,
) -> None:
    """The same for cuts along several axes: a grid of all their bounds, one flag a cell."""
    cuts = [
        sorted({0, shape[a], *(b[a].start for b in boxes), *(b[a].stop for b in boxes)})
        for a in axes
    ]
    cells = math.prod(len(cut) - 1 for cut in cuts)
    if cells > _CELLS_MAX or cells * len(boxes) > _PAIRS_MAX * 64:
        raise UnsupportedError(
            "the tensor is cut into too many slices along several axes",
            reason=f"{form}-slices",
            where=where,
            found=len(boxes),
        )
    grid = np.zeros([len(cut) - 1 for cut in cuts], bool)
    places = [{bound: at for at, bound in enumerate(cut)} for cut in cuts]
    for box in boxes:
        grid[tuple(slice(p[box[a].start], p[box[a].stop]) for a, p in zip(axes, places))] = True
    if not grid.all():
        cell = np.unravel_index(int(np.argmin(grid)), grid.shape)
        whole = [slice(0, dim) for dim in shape]
        for a, cut, at in zip(axes, cuts, cell):
            whole[a] = slice(cut[int(at)], cut[int(at) + 1])
        raise corrupt(form, _GAP, "gap", f"{where}{text_of((*whole,))}")


def _gap(shape: Sequence[int], gap: tuple[int, int, int], form: str, where: str) -> CorruptError:
    whole = [slice(0, dim) for dim in shape]
    axis, start, stop = gap
    if whole:
        whole[axis] = slice(start, stop)
    return corrupt(form, _GAP, "gap", f"{where}{text_of((*whole,))}")


def text_of(box: tuple[slice, ...]) -> str:
    """A box as messages show it: `[0:2, 3:4]`."""
    return "[" + ", ".join(f"{side.start}:{side.stop}" for side in box) + "]"


def gather(
    pieces: Iterable[tuple[tuple[slice, ...], BoxReader]], sides: tuple[slice, ...]
) -> NDArray[Any]:
    """A box of a tensor, from the pieces that it meets, which cover it.

    Args:
        pieces: Where each lies in the tensor, and what reads a box of it.
    """
    extent = tuple(side.stop - side.start for side in sides)
    whole: NDArray[Any] | None = None
    for box, read in pieces:
        meet = [(max(s.start, c.start), min(s.stop, c.stop)) for s, c in zip(sides, box)]
        if any(begin >= end for begin, end in meet):
            continue
        part = read(tuple(slice(b - c.start, e - c.start) for (b, e), c in zip(meet, box)))
        if part.shape == extent:
            return part
        if whole is None:
            whole = np.empty(extent, part.dtype)
        whole[tuple(slice(b - s.start, e - s.start) for (b, e), s in zip(meet, sides))] = part
    assert whole is not None
    return whole
