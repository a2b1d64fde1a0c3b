"""Strided tensors: views of storages, checked when they are made, and read when they are asked for.

What lies in C order is a view of the mapped file; everything else is gathered.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import CorruptError
from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.mapping import gathered, word
from ckptfmt.foreign.pickle_builders import need
from ckptfmt.foreign.pickle_machine import illegal
from ckptfmt.foreign.pickle_tree import Node, TreeMaker
from ckptfmt.foreign.pytorch.dtypes import NARROW, X2, TorchDtype
from ckptfmt.foreign.pytorch.storages import Storage
from ckptfmt.format import dtype_named, numpy_dtype, parse_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.streaming import BoxReader

NDIM_MAX = 64
EXPANDED_NBYTES_MAX = 256 << 20
"""A tensor larger than its storage (`expand`) is written out in full; up to this."""
_NUMEL_MAX = 1 << 62
_SIGN = {2: 0x8000, 4: 1 << 31, 8: 1 << 63}
_ONES = {"int1": (255, 0), "int2": (254, 1), "int4": (248, 7)}


@dataclass(slots=True, eq=False)
class Strided(Node):
    """A tensor over a storage. `offset` and `strides` are in elements."""

    storage: Storage
    dtype: TorchDtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False
    made: ForeignTensor | None = None

    def check(self) -> Strided:
        """Itself, if all its elements lie in its storage. `illegal` otherwise."""
        # Texts are made where they are needed: they would be most of the time of a small tensor.
        if not len(self.shape) == len(self.strides) <= NDIM_MAX:
            raise illegal(f"{len(self.shape)} sizes and {len(self.strides)} strides")
        need(min((self.offset, *self.shape, *self.strides)) >= 0, "a negative size")
        numel = math.prod(self.shape)
        if numel == 0:
            need(math.prod(n for n in self.shape if n) < _NUMEL_MAX, "a tensor without end")
            return self
        need(numel < _NUMEL_MAX, "a tensor without end")
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if self.dtype.packed > 1 and self.dtype.name != X2:
            need(self.is_contiguous and not self.offset, "a view of packed integers")
            last //= self.dtype.packed
        room = self.storage.nbytes // self.dtype.itemsize
        if last >= room:
            raise illegal(f"element {last} of a storage of {room}: the tensor leaves its storage")
        need(not self.conj or self.dtype.stored.startswith("complex"), "a conjugate of reals")
        need(not self.neg or self.dtype.component in _SIGN, "a negative view of integers")
        need(self.shape or self.dtype.name != X2, "a 0-d tensor of two elements a byte")
        if self.logical_nbytes > self.storage.nbytes:
            need(self.logical_nbytes <= EXPANDED_NBYTES_MAX, "an expanded tensor of over 256 MiB")
        return self

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """In the format's elements: twice the last axis where a byte holds two."""
        if self.dtype.name == X2 and self.shape:
            return (*self.shape[:-1], 2 * self.shape[-1])
        return self.shape

    @property
    def logical_nbytes(self) -> int:
        return -(-math.prod(self.shape) * self.dtype.itemsize // self._per_byte)

    @property
    def _per_byte(self) -> int:
        return 1 if self.dtype.name == X2 else self.dtype.packed

    def carry(self, maker: TreeMaker, name: str) -> ForeignTensor:
        if self.made is None:
            # Of a copy: who made it and what it reads with would hold each other, and the file mapped.
            self.made = copy.copy(self).tensor()
        return self.made

    def tensor(self) -> ForeignTensor:
        """The lazy tensor. Equal geometry over one storage is a tie, as it is in torch."""
        storage, dtype = self.storage, self.dtype
        start = storage.start + self.offset * dtype.itemsize
        identity = (storage.key, start, self.shape, self.strides, dtype.name, self.conj, self.neg)
        attributes: dict[str, object] = dict(dtype.attributes)
        memory_format = _memory_format(self.shape, self.strides)
        if memory_format and not self.is_contiguous:
            attributes["torch.memory_format"] = memory_format
        if self.requires_grad:
            attributes["torch.requires_grad"] = True
        numel = math.prod(self.stored_shape)
        bits = bits_of(dtype)
        return ForeignTensor(
            name="",
            foreign_name="",
            dtype=dtype.stored,
            shape=self.stored_shape,
            nbytes=-(-numel * bits // 8),
            where=storage.where,
            fetch=self.fetch,
            must_check=dtype.stored == "bool" or dtype.name in NARROW,
            identity=identity if numel else None,
            attributes=attributes,
            box=self._box() if numel else None,
        )

    def _box(self) -> BoxReader | None:
        """Reads a box where `fetch` would make a copy of all."""
        dtype = self.dtype
        if dtype.packed > 1 and dtype.name != X2:
            return None
        is_copy = (
            not self.is_contiguous
            or dtype.name == X2
            or self.conj
            or self.neg
            or (self.storage.swapped and dtype.component > 1)
            or self.storage.is_inflated
            or dtype.stored == "bool"
            or dtype.name in NARROW
        )
        return self._part if is_copy else None

    def _part(self, sides: tuple[slice, ...]) -> NDArray[Any]:
        """The values of a box in the format's elements."""
        cut: slice | None = None
        if self.dtype.name == X2:
            # Whole bytes, of which the first or the last half may not be wanted.
            last = sides[-1]
            begin = last.start // 2
            cut = slice(last.start - 2 * begin, last.stop - 2 * begin)
            sides = (*sides[:-1], slice(begin, -(-last.stop // 2)))
        offset = self.offset + sum(s.start * n for s, n in zip(sides, self.strides, strict=True))
        shape = tuple(s.stop - s.start for s in sides)
        values = replace(self, offset=offset, shape=shape, made=None).fetch()
        return values if cut is None else values[..., cut]

    def fetch(self) -> NDArray[Any]:
        """The values, C-contiguous; a view of the file where they lie so."""
        dtype = self.dtype
        if math.prod(self.shape) == 0:
            return np.empty(self.stored_shape, numpy_of(dtype.stored))
        if dtype.packed > 1 and dtype.name != X2:
            return self._unpacked(self.storage.bytes_of(0, self.logical_nbytes))
        # Elements as plain words: every pattern of bits stays as it is.
        element = word(dtype.itemsize)
        strides = [n * dtype.itemsize for n in self.strides]
        span = sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True)) + dtype.itemsize
        raw = self.storage.bytes_of(self.offset * dtype.itemsize, span)
        array: NDArray[Any]
        if self.is_contiguous:
            array = raw.view(element).reshape(self.shape)
        else:
            # NumPy checks once more that nothing lies outside the buffer.
            array = gathered(np.ndarray(self.shape, element, raw, 0, strides))
        if self.storage.swapped and dtype.component > 1:
            array = _words(array, dtype).byteswap().view(element).reshape(self.shape)
        if self.conj or self.neg:
            array = self._signed(array).view(element).reshape(self.shape)
        return self._as_stored(array)

    def _signed(self, array: NDArray[Any]) -> NDArray[Any]:
        """Lazy signs made real: in the bits, as torch does it."""
        words = _words(array, self.dtype).copy()
        sign = words.dtype.type(_SIGN[self.dtype.component])
        if self.neg:
            words ^= sign
        if self.conj:
            words.reshape(-1)[1::2] ^= sign
        return words

    def _as_stored(self, array: NDArray[Any]) -> NDArray[Any]:
        dtype = self.dtype
        if dtype.name == X2:
            raw = array.view(np.uint8)
            halves = np.stack([raw & 0xF, raw >> 4], axis=-1)
            return halves.reshape(self.stored_shape).view(numpy_of(dtype.stored))
        if dtype.stored == "bool" or dtype.name in NARROW:
            self._check_range(array.view(np.uint8))
        return array.view(numpy_of(dtype.stored))

    def _check_range(self, raw: NDArray[np.uint8]) -> None:
        name = self.dtype.name
        if name in _ONES:
            low, high = _ONES[name]
            wrong = (raw < low) & (raw > high)
        else:
            wrong = raw > {"bool": 1, "uint1": 1, "uint2": 3, "uint4": 15}[name]
        if wrong.any():
            raise CorruptError(
                f"an element out of the range of {name}",
                reason="pytorch-range",
                where=self.storage.where,
                found=int(raw[wrong][0]),
                do="get the file again",
            )

    def _unpacked(self, raw: NDArray[np.uint8]) -> NDArray[Any]:
        """Quantized integers of less than a byte, the first in the lowest bits."""
        found = dtype_named(self.dtype.stored)
        assert found is not None
        nbytes = self.logical_nbytes
        data = raw.copy()
        spare = 8 * nbytes - math.prod(self.shape) * found.bits
        if spare:
            # What lies behind the last element is no part of the value.
            data[-1] &= 0xFF >> spare
        return parse_array(data, found, self.shape)


def _words(array: NDArray[Any], dtype: TorchDtype) -> NDArray[Any]:
    """The components of elements as unsigned integers."""
    return np.ascontiguousarray(array).reshape(-1).view(np.dtype(f"<u{dtype.component}"))


def bits_of(dtype: TorchDtype) -> int:
    """Bits of an element in a checkpoint."""
    found = dtype_named(dtype.stored)
    assert found is not None
    return found.bits


def numpy_of(stored: str) -> np.dtype[Any]:
    found = dtype_named(stored)
    assert found is not None
    return numpy_dtype(found)


def _memory_format(shape: Sequence[int], strides: Sequence[int]) -> str:
    """`channels_last` or `channels_last_3d`, if the values lie so."""
    name = {4: "channels_last", 5: "channels_last_3d"}.get(len(shape), "")
    if not name:
        return ""
    expected = 1
    for axis in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[axis] != 1 and strides[axis] != expected:
            return ""
        expected *= shape[axis]
    return name
