"""read: byte ranges -> checked buffers or maps; decode: chunks -> arrays. Spec: 05, 06, 07.

Ranges of one file are joined into runs and read in pieces by a few threads, each piece verified
while it is in cache. A region whose chunks are raw and stand one after another is a view of its
run's buffer; any other is put together in a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.arena import aligned_buffer, fault_in, touch
from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.engine.plan import Run, plan_runs
from ckptfmt.engine.progress import Reporter
from ckptfmt.errors import (
    CheckpointError,
    CorruptError,
    NotFoundError,
    UnsupportedError,
)
from ckptfmt.format import (
    BLOCK_NBYTES,
    CURE,
    Index,
    check_chunk,
    decode_chunk,
    digest_function,
    ragged,
)
from ckptfmt.storage import Backend
from ckptfmt.types import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE_NBYTES = 4 << 20
MAP_NBYTES_MIN = 1 << 20
COPIES_NBYTES_MAX = 256 << 20
"""Of ranges that several tensors share, no more than this is copied in `mode="mmap"`."""

Array: TypeAlias = "NDArray[Any]"


def mark_damaged(backend: Backend, file: str) -> None:
    """Record that a data file is rotten, so that no save reuses it (I7); best effort."""
    try:
        backend.put(Key(f"damaged/{file}"), b"")
    except CheckpointError:
        pass  # a reader may have no right to write; the error that led here is what counts


@dataclass(slots=True)
class _Work:
    """One read: which chunk goes where.

    Attributes:
        shared: Chunk row -> the other wanted rows that have the same stored range.
        is_view: By region row: whether it is handed out as a view of its run's buffer.
        buffers: Region row -> its bytes.
    """

    shared: dict[int, list[int]]
    is_view: NDArray[np.bool_]
    buffers: dict[int, NDArray[np.uint8]] = field(default_factory=dict)


class ChunkReader:
    """Reads and decodes chunks of one checkpoint."""

    def __init__(self, backend: Backend, index: Index, *, verify: bool = True) -> None:
        self.backend, self.index, self.verify = backend, index, verify
        self._local = backend.capabilities.local
        tree = index.tree
        assert tree.leaf_names is not None  # checked before any data file is opened (M07-30)
        self._region_of = np.repeat(np.arange(len(tree.region_nchunks)), tree.region_nchunks)
        ends = np.cumsum(tree.chunk_raw, dtype=np.int64)
        first = tree.region_chunk_starts[:-1]
        base = np.where(first > 0, ends[first - 1], 0) if len(ends) else np.zeros(0, np.int64)
        begins = ends - tree.chunk_raw
        self._starts = begins - base[self._region_of] if len(ends) else begins

    # -- regions --------------------------------------------------------------------------------

    def regions(
        self, regions: NDArray[np.int64], *, own: bool, reporter: Reporter
    ) -> dict[int, NDArray[np.uint8]]:
        """The raw bytes of regions.

        Args:
            regions: Region rows, ascending.
            own: Each gets memory of its own, instead of views of shared buffers.
        """
        tree = self.index.tree
        rows = ragged(tree.region_chunk_starts[regions], tree.region_nchunks[regions])
        self._check_sizes(rows)
        reps, work = self._plan(rows, regions, own)
        for region in regions[~work.is_view[regions]].tolist():
            nbytes = int(tree.region_nbytes[region])
            large = nbytes >= MAP_NBYTES_MIN
            work.buffers[region] = aligned_buffer(nbytes) if large else np.empty(nbytes, np.uint8)
        runs = plan_runs(self.index.placement, reps, groups=self._region_of[reps])
        with Threads() as threads:
            for run in runs:
                self._read_run(run, work, threads, reporter)
            threads.drain()
        return work.buffers

    def _plan(
        self, rows: NDArray[np.int64], regions: NDArray[np.int64], own: bool
    ) -> tuple[NDArray[np.int64], _Work]:
        """The rows to read, one for each stored range, and who gets what."""
        placement = self.index.placement
        files, offsets = placement.files[rows], placement.offsets[rows]
        order = np.lexsort((rows, offsets, files))
        ordered = rows[order]
        same = np.zeros(len(rows), bool)
        same[1:] = (files[order][1:] == files[order][:-1]) & (
            offsets[order][1:] == offsets[order][:-1]
        )
        shared: dict[int, list[int]] = {}
        leads = np.maximum.accumulate(np.where(same, -1, np.arange(len(rows))))
        for position in np.flatnonzero(same).tolist():
            shared.setdefault(int(ordered[leads[position]]), []).append(int(ordered[position]))
        is_view = np.zeros(len(self.index.tree.region_nchunks), bool)
        if not own:
            is_view[regions] = self._contiguous(regions)
        # A stored range is handed out as a view once: no write may reach another name.
        is_view[self._region_of[ordered[same]]] = False
        return ordered[~same], _Work(shared, is_view)

    def _contiguous(self, regions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some regions have raw chunks that are one contiguous range."""
        tree, placement = self.index.tree, self.index.placement
        bad = placement.codecs != 0
        files, offsets = placement.files, placement.offsets.astype(np.int64)
        inner = self._region_of[1:] == self._region_of[:-1]
        apart = (files[1:] != files[:-1]) | (offsets[1:] != offsets[:-1] + placement.stored[:-1])
        bad = bad.copy()
        bad[1:] |= inner & apart
        broken = np.zeros(len(tree.region_nchunks), bool)
        broken[self._region_of[bad]] = True
        made: NDArray[np.bool_] = ~broken[regions]
        return made

    def _read_run(self, run: Run, work: _Work, threads: Threads, reporter: Reporter) -> None:
        # Of a local file whole blocks are read, so that the pieces can come directly from the disk;
        # neighbours may both read the block that they share, the same bytes to the same place.
        block = BLOCK_NBYTES if self._local else 1
        base = run.start - run.start % block
        buffer = aligned_buffer(-(-run.stop // block) * block - base)
        for rows in _pieces(self.index, run):
            first, last = rows[0], rows[-1]
            a = int(self.index.placement.offsets[first])
            b = int(self.index.placement.offsets[last]) + int(self.index.placement.stored[last])
            span = a - a % block, -(-b // block) * block
            out = buffer[span[0] - base : span[1] - base].data
            task = partial(self._read_piece, run.file, span, rows, out, work=work, tell=reporter)
            threads.submit(task, b - a)
        tree = self.index.tree
        whole = np.unique(self._region_of[run.chunks])
        whole = whole[work.is_view[whole]]
        starts = (
            self.index.placement.offsets[tree.region_chunk_starts[whole]].astype(np.int64) - base
        )
        ends = starts + tree.region_nbytes[whole]
        for region, a, b in zip(whole.tolist(), starts.tolist(), ends.tolist()):
            work.buffers[region] = buffer[a:b]

    def _read_piece(
        self,
        file: int,
        span: tuple[int, int],
        rows: Sequence[int],
        out: memoryview,
        *,
        work: _Work,
        tell: Reporter,
    ) -> None:
        a, b = span
        touch(out)
        self._get(file, a, b, out)
        placement = self.index.placement
        chosen = np.array(rows)
        offsets = (placement.offsets[chosen].astype(np.int64) - a).tolist()
        sizes = placement.stored[chosen].tolist()
        if work.is_view[self._region_of[chosen]].all() and not any(r in work.shared for r in rows):
            self._check_raw(rows, [out[o : o + n] for o, n in zip(offsets, sizes)])
            tell.advance(sum(sizes))
            return
        for row, offset, nbytes in zip(rows, offsets, sizes):
            users = [row, *work.shared.get(row, ())]
            copies = [u for u in users if not work.is_view[self._region_of[u]]]
            raw = self._check(row, out[offset : offset + nbytes], needed=bool(copies))
            for user in copies:
                start = int(self._starts[user])
                target = work.buffers[int(self._region_of[user])]
                target[start : start + len(raw)] = np.frombuffer(raw, np.uint8)
            tell.advance(sum(int(self.index.tree.chunk_raw[u]) for u in users))

    def _check_raw(self, rows: Sequence[int], pieces: Sequence[memoryview]) -> None:
        """Verify raw chunks at once; only if one is wrong it is looked for."""
        if not self.verify:
            return
        found = b"".join(map(digest_function(self.index.header.algorithm), pieces))
        if found != self.index.tree.chunk_digests[np.array(rows)].tobytes():
            for row, piece in zip(rows, pieces):
                self._check(row, piece, needed=False)

    def _check_sizes(self, rows: NDArray[np.int64]) -> None:
        """Files that hold less than the index says are refused before memory is taken for them.

        Only where a look costs nothing; elsewhere the read finds out.
        """
        if not self._local:
            return
        for file in np.unique(self.index.placement.files[rows]).tolist():
            expected = int(self.index.files.nbytes[file])
            entry = self.backend.stat(Key(f"data/{self.index.files.ids[file]}"))
            if entry is None or entry.nbytes < expected:
                self._get(
                    file, expected - BLOCK_NBYTES, expected, memoryview(bytearray(BLOCK_NBYTES))
                )

    def _get(self, file: int, start: int, stop: int, out: memoryview) -> None:
        file_id = self.index.files.ids[file]
        key = Key(f"data/{file_id}")
        try:
            self.backend.get(key, start, stop, out)
        except NotFoundError as error:
            raise CorruptError(
                "data file is missing",
                reason="missing-file",
                where=f"{key}, tensor {self._tensor_at(file, start, stop)!r}",
                do='restore another step or run "ckptfmt verify"',
            ) from error
        except CorruptError as error:
            mark_damaged(self.backend, file_id)
            raise CorruptError(
                "data file is too short",
                reason="short-file",
                where=f"{key}[{start}:{stop}), tensor {self._tensor_at(file, start, stop)!r}",
                expected=f"{int(self.index.files.nbytes[file])} bytes",
                found=error.found,
                do=CURE,
            ) from error

    def _check(
        self, row: int, stored: memoryview, *, needed: bool
    ) -> bytes | bytearray | memoryview:
        """Verify a chunk's stored bytes; decode them if they are needed."""
        placement, tree = self.index.placement, self.index.tree
        pipeline = placement.pipelines[int(placement.codecs[row])]
        raw_digest = tree.chunk_digests[row].tobytes()
        digests = placement.digests
        stored_digest = raw_digest if digests is None else digests[row].tobytes()
        algorithm, where = self.index.header.algorithm, self.where(row)
        try:
            if pipeline and needed:
                return decode_chunk(
                    stored,
                    pipeline,
                    int(tree.chunk_raw[row]),
                    (stored_digest, raw_digest),
                    algorithm=algorithm,
                    where=where,
                )
            if self.verify:
                check_chunk(stored, stored_digest, algorithm, where)
        except CorruptError:
            mark_damaged(self.backend, self.index.files.ids[int(placement.files[row])])
            raise
        return stored

    def where(self, row: int) -> str:
        """A chunk's file, byte range and tensor, for a message."""
        placement, tree = self.index.placement, self.index.tree
        file = self.index.files.ids[int(placement.files[row])]
        start = int(placement.offsets[row])
        tensor = int(tree.region_tensors[self._region_of[row]])
        name = tree.leaf_names[int(tree.tensor_first_leaf[tensor])]
        return f"data/{file}[{start}:{start + int(placement.stored[row])}), tensor {name!r}"

    def _tensor_at(self, file: int, start: int, stop: int) -> str:
        """The first tensor that has bytes in a range of a file."""
        placement, tree = self.index.placement, self.index.tree
        begins = placement.offsets.astype(np.int64)
        hit = (placement.files == file) & (begins < stop) & (begins + placement.stored > start)
        hits = np.flatnonzero(hit)
        if len(hits) == 0:
            return ""
        tensor = int(tree.region_tensors[self._region_of[hits[0]]])
        return tree.leaf_names[int(tree.tensor_first_leaf[tensor])]

    # -- chunks ---------------------------------------------------------------------------------

    def chunks(
        self, rows: NDArray[np.int64], reporter: Reporter, *, gap_nbytes: int = 0
    ) -> dict[int, NDArray[np.uint8]]:
        """Raw bytes of single chunks. By default no gap is read over: what is asked for is read."""
        placement, made = self.index.placement, {}
        rows = np.unique(rows)

        def take(run: Run, a: int, b: int, piece: Sequence[int]) -> None:
            buffer = memoryview(bytearray(b - a))
            self._get(run.file, a, b, buffer)
            for row in piece:
                start = int(placement.offsets[row]) - a
                stored = buffer[start : start + int(placement.stored[row])]
                made[row] = np.frombuffer(self._check(row, stored, needed=True), np.uint8)
            reporter.advance(b - a)

        tasks = []
        for run in plan_runs(placement, rows, gap_nbytes=gap_nbytes):
            for piece in _pieces(self.index, run):
                a = int(placement.offsets[piece[0]])
                b = int(placement.offsets[piece[-1]]) + int(placement.stored[piece[-1]])
                tasks.append((b - a, partial(take, run, a, b, piece)))
        if len(tasks) == 1:
            tasks[0][1]()
            return made
        with Threads() as threads:
            for nbytes, task in tasks:
                threads.submit(task, nbytes)
            threads.drain()
        return made

    def straight(self, rows: Sequence[int], out: memoryview) -> None:
        """Raw chunks that stand one after another in their file, into memory that the caller has."""
        placement, at = self.index.placement, 0
        start = int(placement.offsets[rows[0]])
        self._get(int(placement.files[rows[0]]), start, start + out.nbytes, out)
        pieces = []
        for nbytes in placement.stored[np.array(rows)].tolist():
            pieces.append(out[at : at + nbytes])
            at += nbytes
        self._check_raw(rows, pieces)

    # -- maps -----------------------------------------------------------------------------------

    def resident(self, regions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which regions are better mapped than read: raw and contiguous, used once, of a local file
        whose bytes are in memory already."""
        capabilities = self.backend.capabilities
        if not capabilities.map or capabilities.network_fs or not capabilities.local:
            return np.zeros(len(regions), bool)
        tree, placement = self.index.tree, self.index.placement
        good = self._contiguous(regions)
        first = tree.region_chunk_starts[regions]
        files, starts = placement.files[first], placement.offsets[first].astype(np.int64)
        stops = starts + tree.region_nbytes[regions]
        made = np.zeros(len(regions), bool)
        for file in np.unique(files).tolist():
            mine = np.flatnonzero(files == file)
            start, stop = int(starts[mine].min()), int(stops[mine].max())
            if stop - start < MAP_NBYTES_MIN:
                continue  # a copy of a few pages costs less than a map
            try:
                key = Key(f"data/{self.index.files.ids[file]}")
                made[mine] = self.backend.is_resident(key, start, stop)
            except CheckpointError:
                continue  # the read says what is wrong
        _, once = np.unique(np.stack([files, starts]), axis=1, return_index=True)
        unique = np.zeros(len(regions), bool)
        unique[once] = True
        made &= unique
        both: NDArray[np.bool_] = made & good
        return both

    def maps(self, regions: NDArray[np.int64], reporter: Reporter) -> dict[int, NDArray[np.uint8]]:
        """Copy-on-write maps of regions: zero-copy, private, of raw and contiguous ones only.

        Raises:
            UnsupportedError: kind `unsupported-mmap` names the tensor, or the store.
        """
        tree, placement = self.index.tree, self.index.placement
        good = self._contiguous(regions).tolist()
        made: dict[int, NDArray[np.uint8]] = {}
        mapped: dict[int, NDArray[np.uint8]] = {}
        taken: set[tuple[int, int]] = set()
        at = tree.region_chunk_starts.tolist()
        batch, batch_nbytes = list[tuple[int, memoryview]](), 0
        copied = 0
        with Threads() as threads:
            for region, fits in zip(regions.tolist(), good):
                row = at[region]
                if not fits:
                    raise self._no_map(region, "its chunks are encoded, or not one range")
                file, offset = int(placement.files[row]), int(placement.offsets[row])
                nbytes = int(tree.region_nbytes[region])
                # A range that is in use already gets memory of its own: writes stay private. A copy
                # if it is small: each map costs a descriptor (before Python 3.13) and pages.
                again = (file, offset) in taken
                copy = again and nbytes < MAP_NBYTES_MIN and copied + nbytes <= COPIES_NBYTES_MAX
                if file not in mapped or (again and not copy):
                    mapped[file] = self._map(file, region)
                taken.add((file, offset))
                made[region] = mapped[file][offset : offset + nbytes]
                if copy:
                    made[region] = made[region].copy()
                    copied += nbytes
                if not self.verify:
                    continue
                view = made[region].data
                for chunk in range(row, at[region + 1]):
                    start, nbytes = int(self._starts[chunk]), int(tree.chunk_raw[chunk])
                    # One thread brings the pages, in order: several upset the system's read-ahead,
                    # and what lies in memory in small pieces costs every later map more faults.
                    fault_in(view[start : start + nbytes])
                    batch.append((chunk, view[start : start + nbytes]))
                    batch_nbytes += nbytes
                    if batch_nbytes >= PIECE_NBYTES:
                        threads.submit(partial(self._check_batch, batch, reporter), 0)
                        batch, batch_nbytes = [], 0
            threads.submit(partial(self._check_batch, batch, reporter), 0)
            threads.drain()
        return made

    def _check_batch(self, batch: list[tuple[int, memoryview]], reporter: Reporter) -> None:
        for row, stored in batch:
            self._check(row, stored, needed=False)
            reporter.advance(len(stored))

    def _map(self, file: int, region: int) -> NDArray[np.uint8]:
        file_id, expected = self.index.files.ids[file], int(self.index.files.nbytes[file])
        try:
            view = self.backend.map(Key(f"data/{file_id}"))
        except NotFoundError as error:
            raise CorruptError(
                "data file is missing",
                reason="missing-file",
                where=f"data/{file_id}, {self._no_map(region, '').where}",
                do=CURE,
            ) from error
        if view is None:
            raise self._no_map(region, "this store cannot be mapped")
        if len(view) != expected:
            mark_damaged(self.backend, file_id)
            raise CorruptError(
                "data file has another size",
                reason="short-file",
                where=f"data/{file_id}, tensor {self._tensor_at(file, len(view), expected)!r}",
                expected=f"{expected} bytes",
                found=f"{len(view)} bytes",
                do=CURE,
            )
        return np.frombuffer(view, np.uint8)

    def _no_map(self, region: int, why: str) -> UnsupportedError:
        tree = self.index.tree
        tensor = int(tree.region_tensors[region])
        return UnsupportedError(
            "tensor cannot be mapped",
            reason="mmap",
            where=repr(tree.leaf_names[int(tree.tensor_first_leaf[tensor])]),
            found=why,
            do='use mode="auto" or mode="read"',
        )


def _pieces(index: Index, run: Run) -> list[list[int]]:
    """A run's chunks in pieces of several MiB of whole chunks."""
    placement = index.placement
    begins = placement.offsets[run.chunks].astype(np.int64)
    number = (begins - run.start) // PIECE_NBYTES
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(run.chunks)]
    rows = run.chunks.tolist()
    return [rows[a:b] for a, b in pairwise(bounds)]
