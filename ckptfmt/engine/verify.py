"""Verification: every byte of indexes and data files, padding and tables included. Spec: 05, 07, 08.

A data file is read once, whole: its head, chunks, table, footer and zeros are checked against each
other, then the placement of every index against the file's table. Damages are returned, with the
checkpoint and tensor that they hit; damaged files are marked (I7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ckptfmt.engine.catalog import (
    Listed,
    list_indexes,
    list_notes,
    nothing_there,
    read_index,
    read_tag,
)
from ckptfmt.engine.contents import problems_of_long_values, problems_of_tree
from ckptfmt.engine.coordinate import MARKER, check_store_marker
from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.read import mark_damaged
from ckptfmt.engine.select import Matcher, select_positions
from ckptfmt.errors import FormatError, NotFoundError
from ckptfmt.events import Progress
from ckptfmt.format import (
    FOOTER_NBYTES,
    HEAD_NBYTES,
    LEAF_VALUE,
    TREE,
    DataTable,
    Footer,
    Index,
    check_chunk,
    decode_chunk,
    gaps,
    pack_head,
    pack_table,
    parse_footer,
    parse_head,
    parse_index,
    parse_table,
    starts,
)
from ckptfmt.reports import Damage, VerifyReport
from ckptfmt.storage import Backend
from ckptfmt.types import Key, Select

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptfmt.engine.open import Checkpoint

_READ_NBYTES = 64 << 20


@dataclass(slots=True)
class FileState:
    """What was found of one data file: its table, its damages, and how much was read."""

    file: str
    nbytes: int = 0
    table: DataTable | None = None
    problems: list[Damage] = field(default_factory=list)


def verify_store(
    backend: Backend,
    listed: Listed | None = None,
    *,
    executor: Executor | None = None,
    progress: Progress = False,
) -> VerifyReport:
    """Verify one checkpoint, or everything in the store (quarantined ones, notes, tags, marker).

    Args:
        executor: Files are read by its workers; None: one after another.
    Raises:
        NotFoundError: There is no store: "no damage" would be the worst answer to a wrong path.
    """
    problems: list[Damage] = []
    if listed is not None:
        rows = [listed]
    else:
        problems += _verify_rest(backend)
        rows = [g for prefix in ("checkpoints/", "quarantine/") for g in _all(backend, prefix)]
        if not rows and not problems and backend.stat(MARKER) is None:
            raise nothing_there(backend)
    indexes: dict[Listed, Index] = {}
    for row in rows:
        try:
            index = read_index(backend, row)
            assert index.tree.leaf_names is not None  # checked here: an opening leaves them packed
            indexes[row] = index
        except NotFoundError:
            continue  # deleted since the listing
        except FormatError as error:
            problems.append(Damage(row.key, 0, row.nbytes, row.name, "", str(error)))
    files = _files_of(indexes.values())
    total = sum(files.values())
    by_id = {}
    with Reporter(progress, "verify", total) as reporter:
        if executor is None:
            for file in files:
                by_id[file] = verify_file(backend, file, advance=reporter.advance)
        else:
            for state in executor.map(partial(verify_file, backend), files):
                by_id[state.file] = state
                reporter.advance(state.nbytes)
    for row, index in indexes.items():
        mine = _damages_of(row, index, by_id)
        problems += mine + _damages_of_tree(backend, row, index, mine)
    problems += _unnamed(by_id.values(), problems)
    for file in sorted({p.file.removeprefix("data/") for p in problems if p.file in _keys(by_id)}):
        mark_damaged(backend, file)
    return VerifyReport(tuple(problems), len(rows), len(files), total)


def _all(backend: Backend, prefix: str) -> list[Listed]:
    found = list_indexes(backend, prefix)
    return [listed for name in sorted(found) for listed in found[name]]


def _keys(by_id: Mapping[str, FileState]) -> set[str]:
    return {f"data/{file}" for file in by_id}


def _files_of(indexes: Iterable[Index]) -> dict[str, int]:
    made: dict[str, int] = {}
    for index in indexes:
        made.update(zip(index.files.ids, index.files.nbytes.tolist()))
    return made


def _verify_rest(backend: Backend) -> list[Damage]:
    """Notes, tags and the marker: none of them is needed to read a checkpoint."""
    problems = []

    def attempt(key: str, nbytes: int, call: Callable[[], object]) -> None:
        try:
            call()
        except NotFoundError:
            pass
        except FormatError as error:
            problems.append(Damage(key, 0, nbytes, "", "", str(error)))

    attempt("ckptfmt.json", 0, lambda: check_store_marker(backend))
    for notes in list_notes(backend).values():
        for _, entry in notes:
            attempt(
                entry.key,
                entry.nbytes,
                partial(_parse_note, backend, entry.key, entry.nbytes),
            )
    for entry in backend.list("tags/"):
        attempt(
            entry.key, entry.nbytes, partial(read_tag, backend, entry.key.removeprefix("tags/"))
        )
    return problems


def _parse_note(backend: Backend, key: Key, nbytes: int) -> Index:
    return parse_index(backend.get(key, 0, nbytes), key)


# -- one file -----------------------------------------------------------------------------------


def verify_file(
    backend: Backend, file: str, *, advance: Callable[[int], None] = lambda nbytes: None
) -> FileState:
    """Read a data file once and check all of it. Picklable arguments, if the backend is.

    Args:
        advance: Told of the bytes read, window by window: a file may take minutes.
    """
    key, state = Key(f"data/{file}"), FileState(file)

    def bad(start: int, stop: int, reason: str, tensor: str = "") -> None:
        state.problems.append(Damage(key, start, stop, "", tensor, reason))

    entry = backend.stat(key)
    if entry is None:
        bad(0, 0, "data file is missing")
        return state
    state.nbytes = entry.nbytes
    start = max(0, entry.nbytes - FOOTER_NBYTES)
    try:
        footer = parse_footer(backend.get(key, start, entry.nbytes), entry.nbytes, key)
        start = footer.table_offset  # from here on, the table itself is what is damaged
        stop = start + footer.table_nbytes
        raw = backend.get(key, start, stop)
        table = parse_table(raw, footer, key)
    except (FormatError, NotFoundError) as error:
        bad(start, entry.nbytes, f"table cannot be read: {error}")
        return state
    state.table = table
    if footer.id != file:
        bad(entry.nbytes - FOOTER_NBYTES, entry.nbytes, f"content belongs to the id {footer.id}")
    try:
        head = backend.get(key, 0, HEAD_NBYTES)
        algorithm = parse_head(head, key)
        if algorithm != footer.algorithm:
            bad(0, HEAD_NBYTES, f"head says {algorithm}, footer {footer.algorithm}")
        elif head != pack_head(algorithm) and pack_table(table) == raw:
            # Nothing in the table is newer than this version, so the head's minor cannot be either.
            bad(0, HEAD_NBYTES, "head is of another version than the table")
    except (FormatError, NotFoundError) as error:
        bad(0, HEAD_NBYTES, str(error))
    try:
        check_body(backend.get, key, (footer, table), entry.nbytes, bad, advance=advance)
    except (FormatError, NotFoundError) as error:
        bad(0, entry.nbytes, f"data file cannot be read: {error}")
    return state


def check_body(
    get: Callable[[Key, int, int], memoryview],
    key: Key,
    found: tuple[Footer, DataTable],
    nbytes: int,
    bad: Callable[..., None],
    *,
    advance: Callable[[int], None],
) -> None:
    """Chunks and zeros, in windows of the file; `bad` is told of each damage.

    All of the file is read but its head, its table and its footer.
    """
    footer, table = found
    region_ends = starts(table.region_nchunks)[1:]
    offsets = table.chunk_offsets.astype(np.int64)
    ends = offsets + table.chunk_stored.astype(np.int64)
    empty = gaps(table, footer, nbytes)
    chunk = gap = done = 0
    while chunk < len(offsets) or gap < len(empty):
        at = min(
            int(offsets[chunk]) if chunk < len(offsets) else nbytes,
            empty[gap][0] if gap < len(empty) else nbytes,
        )
        last = max(chunk, int(np.searchsorted(ends, at + _READ_NBYTES, "right")))
        if last == chunk < len(offsets) and int(offsets[chunk]) == at:
            last = chunk + 1  # a chunk larger than the window
        stop = max(at + _READ_NBYTES, int(ends[last - 1]) if last > chunk else 0)
        stop = min(stop, nbytes)
        window = get(key, at, stop)
        advance(stop - max(at, done))
        done = stop
        for row in range(chunk, last):
            a, b = int(offsets[row]), int(ends[row])
            name = table.region_names[int(np.searchsorted(region_ends, row, "right"))]
            try:
                _check_stored(table, row, window[a - at : b - at], footer.algorithm, key)
            except FormatError as error:
                bad(a, b, str(error), name)
        chunk = last
        while gap < len(empty) and empty[gap][0] < stop:
            a, b = empty[gap]
            _check_zeros(window[a - at : min(b, stop) - at], a, bad)
            if b > stop:
                empty[gap] = (stop, b)
                break
            gap += 1


def _check_stored(table: DataTable, row: int, stored: memoryview, algorithm: str, key: Key) -> None:
    start = int(table.chunk_offsets[row])
    where = f"{key}[{start}:{start + len(stored)})"
    pipeline = table.pipelines[int(table.chunk_codecs[row])]
    raw = table.chunk_digests[row].tobytes()
    if not pipeline:
        check_chunk(stored, raw, algorithm, where)
        return
    nbytes = int(table.chunk_raw[row])
    digests = (table.stored_digest(row), raw)
    decode_chunk(stored, pipeline, nbytes, digests, algorithm=algorithm, where=where)


def _check_zeros(window: memoryview, start: int, bad: Callable[..., None]) -> None:
    hits = np.flatnonzero(np.frombuffer(window, np.uint8))
    if len(hits):
        bad(start + int(hits[0]), start + int(hits[-1]) + 1, "padding is not zero")


# -- what is hit --------------------------------------------------------------------------------


def _damages_of(listed: Listed, index: Index, states: Mapping[str, FileState]) -> list[Damage]:
    """The damages of an index's files that hit it, by tensor, and where its placement disagrees
    with a file's table."""
    made: list[Damage] = []
    files = [states[file] for file in index.files.ids]
    placement, tree = index.placement, index.tree
    wide = placement.offsets.astype(np.int64)
    ends = wide + placement.stored
    owner = np.repeat(tree.region_tensors.astype(np.int64), tree.region_nchunks)
    for number, state in enumerate(files):
        mine = placement.files == number
        for problem in state.problems:
            if state.table is None:
                hit = np.flatnonzero(mine)
            else:
                hit = np.flatnonzero(mine & (wide < problem.stop) & (ends > problem.start))
            for tensor in np.unique(owner[hit]).tolist():
                made.append(
                    replace(problem, checkpoint=listed.name, tensor=_name_of(index, tensor))
                )
        expected = int(index.files.nbytes[number])
        if state.nbytes not in (expected, 0):
            reason = f"file has {state.nbytes} bytes, the index says {expected}"
            made.append(Damage(f"data/{state.file}", 0, state.nbytes, listed.name, "", reason))
        if state.table is not None:
            made += _disagreements(listed, index, state, np.flatnonzero(mine), owner)
    return made


def _damages_of_tree(
    backend: Backend,
    listed: Listed,
    index: Index,
    damages: Sequence[Damage],
    positions: Sequence[int] | None = None,
) -> list[Damage]:
    """What of the tree does not parse, though its bytes are those that were written."""
    hit = {damage.tensor for damage in damages}
    every = range(len(index.tree.leaf_names)) if positions is None else positions
    found = problems_of_tree(index, positions)
    found += problems_of_long_values(backend, index, every, lambda name: name not in hit)
    section = index.header.sections[TREE]
    start, stop = section.offset, section.offset + section.stored_nbytes
    return [Damage(listed.key, start, stop, listed.name, name, reason) for name, reason in found]


def _name_of(index: Index, tensor: int) -> str:
    return index.tree.leaf_names[int(index.tree.tensor_first_leaf[tensor])]


def _disagreements(
    listed: Listed,
    index: Index,
    state: FileState,
    rows: np.ndarray[tuple[int], np.dtype[np.intp]],
    owner: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> list[Damage]:
    """Chunks that the file's table does not have as the index says."""
    table, placement = state.table, index.placement
    assert table is not None
    shapes = table.chunk_digests.shape[1:], index.tree.chunk_digests.shape[1:]
    if shapes[0] != shapes[1] or not len(table.chunk_digests):
        good = np.zeros(len(rows), bool)
    else:
        offsets = placement.offsets[rows]
        at = np.searchsorted(table.chunk_offsets, offsets)
        inside = at < len(table.chunk_offsets)
        at = np.minimum(at, len(table.chunk_offsets) - 1)
        good = inside & (table.chunk_offsets[at] == offsets)
        good &= table.chunk_stored[at] == placement.stored[rows]
        good &= table.chunk_raw[at] == index.tree.chunk_raw[rows]
        good &= (table.chunk_digests[at] == index.tree.chunk_digests[rows]).all(axis=1)
    made = []
    for row in rows[~good].tolist():
        start = int(placement.offsets[row])
        made.append(
            Damage(
                f"data/{state.file}",
                start,
                start + int(placement.stored[row]),
                listed.name,
                _name_of(index, int(owner[row])),
                "the file's table has no such chunk",
            )
        )
    return made


def _unnamed(states: Iterable[FileState], named: Sequence[Damage]) -> list[Damage]:
    """Damages that hit no tensor of any checkpoint: padding, tables, chunks that nobody uses."""
    seen = {(p.file, p.start, p.stop) for p in named}
    return [p for s in states for p in s.problems if (p.file, p.start, p.stop) not in seen]


def verify_checkpoint(checkpoint: Checkpoint, names: Select) -> VerifyReport:
    """The selected leaves of an open checkpoint."""
    index, info = checkpoint.index, checkpoint.info
    listed = Listed(info.name, info.generation, Key(f"checkpoints/{info.name}"), 0)
    all_names = checkpoint.index.tree.leaf_names
    positions = select_positions(
        all_names, names, f"{checkpoint.info.name} of {checkpoint.info.url}"
    )
    everything = Matcher(names).everything
    kinds, leaf_rows = index.tree.leaf_kinds[positions], index.tree.leaf_rows[positions]
    rows = set(leaf_rows[kinds != LEAF_VALUE].tolist())
    chosen = {_name_of(index, row) for row in rows}
    used = np.isin(
        np.repeat(index.tree.region_tensors, index.tree.region_nchunks), np.array(sorted(rows))
    )
    numbers = np.unique(index.placement.files[used]).tolist() if len(used) else []
    states = {file: FileState(file) for file in index.files.ids}
    for number in numbers:
        file = index.files.ids[number]
        states[file] = verify_file(checkpoint.backend, file)
        if states[file].problems:
            mark_damaged(checkpoint.backend, file)
    found = _damages_of(listed, index, states)
    problems = [p for p in found if everything or not p.tensor or p.tensor in chosen]
    problems += _unnamed(states.values(), problems) if everything else []
    problems += _damages_of_tree(
        checkpoint.backend, listed, index, problems, None if everything else positions
    )
    total = sum(state.nbytes for state in states.values())
    return VerifyReport(tuple(problems), 1, len(numbers), total)
