"""`CkptfmtReader`: torch's planners read our checkpoints, those of `ckptfmt.torch.save` too."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from ckptfmt.engine import Checkpoint, Store, StoredTensor, api
from ckptfmt.errors import (
    CheckpointError,
    ConflictError,
    NotFoundError,
    PartialRestoreError,
    UnsupportedError,
)
from ckptfmt.format import escape_key
from ckptfmt.torch.dcp.boxes import BoxCopy, copy_boxes, refuse_misfits, torch_shape
from ckptfmt.torch.dcp.layout import Item, items_of, set_at
from ckptfmt.torch.dcp.names import rank_name
from ckptfmt.torch.dtypes import holds, torch_dtype
from ckptfmt.torch.tensors import REQUIRES_GRAD, from_array
from ckptfmt.types import At, StrPath

Where: TypeAlias = "StrPath | Store"

PLANNER_BYTES = "torch.planner_bytes"
"""Leaf attribute: the bytes that a planner of the user's own made of an object, as they were."""


class CkptfmtReader(StorageReader):  # type: ignore[misc]
    """Reads a checkpoint for `torch.distributed.checkpoint.load`. Can be pickled.

    Args:
        path: A directory, a URL or a Store; a text may end in `@` and a step, a name, a tag.
        step: Short for `at=step`.
        at: A step, a name or a tag; None: the latest.

    `checkpoint_id=` of `dcp.load` stands for `path`. Every rank reads only the boxes that it needs;
    each byte is verified. A tensor of another dtype or shape is a MismatchError before the first is
    touched. Values are put into the state dict as they are: nothing is unpickled.
    """

    def __init__(self, path: Where, *, step: int | None = None, at: At | None = None) -> None:
        self.checkpoint_id: Where = path
        self._step, self._at = step, at
        self._is_own = False
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def reset(self, checkpoint_id: Where | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._opened = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        """Whether a checkpoint can be read there, which takes a look."""
        try:
            api.open(checkpoint_id)
        except CheckpointError:
            return False
        return True

    @property
    def checkpoint(self) -> Checkpoint:
        """What is read; opened on first use."""
        return self._open().checkpoint

    @property
    def items(self) -> Mapping[str, Item]:
        """What is stored, by fqn."""
        return self._open().items

    def _open(self, rank: int | None = None) -> _Opened:
        if self._opened is None:
            self._opened = _Opened(self._found(rank))
        return self._opened

    def _found(self, rank: int | None) -> Checkpoint:
        if rank is None:
            return api.open(self.checkpoint_id, step=self._step, at=self._at)
        return api.open(self.checkpoint_id, at=rank_name(rank, self._step, self._at))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint as torch's planners know one: an entry per item.

        With `rank=`: of the checkpoint that this rank saved for itself, without collectives.
        """
        rank = kwargs.get("rank")
        self._is_own = rank is not None
        if self._is_own:
            self._opened = None
        opened = self._open(rank)
        return Metadata(
            state_dict_metadata=_Entries(opened),
            planner_data={fqn: item.path for fqn, item in opened.items.items()},
            storage_meta=StorageMeta(checkpoint_id=_text(self.checkpoint_id)),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._open()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        info = self.checkpoint.info
        which = None if self._is_own else (info.name, info.generation, info.digest)
        return dataclasses.replace(plan, storage_data=which)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """ConflictError if a rank opened another checkpoint: one was committed in between."""
        mine = plans[0].storage_data
        for rank, plan in enumerate(plans):
            if plan.storage_data != mine:
                raise ConflictError(
                    "ranks opened different checkpoints",
                    reason="ranks-checkpoint",
                    where=f"rank {rank}",
                    expected=mine[0],
                    found=plan.storage_data[0],
                    do="say which: step=, or at=",
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill this rank's targets.

        Raises:
            MismatchError: A target does not fit what is stored; nothing was touched.
            PartialRestoreError: An error came after the first target was touched.
        """
        pairs = self.box_copies(plan, planner)
        try:
            copy_boxes(self.checkpoint, [pair for _, pair in pairs])
            for read, pair in pairs:
                planner.commit_tensor(read, pair.target)
            for read, value in self.values(plan):
                give_value(planner, read, value)
        except CheckpointError as error:
            raise _partial(plan, error) from error
        made: torch.futures.Future[None] = torch.futures.Future()
        made.set_result(None)
        return made

    def box_copies(self, plan: LoadPlan, planner: LoadPlanner) -> list[tuple[ReadItem, BoxCopy]]:
        """What is read into which tensor; all of them fit."""
        made = []
        for read in plan.items:
            if read.type != LoadItemType.BYTE_IO:
                stored = self._item(read.storage_index.fqn).held
                at = read.storage_index.offset or (0,) * len(read.storage_offsets)
                origin = tuple(a + b for a, b in zip(at, read.storage_offsets))
                target = planner.resolve_tensor(read).detach()
                made.append((read, BoxCopy(stored, origin, tuple(read.lengths), target)))
        refuse_misfits([pair for _, pair in made])
        return made

    def values(self, plan: LoadPlan) -> list[tuple[ReadItem, Any]]:
        """The objects of a plan, each a copy of its own."""
        return [
            (read, self._value(self._item(read.storage_index.fqn)))
            for read in plan.items
            if read.type == LoadItemType.BYTE_IO
        ]

    def name_of(self, fqn: str) -> str:
        """Our name of an item."""
        return self._item(fqn).name

    def _item(self, fqn: str) -> Item:
        opened = self._open()
        if fqn in opened.whole:
            return opened.whole[fqn]
        if fqn not in opened.items:
            raise NotFoundError(
                "no such item",
                reason="name",
                where=f"{self.checkpoint.info.name} of {self.checkpoint.info.url}",
                expected=repr(fqn),
                do="check the planner",
            )
        return opened.items[fqn]

    def _value(self, item: Item) -> Any:
        if item.name in self._open().planner_bytes:
            return io.BytesIO(item.held)
        return _materialized(item.held)


class _Entries(dict[str, "TensorStorageMetadata | BytesStorageMetadata"]):
    """torch's entry of each item. Also has one for a whole container at the top, if it is asked."""

    def __init__(self, opened: _Opened) -> None:
        super().__init__({fqn: _described(item) for fqn, item in opened.items.items()})
        self._whole = opened.whole

    def __contains__(self, fqn: object) -> bool:
        return super().__contains__(fqn) or fqn in self._whole

    def __missing__(self, fqn: str) -> BytesStorageMetadata:
        return _described(self._whole[fqn])


class _Opened:
    """A checkpoint and its items by fqn."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        tree = checkpoint.tree()
        if not isinstance(tree, Mapping):
            raise UnsupportedError(
                "torch.distributed.checkpoint loads dicts only",
                reason="dcp-root",
                where=f"{checkpoint.info.name} of {checkpoint.info.url}",
                found=f"a {type(tree).__name__} at the root",
                do="load it with ckptfmt.torch.load",
            )
        self.items: dict[str, Item] = {}
        for item in items_of(tree, is_tensor):
            if item.fqn in self.items:
                raise UnsupportedError(
                    "two leaves have one name for torch.distributed.checkpoint",
                    reason="dcp-name",
                    where=repr(item.fqn),
                    found=f"{self.items[item.fqn].name!r} and {item.name!r}",
                    do="load it with ckptfmt.torch.load",
                )
            self.items[item.fqn] = item
        self.whole = {
            key: Item(key, (key,), escape_key(key), held)
            for key, held in tree.items()
            if isinstance(key, str) and key not in self.items
        }
        """What planners that do not look into containers take for one item."""
        index = checkpoint.index.tree
        attribute = index.leaf_attributes.get(PLANNER_BYTES)
        rows = () if attribute is None else attribute.rows.tolist()
        self.planner_bytes = {index.leaf_names[row] for row in rows}


def is_tensor(obj: object) -> bool:
    """A stored tensor that torch can hold; one of strings or dates is an object to it."""
    return isinstance(obj, StoredTensor) and holds(obj.dtype)


def _described(item: Item) -> TensorStorageMetadata | BytesStorageMetadata:
    """One chunk, whatever the ranks were that saved it: which regions a box lies in is our affair."""
    stored = item.held
    if not is_tensor(stored):
        return BytesStorageMetadata()
    attributes = stored.attributes
    size = torch.Size(torch_shape(stored))
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    properties = TensorProperties(
        dtype=torch_dtype(stored.dtype_name, attributes),
        requires_grad=bool(attributes.get(REQUIRES_GRAD)),
    )
    return TensorStorageMetadata(properties, size, [chunk])


def _text(path: Where) -> str:
    return path.url if isinstance(path, Store) else str(path)


def _materialized(obj: Any) -> Any:
    """An object with the tensors that stand in it (in a tuple, say) read; else a copy."""
    if isinstance(obj, StoredTensor):
        array = obj.read()
        return from_array(array, obj.attributes, obj.name) if holds(array.dtype) else array
    if isinstance(obj, Mapping) and any(map(_has_stored, obj.values())):
        made = copy.copy(obj)
        made.update({key: _materialized(item) for key, item in obj.items()})  # type: ignore[attr-defined]
        return made
    if isinstance(obj, list | tuple) and any(map(_has_stored, obj)):
        items = [_materialized(item) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    return copy.deepcopy(obj)


def _has_stored(obj: object) -> bool:
    if isinstance(obj, Mapping):
        return any(map(_has_stored, obj.values()))
    if isinstance(obj, list | tuple):
        return any(map(_has_stored, obj))
    return isinstance(obj, StoredTensor)


def give_value(planner: LoadPlanner, read: ReadItem, value: Any) -> None:
    """Put an object into the state dict of a planner.

    A planner with a `load_bytes` of its own gets what it would get from torch: bytes of `torch.save`,
    made here and now, or the bytes that its own counterpart made.
    """
    fqn = read.dest_index.fqn
    if isinstance(value, io.BytesIO):
        planner.load_bytes(read, value)
        return
    if getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes:
        if not planner.flatten_state_dict:
            planner.state_dict[fqn] = value
            return
        try:
            set_at(planner.original_state_dict, planner.mappings[fqn], value)
            return
        except (KeyError, IndexError, TypeError):
            pass  # the planner's own way makes what is not there
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    planner.load_bytes(read, data)


def _partial(plan: LoadPlan, error: CheckpointError) -> PartialRestoreError:
    names: Sequence[str] = sorted({read.dest_index.fqn for read in plan.items})
    return PartialRestoreError(
        "load stopped half-way",
        reason="dcp",
        where=f"{len(names)} items of this rank",
        found=f"{type(error).__name__}: {error}",
        do="load another checkpoint, or stop; `changed` names what may hold new values. "
        "ckptfmt.torch.dcp.load touches nothing before all ranks have read all",
        changed=tuple(names),
    )
