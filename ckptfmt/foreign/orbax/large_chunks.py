"""Parts of chunks that are too large to be decoded whole: an array that one process wrote is a single
chunk, of any size.

Raw chunks are read by ranges, compressed ones as a stream that goes forwards. What is stored some
other way is left to tensorstore, which takes the memory of a whole chunk.
"""

from __future__ import annotations

import gzip
import io
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import CorruptError
from ckptfmt.foreign.crc32c import crc32c
from ckptfmt.foreign.flat import box_of_runs
from ckptfmt.foreign.mapping import corrupt as damage
from ckptfmt.foreign.mapping import native, numel
from ckptfmt.foreign.pieces import gather

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.streaming import BoxReader
    from ckptfmt.format import Dtype

_REASON = "orbax"
_INPUT_NBYTES = 1 << 20
_SKIP_NBYTES = 4 << 20
_WINDOW_NBYTES_MAX = 128 << 20
_STREAMS_MAX = 32
"""Chunks beside one another are read in turn, each from where it is."""
_SHARD_CHUNKS_MAX = 1 << 20
_NOWHERE = (1 << 64) - 1
_VALUE_NBYTES_MAX = 1 << 50
_STREAMS = {"": "", "zstd": "zstd", "gzip": "gzip"}
_PLAIN_INDEX = ["bytes", "crc32c"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array is stored.

    Attributes:
        stored: Shape of what a key holds: a chunk, or a shard of several.
        chunk: Shape of a chunk.
        name, separator: A key is the name and the position, joined.
        codec: `zstd`, `gzip` or "".
        is_big: The byte order.
        index: Of a shard, where its index stands: `start`, `end`; "" if keys hold chunks.
    """

    stored: tuple[int, ...]
    chunk: tuple[int, ...]
    name: str
    separator: str
    codec: str
    is_big: bool
    index: str = ""

    def key(self, place: Sequence[int]) -> str:
        return self.separator.join([*filter(None, [self.name]), *map(str, place)])


def parse_layout(spec: Any) -> Layout | None:
    """The layout of an array that tensorstore has opened; None for one that cannot be streamed.

    Args:
        spec: Its specification as JSON, with all metadata.
    """
    metadata = spec["metadata"]
    if spec["driver"] == "zarr":
        codec = _STREAMS.get((metadata["compressor"] or {"id": ""})["id"])
        kind = metadata["dtype"]
        if (
            metadata["filters"]
            or metadata["order"] != "C"
            or codec is None
            or type(kind) is not str
        ):
            return None
        chunk = tuple(metadata["chunks"])
        return Layout(chunk, chunk, "", metadata["dimension_separator"], codec, kind[0] == ">")
    stored = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
    encoding = metadata["chunk_key_encoding"]
    is_default = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    name = "c" if is_default else ""
    codecs, chunk, index = metadata["codecs"], stored, ""
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        inner = codecs[0]["configuration"]
        if [codec["name"] for codec in inner["index_codecs"]] != _PLAIN_INDEX:
            return None
        if _is_big(inner["index_codecs"][0]):
            return None
        codecs, chunk = inner["codecs"], tuple(inner["chunk_shape"])
        index = inner.get("index_location", "end")
    found = [codec["name"] for codec in codecs]
    if found[:1] != ["bytes"] or len(found) > 2 or "".join(found[1:]) not in _STREAMS:
        return None
    return Layout(stored, chunk, name, separator, "".join(found[1:]), _is_big(codecs[0]), index)


def _is_big(codec: Any) -> bool:
    return bool(codec.get("configuration", {}).get("endian") == "big")


class LargeChunks:
    """Reads boxes of an array.

    Args:
        kvstore: Of tensorstore, at the array.
        otherwise: Reads a box of what is not stored: the fill value.
    """

    def __init__(
        self, kvstore: Any, layout: Layout, dtype: Dtype, where: str, otherwise: BoxReader
    ) -> None:
        self._kvstore, self._layout, self._dtype = kvstore, layout, dtype
        self._where, self._otherwise = where, otherwise
        self._open: OrderedDict[tuple[int, ...], _Bytes | None] = OrderedDict()
        self._indexes: dict[str, NDArray[np.uint64] | None] = {}

    def box(self, sides: tuple[slice, ...]) -> NDArray[Any]:
        chunk = self._layout.chunk
        ranges = [range(side.start // c, -(-side.stop // c)) for side, c in zip(sides, chunk)]
        parts = (
            (tuple(slice(at * c, (at + 1) * c) for at, c in zip(place, chunk)), self._part(place))
            for place in product(*ranges)
        )
        return gather(parts, sides)

    def _part(self, place: tuple[int, ...]) -> BoxReader:
        """Reads a box of one chunk."""
        chunk, dtype = self._layout.chunk, self._dtype
        swapped = self._layout.is_big != (sys.byteorder == "big")

        def run(first: int, last: int) -> NDArray[Any]:
            size, source = dtype.itemsize, self._bytes(place)
            assert source is not None
            raw = source.read(first * size, (last - first) * size)
            return native(raw, dtype, swapped=swapped)

        def missing(sides: tuple[slice, ...]) -> NDArray[Any]:
            begins = [at * c for at, c in zip(place, chunk)]
            return self._otherwise(
                tuple(slice(b + s.start, b + s.stop) for b, s in zip(begins, sides))
            )

        return missing if self._bytes(place) is None else box_of_runs(chunk, run)

    def _bytes(self, place: tuple[int, ...]) -> _Bytes | None:
        """A chunk's bytes; None if it is not stored."""
        if place not in self._open:
            found, layout = self._find(place), self._layout
            made = None
            if found is not None:
                nbytes = numel(layout.chunk) * self._dtype.itemsize
                kind = _Stream if layout.codec else _Bytes
                made = kind(self._kvstore, found, nbytes, layout.codec, self._where)
            self._open[place] = made
            if len(self._open) > _STREAMS_MAX:
                self._open.popitem(last=False)
        self._open.move_to_end(place)
        return self._open[place]

    def _find(self, place: tuple[int, ...]) -> tuple[str, int, int] | None:
        """(key, start, stop) of a chunk's stored bytes."""
        layout = self._layout
        if not layout.index:
            key = layout.key(place)
            nbytes = value_nbytes(self._kvstore, key)
            return None if nbytes is None else (key, 0, nbytes)
        grid = [s // c for s, c in zip(layout.stored, layout.chunk)]
        key = layout.key([at // n for at, n in zip(place, grid)])
        if key not in self._indexes:
            self._indexes[key] = self._read_index(key, math.prod(grid))
        index = self._indexes[key]
        inner = tuple(at % n for at, n in zip(place, grid))
        row = None if index is None else index.reshape(*grid, 2)[inner].tolist()
        if row is None or row == [_NOWHERE, _NOWHERE]:
            return None
        return key, row[0], row[0] + row[1]

    def _read_index(self, key: str, count: int) -> NDArray[np.uint64] | None:
        nbytes = 16 * count + 4
        if count > _SHARD_CHUNKS_MAX:
            raise damage(_REASON, "too many chunks in a shard", "limit", self._where, count)
        at = slice(0, nbytes) if self._layout.index == "start" else slice(-nbytes, None)
        found = self._kvstore.read(key, byte_range=at).result()
        if found.state == "missing":
            return None
        if int.from_bytes(found.value[-4:], "little") != crc32c(found.value[:-4]):
            raise damage(_REASON, "the checksum of a shard's index differs", "crc", self._where)
        return np.frombuffer(found.value, "<u8", 2 * count)


def value_nbytes(kvstore: Any, key: str) -> int | None:
    """Length of a value, of which no more than a byte is read at a time; None if there is none."""
    if kvstore.read(key, byte_range=slice(0, 0)).result().state == "missing":
        return None
    low, high = 0, _VALUE_NBYTES_MAX  # the first offset that is no byte's lies in [low, high]
    while low < high:
        middle = (low + high) // 2
        try:
            kvstore.read(key, byte_range=slice(middle, middle + 1)).result()
            low = middle + 1
        except ValueError as error:
            if "OUT_OF_RANGE" not in str(error):
                raise
            high = middle
    return low


class _Bytes:
    """The bytes of a chunk that is stored raw."""

    def __init__(
        self, kvstore: Any, found: tuple[str, int, int], nbytes: int, codec: str, where: str
    ) -> None:
        self._kvstore, self._nbytes, self._codec, self._where = kvstore, nbytes, codec, where
        self._key, self._start, self._stop = found
        stored = self._stop - self._start
        if not codec and stored != nbytes:
            raise self._damaged("has another length than its shape", f"{stored} bytes")

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes [start, start + nbytes)."""
        made = np.empty(nbytes, np.uint8)
        for at in range(0, nbytes, _INPUT_NBYTES):
            part = self._stored(start + at, min(_INPUT_NBYTES, nbytes - at))
            made[at : at + len(part)] = np.frombuffer(part, np.uint8)
        return made

    def _stored(self, start: int, nbytes: int) -> bytes:
        at = slice(self._start + start, self._start + start + nbytes)
        value: bytes = self._kvstore.read(self._key, byte_range=at).result().value
        if len(value) != nbytes:  # it was there when its length was asked for
            raise self._damaged("is gone, or was cut off", f"{len(value)} of {nbytes} bytes")
        return value

    def _damaged(self, what: str, found: str | None = None) -> CorruptError:
        return damage(_REASON, f"a chunk {what}", "chunk", self._where, found)


class _Stream(_Bytes):
    """Those of a compressed chunk; cheap as long as ranges ascend."""

    _at = -1
    _stream: Any = None

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        if self._stream is None or start < self._at:
            self._rewind()
        made = np.empty(nbytes, np.uint8)
        while self._at < start:
            self._take(np.empty(min(start - self._at, _SKIP_NBYTES), np.uint8))
        self._take(made)
        if self._at == self._nbytes:
            if self._stream.read(1):
                raise self._damaged("is longer than its shape")
            self._stream = None  # and holds nothing
        return made

    def _take(self, out: NDArray[np.uint8]) -> None:
        done = 0
        while done < out.size:
            count = self._stream.readinto(out[done:])
            if not count:
                raise self._damaged("is cut off, or shorter than its shape")
            done += count
        self._at += done

    def _rewind(self) -> None:
        source = io.BufferedReader(_Source(self._stored, self._stop - self._start), _INPUT_NBYTES)
        self._stream, self._at = _OPENERS[self._codec](source), 0


def _open_zstd(source: Any) -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_WINDOW_NBYTES_MAX).stream_reader(
        source, read_size=_INPUT_NBYTES, read_across_frames=True
    )


_OPENERS: dict[str, Callable[[Any], Any]] = {
    "zstd": _open_zstd,
    "gzip": partial(gzip.GzipFile, None, "rb", 9),
}


class _Source(io.RawIOBase):
    """The stored bytes as a file."""

    def __init__(self, stored: Callable[[int, int], bytes], nbytes: int) -> None:
        self._stored, self._nbytes, self._at = stored, nbytes, 0

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        count = min(len(out), self._nbytes - self._at)
        out[:count] = self._stored(self._at, count) if count else b""
        self._at += count
        return count
