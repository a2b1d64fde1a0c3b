"""`convert`: a foreign file becomes a checkpoint, streamed, and is then compared with its source."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import CorruptError, ExistsError, UnsupportedError, UsageError
from ckptfmt.events import Event, Progress
from ckptfmt.foreign.base import ForeignTensor, ForeignTree
from ckptfmt.foreign.mapped import Mapped, map_tree
from ckptfmt.foreign.opening import ForeignCheckpoint, read_source
from ckptfmt.foreign.rule_rows import parse_rules
from ckptfmt.foreign.streaming import PackedStream, Window, check_values, is_streamed, shifted
from ckptfmt.reports import ConvertReport
from ckptfmt.types import CheckpointInfo, DigestName, IfExists, Rules, StrPath, Unknown

if TYPE_CHECKING:
    from ckptfmt.engine import Checkpoint, FlatTree, SaveRequest, Store
    from ckptfmt.format import Dtype, Index, TreeSection

_LISTED_MAX = 10
_TIMEOUT_S = 1800.0
"""For how long the outcome of a commit may stay unknown; what `ckptfmt.save` waits by default."""


def convert(
    src: StrPath | Store | Checkpoint,
    dst: StrPath | Store,
    *,
    source_format: str | None = None,
    step: int | None = None,
    name: str | None = None,
    metadata: Mapping[str, Any] = {},
    metrics: Mapping[str, float] = {},
    if_exists: IfExists | None = None,
    codec: str | Mapping[str, str] = "raw",
    chunk_nbytes: int | Mapping[str, int] = 4 << 20,
    digest: DigestName = "xxh3-128",
    durable: bool = True,
    progress: Progress = False,
    unknown: Unknown = "opaque",
    allow_partial: bool = False,
    rules: Rules = (),
    dry_run: bool = False,
) -> ConvertReport:
    """Carry a foreign file or folder into a store: every leaf, bit for bit, or an error.

    Values are streamed from the mapped file. Before the commit every chunk's digest is computed
    again from the source and compared with what was written: of a source that changed meanwhile
    nothing is committed, and what stood under the name stays.

    Args:
        src: For example `model.safetensors`, or a folder with its `*.index.json`; or a store, whose
            checkpoint keeps its step or name unless `step` or `name` says otherwise.
        dst: The store.
        source_format: Its format, where it shall not be found out from the content.
        metadata: Added to what the file says about itself; the caller's wins.
        unknown: What becomes of objects whose class is code: "opaque" carries the plain data they
            consist of, `{"class": "pkg.Name", "state": ...}`; "refuse" is an error.
        allow_partial: Go on where something cannot be carried; the report's `skipped` names it.
        rules: Other names and layouts: rows like `{"rename": "^module/", "to": ""}`, applied in
            order, each to what the one before made; `docs/convert.md` lists their kinds.
        dry_run: Write nothing: the report says what would be carried, and what each rule matches.
    Raises:
        UsageError: A rule is not understood, touches nothing, or does not fit what it touches.
        UnsupportedError: A leaf cannot be carried; it is named, and nothing was written.
        CorruptError: The file is damaged or hostile, or changed while it was read.
    """
    from ckptfmt.engine import SaveOptions, parse_where, save_tree, settle, settle_call

    parsed = parse_rules(rules)
    source = read_source(src, source_format=source_format)
    mapped = map_tree(source.tree, source.columns, parsed)
    _check_complete(
        source.path, mapped.tree, unknown=unknown, allow_partial=allow_partial or dry_run
    )
    if dry_run:
        return _report(None, mapped)
    metrics_there = mapped.tree.metrics if source.info is None else source.info.metrics
    if step is None and name is None:
        step = mapped.tree.step if source.info is None else source.info.step
        if source.info is not None and step is None:
            name = source.info.name
    lazy = _source(source.path, mapped.tree)
    tree = lazy.tree()
    backend, request = settle_call(
        tree,
        dst,
        step,
        name,
        metadata={**_foreign_metadata(mapped.tree), **metadata},
        metrics={**metrics_there, **metrics},
        if_exists=if_exists,
        options=SaveOptions(codec, chunk_nbytes, digest, durable),
        bases=None,
        timeout_s=_TIMEOUT_S,
        progress=progress,
    )
    settle(backend)
    comparison = _Comparison(lazy, request)
    info = save_tree(tree, backend, replace(request, check=comparison.before_commit))
    if not comparison.done:
        comparison.with_kept(parse_where(dst)[0], info)
    return _report(info, mapped)


def _report(info: CheckpointInfo | None, mapped: Mapped) -> ConvertReport:
    tree = mapped.tree
    return ConvertReport(
        info=info,
        format=tree.format,
        loaded=list(tree.tensors),
        renamed=mapped.renamed,
        transformed=mapped.transformed,
        dropped=mapped.dropped,
        skipped={**tree.skipped, **tree.ignored},
        opaque=dict(tree.opaque),
        rules=mapped.rules,
        notes=mapped.notes,
        nbytes=tree.nbytes,
    )


def _check_complete(
    path: StrPath, tree: ForeignTree, *, unknown: Unknown, allow_partial: bool
) -> None:
    """Nothing is left out, or taken apart, that the caller does not know of."""
    if unknown not in ("opaque", "refuse"):
        raise UsageError(
            "not a legal choice",
            reason="unknown",
            where="unknown=",
            expected="opaque or refuse",
            found=repr(unknown),
        )
    if tree.opaque and unknown == "refuse":
        raise UnsupportedError(
            f"{len(tree.opaque)} objects are of classes that are code",
            reason="foreign-opaque",
            where=os.fspath(path),
            found=listed({name or "the root": of for name, of in tree.opaque.items()}),
            do='unknown="opaque" (--unknown opaque) carries the plain data they consist of',
        )
    if tree.skipped and not allow_partial:
        raise UnsupportedError(
            f"{len(tree.skipped)} items cannot be carried",
            reason="foreign-partial",
            where=os.fspath(path),
            found=listed(tree.skipped),
            do="allow_partial=True (--allow-partial) carries the rest",
        )


def listed(reasons: Mapping[str, str]) -> str:
    """The first few of them, for a message."""
    shown = [f"{name}: {reason}" for name, reason in islice(reasons.items(), _LISTED_MAX)]
    more = len(reasons) - len(shown)
    return "; ".join(shown) + (f" and {more:,} more" if more else "")


def _source(path: StrPath, tree: ForeignTree) -> ForeignCheckpoint:
    """The source of a save, whose leaves have read nothing yet."""
    for tensor in tree.tensors.values():
        if tensor.must_check:
            # What cannot be carried is refused before anything is written.
            check_values(tensor)
    return ForeignCheckpoint(os.fspath(path), tree)


def _foreign_metadata(tree: ForeignTree) -> dict[str, object]:
    """What the file says about itself; keys that are the format's own are not for files to give."""
    return {
        f"source.{key}" if key.startswith("ckptfmt.") else key: value
        for key, value in tree.metadata.items()
    }


class _Comparison:
    """Compares digests with the source once more: of what is written, while nothing shows it yet, so
    that a checkpoint which it would replace stays; or of what was there and is kept."""

    def __init__(self, source: ForeignCheckpoint, request: SaveRequest) -> None:
        self._source, self._request = source, request
        self.done = False

    def before_commit(self, section: TreeSection) -> None:
        wrong = self._first_difference(section, self._request.options.digest)
        if wrong is not None:
            raise CorruptError(
                "the source changed while it was converted",
                reason="foreign-changed",
                where=wrong,
                do="nothing was committed; convert again",
            )
        self.done = True

    def with_kept(self, store: Store, info: CheckpointInfo) -> None:
        with store.open(info.name) as checkpoint:
            index = checkpoint.index
            wrong = self._first_difference(index.tree, index.about.algorithm)
            if wrong is None:
                wrong = _other_values(self._source.flat, index)
        if wrong is not None:
            raise ExistsError(
                "the checkpoint that was kept holds another tree than the source",
                reason="other-tree",
                where=f"{info.name} of {info.url}",
                found=f"{wrong} differs",
                do="choose another step or name, or if_exists='replace'",
            )

    def _first_difference(self, section: TreeSection, algorithm: str) -> str | None:
        tree, request = self._source.foreign, self._request
        done, total = 0, tree.nbytes
        seen: set[Hashable] = set()
        for name, tensor in tree.tensors.items():
            if tensor.identity in seen:
                continue  # a tie is one tensor
            if tensor.identity is not None:
                seen.add(tensor.identity)
            if not _same_digests(section, algorithm, name, tensor):
                return tensor.where
            done += tensor.nbytes
            if callable(request.progress):
                event = Event("check", time.time(), request.name, request.step, done, total)
                request.progress(event)
        return None


def _other_values(flat: FlatTree, index: Index) -> str | None:
    """A leaf of the source that is no tensor and differs in a checkpoint that was kept."""
    from ckptfmt.format import LEAF_VALUE

    if list(index.tree.leaf_names) != flat.names:
        return "the list of names"
    kinds, rows = index.tree.leaf_kinds.tolist(), index.tree.leaf_rows.tolist()
    for at, name in enumerate(flat.names):
        if flat.kinds[at] != kinds[at]:
            return f"the kind of {name}"
        if kinds[at] == LEAF_VALUE and index.tree.values[rows[at]] != flat.values[flat.rows[at]]:
            return f"the value {name}"
    return None


def _same_digests(section: TreeSection, algorithm: str, name: str, tensor: ForeignTensor) -> bool:
    """Whether a stored tensor has the digests of a foreign one, cut as its tree cuts it."""
    from ckptfmt.format import digest

    position = section.leaf_positions.get(name)
    if position is None:
        return False
    row = int(section.leaf_rows[position])
    if section.shape(row) != tensor.shape or section.dtype(row).name != tensor.dtype:
        return False
    bytes_of = _packed_bytes(tensor, section.dtype(row))
    first, last = (int(n) for n in section.tensor_region_starts[row : row + 2])
    for region in range(first, last):
        origin, extent = section.box(region)
        read, at = bytes_of(origin, extent), 0
        begin, end = (int(n) for n in section.region_chunk_starts[region : region + 2])
        for chunk in range(begin, end):
            nbytes = int(section.chunk_raw[chunk])
            found = digest(read(at, nbytes), algorithm)
            if found != section.chunk_digests[chunk].tobytes():
                return False
            at += nbytes
    return True


def _packed_bytes(
    tensor: ForeignTensor, dtype: Dtype
) -> Callable[[Sequence[int], Sequence[int]], Callable[[int, int], memoryview]]:
    """What reads (start, nbytes) of the packed bytes of a box (origin, extent) of a tensor."""
    from ckptfmt.format import pack_array

    box = tensor.box
    if box is not None and is_streamed(tensor):
        return lambda origin, extent: Window(PackedStream(extent, dtype, shifted(box, origin))).read
    array = tensor.fetch()

    def whole(origin: Sequence[int], extent: Sequence[int]) -> Callable[[int, int], memoryview]:
        # The Ellipsis keeps a 0-d array an array.
        sides: tuple[Any, ...] = (*(slice(o, o + e) for o, e in zip(origin, extent)), ...)
        data = memoryview(pack_array(array[sides]))
        return lambda at, nbytes: data[at : at + nbytes]

    return whole
