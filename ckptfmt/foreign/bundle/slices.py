"""A tensor in pieces: its slices cover it, agree where they overlap, and are joined."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.bundle.entries import check_size
from ckptfmt.foreign.bundle.index import BundleIndex
from ckptfmt.foreign.bundle.types import Entry, Slice
from ckptfmt.foreign.sstable import REASON, corrupt

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.bundle.values import DataFiles

_CELLS_MAX = 1 << 22
_PAIRS_MAX = 1 << 24


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
        at = f"{where}, slice {_text(box)}"
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
    return Pieces(entry, tuple(pieces), _check_coverage(entry.shape, pieces, where))


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


def _text(box: tuple[slice, ...]) -> str:
    return "[" + ", ".join(f"{side.start}:{side.stop}" for side in box) + "]"


def _check_coverage(shape: tuple[int, ...], pieces: list[Piece], where: str) -> bool:
    """Whether pieces overlap; an error if they leave a gap."""
    total = math.prod(shape)
    boxes = [p.box for p in pieces if math.prod(p.entry.shape)]
    if total == 0:
        return False
    covered = sum(math.prod(s.stop - s.start for s in box) for box in boxes)
    axes = [
        axis
        for axis, dim in enumerate(shape)
        if any(box[axis].start or box[axis].stop != dim for box in boxes)
    ]
    if len(axes) <= 1:
        # Cut along one axis, as nearly all are: any number of slices.
        axis = axes[0] if axes else 0
        position = 0
        for box in boxes if shape else []:
            if box[axis].start > position:
                raise _gap(shape, axis, position, box[axis].start, where)
            position = max(position, box[axis].stop)
        if shape and position < shape[axis]:
            raise _gap(shape, axis, position, shape[axis], where)
        if not boxes:
            raise _gap(shape, 0, 0, 1, where)
        return bool(covered > total)
    return _check_grid(shape, boxes, axes, where, covered=covered, total=total)


def _check_grid(
    shape: tuple[int, ...],
    boxes: list[tuple[slice, ...]],
    axes: list[int],
    where: str,
    *,
    covered: int,
    total: int,
) -> bool:
    """The same for cuts along several axes: a grid of all their bounds, one flag a cell."""
    cuts = [
        sorted({0, shape[a], *(b[a].start for b in boxes), *(b[a].stop for b in boxes)})
        for a in axes
    ]
    cells = math.prod(len(cut) - 1 for cut in cuts)
    if cells > _CELLS_MAX or cells * len(boxes) > _PAIRS_MAX * 64:
        raise UnsupportedError(
            "the tensor is cut into too many slices along several axes",
            reason=f"{REASON}-slices",
            where=where,
            found=len(boxes),
        )
    grid = np.zeros([len(cut) - 1 for cut in cuts], bool)
    places = [{bound: at for at, bound in enumerate(cut)} for cut in cuts]
    for box in boxes:
        grid[tuple(slice(p[box[a].start], p[box[a].stop]) for a, p in zip(axes, places))] = True
    if not grid.all():
        cell = np.unravel_index(int(np.argmin(grid)), grid.shape)
        whole = [slice(0, dim) for dim in shape]
        for a, cut, at in zip(axes, cuts, cell):
            whole[a] = slice(cut[int(at)], cut[int(at) + 1])
        raise corrupt("no slice holds a part of the tensor", "gap", f"{where}{_text((*whole,))}")
    return bool(covered > total)


def _gap(shape: tuple[int, ...], axis: int, start: int, stop: int, where: str) -> Exception:
    whole = [slice(0, dim) for dim in shape]
    if whole:
        whole[axis] = slice(start, stop)
    return corrupt("no slice holds a part of the tensor", "gap", f"{where}{_text((*whole,))}")


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
            _check_overlap(whole[piece.box], known[piece.box], array, f"{name}{_text(piece.box)}")
            known[piece.box] = True
        whole[piece.box] = array
    whole.flags.writeable = False
    return whole


def join_box(files: DataFiles, made: Pieces, name: str, sides: tuple[slice, ...]) -> NDArray[Any]:
    """A box of the tensor, from the slices that it meets."""
    extent = tuple(side.stop - side.start for side in sides)
    whole: NDArray[Any] | None = None
    for piece in made.pieces:
        meet = [
            (max(side.start, cut.start), min(side.stop, cut.stop))
            for side, cut in zip(sides, piece.box)
        ]
        if any(begin >= end for begin, end in meet):
            continue
        inside = tuple(slice(b - c.start, e - c.start) for (b, e), c in zip(meet, piece.box))
        part = files.fetch_box(piece.entry, name, inside)
        if whole is None:
            whole = np.empty(extent, part.dtype)
        whole[tuple(slice(b - s.start, e - s.start) for (b, e), s in zip(meet, sides))] = part
    assert whole is not None  # the slices cover the tensor
    return whole


def _check_overlap(
    there: NDArray[Any], known: NDArray[Any], array: NDArray[Any], where: str
) -> None:
    old, new = there[known], array[known]
    if old.dtype.kind != "O":
        # As bits: a NaN equals itself.
        old, new = old.view(np.uint8), new.view(np.uint8)
    if not np.array_equal(old, new):
        raise corrupt("slices that overlap hold different values", "overlap", where)
