"""Ragged columns of dims, and whether boxes tile tensors exactly once. Spec: 07-index."""

from __future__ import annotations

import math

import numpy as np

from ckptfmt.format.columns import Column, blocks, corrupt, starts
from ckptfmt.format.digests import digest
from ckptfmt.format.limits import INT63_MAX, NDIM_MAX

_PRIME = np.uint64((1 << 31) - 1)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def products(ndim: Column, dims: Column, where: str) -> Column:
    """Product of each ragged row of `dims`, exact, as int64 (1 for no dims).

    Raises:
        CorruptError: kind `corrupt-dims-overflow`: a product is not below 2^63;
            `corrupt-dims`: more than 64 dims, or a column of another length.
    """
    if len(ndim) and int(ndim.max()) > NDIM_MAX:
        corrupt("too many dims", "dims", where, f"at most {NDIM_MAX}", int(ndim.max()))
    count, largest = int(ndim.sum(dtype=np.int64)), int(dims.max(initial=0))
    if count != len(dims):
        corrupt("column of another length", "column-length", where, count, len(dims))
    if largest > INT63_MAX:
        corrupt("dim is too large", "dims-overflow", where, "below 2^63", largest)
    made = np.ones(len(ndim), np.int64)
    at = 0
    for rows in blocks(len(ndim)):
        mine = ndim[rows]
        stop = at + int(mine.sum(dtype=np.int64))
        _multiply(mine, dims[at:stop], made[rows], (rows.start, where))
        at = stop
    return made


def _multiply(ndim: Column, dims: Column, made: Column, at: tuple[int, str]) -> None:
    """The products of a block of rows, which begins at row `at[0]`, into `made`, which is ones."""
    axes, largest = int(ndim.max()), int(dims.max(initial=0))
    if axes == int(ndim.min()) and largest ** max(axes, 1) < 1 << 62:
        for column in dims.reshape(len(ndim), axes).T:
            made *= column.astype(np.int64)
        return
    begin = starts(ndim)
    approx = np.ones(len(ndim), np.float64)
    # `approx` may be infinite, or NaN where a dim of 0 follows: the product is exactly 0 then.
    with np.errstate(over="ignore", invalid="ignore"):
        for axis in range(axes):
            rows = np.flatnonzero(ndim > axis)
            column = dims[begin[rows] + axis]
            made[rows] *= column.astype(np.int64)
            approx[rows] *= column
    large = np.flatnonzero(approx >= float(1 << 62))
    if len(large):
        _refuse_overflow(ndim, begin, dims, large, at)


def _refuse_overflow(
    ndim: Column, begin: Column, dims: Column, rows: Column, at: tuple[int, str]
) -> None:
    """CorruptError if the exact product of one of these rows, none with a dim of 0, is too large."""
    exact = np.ones(len(rows), np.int64)
    over = np.zeros(len(rows), bool)
    for axis in range(int(ndim[rows].max())):
        here = np.flatnonzero(ndim[rows] > axis)
        column = dims[begin[rows[here]] + axis].astype(np.int64)
        over[here] |= exact[here] > INT63_MAX // column
        exact[here] *= column
    if over.any():
        row = int(rows[np.argmax(over)])
        product = math.prod(int(d) for d in dims[begin[row] : begin[row + 1]])
        where = f"{at[1]}[{at[0] + row}]"
        corrupt("dims product overflows", "dims-overflow", where, "below 2^63", product)


def are_inside(origins: Column, extents: Column, dims: Column) -> Column:
    """For each axis of each box (flat): is it at least 1 long and inside [0, dim)? u64, no sums."""
    made: Column = (extents >= 1) & (extents <= dims)
    made &= origins <= dims - np.minimum(extents, dims)
    return made


def are_tiled(
    ndim: Column, origins: Column, extents: Column, dims: Column, first: Column
) -> Column:
    """Which tensors are tiled by their boxes, every element covered exactly once.

    The boxes must be inside their tensor. A box is the product, over its axes, of differences
    x(axis, end) - x(axis, origin) in unknowns x: so written, some boxes cover each element once if
    and only if they sum to the whole tensor as polynomials. The identity is evaluated at four
    points of the field of 2^31 - 1 elements that depend on all the boxes by sha256, so that nobody
    can choose boxes to fit them: boxes that do not tile pass with a probability below 2^-100, less
    than that of two chunks with one digest. In exchange it is linear in the number of boxes, for
    any number of axes and for all tensors at once. (Comparing pairs is quadratic; cancelling
    corners needs 2^axes of them a box.)

    Args:
        ndim: Axes of each box.
        origins: With `extents` and `dims` (the tensor's): flat, `ndim` rows for each box, u64.
        first: The first box of each tensor; ascending, from 0.
    """
    begin = starts(ndim)
    axes = (np.arange(len(origins)) - np.repeat(begin[:-1], ndim)).astype(np.intp)
    ends = origins + extents
    content = b"".join(column.tobytes() for column in (origins, extents, dims))
    made = np.ones(len(first), bool)
    for key in np.frombuffer(digest(content, "sha256"), "<u8"):
        box = _volume(ndim, begin, _unknown(key, axes, ends), _unknown(key, axes, origins))
        zeros = np.zeros(len(dims), np.uint64)
        whole = _volume(ndim, begin, _unknown(key, axes, dims), _unknown(key, axes, zeros))
        made &= np.add.reduceat(box, first) % _PRIME == whole[first]
    return made


def _volume(ndim: Column, begin: Column, ends: Column, origins: Column) -> Column:
    """The product of a box's differences, in the field."""
    made = np.ones(len(ndim), np.uint64)
    sides = (ends + _PRIME - origins) % _PRIME
    for axis in range(int(ndim.max(initial=0))):
        rows = np.flatnonzero(ndim > axis)
        made[rows] = made[rows] * sides[begin[rows] + axis] % _PRIME
    return made


def _unknown(key: Column, axes: Column, coordinates: Column) -> Column:
    """A value of the field for each (axis, coordinate), scattered by a key."""
    of_axis = _scatter(np.arange(NDIM_MAX, dtype=np.uint64) + key)
    made: Column = (_scatter(_scatter(coordinates ^ key) ^ of_axis[axes]) >> np.uint64(32)) % _PRIME
    return made


def _scatter(word: Column) -> Column:
    """The finalizer of SplitMix64: each bit of the input changes half of the output's."""
    word = (word ^ (word >> np.uint64(30))) * _MIX[0]
    word = (word ^ (word >> np.uint64(27))) * _MIX[1]
    made: Column = word ^ (word >> np.uint64(31))
    return made
