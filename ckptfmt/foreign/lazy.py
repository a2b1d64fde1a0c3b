"""Tensors made of others, box by box: nothing is read before somebody asks for values.

Every function here gives a `ForeignTensor` that answers a box (a slice for each axis) from the boxes
of its sources that this one needs, so that a tensor of any size goes through in parts. Values are
moved, never computed, but by `cast`, `scaled` and `added`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.errors import MismatchError, UsageError
from ckptfmt.foreign.base import ForeignTensor, like
from ckptfmt.foreign.streaming import BoxReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
Shape: TypeAlias = "tuple[int, ...]"

Sides: TypeAlias = "tuple[slice, ...]"

_TILE = 256
"""Elements; two tiles of 8-byte elements fit a cache of 1 MiB."""
_CONFLICT_NBYTES = 512
"""Rows that lie a multiple of this apart share so few lines of a cache that a tile evicts itself."""

_LENGTH_MAX = 1 << 58
"""Of an axis; an empty tensor has room for any."""

_LAYOUT = ("torch.memory_format",)
"""Attributes that say how a tensor lay in memory: not true of another one."""


def read_box(tensor: ForeignTensor, sides: Sides) -> Array:
    """Values of a part."""
    # The Ellipsis keeps a 0-d array an array.
    index: tuple[Any, ...] = (*sides, ...)
    return tensor.fetch()[index] if tensor.box is None else tensor.box(sides)


def whole(shape: Shape) -> Sides:
    return tuple(slice(0, n) for n in shape)


def _made(
    base: ForeignTensor,
    read: BoxReader,
    key: tuple[object, ...],
    *,
    shape: Shape,
    dtype: str | None = None,
    others: Sequence[ForeignTensor] = (),
) -> ForeignTensor:
    """A tensor like `base` with other values. Equal `key`s of tied tensors keep the tie."""
    tensors = (base, *others)
    dtype = dtype or base.dtype
    tied = all(t.identity is not None for t in tensors)
    return like(
        base,
        foreign_name=" + ".join(dict.fromkeys(t.foreign_name for t in tensors if t.foreign_name)),
        dtype=dtype,
        shape=shape,
        nbytes=nbytes_of(dtype, shape, sum(t.nbytes for t in tensors)),
        fetch=partial(_fetch, read, shape),
        must_check=any(t.must_check for t in tensors),
        identity=(*key, *(t.identity for t in tensors)) if tied else None,
        attributes={k: v for k, v in base.attributes.items() if k not in _LAYOUT},
        box=read if has_fixed_width(dtype) else None,
    )


def _fetch(read: BoxReader, shape: Shape) -> Array:
    return np.ascontiguousarray(read(whole(shape))).reshape(shape)


def has_fixed_width(dtype: str) -> bool:
    """Whether a part of a tensor's bytes is a part of its values: not so for text."""
    from ckptfmt.format import dtype_named

    known = dtype_named(dtype)
    return known is not None and not known.is_variable


def nbytes_of(dtype: str, shape: Shape, otherwise: int) -> int:
    """Bytes of the values; `otherwise` where the dtype does not say how many an element has."""
    from ckptfmt.format import dtype_named, packed_nbytes

    known = dtype_named(dtype)
    if known is None or known.is_variable:
        return otherwise
    return packed_nbytes(known, math.prod(shape))


def _refuse(tensor: ForeignTensor, what: str, expected: str, do: str) -> UsageError:
    return UsageError(
        what,
        reason="rule",
        where=repr(tensor.name),
        expected=expected,
        found=f"{tensor.dtype} {list(tensor.shape)}",
        do=do,
    )


def axis_of(tensor: ForeignTensor, axis: int) -> int:
    """An axis counted from the front."""
    if not -len(tensor.shape) <= axis < len(tensor.shape):
        raise _refuse(tensor, "a rule names an axis that a tensor has not", f"axis {axis}", "")
    return axis % len(tensor.shape)


def permuted(tensor: ForeignTensor, axes: Sequence[int] | None = None) -> ForeignTensor:
    """Axis i of the result is axis `axes[i]`; None reverses them, as `.T` does."""
    rank = len(tensor.shape)
    order = tuple(range(rank))[::-1] if axes is None else tuple(axes)
    if sorted(order) != list(range(rank)):
        raise _refuse(
            tensor,
            "the axes of a rule are not those of a tensor",
            f"a permutation of {list(range(rank))}, not {list(order)}",
            "let the rule's pattern match tensors of that rank only",
        )
    back = tuple(order.index(axis) for axis in range(rank))

    def read(box: Sides) -> Array:
        return _in_c_order(read_box(tensor, tuple(box[at] for at in back)).transpose(order))

    shape = tuple(tensor.shape[axis] for axis in order)
    return _made(tensor, read, ("permuted", order), shape=shape)


def _in_c_order(values: Array) -> Array:
    """The values in C order, moved tile by tile: element by element along the far axis, nearly each
    misses the cache (measured at 16 MiB of a 624 MB matrix: 0.2 GB/s, in tiles 0.9 to 1.7). Of a
    matrix whose rows are a power of two long each tile is copied out first, as it lies (bfloat16,
    8192 by 2048: 0.6 GB/s without, 1.5 with; float32, 4096 by 4096: 1.1 and 1.8)."""
    wide = [axis for axis in range(values.ndim) if values.shape[axis] > 1]
    if len(wide) < 2 or values.size < _TILE * _TILE:
        return values
    near, last = min(wide, key=lambda axis: abs(values.strides[axis])), wide[-1]
    if near == last:
        return values
    steps, room = [1] * values.ndim, _TILE * _TILE
    for axis in sorted(range(values.ndim), key=lambda axis: axis not in (near, last)):
        most = _TILE if axis in (near, last) else max(room, 1)
        steps[axis] = max(min(values.shape[axis], most), 1)
        room //= steps[axis]
    conflicts = values.strides[last] % _CONFLICT_NBYTES == 0
    made = np.empty(values.shape, values.dtype)
    for corner in product(*map(range, (0,) * values.ndim, values.shape, steps)):
        index = tuple(slice(at, at + step) for at, step in zip(corner, steps))
        made[index] = np.array(values[index], order="K") if conflicts else values[index]
    return made


def part(tensor: ForeignTensor, axis: int, start: int, stop: int) -> ForeignTensor:
    """The range [start, stop) of one axis."""
    axis = axis_of(tensor, axis)

    def read(box: Sides) -> Array:
        shifted = slice(box[axis].start + start, box[axis].stop + start)
        return read_box(tensor, (*box[:axis], shifted, *box[axis + 1 :]))

    shape = (*tensor.shape[:axis], stop - start, *tensor.shape[axis + 1 :])
    return _made(tensor, read, ("part", axis, start, stop), shape=shape)


def split(
    tensor: ForeignTensor, axis: int, sizes: Sequence[int] | None, count: int
) -> list[ForeignTensor]:
    """Parts along an axis: of these sizes, or `count` equal ones."""
    axis = axis_of(tensor, axis)
    length = tensor.shape[axis]
    if sizes is None:
        sizes = [length // count] * count
    if sum(sizes) != length or len(sizes) != count or min(sizes) < 0:
        raise _refuse(
            tensor,
            "a tensor cannot be split as a rule says",
            f"{count} parts along axis {axis}, {list(sizes)} of {length}",
            "give sizes= that add up",
        )
    ends = np.cumsum(sizes).tolist()
    return [part(tensor, axis, end - n, end) for n, end in zip(sizes, ends)]


def joined(tensors: Sequence[ForeignTensor], axis: int) -> ForeignTensor:
    """Tensors one after another along an axis."""
    first = tensors[0]
    axis = axis_of(first, axis)
    for other in tensors[1:]:
        rest = (*other.shape[:axis], *other.shape[axis + 1 :])
        if (other.dtype, rest, len(other.shape)) != (
            first.dtype,
            (*first.shape[:axis], *first.shape[axis + 1 :]),
            len(first.shape),
        ):
            raise _refuse(
                other,
                "tensors that a rule joins do not fit",
                f"like {first.name!r}: {first.dtype} {list(first.shape)} but for axis {axis}",
                "",
            )
    begins = np.cumsum([0, *(t.shape[axis] for t in tensors)]).tolist()

    def read(box: Sides) -> Array:
        pieces: list[Array] = []
        for tensor, begin in zip(tensors, begins):
            low = max(box[axis].start - begin, 0)
            high = min(box[axis].stop - begin, tensor.shape[axis])
            if low < high or not (pieces or box[axis].start < box[axis].stop):
                pieces.append(read_box(tensor, (*box[:axis], slice(low, high), *box[axis + 1 :])))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)

    shape = (*first.shape[:axis], begins[-1], *first.shape[axis + 1 :])
    return _made(first, read, ("joined", axis), shape=shape, others=tensors[1:])


def blocks(tensor: ForeignTensor, axis: int, order: Sequence[int]) -> ForeignTensor:
    """Equal blocks of an axis (an RNN's gates) in another order: block i is block `order[i]`."""
    if sorted(order) != list(range(len(order))) or not order:
        raise _refuse(
            tensor,
            f"the order {list(order)} of a rule does not name each block once",
            "0, 1, 2, ... in any order",
            "",
        )
    parts = split(tensor, axis, None, len(order))
    return joined([parts[at] for at in order], axis)


def cast(tensor: ForeignTensor, dtype: str) -> ForeignTensor:
    """By value; a value that would overflow is an error when it is read."""
    from ckptfmt.engine import cast_array
    from ckptfmt.format import dtype_named, numpy_dtype

    if dtype == tensor.dtype:
        return tensor

    def convert(values: Array) -> Array:
        try:
            return cast_array(values, dtype, tensor.name)
        except MismatchError as error:
            raise MismatchError(
                error.what,
                reason=error.reason,
                where=error.where,
                expected=dtype,
                found=tensor.dtype,
                do="let the rule's pattern match fewer tensors, or choose another dtype",
            ) from None

    def read(box: Sides) -> Array:
        return convert(read_box(tensor, box))

    known = dtype_named(tensor.dtype)
    if known is not None:
        # What cannot be cast at all is found before anything is read.
        convert(np.empty(0, numpy_dtype(known)))
    return _made(tensor, read, ("cast", dtype), shape=tensor.shape, dtype=dtype)


def added(a: ForeignTensor, b: ForeignTensor) -> ForeignTensor:
    """The sum. Where one is zero the other's bits stay: -0.0 and NaN payloads too."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        raise _refuse(b, "two biases do not fit", f"{a.dtype} {list(a.shape)}", "")

    def read(box: Sides) -> Array:
        one, other = read_box(a, box), read_box(b, box)
        with np.errstate(all="ignore"):
            return np.where(other == 0, one, np.where(one == 0, other, one + other))

    return _made(a, read, ("added",), shape=a.shape, others=[b])


def scaled(tensor: ForeignTensor, factor: float) -> ForeignTensor:
    """Each value times a number, computed in float64."""

    def read(box: Sides) -> Array:
        values = read_box(tensor, box)
        return (values.astype(np.float64) * factor).astype(values.dtype)

    return _made(tensor, read, ("scaled", factor), shape=tensor.shape)


def filled(of: ForeignTensor, shape: Shape, value: float, dtype: str = "") -> ForeignTensor:
    """One value everywhere."""
    from ckptfmt.format import dtype_named, numpy_dtype

    known = dtype_named(dtype or of.dtype)
    assert known is not None
    scalar = np.array(value, numpy_dtype(known))

    def read(box: Sides) -> Array:
        return np.broadcast_to(scalar, tuple(side.stop - side.start for side in box))

    made = _made(of, read, (), shape=shape, dtype=known.name)
    return like(made, foreign_name="", identity=None, attributes={}, must_check=False)


def reshaped(tensor: ForeignTensor, shape: Sequence[int]) -> ForeignTensor:
    """The same elements in C order under another shape, in which one length may be -1."""
    wanted = _settle(tensor, tuple(shape))
    groups = list(_groups(tensor.shape, wanted))

    def read(box: Sides) -> Array:
        source: list[slice] = []
        flat: list[int] = []
        chosen: list[Array | slice] = []
        for old, new in groups:
            ends = [box[axis] for axis in new]
            slab, indices = _in_group(
                [tensor.shape[a] for a in old], [wanted[a] for a in new], ends
            )
            source += slab
            flat.append(math.prod(side.stop - side.start for side in slab))
            chosen.append(indices)
        values = read_box(tensor, tuple(source)).reshape(flat)
        for axis, indices in enumerate(chosen):
            values = values[(slice(None),) * axis + (indices,)]
        return values.reshape([side.stop - side.start for side in box])

    return _made(tensor, read, ("reshaped", wanted), shape=wanted)


def _settle(tensor: ForeignTensor, shape: Shape) -> Shape:
    count = math.prod(tensor.shape)
    known = math.prod(n for n in shape if n != -1)
    if shape.count(-1) == 1 and known and not count % known:
        shape = tuple(count // known if n == -1 else n for n in shape)
    if math.prod(shape) != count or any(not 0 <= n < _LENGTH_MAX for n in shape):
        raise _refuse(tensor, "a tensor has another number of elements", f"shape {list(shape)}", "")
    return shape


def _groups(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Axes of both shapes that hold the same elements: the least runs of equal products."""
    if 0 in old or 0 in new:
        yield list(range(len(old))), list(range(len(new)))
        return
    a = b = 0
    while a < len(old) or b < len(new):
        ours, theirs = [a] if a < len(old) else [], [b] if b < len(new) else []
        left = old[a] if ours else 1
        right = new[b] if theirs else 1
        a, b = a + len(ours), b + len(theirs)
        while left != right:
            if left < right:
                ours.append(a)
                left *= old[a]
                a += 1
            else:
                theirs.append(b)
                right *= new[b]
                b += 1
        yield ours, theirs


def _in_group(
    old: Sequence[int], new: Sequence[int], ends: Sequence[slice]
) -> tuple[list[slice], Array | slice]:
    """The box of the old axes that covers a box of the new ones, and which of its elements, taken
    in C order, are wanted."""
    if any(side.start == side.stop for side in ends):
        return [slice(0, 0) for _ in old], slice(0, 0)
    strides = [math.prod(new[at + 1 :]) for at in range(len(new))]
    first = sum(side.start * stride for side, stride in zip(ends, strides))
    last = sum((side.stop - 1) * stride for side, stride in zip(ends, strides))
    slab: list[slice] = []
    base = 0
    for at in range(len(old)):
        row = math.prod(old[at + 1 :])
        low, high = (first - base) // row, (last - base) // row
        slab.append(slice(low, high + 1))
        base += low * row
        if low != high:
            slab += [slice(0, n) for n in old[at + 1 :]]
            break
    indices = np.zeros((1,) * len(new), np.int64)
    for at, (side, stride) in enumerate(zip(ends, strides)):
        steps = np.arange(side.start, side.stop) * stride
        indices = indices + steps.reshape([-1 if axis == at else 1 for axis in range(len(new))])
    wanted = indices.reshape(-1) - base
    if len(wanted) == last - first + 1:
        return slab, slice(first - base, last - base + 1)
    return slab, wanted


def attributes_without(tensor: ForeignTensor, prefix: str) -> ForeignTensor:
    """Without what one framework noted about its tensor."""
    kept: Mapping[str, object] = {
        key: item for key, item in tensor.attributes.items() if not key.startswith(prefix)
    }
    return like(tensor, attributes=kept)
