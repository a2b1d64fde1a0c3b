"""Sparse and nested tensors: which index arrays torch may be given.

torch believes its index arrays and reads memory by them, so a stored one is checked first: bounds,
and offsets that never fall. Order within a row and duplicates are left alone, as torch leaves them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptfmt.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

INDICES = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
_SIZE_MAX = 1 << 62


def refusal(found: str, do: str = "coalesce it, or mend its indices, first") -> UsageError:
    """Why parts make no tensor; whoever catches it knows the leaf's name."""
    return UsageError("tensor cannot be carried", reason="torch-tensor", found=found, do=do)


def _need(good: object, found: str) -> None:
    if not good:
        raise refusal(found)


def _shape(items: Mapping[str, Any]) -> list[int]:
    shape = items.get("shape")
    _need(
        type(shape) is list
        and all(type(n) is int and n >= 0 for n in shape)
        and math.prod(n for n in shape if n) < _SIZE_MAX,
        f"shape {shape!r}"[:200],
    )
    return shape  # type: ignore[return-value]


def _tensor(items: Mapping[str, Any], part: str) -> Any:
    tensor = items.get(part)
    _need(isinstance(tensor, torch.Tensor), f"no tensor {part!r}")
    return tensor


def _indices(items: Mapping[str, Any], part: str, *, narrow: bool = True) -> NDArray[Any]:
    tensor = _tensor(items, part)
    kinds = (torch.int64, torch.int32) if narrow else (torch.int64,)
    _need(type(tensor) is torch.Tensor and tensor.dtype in kinds, f"{part} of {tensor.dtype}")
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _inside(array: NDArray[Any], limit: int, part: str) -> None:
    _need(
        array.size == 0 or (int(array.min()) >= 0 and int(array.max()) < limit),
        f"{part} out of bounds: not all in [0, {limit})",
    )


def _offsets(array: NDArray[Any], part: str) -> None:
    """Along the last axis they never fall, and are not negative."""
    _need(array.shape[-1] >= 1, f"{part} is empty")
    _need(bool((array[..., 0] >= 0).all()), f"{part} begins below 0")
    _need(bool((array[..., 1:] >= array[..., :-1]).all()), f"{part} is not monotone")


def check_coo(items: Mapping[str, Any]) -> None:
    shape, values = _shape(items), _tensor(items, "values")
    indices = _indices(items, "indices", narrow=False)
    _need(indices.ndim == 2 and values.dim() >= 1, "indices or values of other dimensions")
    sparse, nnz = indices.shape
    _need(
        sparse <= len(shape) and list(values.shape) == [nnz, *shape[sparse:]],
        f"values of shape {list(values.shape)} for indices {list(indices.shape)} of {shape}",
    )
    for axis in range(sparse):
        _inside(indices[axis], shape[axis], f"indices[{axis}]")


def check_compressed(kind: str, items: Mapping[str, Any]) -> None:
    shape, values = _shape(items), _tensor(items, "values")
    first, second = INDICES[kind]
    outer, inner = _indices(items, first), _indices(items, second)
    batch, block = outer.ndim - 1, 2 if kind in ("sparse_bsr", "sparse_bsc") else 0
    _need(
        batch >= 0
        and len(shape) >= batch + 2
        and inner.ndim == batch + 1
        and values.dim() == len(shape) - 1 + block
        and outer.dtype == inner.dtype,
        f"{first}, {second} or values of other dimensions or dtypes",
    )
    blocks = list(values.shape[batch + 1 : batch + 3]) if block else [1, 1]
    _need(
        all(b >= 1 and n % b == 0 for b, n in zip(blocks, shape[batch : batch + 2])),
        f"blocks of {blocks} for shape {shape}",
    )
    rows, columns = (n // b for n, b in zip(shape[batch : batch + 2], blocks))
    if kind in ("sparse_csc", "sparse_bsc"):
        rows, columns = columns, rows
    nnz = inner.shape[-1]
    _need(
        list(outer.shape) == [*shape[:batch], rows + 1]
        and list(inner.shape[:-1]) == shape[:batch]
        and list(values.shape) == [*shape[:batch], nnz, *blocks[:block], *shape[batch + 2 :]],
        f"{first} {list(outer.shape)}, values {list(values.shape)} for shape {shape}",
    )
    _offsets(outer, first)
    _need(
        bool((outer[..., 0] == 0).all() and (outer[..., -1] == nnz).all()),
        f"{first} does not run from 0 to {nnz}",
    )
    _inside(inner, columns, second)


def check_nested(items: Mapping[str, Any]) -> None:
    values, sizes = _tensor(items, "values"), _indices(items, "sizes", narrow=False)
    _need(
        values.dim() == 1 and sizes.ndim == 2 and (sizes >= 0).all(), "sizes or values of no nested"
    )
    # In floating point first: a product of hostile sizes wraps.
    rough = np.prod(sizes.astype(np.float64), axis=1).sum() if sizes.size else float(len(sizes))
    _need(rough < _SIZE_MAX, "sizes beyond all bounds")
    total = int(np.prod(sizes, axis=1).sum())
    _need(total == values.numel(), f"{values.numel()} values for sizes of {total}")


def check_jagged(items: Mapping[str, Any], axis: object) -> None:
    values, offsets = _tensor(items, "values"), _indices(items, "offsets")
    _need(offsets.ndim == 1, "offsets of other dimensions")
    _need(type(axis) is int and 1 <= axis <= values.dim(), f"ragged axis {axis!r}")
    length = int(values.shape[axis - 1])  # type: ignore[operator]
    _offsets(offsets, "offsets")
    _need(int(offsets[-1]) <= length, f"offsets end at {offsets[-1]}, behind {length} values")
    if items.get("lengths") is not None:
        lengths = _indices(items, "lengths")
        _need(lengths.shape == (len(offsets) - 1,), "lengths for another number of rows")
        ends = offsets[:-1].astype(np.int64) + lengths
        _need(
            bool((lengths >= 0).all() and (ends <= length).all()), "lengths run behind the values"
        )


def nested_items(tensor: Any) -> dict[str, Any]:
    """A nested tensor of the strided layout: the components' sizes, and their values in a row."""
    sizes = tensor._nested_tensor_size()
    if sizes.dim() != 2:  # one without components has no sizes of two axes
        return {
            "sizes": torch.zeros(0, 0, dtype=torch.int64),
            "values": torch.zeros(0, dtype=tensor.dtype),
        }
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return {"sizes": sizes, "values": tensor.values()}


def join_nested(items: Mapping[str, Any]) -> Any:
    sizes, values = items["sizes"], items["values"]
    if len(sizes) == 0:
        return torch.nested.nested_tensor([], dtype=values.dtype, device="cpu")
    strides, offsets, start = [], [], 0
    for size in sizes.tolist():
        stride = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
        strides.append(stride)
        offsets.append(start)
        start += math.prod(size)
    return torch._nested_view_from_buffer(
        values,
        sizes.clone(),
        torch.tensor(strides, dtype=torch.int64, device="cpu").reshape(sizes.shape),
        torch.tensor(offsets, dtype=torch.int64, device="cpu"),
    )
