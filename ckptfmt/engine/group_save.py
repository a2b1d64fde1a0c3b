"""Saving by several ranks together: the conductor. Three rounds, then it is committed or nowhere.

    begin     rank 0 announces the save and chooses its bases
    share     every rank says what it holds; rank 0 chooses who writes what of it
    commit    every rank writes; rank 0 merges and commits

Spec: 08-protocol §8.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

from ckptfmt.engine.group import Meeting, Ranks
from ckptfmt.engine.lineage import remember
from ckptfmt.engine.parts import (
    Part,
    PartsTicket,
    abort_parts,
    begin_parts,
    commit_parts,
    plan_part,
    share_parts,
    write_part,
)
from ckptfmt.engine.plan import SavePlan
from ckptfmt.engine.request import SaveRequest
from ckptfmt.engine.tree import flatten
from ckptfmt.errors import UsageError
from ckptfmt.format import pack_value, parse_value
from ckptfmt.storage import Backend
from ckptfmt.types import CheckpointInfo


def save_in_group(tree: object, backend: Backend, request: SaveRequest) -> CheckpointInfo:
    """Save a tree whose parts the ranks of `request.ranks` hold; all of them call.

    Raises:
        ConflictError: kind `conflict-rank-late`, `conflict-rank-failed`: some rank did not take part.
        MismatchError: Ranks disagree about a leaf. Else as a save; all ranks raise.
    """
    prepared = prepare_in_group(tree, backend, request)
    return prepared.finish() if isinstance(prepared, PreparedPart) else prepared


@dataclass(slots=True)
class PreparedPart:
    """A rank's part of a save that is planned and shared out: no data has been written.

    It ends by `finish` or by `abandon`.
    """

    backend: Backend
    request: SaveRequest
    plan: SavePlan
    part: Part
    shares: bytes
    _meeting: Meeting
    _save: _Save

    def finish(self) -> CheckpointInfo:
        """stage -> encode -> write, then commit on rank 0."""
        part = replace(self.part, pieces=replace(self.part.pieces, plan=self.plan))
        return self._last_round(lambda: write_part(self.backend, part, self.shares))

    def abandon(self, error: BaseException) -> None:
        """This rank cannot go on: all of them hear of it. Raises the error."""

        def failed() -> bytes:
            raise error

        self._last_round(failed)

    def _last_round(self, mine: Any) -> CheckpointInfo:
        def write() -> bytes:
            fragment: bytes = mine()
            if self._save.ticket is None:
                self.request.before_commit()
            return fragment

        with self._save, self._meeting:
            info = _parse_info(self._meeting.round(write, self._save.commit))
        remember(self.backend, info.name, bytes.fromhex(info.digest))
        return info


@dataclass(slots=True)
class _Save:
    """Rank 0's side: an error anywhere before the commit gives the save up. Elsewhere it is empty."""

    backend: Backend
    request: SaveRequest
    ticket: PartsTicket | None = None
    _is_over: bool = field(default=False)

    def begin(self, wishes: Sequence[bytes]) -> bytes:
        for rank, wish in enumerate(wishes):
            if wish != wishes[0]:
                raise UsageError(
                    "ranks do not save the same checkpoint",
                    reason="group-call",
                    where=f"rank {rank}",
                    expected=parse_value(wishes[0]),
                    found=parse_value(wish),
                    do="call with the same step, name and options on every rank",
                )
        begun = begin_parts(self.backend, self.request)
        if isinstance(begun, CheckpointInfo):
            return pack_value({"kept": _pack_info(begun)})
        self.ticket = begun
        return pack_value({"ticket": begun.to_bytes()})

    def share(self, claims: Sequence[bytes]) -> bytes:
        assert self.ticket is not None
        return share_parts(self.backend, self.ticket, claims)

    def commit(self, fragments: Sequence[bytes]) -> bytes:
        assert self.ticket is not None
        self._is_over = True  # by itself, whatever comes of it
        return _pack_info(commit_parts(self.backend, self.ticket, fragments))

    def __enter__(self) -> _Save:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and self.ticket is not None and not self._is_over:
            self._is_over = True
            abort_parts(self.backend, self.ticket)


def prepare_in_group(
    tree: object, backend: Backend, request: SaveRequest
) -> PreparedPart | CheckpointInfo:
    """begin and share: what all ranks hold fits together, and each knows what it is to write."""
    assert request.ranks is not None
    save = _Save(backend, request)
    meeting = Meeting(request.ranks, backend, request.timeout_s, what=f"the save of {request.name}")
    try:
        with save:
            begun = parse_value(meeting.round(partial(_wish, request), save.begin))
            if "kept" in begun:
                meeting.close()
                return _parse_info(begun["kept"])
            ticket = save.ticket or PartsTicket.of_bytes(begun["ticket"], progress=request.progress)
            part: list[Part] = []

            def claim() -> bytes:
                flat = flatten(tree, rank=meeting.rank)
                part.append(plan_part(flat, ticket, meeting.rank, meeting.size))
                return part[0].claim()

            shares = meeting.round(claim, save.share)
    except BaseException:
        meeting.close()
        raise
    plan = part[0].pieces.plan
    return PreparedPart(backend, request, plan, part[0], shares, meeting, save)


def fail_in_group(ranks: Ranks, backend: Backend, error: BaseException, timeout_s: float) -> None:
    """This rank's call is wrong before it began: the others hear of it. Raises the error."""

    def failed() -> bytes:
        raise error

    with Meeting(ranks, backend, timeout_s) as meeting:
        meeting.round(failed)


def _wish(request: SaveRequest) -> bytes:
    options = asdict(request.options)
    return pack_value(
        {"name": request.name, "step": request.step, "if_exists": request.if_exists, **options}
    )


def _pack_info(info: CheckpointInfo) -> bytes:
    made = {**asdict(info), "created": info.created.isoformat()}
    return pack_value({key: dict(v) if key == "metadata" else v for key, v in made.items()})


def _parse_info(data: bytes) -> CheckpointInfo:
    table: dict[str, Any] = parse_value(data)
    table["created"] = datetime.fromisoformat(table["created"])
    return CheckpointInfo(**table)
