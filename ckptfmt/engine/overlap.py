"""Targets that share a part of their memory: whether all of them can hold what is stored.

Equal arrays are ties and are compared by identity; here it is about views such as `a[:12]` and
`a[8:]`. They may be restored, if the values agree where they lie over each other. Spec: 08-protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.adapter import Staged
from ckptfmt.format import pack_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
_WORK_MAX = 100_000
"""How long NumPy may look whether two views share an element, before that is assumed."""


def overlaps_itself(array: Array) -> bool:
    """Whether two elements of one array may share a byte, as those of `as_strided` do."""
    if array.flags.c_contiguous or array.flags.f_contiguous or array.size < 2:
        return False
    reach = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape) if n > 1):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


def overlapping(arrays: Mapping[str, Array]) -> list[str]:
    """The names of arrays that share a part of their memory with another, but are not the same."""
    if all(array.base is None for array in arrays.values()):
        return []  # each owns its memory
    ranges = sorted((*_bounds(array), name) for name, array in arrays.items() if array.size)
    found: dict[str, None] = {}
    active: list[tuple[int, int, str]] = []
    for low, high, name in ranges:
        active = [other for other in active if other[1] > low]
        for other in active:
            if _share(arrays[other[2]], arrays[name]):
                found |= {other[2]: None, name: None}
        active.append((low, high, name))
    return list(found)


def disagreeing(arrays: Mapping[str, Array], wanted: Staged) -> str | None:
    """The first array that does not hold what it was filled with: another one was filled over it."""
    for name in overlapping(arrays):
        if bytes(pack_array(arrays[name])) != bytes(pack_array(wanted[name])):
            return name
    return None


def _bounds(array: Array) -> tuple[int, int]:
    if array.flags.c_contiguous:
        low = array.__array_interface__["data"][0]
        return low, low + array.nbytes
    return np.lib.array_utils.byte_bounds(array)


def _share(a: Array, b: Array) -> bool:
    mine, other = a.__array_interface__, b.__array_interface__
    if all(mine[key] == other[key] for key in ("data", "shape", "strides", "typestr")):
        return False
    try:
        return np.shares_memory(a, b, max_work=_WORK_MAX)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
