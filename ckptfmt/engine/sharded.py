"""A tensor of which this rank holds some boxes. Spec: 08-protocol §8.9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.engine.tree import FlatTree


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """A leaf of which this rank holds some boxes; the ranks of a group hold all of it together.

    A restore fills the arrays. A box that several ranks hold must be equal on them.

    Attributes:
        shape: Of the whole tensor, in elements.
        parts: `(origin, array)` of each box: where its first element lies, per axis, and its values.
        dtype: Needed where this rank holds no box; else that of the arrays.
    Raises:
        UsageError: kind `usage-sharded`: a box lies outside, overlaps another, or has another dtype.
    """

    shape: tuple[int, ...]
    parts: Sequence[tuple[tuple[int, ...], NDArray[Any]]]
    dtype: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        dtypes = {np.asarray(array).dtype for _, array in self.parts}
        if self.dtype is not None:
            dtypes.add(np.dtype(self.dtype))
        if len(dtypes) != 1:
            _refuse("one dtype for all parts (dtype= where there are none)", dtypes or "none")
        object.__setattr__(self, "dtype", dtypes.pop())
        if not self.shape:
            _refuse("a tensor of one axis or more", "one without axes, which is never in parts")
        boxes = [(tuple(origin), np.shape(array)) for origin, array in self.parts]
        check_boxes(self.shape, boxes)


def check_boxes(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """UsageError unless the boxes (origin, extent) lie inside a tensor, and apart."""
    for position, (origin, extent) in enumerate(boxes):
        if not len(origin) == len(extent) == len(shape) or not all(
            o >= 0 and o + e <= n for o, e, n in zip(origin, extent, shape)
        ):
            _refuse(f"boxes inside {tuple(shape)}", (tuple(origin), tuple(extent)))
        for other, sizes in boxes[:position]:
            if all(
                max(a, b) < min(a + n, b + m) for a, n, b, m in zip(origin, extent, other, sizes)
            ):
                _refuse(
                    "boxes apart from each other", f"two that hold {tuple(map(max, origin, other))}"
                )


def _refuse(expected: str, found: object) -> None:
    raise UsageError(
        "the parts of a sharded tensor",
        reason="sharded",
        expected=expected,
        found=found,
        do="give each box its origin within the whole tensor",
    )


def refuse_parts(flat: FlatTree) -> None:
    """UsageError if a process saves alone and holds parts of a tensor."""
    for row, source in flat.tensors.others():
        if source.parts is not None:
            at = next(
                i for i, (k, r) in enumerate(zip(flat.kinds, flat.rows)) if k != 1 and r == row
            )
            raise UsageError(
                "this rank holds a part of the tensor only",
                reason="sharded-alone",
                where=repr(flat.names[at]),
                do="pass group=, and let every rank of it call; or gather it first (tensor.full_tensor() of a DTensor)",
            )
