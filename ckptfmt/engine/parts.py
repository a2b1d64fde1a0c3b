"""A save by several ranks, in steps that need no process group: any launcher carries their bytes.

    coordinator      begin_parts -> ticket                    share_parts(claims) -> shares
    every rank                plan_part(ticket) -> claim                write_part(shares) -> fragment
    coordinator      commit_parts(fragments) -> committed, or abort_parts

All that goes between ranks is bytes. Without claims and shares (a launcher that decides itself who
writes what) each rank writes all that it is given. Spec: 08-protocol §8.9.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import zstandard

from ckptfmt.engine.catalog import Listed
from ckptfmt.engine.commit import Document, sync_files
from ckptfmt.engine.coordinate import (
    begin,
    clean_abandoned,
    end,
    ensure_store_marker,
    new_txn,
    unusable,
)
from ckptfmt.engine.lineage import remember
from ckptfmt.engine.merge import merge_fragments
from ckptfmt.engine.output import write_data
from ckptfmt.engine.pieces import (
    Pieces,
    claim_replicas,
    digest_replicas,
    fragment_tree,
    no_placement,
    owned_plan,
    plan_pieces,
)
from ckptfmt.engine.plan import SaveOptions
from ckptfmt.engine.request import SaveRequest
from ckptfmt.engine.save import (
    about_of,
    choose_bases,
    commit_document,
    kept_info,
    look,
    now,
    open_bases,
    refuse_early,
    refuse_other_structure,
)
from ckptfmt.engine.shares import share_out
from ckptfmt.engine.tree import FlatTree
from ckptfmt.errors import ConflictError, StorageError
from ckptfmt.events import Progress
from ckptfmt.format import (
    DIGEST_NBYTES,
    FILE_NBYTES_TARGET_REMOTE,
    About,
    FilesSection,
    Fragment,
    index_key,
    pack_fragment,
    pack_tree,
    pack_value,
    parse_fragment,
    parse_value,
)
from ckptfmt.storage import Backend
from ckptfmt.types import CheckpointInfo, Key

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PartsTicket:
    """A save by several ranks that has begun: plain data, for every rank.

    Attributes:
        request: What is saved; `progress` and `before_commit` are each process's own.
        txn: The save; no two have one.
        bases: (name, generation) of the checkpoints whose chunks may be reused, and no others.
    """

    request: SaveRequest
    txn: str
    bases: tuple[tuple[str, int], ...]

    def to_bytes(self) -> bytes:
        request, options = self.request, self.request.options
        codec, chunk = options.codec, options.chunk_nbytes
        return pack_value(
            {
                "txn": self.txn,
                "name": request.name,
                "step": request.step,
                "metadata": dict(request.metadata),
                "metrics": dict(request.metrics),
                "if_exists": request.if_exists,
                "codec": dict(codec) if isinstance(codec, Mapping) else codec,
                "chunk_nbytes": dict(chunk) if isinstance(chunk, Mapping) else chunk,
                "digest": options.digest,
                "durable": options.durable,
                "encoded_region_nbytes": options.encoded_region_nbytes,
                "timeout_s": request.timeout_s,
                "bases": [list(pair) for pair in self.bases],
            }
        )

    @staticmethod
    def of_bytes(data: bytes | memoryview, *, progress: Progress = False) -> PartsTicket:
        """The ticket that another rank of this save made."""
        table: dict[str, Any] = parse_value(bytes(data))
        options = SaveOptions(
            codec=table["codec"],
            chunk_nbytes=table["chunk_nbytes"],
            digest=table["digest"],
            durable=table["durable"],
            encoded_region_nbytes=table["encoded_region_nbytes"],
        )
        request = SaveRequest(
            name=table["name"],
            step=table["step"],
            metadata=table["metadata"],
            metrics=table["metrics"],
            if_exists=table["if_exists"],
            options=options,
            timeout_s=table["timeout_s"],
            progress=progress,
        )
        return PartsTicket(request, table["txn"], tuple((n, g) for n, g in table["bases"]))


def begin_parts(backend: Backend, request: SaveRequest) -> PartsTicket | CheckpointInfo:
    """On the coordinator: announce a save, and choose its bases. Ends in `commit_parts` or
    `abort_parts`, called by this process.

    Returns:
        The ticket, for every rank; or what is stored under the name already and is to be kept.
    Raises:
        UsageError: The name is a tag, or a base does not exist. Nothing was written.
    """
    kept = kept_info(backend, request)
    if kept is not None:
        return kept
    options = request.options
    if not backend.capabilities.late_key:
        options = replace(options, encoded_region_nbytes=FILE_NBYTES_TARGET_REMOTE)
    ensure_store_marker(backend)
    existing = look(backend, request.name)
    refuse_early(backend, existing, request)
    clean_abandoned(backend)
    chosen = choose_bases(backend, existing.found, request)
    bases = tuple((listed.name, listed.generation) for listed in chosen)
    txn = new_txn()
    begin(backend, txn, step=request.step, name=request.name, bases=bases)
    return PartsTicket(replace(request, options=options), txn, bases)


def abort_parts(backend: Backend, ticket: PartsTicket) -> None:
    """On the coordinator: nothing of this save becomes visible; its data is left to gc."""
    end(backend, ticket.txn)


@dataclass(slots=True)
class Part:
    """What one rank brings to a save, planned: nothing has been read or written.

    Attributes:
        pieces: Its plan; who stages copies puts them into `pieces.plan.payloads`.
        rank, size: This rank, and how many there are.
    """

    ticket: PartsTicket
    pieces: Pieces
    rank: int
    size: int

    def claim(self) -> bytes:
        """What this rank holds, for `share_parts`: all of it as replicas of unknown content."""
        digest_nbytes = DIGEST_NBYTES[self.ticket.request.options.digest]
        replicas = claim_replicas(self.pieces, digest_nbytes)
        plan = owned_plan(self.pieces, np.zeros(len(self.pieces.tensor_of), bool))
        tree, placement = fragment_tree(self.pieces, plan, no_placement())
        of = (self.rank, self.size, 0)
        files = FilesSection([], np.zeros(0, np.uint64))
        about = _about(self.ticket)
        return pack_fragment(about, tree, replicas, files=files, placement=placement, of=of)

    def owned(self, shares: bytes | None) -> NDArray[np.bool_]:
        """Pieces that this rank writes; without shares all of them."""
        held = self.pieces.held
        made = held.copy()
        if shares is not None:
            made[np.flatnonzero(held)] = _parse_shares(shares, self.rank, int(held.sum()))
        return made


def plan_part(flat: FlatTree, ticket: PartsTicket, rank: int, size: int) -> Part:
    """On every rank: plan what it holds (`flatten(tree, rank=rank)`).

    Raises:
        UsageError: Something in the tree cannot be saved.
    """
    return Part(ticket, plan_pieces(flat, ticket.request.options), rank, size)


def share_parts(backend: Backend, ticket: PartsTicket, claims: Sequence[bytes]) -> bytes:
    """On the coordinator: who writes what several ranks hold. Refuses what can be refused before
    the first byte is written.

    Args:
        claims: Of all ranks, in any order.
    Raises:
        MismatchError: Ranks disagree about a leaf, or do not hold all of a tensor.
        ExistsError: The name holds another tree.
    """
    tree, masks = share_out(_of_all_ranks(ticket, claims))
    refuse_other_structure(look(backend, ticket.request.name), tree, ticket.request)
    packed = pack_value([np.packbits(mask).tobytes() for mask in masks])
    return zstandard.ZstdCompressor(level=1).compress(packed)


def _parse_shares(shares: bytes, rank: int, count: int) -> NDArray[np.bool_]:
    masks = parse_value(zstandard.ZstdDecompressor().decompress(shares))
    bits = np.unpackbits(np.frombuffer(masks[rank], np.uint8), count=count)
    return bits.astype(bool)


def write_part(backend: Backend, part: Part, shares: bytes | None = None) -> bytes:
    """On every rank: write what it owns, digest the rest; durable, if asked, when it returns.

    Args:
        shares: From `share_parts`; None: this rank writes all that it holds.
    Returns:
        Its fragment, for `commit_parts`.
    Raises:
        ConflictError, StorageError: As a save. The coordinator is told, to abort.
    """
    ticket, owned = part.ticket, part.owned(shares)
    replicas = digest_replicas(part.pieces, owned)
    plan = owned_plan(part.pieces, owned)
    bases = open_bases(backend, _listed(backend, ticket))
    written = write_data(backend, plan, ticket.request, bases, f"{ticket.txn}-{part.rank}")
    tree, placement = fragment_tree(part.pieces, plan, written.placement)
    of = (part.rank, part.size, written.nbytes)
    files = written.files
    about = _about(ticket)
    return pack_fragment(about, tree, replicas, files=files, placement=placement, of=of)


def _listed(backend: Backend, ticket: PartsTicket) -> list[Listed]:
    made = []
    for name, generation in ticket.bases:
        key = Key(index_key(name, generation))
        entry = backend.stat(key)
        if entry is not None:
            made.append(Listed(name, generation, key, entry.nbytes))
    return made


def _about(ticket: PartsTicket) -> About:
    """Of a fragment; the tree's digest is filled in when it is packed."""
    request = ticket.request
    return About(
        name=request.name,
        step=request.step,
        created=now(),
        txn=bytes.fromhex(ticket.txn),
        parent=None,
        writer=request.writer,
        algorithm=request.options.digest,
        tree_digest=b"",
    )


def _of_all_ranks(ticket: PartsTicket, documents: Sequence[bytes]) -> list[Fragment]:
    """Fragments of exactly all ranks of this save, by rank.

    Raises:
        ConflictError: kind `conflict-fragment`: one is of another save, or one is missing.
    """
    fragments = [
        parse_fragment(document, f"fragment {position}")
        for position, document in enumerate(documents)
    ]
    fragments.sort(key=lambda fragment: fragment.rank)
    request, count = ticket.request, len(fragments)
    for fragment in fragments:
        about = fragment.index.about
        found = (about.txn.hex(), about.name, about.step, about.algorithm)
        expected = (ticket.txn, request.name, request.step, request.options.digest)
        if found != expected:
            _refuse_fragment("is of another save", fragment.rank, expected, found)
        if fragment.size != count:
            _refuse_fragment("is of another number of ranks", fragment.rank, count, fragment.size)
    ranks = [fragment.rank for fragment in fragments]
    if not ranks or ranks != list(range(count)):
        _refuse_fragment("is missing, or there twice", 0, "each rank once", ranks)
    return fragments


def _refuse_fragment(what: str, rank: int, expected: object, found: object) -> NoReturn:
    raise ConflictError(
        f"the fragment of a rank {what}",
        reason="fragment",
        where=f"rank {rank}",
        expected=expected,
        found=found,
        do="nothing was committed; save again with all ranks",
    )


def commit_parts(
    backend: Backend, ticket: PartsTicket, fragments: Sequence[bytes]
) -> CheckpointInfo:
    """On the coordinator: merge what the ranks wrote, and commit it as one checkpoint.

    Args:
        fragments: Of all ranks, in any order. Each names its rank and the save.
    Raises:
        MismatchError: Replicas or plain values differ between ranks, or parts do not tile a tensor.
        ConflictError: A fragment is of another save, or a collector took a file.
        ExistsError: The name holds another tree.
    """
    started_s = time.monotonic()
    try:
        parsed = _of_all_ranks(ticket, fragments)
        info, digest = _commit(backend, ticket, parsed)
    except StorageError as error:
        if error.reason != "commit-unknown":
            end(backend, ticket.txn)
        raise
    except BaseException:
        end(backend, ticket.txn)
        raise
    end(backend, ticket.txn)
    remember(backend, info.name, digest)
    written = sum(fragment.written_nbytes for fragment in parsed)
    return replace(info, written_nbytes=written, seconds=time.monotonic() - started_s)


def _commit(
    backend: Backend, ticket: PartsTicket, fragments: Sequence[Fragment]
) -> tuple[CheckpointInfo, bytes]:
    request = ticket.request
    merged = merge_fragments(fragments)
    packed = pack_tree(merged.tree)
    about = about_of(backend, merged.tree, request, (ticket.txn, packed))
    document = Document(about, merged.files, merged.placement, packed)
    bad = unusable(backend, document.sizes())
    if bad:
        raise ConflictError(
            "a collector condemned files of this save while its ranks wrote",
            reason="collected",
            where=f"data/{min(bad)}",
            do="save again; nothing of this save is visible",
        )
    if request.options.durable:
        sync_files(backend, document.sizes())
    request.before_commit()
    info = commit_document(backend, document, request, look(backend, request.name))
    return info, about.tree_digest
