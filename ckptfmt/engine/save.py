"""Saving: the conductor. flatten -> plan -> stage -> encode -> write -> commit. Spec: 08-protocol."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ckptfmt.engine.catalog import (
    Listed,
    find,
    info_of,
    latest_order,
    list_checkpoints,
    list_notes,
    newest_readable,
    next_generation,
    read_index,
    read_notes,
    read_tag,
    read_tags,
    warn_skipped,
)
from ckptfmt.engine.commit import (
    Document,
    check_or_withdraw,
    delete_lower,
    put_index,
)
from ckptfmt.engine.coordinate import (
    begin,
    clean_abandoned,
    end,
    ensure_store_marker,
    new_txn,
    unusable,
)
from ckptfmt.engine.lineage import recall, remember
from ckptfmt.engine.notes import annotate
from ckptfmt.engine.output import damaged_files, write_data
from ckptfmt.engine.plan import SavePlan, plan_save
from ckptfmt.engine.request import SaveRequest
from ckptfmt.engine.sharded import refuse_parts
from ckptfmt.engine.tree import flatten
from ckptfmt.engine.vouch import vouch
from ckptfmt.errors import (
    ExistsError,
    FormatError,
    NotFoundError,
    StorageError,
    UsageError,
    warn,
)
from ckptfmt.format import (
    FILE_NBYTES_TARGET_REMOTE,
    LEAF_PACKED,
    About,
    FilesSection,
    Index,
    TreeSection,
    digest,
    pack_tree,
    pack_value,
    step_of,
)
from ckptfmt.storage import Backend
from ckptfmt.types import CheckpointInfo


@dataclass(frozen=True, slots=True)
class Existing:
    """What stands under the name already; `generation` is the next one."""

    found: dict[str, list[Listed]]
    listed: Listed | None
    index: Index | None
    generation: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A save that is planned and may begin: nothing has been written."""

    backend: Backend
    request: SaveRequest
    plan: SavePlan
    existing: Existing
    started_s: float

    def finish(self) -> CheckpointInfo:
        return finish_save(self)

    def abandon(self, error: BaseException) -> None:
        """It will not go on. Nobody else waits for it."""
        raise error


def save_tree(tree: object, backend: Backend, request: SaveRequest) -> CheckpointInfo:
    """Save a tree; committed and, if asked, durable when it returns."""
    prepared = prepare_save(tree, backend, request)
    return finish_save(prepared) if isinstance(prepared, Prepared) else prepared


def prepare_save(tree: object, backend: Backend, request: SaveRequest) -> Prepared | CheckpointInfo:
    """flatten -> plan, and refuse what can be refused. What is kept needs nothing more."""
    started_s = time.monotonic()
    kept = kept_info(backend, request)
    if kept is not None:
        return kept
    flat, options = flatten(tree), request.options
    refuse_parts(flat)
    if not backend.capabilities.late_key:
        options = replace(options, encoded_region_nbytes=FILE_NBYTES_TARGET_REMOTE)
    plan = plan_save(flat, options)
    ensure_store_marker(backend)
    existing = look(backend, request.name)
    refuse_early(backend, existing, request)
    refuse_other_structure(existing, plan.tree, request)
    if request.unchanged is not None:
        bases = open_bases(backend, choose_bases(backend, existing.found, request))
        plan = vouch(plan, bases, request.unchanged)
    return Prepared(backend, request, plan, existing, started_s)


def kept_info(backend: Backend, request: SaveRequest) -> CheckpointInfo | None:
    """What stands under the name already, if it is to be kept."""
    if request.if_exists != "keep":
        return None
    kept = look(backend, request.name)
    if kept.listed is None or kept.index is None:
        return None
    return _info(backend, kept.listed, kept.index.about, kept.index.files)


def finish_save(prepared: Prepared) -> CheckpointInfo:
    """stage -> encode -> write -> commit; once more where the disk was full and room was made."""
    make_room = prepared.request.make_room
    try:
        return _finish_once(prepared)
    except StorageError as error:
        if error.reason != "no-space" or make_room is None or not make_room():
            raise
    return _finish_once(prepared)


def _finish_once(prepared: Prepared) -> CheckpointInfo:
    backend, request, existing = prepared.backend, prepared.request, prepared.existing
    with open_save(backend, request, existing) as (txn, bases):
        written = write_data(backend, prepared.plan, request, bases, txn)
        tree = pack_tree(prepared.plan.tree)
        about = about_of(backend, prepared.plan.tree, request, (txn, tree))
        document = Document(about, written.files, written.placement, tree)
        request.check(prepared.plan.tree)
        request.before_commit()
        info = commit_document(backend, document, request, existing)
    remember(backend, info.name, document.about.tree_digest)
    seconds = time.monotonic() - prepared.started_s
    return replace(info, written_nbytes=written.nbytes, seconds=seconds)


def look(backend: Backend, name: str) -> Existing:
    generation = next_generation(backend, name)
    found = list_checkpoints(backend)
    newest = newest_readable(backend, found[name]) if name in found else None
    listed, index = newest or (None, None)
    return Existing(found, listed, index, generation)


def _info(backend: Backend, listed: Listed, about: About, files: FilesSection) -> CheckpointInfo:
    notes = list_notes(backend).get(about.txn.hex(), [])
    return info_of(backend, listed, about, files, read_notes(backend, notes))


def refuse_early(backend: Backend, existing: Existing, request: SaveRequest) -> None:
    """Before a byte is staged: a name that cannot be saved to, or should not."""
    if read_tag(backend, request.name) is not None and existing.listed is None:
        raise UsageError(
            "this name is a tag",
            reason="name-is-tag",
            where=repr(request.name),
            do="choose another name, or untag it first",
        )
    if request.name == "main" and any(step_of(name) is not None for name in existing.found):
        warn("saved as `main` beside steps: load(path) still takes the highest step")


def refuse_other_structure(existing: Existing, new: TreeSection, request: SaveRequest) -> None:
    """Before a byte is staged: names, shapes, dtypes or plain values differ from what the name
    holds. (Other bytes are found at the commit.)"""
    if request.if_exists != "error" or existing.index is None:
        return
    old = existing.index.tree
    same = (
        old.leaf_names == new.leaf_names
        and old.values == new.values
        and old.dtypes == new.dtypes
        and all(
            bytes(a.astype("<u8").tobytes()) == bytes(b.astype("<u8").tobytes())
            for a, b in (
                (old.leaf_kinds, new.leaf_kinds),
                (old.leaf_rows, new.leaf_rows),
                (old.tensor_dtypes, new.tensor_dtypes),
                (old.tensor_dims, new.tensor_dims),
            )
        )
    )
    if not same:
        raise _exists(request)


def _exists(request: SaveRequest) -> ExistsError:
    return ExistsError(
        "this name holds another tree",
        reason="checkpoint",
        where=repr(request.name),
        do='choose another step or name, or pass if_exists="replace"; '
        "if several ranks run this, call it on rank 0 only",
    )


@contextmanager
def open_save(
    backend: Backend, request: SaveRequest, existing: Existing
) -> Iterator[tuple[str, list[Index]]]:
    """Announce the save, then open its bases: nothing else may be reused (I4)."""
    clean_abandoned(backend)
    txn = new_txn()
    chosen = choose_bases(backend, existing.found, request)
    pairs = [(listed.name, listed.generation) for listed in chosen]
    begin(backend, txn, step=request.step, name=request.name, bases=pairs)
    try:
        yield txn, open_bases(backend, chosen)
    except StorageError as error:
        # What a commit of unknown outcome may need stays, and so does its `open`.
        if error.reason != "commit-unknown":
            end(backend, txn)
        raise
    except BaseException:
        end(backend, txn)
        raise
    end(backend, txn)


def choose_bases(
    backend: Backend, found: Mapping[str, Sequence[Listed]], request: SaveRequest
) -> list[Listed]:
    """The checkpoints whose chunks may be reused: those asked for, else the latest and the one
    that has this save's name."""
    if request.bases is not None:
        if isinstance(request.bases, str) or not isinstance(request.bases, Sequence):
            raise UsageError(
                "bases= is a list of checkpoints",
                reason="bases",
                found=repr(request.bases)[:80],
                do="for example bases=[1000]",
            )
        return [find(backend, found, at)[-1] for at in request.bases]
    names = dict.fromkeys([*list(latest_order(found))[:1], request.name])
    return [found[name][-1] for name in names if name in found]


def open_bases(backend: Backend, chosen: Sequence[Listed]) -> list[Index]:
    """A base that cannot be read only costs reuse."""
    made = []
    for listed in chosen:
        try:
            made.append(read_index(backend, listed))
        except NotFoundError:
            continue
        except FormatError as error:
            warn_skipped(listed.key, error)
    return made


def now() -> str:
    """This moment, as an index has it; nothing depends on it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def about_of(
    backend: Backend, tree: TreeSection, request: SaveRequest, of: tuple[str, bytes]
) -> About:
    """The `about` section; `of` is the txn and the packed tree."""
    txn, packed = of
    return About(
        name=request.name,
        step=request.step,
        created=now(),
        txn=bytes.fromhex(txn),
        parent=recall(backend),
        writer=request.writer,
        algorithm=request.options.digest,
        tree_digest=digest(packed, request.options.digest),
        metrics=request.metrics,
        metadata=request.metadata,
        nbytes=int(tree.region_nbytes.sum()),
        tensors=len(tree.tensor_dtypes) - int((tree.leaf_kinds == LEAF_PACKED).sum()),
    )


def commit_document(
    backend: Backend, document: Document, request: SaveRequest, existing: Existing
) -> CheckpointInfo:
    """Put the index, unless the name holds this tree already; the checks of I4 before and after."""
    while True:
        listed, index = existing.listed, existing.index
        if listed is not None and index is not None:
            same = _is_same(index, document)
            if same and not _is_broken(backend, index, document):
                return _keep(backend, listed, index, request)
            if same:
                document = _healed(backend, listed, index, document)
            elif request.if_exists == "error":
                raise _exists(request)
            _refuse_tagged(backend, document)
        put = put_index(
            backend,
            document,
            existing.generation,
            durable=request.options.durable,
            timeout_s=request.timeout_s,
            when_unknown=request.when_unknown,
        )
        if put is not None:
            break
        existing = look(backend, request.name)
    check_or_withdraw(backend, document, put)
    delete_lower(backend, put)
    return info_of(backend, put, document.about, document.files)


def _is_same(index: Index, document: Document) -> bool:
    """The name holds this tree already (and, for one that is no step, as of this step)."""
    old, new = index.about, document.about
    return (old.tree_digest, old.step) == (new.tree_digest, new.step)


def _is_broken(backend: Backend, index: Index, document: Document) -> bool:
    """A file of the index that holds this tree already is gone, cut or rotten, and is none of those
    that this save has just checked or written anew."""
    old = dict(zip(index.files.ids, index.files.nbytes.tolist()))
    rest = {file: nbytes for file, nbytes in old.items() if file not in document.sizes()}
    return bool(rest) and bool(unusable(backend, rest) or damaged_files(backend) & rest.keys())


def _healed(backend: Backend, listed: Listed, index: Index, document: Document) -> Document:
    """The document as the next generation of the same tree: what was noted of it stays."""
    info = _info(backend, listed, index.about, index.files)
    about = document.about
    metrics = {**info.metrics, **about.metrics}
    metadata = {**info.metadata, **about.metadata}
    return replace(document, about=replace(about, metrics=metrics, metadata=metadata))


def _keep(backend: Backend, listed: Listed, index: Index, request: SaveRequest) -> CheckpointInfo:
    """Nothing to commit: only what is new in metrics and metadata is noted."""
    info = _info(backend, listed, index.about, index.files)
    metrics = {k: v for k, v in request.metrics.items() if _is_new(k, v, info.metrics)}
    metadata = {k: v for k, v in request.metadata.items() if _is_new(k, v, info.metadata)}
    if not metrics and not metadata:
        return info
    annotate(backend, index.about, metrics=metrics, metadata=metadata)
    return _info(backend, listed, index.about, index.files)


def _is_new(key: str, value: object, known: Mapping[str, object]) -> bool:
    # By their bytes: a NaN is no news beside the same NaN.
    return key not in known or pack_value(known[key]) != pack_value(value)


def _refuse_tagged(backend: Backend, document: Document) -> None:
    name, new = document.about.name, document.about.tree_digest.hex()
    tags = [t.tag for t in read_tags(backend).values() if t.name == name and t.digest != new]
    if tags:
        raise UsageError(
            "a tagged checkpoint is not replaced by another tree",
            reason="tagged",
            where=repr(name),
            found=f"tag {', '.join(map(repr, tags))}",
            do="untag it first",
        )
