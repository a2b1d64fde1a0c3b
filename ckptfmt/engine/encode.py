"""The loop over regions: stage -> encode -> write what no base has. Spec: 06, 08-protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.engine.plan import SavePlan
from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.reuse import Bases, Place
from ckptfmt.engine.stage import stage_tensor
from ckptfmt.engine.write import DataFiles, RegionChunks
from ckptfmt.format import (
    RAW,
    FilesSection,
    Pipeline,
    PlacementSection,
    StoredChunk,
    digest,
    encode_chunk,
)


@dataclass(slots=True)
class Placed:
    """A row per chunk, in region order, while files are still being written.

    `files` holds positions in `table`, whose entries are the id of a base's file or the number of
    a new one.
    """

    table: dict[str | int, int] = field(default_factory=dict)
    files: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    codecs: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    pipelines: dict[Pipeline, int] = field(default_factory=lambda: {RAW: 0})

    def add(self, place: Place) -> None:
        self.files.append(self.table.setdefault(place.file, len(self.table)))
        self.offsets.append(place.offset)
        self.stored.append(place.stored_nbytes)
        self.codecs.append(self.pipelines.setdefault(place.pipeline, len(self.pipelines)))
        self.digests.append(place.digest)

    def repeat(self, first: int, count: int) -> None:
        """The rows [first, first + count) once more: a region that is stored already."""
        for column in (self.files, self.offsets, self.stored, self.codecs, self.digests):
            column += column[first : first + count]  # type: ignore[operator]

    def finish(
        self, new_ids: list[str], nbytes_of: dict[str, int]
    ) -> tuple[FilesSection, PlacementSection]:
        """The sections, once every new file has its id."""
        ids = [new_ids[key] if isinstance(key, int) else key for key in self.table]
        ordered = sorted(set(ids))
        position = {file: row for row, file in enumerate(ordered)}
        remap = np.array([position[file] for file in ids], np.uint32)
        files = remap[np.array(self.files, np.int64)] if ids else np.zeros(0, np.uint32)
        digests = None
        if any(self.codecs):
            width = len(self.digests[0])
            digests = np.frombuffer(b"".join(self.digests), np.uint8).reshape(-1, width)
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
    tree, placed = plan.tree, Placed()
    seen: dict[tuple[int, bytes], tuple[int, int]] = {}
    data, staged, offset = memoryview(b""), -1, 0
    chunk_starts = tree.region_chunk_starts.tolist()
    sizes = tree.region_nbytes.tolist()
    tensor_nbytes = tree.tensor_nbytes.tolist()
    for region, tensor in enumerate(tree.region_tensors.tolist()):
        if tensor != staged:
            payload = plan.payloads.get(tensor)
            data = stage_tensor(
                plan.sources[tensor], plan.names[tensor], tensor_nbytes[tensor], payload
            )
            staged, offset = tensor, 0
        view = data[offset : offset + sizes[region]]
        offset += sizes[region]
        first, last = chunk_starts[region], chunk_starts[region + 1]
        _encode_region(plan, region, view, (first, last), seen, placed, (bases, files, threads))
        reporter.advance(len(view))
    files.flush()
    return placed


def _encode_region(
    plan: SavePlan,
    region: int,
    view: memoryview,
    rows: tuple[int, int],
    seen: dict[tuple[int, bytes], tuple[int, int]],
    placed: Placed,
    into: tuple[Bases, DataFiles, Threads],
) -> None:
    bases, files, threads = into
    first, last = rows
    algorithm = plan.options.digest
    begins = _begins(plan, first, last)
    pieces = [view[a:b] for a, b in zip(begins, [*begins[1:], len(view)])]
    digests: list[bytes] = list(threads.map(partial(digest, algorithm=algorithm), pieces))
    joined = b"".join(digests)
    plan.tree.chunk_digests[first:last] = np.frombuffer(joined, np.uint8).reshape(last - first, -1)
    key = (len(view), joined)
    if key in seen:
        placed.repeat(*seen[key])
        return
    seen[key] = (first, last - first)
    places = [bases.find(d, len(piece)) for d, piece in zip(digests, pieces)]
    new = [row for row, place in enumerate(places) if place is None]
    written = iter(_write_new(plan, region, (begins, pieces, digests), new, files, threads))
    for place in places:
        placed.add(next(written) if place is None else place)


def _begins(plan: SavePlan, first: int, last: int) -> list[int]:
    if last - first == 1:
        return [0]
    begins = np.zeros(last - first, np.int64)
    np.cumsum(plan.tree.chunk_raw[first : last - 1], out=begins[1:])
    made: list[int] = begins.tolist()
    return made


def _write_new(
    plan: SavePlan,
    region: int,
    cut: tuple[list[int], list[memoryview], list[bytes]],
    new: list[int],
    files: DataFiles,
    threads: Threads,
) -> list[Place]:
    """Encode and write the chunks `new` of a region."""
    if not new:
        return []
    begins, pieces, digests = cut
    tensor = int(plan.tree.region_tensors[region])
    codec, algorithm = plan.codecs[tensor], plan.options.digest

    def encode(row: int) -> StoredChunk:
        return encode_chunk(pieces[row], digests[row], codec, algorithm)

    origin, extent = plan.tree.box(region)
    return files.add(
        RegionChunks(
            name=plan.names[tensor],
            dtype=plan.tree.dtype(tensor),
            shape=plan.tree.shape(tensor),
            origin=origin,
            extent=extent,
            region_nbytes=begins[-1] + len(pieces[-1]),
            starts=[begins[row] for row in new],
            raw_nbytes=[len(pieces[row]) for row in new],
            raw_digests=[digests[row] for row in new],
        ),
        threads.map(encode, new) if codec[0] else map(encode, new),
    )
