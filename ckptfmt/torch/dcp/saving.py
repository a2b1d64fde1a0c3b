"""`ckptfmt.torch.dcp.save` and `async_save`: torch's planners, our store, one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlanner

from ckptfmt.engine import SaveFuture, follow, parse_where, settle
from ckptfmt.events import Progress
from ckptfmt.format import CHUNK_NBYTES_DEFAULT
from ckptfmt.torch.dcp.group import Group, background_group, error_of, is_alone, quietly, unwrapped
from ckptfmt.torch.dcp.planners import TreeSavePlanner
from ckptfmt.torch.dcp.reader import Where
from ckptfmt.torch.dcp.writer import CkptfmtWriter
from ckptfmt.types import At, CheckpointInfo, DigestName, IfExists, Plain

_NOTHING: Mapping[str, Any] = {}


def save(
    state_dict: dict[str, Any],
    path: Where,
    *,
    step: int | None = None,
    planner: SavePlanner | None = None,
    process_group: Group = None,
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
) -> CheckpointInfo:
    """Save a state dict; every rank of the group calls. Committed and durable when it returns.

    Each rank writes its shards; what several ranks have is written once; the first rank commits,
    if all have written.

    Args:
        state_dict: As for `torch.distributed.checkpoint.save`: tensors, DTensors, values, containers of
            these, and at the top objects with a `state_dict`.
        path: A directory, a URL or a Store.
        planner: None: torch's default planner, but that keys and kinds of containers are kept.
        process_group: None: the default group; without one this process is alone.
        step, name, metadata, metrics, if_exists, codec, chunk_nbytes, digest, bases, durable,
            timeout_s, progress: As for `ckptfmt.save`; equal on all ranks.
    Returns:
        What was committed, on every rank.
    Raises:
        UsageError: Something cannot be carried, on whichever rank; its path is named.
        ExistsError: The name holds another tree.
        StorageError: The medium failed on some rank. Nothing is visible.
    """
    writer = CkptfmtWriter(
        path, step=step, name=name, metadata=metadata, metrics=metrics, if_exists=if_exists,
        codec=codec, chunk_nbytes=chunk_nbytes, digest=digest, bases=bases, durable=durable,
        timeout_s=timeout_s, progress=progress,
    )  # fmt: skip
    settle(parse_where(path)[0].backend)
    try:
        with unwrapped(), quietly(), writer.planning():
            made = dcp.save(
                state_dict,
                storage_writer=writer,
                planner=TreeSavePlanner() if planner is None else planner,
                process_group=process_group,
                no_dist=is_alone(),
            )
    except BaseException:
        writer.reset()
        raise
    info: CheckpointInfo = made.storage_data
    return info


def async_save(
    state_dict: dict[str, Any],
    path: Where,
    *,
    step: int | None = None,
    planner: SavePlanner | None = None,
    process_group: Group = None,
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
) -> SaveFuture:
    """Save a state dict in the background; returns once it is copied: it may change then.

    One save is in flight per store. The arguments are those of `save`.

    Args:
        process_group: The ranks talk in a thread, while the training goes on: a group of CPU tensors
            (gloo) that nothing else uses meanwhile. None: one of all ranks, made by the first call.

    Raises:
        Nothing of the save itself: an error is the future's `result()`, else raised by the next save
        to that store.
    """
    writer = CkptfmtWriter(
        path, step=step, name=name, metadata=metadata, metrics=metrics, if_exists=if_exists,
        codec=codec, chunk_nbytes=chunk_nbytes, digest=digest, bases=bases, durable=durable,
        timeout_s=timeout_s, progress=progress,
    )  # fmt: skip
    backend, request = writer.settled()
    settle(backend)
    with quietly():
        task = dcp.async_save(
            state_dict,
            storage_writer=writer,
            planner=TreeSavePlanner() if planner is None else planner,
            process_group=background_group() if process_group is None else process_group,
            no_dist=is_alone(),
        )

    def outcome() -> CheckpointInfo:
        try:
            made: CheckpointInfo = task.result().storage_data
        except BaseException as error:
            writer.reset()
            if isinstance(error, dcp.CheckpointException):
                raise error_of(error) from error
            raise
        return made

    return follow(backend.url, request.name, task, outcome)
