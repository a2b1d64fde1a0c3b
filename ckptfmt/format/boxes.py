"""Ragged columns of dims, and whether boxes tile a tensor exactly once. Spec: 07-index."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from ckptfmt.format.columns import Column, corrupt, starts
from ckptfmt.format.limits import INT63_MAX, NDIM_MAX

_PAIRWISE_MAX = 2048
_CORNERS_MAX = 1 << 24


def products(ndim: Column, dims: Column, where: str) -> Column:
    """Product of each ragged row of `dims`, exact, as int64 (1 for no dims).

    Raises:
        CorruptError: kind `corrupt-dims-overflow`: a product is not below 2^63;
            `corrupt-dims`: more than 64 dims, or a column of another length.
    """
    if len(ndim) and int(ndim.max()) > NDIM_MAX:
        corrupt("too many dims", "dims", where, f"at most {NDIM_MAX}", int(ndim.max()))
    begin = starts(ndim)
    if int(begin[-1]) != len(dims):
        corrupt("column of another length", "column-length", where, int(begin[-1]), len(dims))
    if len(dims) and int(dims.max()) > INT63_MAX:
        corrupt("dim is too large", "dims-overflow", where, "below 2^63", int(dims.max()))
    made = np.ones(len(ndim), np.int64)
    approx = np.ones(len(ndim), np.float64)
    for rank in np.unique(ndim):
        rows = np.flatnonzero(ndim == rank)
        for axis in range(int(rank)):
            column = dims[begin[rows] + axis]
            made[rows] *= column.astype(np.int64)
            # A dim of 0 makes the product 0 whatever the others are.
            approx[rows] *= column
    for row in np.flatnonzero(approx >= float(1 << 62)):
        exact = math.prod(int(d) for d in dims[begin[row] : begin[row + 1]])
        if exact > INT63_MAX:
            corrupt(
                "dims product overflows", "dims-overflow", f"{where}[{row}]", "below 2^63", exact
            )
        made[row] = exact
    return made


def tiles(origins: Column, extents: Column, dims: Column) -> bool:
    """True if boxes (rows of `origins` and `extents`, shape (n, ndim)) tile [0, dims) exactly once.

    The boxes must lie inside and their volumes sum to the whole. Then they tile it exactly once if
    and only if every point is covered an odd number of times, which holds if their corners cancel
    to the corners of the whole: exact in any number of axes, and linear in the number of boxes.
    """
    origins, extents, dims = (c.astype(np.int64) for c in (origins, extents, dims))
    ends = origins + extents
    if (extents < 1).any() or (ends > dims).any() or (ends < origins).any():
        return False
    total = math.prod(int(d) for d in dims)
    if sum(math.prod(int(e) for e in row) for row in extents) != total:
        return False
    cut = np.flatnonzero((extents != dims).any(axis=0))
    if len(cut) == 0:
        return len(origins) == 1
    begins, ends, dims = origins[:, cut], ends[:, cut], dims[cut]
    if len(begins) <= _PAIRWISE_MAX and (1 << len(cut)) > len(begins):
        return _disjoint(begins, ends)
    if len(begins) << len(cut) > _CORNERS_MAX:
        return False
    return _corners_cancel(begins, ends, dims)


def _disjoint(begins: Column, ends: Column) -> bool:
    for row in range(1, len(begins)):
        meets = (begins[:row] < ends[row]) & (begins[row] < ends[:row])
        if meets.all(axis=1).any():
            return False
    return True


def _corners_cancel(begins: Column, ends: Column, dims: Column) -> bool:
    axes = begins.shape[1]
    corners = np.concatenate(
        [
            np.where(np.array(pick, bool), ends, begins)
            for pick in product((False, True), repeat=axes)
        ]
    )
    found, counts = np.unique(corners, axis=0, return_counts=True)
    left = {tuple(row) for row in found[counts % 2 == 1].tolist()}
    whole = set(product(*((0, int(d)) for d in dims)))
    return left == whole
