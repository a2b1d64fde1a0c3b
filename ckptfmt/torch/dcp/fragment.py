"""What a rank writes of a plan, and the tree that the coordinator makes of what all ranks sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckptfmt.engine import FlatTree, Part, TensorSource, container_row, flatten
from ckptfmt.errors import InternalError, UsageError
from ckptfmt.format import join_name, pack_value
from ckptfmt.torch.dcp.objects import (
    SentObject,
    flattened,
    object_of,
    pack_object,
    stub,
)
from ckptfmt.torch.dcp.reader import PLANNER_BYTES
from ckptfmt.torch.dcp.skeleton import (
    DROP,
    Layout,
    Positions,
    filled,
    merge,
    names_of,
    skeleton_of_paths,
)
from ckptfmt.torch.dtypes import CARRIED, X2
from ckptfmt.torch.tensors import MEMORY_FORMAT, identity_of, plain_array, source

if TYPE_CHECKING:
    from numpy.typing import NDArray


def skeleton_of_plan(plan: SavePlan) -> Any:
    """What a plan tells of the tree."""
    data = plan.planner_data
    if isinstance(data, Layout):
        return data.skeleton
    if not isinstance(data, Mapping):
        data = {}
    paths = {fqn: path for fqn, path in data.items() if isinstance(path, tuple)}
    for item in plan.items:
        paths.setdefault(item.index.fqn, (item.index.fqn,))
    return skeleton_of_paths(paths)


def merged_skeleton(plans: Sequence[SavePlan]) -> Any:
    """What all plans tell, in rank order."""
    made = skeleton_of_plan(plans[0])
    for plan in plans[1:]:
        made = merge(made, skeleton_of_plan(plan))
    return made


@dataclass(slots=True)
class RankTree:
    """Builds a rank's leaves: the tensors that its plan says it writes."""

    flat: FlatTree = field(default_factory=FlatTree)
    objects: list[list[Any]] = field(default_factory=list)
    _rows: dict[object, int] = field(default_factory=dict)
    _containers: set[str] = field(default_factory=set)
    _above: object = None

    def containers(self, above: Sequence[tuple[str, Any]]) -> None:
        if above is self._above:
            return
        self._above = above
        for name, node in above:
            if name not in self._containers:
                self._containers.add(name)
                kind, argument = _container(node)
                if kind != "dict":
                    self.flat.containers.append((name, kind, pack_value(argument)))

    def tensor(self, name: str, tensor: TensorSource) -> None:
        flat = self.flat
        for attribute, value in tensor.attributes.items():
            pairs = flat.attributes.setdefault(attribute, [])
            pairs.append((len(flat.names), pack_value(value)))
        self.array(name, tensor, tensor.identity)

    def array(self, name: str, tensor: TensorSource | NDArray[Any], identity: object) -> None:
        """A tensor of which there is no more to say than its dtype and shape."""
        flat = self.flat
        row = count = len(flat.tensors.items)
        if identity is not None:
            row = self._rows.setdefault(identity, count)
        if row == count:
            flat.tensors.append(tensor)
        flat.names.append(name)
        flat.kinds.append(0)
        flat.rows.append(row)

    def object(self, called: tuple[str, str], above: Sequence[tuple[str, Any]], obj: Any) -> None:
        """An object's values go to the coordinator, its tensors are this rank's."""
        fqn, name = called
        inner = flattened(obj, name)
        self.objects.append(pack_object(fqn, obj, inner))
        if 0 not in inner.kinds:
            return
        self.containers(above)
        for below, sort, argument in inner.containers:
            self.flat.containers.append((join_name(name, below) if below else name, sort, argument))
        for below, leaf, tensor in zip(inner.names, inner.kinds, inner.rows):
            if leaf == 0:
                self.tensor(join_name(name, below) if below else name, inner.tensors[tensor])


def _container(node: Any) -> tuple[str, object]:
    return ("list", None) if isinstance(node, Positions) else container_row(node)


def rank_tree(plan: SavePlan, planner: SavePlanner, skeleton: Any) -> RankTree:
    """The tensors and objects of a plan, taken from the planner.

    Args:
        skeleton: That of this plan.
    Raises:
        UsageError: A tensor or an object that cannot be carried, by its path.
    """
    by_fqn: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        by_fqn.setdefault(item.index.fqn, []).append(item)
    made = RankTree()
    for fqn, name, above in names_of(skeleton):
        items = by_fqn.pop(fqn, [])
        if not items:
            continue
        if items[0].type == WriteItemType.BYTE_IO:
            made.object((fqn, name), above, object_of(planner, items[0], name))
        else:
            made.containers(above)
            _add_tensor(made, items, planner, name)
    if by_fqn:
        raise InternalError(
            "an item has no place in the tree",
            reason="dcp-path",
            where=repr(next(iter(by_fqn))),
            do="report this",
        )
    return made


def _add_tensor(
    tree: RankTree, items: Sequence[WriteItem], planner: SavePlanner, name: str
) -> None:
    """What this rank writes of a tensor: all of it, or boxes."""
    whole, tensor = items[0].tensor_data, planner.resolve_data(items[0])
    if len(items) == 1 and whole.chunk.sizes == whole.size:
        array = plain_array(tensor)
        if array is None:
            tree.tensor(name, source(tensor.detach(), name))
        else:
            tree.array(name, array, identity_of(tensor))
        return
    held = [(whole, tensor.detach())]
    held += [(item.tensor_data, planner.resolve_data(item).detach()) for item in items[1:]]
    tree.tensor(name, _in_parts(held, name))


def _in_parts(held: Sequence[tuple[Any, Any]], name: str) -> TensorSource:
    whole = held[0][0]
    first = source(held[0][1], name)
    parts = []
    for data, tensor in held:
        if tensor.numel():
            mine = source(tensor, name)
            origin = stored_box(tuple(data.chunk.offsets), tensor.dtype)
            parts.append(Part(origin, mine))
    shape = stored_box(tuple(whole.size), held[0][1].dtype)
    # How a part lies in memory says nothing about the whole.
    attributes = {k: v for k, v in first.attributes.items() if k != MEMORY_FORMAT}
    keep = [tensor for _, tensor in held]
    return TensorSource(first.dtype, shape, first.fetch, None, attributes, keep, parts=tuple(parts))


def stored_box(numbers: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Positions or lengths in the format's elements: twice the last axis for pairs of 4-bit floats."""
    pairs = CARRIED[dtype].name == X2 and numbers
    return (*numbers[:-1], 2 * numbers[-1]) if pairs else numbers


def coordinator_tree(
    skeleton: Any, metadata: Metadata, objects: Mapping[str, SentObject]
) -> FlatTree:
    """All leaves of the checkpoint, in the tree's order: values, and a stub for each tensor.

    Raises:
        UsageError: Something is missing that the tree needs.
    """
    entries = metadata.state_dict_metadata
    used: set[str] = set()
    own: set[str] = set()
    stubs: dict[object, TensorSource] = {}

    def item(fqn: str) -> Any:
        entry = entries.get(fqn)
        if entry is None:
            return DROP  # the planner left it out
        used.add(fqn)
        if isinstance(entry, TensorStorageMetadata):
            key = entry.properties.dtype, entry.size
            return stubs.get(key) or stubs.setdefault(key, _stub(entry))
        if fqn not in objects:
            raise UsageError(
                "no rank wrote an object that is in the plan",
                reason="dcp-object",
                where=repr(fqn),
                do="let the planner give it to one rank",
            )
        if objects[fqn].is_planner_bytes:
            own.add(fqn)
        return objects[fqn].tree

    tree = filled(skeleton, item)
    if tree is DROP:
        tree = {}
    for fqn in entries.keys() - used:
        raise InternalError(
            "an item has no place in the tree", reason="dcp-path", where=repr(fqn), do="report this"
        )
    flat = flatten(tree)
    if own:
        _mark_planner_bytes(flat, {name for fqn, name, _ in names_of(skeleton) if fqn in own})
    return flat


def _stub(entry: TensorStorageMetadata) -> TensorSource:
    dtype, size = entry.properties.dtype, tuple(entry.size)
    return stub(CARRIED[dtype].stored, stored_box(size, dtype))


def _mark_planner_bytes(flat: FlatTree, names: set[str]) -> None:
    found = [(row, pack_value(True)) for row, name in enumerate(flat.names) if name in names]
    if len(found) < len(names):
        raise UsageError(
            "bytes of a planner's own stand in a list without tensors",
            reason="dcp-object",
            where=min(names - set(flat.names)),
            do="use a dict instead of the list",
        )
    flat.attributes[PLANNER_BYTES] = found
