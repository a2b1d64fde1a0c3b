"""Pipelines and the zstd codec. Spec: 06-digests-and-codecs §6.3, codecs/."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.errors import CorruptError, UnsupportedError, UsageError
from ckptfmt.format import CODECS, RAW, Pipeline, decode, encode, parse_codec

ZSTD: Pipeline = (("zstd",),)
RAW_BYTES = b"weights " * 1000


@given(st.binary(max_size=2000), st.sampled_from([RAW, ZSTD, ZSTD * 2, ZSTD * 4]))
def test_what_is_encoded_decodes_where_lengths_are_known(data: bytes, pipeline: Pipeline) -> None:
    stored = encode(data, pipeline)
    if len(pipeline) < 2:
        assert bytes(decode(stored, pipeline, len(data))) == data
    else:
        # The index states one length: a frame within a frame is of another, and is refused.
        middle = encode(data, pipeline[:-1])
        assert bytes(decode(stored, ZSTD, len(middle))) == middle


@pytest.mark.parametrize("level", [None, -5, 1, 3, 19])
def test_every_level_decodes_alike(level: int | None) -> None:
    stored = encode(RAW_BYTES, ZSTD, level)
    assert len(stored) < len(RAW_BYTES) // 4
    assert decode(stored, ZSTD, len(RAW_BYTES)) == RAW_BYTES


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_buffer_is_taken(kind: type) -> None:
    stored = encode(kind(RAW_BYTES), ZSTD)
    assert bytes(decode(kind(bytes(stored)), ZSTD, len(RAW_BYTES))) == RAW_BYTES


def frame(data: bytes, **options: Any) -> bytes:
    made: bytes = zstandard.ZstdCompressor(level=1, **options).compress(data)
    return made


def refused(stored: bytes, nbytes: int) -> str:
    with pytest.raises(CorruptError) as caught:
        decode(stored, ZSTD, nbytes, "data/x[64:100)")
    assert "data/x[64:100)" in str(caught.value)
    return caught.value.kind


def test_a_frame_of_another_size_is_refused_before_it_is_decompressed() -> None:
    bomb = frame(bytes(1 << 30))
    tracemalloc.start()
    try:
        assert refused(bomb, 100) == "corrupt-zstd-size"
        assert refused(frame(RAW_BYTES), len(RAW_BYTES) - 1) == "corrupt-zstd-size"
        assert refused(frame(RAW_BYTES), len(RAW_BYTES) + 1) == "corrupt-zstd-size"
        assert refused(frame(RAW_BYTES, write_content_size=False), 8000) == "corrupt-zstd-size"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    good = frame(RAW_BYTES)
    assert good[4] >> 6 == 1  # a size of two bytes, 256 less than it is
    at = 5 if good[4] & 0x20 else 6
    assert int.from_bytes(good[at : at + 2], "little") + 256 == len(RAW_BYTES)
    for nbytes in (256, len(RAW_BYTES) - 1, len(RAW_BYTES) + 1, 65_000):
        lie = good[:at] + (nbytes - 256).to_bytes(2, "little") + good[at + 2 :]
        assert zstandard.get_frame_parameters(lie).content_size == nbytes
        assert refused(lie, nbytes) in ("corrupt-zstd-frame", "corrupt-zstd-size")


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\x28\xb5\x2f",
        RAW_BYTES,
        frame(RAW_BYTES)[:-1],
        frame(RAW_BYTES)[:20],
        frame(RAW_BYTES) + b"\0",
        frame(RAW_BYTES) * 2,
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + frame(RAW_BYTES),
        b"\x50\x2a\x4d\x18" + len(RAW_BYTES).to_bytes(4, "little") + RAW_BYTES,
        b"\x27" + frame(RAW_BYTES)[1:],
    ],
    ids=["empty", "short", "plain", "cut", "cut-early", "more", "two", "skippable-first",
         "skippable", "old-magic"],
)  # fmt: skip
def test_what_is_not_one_frame_is_refused(stored: bytes) -> None:
    assert refused(stored, len(RAW_BYTES)) == "corrupt-zstd-frame"


def test_a_frame_with_a_wrong_checksum_is_refused() -> None:
    stored = bytearray(frame(RAW_BYTES, write_checksum=True))
    assert decode(bytes(stored), ZSTD, len(RAW_BYTES)) == RAW_BYTES
    stored[-1] ^= 1
    assert refused(bytes(stored), len(RAW_BYTES)) == "corrupt-zstd-frame"


def test_a_frame_that_needs_a_dictionary_is_refused() -> None:
    samples: list[Any] = [f"sample {i} of weights".encode() * 4 for i in range(200)]
    dictionary = zstandard.train_dictionary(1024, samples)
    stored = zstandard.ZstdCompressor(dict_data=dictionary).compress(RAW_BYTES)
    assert refused(stored, len(RAW_BYTES)) == "corrupt-zstd-size"


@given(st.binary(max_size=60), st.integers(0, 100))
def test_any_bytes_behind_the_magic_are_a_frame_or_refused(data: bytes, nbytes: int) -> None:
    try:
        found: int | str = len(decode(b"\x28\xb5\x2f\xfd" + data, ZSTD, nbytes))
    except CorruptError as error:
        found = error.kind
    assert found in ("corrupt-zstd-frame", "corrupt-zstd-size", nbytes)


@pytest.mark.parametrize(
    "pipeline",
    [(("lz4",),), (("zstd", 3),), (("zstd", "x"),), (("zstd",), ("aead", "key")), (("Zstd",),)],
)
def test_an_unknown_stage_or_parameter_is_unsupported(pipeline: Pipeline) -> None:
    with pytest.raises(UnsupportedError) as caught:
        decode(b"anything", pipeline, 8, "chunk 3")
    assert caught.value.kind == "unsupported-codec"
    assert "chunk 3" in str(caught.value)


def test_codecs_are_named_by_text() -> None:
    assert parse_codec("raw") == (RAW, None)
    assert parse_codec("zstd") == (ZSTD, None)
    assert parse_codec("zstd:19") == (ZSTD, 19)
    assert parse_codec("zstd:-3") == (ZSTD, -3)
    assert set(CODECS) == {"zstd"}


@pytest.mark.parametrize(
    "text", ["", "gzip", "raw:1", "zstd:x", "zstd:99", "zstd:1e3", "ZSTD", "zstd:1.5", "zstd:--1"]
)
def test_a_codec_that_cannot_write_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_codec(text)
    assert caught.value.kind == "usage-codec"
