"""`export`: a checkpoint becomes a file of another format, which is read back before it has its name."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, Literal

from ckptfmt.engine import Checkpoint, Pipeline, Reporter, Store, api, select_positions
from ckptfmt.errors import CorruptError, UnsupportedError, UsageError
from ckptfmt.events import Event, Progress
from ckptfmt.foreign.base import ForeignTensor, ForeignTree
from ckptfmt.foreign.conversion import listed
from ckptfmt.foreign.exporters.base import Exporter, ExportPlan
from ckptfmt.foreign.exporters.failures import writing
from ckptfmt.foreign.exporters.part import part_of
from ckptfmt.foreign.exporters.record import differs
from ckptfmt.foreign.exporters.staging import Staging, recover, taken
from ckptfmt.foreign.exporters.tree import (
    PIECE_NBYTES,
    Array,
    ExportTensor,
    ExportTree,
    digested,
    foreign_pieces,
    tree_of_checkpoint,
    tree_of_foreign,
)
from ckptfmt.foreign.file_map import place_of
from ckptfmt.foreign.opening import ForeignCheckpoint
from ckptfmt.foreign.registry import detect_format, find_exporter, read_foreign
from ckptfmt.foreign.stored import is_store
from ckptfmt.format import LEAF_TENSOR, LEAF_VALUE
from ckptfmt.reports import ConvertReport
from ckptfmt.types import At, Select, StrPath

_READERS = 2


def export(
    src: StrPath | Store | Checkpoint | ForeignCheckpoint,
    dst: StrPath,
    *,
    target_format: str | None = None,
    source_format: str | None = None,
    step: int | None = None,
    at: At | None = None,
    names: Select | None = None,
    root: str = "",
    if_exists: Literal["error", "replace"] = "error",
    shard_nbytes: int = 5_000_000_000,
    like: StrPath | None = None,
    progress: Progress = False,
    allow_partial: bool = False,
) -> ConvertReport:
    """Write a checkpoint as a file or folder of another format: every leaf, or an error.

    Values are streamed into a hidden folder beside `dst`, made durable, found again by the importer
    of that format and compared by digest; only then `dst` appears, all at once.

    Args:
        src: A store (`runs/a`, `runs/a@best`), a checkpoint, or a file of another format.
        dst: A local path; its suffix says which format, unless `target_format` does.
        source_format: Take `src` for a file of this format, instead of finding out what it is.
        step, at: Which checkpoint of a store; the latest if neither is given.
        names: Take part.
        root: A container whose content is the whole that is exported: `root="model"` makes
            `encoder.0.weight` of `model/encoder.0.weight`.
        if_exists: "replace" takes the place of what is there, if that is of the same format.
        shard_nbytes: A folder of safetensors is cut into files of at most this; by default
            what the Hugging Face hub does.
        like: A `.weights.h5` of the same model, which says where Keras has which layer.
        allow_partial: Go on where something cannot be carried; the report's `skipped` names it.
    Returns:
        A report whose `info` is None and whose `renamed` maps leaf names to names in the file.
    Raises:
        UnsupportedError: A leaf cannot be carried; it is named, and nothing was written.
        ExistsError: `dst` is there.
        CorruptError: A chunk of the source is damaged, or what was written reads back otherwise.
    """
    _check_arguments(dst, if_exists, shard_nbytes)
    file_format, exporter = find_exporter(os.fspath(dst), target_format)
    replace = if_exists == "replace"
    _check_free(exporter, replace=replace)
    with _open(src, source_format, step, at) as source:
        tree = _tree(source, names, root)
        options = {"shard_nbytes": shard_nbytes, "like": os.fspath(like) if like else ""}
        plan, skipped = _plan(exporter, tree, options, allow_partial=allow_partial)
        with Staging(exporter.parent, os.fspath(dst)) as staging:
            with Reporter(progress, "export", plan.nbytes) as reporter, writing(staging.where):
                tree.on_progress(reporter.advance)
                final = exporter.write(plan, staging)
            back = exporter.read_back(plan, staging)
            if exporter.has_record:
                _compare_values(plan, back)
            _Comparison(plan, staging, back.tensors).run(progress)
            if exporter.shape == "folder":
                staging.publish_folder(exporter.name, replace=replace)
            else:
                staging.publish_files(final, replace=replace)
                exporter.published()
    return ConvertReport(
        info=None,
        format=file_format,
        loaded=list(plan.names),
        renamed={ours: theirs for ours, theirs in plan.names.items() if ours != theirs},
        skipped=skipped,
        transformed=plan.transformed,
        nbytes=plan.nbytes,
    )


def _check_arguments(dst: object, if_exists: str, shard_nbytes: int) -> None:
    if if_exists not in ("error", "replace"):
        raise UsageError(
            "not a legal choice",
            reason="if-exists",
            expected="error or replace",
            found=repr(if_exists),
        )
    if not isinstance(dst, str | os.PathLike):
        raise UsageError("dst is no path", reason="dst", found=type(dst).__name__)
    if type(shard_nbytes) is not int or shard_nbytes < 1:
        raise UsageError(
            "not a legal choice",
            reason="shard-nbytes",
            expected="a number of bytes",
            found=repr(shard_nbytes),
        )


def _open(
    src: StrPath | Store | Checkpoint | ForeignCheckpoint,
    source_format: str | None,
    step: int | None,
    at: At | None,
) -> AbstractContextManager[Checkpoint | ForeignCheckpoint]:
    if isinstance(src, Checkpoint | ForeignCheckpoint):
        if step is not None or at is not None or source_format is not None:
            raise UsageError(
                "a checkpoint that is open is one already",
                reason="selector",
                where=repr(src),
                do="leave out step=, at= and source_format=",
            )
        return nullcontext(src)  # it stays the caller's
    if source_format is None and (isinstance(src, Store) or not is_foreign(src)):
        return api.open(src, step=step, at=at)
    if isinstance(src, Store) or step is not None or at is not None:
        raise UsageError(
            "a file of another format has no steps",
            reason="source-format",
            where=str(src),
            do="leave out step= and at=, or source_format=",
        )
    path = os.fspath(src)
    return ForeignCheckpoint(path, read_foreign(path, source_format=source_format))


def _tree(source: Checkpoint | ForeignCheckpoint, names: Select | None, root: str) -> ExportTree:
    if isinstance(source, Checkpoint):
        tree = tree_of_checkpoint(source, root)
    else:
        tree = tree_of_foreign(source, root)
    if names is None:
        return tree
    prefix = f"{root}/" if root else ""
    every = [prefix + name for name in tree.leaves]
    chosen = select_positions(every, names, tree.title)
    return part_of(tree, [every[at][len(prefix) :] for at in chosen])


def _plan(
    exporter: Exporter, tree: ExportTree, options: Mapping[str, Any], *, allow_partial: bool
) -> tuple[ExportPlan, dict[str, str]]:
    """(what is written, what is not carried)."""
    skipped: dict[str, str] = {}
    while True:
        plan = exporter.plan(tree, options)
        skipped |= plan.skipped
        _check_complete(plan, skipped, exporter.format, allow_partial=allow_partial)
        if not exporter.keeps_composites:
            for name, attributes in tree.container_attributes.items():
                if "torch.tensor" in attributes:
                    plan.transformed[name] = "its parts"
        left = [name for name in tree.leaves if name not in plan.skipped]
        if len(left) == len(tree.leaves):
            return plan, skipped
        tree = part_of(tree, left)  # once more without them: what they leave of a list is no list


def is_foreign(path: StrPath) -> bool:
    """Whether a path is a file or folder of another format, and no store."""
    return not is_store(path) and detect_format(os.fspath(path)) is not None


def _check_free(exporter: Exporter, *, replace: bool) -> None:
    """Before hours of work: the name is free, or what has it may be replaced."""
    recover(exporter.targets())
    there = [path for path in exporter.targets() if os.path.lexists(path)]
    if not there:
        return
    path = there[0]
    if exporter.shape == "folder" and os.path.isdir(path) and not os.listdir(path):
        return
    if not replace:
        raise taken(path)
    known = exporter.is_own(path)
    if (exporter.shape == "folder") != os.path.isdir(path) or (os.path.isdir(path) and not known):
        raise UsageError(
            "what is there is no export of this format",
            reason="export",
            where=path,
            expected=exporter.format,
            do="choose another name, or remove it yourself",
        )


def _check_complete(
    plan: ExportPlan, skipped: Mapping[str, str], file_format: str, *, allow_partial: bool
) -> None:
    if skipped and not allow_partial:
        count = len(skipped)
        raise UnsupportedError(
            f"{count} {'leaf' if count == 1 else 'leaves'} cannot be carried",
            reason="export-partial",
            where=f"{plan.tree.title} to {file_format}",
            found=listed(skipped),
            do="allow_partial=True (--allow-partial) carries the rest; names= and root= choose",
        )
    if not plan.names:
        raise UnsupportedError(
            "nothing is left to be carried",
            reason="export-empty",
            where=f"{plan.tree.title} to {file_format}",
            found=listed(skipped) or None,
        )


def _compare_values(plan: ExportPlan, back: ForeignTree) -> None:
    """The values are those of the source, and there are as many leaves."""
    flat = ForeignCheckpoint("", back).flat
    found = {
        name: flat.values[row] if kind == LEAF_VALUE else flat.tensors[row].fetch().tobytes()
        for name, kind, row in zip(flat.names, flat.kinds, flat.rows, strict=True)
        if kind != LEAF_TENSOR
    }
    wrong = differs(plan, found)
    wrong = next((name for name in flat.names if name not in plan.names), wrong)
    if wrong is not None:
        raise _differs(wrong, "the leaf of the source", back.tensors.get(wrong))


class _Comparison:
    """Compares what the written file says with what the source held.

    The importer says where the values of a tensor are. What was sent to that place of the file is
    known by its digest; all else is read from there.
    """

    def __init__(
        self, plan: ExportPlan, staging: Staging, found: Mapping[str, ForeignTensor]
    ) -> None:
        self._plan, self._staging, self._found = plan, staging, found

    def run(self, progress: Progress) -> None:
        done, total = 0, self._plan.nbytes
        with Pipeline(_READERS) as threads:
            for nbytes in threads.map(self._compare, _neighbours(self._plan.tensors)):
                done += nbytes
                if callable(progress):
                    progress(Event("check", time.time(), nbytes=done, total_nbytes=total))

    def _compare(self, tensors: Sequence[ExportTensor]) -> int:
        for tensor in tensors:
            if tensor.array is not None and tensor.name not in self._found:
                continue  # a number that the record has as such: the import has compared it
            known: set[Hashable] = set()
            for name in tensor.names:
                if name not in self._plan.names:
                    continue
                back = self._found.get(name)
                if back is None or (back.dtype, back.shape) != self._plan.stored(tensor):
                    raise _differs(name, self._plan.stored(tensor), back)
                identity = back.identity or name
                if identity not in known and not self._has_values(tensor, back):
                    raise _differs(name, "the values of the source", back)
                known.add(identity)
        return sum(tensor.nbytes for tensor in tensors)

    def _has_values(self, tensor: ExportTensor, back: ForeignTensor) -> bool:
        # One piece at a time: those that are no views are read.
        pairs = zip_longest(tensor.digests, foreign_pieces(back))
        return all(self._is_piece(digest, piece) for digest, piece in pairs)

    def _is_piece(self, digest: bytes | None, piece: Array | None) -> bool:
        if digest is None or piece is None:
            return False
        place = place_of(piece)
        if place is not None and self._staging.digest(*place, piece.nbytes) == digest:
            return True
        return digested(piece)[1] == digest


def _neighbours(tensors: Sequence[ExportTensor]) -> list[list[ExportTensor]]:
    """Those that are compared together: a thread for each small one would cost more than it."""
    made: list[list[ExportTensor]] = [[]]
    nbytes = 0
    for tensor in tensors:
        if made[-1] and nbytes + tensor.nbytes > PIECE_NBYTES:
            made.append([])
            nbytes = 0
        made[-1].append(tensor)
        nbytes += tensor.nbytes
    return made


def _differs(name: str, expected: Any, found: ForeignTensor | None) -> CorruptError:
    return CorruptError(
        "what was written reads back otherwise",
        reason="export-changed",
        where=name,
        expected=expected,
        found="no such tensor"
        if found is None
        else f"{found.dtype} {found.shape} at {found.where}",
        do="nothing was published: check memory and disk, and export again",
    )
