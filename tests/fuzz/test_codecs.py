"""Any stored bytes decode to exactly the bytes stated, or are refused, in bounded memory.

Spec: 06-digests-and-codecs (M06-9), codecs/zstd.
"""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import FormatError
from ckptfmt.format import Pipeline, decode, decode_chunk, digest

ZSTD: Pipeline = (("zstd",),)
RANDOM = st.integers(0, 2**32 - 1).map(random.Random)


def frame(rng: random.Random, raw: bytes) -> bytes:
    parameters: Any = zstandard.ZstdCompressionParameters(
        compression_level=rng.choice([-5, 1, 3, 19]),
        window_log=rng.choice([10, 17, 27]),
        write_content_size=rng.random() < 0.9,
        write_checksum=rng.random() < 0.3,
    )
    made: bytes = zstandard.ZstdCompressor(compression_params=parameters).compress(raw)
    return made


def check(stored: bytes, nbytes: int) -> bytes | str:
    try:
        made = bytes(decode(stored, ZSTD, nbytes, "chunk"))
    except FormatError as error:
        return error.kind
    assert len(made) == nbytes
    return made


@settings(max_examples=300)
@given(RANDOM)
def test_a_mutated_frame_is_refused_or_has_the_size_stated(
    mutator: Any, rng: random.Random
) -> None:
    check_mutated(mutator, rng)


def check_mutated(mutator: Any, rng: random.Random) -> None:
    raw = bytes(rng.choice([0, 1, 200]) for _ in range(rng.choice([1, 10, 300, 5000])))
    stored = frame(rng, raw)
    for _ in range(rng.randrange(4)):
        stored = mutator(rng).damage(stored)
    nbytes = rng.choice([len(raw)] * 4 + [0, 1, len(raw) + 1, len(raw) - 1, 2**30])
    found = check(stored, nbytes)
    if isinstance(found, str):
        assert found in ("corrupt-zstd-frame", "corrupt-zstd-size")


@settings(max_examples=200)
@given(st.binary(max_size=100), st.integers(0, 2**30))
def test_any_bytes(data: bytes, nbytes: int) -> None:
    for stored in (data, b"\x28\xb5\x2f\xfd" + data):
        check(stored, nbytes)


PARAMETERS: Any = st.text(max_size=4) | st.integers() | st.just("zstd")


@given(st.lists(st.lists(PARAMETERS, min_size=1, max_size=2), max_size=4), st.binary(max_size=40))
def test_any_pipeline(stages: list[list[Any]], stored: bytes) -> None:
    pipeline = tuple(tuple(stage) for stage in stages)
    try:
        made = decode_chunk(
            stored, pipeline, len(stored), (digest(stored, "xxh3-128"), bytes(16)),
            algorithm="xxh3-128", where="chunk",
        )  # fmt: skip
    except FormatError as error:
        known = all(stage == ("zstd",) for stage in pipeline)
        wanted = "corrupt-" if known else "unsupported-codec"
        assert error.kind.startswith(wanted)  # noqa: PT017
    else:
        assert made == stored


@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 20, 1 << 28])
def test_a_bomb_takes_no_more_than_what_it_states(nbytes: int) -> None:
    stored = zstandard.ZstdCompressor(level=19).compress(bytes(nbytes))
    tracemalloc.start()
    try:
        assert check(stored, nbytes - 1) == "corrupt-zstd-size"
        assert check(stored, 1 << 30) == "corrupt-zstd-size"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_twenty_thousand_mutations(mutator: Any, seed: int) -> None:
    for number in range(20_000):
        check_mutated(mutator, random.Random(seed + number))
