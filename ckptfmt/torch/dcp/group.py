"""torch's process group around a call: who is alone, whose error is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from ckptfmt.errors import CheckpointError

Group: TypeAlias = "dist.ProcessGroup | None"


def is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


_background: list[tuple[Any, Any]] = []
"""(the default group, ours beside it)."""


def background_group() -> Group:
    """All ranks, for talk in a thread: two threads that use one group mix up what they send."""
    if is_alone():
        return None
    if not _background or _background[0][0] is not dist.group.WORLD:
        _background[:] = [(dist.group.WORLD, dist.new_group(backend="gloo"))]
    return _background[0][1]


@contextmanager
def unwrapped() -> Iterator[None]:
    """An error of ours that a rank had, instead of torch's exception around it (which is no
    `Exception`, so that `except Exception` misses it)."""
    try:
        yield
    except CheckpointException as error:
        found = error_of(error)
        raise found from error


def error_of(error: CheckpointException) -> BaseException:
    """The error of the lowest rank that had one of ours, with a note that names the ranks."""
    mine: dict[int, CheckpointError] = {
        rank: failure[0]
        for rank, failure in sorted(error.failures.items())
        if isinstance(failure[0], CheckpointError)
    }
    if not mine:
        other: BaseException = error
        return other
    found = next(iter(mine.values()))
    if len(error.failures) > 1 or next(iter(mine)) > 0:
        found.add_note(f"on rank {', '.join(map(str, sorted(error.failures)))}")
    return found


@contextmanager
def quietly() -> Iterator[None]:
    """Without torch's warning that a process is alone, which is no news to a caller who is."""
    if not is_alone():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
