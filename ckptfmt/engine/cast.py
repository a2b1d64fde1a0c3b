"""Conversion by value between dtypes, where a restore allows it: overflow raises, never a shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.errors import MismatchError
from ckptfmt.format import dtype_named, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


def cast_array(array: Array, wanted: str, name: str) -> Array:
    """Values of `array` as dtype `wanted`.

    Raises:
        MismatchError: kind `mismatch-cast`: the dtypes do not convert, or a value would overflow
            (a finite value that becomes infinite, an infinity or a NaN that the dtype has not, an
            integer that wraps, a fraction lost).
    """
    dtype = dtype_named(wanted)
    if dtype is None or dtype.is_variable or not _is_number(array.dtype):
        raise _no_cast(array, wanted, name, "these dtypes do not convert")
    target = numpy_dtype(dtype)
    if not _is_number(target) or (array.dtype.kind == "c" and target.kind != "c"):
        raise _no_cast(array, wanted, name, "these dtypes do not convert")
    with np.errstate(all="ignore"):
        made: Array = array.astype(target)
        if not _fits(array, made):
            raise _no_cast(array, wanted, name, "a value would overflow or lose its fraction")
    return made


def _is_number(dtype: np.dtype[Any]) -> bool:
    # ml_dtypes' kinds are void in NumPy's eyes, but no subclasses of its void.
    return dtype.kind in "biufc" or (dtype.kind == "V" and not issubclass(dtype.type, np.void))


def _fits(old: Array, new: Array) -> bool:
    old_is_float, new_is_float = _is_float(old.dtype), _is_float(new.dtype)
    if new_is_float:
        before, after = _wide(old), _wide(new)
        finite = np.isfinite(before) if old_is_float else np.ones(old.shape, bool)
        # Not every type has an infinity, or a NaN.
        same = (before == after) | (np.isnan(before) & np.isnan(after)) if old_is_float else finite
        return bool(np.where(finite, np.isfinite(after), same).all())
    # Into integers or bool: exactly, or not at all.
    wide = _wide(old)
    if old_is_float and new.dtype.kind in "iu":
        # What a float beyond the range becomes differs by processor; some give the nearest integer.
        bounds = np.iinfo(new.dtype)
        if not ((wide >= float(bounds.min)) & (wide < float(bounds.max + 1))).all():
            return False
    return bool((_wide(new) == wide).all())


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fc" or (dtype.kind == "V" and not dtype.name.startswith(("int", "uint")))


def _wide(array: Array) -> Array:
    if array.dtype.kind in "biuc":
        return array
    return array.astype(np.float64)


def _no_cast(array: Array, wanted: str, name: str, why: str) -> MismatchError:
    return MismatchError(
        why,
        reason="cast",
        where=repr(name),
        expected=wanted,
        found=str(array.dtype),
        do="leave this leaf out of allow_cast, or change the target's dtype",
    )
