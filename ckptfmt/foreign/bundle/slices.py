"""A tensor in pieces: its slices cover it, agree where they overlap, and are joined."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.foreign.bundle.entries import check_size
from ckptfmt.foreign.bundle.index import BundleIndex
from ckptfmt.foreign.bundle.types import Entry, Slice
from ckptfmt.foreign.pieces import check_coverage, gather, text_of
from ckptfmt.foreign.sstable import REASON, corrupt

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.bundle.values import DataFiles


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice that has bytes: its box and its entry."""

    box: tuple[slice, ...]
    entry: Entry


@dataclass(frozen=True, slots=True)
class Pieces:
    """All slices of one tensor, in the order of their boxes. `overlap`: two of them meet."""

    entry: Entry
    pieces: tuple[Piece, ...]
    overlap: bool

    @property
    def nbytes(self) -> int:
        return sum(piece.entry.nbytes for piece in self.pieces)

    def where(self, files: DataFiles) -> str:
        """File and byte range of the first slice."""
        first = files.where(self.pieces[0].entry) if self.pieces else "no file"
        return f"{first} and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else first


def parse_pieces(index: BundleIndex, name: str, entry: Entry, where: str) -> Pieces:
    """The slices of a tensor, from what its entry lists.

    Raises:
        CorruptError: A slice is missing, lies outside, has another dtype or size, or a part of the
            tensor is in none; the message has the range.
    """
    pieces = []
    for piece in dict.fromkeys(entry.slices):
        if len(piece.starts) != len(entry.shape):
            raise corrupt("a slice of another rank", "slice", where, len(entry.shape), piece.starts)
        box = tuple(
            slice(start, dim if length < 0 else start + length)
            for start, length, dim in zip(piece.starts, piece.lengths, entry.shape)
        )
        at = f"{where}, slice {text_of(box)}"
        if any(side.stop > dim for side, dim in zip(box, entry.shape)):
            raise corrupt("a slice lies outside of its tensor", "slice", at, list(entry.shape))
        found = index.slices.get(slice_key(name, piece))
        if found is None:
            raise corrupt("a slice that is listed is not there", "slice-missing", at)
        extent = tuple(side.stop - side.start for side in box)
        if found.type != entry.type or found.shape != extent or found.slices:
            raise corrupt("a slice of another dtype or shape", "slice", at, extent, found.shape)
        check_size(found, at)
        pieces.append(Piece(box, found))
    pieces.sort(key=lambda p: tuple(side.start for side in p.box))
    boxes = [p.box for p in pieces if math.prod(p.entry.shape)]
    return Pieces(entry, tuple(pieces), check_coverage(entry.shape, boxes, REASON, where))


def slice_key(name: str, piece: Slice) -> bytes:
    """The key under which a slice stands: TensorFlow's ordered code of name and extents."""
    # The code escapes the byte 255 as well, which UTF-8 has not.
    text = name.encode().replace(b"\0", b"\0\xff")
    made = b"\0" + text + b"\0\1" + _ordered(len(piece.starts))
    for start, length in zip(piece.starts, piece.lengths):
        made += _ordered_signed(start) + _ordered_signed(length)
    return made


def _ordered(value: int) -> bytes:
    width = (value.bit_length() + 7) // 8
    return bytes([width]) + value.to_bytes(width, "big")


def _ordered_signed(value: int) -> bytes:
    """As many bytes as 7 bits each and a sign need; the first bits of them say how many there are."""
    bits = (~value if value < 0 else value).bit_length()
    width = bits // 7 + 1
    mark = ((1 << width) - 1) << 7 * width
    return ((value & ((1 << 8 * width) - 1)) ^ mark).to_bytes(width, "big")


def slice_keys(name: str, entry: Entry) -> list[bytes]:
    """The keys that an entry's slices stand under."""
    return [slice_key(name, Slice(*piece)) for piece in entry.slices]


def join(files: DataFiles, made: Pieces, name: str) -> NDArray[Any]:
    """The whole tensor, read-only.

    Raises:
        CorruptError: A slice is damaged, or two that overlap hold different values.
    """
    arrays = [files.fetch(piece.entry, name) for piece in made.pieces]
    if len(arrays) == 1:
        return arrays[0]
    whole = np.empty(made.entry.shape, arrays[0].dtype if arrays else np.uint8)
    known = np.zeros(made.entry.shape, bool) if made.overlap else None
    for piece, array in zip(made.pieces, arrays):
        if known is not None:
            _check_overlap(whole[piece.box], known[piece.box], array, f"{name}{text_of(piece.box)}")
            known[piece.box] = True
        whole[piece.box] = array
    whole.flags.writeable = False
    return whole


def join_box(files: DataFiles, made: Pieces, name: str, sides: tuple[slice, ...]) -> NDArray[Any]:
    """A box of the tensor, from the slices that it meets."""
    parts = [(piece.box, partial(files.fetch_box, piece.entry, name)) for piece in made.pieces]
    return gather(parts, sides)


def _check_overlap(
    there: NDArray[Any], known: NDArray[Any], array: NDArray[Any], where: str
) -> None:
    old, new = there[known], array[known]
    if old.dtype.kind != "O":
        # As bits: a NaN equals itself.
        old, new = old.view(np.uint8), new.view(np.uint8)
    if not np.array_equal(old, new):
        raise corrupt("slices that overlap hold different values", "overlap", where)
