"""Whether two trees are the same bit for bit, and where they first differ if they are not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np


def difference(a: Any, b: Any, path: str = "tree") -> str:
    """The first place where two trees differ, or "" where they are the same.

    The same: kinds, order of keys, key types, dtypes, shapes, and every bit of every value (NaN
    payloads and the sign of zero count). Arrays are compared by value, whatever their strides, a
    big-endian one as its little-endian self.

        assert not difference(loaded, saved)
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _of_arrays(a, b, path)
    if isinstance(a, tuple) and hasattr(a, "_fields"):
        kinds = (type(a).__name__, a._fields)
        found = (type(b).__name__, getattr(b, "_fields", None))
        if kinds != found:
            return f"{path}: {kinds} is not {found}"
        return difference(tuple(a), tuple(b), path)
    if type(a) is not type(b):
        return f"{path}: {type(a).__name__} is not {type(b).__name__}"
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return f"{path}: factory {a.default_factory} is not {b.default_factory}"
    if isinstance(a, Mapping):
        wrong = difference(list(a), list(b), f"{path}.keys()")
        pairs = ((f"{path}[{key!r}]", a[key], b[key]) for key in a if not wrong)
        return wrong or next(filter(None, (difference(x, y, at) for at, x, y in pairs)), "")
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{path}: {len(a)} items are not {len(b)}"
        pairs = ((f"{path}[{at}]", x, y) for at, (x, y) in enumerate(zip(a, b)))
        return next(filter(None, (difference(x, y, at) for at, x, y in pairs)), "")
    if isinstance(a, np.generic):
        return _of_arrays(np.asarray(a), np.asarray(b), path)
    same = a == b if isinstance(a, set | frozenset) else repr(a) == repr(b)
    return "" if same else f"{path}: {a!r} is not {b!r}"


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def _of_arrays(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], path: str) -> str:
    if a.shape != b.shape:
        return f"{path}: shape {a.shape} is not {b.shape}"
    kinds = [a.dtype, b.dtype] if a.dtype.kind in "OT" else [_little(x.dtype) for x in (a, b)]
    if kinds[0] != kinds[1]:
        return f"{path}: dtype {a.dtype} is not {b.dtype}"
    if a.dtype.kind in "OT":
        return difference(a.tolist(), b.tolist(), path)
    one, two = (x.astype(kinds[0]).tobytes() for x in (a, b))
    if one == two:
        return ""
    at = next(i for i, (x, y) in enumerate(zip(one, two)) if x != y) // max(a.dtype.itemsize, 1)
    return f"{path}: element {at} in C order has other bits"
