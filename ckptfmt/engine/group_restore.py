"""Restoring by several ranks together: the same checkpoint on all of them, or nothing on any.

Spec: 08-protocol §8.9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptfmt.engine.group import Meeting, Ranks
from ckptfmt.engine.restore import RestoreRequest, restore_tree
from ckptfmt.engine.source import CheckpointSource, Source
from ckptfmt.errors import ConflictError
from ckptfmt.format import pack_value, parse_value
from ckptfmt.reports import RestoreReport
from ckptfmt.storage import Backend

TIMEOUT_S = 1800.0
"""How long ranks wait for each other."""


def restore_in_group(
    target: object,
    open_source: Callable[[], Source],
    backend: Backend,
    request: RestoreRequest,
    ranks: Ranks,
) -> RestoreReport:
    """Fill the targets of all ranks, or of none. Each reads what it holds, and no more.

    Raises:
        ConflictError: Ranks see different checkpoints, or some rank did not take part.
        MismatchError, CorruptError: On any rank: on all of them. Else as `restore_tree`.
    """
    with Meeting(ranks, backend, TIMEOUT_S, what="a restore") as meeting:
        opened: list[Source] = []

        def look() -> bytes:
            opened.append(open_source())
            return _seen(opened[0])

        meeting.round(look, _agree)
        return restore_tree(target, opened[0], replace(request, meeting=meeting))


def _seen(source: Source) -> bytes:
    if not isinstance(source, CheckpointSource):
        return pack_value(["a tree in memory", ""])
    index, info = source.checkpoint.index, source.checkpoint.info
    return pack_value([info.name, index.about.tree_digest.hex()])


def _agree(seen: Sequence[bytes]) -> bytes:
    if len(set(seen)) > 1:
        by_checkpoint: dict[str, list[int]] = {}
        for rank, data in enumerate(seen):
            name, digest = parse_value(data)
            by_checkpoint.setdefault(f"{name} ({digest[:8]})", []).append(rank)
        raise ConflictError(
            "ranks see different checkpoints",
            reason="rank-view",
            found="; ".join(
                f"{what} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}"
                + (", ..." if len(ranks) > 8 else "")
                for what, ranks in by_checkpoint.items()
            ),
            do="pass step=, or restore when all ranks see the same store; nothing was restored",
        )
    return b""
