"""Restoring: the conductor. open -> index -> plan -> read -> decode -> bind. Spec: 08-protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt import config
from ckptfmt.engine.adapter import ORDER_TENSOR, MatchBy, StoredLeaf, Target, TensorSource
from ckptfmt.engine.bind import Comparison, Staged
from ckptfmt.engine.dispatch import adapter_of, object_kind, tensor_source
from ckptfmt.engine.lineage import remember
from ckptfmt.engine.load import check_limit
from ckptfmt.engine.open import Checkpoint
from ckptfmt.engine.overlap import disagreeing, memories_of
from ckptfmt.engine.own_tensors import maker_of
from ckptfmt.engine.ranks import PerRankTarget
from ckptfmt.engine.rename import Rename, renamed_keys, renamed_leaves, renamer
from ckptfmt.engine.report import make_report, mismatch_error
from ckptfmt.engine.select import Matcher
from ckptfmt.engine.source import CheckpointSource, GroupedArrays, Source, TreeSource
from ckptfmt.engine.targets import make_target
from ckptfmt.engine.tree import peers_of, walk
from ckptfmt.errors import CheckpointError, MismatchError, PartialRestoreError, UsageError
from ckptfmt.events import Progress
from ckptfmt.format import dtype_of, escape_key, join_name, pack_array
from ckptfmt.reports import RestoreReport
from ckptfmt.types import Mode, Select

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


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


# -- restore: in place ---------------------------------------------------------------------------


def source_of(source: Checkpoint | Mapping[str, Any]) -> Source:
    if isinstance(source, Checkpoint):
        return CheckpointSource(source)
    return TreeSource(source)


def restore_tree(target: object, source: Source, request: RestoreRequest) -> RestoreReport:
    """Fill a target in place: everything that was asked for, or nothing."""
    targets = make_targets(target)
    comparison, report = compare(targets, source, request, read=True)
    error = mismatch_error(report, request, [*comparison.strangers.values()])
    if error is not None:
        raise error
    if request.atomic:
        _bind_all(targets, comparison, source, request)
    else:
        check_limit(source.nbytes(list(comparison.tensor_rows())), request.max_nbytes)
        if request.validate is not None:
            _check_all(comparison, source, request, list(comparison.tensor_rows()))
        _bind_in_groups(targets, comparison, source, request)
    if isinstance(source, CheckpointSource):
        checkpoint = source.checkpoint
        remember(checkpoint.backend, checkpoint.info.name, checkpoint.index.about.tree_digest)
    return report


def plan_tree(target: object, source: Source, request: RestoreRequest) -> RestoreReport:
    """What `restore_tree` would do; no tensor's data is read, and the report has what it would
    raise."""
    comparison, report = compare(make_targets(target), source, request)
    error: CheckpointError | None = mismatch_error(
        report, request, [*comparison.strangers.values()]
    )
    if error is None:
        try:
            check_limit(source.nbytes(list(comparison.tensor_rows())), request.max_nbytes)
        except UsageError as refusal:
            error = refusal
    return replace(report, error=error)


def make_targets(target: object) -> list[Target]:
    """The targets of a tree, in the order in which they are bound."""
    visits = list(walk(target))
    peers = peers_of(visits)
    made: list[Target] = []
    for visit in visits:
        if visit.kind == "per_rank":
            made.append(PerRankTarget(visit.name, rank=0, size=1))
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
    comparison, renamed = _stored_side(source, request)
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


def _stored_side(source: Source, request: RestoreRequest) -> tuple[Comparison, dict[str, str]]:
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


def _bind_all(
    targets: Sequence[Target], comparison: Comparison, source: Source, request: RestoreRequest
) -> None:
    """Everything is read and checked before the first target is touched; an error rolls back.

    Where memory does not hold the state twice more (the new values and the old ones), a first pass
    checks every byte and keeps none, and a second one reads again and binds.
    """
    rows = list(comparison.tensor_rows())
    nbytes = source.nbytes(rows)
    check_limit(nbytes, request.max_nbytes)
    if 2 * nbytes > config.current().staging_nbytes:
        _check_all(comparison, source, request, rows)
        _bind_in_groups(targets, comparison, source, request)
        return
    arrays = source.tensors(rows, mode="auto", verify=request.verify, progress=request.progress)
    staged = Staged(comparison, arrays)
    staged.cast_all()
    _refuse_overlaps(targets, staged)
    if request.validate is not None:
        request.validate(staged.by_name())
    bound: list[Target] = []
    try:
        for target in targets:
            bound.append(target)
            target.bind(staged)
    except BaseException as error:
        error.add_note(f"while {bound[-1].name!r} was restored; what was bound is rolled back")
        _roll_back(bound, error)
        raise


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
    arrays = GroupedArrays(source, rows, verify=True, progress=request.progress)
    for group in arrays.groups:
        arrays.read(group)
    staged = Staged(comparison, arrays)
    for name in comparison.casts:
        staged[name]
    if request.validate is not None:
        request.validate(staged.by_name())


def _roll_back(bound: Sequence[Target], cause: BaseException) -> None:
    failed = []
    for target in reversed(bound):
        try:
            target.undo()
        except Exception as error:
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


def _bind_in_groups(
    targets: Sequence[Target], comparison: Comparison, source: Source, request: RestoreRequest
) -> None:
    """One pass in bounded memory: tensors are read in groups, as the targets ask for them.

    If it is to be atomic, the callers' code and optimizers, which come first, still are: they keep
    their old state. What follows them are plain copies of what was checked.
    """
    rows = list(comparison.tensor_rows())
    arrays = GroupedArrays(source, rows, verify=request.verify, progress=request.progress)
    staged = Staged(comparison, arrays, undoable=False)
    _refuse_overlaps(targets, staged)
    arrays.given = 0  # to targets, so far
    changed: list[str] = []
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


# -- load(like=): a new tree ---------------------------------------------------------------------


def load_like(
    like: Any,
    source: Checkpoint | Mapping[str, Any],
    request: RestoreRequest,
    *,
    mode: Mode = "auto",
) -> Any:
    """The structure of `like` with its own classes and the stored values, compared as in restore."""
    stored = source_of(source)
    comparison, renamed = _stored_side(stored, request)
    composite: dict[str, Any] = {}
    for name, obj in _leaves_of(like, ""):
        if not isinstance(obj, np.ndarray) and object_kind(obj) == "composite":
            composite[name] = adapter_of(obj).target(obj, name, [])  # type: ignore[union-attr]
            composite[name].compare(comparison)
            continue
        spec = _spec_of(obj, name)
        if spec is None:
            comparison.value(name)
        else:
            comparison.tensor(name, spec.dtype, spec.shape)
    report = make_report(comparison, stored, renamed)
    error = mismatch_error(report, request, [*comparison.strangers.values()])
    if error is not None:
        raise error
    rows = list(comparison.tensor_rows())
    check_limit(stored.nbytes(rows), request.max_nbytes)
    arrays = stored.tensors(rows, mode=mode, verify=request.verify, progress=request.progress)
    staged = Staged(comparison, arrays)
    staged.cast_all()

    def made(name: str, obj: Any) -> Any:
        if name in composite:
            return composite[name].make(staged)
        if name not in staged:
            return obj
        return staged[name] if _spec_of(obj, name) is None else maker_of(obj)(staged[name])

    if isinstance(stored, CheckpointSource):
        checkpoint = stored.checkpoint
        remember(checkpoint.backend, checkpoint.info.name, checkpoint.index.about.tree_digest)
    return _rebuild(like, "", made)


def _spec_of(obj: Any, name: str) -> TensorSource | StoredLeaf | None:
    """dtype and shape of a tensor, or of anything that has both; None for a plain value."""
    if isinstance(obj, np.generic):
        return None
    if isinstance(obj, np.ndarray) or object_kind(obj) == "tensor":
        return tensor_source(obj, name)
    if hasattr(obj, "shape") and hasattr(obj, "dtype"):
        return StoredLeaf(name, dtype_of(np.dtype(obj.dtype)).name, tuple(map(int, obj.shape)))
    return None


def _children(obj: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container that `like` may have; None for a leaf."""
    if isinstance(obj, Mapping) and obj:
        return [(escape_key(key), item) for key, item in obj.items()]
    if isinstance(obj, list | tuple) and any(_deep(item) for item in obj):
        return [(str(position), item) for position, item in enumerate(obj)]
    return None


def _deep(obj: Any) -> bool:
    """Whether a tensor lies at or below: a sequence without one is one value."""
    if isinstance(obj, Mapping):
        return any(map(_deep, obj.values()))
    if isinstance(obj, list | tuple):
        return any(map(_deep, obj))
    return not isinstance(obj, np.generic) and hasattr(obj, "shape") and hasattr(obj, "dtype")


def _leaves_of(obj: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = _children(obj)
    if children is None:
        yield name, obj
        return
    for part, item in children:
        yield from _leaves_of(item, join_name(name, part))


def _rebuild(obj: Any, name: str, made: Callable[[str, Any], Any]) -> Any:
    children = _children(obj)
    if children is None:
        return made(name, obj)
    items = [_rebuild(item, join_name(name, part), made) for part, item in children]
    if isinstance(obj, Mapping):
        pairs = dict(zip(obj, items))
        if isinstance(obj, dict):
            new = obj.copy()
            new.update(pairs)
            return new
        return type(obj)(pairs)  # type: ignore[call-arg]
    if hasattr(obj, "_fields"):
        return type(obj)(*items)
    return type(obj)(items)
