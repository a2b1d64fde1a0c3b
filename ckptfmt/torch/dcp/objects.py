"""Objects that are no tensors, from a rank to the coordinator: named leaves of ours, as plain data.

torch's planner would pickle each. Here an object is flattened where it is: values are packed, and the
tensors that stand in it (in a tuple, say) are written like any other.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ckptfmt.engine import FlatTree, TensorSource, build_tree, flatten, parse_leaf_value
from ckptfmt.errors import UsageError
from ckptfmt.format import join_name, pack_value, parse_value

_TENSOR, _VALUE, _PACKED = 0, 1, 2
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class PlannerBytes:
    """What a planner of the user's own made of an object."""

    data: bytes


def object_of(planner: SavePlanner, item: WriteItem, name: str) -> Any:
    """The object of an item, before anybody pickles it.

    A planner that makes bytes of its own is asked for them: what it lets `torch.save` write is read
    back as plain data (`weights_only`), other bytes are kept as they are.
    """
    cls = type(planner)
    if isinstance(planner, DefaultSavePlanner) and (
        cls.resolve_data is DefaultSavePlanner.resolve_data
        and cls.transform_object is DefaultSavePlanner.transform_object
    ):
        return planner.lookup_object(item.index)
    made = planner.resolve_data(item)
    data = made.getvalue() if isinstance(made, io.BytesIO) else bytes(made)
    if not data.startswith(_ZIP):
        return PlannerBytes(data)
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # its own for what is no plain data, others for what is no archive
        raise UsageError(
            "the planner pickles an object that is no plain data",
            reason="dcp-object",
            where=name,
            found=str(error).strip().partition("\n")[0][:200],
            do="leave transform_object to torch's DefaultSavePlanner, or save plain data",
        ) from error


def flattened(obj: Any, name: str) -> FlatTree:
    """An object as leaves, by names relative to it.

    Raises:
        UsageError: It cannot be carried; `where` is its path.
    """
    if isinstance(obj, PlannerBytes):
        obj = obj.data
    try:
        flat = flatten(obj)
    except UsageError as error:
        inner = error.where if error.where != "the tree's root" else ""
        error.where = join_name(name, inner) if inner else name
        error.args = (error._message(),)
        raise
    plain = flat.names == [""] or isinstance(obj, list | tuple | Mapping)
    if not plain and not (flat.containers and flat.containers[0][1] == "type"):
        _refuse_object(obj, name)
    return flat


def _refuse_object(obj: Any, name: str) -> NoReturn:
    raise UsageError(
        "an object within a state dict would come back as its state",
        reason="dcp-object",
        where=name,
        found=type(obj).__qualname__,
        do="put its state there: x.state_dict(); or the object itself at the top of the state dict",
    )


def pack_object(fqn: str, obj: Any, flat: FlatTree) -> list[Any]:
    """What the coordinator needs of an object: all but the bytes of its tensors."""
    values = []
    for kind, row in zip(flat.kinds, flat.rows):
        if kind == _VALUE:
            values.append(flat.values[row])
        elif kind == _PACKED:
            values.append(flat.tensors[row].fetch().tobytes())
        else:
            values.append(pack_value([flat.tensors[row].dtype, list(flat.tensors[row].shape)]))
    return [
        fqn,
        isinstance(obj, PlannerBytes),
        flat.names,
        [kind == _TENSOR for kind in flat.kinds],
        values,
        [list(row) for row in flat.containers],
    ]


@dataclass(frozen=True, slots=True)
class SentObject:
    """An object as the coordinator has it; its tensors are `stub`s."""

    tree: Any
    is_planner_bytes: bool


def parse_object(row: list[Any]) -> tuple[str, SentObject]:
    fqn, own, names, tensors, values, containers = row
    leaves: list[Any] = []
    for name, is_tensor, data in zip(names, tensors, values):
        if is_tensor:
            dtype, shape = parse_value(data)
            leaves.append(stub(dtype, tuple(shape)))
        else:
            leaves.append(parse_leaf_value(data, name or fqn))
    made = build_tree(names, leaves, [(name, kind, data) for name, kind, data in containers])
    return fqn, SentObject(made, own)


def stub(dtype: str, shape: tuple[int, ...]) -> TensorSource:
    """A tensor of which this fragment has no part."""
    return TensorSource(dtype, shape, partial(np.zeros, 0), parts=())
