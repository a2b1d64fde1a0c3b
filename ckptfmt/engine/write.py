"""write: chunks not yet stored -> data files. Spec: 05-data-files, 08-protocol.

Regions go into files in their order; small chunks are gathered into pieces of megabytes, large ones
are written straight from the memory that holds them. Where the store can rename, bytes go out at
once under tmp/ and the id is given at the end; where it cannot, the chunks of a file are kept (as
views) until its table is complete and its id known.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.engine.plan import SavePlan
from ckptfmt.engine.reuse import Place
from ckptfmt.errors import StorageError
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
    pack_head,
    pack_table,
    ragged,
)
from ckptfmt.storage import Backend, Writer
from ckptfmt.types import Key

PIECE_NBYTES = 4 << 20
LARGE_CHUNK_NBYTES = 1 << 20
"""A chunk of this size is written from where it is; a smaller one is copied into a piece."""
WRITE_NBYTES_MAX = 8 << 20


@dataclass(slots=True)
class _File:
    """A data file in the making. Of regions and chunks only their rows in the tree are kept."""

    writer: Writer | None
    end: int = HEAD_NBYTES
    regions: list[int] = field(default_factory=list)
    nchunks: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    pieces: list[tuple[int, memoryview]] = field(default_factory=list)
    pending: bytearray = field(default_factory=bytearray)
    pending_offset: int = 0


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
    ) -> None:
        self._backend, self._txn, self._threads, self._plan = backend, txn, threads, plan
        self._algorithm, self._durable = plan.options.digest, plan.options.durable
        self._condemned = condemned
        self._streams = backend.capabilities.late_key
        self._target = FILE_NBYTES_TARGET if self._streams else FILE_NBYTES_TARGET_REMOTE
        self._file: _File | None = None
        self._number = 0
        self.done: dict[str, int] = {}
        self.ids: list[str] = []

    def add(
        self, region: int, nbytes: int, rows: Sequence[int], chunks: Iterable[StoredChunk]
    ) -> list[Place]:
        """Write a region's chunks, one after another, into one file.

        Args:
            region: Its row in the plan's tree; `nbytes` are its raw bytes.
            rows: Chunk rows, one for each of `chunks`.
        """
        file = self._file = self._file or self._begin()
        align = BLOCK_NBYTES if nbytes >= SMALL_TENSOR_NBYTES else ALIGN_NBYTES
        offset = -(-file.end // align) * align
        places = []
        for chunk in chunks:
            self._put(file, offset, chunk.data)
            stored = len(chunk.data)
            places.append(Place(self._number, offset, stored, chunk.pipeline, chunk.digest))
            offset += stored
        file.regions.append(region)
        file.nchunks.append(len(places))
        file.chunks += rows
        file.places += places
        file.end = offset
        if file.end > self._target:
            self.flush()
        return places

    def _begin(self) -> _File:
        writer = None
        if self._streams:
            writer = self._backend.create(Key(f"tmp/{self._txn}-{self._number}"))
        file = _File(writer)
        file.pending += pack_head(self._algorithm)
        return file

    def _put(self, file: _File, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Bytes at an offset at or after the end so far; the gap is zeros."""
        gap = offset - file.pending_offset - len(file.pending)
        file.pending += bytes(gap)
        if len(data) < LARGE_CHUNK_NBYTES:
            file.pending += data
            if len(file.pending) >= PIECE_NBYTES:
                self._emit_pending(file)
            return
        self._emit_pending(file)
        view = memoryview(data)
        for start in range(0, len(view), WRITE_NBYTES_MAX):
            self._emit(file, offset + start, view[start : start + WRITE_NBYTES_MAX])
        file.pending_offset = offset + len(view)

    def _emit_pending(self, file: _File) -> None:
        if file.pending:
            self._emit(file, file.pending_offset, memoryview(file.pending))
            file.pending_offset += len(file.pending)
            file.pending = bytearray()

    def _emit(self, file: _File, offset: int, data: memoryview) -> None:
        if file.writer is None:
            file.pieces.append((offset, data))
        else:
            self._threads.submit(partial(file.writer.write, offset, data), len(data))

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
        self._put(file, offset, tail)
        self._emit_pending(file)
        nbytes = offset + len(tail)
        key = Key(f"data/{file_id}")
        if file.writer is None:
            file.writer = self._backend.create(key, nbytes)
            for at, data in file.pieces:
                self._threads.submit(partial(file.writer.write, at, data), len(data))
        self._threads.drain()
        file.writer.finish(durable=self._durable, key=key if self._streams else None)
        self.done[file_id] = nbytes
        self.ids.append(file_id)

    def _table(self, file: _File, salt: int) -> DataTable:
        tree, places = self._plan.tree, file.places
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
        codecs = [pipelines.setdefault(place.pipeline, len(pipelines)) for place in places]
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
            chunk_offsets=np.array([place.offset for place in places], np.uint64),
            chunk_stored=np.array([place.stored_nbytes for place in places], np.uint32),
            chunk_raw=tree.chunk_raw[chunks],
            chunk_codecs=np.array(codecs, np.uint8),
            chunk_digests=tree.chunk_digests[chunks],
            stored_digests=_digest_column([p.digest for p in places]) if any(codecs) else None,
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
            try:
                self._threads.drain()
            except (StorageError, OSError):
                pass
            self._abort(file)


def _by_first_use(column: NDArray[Any]) -> tuple[list[int], NDArray[Any]]:
    """The values of a column in the order of their first use, and the column renumbered so."""
    values, first, inverse = np.unique(column, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.uint16)
    rank[order] = np.arange(len(order))
    return values[order].tolist(), rank[inverse]


def _digest_column(digests: Sequence[bytes]) -> NDArray[np.uint8]:
    width = len(digests[0]) if digests else 0
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), width)
