"""Tensors that are no view of their file, piece by piece: no more than a piece is in memory at once.

What is gathered, joined, decompressed or swapped would otherwise stand in memory whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.format import Dtype, dtype_named, numpy_dtype, pack_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.base import ForeignTensor

BoxReader: TypeAlias = Callable[[tuple[slice, ...]], "NDArray[Any]"]
"""Gives a box of a tensor's values, reading little more than that."""

STREAMED_NBYTES_MIN = 64 << 20
"""A smaller tensor is fetched whole."""
_PIECE_NBYTES = 16 << 20


class _Host:
    """In place of a device: the host's own memory, where every copy is complete at once."""

    def register(self, ptr: int, nbytes: int) -> None:
        """Nothing: the memory is the host's."""

    def unregister(self, ptr: int) -> None:
        """Nothing."""

    def wait(self) -> None:
        """Nothing."""


HOST = _Host()


def is_streamed(tensor: ForeignTensor) -> bool:
    """Whether a tensor's values come in pieces."""
    return tensor.nbytes >= STREAMED_NBYTES_MIN and tensor.box is not None


class PackedStream:
    """A tensor's packed bytes (spec 05), any range of them: what staging wants of a device.

    Args:
        shape, dtype: Of the whole, in elements; its dtype has a fixed width.
        box: Reads a box of it.
    """

    def __init__(self, shape: Sequence[int], dtype: Dtype, box: BoxReader) -> None:
        self._shape, self._dtype, self._box = tuple(shape), dtype, box

    @classmethod
    def of(cls, tensor: ForeignTensor) -> PackedStream:
        dtype = dtype_named(tensor.dtype)
        assert dtype is not None
        assert tensor.box is not None
        return cls(tensor.shape, dtype, tensor.box)

    @property
    def nbytes(self) -> int:
        return -(-math.prod(self._shape) * self._dtype.bits // 8)

    def __call__(self, out: NDArray[np.uint8], start: int = 0, stride: int = 0) -> None:
        for number, row in enumerate(out):
            self.fill(row, start + number * stride)

    def fill(self, out: NDArray[np.uint8], start: int) -> None:
        """The packed bytes from `start` on, as many as `out` takes."""
        bits, stop = self._dtype.bits, start + len(out)
        # Eight elements end at a byte, whatever their bits.
        first = start * 8 // bits // 8 * 8
        last = min(-(-stop * 8 // bits), math.prod(self._shape))
        step = max(_PIECE_NBYTES // self._dtype.itemsize // 8 * 8, 8)
        for begin in range(first, last, step):
            at = begin * bits // 8
            packed = np.frombuffer(self._packed(begin, min(begin + step, last)), np.uint8)
            skip = max(start - at, 0)
            part = packed[skip : stop - at]
            out[at + skip - start : at + skip - start + len(part)] = part

    def _packed(self, first: int, last: int) -> memoryview:
        return pack_array(elements(self._shape, self._dtype, self._box, first, last))


class Window:
    """A stream read from its begin to its end in short pieces, but from the file in long ones."""

    def __init__(self, stream: PackedStream) -> None:
        self._stream, self._begin = stream, 0
        self._held: NDArray[np.uint8] = np.empty(0, np.uint8)

    def read(self, start: int, nbytes: int) -> memoryview:
        """The bytes [start, start + nbytes); good until the next."""
        stop = start + nbytes
        if start < self._begin or stop > self._begin + len(self._held):
            length = min(max(nbytes, STREAMED_NBYTES_MIN), self._stream.nbytes - start)
            if length != len(self._held):
                self._held = np.empty(length, np.uint8)
            self._begin = start
            self._stream.fill(self._held, start)
        return self._held[start - self._begin : stop - self._begin].data


def elements(
    shape: Sequence[int], dtype: Dtype, box: BoxReader, first: int, last: int
) -> NDArray[Any]:
    """The elements [first, last) of a tensor in C order."""
    made = np.empty(last - first, numpy_dtype(dtype))
    at = 0
    for sides in boxes_of(shape, first, last):
        part = box(sides).reshape(-1)
        made[at : at + part.size] = part
        at += part.size
    return made


def boxes_of(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[slice, ...]]:
    """The boxes, in C order, that a run of elements consists of: two an axis at most."""
    if first >= last:
        return
    if not shape:
        yield ()
        return
    inner = shape[1:]
    row = math.prod(inner)
    begin, at = divmod(first, row)
    end, rest = divmod(last, row)
    if begin == end:
        yield from _below(begin, boxes_of(inner, at, rest))
        return
    if at:
        yield from _below(begin, boxes_of(inner, at, row))
        begin += 1
    if begin < end:
        yield (slice(begin, end), *(slice(0, n) for n in inner))
    if rest:
        yield from _below(end, boxes_of(inner, 0, rest))


def _below(position: int, boxes: Iterator[tuple[slice, ...]]) -> Iterator[tuple[slice, ...]]:
    for box in boxes:
        yield (slice(position, position + 1), *box)


def shifted(box: BoxReader, origin: Sequence[int]) -> BoxReader:
    """The reader of a part of a tensor, which begins at `origin`."""
    return lambda sides: box(
        tuple(slice(o + s.start, o + s.stop) for o, s in zip(origin, sides, strict=True))
    )


def check_values(tensor: ForeignTensor) -> None:
    """Read all values once, for what only that finds out."""
    if not is_streamed(tensor):
        tensor.fetch()
        return
    assert tensor.box is not None
    total = math.prod(tensor.shape)
    for begin in range(0, total, _PIECE_NBYTES):
        for sides in boxes_of(tensor.shape, begin, min(begin + _PIECE_NBYTES, total)):
            tensor.box(sides)
