"""Plans of the last saves, by the structure of their trees: a training loop saves one again and again.

A kept plan has columns and nothing of a tensor: what is saved comes from the tree that was just
flattened. It is taken only if *all* that decided it is equal, compared column by column, not by a
digest: names, ties, dtypes, shapes, sizes, options. Spec: 07-index.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.format import Dtype, Pipeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

Column: TypeAlias = "NDArray[Any]"

PLANS_MAX = 4
PLANS_NBYTES_MAX = 128 << 20
"""Of all kept plans together: a million tensors take 90 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """All of a tree and of the options that decides its plan.

    Attributes:
        names: The leaf names, packed.
        kinds, rows: Of the leaves.
        dtypes: The table; `tensor_dtypes` has each tensor's row in it.
        ndims, dims: Shapes, ragged.
        nbytes: Packed size of each tensor.
        options: Those that decide regions and chunks.
    """

    names: bytes
    kinds: Column
    rows: Column
    dtypes: tuple[Dtype, ...]
    tensor_dtypes: Column
    ndims: Column
    dims: Column
    nbytes: Column
    options: tuple[object, ...]

    def columns(self) -> tuple[Column, ...]:
        return self.kinds, self.rows, self.tensor_dtypes, self.ndims, self.dims, self.nbytes

    def is_same(self, other: Structure) -> bool:
        return (
            self.options == other.options
            and self.dtypes == other.dtypes
            and self.names == other.names
            and all(map(np.array_equal, self.columns(), other.columns()))
        )


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Regions and chunks of a structure, and the codec of each tensor. Its columns are read-only."""

    region_tensors: Column
    region_origins: Column
    region_extents: Column
    region_nchunks: Column
    chunk_raw: Column
    codecs: Sequence[tuple[Pipeline, int | None]]

    def columns(self) -> tuple[Column, ...]:
        boxes = self.region_tensors, self.region_origins, self.region_extents
        return (*boxes, self.region_nchunks, self.chunk_raw)


class PlanCache:
    """The last few layouts, the most recent last; bounded in number and bytes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may save while its thread plans
        self._kept: list[tuple[Structure, Layout]] = []

    def find(self, structure: Structure) -> Layout | None:
        """The layout of an equal structure."""
        with self._lock:
            for entry in reversed(self._kept):
                if entry[0].is_same(structure):
                    self._kept.remove(entry)
                    self._kept.append(entry)
                    return entry[1]
        return None

    def keep(self, structure: Structure, layout: Layout) -> None:
        for column in (*structure.columns(), *layout.columns()):
            column.flags.writeable = False
        with self._lock:
            self._kept.append((structure, layout))
            while len(self._kept) > PLANS_MAX or self.nbytes > PLANS_NBYTES_MAX:
                del self._kept[0]

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(
                len(structure.names)
                + 8 * len(layout.codecs)
                + sum(column.nbytes for column in (*structure.columns(), *layout.columns()))
                for structure, layout in self._kept
            )

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


PLANS = PlanCache()
