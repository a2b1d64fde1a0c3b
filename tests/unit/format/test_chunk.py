"""A chunk to stored bytes and back. Spec: 06-digests-and-codecs, M05-11, M05-12."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.format import (
    RAW,
    StoredChunk,
    check_chunk,
    decode_chunk,
    digest,
    encode_chunk,
    parse_codec,
)

ZEROS = bytes(1 << 20)


def encoded(raw: bytes, codec: str, algorithm: str = "xxh3-128") -> StoredChunk:
    return encode_chunk(memoryview(raw), digest(raw, algorithm), parse_codec(codec), algorithm)


def decoded(chunk: StoredChunk, raw: bytes, algorithm: str = "xxh3-128") -> bytes:
    digests = (chunk.digest, digest(raw, algorithm))
    made = decode_chunk(
        chunk.data, chunk.pipeline, len(raw), digests, algorithm=algorithm, where="data/x"
    )
    return bytes(made)


@given(st.binary(min_size=1, max_size=3000), st.sampled_from(["raw", "zstd", "zstd:9"]),
       st.sampled_from(["xxh3-128", "sha256"]))  # fmt: skip
def test_a_chunk_comes_back(raw: bytes, codec: str, algorithm: str) -> None:
    chunk = encoded(raw, codec, algorithm)
    assert chunk.digest == digest(bytes(chunk.data), algorithm)
    assert len(chunk.data) <= len(raw)
    assert decoded(chunk, raw, algorithm) == raw


def test_what_compresses_is_compressed() -> None:
    chunk = encoded(ZEROS, "zstd")
    assert chunk.pipeline == (("zstd",),)
    assert len(chunk.data) < 1000
    assert decoded(chunk, ZEROS) == ZEROS


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 1 << 20])
def test_what_does_not_compress_stays_raw_and_is_not_copied(nbytes: int) -> None:
    raw = memoryview(os.urandom(nbytes))
    chunk = encode_chunk(raw, digest(raw, "xxh3-128"), parse_codec("zstd"), "xxh3-128")
    assert chunk.pipeline == RAW
    assert chunk.data is raw
    assert chunk.digest == digest(raw, "xxh3-128")


def test_a_saving_under_five_percent_is_left() -> None:
    noise = os.urandom(100_000)
    assert encoded(noise + bytes(4_000), "zstd").pipeline == RAW
    assert encoded(noise + bytes(8_000), "zstd").pipeline == (("zstd",),)


def test_noise_in_the_middle_decides_by_a_sample() -> None:
    noise = os.urandom(256 << 10)
    assert encoded(bytes(100_000) + noise + bytes(100_000), "zstd").pipeline == RAW


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_damaged_stored_bytes_are_refused_before_a_decoder_runs(codec: str) -> None:
    chunk = encoded(ZEROS, codec)
    damaged = bytearray(chunk.data)
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(CorruptError, match="data/x") as caught:
        decoded(StoredChunk(bytes(damaged), chunk.pipeline, chunk.digest), ZEROS)
    assert caught.value.kind == "corrupt-chunk-digest"


def test_an_unknown_codec_on_damaged_bytes_is_damage_first() -> None:
    with pytest.raises(CorruptError):
        decoded(StoredChunk(b"abc", (("of tomorrow",),), bytes(16)), b"abc")
    chunk = StoredChunk(b"abc", (("of tomorrow",),), digest(b"abc", "xxh3-128"))
    with pytest.raises(UnsupportedError):
        decoded(chunk, b"abc")


def test_stored_bytes_that_decode_to_other_raw_bytes_are_refused() -> None:
    chunk = encoded(ZEROS, "zstd")
    other = bytes(len(ZEROS) - 1) + b"\1"
    with pytest.raises(CorruptError) as caught:
        decoded(chunk, other)
    assert caught.value.kind == "corrupt-chunk-digest"


def test_the_error_says_both_digests_and_what_to_do() -> None:
    with pytest.raises(CorruptError) as caught:
        check_chunk(b"abc", bytes(16), "xxh3-128", "data/3f[64:67)")
    text = str(caught.value)
    assert "data/3f[64:67)" in text
    assert bytes(16).hex() in text
    assert digest(b"abc", "xxh3-128").hex() in text
    assert "ckptfmt verify" in text
