"""Restoring: the conductor. open -> index -> plan -> read -> decode -> bind. Spec: 08-protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ckptfmt import config
from ckptfmt.engine.adapter import ORDER_TENSOR, MatchBy, Target
from ckptfmt.engine.bind import Comparison, Staged
from ckptfmt.engine.dispatch import adapter_of, keep_generators
from ckptfmt.engine.group import Meeting
from ckptfmt.engine.lineage import remember
from ckptfmt.engine.load import check_limit
from ckptfmt.engine.open import Checkpoint
from ckptfmt.engine.overlap import disagreeing, memories_of
from ckptfmt.engine.ranks import PerRankTarget
from ckptfmt.engine.rename import Rename, renamed_keys, renamed_leaves, renamer
from ckptfmt.engine.report import make_report, mismatch_error
from ckptfmt.engine.select import Matcher
from ckptfmt.engine.source import BoxesOnDemand, CheckpointSource, GroupedArrays, Source, TreeSource
from ckptfmt.engine.targets import make_target
from ckptfmt.engine.tree import peers_of, walk
from ckptfmt.errors import CheckpointError, MismatchError, PartialRestoreError, UsageError
from ckptfmt.events import Progress
from ckptfmt.format import pack_array
from ckptfmt.reports import RestoreReport
from ckptfmt.types import Select

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What a restore is asked for; the words of `ckptfmt.restore`."""

    names: Select | None = None
    rename: Rename = field(default_factory=dict)
    strict: bool = True
    allow_missing: Select = ()
    allow_unexpected: Select = ()
    allow_cast: bool | Select = False
    match_by: MatchBy = "name"
    atomic: bool = True
    verify: bool = True
    max_nbytes: int | None = None
    progress: Progress = False
    validate: Callable[[Mapping[str, Any]], None] | None = None
    """Given what is staged, by name, before any target changes; raises to reject it."""
    meeting: Meeting | None = None
    """Of the ranks that restore together."""


# -- restore: in place ---------------------------------------------------------------------------


def source_of(source: Checkpoint | Mapping[str, Any]) -> Source:
    if isinstance(source, Checkpoint):
        return CheckpointSource(source)
    return TreeSource(source)


def restore_tree(target: object, source: Source, request: RestoreRequest) -> RestoreReport:
    """Fill a target in place: everything that was asked for, or nothing.

    In a group no rank touches a target before all of them have read and checked all, and an error
    of one while it binds makes all of them go back.
    """
    ready = _in_step(request, lambda: _prepare(target, source, request))
    put_back = keep_generators()  # callers' code may draw while it takes its state
    try:
        _in_step(request, ready.bind)
    except BaseException as error:
        try:
            ready.undo(error)
        finally:
            put_back()
        raise
    if isinstance(source, CheckpointSource):
        checkpoint = source.checkpoint
        remember(checkpoint.backend, checkpoint.info.name, checkpoint.index.about.tree_digest)
    return ready.report


def _in_step(request: RestoreRequest, do: Callable[[], T]) -> T:
    """Do it; in a group, return only when all ranks have done theirs, and raise if one has not."""
    if request.meeting is None:
        return do()
    made: list[T] = []

    def mine() -> bytes:
        made.append(do())
        return b""

    request.meeting.round(mine)
    return made[0]


@dataclass(slots=True)
class _Ready:
    """A restore that has been compared and checked: nothing has been touched."""

    report: RestoreReport
    targets: Sequence[Target]
    comparison: Comparison
    source: Source
    request: RestoreRequest
    staged: Staged | None
    """None: the state is read a second time, in bounded memory."""
    _bound: list[Target] = field(default_factory=list)

    def bind(self) -> None:
        if self.staged is None:
            _bind_in_groups(self.targets, self.comparison, self.source, self.request)
            self._bound += self.targets
            return
        for target in self.targets:
            self._bound.append(target)
            try:
                target.bind(self.staged)
            except BaseException as error:
                error.add_note(f"while {target.name!r} was restored; what was bound is rolled back")
                raise

    def undo(self, error: BaseException) -> None:
        """What `bind` has done, it or another rank having failed."""
        if self.staged is not None:
            _roll_back(self._bound, error)
        elif self._bound:  # all was well here, and plain copies keep no old values
            undoable = [t for t in self._bound if self.request.atomic and t.order < ORDER_TENSOR]
            _roll_back(undoable, error)
            changed = [t.name for t in self._bound if t not in undoable]
            raise PartialRestoreError(
                "restore failed on another rank, after this one had bound in bounded memory",
                reason="not-atomic",
                found=f"{type(error).__name__}: {error}",
                do="restore another checkpoint, or stop; `changed` names what holds new values",
                changed=tuple(changed),
            ) from error


def _prepare(target: object, source: Source, request: RestoreRequest) -> _Ready:
    """Everything is compared, read and checked."""
    meeting = request.meeting
    rank, size = (0, 1) if meeting is None else (meeting.rank, meeting.size)
    targets = make_targets(target, rank, size)
    comparison, report = compare(targets, source, request, read=True)
    error = mismatch_error(report, request, [*comparison.strangers.values()])
    if error is not None:
        raise error
    if meeting is None:
        _refuse_parts(comparison)
    ready = _Ready(report, targets, comparison, source, request, None)
    if request.atomic:
        ready.staged = _stage(targets, comparison, source, request)
    else:
        check_limit(source.nbytes(list(comparison.tensor_rows())), request.max_nbytes)
        if request.validate is not None:
            _check_all(comparison, source, request, list(comparison.tensor_rows()))
    return ready


def _refuse_parts(comparison: Comparison) -> None:
    """A process alone has no use for parts of tensors."""
    if comparison.boxes:
        raise UsageError(
            "this rank holds a part of the tensor only",
            reason="sharded-alone",
            where=repr(next(iter(comparison.boxes))),
            do="pass group=, and let every rank of it call",
        )


def plan_tree(
    target: object, source: Source, request: RestoreRequest, of: tuple[int, int] | None = None
) -> RestoreReport:
    """What `restore_tree` would do; no tensor's data is read, and the report has what it would
    raise. `of`: this rank and how many there are, in a group; no other rank takes part."""
    comparison, report = compare(make_targets(target, *(of or (0, 1))), source, request)
    error: CheckpointError | None = mismatch_error(
        report, request, [*comparison.strangers.values()]
    )
    if error is None:
        try:
            if of is None:
                _refuse_parts(comparison)
            check_limit(source.nbytes(list(comparison.tensor_rows())), request.max_nbytes)
        except UsageError as refusal:
            error = refusal
    return replace(report, error=error)


def make_targets(target: object, rank: int = 0, size: int = 1) -> list[Target]:
    """The targets of a tree, in the order in which they are bound."""
    visits = list(walk(target, rank=rank))
    peers = peers_of(visits)
    made: list[Target] = []
    for visit in visits:
        if visit.kind == "per_rank":
            made.append(PerRankTarget(visit.name, rank=rank, size=size))
            continue
        mine = peers.get(id(adapter_of(visit.obj)), []) if visit.kind != "value" else []
        made.append(make_target(visit, mine))
    return sorted(made, key=lambda t: t.order)


def compare(
    targets: Sequence[Target], source: Source, request: RestoreRequest, *, read: bool = False
) -> tuple[Comparison, RestoreReport]:
    """Both sides, by name, before anything is touched.

    `read`: where digests do not tell whether two stored tensors are equal, because they are cut
    differently, their bytes are compared.
    """
    comparison, renamed = stored_side(source, request)
    for target in targets:
        missing = len(comparison.missing_names)
        answered = comparison.answered()
        target.compare(comparison)
        comparison.take_empty(target.name)
        missing = len(comparison.missing_names) - missing
        if missing and comparison.answered() == answered:
            comparison.found_nothing(target.name, missing)
    _compare_ties(targets, comparison, source)
    for names, one, other in comparison.unsettled:
        if not read:
            comparison.tie(names[1], "stored twice, cut differently: restore compares the bytes")
        elif not _equal_bytes(source, one, other, request):
            _refuse_tie(comparison, names)
    return comparison, make_report(comparison, source, renamed)


def stored_side(source: Source, request: RestoreRequest) -> tuple[Comparison, dict[str, str]]:
    leaves, renamed = renamed_leaves(source.leaves(request.names), request.rename)
    comparison = Comparison(
        leaves,
        cast_rule(request.allow_cast),
        wanted=Matcher(request.names),
        containers=renamed_keys(source.containers(), request.rename),
        attributes=renamed_keys(source.container_attributes(), request.rename),
        renamed=renamer(request.rename),
        match_by=request.match_by,
    )
    return comparison, renamed


def cast_rule(allow_cast: bool | Select) -> Callable[[str], bool]:
    if isinstance(allow_cast, bool):
        return lambda name: allow_cast
    return Matcher(allow_cast)


def _compare_ties(targets: Sequence[Target], comparison: Comparison, source: Source) -> None:
    """One array at two names takes one value; a stored tie whose targets are two is reported."""
    one: dict[str, object] = {}
    by_identity: dict[object, list[str]] = {}
    for target in targets:
        identities: Mapping[str, object] = getattr(target, "identities", {})
        for name, identity in identities.items():
            if identity is not None and name in comparison.sources:
                one[name] = identity
                by_identity.setdefault(identity, []).append(name)
    for names in by_identity.values():
        leaves = [comparison.leaf(comparison.sources[name]) for name in names]
        rows = [leaf.tensor for leaf in leaves]
        if any(leaf.value != leaves[0].value for leaf in leaves[1:]):
            _refuse_tie(comparison, names)
        for row in sorted(set(rows[1:]) - {rows[0]}):
            same = source.same(rows[0], row)
            if same is None:
                comparison.unsettled.append((names, rows[0], row))
            elif not same:
                _refuse_tie(comparison, names)
    for names in comparison.tensor_rows().values():
        mine = [name for name in names if name in one]
        for name in mine[1:]:
            if one[name] != one[mine[0]]:
                comparison.tie(name, f"was one tensor with {mine[0]!r}, is filled on its own")


def _refuse_tie(comparison: Comparison, names: Sequence[str]) -> None:
    comparison.mismatch(
        names[1],
        f"one value for {' and '.join(map(repr, names[:5]))}, which are one array",
        "two stored values",
    )


def _equal_bytes(source: Source, one: int, other: int, request: RestoreRequest) -> bool:
    found = source.tensors([one, other], mode="auto", verify=request.verify, progress=False)
    return bytes(pack_array(found[one])) == bytes(pack_array(found[other]))


def _stage(
    targets: Sequence[Target], comparison: Comparison, source: Source, request: RestoreRequest
) -> Staged | None:
    """Read and check everything before the first target is touched.

    Where memory does not hold the state twice more (the new values and the old ones), this pass
    checks every byte and keeps none: None is returned, and a second pass reads again and binds.
    """
    rows = list(comparison.tensor_rows())
    wanted = comparison.wanted_boxes()
    nbytes = source.nbytes(rows) + sum(
        math.prod(box[1]) * 8 for boxes in wanted.values() for _, box in boxes
    )
    check_limit(nbytes, request.max_nbytes)
    if 2 * nbytes > config.current().staging_nbytes:
        _check_all(comparison, source, request, rows)
        return None
    arrays = source.tensors(rows, mode="auto", verify=request.verify, progress=request.progress)
    boxes = BoxesOnDemand(source, wanted, verify=request.verify).read()
    staged = Staged(comparison, arrays, boxes=boxes)
    staged.cast_all()
    _refuse_overlaps(targets, staged)
    if request.validate is not None:
        request.validate(staged.by_name())
    return staged


def _refuse_overlaps(targets: Sequence[Target], staged: Staged) -> None:
    """Before the first is touched: targets that share memory are given one value for each byte."""
    found = disagreeing(memories_of(targets), staged)
    if found is not None:
        name, others = found
        raise MismatchError(
            "targets share memory, and what is stored for them differs there",
            reason="overlap",
            where=repr(name),
            found="its elements lie over each other"
            if not others
            else f"memory shared with {', '.join(map(repr, others[:5]))}",
            do="restore into tensors with memory of their own, or take part with names=",
        )


def _check_all(
    comparison: Comparison, source: Source, request: RestoreRequest, rows: Sequence[int]
) -> None:
    """The checking pass: every byte is read and verified, every cast tried, nothing kept."""
    boxes = BoxesOnDemand(source, comparison.wanted_boxes(), verify=True)
    with GroupedArrays(source, rows, verify=True, progress=request.progress) as arrays:
        for group in arrays.groups:
            arrays.read(group)
        for name in boxes:
            boxes[name]
        staged = Staged(comparison, arrays, boxes=boxes)
        for name in comparison.casts:
            if comparison.sources.get(name) in comparison.boxes:
                staged.parts(name)
            else:
                staged[name]
        if request.validate is not None:
            request.validate(staged.by_name())


def _roll_back(bound: Sequence[Target], cause: BaseException) -> None:
    failed: list[tuple[str, BaseException]] = []
    interrupt: BaseException | None = None
    for target in reversed(bound):
        try:
            try:
                target.undo()
            except Exception:
                raise
            except BaseException as error:  # Ctrl-C: half a roll-back is the worst of all
                interrupt = error
                target.undo()
        except BaseException as error:
            failed.append((target.name, error))
    if failed:
        raise PartialRestoreError(
            "restore failed, and what it had changed could not all be put back",
            reason="rollback",
            where=", ".join(repr(name) for name, _ in failed),
            found=f"{type(failed[0][1]).__name__}: {failed[0][1]}",
            do="restore another checkpoint into fresh objects, or stop",
            changed=tuple(name for name, _ in failed),
        ) from cause
    if interrupt is not None:
        raise interrupt from cause


def _bind_in_groups(
    targets: Sequence[Target], comparison: Comparison, source: Source, request: RestoreRequest
) -> None:
    """One pass in bounded memory: tensors are read in groups, as the targets ask for them.

    If it is to be atomic, the callers' code and optimizers, which come first, still are: they keep
    their old state. What follows them are plain copies of what was checked.
    """
    rows = list(comparison.tensor_rows())
    boxes = BoxesOnDemand(source, comparison.wanted_boxes(), verify=request.verify)
    changed: list[str] = []
    with GroupedArrays(source, rows, verify=request.verify, progress=request.progress) as arrays:
        staged = Staged(comparison, arrays, boxes=boxes, undoable=False)
        _refuse_overlaps(targets, staged)
        arrays.given = 0  # to targets, so far
        for position, target in enumerate(targets):
            staged.undoable = request.atomic and target.order < ORDER_TENSOR
            try:
                target.bind(staged)
            except BaseException as error:
                if staged.undoable:
                    _roll_back(targets[: position + 1], error)
                elif isinstance(error, Exception):
                    _partial(target, changed, arrays.given, error)
                raise
            changed.append(target.name)


def _partial(target: Target, changed: list[str], given: int, error: Exception) -> None:
    if not changed and not given:
        raise error
    raise PartialRestoreError(
        "restore stopped half-way, in bounded memory",
        reason="not-atomic",
        where=repr(target.name),
        found=f"{type(error).__name__}: {error}",
        do="restore another checkpoint, or stop; `changed` names what may hold new values",
        changed=(*changed, target.name),
    ) from error
