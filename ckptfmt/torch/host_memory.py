"""A tensor's host memory, lent to NumPy: nothing is copied."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptfmt.torch.dtypes import CARRIED, X2, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ORDER = "<" if sys.byteorder == "little" else ">"
_KINDS = {
    torch.uint8: "|u1",
    **{dtype: f"{_ORDER}i{width}" for width, dtype in BITS.items() if width > 1},
    torch.complex128: f"{_ORDER}c16",
}


class _Lent:
    """A tensor's memory. `Tensor.numpy()` would forbid the storage to be resized ever
    again, and a save must not change what its caller may do (observers grow their buffers)."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Any, kind: str) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": kind,
            "shape": tuple(tensor.shape),
            "data": (tensor.data_ptr(), False),
        }


def host_array(tensor: Any) -> NDArray[Any]:
    """The array over a contiguous host tensor of integers; the array keeps the tensor alive."""
    kind = _KINDS.get(tensor.dtype)
    if kind is None or not tensor.numel():
        made: NDArray[Any] = tensor.numpy()
        return made
    return np.asarray(_Lent(tensor, kind))


@cache
def _lent_as(dtype: torch.dtype) -> tuple[str, np.dtype[Any] | None] | None:
    """How NumPy is lent memory of a dtype whose elements are those of the format: as what, and
    viewed as what if NumPy has no such type. None for other dtypes."""
    carried = CARRIED.get(dtype)
    if carried is None or carried.narrow or carried.name == X2:
        return None
    stored = numpy_dtype(carried.stored)
    if stored.isbuiltin == 1:
        return stored.str, None
    integers = _KINDS.get(BITS.get(dtype.itemsize))
    return None if integers is None else (integers, stored)


def lies_plainly(tensor: Any) -> bool:
    """Whether the elements of a strided tensor lie in host memory as they do in its region."""
    return bool(
        tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.numel()
        and _lent_as(tensor.dtype) is not None
        and not (tensor.is_conj() or tensor.is_neg())
    )


def lent(tensor: Any) -> NDArray[Any]:
    """The array over a tensor that `lies_plainly`."""
    kind, dtype = _lent_as(tensor.dtype) or ("", None)
    array = np.asarray(_Lent(tensor, kind))
    return array if dtype is None else array.view(dtype)
