"""Stored tensors -> arrays: how they are read, and what they become. Spec: 04, 07."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.read import ChunkReader
from ckptfmt.errors import UsageError
from ckptfmt.format import Index, empty_array, numpy_dtype, parse_array, ragged
from ckptfmt.storage import Backend
from ckptfmt.types import Mode

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


def read_tensors(
    backend: Backend,
    index: Index,
    tensors: Sequence[int],
    *,
    mode: Mode = "auto",
    verify: bool = True,
    own: bool = False,
    reporter: Reporter,
) -> dict[int, Array]:
    """Tensor row -> array, writable and private to the caller.

    Args:
        mode: "auto" gives views of buffers of at most 256 MiB, "read" memory of its own to each,
            "mmap" copy-on-write maps.
        verify: Check every byte.
        own: "auto" gives memory of its own to each array that is not mapped.
    """
    tree = index.tree
    rows = np.unique(np.asarray(tensors, np.int64))
    at = tree.tensor_region_starts
    regions = ragged(at[rows], at[rows + 1] - at[rows])
    reader = ChunkReader(backend, index, verify=verify)
    if mode == "mmap":
        buffers = reader.maps(regions, reporter)
    elif mode == "read":
        buffers = reader.regions(regions, own=True, reporter=reporter)
    elif mode == "auto":
        resident = reader.resident(regions)
        buffers = reader.maps(regions[resident], reporter)
        buffers.update(reader.regions(regions[~resident], own=own, reporter=reporter))
    else:
        raise UsageError(
            "unknown mode",
            reason="mode",
            expected="auto, mmap or read",
            found=repr(mode),
            do="choose one of these",
        )
    return _arrays(index, rows, buffers)


def _arrays(
    index: Index, rows: NDArray[np.int64], buffers: Mapping[int, NDArray[np.uint8]]
) -> dict[int, Array]:
    """Tensor row -> array: of one region of whole bytes a view, without further ado."""
    tree = index.tree
    plain = [None if d.is_packed or d.is_variable else numpy_dtype(d) for d in tree.dtypes]
    dtypes = [plain[row] for row in tree.tensor_dtypes[rows].tolist()]
    first = tree.tensor_region_starts[rows].tolist()
    counts = (tree.tensor_region_starts[rows + 1] - tree.tensor_region_starts[rows]).tolist()
    dims, at = tree.tensor_dims.tolist(), tree.dims_starts.tolist()
    made: dict[int, Array] = {}
    for tensor, dtype, region, count in zip(rows.tolist(), dtypes, first, counts):
        if count == 1 and dtype is not None:
            shape = dims[at[tensor] : at[tensor + 1]]
            made[tensor] = np.ndarray(shape, dtype, buffers[region])
        else:
            made[tensor] = _array(index, tensor, buffers)
    return made


def _array(index: Index, tensor: int, buffers: Mapping[int, NDArray[np.uint8]]) -> Array:
    tree = index.tree
    dtype, shape = tree.dtype(tensor), tree.shape(tensor)
    first, last = (int(x) for x in tree.tensor_region_starts[tensor : tensor + 2])
    if first == last:
        return empty_array(dtype, shape)
    if last == first + 1:
        return parse_array(buffers[first], dtype, shape)
    made = empty_array(dtype, shape)
    for region in range(first, last):
        origin, extent = tree.box(region)
        box = tuple(slice(o, o + e) for o, e in zip(origin, extent))
        made[box] = parse_array(buffers[region], dtype, extent)
    return made
