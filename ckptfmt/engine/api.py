"""The functions that `ckptfmt` exports: arguments are settled here, the work is done below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, overload

from ckptfmt.engine.adapter import MatchBy
from ckptfmt.engine.background import SaveFuture, WhenBusy, await_saves, save_in_background
from ckptfmt.engine.call import settle_together
from ckptfmt.engine.group import ranks_of
from ckptfmt.engine.group_restore import restore_in_group
from ckptfmt.engine.group_save import save_in_group
from ckptfmt.engine.like import load_like
from ckptfmt.engine.lineage import remember
from ckptfmt.engine.load import Compose, Convert, load_tree
from ckptfmt.engine.open import Checkpoint
from ckptfmt.engine.plan import SaveOptions
from ckptfmt.engine.restore import (
    RestoreRequest,
    plan_tree,
    restore_tree,
    source_of,
)
from ckptfmt.engine.save import save_tree
from ckptfmt.engine.source import Source
from ckptfmt.engine.tracing import not_traced
from ckptfmt.engine.where import (
    Where,
    choose_at,
    parse_where,
    refuse_swapped,
)
from ckptfmt.errors import UsageError
from ckptfmt.events import Progress
from ckptfmt.format import CHUNK_NBYTES_DEFAULT
from ckptfmt.reports import RestoreReport
from ckptfmt.storage import Backend
from ckptfmt.types import At, CheckpointInfo, DigestName, Group, IfExists, Mode, Plain, Select

T = TypeVar("T")
_NOTHING: Mapping[str, Any] = {}


@not_traced
def save(
    tree: object,
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
    unchanged: Select | None = None,
    group: Group = None,
    timeout_s: float = 1800.0,
    progress: Progress = False,
) -> CheckpointInfo:
    """Save a tree; it is committed and durable when this returns.

    Args:
        tree: Nested dicts, lists and tuples of tensors (NumPy, PyTorch, TensorFlow, JAX), plain
            values and objects that give their state (modules, optimizers, generators).
        path: A directory, a URL or a Store.
        step: How many steps are finished. The checkpoint is called `step-%016d`; without a step,
            `main`.
        name: A name of its own instead.
        metadata: Plain values of the user's.
        metrics: Numbers for retention and reports; 0-d tensors are accepted.
        if_exists: "error", "replace" (the next generation; the old one goes after it is
            committed) or "keep" (give what is stored, read nothing). None: replace for `main`, else
            error. The same tree under its own name always succeeds.
        codec: `raw`, `zstd` or `zstd:LEVEL`, or a mapping of leaf patterns to these.
        chunk_nbytes: Unit of digest and reuse: a multiple of 4096 bytes from 4 KiB to 1 GiB, or a
            mapping of leaf patterns to sizes.
        digest: `xxh3-128`, or `sha256` where writers do not trust each other.
        bases: Checkpoints whose chunks may be reused; None: the latest.
        durable: False leaves out fsync: survives a killed process, not a power cut.
        unchanged: Leaves that you vouch for: their tensors are taken from the base by name, neither
            read nor hashed. A wrong word here saves old values (experimental).
        group: None: this process alone. Else all ranks of it call, with the same step and options:
            "world", a ProcessGroup of torch, or FileGroup(rank, size). What several ranks hold is
            written once; the commit is one.
        timeout_s: How long the outcome of a commit may stay unknown, and how long ranks wait for
            each other, in seconds.
        progress: A function of an Event, or True for a bar on stderr.
    Raises:
        UsageError: Something in the tree cannot come back; nothing was written.
        ExistsError: The name holds another tree.
        ConflictError: A collector or another writer interfered; nothing is visible.
        StorageError: The medium failed, or is full; nothing is visible.
    Spec: 08-protocol.
    """
    backend, request = settle_together(
        tree,
        path,
        step,
        name,
        metadata=metadata,
        metrics=metrics,
        if_exists=if_exists,
        options=SaveOptions(codec, chunk_nbytes, digest, durable),
        bases=bases,
        unchanged=unchanged,
        group=group,
        timeout_s=timeout_s,
        progress=progress,
    )
    return (save_tree if request.ranks is None else save_in_group)(tree, backend, request)


@not_traced
def save_async(
    tree: object,
    path: Where,
    *,
    step: int | None = None,
    when_busy: WhenBusy = "wait",
    name: str | None = None,
    metadata: Mapping[str, Plain] = _NOTHING,
    metrics: Mapping[str, float] = _NOTHING,
    if_exists: IfExists | None = None,
    codec: str | Mapping[str, str] = "raw",
    chunk_nbytes: int | Mapping[str, int] = CHUNK_NBYTES_DEFAULT,
    digest: DigestName = "xxh3-128",
    bases: Sequence[At] | None = None,
    durable: bool = True,
    unchanged: Select | None = None,
    group: Group = None,
    timeout_s: float = 1800.0,
    progress: Progress = False,
) -> SaveFuture:
    """Save a tree in the background; returns once it is staged: the tree may change then.

    One save is in flight per store. An error is raised by the future's `result()`, else by the
    next save to that store, else printed on stderr when the interpreter ends, which waits for a
    save in flight.

    Args:
        when_busy: "wait" for a save in flight to this store, or "raise" ConflictError.
        progress: A function of an Event, called in the background thread. The other arguments are
            those of `save`.
    Raises:
        ConflictError: kind `conflict-busy`. Else what `save` refuses before it stages.
    Spec: 08-protocol.
    """
    if when_busy not in ("wait", "raise"):
        raise UsageError(
            "unknown when_busy",
            reason="when-busy",
            expected="wait or raise",
            found=repr(when_busy),
            do="choose one of these",
        )
    backend, request = settle_together(
        tree,
        path,
        step,
        name,
        metadata=metadata,
        metrics=metrics,
        if_exists=if_exists,
        options=SaveOptions(codec, chunk_nbytes, digest, durable),
        bases=bases,
        unchanged=unchanged,
        group=group,
        when_busy=when_busy,
        timeout_s=timeout_s,
        progress=progress,
    )
    return save_in_background(tree, backend, request)


@not_traced
def open(path: Where, *, step: int | None = None, at: At | None = None) -> Checkpoint:
    """Open a checkpoint lazily: its index is read, its data is not.

    Args:
        path: A directory, a URL or a Store; a text may end in `@` and a step, a name, a tag or
            `latest`.
        step: Short for `at=step`.
        at: A step, a name or a tag; None: the highest readable step, else `main`.
    Raises:
        NotFoundError: There is none; the message lists what there is.
        CorruptError: It was asked for by name and cannot be read.
    """
    store, selected = parse_where(path)
    return store.open(choose_at(selected, step, at))


@overload
def load(
    path: Where,
    *,
    mode: Mode = ...,
    like: T,
    step: int | None = ...,
    at: At | None = ...,
    names: Select | None = ...,
    verify: bool = ...,
    max_nbytes: int | None = ...,
    progress: Progress = ...,
) -> T: ...
@overload
def load(
    path: Where,
    *,
    mode: Mode = ...,
    like: None = ...,
    step: int | None = ...,
    at: At | None = ...,
    names: Select | None = ...,
    verify: bool = ...,
    max_nbytes: int | None = ...,
    progress: Progress = ...,
) -> Any: ...
@not_traced
def load(
    path: Where,
    *,
    mode: Mode = "auto",
    like: Any = None,
    step: int | None = None,
    at: At | None = None,
    names: Select | None = None,
    verify: bool = True,
    max_nbytes: int | None = None,
    progress: Progress = False,
) -> Any:
    """Load a tree as NumPy arrays: writable, private to the caller, every byte checked.

    Args:
        mode: "auto" reads into buffers of at most 256 MiB that live as long as any array in them,
            "read" gives each array its own memory, "mmap" maps (local and raw only).
        like: Arrays, `jax.ShapeDtypeStruct` or anything with shape and dtype: that structure comes
            back with its own classes, compared as in `restore`.
        names: Take part: leaf names, containers or patterns; one that matches nothing is an error.
        verify: False checks sizes only.
        max_nbytes: Refuse more logical bytes than that before any allocation; None: what memory
            this machine has.
    Raises:
        NotFoundError: No such checkpoint, or a pattern that matches nothing.
        CorruptError: Bytes are damaged; the message names file, range and tensor.
        MismatchError: `like` and the checkpoint disagree.
        UnsupportedError: `mode="mmap"` where it cannot be.
    """
    with open(path, step=step, at=at) as checkpoint:
        if like is not None:
            request = RestoreRequest(
                names=names, verify=verify, max_nbytes=max_nbytes, progress=progress
            )
            return load_like(like, checkpoint, request, mode=mode)
        made = load_tree(
            checkpoint,
            names=names,
            mode=mode,
            verify=verify,
            max_nbytes=max_nbytes,
            progress=progress,
        )
        if names is None:
            remember(checkpoint.backend, checkpoint.info.name, checkpoint.index.about.tree_digest)
        return made


@not_traced
def load_as(
    convert: Convert,
    path: Where | Checkpoint,
    *,
    mode: Mode = "auto",
    step: int | None = None,
    at: At | None = None,
    names: Select | None = None,
    verify: bool = True,
    max_nbytes: int | None = None,
    progress: Progress = False,
    compose: Compose | None = None,
    fused: bool = False,
) -> Any:
    """`load` for adapters: `convert(array, stored leaf)` makes each tensor of the tree.

    `compose` and `fused` as in `load_tree`.
    """
    if isinstance(path, Checkpoint):
        if step is not None or at is not None:
            raise UsageError(
                "step= and at= choose a checkpoint of a store",
                reason="selector",
                found="a Checkpoint, which is chosen already",
                do="leave them out",
            )
        checkpoint, given = path, True
    else:
        checkpoint, given = open(path, step=step, at=at), False
    try:
        made = load_tree(
            checkpoint,
            names=names,
            mode=mode,
            verify=verify,
            max_nbytes=max_nbytes,
            progress=progress,
            convert=convert,
            compose=compose,
            fused=fused,
        )
        if names is None:
            remember(checkpoint.backend, checkpoint.info.name, checkpoint.index.about.tree_digest)
        return made
    finally:
        if not given:
            checkpoint.close()


@not_traced
def restore(
    target: object,
    source: Where | Checkpoint | Mapping[str, Any],
    *,
    step: int | None = None,
    at: At | None = None,
    names: Select | None = None,
    verify: bool = True,
    max_nbytes: int | None = None,
    progress: Progress = False,
    rename: Mapping[str, str] | Callable[[str], str] = _NOTHING,
    strict: bool = True,
    allow_missing: Select = (),
    allow_unexpected: Select = (),
    allow_cast: bool | Select = False,
    match_by: MatchBy = "name",
    atomic: bool = True,
    group: Group = None,
) -> RestoreReport:
    """Fill a target in place: everything that was asked for, or nothing.

    Args:
        target: The tree that was saved, or one like it: arrays are filled, values in dicts and
            lists replaced, modules, optimizers and generators given their state.
        source: A store, a checkpoint, or a tree of arrays.
        names: Take part of what is stored.
        rename: Stored name or prefix -> target name, or a function; each rule must match.
        strict: False: missing and unexpected names are reported, not raised.
        allow_missing, allow_unexpected: Exceptions to strict, by name.
        allow_cast: Convert by value between dtypes; overflow raises.
        match_by: "position": modules and optimizers take state that was saved without names, or
            with other ones, in its order; counts, shapes and groups must be equal.
        atomic: False: one pass in bounded memory; an error may leave a part restored.
        group: None: this process alone. Else all ranks of it call; each reads what it holds, from
            what any number of ranks saved, and either all targets of all ranks change or none.
    Raises:
        MismatchError: Both sides disagree: everything is listed, nothing was touched.
        CorruptError: Bytes are damaged; nothing was touched.
        PartialRestoreError: Only with `atomic=False`, or where an object refused its old state.
    Spec: 08-protocol.
    """
    refuse_swapped(target, source, "restore(target, source)")
    request = RestoreRequest(
        names=names,
        rename=rename,
        strict=strict,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        allow_cast=allow_cast,
        match_by=_check_match_by(match_by),
        atomic=atomic,
        verify=verify,
        max_nbytes=max_nbytes,
        progress=progress,
    )
    if group is None:
        return restore_tree(target, _source(source, step, at), request)
    opened, backend = partial(_source, source, step, at), _backend(source)
    await_saves(backend)  # the ranks still meet there, and would take one meeting for the other
    return restore_in_group(target, opened, backend, request, ranks_of(group))


def _backend(source: Where | Checkpoint | Mapping[str, Any]) -> Backend:
    """Where the ranks of a group meet."""
    if isinstance(source, Checkpoint):
        return source.backend
    if isinstance(source, Mapping):
        raise UsageError(
            "a tree in memory is each rank's own",
            reason="group",
            found=f"{type(source).__name__} with group=",
            do="leave group out, or restore from a store",
        )
    return parse_where(source)[0].backend


@not_traced
def plan(
    target: object,
    source: Where | Checkpoint | Mapping[str, Any],
    *,
    step: int | None = None,
    at: At | None = None,
    names: Select | None = None,
    verify: bool = True,
    max_nbytes: int | None = None,
    progress: Progress = False,
    rename: Mapping[str, str] | Callable[[str], str] = _NOTHING,
    strict: bool = True,
    allow_missing: Select = (),
    allow_unexpected: Select = (),
    allow_cast: bool | Select = False,
    match_by: MatchBy = "name",
    atomic: bool = True,
    group: Group = None,
) -> RestoreReport:
    """What `restore` would do with the same arguments: no tensor's data is read, nothing touched.

    Args:
        verify, progress, atomic: Of a restore; a plan reads no data, so they change nothing.
    Returns:
        The report; `error` is what `restore` would raise, None if nothing.
    Raises:
        NotFoundError: There is no such checkpoint.
        UsageError: An argument is not legal.
    """
    refuse_swapped(target, source, "plan(target, source)")
    request = RestoreRequest(
        names=names,
        rename=rename,
        strict=strict,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        allow_cast=allow_cast,
        match_by=_check_match_by(match_by),
        atomic=atomic,
        verify=verify,
        max_nbytes=max_nbytes,
        progress=progress,
    )
    ranks = None if group is None else ranks_of(group)
    of = None if ranks is None else (ranks.rank, ranks.size)
    return plan_tree(target, _source(source, step, at), request, of)


def _check_match_by(choice: MatchBy) -> MatchBy:
    if choice not in ("name", "position"):
        raise UsageError(
            "unknown match_by",
            reason="match-by",
            expected="name or position",
            found=repr(choice),
            do="choose one of these",
        )
    return choice


def _source(
    source: Where | Checkpoint | Mapping[str, Any], step: int | None, at: At | None
) -> Source:
    if isinstance(source, Checkpoint | Mapping):
        if step is not None or at is not None:
            raise UsageError(
                "step= and at= choose a checkpoint of a store",
                reason="selector",
                found=type(source).__name__,
                do="leave them out: the source is chosen already",
            )
        return source_of(source)
    return source_of(open(source, step=step, at=at))
