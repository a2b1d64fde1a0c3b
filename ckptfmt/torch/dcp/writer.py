"""`CkptfmtWriter`: torch's planners write to our store; what is committed is one checkpoint.

The coordinator announces the save and sends its ticket with the plans; each rank writes data files and
gives back a fragment; the coordinator adds the tree (names, values, containers) and commits, which
it is asked to only if every rank succeeded. Spec: 08-protocol.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from ckptfmt.engine import (
    PartsTicket,
    SaveOptions,
    SaveRequest,
    Store,
    abort_parts,
    begin_parts,
    commit_parts,
    parse_where,
    plan_part,
    settle_call,
    write_part,
)
from ckptfmt.errors import CheckpointError, UsageError
from ckptfmt.events import Progress
from ckptfmt.format import CHUNK_NBYTES_DEFAULT, pack_value, parse_value
from ckptfmt.storage import Backend
from ckptfmt.torch.dcp.fragment import (
    coordinator_tree,
    merged_skeleton,
    rank_tree,
    skeleton_of_plan,
)
from ckptfmt.torch.dcp.names import rank_name
from ckptfmt.torch.dcp.objects import parse_object
from ckptfmt.torch.dcp.reader import Where
from ckptfmt.torch.dcp.stager import Lease, stage
from ckptfmt.types import At, CheckpointInfo, DigestName, IfExists, Plain

_NOTHING: Mapping[str, Any] = {}
_LONG_NBYTES = 64 << 20
"""Of a rank's data: to write it takes some tenths of a second."""


@contextmanager
def _without_gc() -> Iterator[None]:
    """Thousands of small objects and not one cycle: the passes over them, and over all of torch, took
    a third of the time (5,000 tensors of 64 bytes: 0.55 s of CPU time, 0.40 s without)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CkptfmtWriter(StorageWriter, AsyncStager):  # type: ignore[misc]
    """Writes one checkpoint for `torch.distributed.checkpoint.save` or `async_save`. Can be pickled.

    Args:
        path: A directory, a URL or a Store; `checkpoint_id=` of `dcp.save` stands for it.
        step, name, metadata, metrics, if_exists, codec, chunk_nbytes, digest, bases, durable,
            timeout_s, progress: As for `ckptfmt.save`.

    It stages for `async_save` itself, in host memory that is kept for the next save. `info` is what
    was committed, on the coordinator; `metadata.storage_data`, which `dcp.save` returns on every
    rank, is the same. Without collectives each rank saves a checkpoint of its own, called
    `rank00003.` and the name.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        path: Where,
        *,
        step: int | None = None,
        name: str | None = None,
        metadata: Mapping[str, Plain] = _NOTHING,
        metrics: Mapping[str, float] = _NOTHING,
        if_exists: IfExists | None = None,
        codec: str | Mapping[str, str] = "raw",
        chunk_nbytes: int | Mapping[str, int] = CHUNK_NBYTES_DEFAULT,
        digest: DigestName = "xxh3-128",
        bases: Sequence[At] | None = None,
        durable: bool = True,
        timeout_s: float = 1800.0,
        progress: Progress = False,
    ) -> None:
        self.checkpoint_id: Where = path
        self.info: CheckpointInfo | None = None
        self._step, self._name = step, name
        self._settings: dict[str, Any] = {
            "metadata": metadata,
            "metrics": metrics,
            "if_exists": if_exists,
            "options": SaveOptions(codec, chunk_nbytes, digest, durable),
            "bases": bases,
            "timeout_s": timeout_s,
            "progress": progress,
        }
        self._rank: int | None = None
        self._save: _Save | None = None
        self._lease: Lease | None = None
        self._resumes_gc = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_save": None, "_lease": None, "_resumes_gc": False}

    def reset(self, checkpoint_id: Where | None = None) -> None:
        """Begin anew; a save that did not end is given up, and nothing of it is visible."""
        if self._save is not None:
            self._save.abort()
        self._save, self.info = None, None
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        """Whether this is a place for a store."""
        try:
            parse_where(checkpoint_id)
        except CheckpointError:
            return False
        return True

    def storage_meta(self) -> StorageMeta:
        path = self.checkpoint_id
        return StorageMeta(checkpoint_id=path.url if isinstance(path, Store) else str(path))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        alone = not kwargs.get("use_collectives", True)
        self._rank = int(kwargs.get("rank", 0)) if alone else None
        self.settled()  # what is wrong with the arguments is told on every rank, before the plan

    def settled(self) -> tuple[Backend, SaveRequest]:
        """Where, and what: the arguments, checked."""
        backend, request = settle_call(
            {}, self.checkpoint_id, self._step, self._name, **self._settings
        )
        if self._rank is not None:
            own = rank_name(self._rank, None, request.name)
            request = dataclasses.replace(request, name=own)
        return backend, request

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: announce the save. Its ticket goes to the ranks with their plans."""
        if not all(plan.usable for plan in plans):
            _refuse_kept_plans()
        backend, request = self.settled()
        with _without_gc():
            skeleton = merged_skeleton(plans)
        begun = begin_parts(backend, request)
        if isinstance(begun, CheckpointInfo):
            self.info = begun
            return [dataclasses.replace(plan, items=[], storage_data=None) for plan in plans]
        self._save = _Save(self, backend, begun, skeleton, len(plans) + 1)
        ticket = begun.to_bytes()
        return [
            dataclasses.replace(plan, storage_data=pack_value([ticket, rank, len(plans) + 1]))
            for rank, plan in enumerate(plans, 1)
        ]

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """On every rank: write what the plan says; durable when the future is done.

        Raises:
            UsageError: kind `usage-dcp-plan-caching`, by the first save already; else as a save.
        """
        made: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        try:
            if _keeps_plans(planner):
                _refuse_kept_plans()
            made.set_result([] if plan.storage_data is None else [self._written(plan, planner)])
        finally:
            if self._lease is not None:
                self._lease.release()
                self._lease = None
        return made

    def _written(self, plan: SavePlan, planner: SavePlanner) -> WriteResult:
        backend, request = self.settled()
        data, rank, size = parse_value(plan.storage_data)
        ticket = PartsTicket.of_bytes(data, progress=request.progress)
        # A rank that is alone has the coordinator's already.
        known = self._save.skeleton if self._save is not None and size == 2 else None
        skeleton = skeleton_of_plan(plan) if known is None else known
        with _without_gc():
            tree = rank_tree(plan, planner, skeleton)
            part = plan_part(tree.flat, ticket, rank, size)
        with self._writing(int(part.pieces.plan.tree.region_nbytes.sum())):
            fragment = write_part(backend, part)
        sent = pack_value([fragment, tree.objects])
        return WriteResult(MetadataIndex(""), len(sent), sent)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around a whole save: no pass of the garbage collector while torch plans. It makes twenty
        objects of each tensor, and not one cycle; the pass that they set off goes over all of torch
        (5,000 tensors: 0.14 s, of 0.33 s CPU time)."""
        self._resumes_gc = gc.isenabled()
        try:
            with _without_gc():
                yield
        finally:
            self._resumes_gc = False

    @contextmanager
    def _writing(self, nbytes: int) -> Iterator[None]:
        """What takes long goes on with the collector: other threads may need it."""
        if not (self._resumes_gc and nbytes >= _LONG_NBYTES):
            yield
            return
        gc.enable()
        try:
            yield
        finally:
            gc.disable()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after every rank has written: commit."""
        if self.info is None:
            save = self._save
            assert save is not None
            self.info = save.commit(metadata, [r.storage_data for mine in results for r in mine])
            self._save = None
        metadata.storage_data = self.info

    # -- staging --------------------------------------------------------------------------------

    def stage(self, state_dict: Any) -> Any:
        """A copy on the host, for `dcp.async_save`; made before this returns."""
        made, self._lease = stage(state_dict)
        return made

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """The memory is the process's; nothing to give back."""


class _Save:
    """The coordinator's side of a save under way."""

    def __init__(
        self, writer: CkptfmtWriter, backend: Backend, ticket: PartsTicket, skeleton: Any, size: int
    ) -> None:
        self.ticket, self.skeleton = ticket, skeleton
        self._backend, self._size = backend, size
        # A rank's error is not told to a writer: the save ends with it, or with its next use.
        self._abort = weakref.finalize(writer, abort_parts, backend, ticket)

    def abort(self) -> None:
        self._abort()

    def commit(self, metadata: Metadata, sent: Sequence[bytes]) -> CheckpointInfo:
        rows = [parse_value(data) for data in sent]
        with _without_gc():
            objects = dict(parse_object(row) for _, mine in rows for row in mine)
            flat = coordinator_tree(self.skeleton, metadata, objects)
            part = plan_part(flat, self.ticket, 0, self._size)
        fragments = [write_part(self._backend, part), *(row[0] for row in rows)]
        self._abort.detach()  # from here on the commit ends the save itself
        return commit_parts(self._backend, self.ticket, fragments)


def _keeps_plans(planner: SavePlanner) -> bool:
    return bool(getattr(planner, "_enable_plan_caching", False))


def _refuse_kept_plans() -> NoReturn:
    """torch compares a plan with the kept one by its items alone, and where they are equal drops what
    came with the plan: our ticket, without which a rank would write for a save that is over, and the
    paths of the items, so that a tree that was renamed would be stored under its old names."""
    raise UsageError(
        "the planner keeps plans of an earlier save",
        reason="dcp-plan-caching",
        found="enable_plan_caching=True",
        do="leave it out: a kept plan has the ticket of the save that it was made for, and paths that "
        "are not compared; nothing was committed",
    )
