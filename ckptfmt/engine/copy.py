"""copy: checkpoints from one store to another; push, pull and mirrors use it.

Data files go over whole, under the same id, and only where they are missing; every chunk is checked
on the way, so that damage does not spread. `about` and `tree` go over byte for byte, last of all, as
a new document (spec 09, M09-5). To the other store this is a save like any other: it is announced,
and the collector's lists are read before its commit and after it (spec 08).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import numpy as np

from ckptfmt.engine.catalog import (
    Listed,
    list_checkpoints,
    list_notes,
    newest_readable,
    next_generation,
    read_tag,
)
from ckptfmt.engine.commit import check_or_withdraw, delete_lower, put_index, sync_files
from ckptfmt.engine.coordinate import (
    begin,
    clean_abandoned,
    condemned,
    end,
    ensure_store_marker,
    new_txn,
    unusable,
)
from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.verify import check_body
from ckptfmt.errors import ConflictError, CorruptError, ExistsError, NotFoundError, StorageError
from ckptfmt.events import Progress
from ckptfmt.format import (
    FOOTER_NBYTES,
    HEAD_NBYTES,
    FilesSection,
    Index,
    finish_file,
    moved_index,
    parse_footer,
    parse_head,
    parse_index,
    parse_table,
    salted_table,
)
from ckptfmt.reports import CopyReport
from ckptfmt.storage import Backend, Writer
from ckptfmt.types import Key

REWRITES_MAX = 5
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """How to copy.

    Attributes:
        replace: Another tree of the same name in the other store is replaced.
        bytes_per_s: Not faster than that; None: as fast as it goes.
        executor: Files are copied by its workers; None: one after another.
    """

    replace: bool = False
    bytes_per_s: float | None = None
    executor: Executor | None = None
    progress: Progress = False


@dataclass(frozen=True, slots=True)
class _Moved:
    """An index whose files have other ids in the other store."""

    name: str
    data: bytes
    index: Index
    ids: dict[str, str]
    nbytes: dict[str, int]

    def sizes(self) -> dict[str, int]:
        return {self.ids[file]: self.nbytes[file] for file in self.index.files.ids}

    def pack(self, commit_id: bytes) -> bytes:
        sizes = self.sizes()
        ids = sorted(sizes)
        position = {file: n for n, file in enumerate(ids)}
        # Old row -> new row: files stand sorted by their ids, which a salt has changed.
        rows = np.array([position[self.ids[file]] for file in self.index.files.ids], np.uint32)
        placement = self.index.placement
        if len(rows):
            placement = replace(placement, files=rows[placement.files])
        files = FilesSection(ids, np.array([sizes[file] for file in ids], np.uint64))
        return moved_index(self.data, commit_id, files, placement)


def copy_checkpoints(
    source: Backend, target: Backend, chosen: Sequence[Listed], request: CopyRequest
) -> CopyReport:
    """Copy checkpoints, oldest first as given; each is committed before the next begins.

    Raises:
        CorruptError: Bytes of the source are damaged; that checkpoint is not committed.
        ExistsError: The other store has another tree under this name.
    """
    ensure_store_marker(target)
    clean_abandoned(target)
    documents = [_read(source, listed) for listed in chosen]
    total = sum(_missing(target, [index for _, index in documents]).values())
    copied: list[str] = []
    kept: list[str] = []
    written: dict[str, int] = {}
    reused: dict[str, int] = {}
    with Reporter(request.progress, "copy", total) as reporter:
        for (data, index), listed in zip(documents, chosen):
            job = _Job(source, target, request, reporter.advance)
            name = listed.name
            (copied if job.run(name, data, index) else kept).append(name)
            written |= job.written
            reused |= {file: n for file, n in job.reused.items() if file not in written}
            _copy_notes(source, target, index.about.txn.hex())
    return CopyReport(
        target.url, copied, kept, len(written), sum(written.values()), sum(reused.values())
    )


def _read(source: Backend, listed: Listed) -> tuple[bytes, Index]:
    data = bytes(source.get(listed.key, 0, listed.nbytes))
    return data, parse_index(data, listed.key)


def _missing(target: Backend, indexes: Sequence[Index]) -> dict[str, int]:
    """Data file -> bytes, of those that the other store lacks."""
    wanted: dict[str, int] = {}
    for index in indexes:
        wanted |= dict(zip(index.files.ids, index.files.nbytes.tolist()))
    return {file: n for file, n in wanted.items() if not _is_there(target, file, n)}


def _is_there(target: Backend, file: str, nbytes: int) -> bool:
    found = target.stat(Key(f"data/{file}"))
    if found is None or found.nbytes != nbytes:
        return False
    return target.stat(Key(f"damaged/{file}")) is None


class _Job:
    """One checkpoint on its way."""

    def __init__(
        self,
        source: Backend,
        target: Backend,
        request: CopyRequest,
        advance: Callable[[int], None],
    ) -> None:
        self._source, self._target, self._request = source, target, request
        self._advance = advance
        self.written: dict[str, int] = {}
        self.reused: dict[str, int] = {}

    def run(self, name: str, data: bytes, index: Index) -> bool:
        """True once it is committed; False where the other store has it already."""
        if self._has(name, index):
            return False
        target, txn = self._target, new_txn()
        begin(target, txn, step=index.about.step, name=name, bases=[])
        try:
            self._move(name, data, index, txn)
        except StorageError as error:
            if error.reason != "commit-unknown":
                end(target, txn)
            raise
        except BaseException:
            end(target, txn)
            raise
        end(target, txn)
        return True

    def _has(self, name: str, index: Index) -> bool:
        """Whether the same tree is there, whole; refuses another one unless it may be replaced."""
        target = self._target
        if read_tag(target, name) is not None and name not in list_checkpoints(target):
            _refuse(name, target, "a tag of this name", "untag it there first")
        found = newest_readable(target, list_checkpoints(target).get(name, []))
        if found is None:
            return False
        there = found[1]
        if there.about.tree_digest == index.about.tree_digest:
            return not unusable(
                target, dict(zip(there.files.ids, there.files.nbytes.tolist()))
            ) and not any(target.stat(Key(f"damaged/{file}")) for file in there.files.ids)
        if not (self._request.replace or name == "main"):
            _refuse(name, target, "another tree", "delete it there first, or copy another step")
        return False

    def _move(self, name: str, data: bytes, index: Index, txn: str) -> None:
        target = self._target
        sizes = dict(zip(index.files.ids, index.files.nbytes.tolist()))
        ids = {file: file for file in sizes}
        nbytes = dict(sizes)
        bad: set[str] = set()
        for attempt in range(REWRITES_MAX):
            named = condemned(target)
            wanted = [
                file
                for file in sizes
                if ids[file] in named | bad or not _is_there(target, ids[file], nbytes[file])
            ]
            for file in sizes.keys() - set(wanted):
                self.reused.setdefault(ids[file], nbytes[file])
            task = partial(
                copy_file,
                self._source,
                target,
                txn=txn,
                avoid=frozenset(named | bad),
                bytes_per_s=self._request.bytes_per_s,
                advance=self._advance if self._request.executor is None else _nothing,
            )
            run = map if self._request.executor is None else self._request.executor.map
            numbers = range(attempt * len(sizes), attempt * len(sizes) + len(wanted))
            for file, (new, size) in zip(wanted, run(task, wanted, numbers)):
                ids[file], nbytes[file] = new, size
                self.written[new] = size
                if self._request.executor is not None:
                    self._advance(size)
                target.delete(Key(f"damaged/{new}"))
            document = _Moved(name, data, index, ids, nbytes)
            sync_files(target, document.sizes())
            bad = unusable(target, document.sizes())
            if not bad:
                self._commit(document)
                return
        raise ConflictError(
            "a collector condemned files of this copy again and again",
            reason="collected",
            where=f"data/{min(bad)}",
            do="run gc less often there, or with a longer grace, and copy again",
        )

    def _commit(self, document: _Moved) -> None:
        target, put = self._target, None
        while put is None:
            generation = next_generation(target, document.name)
            put = put_index(target, document, generation, durable=True, timeout_s=_TIMEOUT_S)
        check_or_withdraw(target, document, put)
        delete_lower(target, put)


def _nothing(nbytes: int) -> None:
    return


def _refuse(name: str, target: Backend, found: str, do: str) -> NoReturn:
    raise ExistsError(
        "the other store has this name",
        reason="copy",
        where=f"{name} in {target.url}",
        found=found,
        do=do,
    )


class _Tee:
    """What is read of one file of the source is written to its copy, at the same place: each byte
    once and in order, up to where the table begins."""

    def __init__(
        self, source: Backend, writer: Writer, table_offset: int, bytes_per_s: float | None
    ) -> None:
        self._source, self._writer = source, writer
        self._done, self._end = 0, table_offset
        self._pace_s = 1 / bytes_per_s if bytes_per_s else 0.0

    def get(self, key: Key, start: int, stop: int) -> memoryview:
        began_s = time.monotonic()
        window = self._source.get(key, start, stop)
        first, last = max(start, self._done), min(stop, self._end)
        if last > first:
            self._writer.write(first, window[first - start : last - start])
            self._done = last
            early_s = (last - first) * self._pace_s - (time.monotonic() - began_s)
            if early_s > 0:
                time.sleep(early_s)
        return window


def copy_file(
    source: Backend,
    target: Backend,
    file: str,
    number: int,
    *,
    txn: str,
    avoid: frozenset[str],
    bytes_per_s: float | None = None,
    advance: Callable[[int], None] = _nothing,
) -> tuple[str, int]:
    """Copy one data file, checking all of it on the way; gives its id there and its size.

    Args:
        number: Tells this file from the others of the copy while it has no name yet.
        avoid: Ids that a collector of the other store has named: the same content goes under
            another one then.
    Raises:
        CorruptError: The source's file is damaged; nothing of it is visible in the other store.
    """
    key = Key(f"data/{file}")
    entry = source.stat(key)
    if entry is None:
        raise NotFoundError(
            "data file is missing",
            reason="object",
            where=f"{key} in {source.url}",
            do="see ckptfmt verify; an older checkpoint may be whole",
        )
    start = max(0, entry.nbytes - FOOTER_NBYTES)
    footer = parse_footer(source.get(key, start, entry.nbytes), entry.nbytes, key)
    stop = footer.table_offset + footer.table_nbytes
    raw = bytes(source.get(key, footer.table_offset, stop))
    table = parse_table(raw, footer, key)
    if footer.id != file:
        _damaged(key, f"its content belongs to the id {footer.id}")
    ends = table.chunk_offsets.astype(np.int64) + table.chunk_stored.astype(np.int64)
    end, salt, new = int(ends[-1]) if len(ends) else HEAD_NBYTES, table.salt, raw
    while (made := finish_file(new, end, footer.algorithm))[2] in avoid:
        salt += 1
        new = salted_table(raw, salt)
    offset, tail, new_id = made
    nbytes = offset + len(tail)
    late = target.capabilities.late_key
    final = Key(f"data/{new_id}")
    writer = target.create(Key(f"tmp/{txn}-{number}") if late else final, nbytes)
    try:
        problems: list[str] = []
        tee = _Tee(source, writer, footer.table_offset, bytes_per_s)
        parse_head(tee.get(key, 0, HEAD_NBYTES), key)
        check_body(
            tee.get,
            key,
            (footer, table),
            entry.nbytes,
            lambda start, stop, reason, tensor="": problems.append(f"{tensor} {reason}".strip()),
            advance=advance,
        )
        if problems:
            _damaged(key, problems[0])
        writer.write(offset, tail)
        writer.finish(durable=True, key=final if late else None)
    except BaseException:
        writer.abort()
        raise
    return new_id, nbytes


def _damaged(key: Key, found: str) -> NoReturn:
    raise CorruptError(
        "data file is damaged, so it is not copied",
        reason="copy",
        where=key,
        found=found,
        do="see ckptfmt verify; the next save of the same tensors writes them anew",
    )


def _copy_notes(source: Backend, target: Backend, txn: str) -> None:
    """Notes follow the save: what was noted here and not there."""
    there = {bytes(target.get(e.key, 0, e.nbytes)) for _, e in list_notes(target).get(txn, [])}
    for number, entry in list_notes(source).get(txn, []):
        data = bytes(source.get(entry.key, 0, entry.nbytes))
        if data in there:
            continue
        while not target.put_if_absent(Key(f"notes/{txn}~{number}.index"), data, durable=True):
            number += 1
