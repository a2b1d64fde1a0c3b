"""The loop over regions: stage -> encode -> write what no base has. Spec: 06, 08-protocol."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import methodcaller
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.engine.plan import SavePlan
from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.reuse import Bases, Place
from ckptfmt.engine.stage import BOUNCE_NBYTES, Bounce, changed, stage_tensor
from ckptfmt.engine.write import DataFiles
from ckptfmt.errors import ConflictError
from ckptfmt.format import (
    RAW,
    SMALL_TENSOR_NBYTES,
    FilesSection,
    Pipeline,
    PlacementSection,
    StoredChunk,
    digest,
    digest_function,
    encode_chunk,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL_RUN_MIN, SMALL_RUN_MAX = 8, 4096
"""How many small regions are worth being written at once, and how many are at most."""


@dataclass(slots=True)
class Placed:
    """A row per chunk, in region order, while files are still being written.

    `files` holds positions in `table`, whose entries are the id of a base's file or the number of
    a new one. `digests` has the stored digests of chunks that are not raw.
    """

    files: array[int]
    offsets: array[int]
    stored: array[int]
    codecs: array[int]
    table: dict[str | int, int] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)
    pipelines: dict[Pipeline, int] = field(default_factory=lambda: {RAW: 0})

    @classmethod
    def empty(cls, count: int) -> Placed:
        u8, u32, u64 = (array(code, [0]) * count for code in "BIQ")
        return cls(files=u32, offsets=u64, stored=u32[:], codecs=u8)

    def put(self, row: int, place: Place) -> None:
        self.files[row] = self.table.setdefault(place.file, len(self.table))
        self.offsets[row] = place.offset
        self.stored[row] = place.stored_nbytes
        if place.pipeline:
            self.codecs[row] = self.pipelines.setdefault(place.pipeline, len(self.pipelines))
            self.digests[row] = place.digest

    def put_all(self, rows: range, file: int, offsets: list[int], stored: list[int]) -> None:
        """Raw chunks of one new file."""
        number = self.table.setdefault(file, len(self.table))
        self.files[rows.start : rows.stop] = array("I", [number]) * len(rows)
        self.offsets[rows.start : rows.stop] = array("Q", offsets)
        self.stored[rows.start : rows.stop] = array("I", stored)

    def repeat(self, row: int, first: int, count: int) -> None:
        """The rows [first, first + count) once more at `row`: a region that is stored already."""
        for column in (self.files, self.offsets, self.stored, self.codecs):
            column[row : row + count] = column[first : first + count]
        for position in range(count):
            if first + position in self.digests:
                self.digests[row + position] = self.digests[first + position]

    def finish(
        self, new_ids: list[str], nbytes_of: dict[str, int], raw_digests: NDArray[np.uint8]
    ) -> tuple[FilesSection, PlacementSection]:
        """The sections, once every new file has its id."""
        ids = [new_ids[key] if isinstance(key, int) else key for key in self.table]
        ordered = sorted(set(ids))
        position = {file: row for row, file in enumerate(ordered)}
        remap = np.array([position[file] for file in ids], np.uint32)
        files = remap[np.array(self.files, np.int64)] if ids else np.zeros(0, np.uint32)
        digests = None
        if self.digests:
            digests = raw_digests.copy()
            for row, stored in self.digests.items():
                digests[row] = np.frombuffer(stored, np.uint8)
        return (
            FilesSection(ordered, np.array([nbytes_of[file] for file in ordered], np.uint64)),
            PlacementSection(
                files=files,
                offsets=np.array(self.offsets, np.uint64),
                stored=np.array(self.stored, np.uint32),
                codecs=np.array(self.codecs, np.uint8),
                digests=digests,
                pipelines=tuple(self.pipelines),
            ),
        )


def encode_regions(
    plan: SavePlan, bases: Bases, files: DataFiles, threads: Threads, reporter: Reporter
) -> Placed:
    """Write every chunk that no base has; fills in the plan's digests."""
    with Bounce(plan) as bounce:
        encoder = _Encoder(plan, bases, files, threads, bounce)
        _encode_all(encoder, plan, reporter)
    files.flush()
    return encoder.placed


def _encode_all(encoder: _Encoder, plan: SavePlan, reporter: Reporter) -> None:
    tree = plan.tree
    data, staged, offset = memoryview(b""), -1, 0
    chunk_starts = tree.region_chunk_starts.tolist()
    sizes = tree.region_nbytes.tolist()
    tensor_nbytes = tree.tensor_nbytes.tolist()
    owners = tree.region_tensors.tolist()
    small_until = _small_until(plan)
    done = tried = 0
    for region, tensor in enumerate(owners):
        if region < done:
            continue
        if region >= tried and small_until[region] - region >= SMALL_RUN_MIN:
            tried = min(small_until[region], region + SMALL_RUN_MAX)
            done = encoder.run(region, tried, sizes)
            if done > region:
                tried = done  # a file may have ended before the run did
                reporter.advance(sum(sizes[region:done]))
                continue
        if tensor in plan.vouched:
            encoder.vouched(region, (chunk_starts[region], chunk_starts[region + 1]))
            reporter.advance(sizes[region])
            continue
        payload, source = plan.payloads.get(tensor), plan.sources[tensor]
        far = payload is None and source.device is not None
        if tensor != staged:
            if not far:
                name = plan.names[tensor]
                data = stage_tensor(source, name, tensor_nbytes[tensor], payload)
            staged, offset = tensor, 0
        size = sizes[region]
        first, last = chunk_starts[region], chunk_starts[region + 1]
        if far:
            encoder.far_region(region, (first, last), offset)
        else:
            view = data if size == len(data) else data[offset : offset + size]
            if last - first == 1 and not plan.codecs[tensor][0]:
                encoder.small(region, first, view)
            else:
                encoder.region(region, (first, last), view)
        offset += size
        reporter.advance(size)


def _small_until(plan: SavePlan) -> list[int]:
    """Region -> where the run of small raw regions ends that begins at it; itself if it is none."""
    tree = plan.tree
    small = (tree.region_nchunks == 1) & (tree.region_nbytes < SMALL_TENSOR_NBYTES)
    small &= (np.diff(tree.tensor_region_starts) == 1)[tree.region_tensors]
    if any(codec[0] for codec in set(plan.codecs)):
        encoded = np.fromiter((bool(c[0]) for c in plan.codecs), bool, len(plan.codecs))
        small &= ~encoded[tree.region_tensors]
    if plan.vouched:
        small &= ~np.isin(tree.region_tensors, list(plan.vouched))
    positions = np.arange(len(small))
    ends = np.where(small, len(small), positions)
    made: list[int] = np.minimum.accumulate(ends[::-1])[::-1].tolist()
    return made


_to_bytes = methodcaller("tobytes")


class _Encoder:
    """Places the chunks of one region after another: shared, reused, or written."""

    def __init__(
        self, plan: SavePlan, bases: Bases, files: DataFiles, threads: Threads, bounce: Bounce
    ) -> None:
        self._plan, self._bases, self._files, self._threads = plan, bases, files, threads
        self._bounce = bounce
        # One thread hashes faster than a disk writes, and a training loop wants the other cores.
        self._alone = plan.staged is not None and plan.options.digest == "xxh3-128"
        self._digest = digest_function(plan.options.digest)
        self._width = plan.tree.chunk_digests.shape[1]
        self._digests = plan.tree.chunk_digests.reshape(-1).data
        self.placed = Placed.empty(len(plan.tree.chunk_raw))
        self._seen: dict[bytes, int] = {}
        """Joined digests of a region's chunks -> its first row."""

    def _is_stored(self, row: int, count: int, digests: bytes) -> bool:
        """Whether a region of this save has these very bytes: then it shares their place."""
        self._digests[row * self._width : (row + count) * self._width] = digests
        first = self._seen.setdefault(digests, row)
        if first == row:
            return False
        self.placed.repeat(row, first, count)
        return True

    def run(self, first: int, last: int, sizes: list[int]) -> int:
        """Small regions from `first` on, as many as go into one file, `last` at most. All at once
        if none of them is stored already. Returns the region to go on with: `first` itself if one
        of the tensors is on a device.
        """
        tree = self._plan.tree
        last = first + self._files.fitting(sizes[first:last])
        wanted = sizes[first:last]
        pieces = self._pieces(tree.region_tensors[first:last].tolist(), wanted)
        if pieces is None:
            return first
        digests = list(map(self._digest, pieces))
        row = int(tree.region_chunk_starts[first])
        rows = range(row, row + len(digests))
        if (
            len(set(digests)) < len(digests)
            or not self._seen.keys().isdisjoint(digests)
            or self._bases.has_any(digests)
        ):
            for region, piece, raw_digest in zip(range(first, last), pieces, digests):
                self._one(region, row + region - first, piece, raw_digest)
            return last
        self._digests[row * self._width : rows.stop * self._width] = b"".join(digests)
        self._seen.update(zip(digests, rows))
        number, offsets = self._files.add_small(range(first, last), rows, pieces, wanted)
        self.placed.put_all(rows, number, offsets, wanted)
        return last

    def _pieces(self, owners: list[int], wanted: list[int]) -> list[bytes | memoryview] | None:
        """The bytes of small tensors; None if one is on a device. What is the caller's memory is
        copied, for it may change meanwhile: what is digested is what is written."""
        plan = self._plan
        items = plan.sources.items[owners[0] : owners[-1] + 1]
        if (
            len(items) == len(owners)
            and set(map(type, items)) == {np.ndarray}
            and plan.payloads.keys().isdisjoint(owners)
        ):
            pieces: list[bytes | memoryview] = list(map(_to_bytes, items))
            if list(map(len, pieces)) == wanted:
                return pieces
        made: list[bytes | memoryview] = []
        for tensor, nbytes in zip(owners, wanted):
            payload, source = plan.payloads.get(tensor), plan.sources[tensor]
            if payload is None and source.device is not None:
                return None
            data = stage_tensor(source, plan.names[tensor], nbytes, payload)
            made.append(bytes(data) if payload is None else data)
        return made

    def _is_live(self, region: int) -> bool:
        """Whether the bytes of a region are not ours: whoever has them may change them meanwhile."""
        return int(self._plan.tree.region_tensors[region]) not in self._plan.payloads

    def small(self, region: int, row: int, view: memoryview) -> None:
        """A region of one raw chunk: the way of most tensors, kept short."""
        live = self._is_live(region)
        if live and len(view) < SMALL_TENSOR_NBYTES:
            view, live = memoryview(bytes(view)), False
        self._one(region, row, view, self._digest(view), live=live)

    def _one(
        self,
        region: int,
        row: int,
        view: bytes | memoryview,
        raw_digest: bytes,
        *,
        live: bool = False,
    ) -> None:
        if self._is_stored(row, 1, raw_digest):
            return
        place = self._bases.find(raw_digest, len(view))
        if place is None:
            chunk = StoredChunk(view, RAW, raw_digest)
            (place,) = self._files.add(region, len(view), [row], [chunk], live=live)
        self.placed.put(row, place)

    def region(self, region: int, rows: tuple[int, int], view: memoryview) -> None:
        """Any region in host memory: its chunks are hashed, and encoded, by several threads."""
        first, last = rows
        pieces = [view[a:b] for a, b in pairwise(self._begins(first, last))]
        digests = self._hash(pieces)
        codec = self._codec(region)
        self._place(
            region,
            rows,
            digests,
            lambda new: self._chunks(region, {at: pieces[at] for at in new}, digests),
            live=self._is_live(region) and not codec,
        )

    def vouched(self, region: int, rows: tuple[int, int]) -> None:
        """A region whose digests a base gave: its chunks are where that base has them.

        Raises:
            ConflictError: kind `conflict-unchanged`: they are there no more.
        """
        digests = [self._plan.tree.chunk_digests[row].tobytes() for row in range(*rows)]

        def gone(new: list[int]) -> NoReturn:
            raise ConflictError(
                "the stored data of a tensor that is said to be unchanged is gone",
                reason="unchanged",
                where=repr(self._plan.names[int(self._plan.tree.region_tensors[region])]),
                found="damaged, or deleted by a collector",
                do="save again without unchanged=; nothing was committed",
            )

        self._place(region, rows, digests, gone, live=False)

    def far_region(self, region: int, rows: tuple[int, int], offset: int) -> None:
        """A region of a tensor on a device, which begins at `offset` of its packed bytes.

        Its chunks come in groups of bounded size, to be hashed, and those that are not stored once
        more, to be written: a link to a device is several times as fast as a disk.
        """
        first, last = rows
        begins, groups = self._begins(first, last), list[list[int]]()
        for at in range(last - first):
            if groups and begins[at + 1] - begins[groups[-1][0]] <= BOUNCE_NBYTES:
                groups[-1].append(at)
            else:
                groups.append([at])
        digests: list[bytes] = []
        pieces: dict[int, memoryview] = {}
        for group in groups:
            pieces = self._fetch(region, offset, begins, group)
            digests += self._hash(list(pieces.values()))

        def chunks(new: list[int]) -> Iterator[StoredChunk]:
            wanted, found = set(new), pieces
            for group in groups:
                mine = [at for at in group if at in wanted]
                if mine and len(groups) > 1:
                    found = self._fetch(region, offset, begins, mine)
                # All of them before the next group takes their place.
                yield from list(self._chunks(region, {at: found[at] for at in mine}, digests))

        self._place(region, rows, digests, chunks, live=not self._codec(region))

    def _fetch(
        self, region: int, offset: int, begins: list[int], group: list[int]
    ) -> dict[int, memoryview]:
        """Chunks of a group, by their position in the region."""
        tensor, base = int(self._plan.tree.region_tensors[region]), begins[group[0]]
        end = begins[group[-1] + 1]
        part = self._bounce.part(tensor, offset + base, offset + end)
        return {at: part[begins[at] - base : begins[at + 1] - base] for at in group}

    def _begins(self, first: int, last: int) -> list[int]:
        """Where the chunks of a region begin in it, and where the last one ends."""
        raw = self._plan.tree.chunk_raw[first:last]
        return [0, *np.cumsum(raw, dtype=np.int64).tolist()]

    def _codec(self, region: int) -> Pipeline:
        return self._plan.codecs[int(self._plan.tree.region_tensors[region])][0]

    def _hash(self, pieces: list[memoryview]) -> list[bytes]:
        if self._alone:
            return list(map(self._digest, pieces))
        return list(self._threads.map(self._digest, pieces))

    def _place(
        self,
        region: int,
        rows: tuple[int, int],
        digests: list[bytes],
        chunks_of: Callable[[list[int]], Iterable[StoredChunk]],
        *,
        live: bool,
    ) -> None:
        """Share, reuse or write the chunks of a region."""
        first, last = rows
        if self._is_stored(first, last - first, b"".join(digests)):
            return
        raw = self._plan.tree.chunk_raw[first:last].tolist()
        places = [self._bases.find(d, nbytes) for d, nbytes in zip(digests, raw)]
        new = [at for at, place in enumerate(places) if place is None]
        written: Iterator[Place] = iter(())
        if new:
            numbers = [first + at for at in new]
            written = iter(self._files.add(region, sum(raw), numbers, chunks_of(new), live=live))
        for at, place in enumerate(places):
            self.placed.put(first + at, next(written) if place is None else place)

    def _chunks(
        self, region: int, pieces: Mapping[int, memoryview], digests: list[bytes]
    ) -> Iterable[StoredChunk]:
        tensor = int(self._plan.tree.region_tensors[region])
        encode = partial(_encode, pieces=pieces, digests=digests, plan=self._plan, tensor=tensor)
        return (self._threads.map if self._codec(region) else map)(encode, list(pieces))


def _encode(
    position: int,
    *,
    pieces: Mapping[int, memoryview],
    digests: list[bytes],
    plan: SavePlan,
    tensor: int,
) -> StoredChunk:
    piece, codec, algorithm = pieces[position], plan.codecs[tensor], plan.options.digest
    if codec[0] and tensor not in plan.payloads:
        # The caller's memory: what is encoded must be what was digested.
        piece = memoryview(bytes(piece))
        if digest(piece, algorithm) != digests[position]:
            raise changed(plan.names[tensor])
    return encode_chunk(piece, digests[position], codec, algorithm)
