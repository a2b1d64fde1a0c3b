"""Values of a TensorBundle: ranges of its data files, their checksums compared before first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ckptfmt.foreign.bundle.types import BOOL, STRING, TYPES, Entry
from ckptfmt.foreign.crc32c import crc32c, masked
from ckptfmt.foreign.file_map import FileMap, is_locating, open_map
from ckptfmt.foreign.mapping import gathered, word
from ckptfmt.foreign.protobuf import parse_varint
from ckptfmt.foreign.sstable import corrupt

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UINT32_MAX = 0xFFFFFFFF
_BLOCK_NBYTES = 8 << 20


class DataFiles:
    """The mapped data files of one bundle. The maps live as long as an array in them.

    Args:
        paths: Shard -> path without links, for all shards that hold a tensor.
    """

    def __init__(self, paths: Mapping[int, str], *, big_endian: bool) -> None:
        self.big_endian = big_endian
        self.names = {shard: os.path.basename(path) for shard, path in paths.items()}
        self._maps: dict[int, FileMap | None] = {}
        self.sizes: dict[int, int] = {}
        for shard, path in paths.items():
            self._maps[shard], self.sizes[shard] = open_map(path, self.names[shard])
        self._checked: set[tuple[int, int, int]] = set()
        self._is_located = is_locating()

    def where(self, entry: Entry) -> str:
        """File and byte range."""
        return self.span(entry.shard, entry.offset, entry.offset + entry.nbytes)

    def span(self, shard: int, start: int, stop: int) -> str:
        return f"{self.names.get(shard, shard)}[{start}:{stop})"

    def raw(self, entry: Entry) -> NDArray[Any]:
        """The bytes of an entry, not yet checked."""
        if not entry.nbytes:  # its shard may hold nothing else, and was not opened
            return np.empty(0, np.uint8)
        data = self._maps[entry.shard]
        assert data is not None  # the index has been compared with its size
        return np.frombuffer(data, np.uint8, entry.nbytes, entry.offset)

    def fetch(self, entry: Entry, name: str) -> NDArray[Any]:
        """The values of a tensor, or of a slice of one, read-only; mapped where the layout allows.

        Raises:
            CorruptError: The checksum differs, or the bytes are no values of the dtype.
        """
        at = f"{self.where(entry)}, tensor {ascii(name)[:200]}"
        if entry.type == STRING:
            return self._strings(entry, at)
        self._check_raw(entry, at)
        return _view(self.raw(entry), entry, self.big_endian)

    def fetch_box(self, entry: Entry, name: str, sides: tuple[slice, ...]) -> NDArray[Any]:
        """A box of a tensor that is no string, in the machine's byte order."""
        kind, at = TYPES[entry.type], f"{self.where(entry)}, tensor {ascii(name)[:200]}"
        self._check_raw(entry, at)
        raw = self.raw(entry).view(word(kind.nbytes)).reshape(entry.shape)
        index: tuple[Any, ...] = (*sides, ...)
        wanted = raw[index]
        cut = gathered(wanted)  # which makes one axis of none
        part = entry._replace(shape=wanted.shape)
        return _view(cut.reshape(-1).view(np.uint8), part, self.big_endian)

    def _check_raw(self, entry: Entry, at: str) -> None:
        """Compare the checksum of a whole tensor, and the values of a bool."""
        if self._is_located or not self._is_new(entry):
            return
        raw, crc = self.raw(entry), 0
        for start in range(0, raw.size, _BLOCK_NBYTES):
            block = raw[start : start + _BLOCK_NBYTES]
            self._announce(entry, start, len(block))
            crc = crc32c(block, crc)
        self._check(entry, crc, at)
        if entry.type == BOOL and raw.size and raw.max() > 1:
            for start in range(0, raw.size, _BLOCK_NBYTES):
                block = raw[start : start + _BLOCK_NBYTES]
                if block.max() > 1:
                    wrong = start + int(np.argmax(block > 1))
                    raise corrupt(
                        *("a bool is neither 0 nor 1", "bool", f"{at}, element {wrong}"),
                        found=int(raw[wrong]),
                    )

    def _announce(self, entry: Entry, start: int, nbytes: int) -> None:
        data, begin = self._maps[entry.shard], entry.offset + start
        if data is not None:
            data.announce(begin, begin + nbytes)

    def _is_new(self, entry: Entry) -> bool:
        return (entry.shard, entry.offset, entry.nbytes) not in self._checked

    def _check(self, entry: Entry, crc: int | None, where: str) -> None:
        if crc is None:
            return
        if masked(crc) != entry.crc:
            raise corrupt(
                "the tensor's checksum differs",
                "crc",
                where,
                f"{entry.crc:08x}",
                f"{masked(crc):08x}",
            )
        self._checked.add((entry.shard, entry.offset, entry.nbytes))

    def _strings(self, entry: Entry, where: str) -> NDArray[Any]:
        """Varint lengths, a checksum of them, then the strings' bytes one after another."""
        raw = self.raw(entry).tobytes()
        count = int(np.prod(entry.shape, dtype=object))
        lengths, position = [], 0
        for _ in range(count):
            length, position = parse_varint(raw, position, len(raw), where)
            lengths.append(length)
        word = raw[position : position + 4]
        position += 4
        if position + sum(lengths) != len(raw):
            raise corrupt(
                "lengths of strings do not fit", "strings", where, len(raw) - position, sum(lengths)
            )
        order: Literal["big", "little"] = "big" if self.big_endian else "little"
        # Each length is hashed as 32 bits, or as 64 where it needs them.
        crc = crc32c(b"".join(n.to_bytes(4 if n <= _UINT32_MAX else 8, order) for n in lengths))
        expected = int.from_bytes(word, order)
        if masked(crc) != expected:
            raise corrupt(
                "the checksum of the strings' lengths differs",
                "strings-crc",
                where,
                f"{expected:08x}",
                f"{masked(crc):08x}",
            )
        crc = crc32c(word, crc)
        self._check(entry, crc32c(raw[position:], crc), where)
        made = np.empty(count, object)
        for at, length in enumerate(lengths):
            made[at] = raw[position : position + length]
            position += length
        made.flags.writeable = False
        return made.reshape(entry.shape)


def _view(raw: NDArray[Any], entry: Entry, big_endian: bool) -> NDArray[Any]:
    import ml_dtypes

    kind = TYPES[entry.type]
    dtype = np.dtype(getattr(ml_dtypes, kind.dtype, None) or kind.dtype)
    if big_endian == (sys.byteorder == "little") and kind.nbytes > 1:
        # Not a view in the other byte order: ml_dtypes have none. Complex numbers swap by halves.
        width = kind.nbytes // (2 if dtype.kind == "c" else 1)
        raw = raw.view(f"u{width}").byteswap()
        raw.flags.writeable = False
    return raw.view(dtype).reshape(entry.shape)
