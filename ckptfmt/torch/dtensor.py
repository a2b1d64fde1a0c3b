"""DTensors: which boxes of the whole this rank holds, by mesh and placements; saved and filled there.

A shard of `_StridedShard` (FSDP over tensor parallelism) may be several runs along its axis: it is
several boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptfmt.engine import (
    ORDER_TENSOR,
    Box,
    Comparison,
    Memory,
    Part,
    Staged,
    StoredLeaf,
    TensorSource,
)
from ckptfmt.errors import UsageError
from ckptfmt.torch.dtypes import ATTRIBUTE, CARRIED
from ckptfmt.torch.tensors import Overwrite, check, from_array, identity_of, source

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_dtensor(obj: object) -> bool:
    return isinstance(obj, DTensor)


def local_of(tensor: Any) -> Any:
    """This rank's memory; no autograd, no communication."""
    return tensor._local_tensor


def boxes_of(tensor: Any, name: str) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes of the whole that this rank holds, and where each lies in its local tensor.

    Raises:
        UsageError: kind `usage-torch-tensor`: a placement that is no part of the values (Partial).
    """
    mesh, shape = tensor.device_mesh, tuple(map(int, tensor.shape))
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    held = [np.arange(length) for length in shape]
    for position, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        split = _splitter(placement, name)
        axis = placement.dim % max(len(shape), 1)
        held[axis] = split(held[axis], mesh.size(position), coordinate[position])
    local = tuple(map(int, local_of(tensor).shape))
    if local != tuple(map(len, held)):
        _refuse(name, f"a local part of shape {local} where {tuple(map(len, held))} was expected")
    made = []
    for runs in itertools.product(*(_runs(rows) for rows in held)):
        origin = tuple(first for first, _, _ in runs)
        extent = tuple(count for _, count, _ in runs)
        made.append(((origin, extent), tuple(slice(at, at + n) for _, n, at in runs)))
    return made


def _splitter(placement: Any, name: str) -> Callable[[NDArray[Any], int, int], NDArray[Any]]:
    factor = getattr(placement, "split_factor", None)
    if factor is not None and hasattr(placement, "dim"):

        def strided(rows: NDArray[Any], size: int, rank: int) -> NDArray[Any]:
            return np.concatenate([_chunk(c, size)[rank] for c in _chunk(rows, int(factor))])

        return strided
    if not isinstance(placement, Shard):
        _refuse(name, f"a DTensor with the placement {placement}")
    return lambda rows, size, rank: _chunk(rows, size)[rank]


def _chunk(rows: NDArray[Any], count: int) -> list[NDArray[Any]]:
    """As torch.chunk, with empty ones at the end where rows are few."""
    step = -(-len(rows) // count)
    return [rows[i * step : (i + 1) * step] for i in range(count)]


def _runs(rows: NDArray[Any]) -> list[tuple[int, int, int]]:
    """(first row, how many, where locally) of each run of neighbours."""
    if not len(rows):
        return []
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(int(rows[a]), b - a, a) for a, b in itertools.pairwise(starts)]


def _refuse(name: str, found: str) -> None:
    raise UsageError(
        "tensor cannot be carried",
        reason="torch-tensor",
        where=name,
        found=found,
        do="redistribute it to Shard or Replicate placements first: "
        "tensor.redistribute(placements=...)",
    )


def sharded_source(tensor: Any, name: str) -> TensorSource:
    """A DTensor leaf at save: this rank's boxes, views of its memory."""
    local = local_of(tensor).detach()
    carried = check(local, name)
    parts = [
        Part(origin, source(local[slices], name)) for (origin, _), slices in boxes_of(tensor, name)
    ]
    return TensorSource(
        dtype=carried.stored,
        shape=tuple(map(int, tensor.shape)),
        fetch=lambda: np.zeros(0),
        identity=_identity(tensor),
        attributes=dict(carried.attributes),
        keep=tensor,
        parts=parts,
    )


def _identity(tensor: Any) -> Hashable | None:
    local = identity_of(local_of(tensor))
    return None if local is None else ("torch.dtensor", local, tuple(tensor.shape))


def local_value(
    tensor: Any, name: str, boxes: Sequence[tuple[Box, tuple[slice, ...]]], arrays: Sequence[Any]
) -> Any:
    """The local tensor's new values, from its boxes; on the host."""
    local = local_of(tensor)
    attributes = CARRIED[local.dtype].attributes
    own = {k: v for k, v in attributes.items() if k == ATTRIBUTE}
    return _join(local, boxes, arrays, own, name)


class DTensorTarget:
    """A DTensor of the caller's tree, or of a module in it, of which this rank fills its part."""

    order = ORDER_TENSOR

    def __init__(self, tensor: Any, name: str) -> None:
        self.name, self._tensor = name, tensor
        self.identities: dict[str, Hashable | None] = {name: _identity(tensor)}
        self._boxes = boxes_of(tensor, name)
        self._overwrite: Overwrite | None = None
        self._fresh: Any = None

    @property
    def became_real(self) -> bool:
        return self._fresh is not None

    def compare(self, comparison: Comparison) -> None:
        carried = check(local_of(self._tensor), self.name, meta=True)
        boxes = [box for box, _ in self._boxes]
        shape = tuple(map(int, self._tensor.shape))
        comparison.tensor(self.name, carried.stored, shape, boxes=boxes)

    def memory(self) -> list[Memory]:
        return []

    def bind(self, staged: Staged) -> None:
        if self.name in staged:
            tensor = self._tensor
            value = local_value(tensor, self.name, self._boxes, staged.parts(self.name))
            if local_of(tensor).is_meta:
                self._materialize(value)
                return
            self._overwrite = Overwrite(local_of(tensor))
            self._overwrite.apply(value, keep=staged.undoable)

    def _materialize(self, value: Any) -> None:
        """A meta DTensor becomes real on its mesh's device; the object stays."""
        tensor = self._tensor
        local = value.clone().to(tensor.device_mesh.device_type)
        fresh: Any = _like(tensor, local)
        if isinstance(tensor, torch.nn.Parameter):
            fresh = torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        fresh.__dict__.update({k: v for k, v in tensor.__dict__.items() if k not in fresh.__dict__})
        torch.utils.swap_tensors(tensor, fresh)
        self._fresh = fresh

    def undo(self) -> None:
        if self._overwrite is not None:
            self._overwrite.undo()
        if self._fresh is not None:
            torch.utils.swap_tensors(self._tensor, self._fresh)
            self._fresh = None


def ask_state(comparison: Comparison, leaf: StoredLeaf, parameter: Any) -> None:
    """A moment in a subtree that has its parameter's shape: this rank takes the parameter's part."""
    if is_dtensor(parameter) and leaf.dtype and leaf.shape == tuple(parameter.shape) != ():
        comparison.in_parts(leaf.name, [box for box, _ in boxes_of(parameter, leaf.name)])


def joined(sharded: Any, parameter: Any, name: str) -> Any:
    """A staged `Sharded` moment as a DTensor like its parameter's."""
    boxes = boxes_of(parameter, name)
    local = local_of(parameter)
    value = _join(local, boxes, [array for _, array in sharded.parts], {}, name).clone()
    return _like(parameter, value.to(parameter.device_mesh.device_type))


def _like(tensor: Any, local: Any) -> Any:
    """A DTensor of the same whole, with another local part."""
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _join(
    local: Any, boxes: Any, arrays: Sequence[Any], attributes: dict[str, object], name: str
) -> Any:
    values = [from_array(np.ascontiguousarray(array), attributes, name) for array in arrays]
    if len(values) == 1 and values[0].shape == local.shape:
        return values[0]
    dtype = values[0].dtype if values else local.dtype
    made = torch.empty(local.shape, dtype=dtype, device="cpu")
    for (_, slices), value in zip(boxes, values, strict=True):
        made[slices] = value
    return made
