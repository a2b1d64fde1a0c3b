"""`convert`: a foreign file becomes a checkpoint, streamed, and is then compared with its source."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import CorruptError, ExistsError
from ckptfmt.events import Event, Progress
from ckptfmt.foreign.base import ForeignTensor, ForeignTree
from ckptfmt.foreign.opening import ForeignCheckpoint
from ckptfmt.foreign.registry import read_foreign
from ckptfmt.reports import ConvertReport
from ckptfmt.types import CheckpointInfo, DigestName, IfExists, StrPath

if TYPE_CHECKING:
    from ckptfmt.engine import Store
    from ckptfmt.format import Index


def convert(
    src: StrPath,
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
) -> ConvertReport:
    """Carry a foreign file or folder into a store: every tensor, bit for bit, or an error.

    Values are streamed from the mapped file. After the commit every chunk's digest is computed
    again from the source and compared with the checkpoint's; a source that changed meanwhile costs
    the checkpoint, not the caller's trust.

    Args:
        src: For example `model.safetensors`, or a folder with its `*.index.json`.
        dst: The store.
        source_format: Its format, where it shall not be found out from the content.
        metadata: Added to what the file says about itself; the caller's wins.
    Raises:
        UnsupportedError: A tensor cannot be carried; it is named, and nothing was written.
        CorruptError: The file is damaged or hostile, or changed while it was read.
    """
    from ckptfmt.engine import api

    started = datetime.now(UTC)
    tree = read_foreign(src, source_format=source_format)
    info = api.save(
        _nested(src, tree),
        dst,
        step=step,
        name=name,
        metadata={**_foreign_metadata(tree), **metadata},
        metrics=metrics,
        if_exists=if_exists,
        codec=codec,
        chunk_nbytes=chunk_nbytes,
        digest=digest,
        durable=durable,
        progress=progress,
    )
    _check(tree, info, dst, is_new=info.created >= started, progress=progress)
    return ConvertReport(
        info=info,
        format=tree.format,
        loaded=list(tree.tensors),
        renamed={t.foreign_name: n for n, t in tree.tensors.items() if t.foreign_name != n},
        skipped={**tree.skipped, **tree.ignored},
        nbytes=tree.nbytes,
    )


def _nested(path: StrPath, tree: ForeignTree) -> Any:
    """The dict that a save takes: keys as the file has them, leaves that have read nothing yet."""
    for tensor in tree.tensors.values():
        if tensor.must_check:
            # What cannot be carried is refused before anything is written.
            tensor.fetch()
    return ForeignCheckpoint(os.fspath(path), tree).tree()


def _foreign_metadata(tree: ForeignTree) -> dict[str, object]:
    """What the file says about itself; keys that are the format's own are not for files to give."""
    return {
        f"source.{key}" if key.startswith("ckptfmt.") else key: value
        for key, value in tree.metadata.items()
    }


def _check(
    tree: ForeignTree,
    info: CheckpointInfo,
    dst: StrPath | Store,
    *,
    is_new: bool,
    progress: Progress,
) -> None:
    """Compare the digests of the checkpoint with the source; withdraw what this call committed."""
    from ckptfmt.engine import Store

    store = dst if isinstance(dst, Store) else Store(info.url)
    with store.open(info.name) as checkpoint:
        wrong = _first_difference(tree, checkpoint.index, info, progress)
    if wrong is None:
        return
    if not is_new:
        raise ExistsError(
            "the checkpoint that was kept holds another tree than the source",
            reason="other-tree",
            where=f"{info.name} of {info.url}",
            found=f"tensor {wrong} differs",
            do="choose another step or name, or if_exists='replace'",
        )
    store.delete(info.name, force=True)
    raise CorruptError(
        "the source changed while it was converted",
        reason="foreign-changed",
        where=wrong,
        do="the checkpoint was deleted; convert again",
    )


def _first_difference(
    tree: ForeignTree, index: Index, info: CheckpointInfo, progress: Progress
) -> str | None:
    done, total = 0, tree.nbytes
    for name, tensor in tree.tensors.items():
        if not same_digests(index, name, tensor):
            return tensor.where
        done += tensor.nbytes
        if callable(progress):
            progress(Event("check", time.time(), info.name, info.step, done, total))
    return None


def same_digests(index: Index, name: str, tensor: ForeignTensor) -> bool:
    """Whether a stored tensor has the digests of a foreign one, cut as the index cuts it."""
    from ckptfmt.format import digest, pack_array

    section = index.tree
    position = section.leaf_positions.get(name)
    if position is None:
        return False
    row = int(section.leaf_rows[position])
    if section.shape(row) != tensor.shape or section.dtype(row).name != tensor.dtype:
        return False
    array = tensor.fetch()
    first, last = (int(n) for n in section.tensor_region_starts[row : row + 2])
    for region in range(first, last):
        origin, extent = section.box(region)
        # The Ellipsis keeps a 0-d array an array.
        box: tuple[Any, ...] = (*(slice(o, o + e) for o, e in zip(origin, extent)), ...)
        data, at = memoryview(pack_array(array[box])), 0
        begin, end = (int(n) for n in section.region_chunk_starts[region : region + 2])
        for chunk in range(begin, end):
            nbytes = int(section.chunk_raw[chunk])
            found = digest(data[at : at + nbytes], index.about.algorithm)
            if found != section.chunk_digests[chunk].tobytes():
                return False
            at += nbytes
    return True
