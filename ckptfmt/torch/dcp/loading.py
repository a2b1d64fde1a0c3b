"""`ckptfmt.torch.dcp.load`: torch's planners, and a vote of all ranks before the first tensor changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.stateful import Stateful

from ckptfmt import config
from ckptfmt.engine import api, parse_where, remember
from ckptfmt.errors import CheckpointError, PartialRestoreError
from ckptfmt.format import escape_key
from ckptfmt.reports import RestoreReport
from ckptfmt.torch.dcp.boxes import BoxCopy, copy_boxes, put
from ckptfmt.torch.dcp.group import Group, is_alone, quietly, unwrapped
from ckptfmt.torch.dcp.planners import StrictLoadPlanner
from ckptfmt.torch.dcp.reader import CkptfmtReader, Where, give_value
from ckptfmt.types import At


def load(
    state_dict: dict[str, Any],
    path: Where,
    *,
    step: int | None = None,
    at: At | None = None,
    planner: LoadPlanner | None = None,
    process_group: Group = None,
) -> RestoreReport:
    """Fill a state dict in place; every rank of the group calls.

    All ranks read the checkpoint that the first rank finds. Each reads its boxes into memory of its
    own and verifies them; only when all ranks have all of theirs, the first target is touched. A
    state over the staging budget is read straight into the targets instead.

    Args:
        state_dict: As for `torch.distributed.checkpoint.load`: tensors and DTensors are filled, values
            are replaced, an object with `state_dict` and `load_state_dict` is given its state.
        path: A directory, a URL or a Store; a text may end in `@` and a step, a name, a tag.
        step: Short for `at=step`.
        at: A step, a name or a tag; None: the latest.
        planner: None: everything in the state dict must be stored, with its shape and dtype.
            `DefaultLoadPlanner(allow_partial_load=True)` passes over what is not.
        process_group: None: the default group; without one this process is alone.
    Returns:
        What this rank was given, and what of the checkpoint nobody here asked for (`unexpected`).
    Raises:
        NotFoundError: No such checkpoint.
        MismatchError: State dict and checkpoint disagree: everything is listed, nothing was touched.
        CorruptError: Bytes are damaged, on whichever rank; nothing was touched on any.
        PartialRestoreError: Only over the staging budget, or if an object refuses its state.
    """
    store, _ = parse_where(path)
    reader = _StagedReader(store, at=_agreed(path, step, at, process_group))
    planner = StrictLoadPlanner() if planner is None else planner
    objects = {key: item for key, item in state_dict.items() if isinstance(item, Stateful)}
    plain = {key: item.state_dict() if key in objects else item for key, item in state_dict.items()}
    with unwrapped(), quietly():
        dcp.load(
            plain,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=is_alone(),
        )
    reader.bind(planner)
    given: Mapping[str, Any] = plain
    if isinstance(planner, DefaultLoadPlanner):
        given = planner.original_state_dict
    for key in state_dict:
        if key in objects:
            _hand_over(objects[key], given[key], key)
        else:
            state_dict[key] = given[key]
    checkpoint = reader.checkpoint
    remember(checkpoint.backend, checkpoint.info.name, checkpoint.index.about.tree_digest)
    return _report(reader, planner)


def _agreed(path: Where, step: int | None, at: At | None, group: Group) -> str:
    """The name of the checkpoint that the first rank finds: all ranks read that one."""
    if is_alone():
        return api.open(path, step=step, at=at).info.name
    found: list[Any] = [None]
    source = 0 if group is None else dist.get_global_rank(group, 0)
    if dist.get_rank(group) == 0:
        try:
            found = [api.open(path, step=step, at=at).info.name]
        except CheckpointError as error:
            found = [error]
    dist.broadcast_object_list(found, src=source, group=group)
    if isinstance(found[0], CheckpointError):
        raise found[0]
    return str(found[0])


class _StagedReader(CkptfmtReader):
    """Reads into memory of its own; `bind` gives it to the targets."""

    def __init__(self, path: Where, *, at: At | None) -> None:
        super().__init__(path, at=at)
        self.matched: list[str] = []
        self._tensors: list[tuple[ReadItem, Any]] = []
        self._values: list[tuple[ReadItem, Any]] = []

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        self.matched = list(dict.fromkeys(self.name_of(r.storage_index.fqn) for r in plan.items))
        pairs = self.box_copies(plan, planner)
        staged = sum(pair.target.nbytes for _, pair in pairs) <= config.current().staging_nbytes
        if not (staged and isinstance(planner, DefaultLoadPlanner)):
            return super().read_data(plan, planner)
        copies = [
            BoxCopy(p.stored, p.origin, p.extent, torch.empty_like(p.target, device="cpu"))
            for _, p in pairs
        ]
        copy_boxes(self.checkpoint, copies)
        self._tensors = [(read, made.target) for (read, _), made in zip(pairs, copies)]
        self._values = self.values(plan)
        made: torch.futures.Future[None] = torch.futures.Future()
        made.set_result(None)
        return made

    def bind(self, planner: LoadPlanner) -> None:
        """Plain copies of what was checked."""
        for read, value in self._tensors:
            target = planner.resolve_tensor(read).detach()
            put(target, value)
            planner.commit_tensor(read, target)
        for read, value in self._values:
            give_value(planner, read, value)


def _hand_over(obj: Any, state: Any, key: str) -> None:
    try:
        obj.load_state_dict(state)
    except Exception as error:
        raise PartialRestoreError(
            "an object refused its state after others were restored",
            reason="dcp-object",
            where=repr(key),
            found=f"{type(error).__name__}: {error}",
            do="load another checkpoint into fresh objects, or stop",
            changed=(key,),
        ) from error


def _report(reader: _StagedReader, planner: LoadPlanner) -> RestoreReport:
    info = reader.checkpoint.info
    asked: Mapping[str, Any] = getattr(planner, "state_dict", {})
    paths: Mapping[str, Any] = getattr(planner, "mappings", {})
    stored = reader.items
    return RestoreReport(
        info=info,
        step=info.step or 0,
        matched=tuple(reader.matched),
        missing=tuple(_name(paths.get(fqn, (fqn,))) for fqn in asked if fqn not in stored),
        unexpected=tuple(item.name for fqn, item in stored.items() if fqn not in asked),
    )


def _name(path: Iterable[object]) -> str:
    return "/".join(escape_key(str(part)) for part in path)
