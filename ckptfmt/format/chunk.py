"""A chunk: raw bytes to stored bytes and digests, and back, checked. Spec: 06-digests-and-codecs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ckptfmt.format.codecs import RAW, Pipeline, decode, encode
from ckptfmt.format.columns import corrupt
from ckptfmt.format.digests import digest

Buffer: TypeAlias = bytes | bytearray | memoryview

_SAMPLE_NBYTES = 64 << 10
_WORTH = 0.95


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """What is written for a chunk: `data` by `pipeline`, and its digest."""

    data: Buffer
    pipeline: Pipeline
    digest: bytes


def encode_chunk(
    raw: memoryview, raw_digest: bytes, codec: tuple[Pipeline, int | None], algorithm: str
) -> StoredChunk:
    """Apply a codec where it saves at least 5 % of the chunk, by a sample first."""
    pipeline, level = codec
    if pipeline and len(raw) > 2 * _SAMPLE_NBYTES:
        middle = len(raw) // 2
        sample = raw[middle : middle + _SAMPLE_NBYTES]
        if len(encode(sample, pipeline, level)) > _WORTH * len(sample):
            pipeline = RAW
    if pipeline:
        data = encode(raw, pipeline, level)
        if len(data) <= _WORTH * len(raw):
            return StoredChunk(data, pipeline, digest(data, algorithm))
    return StoredChunk(raw, RAW, raw_digest)


def check_chunk(data: Buffer, expected: bytes, algorithm: str, where: str) -> None:
    """CorruptError (kind `corrupt-chunk-digest`) unless the bytes have this digest."""
    found = digest(data, algorithm)
    if found != expected:
        corrupt("chunk digest differs", "chunk-digest", where, expected.hex(), found.hex())


def decode_chunk(
    stored: Buffer,
    pipeline: Pipeline,
    raw_nbytes: int,
    digests: tuple[bytes, bytes],
    *,
    algorithm: str,
    where: str,
) -> Buffer:
    """Stored bytes -> raw bytes; the stored digest is checked before a decoder runs.

    Args:
        digests: (stored, raw) digests.
    """
    check_chunk(stored, digests[0], algorithm, where)
    if not pipeline:
        return stored
    raw = decode(stored, pipeline, raw_nbytes, where)
    check_chunk(raw, digests[1], algorithm, where)
    return raw
