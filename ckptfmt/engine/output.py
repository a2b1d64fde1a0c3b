"""The data of a save, before its commit: data files, until no collector has a claim on any.

Spec: 08-protocol §8.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptfmt.engine.arena import Ring
from ckptfmt.engine.commit import sync_files
from ckptfmt.engine.coordinate import condemned, unusable
from ckptfmt.engine.encode import Placed, encode_regions
from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.engine.plan import SavePlan
from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.request import SaveRequest
from ckptfmt.engine.reuse import Bases
from ckptfmt.engine.write import DataFiles
from ckptfmt.errors import ConflictError
from ckptfmt.format import FilesSection, Index, PlacementSection
from ckptfmt.storage import Backend
from ckptfmt.types import Key

REWRITES_MAX = 5
"""How often a save writes chunks anew because a collector condemned them, before it gives up."""


@dataclass(frozen=True, slots=True)
class Written:
    """Where a plan's chunks are, and how many bytes of data files were written for it."""

    files: FilesSection
    placement: PlacementSection
    nbytes: int

    def sizes(self) -> dict[str, int]:
        return dict(zip(self.files.ids, self.files.nbytes.tolist()))


def damaged_files(backend: Backend) -> set[str]:
    """Files known to be rotten: no chunk of them is reused (I7)."""
    return {entry.key.removeprefix("damaged/") for entry in backend.list("damaged/")}


def write_data(
    backend: Backend, plan: SavePlan, request: SaveRequest, bases: Sequence[Index], stem: str
) -> Written:
    """Write what no base has; again, without what a collector condemned meanwhile.

    Fills in the plan's digests. All files referred to are durable then, if asked.

    Args:
        stem: Of the keys under tmp/: the txn, and the rank where several write.
    Raises:
        ConflictError: kind `conflict-collected`.
    """
    damaged = damaged_files(backend)
    refused = set(damaged)
    bad: set[str] = set()
    for _ in range(REWRITES_MAX):
        named = condemned(backend)
        usable = _usable_bases(backend, bases, request, refused | named)
        placed, files = _write_once(backend, plan, request, (usable, named, stem))
        sections = placed.finish(files.ids, {**usable.files, **files.done}, plan.tree.chunk_digests)
        written = Written(*sections, sum(files.done.values()))
        if request.options.durable:
            # Its own new files too, which are clean: a save that is not durable may have put the
            # same bytes in their place since.
            sync_files(backend, written.sizes())
        bad = unusable(backend, written.sizes())
        if not bad:
            for file in damaged & files.done.keys():  # written anew: healed
                backend.delete(Key(f"damaged/{file}"))
            return written
        refused |= bad
    raise ConflictError(
        "a collector condemned files of this save again and again",
        reason="collected",
        where=f"data/{min(bad)}",
        do="run gc less often, or with a longer grace, and save again",
    )


def _usable_bases(
    backend: Backend, bases: Sequence[Index], request: SaveRequest, refused: set[str]
) -> Bases:
    made = Bases(bases, request.options.digest, refused)
    gone = unusable(backend, made.files)
    return Bases(bases, request.options.digest, refused | gone) if gone else made


def _write_once(
    backend: Backend, plan: SavePlan, request: SaveRequest, into: tuple[Bases, set[str], str]
) -> tuple[Placed, DataFiles]:
    bases, named, stem = into
    total = int(plan.tree.region_nbytes.sum())
    with (
        Reporter(
            request.progress, "save", total, checkpoint=request.name, step=request.step
        ) as reporter,
        Ring() as ring,
        Threads() as threads,
    ):
        reserve = not bases.files
        files = DataFiles(backend, stem, threads, plan, named, ring=ring, reserve=reserve)
        try:
            return encode_regions(plan, bases, files, threads, reporter), files
        except BaseException:
            files.abort()
            raise
