"""A dataset in chunks: each is found by where it begins, undone filter by filter, and cut."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.foreign.file_map import view
from ckptfmt.foreign.hdf5.cursor import REASON, UNDEFINED, File, corrupt
from ckptfmt.foreign.hdf5.messages import DEFLATE, FLETCHER, SHUFFLE
from ckptfmt.foreign.hdf5.objects import tree_entries
from ckptfmt.foreign.mapping import check_whole_chunk, word

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_NBYTES_MAX = 1 << 30
_RATIO_MAX = 1032
_KEPT_NBYTES_MIN = 4 << 20
_CHUNKS_MAX = 1 << 22
_SUMMED_WORDS = 1 << 16


class Chunks:
    """The chunks of one dataset.

    Args:
        tree: Address of their B-tree.
        width: Bytes of an element.
    """

    def __init__(
        self,
        file: File,
        tree: int,
        shape: tuple[int, ...],
        chunk: tuple[int, ...],
        *,
        width: int,
        filters: list[int],
        where: str,
    ) -> None:
        self.file, self.shape, self.chunk, self.where = file, shape, chunk, where
        self.width, self.filters = width, filters
        self.nbytes = math.prod(chunk) * width
        if len(chunk) != len(shape):
            raise corrupt("chunks of another rank", "chunk", where, chunk)
        if self.nbytes > CHUNK_NBYTES_MAX:
            raise corrupt("a chunk is too large", "limit", where, f"{self.nbytes} bytes")
        if filters:
            check_whole_chunk(self.nbytes, REASON, where)
        expected = math.prod(-(-n // c) for n, c in zip(shape, chunk))
        if expected > _CHUNKS_MAX or expected * 8 > file.nbytes:
            raise corrupt("more chunks than the file can hold", "size", where, expected)
        self._places = self._read_tree(tree)
        if len(self._places) != expected:
            found = f"{len(self._places)} of {expected}"
            raise corrupt("chunks are missing", "chunk-missing", where, found)

    def _read_tree(self, tree: int) -> dict[tuple[int, ...], tuple[int, int, int]]:
        """Position among the chunks -> (address, stored bytes, filters left out)."""
        made: dict[tuple[int, ...], tuple[int, int, int]] = {}
        if tree == UNDEFINED:
            return made
        ndim = len(self.shape)
        for key, address in tree_entries(self.file, tree, 1, 8 + 8 * (ndim + 1)):
            size, mask = int.from_bytes(key[:4], "little"), int.from_bytes(key[4:8], "little")
            begin = np.frombuffer(key, "<u8", ndim, 8).tolist()
            at = tuple(b // c for b, c in zip(begin, self.chunk))
            aligned = all(b % c == 0 for b, c in zip(begin, self.chunk))
            if not aligned or any(b >= n for b, n in zip(begin, self.shape)) or at in made:
                raise corrupt("a chunk where none can be", "chunk", self.where, begin)
            self.file.check(address, size, "chunk")
            if (not self.filters and size != self.nbytes) or self.nbytes > _RATIO_MAX * size + 64:
                raise corrupt("a chunk of an impossible size", "size", self.where, size)
            made[at] = (address, size, mask)
        ends = 0
        for address, size, _ in sorted(made.values()):
            if address < ends:
                raise corrupt("two chunks overlap", "overlap", self.where, address)
            ends = address + size
        return made

    def read(self, sides: tuple[slice, ...]) -> NDArray[Any]:
        """A box, as elements of `width` bytes."""
        made = np.empty([side.stop - side.start for side in sides], word(self.width))
        ranges = [range(side.start // c, -(-side.stop // c)) for side, c in zip(sides, self.chunk)]
        if not made.size:
            return made
        for number in range(math.prod(map(len, ranges))):
            place = []
            for steps in reversed(ranges):
                number, at = divmod(number, len(steps))
                place.append(steps[at])
            self._copy(tuple(reversed(place)), sides, made)
        return made

    def _copy(self, place: tuple[int, ...], sides: tuple[slice, ...], made: NDArray[Any]) -> None:
        source, target = [], []
        for at, c, side in zip(place, self.chunk, sides):
            begin = at * c
            low, high = max(begin, side.start), min(begin + c, side.stop)
            source.append(slice(low - begin, high - begin))
            target.append(slice(low - side.start, high - side.start))
        data = self._bytes(place).view(made.dtype).reshape(self.chunk)
        made[tuple(target)] = data[tuple(source)]

    def _bytes(self, place: tuple[int, ...]) -> NDArray[np.uint8]:
        """The bytes of a chunk. One that no filter has to undo is a view of the file; a large one
        that was undone is kept until another is, for it is read in parts."""
        if not self.filters:
            address, size, _ = self._places[place]
            return view(self.file.data, self.file.start + address, size)
        if self.nbytes < _KEPT_NBYTES_MIN:
            return np.frombuffer(self._undone(place), np.uint8)
        file = self.file
        if file.kept is None or file.kept[0] is not self or file.kept[1] != place:
            file.kept = None
            file.kept = self, place, self._undone(place)
        return np.frombuffer(file.kept[2], np.uint8)

    def _undone(self, place: tuple[int, ...]) -> bytes:
        """The bytes of a chunk behind its filters."""
        address, size, mask = self._places[place]
        data = self.file.bytes(address, size, "chunk")
        for number in reversed(range(len(self.filters))):
            if mask >> number & 1:
                continue
            kind = self.filters[number]
            if kind == DEFLATE:
                data = self._inflated(data)
            elif kind == SHUFFLE:
                data = _unshuffled(data, self.width)
            elif kind == FLETCHER:
                data = self._checked(data)
        if len(data) != self.nbytes:
            raise corrupt("a chunk of another length", "chunk", self.where, f"{len(data)} bytes")
        return data

    def _checked(self, data: bytes) -> bytes:
        """The bytes before their checksum, which libraries before HDF5 1.6.3 wrote with the bytes of
        each half swapped."""
        data, stored = data[:-4], data[-4:]
        found = fletcher32(data).to_bytes(4, "little")
        if stored not in (found, bytes(found[i] for i in (1, 0, 3, 2))):
            told = f"Fletcher-32 {found.hex()}, not {stored.hex()}"
            raise corrupt("a chunk is damaged", "fletcher32", self.where, told)
        return data

    def _inflated(self, data: bytes) -> bytes:
        inflater = zlib.decompressobj()
        try:
            made = inflater.decompress(data, self.nbytes + 5)
        except zlib.error as error:
            raise corrupt("a chunk is damaged", "deflate", self.where, str(error)) from error
        if not inflater.eof:
            raise corrupt("a chunk is longer than its shape, or cut off", "deflate", self.where)
        return made


def fletcher32(data: bytes) -> int:
    """The checksum of HDF5: of big-endian words of 16 bits, an odd last byte the upper half of one."""
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2")
    low = high = 0
    for start in range(0, len(words), _SUMMED_WORDS):
        block = words[start : start + _SUMMED_WORDS].astype(np.uint64)
        weights = np.arange(len(block), 0, -1, dtype=np.uint64)
        high += len(block) * low + int(block @ weights)
        low += int(block.sum())
    return _folded(high) << 16 | _folded(low)


def _folded(total: int) -> int:
    """A sum whose carries were added to its end, until it has 16 bits."""
    return (total - 1) % 0xFFFF + 1 if total else 0


def _unshuffled(data: bytes, width: int) -> bytes:
    """First all first bytes of elements, then all second ones, ..., in order again."""
    count = len(data) // width
    whole = np.frombuffer(data, np.uint8, count * width).reshape(width, count)
    return whole.T.tobytes() + data[count * width :]
