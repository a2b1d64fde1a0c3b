"""Statistics of a tensor, read in blocks of its first axis so that no tensor is too large."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_NBYTES = 64 << 20

Read: TypeAlias = "Callable[[tuple[slice, ...]], NDArray[Any]]"


def blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Regions of about `BLOCK_NBYTES` that cover a tensor: runs of its first axis."""
    if not shape:
        yield ()
        return
    row_nbytes = max(1, itemsize * math.prod(shape[1:]))
    step = max(1, BLOCK_NBYTES // row_nbytes)
    for start in range(0, shape[0], step):
        yield (slice(start, min(shape[0], start + step)),)


def tensor_statistics(read: Read, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
    """count, finite, nan, inf, zero, min, max, mean, std, norm; of the finite elements.

    Sums are float64 in one pass over the blocks: means and squared deviations of blocks are joined
    by the pairwise formula, which does not cancel as a difference of sums does. Of a dtype that has
    no numbers only the count is told.
    """
    count = math.prod(shape)
    if not _is_number(dtype):
        return {"count": count}
    sums = _Sums()
    for region in blocks(shape, dtype.itemsize):
        sums.add(read(region))
    return sums.result(count)


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" or (
        dtype.kind == "V"
        and dtype.fields is None
        and ("float" in dtype.name or "int" in dtype.name)
    )


class _Sums:
    def __init__(self) -> None:
        self.finite = self.nan = self.inf = self.zero = 0
        self.minimum: Any = None
        self.maximum: Any = None
        self.mean: float | complex = 0.0
        self.deviation = 0.0
        self.square = 0.0

    def add(self, array: NDArray[Any]) -> None:
        flat = array.reshape(-1)
        if flat.dtype.kind in "biu":
            self._extremes(flat)
        wide = flat.astype(np.complex128 if flat.dtype.kind == "c" else np.float64)
        good = np.isfinite(wide)
        self.nan += int(np.isnan(wide).sum())
        self.inf += int(np.isinf(wide).sum())
        self.zero += int((wide == 0).sum())
        wide = wide[good] if not good.all() else wide
        if not wide.size:
            return
        if flat.dtype.kind not in "biuc":
            self._extremes(wide)
        self._join(wide)

    def _extremes(self, values: NDArray[Any]) -> None:
        # Integers are compared as they are: float64 would round beyond 2^53.
        if values.size:
            low, high = values.min().item(), values.max().item()
            self.minimum = low if self.minimum is None else min(self.minimum, low)
            self.maximum = high if self.maximum is None else max(self.maximum, high)

    def _join(self, wide: NDArray[Any]) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            mean = wide.mean().item()
            self.square += float((np.abs(wide) ** 2).sum())
            deviation = float((np.abs(wide - mean) ** 2).sum())
        total = self.finite + wide.size
        delta = mean - self.mean
        # A product: a power that overflows is an error in Python, and no infinity.
        self.deviation += deviation + abs(delta) * abs(delta) * self.finite * wide.size / total
        self.mean += delta * wide.size / total
        self.finite = total

    def result(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "count": count, "finite": self.finite, "nan": self.nan, "inf": self.inf, "zero": self.zero
        }  # fmt: skip
        if self.minimum is not None:
            found |= {"min": self.minimum, "max": self.maximum}
        if self.finite:
            found |= {
                "mean": self.mean,
                "std": math.sqrt(self.deviation / self.finite),
                "norm": math.sqrt(self.square),
            }
        return found
