"""Sparse, quantized and nested tensors: dicts of their parts, as `ckptfmt.torch` stores them.

What torch would believe is checked: bounds of indices, offsets that never fall, lengths that agree.
The index arrays are read for that when the file is opened; values are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import CorruptError
from ckptfmt.foreign.base import ForeignContainer
from ckptfmt.foreign.pickle_builders import need, typed
from ckptfmt.foreign.pickle_machine import Global
from ckptfmt.foreign.pickle_tree import Node, TreeMaker
from ckptfmt.foreign.pytorch.tensors import Strided

if TYPE_CHECKING:
    from numpy.typing import NDArray

INDICES = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
_NUMEL_MAX = 1 << 62


@dataclass(slots=True, eq=False)
class Composite(Node):
    """A tensor made of tensors.

    Attributes:
        kind, facts: As in the container attribute `torch.tensor` (spec 07 §7.4).
        items: Parts: `Strided` and plain values.
    """

    kind: str
    facts: dict[str, Any]
    items: dict[str, Any]
    requires_grad: bool = False

    def carry(self, maker: TreeMaker, name: str) -> Any:
        try:
            self._check()
        except CorruptError as error:
            if error.where:
                raise
            kind = self.kind.replace("_", " ")
            raise maker.corrupt(f"the parts make no {kind} tensor", name, error.what) from error
        facts = {"kind": self.kind, **self.facts}
        if self.requires_grad:
            facts["requires_grad"] = True
        tree = {
            part: item.carry(maker, f"{name}/{part}") if isinstance(item, Strided) else item
            for part, item in self.items.items()
        }
        return ForeignContainer(tree, {"torch.tensor": facts})

    def _check(self) -> None:
        if self.kind == "sparse_coo":
            _check_coo(self.items)
        elif self.kind in INDICES:
            _check_compressed(self.kind, self.items)
        elif self.kind == "nested":
            sizes = _indices(self.items["sizes"], "int64")
            need(sizes.ndim == 2 and bool((sizes >= 0).all()), "sizes of a nested tensor")
            total = sum(math.prod(size) for size in sizes.tolist())
            values = self.items["values"]
            need(len(values.shape) == 1 and values.shape[0] == total, "values of a nested tensor")


def _indices(tensor: Any, *dtypes: str) -> NDArray[Any]:
    typed(tensor, Strided)
    need(tensor.dtype.name in dtypes, f"indices of {tensor.dtype.name}")
    made: NDArray[Any] = tensor.fetch()
    return made


def _inside(array: NDArray[Any], limit: int) -> None:
    good = array.size == 0 or (int(array.min()) >= 0 and int(array.max()) < limit)
    need(good, f"indices out of bounds: not all in [0, {limit})")


def _shape(items: dict[str, Any]) -> list[int]:
    shape: list[int] = items["shape"]
    need(math.prod(n for n in shape if n) < _NUMEL_MAX, "a shape without end")
    return shape


def _check_coo(items: dict[str, Any]) -> None:
    shape, values = _shape(items), typed(items["values"], Strided)
    indices = _indices(items["indices"], "int64")
    need(indices.ndim == 2 and len(values.shape) >= 1, "dimensions of indices or values")
    sparse, nnz = indices.shape
    need(
        sparse <= len(shape) and list(values.shape) == [nnz, *shape[sparse:]],
        f"values {list(values.shape)} for indices {list(indices.shape)} of {shape}",
    )
    for axis in range(sparse):
        _inside(indices[axis], shape[axis])


def _check_compressed(kind: str, items: dict[str, Any]) -> None:
    first, second = INDICES[kind]
    shape, values = _shape(items), typed(items["values"], Strided)
    outer = _indices(items[first], "int64", "int32")
    inner = _indices(items[second], "int64", "int32")
    batch, block = outer.ndim - 1, 2 if kind in ("sparse_bsr", "sparse_bsc") else 0
    need(batch >= 0 and inner.ndim == batch + 1, "dimensions of indices")
    need(len(shape) >= batch + 2 and len(values.shape) >= batch + 1 + block, "dimensions")
    need(
        list(outer.shape[:batch]) == list(inner.shape[:batch]) == shape[:batch]
        and list(values.shape[: batch + 1]) == list(inner.shape),
        "parts of different lengths",
    )
    rows, columns = shape[batch : batch + 2]
    if block:
        height, width = values.shape[batch + 1 : batch + 3]
        need(height > 0 and width > 0 and rows % height == columns % width == 0, "blocks")
        rows, columns = rows // height, columns // width
    if kind in ("sparse_csc", "sparse_bsc"):
        rows, columns = columns, rows
    need(outer.shape[-1] == rows + 1, f"{outer.shape[-1]} offsets for {rows} rows")
    need(bool((outer[..., 0] == 0).all()), "offsets that begin elsewhere than at 0")
    need(bool((outer[..., 1:] >= outer[..., :-1]).all()), "offsets that fall")
    need(bool((outer[..., -1] == inner.shape[-1]).all()), "offsets that end elsewhere")
    _inside(inner, columns)


def quantized(integers: Strided, parameters: Any) -> Composite:
    """A quantized tensor of its integers, (scheme, scale, zero point) or (scheme, scales, zero
    points, axis)."""
    scheme, *rest = typed(parameters, tuple)
    name = typed(scheme, Global).name.removeprefix("torch.")
    need(integers.dtype.is_quantized, f"integers of {integers.dtype.name}")
    facts = {"dtype": integers.dtype.name, "scheme": name}
    items: dict[str, Any] = {"int_repr": replace(integers, requires_grad=False)}
    if name in ("per_tensor_affine", "per_tensor_symmetric"):
        scale, zero_point = rest
        items |= {"scale": typed(scale, float), "zero_point": typed(zero_point, int)}
        return Composite("quantized", facts, items)
    need(
        name in ("per_channel_affine", "per_channel_affine_float_qparams", "per_channel_symmetric"),
        f"the scheme {name[:40]}",
    )
    scales, zero_points, axis = rest
    need(type(axis) is int and 0 <= axis < len(integers.shape), "the axis")
    length = integers.shape[axis]
    items |= {"scales": scales, "zero_points": zero_points, "axis": axis}
    for part in ("scales", "zero_points"):
        need(typed(items[part], Strided).shape == (length,), f"{part} for {length} channels")
    return Composite("quantized", facts, items)


def nested(values: Strided, sizes: Any, strides: Any, offsets: Any) -> Composite:
    """A nested tensor of the strided layout, whose components follow each other."""
    rows = _indices(sizes, "int64")
    if rows.ndim == 2:
        lengths = [math.prod(row) for row in rows.tolist()]
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if lengths else np.zeros(0)
        need(list(_indices(offsets, "int64")) == starts.tolist(), "components with gaps")
        for row, found in zip(rows.tolist(), _indices(strides, "int64").tolist(), strict=True):
            expected = [math.prod(row[axis + 1 :]) for axis in range(len(row))]
            need(found == expected, "components that are not in C order")
    return Composite("nested", {}, {"sizes": sizes, "values": values})
