"""The way of a data file's bytes to its writer. Spec: 05-data-files.

Threads write pieces of whole blocks, directly where the file system allows it. Bytes that lie in an
arena as the file has them go from there as they are; all others are copied into a ring of pieces.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ckptfmt.engine.arena import PIECE_NBYTES, Bytes, Ring, StagedMemory
from ckptfmt.engine.pipeline import Pipeline as Threads
from ckptfmt.format import BLOCK_NBYTES, Hasher
from ckptfmt.storage import Writer

Data = bytes | bytearray | memoryview

LARGE_CHUNK_NBYTES = 1 << 20
"""Where chunks are kept: one of this size stays where it is, a smaller one is copied to others."""
SPAN_NBYTES_MIN = 256 << 10
"""A stretch of an arena below this is copied: two small writes cost more than the copy."""


class Outlet:
    """Bytes of a file that is written while it grows, in aligned pieces.

    The end of the file is either in a piece of the ring, or a *span*: a stretch of the arena that
    grows as neighbours follow, and whose full pieces are sent from where they are.
    """

    def __init__(
        self, writer: Writer, threads: Threads, ring: Ring, staged: StagedMemory | None
    ) -> None:
        self._writer, self._threads, self._ring, self._staged = writer, threads, ring, staged
        self._piece: Bytes | None = None
        self._start = 0
        self._fill = 0
        self._span = False
        self._delta = 0
        """From an offset in the file to the position in the arena, of the span."""

    def put(self, offset: int, data: Data, digest: Hasher | None = None) -> None:
        """Bytes at an offset at or after the end so far; the gap is zeros.

        Args:
            digest: Told the bytes as they were copied, from the copy.
        """
        if digest is not None or not self._stretch(offset, data):
            if self._span:
                self._leave_span()
            self._copy(offset, data, digest)

    def _copy(self, offset: int, data: Data, digest: Hasher | None = None) -> None:
        self._zeros(offset - self._start - self._fill)
        done, source = 0, np.frombuffer(data, np.uint8)
        while done < len(source):
            piece, room = self._current()
            count = min(len(source) - done, room)
            copy = piece[self._fill : self._fill + count]
            copy[:] = source[done : done + count]
            if digest is not None:
                digest.update(copy)
            done += count
            self._advance(count)

    def _zeros(self, gap: int) -> None:
        while gap:
            piece, room = self._current()
            count = min(gap, room)
            piece[self._fill : self._fill + count] = 0
            gap -= count
            self._advance(count)

    def _current(self) -> tuple[Bytes, int]:
        if self._piece is None:
            self._piece = self._ring.take()
        return self._piece, PIECE_NBYTES - self._fill

    def _advance(self, count: int) -> None:
        self._fill += count
        if self._fill == PIECE_NBYTES:
            self._emit_piece()

    def emit(self) -> None:
        """Send what is there."""
        if self._span:
            self._leave_span()
        self._emit_piece()

    def _emit_piece(self) -> None:
        piece, self._piece = self._piece, None
        if piece is None or self._fill == 0:
            return
        task = partial(_send, self._writer, self._start, piece, self._fill, self._ring)
        self._start += self._fill
        self._fill = 0
        self._threads.submit(task, 0, always=True)

    def _stretch(self, offset: int, data: Data) -> bool:
        """Take bytes as a part of the span, or begin one with them; False if they must be copied."""
        if self._staged is None or not (self._span or len(data) >= SPAN_NBYTES_MIN):
            return False
        at, end = self._staged.position(data), self._start + self._fill
        if at < 0:
            return False
        delta = at - offset
        if not (self._span and delta == self._delta and self._is_zero(end, offset)):
            if len(data) < SPAN_NBYTES_MIN or delta % BLOCK_NBYTES:
                return False
            if self._span:
                self._leave_span()
            # A span begins on a block: what is before it completes the piece.
            self._copy(offset, data[: -offset % BLOCK_NBYTES])
            self._emit_piece()
            self._span, self._delta = True, delta
        self._fill = offset + len(data) - self._start
        while self._fill >= PIECE_NBYTES:
            self._send_span(PIECE_NBYTES)
        return True

    def _is_zero(self, start: int, stop: int) -> bool:
        """Whether the arena has a gap of the file as the file must: a region that is stored
        already may lie in it."""
        assert self._staged is not None
        return not self._staged.memory[start + self._delta : stop + self._delta].any()

    def _send_span(self, nbytes: int) -> None:
        assert self._staged is not None
        at = self._start + self._delta
        view = self._staged.memory[at : at + nbytes].data
        self._threads.submit(partial(self._writer.write, self._start, view), nbytes)
        self._start += nbytes
        self._fill -= nbytes

    def _leave_span(self) -> None:
        """Send the whole blocks that are left of the span; the rest begins a piece."""
        assert self._staged is not None
        whole = self._fill - self._fill % BLOCK_NBYTES
        if whole:
            self._send_span(whole)
        self._span = False
        rest, self._fill = self._fill, 0
        if rest:
            at = self._start + self._delta
            piece, _ = self._current()
            piece[:rest] = self._staged.memory[at : at + rest]
            self._advance(rest)


def _send(writer: Writer, offset: int, piece: Bytes, nbytes: int, ring: Ring) -> None:
    try:
        writer.write(offset, piece[:nbytes].data)
    finally:
        ring.back(piece)


class Kept:
    """Bytes of a file whose id must be known before it is written."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, memoryview]] = []
        self._pending = bytearray()
        self._start = 0

    def put(self, offset: int, data: Data, digest: Hasher | None = None) -> None:
        """Bytes at an offset at or after the end so far; the gap is zeros.

        Args:
            digest: Told the bytes, of which a copy is made then: they are the caller's, who may
                change them before the file is written.
        """
        if digest is not None:
            data = bytes(data)
            digest.update(data)
        self._pending += bytes(offset - self._start - len(self._pending))
        if len(data) < LARGE_CHUNK_NBYTES:
            self._pending += data
            return
        self.emit()
        self.pieces.append((offset, memoryview(data)))
        self._start = offset + len(data)

    def emit(self) -> None:
        """Close the gathered bytes."""
        if self._pending:
            self.pieces.append((self._start, memoryview(self._pending)))
            self._start += len(self._pending)
            self._pending = bytearray()
