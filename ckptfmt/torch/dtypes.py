"""torch dtypes and the format's names for them, one to one where both sides have the type.

Spec: 04-dtypes. Most names are equal. Two rows need words:

- `float4_e2m1fn_x2` holds two elements in a byte, the first in the low half, as the format packs
  them: a torch shape `(..., n)` is `(..., 2n)` elements of `float4_e2m1fn`.
- What no other framework has (`int3`, `bits8`, ...) is stored as the integer of its width under
  the attribute `torch.dtype`, so that torch gets its own type back and others get the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ckptfmt.errors import UnsupportedError

ATTRIBUTE = "torch.dtype"
X2 = "float4_e2m1fn_x2"

_NATIVE = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_EXTENSION = (
    "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", "complex32",
)  # fmt: skip
_NARROW = ("int1", "int2", "int4", "uint1", "uint2", "uint4")
_TORCH_ONLY = {
    "int3": "int8", "int5": "int8", "int6": "int8", "int7": "int8",
    "uint3": "uint8", "uint5": "uint8", "uint6": "uint8", "uint7": "uint8",
    "bits1x8": "uint8", "bits2x4": "uint8", "bits4x2": "uint8", "bits8": "uint8",
    "bits16": "uint16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Carried:
    """How one torch dtype is carried.

    Attributes:
        name: torch's name, without `torch.`.
        stored: The format's name.
        narrow: One byte an element in torch, fewer bits in the format.
    """

    name: str
    stored: str
    narrow: bool = False

    @property
    def attributes(self) -> dict[str, object]:
        return {ATTRIBUTE: self.name} if self.name in _TORCH_ONLY else {}


def _rows() -> dict[Any, Carried]:
    rows = [Carried(name, name) for name in (*_NATIVE, *_EXTENSION)]
    rows += [Carried(name, name, narrow=True) for name in _NARROW]
    rows += [Carried(name, stored) for name, stored in _TORCH_ONLY.items()]
    rows.append(Carried(X2, "float4_e2m1fn"))
    # Older torch lacks some of them.
    return {getattr(torch, row.name): row for row in rows if hasattr(torch, row.name)}


CARRIED: dict[Any, Carried] = _rows()
_BY_STORED = {row.stored: dtype for dtype, row in CARRIED.items() if row.name not in _TORCH_ONLY}


@lru_cache(maxsize=256)
def name_of(dtype: np.dtype[Any]) -> str:
    """The format's name. NumPy works it out anew each time, in some 15 microseconds."""
    return dtype.name


def holds(dtype: np.dtype[Any]) -> bool:
    """True if torch has this NumPy / ml_dtypes type."""
    return name_of(dtype) in _BY_STORED


def torch_dtype(stored: str, attributes: Mapping[str, object] | None = None) -> Any:
    """The torch dtype for a stored dtype's name and a leaf's attributes.

    Raises:
        UnsupportedError: torch has no such type.
    """
    if attributes:
        own = attributes.get(ATTRIBUTE)
        if isinstance(own, str) and _TORCH_ONLY.get(own) == stored and hasattr(torch, own):
            return getattr(torch, own)
    if stored not in _BY_STORED:
        raise UnsupportedError(
            "torch has no such dtype",
            reason="torch-dtype",
            found=stored,
            do="load it with ckptfmt.load, which returns NumPy arrays",
        )
    return _BY_STORED[stored]


def numpy_dtype(stored: str) -> np.dtype[Any]:
    """The NumPy / ml_dtypes type of a stored name that torch can hold."""
    if stored in _NATIVE:
        return np.dtype(stored)
    try:
        extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, stored))
    except AttributeError:
        raise UnsupportedError(
            "the installed ml_dtypes has no such dtype",
            reason="ml-dtypes",
            found=stored,
            do="upgrade ml_dtypes",
        ) from None
    return extension
