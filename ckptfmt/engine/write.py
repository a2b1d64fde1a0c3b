"""write: chunks not yet stored -> data files. Spec: 05-data-files, 08-protocol.

Regions go into files in their order. Where the store can rename, threads write them at once, under
tmp/; the id is given at the end. Where it cannot, the chunks of a file are kept until its table is
complete and its id known. `outlet` has both ways.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.engine.arena import Ring
from ckptfmt.engine.outlet import Kept, Outlet
from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.engine.plan import SavePlan
from ckptfmt.engine.reuse import Place
from ckptfmt.engine.stage import changed
from ckptfmt.format import (
    ALIGN_NBYTES,
    BLOCK_NBYTES,
    FILE_NBYTES_TARGET,
    FILE_NBYTES_TARGET_REMOTE,
    HEAD_NBYTES,
    RAW,
    SMALL_TENSOR_NBYTES,
    DataTable,
    Pipeline,
    StoredChunk,
    finish_file,
    hasher,
    pack_head,
    pack_table,
    ragged,
)
from ckptfmt.storage import Backend, Writer
from ckptfmt.types import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True)
class _File:
    """A data file in the making. Of regions and chunks only their rows in the tree are kept."""

    writer: Writer | None
    end: int = HEAD_NBYTES
    regions: array[int] = field(default_factory=partial(array, "Q"))
    nchunks: array[int] = field(default_factory=partial(array, "I"))
    chunks: array[int] = field(default_factory=partial(array, "Q"))
    offsets: array[int] = field(default_factory=partial(array, "Q"))
    stored: array[int] = field(default_factory=partial(array, "I"))
    encoded: dict[int, StoredChunk] = field(default_factory=dict)
    outlet: Outlet | Kept | None = None


class DataFiles:
    """Writes chunks into data files, one after another; a context manager that aborts on error.

    `done` maps the ids of finished files to their sizes; `ids` has them in the order of their
    numbers. A file's id is known once it is finished.
    """

    def __init__(
        self,
        backend: Backend,
        txn: str,
        threads: Threads,
        plan: SavePlan,
        condemned: Container[str],
        *,
        ring: Ring,
        reserve: bool = False,
    ) -> None:
        self._backend, self._txn, self._threads, self._plan = backend, txn, threads, plan
        self._algorithm, self._durable = plan.options.digest, plan.options.durable
        self._condemned = condemned
        self._streams = backend.capabilities.late_key
        self._target = FILE_NBYTES_TARGET if self._streams else FILE_NBYTES_TARGET_REMOTE
        self._file: _File | None = None
        self._ring = ring
        self._reserve = reserve
        self._left_nbytes = int(plan.tree.region_nbytes.sum())
        self._number = 0
        self.done: dict[str, int] = {}
        self.ids: list[str] = []

    def add(
        self,
        region: int,
        nbytes: int,
        rows: Sequence[int],
        chunks: Iterable[StoredChunk],
        *,
        live: bool = False,
    ) -> list[Place]:
        """Write a region's chunks, one after another, into one file.

        Args:
            region: Its row in the plan's tree; `nbytes` are its raw bytes.
            rows: Chunk rows, one for each of `chunks`.
            live: The bytes of raw chunks are the caller's memory, which may have changed since they
                were digested: what is written is digested again.
        Raises:
            ConflictError: kind `conflict-changed`: they have.
        """
        file = self._file = self._file or self._begin()
        assert file.outlet is not None
        align = BLOCK_NBYTES if nbytes >= SMALL_TENSOR_NBYTES else ALIGN_NBYTES
        offset = -(-file.end // align) * align
        places = []
        for chunk in chunks:
            again = hasher(self._algorithm) if live and not chunk.pipeline else None
            file.outlet.put(offset, chunk.data, again)
            if again is not None and again.digest() != chunk.digest:
                raise changed(self._plan.names[int(self._plan.tree.region_tensors[region])])
            stored = len(chunk.data)
            places.append(Place(self._number, offset, stored, chunk.pipeline, chunk.digest))
            if chunk.pipeline:
                file.encoded[len(file.offsets)] = StoredChunk(b"", chunk.pipeline, chunk.digest)
            file.offsets.append(offset)
            file.stored.append(stored)
            offset += stored
        file.regions.append(region)
        file.nchunks.append(len(places))
        file.chunks.extend(rows)
        self._grown(file, offset, nbytes)
        return places

    def fitting(self, sizes: Sequence[int]) -> int:
        """How many small regions go into the file in the making: up to the one that passes the
        size at which a file ends."""
        end = HEAD_NBYTES if self._file is None else self._file.end
        padded = -(-np.array(sizes, np.int64) // ALIGN_NBYTES) * ALIGN_NBYTES
        passed = end + np.cumsum(padded) - padded + sizes > self._target
        return int(np.argmax(passed)) + 1 if passed.any() else len(sizes)

    def add_small(
        self, regions: range, rows: range, buffers: Sequence[Any], sizes: Sequence[int]
    ) -> tuple[int, list[int]]:
        """Write many small regions of one raw chunk each: as one piece of bytes.

        Args:
            buffers: Contiguous bytes of each region, below 64 KiB; `sizes` are theirs.
        Returns:
            The number of their file, and an offset for each.
        """
        file = self._file = self._file or self._begin()
        assert file.outlet is not None
        first = -(-file.end // ALIGN_NBYTES) * ALIGN_NBYTES
        nbytes = np.array(sizes, np.int64)
        padded = -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
        offsets = (first + np.cumsum(padded) - padded).tolist()
        data = self._as_staged(regions, np.array(offsets, np.int64), sizes[-1])
        if data is None:
            data = _joined(buffers, (padded - nbytes)[:-1])
        file.outlet.put(first, data)
        file.regions.extend(regions)
        file.nchunks.extend(repeat(1, len(regions)))
        file.chunks.extend(rows)
        file.offsets.extend(offsets)
        file.stored.extend(sizes)
        number = self._number
        self._grown(file, offsets[-1] + sizes[-1], len(data))
        return number, offsets

    def _as_staged(
        self, regions: range, offsets: NDArray[np.int64], last_nbytes: int
    ) -> memoryview | None:
        """The bytes of small regions as they lie in the arena, if that is how the file has them."""
        staged = self._plan.staged
        if staged is None:
            return None
        owners = self._plan.tree.region_tensors[regions.start : regions.stop]
        places = staged.offsets[owners.astype(np.int64)]
        if (places < 0).any() or (np.diff(places) != np.diff(offsets)).any():
            return None
        return staged.memory[int(places[0]) : int(places[-1]) + last_nbytes].data

    def _grown(self, file: _File, end: int, nbytes: int) -> None:
        self._left_nbytes -= nbytes
        file.end = end
        if file.end > self._target:
            self.flush()

    def _begin(self) -> _File:
        file = _File(None)
        if self._streams:
            key = Key(f"tmp/{self._txn}-{self._number}")
            file.writer = self._backend.create(key, self._estimate())
            file.outlet = Outlet(file.writer, self._threads, self._ring, self._plan.staged)
        else:
            file.outlet = Kept()
        file.outlet.put(0, pack_head(self._algorithm))
        return file

    def _estimate(self) -> int | None:
        """Bytes to reserve for a file; None where a base may have most of them."""
        if not self._reserve:
            return None
        return min(self._left_nbytes, self._target) + BLOCK_NBYTES

    def flush(self) -> None:
        """Finish the file in the making, if there is one: table, footer, fsync, name."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            self._finish(file)
        except BaseException:
            self._abort(file)
            raise
        self._number += 1

    def _finish(self, file: _File) -> None:
        table, salt = b"", -1
        file_id = ""
        # A collector deletes what its lists name: the same content goes under another id, so that
        # it never waits for one.
        while salt < 0 or file_id in self._condemned:
            salt += 1
            table = pack_table(self._table(file, salt))
            offset, tail, file_id = finish_file(table, file.end, self._algorithm)
        assert file.outlet is not None
        file.outlet.put(offset, tail)
        file.outlet.emit()
        nbytes = offset + len(tail)
        key = Key(f"data/{file_id}")
        if isinstance(file.outlet, Kept):
            file.writer = self._backend.create(key, nbytes)
            for at, data in file.outlet.pieces:
                self._threads.submit(partial(file.writer.write, at, data), len(data))
        self._threads.drain()
        assert file.writer is not None
        file.writer.finish(durable=self._durable, key=key if self._streams else None)
        self.done[file_id] = nbytes
        self.ids.append(file_id)

    def _table(self, file: _File, salt: int) -> DataTable:
        tree = self._plan.tree
        regions, chunks = np.array(file.regions, np.int64), np.array(file.chunks, np.int64)
        owners = tree.region_tensors[regions].astype(np.int64)
        ndims = tree.tensor_ndims[owners]
        used, dtypes = _by_first_use(tree.tensor_dtypes[owners])
        shapes = ragged(tree.dims_starts[owners], ndims)
        boxes = ragged(tree.region_dims_starts[regions], ndims)
        ends = np.cumsum(tree.chunk_raw, dtype=np.int64)
        first = np.repeat(tree.region_chunk_starts[regions], file.nchunks)
        begins = (ends - tree.chunk_raw)[chunks] - (ends - tree.chunk_raw)[first]
        pipelines: dict[Pipeline, int] = {RAW: 0}
        codecs = np.zeros(len(chunks), np.uint8)
        raw_digests = tree.chunk_digests[chunks]
        stored_digests = raw_digests.copy() if file.encoded else None
        for position, chunk in file.encoded.items():
            codecs[position] = pipelines.setdefault(chunk.pipeline, len(pipelines))
            assert stored_digests is not None
            stored_digests[position] = np.frombuffer(chunk.digest, np.uint8)
        names = self._plan.names
        return DataTable(
            salt=salt,
            dtypes=tuple(tree.dtypes[row] for row in used),
            region_names=[names[tensor] for tensor in owners.tolist()],
            region_dtypes=dtypes,
            region_ndims=ndims,
            region_shapes=tree.tensor_dims[shapes],
            region_origins=tree.region_origins[boxes],
            region_extents=tree.region_extents[boxes],
            region_nchunks=np.array(file.nchunks, np.uint32),
            chunk_starts=begins,
            chunk_offsets=np.array(file.offsets, np.uint64),
            chunk_stored=np.array(file.stored, np.uint32),
            chunk_raw=tree.chunk_raw[chunks],
            chunk_codecs=codecs,
            chunk_digests=raw_digests,
            stored_digests=stored_digests,
            pipelines=tuple(pipelines),
        )

    def _abort(self, file: _File) -> None:
        if file.writer is not None:
            file.writer.abort()

    def abort(self) -> None:
        """Give up the file in the making. Finished ones are left to gc: nothing refers to them."""
        file, self._file = self._file, None
        if file is not None:
            # Tasks may still be writing to it: their errors are of no interest any more.
            self._threads.wait()
            self._abort(file)


def _joined(buffers: Sequence[Any], gaps: NDArray[np.int64]) -> memoryview:
    """Buffers one after another, with so many zeros between them."""
    if not gaps.any():
        return memoryview(b"".join(buffers))
    zeros = bytes(ALIGN_NBYTES)
    joints = [zeros[:gap] for gap in gaps.tolist()] + [b""]
    return memoryview(b"".join(chain.from_iterable(zip(buffers, joints))))


def _by_first_use(column: NDArray[Any]) -> tuple[list[int], NDArray[Any]]:
    """The values of a column in the order of their first use, and the column renumbered so."""
    values, first, inverse = np.unique(column, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.uint16)
    rank[order] = np.arange(len(order))
    return values[order].tolist(), rank[inverse]
