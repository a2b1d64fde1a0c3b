"""Digests against known answers. Spec: 06-digests-and-codecs §6.1."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import xxhash

from ckptfmt.errors import UnsupportedError, UsageError
from ckptfmt.format import DIGEST_NBYTES, digest, digest_function
from ckptfmt.format.digests import ALGORITHM_CODES, algorithm_name


def test_digests_of_nothing_are_those_of_the_specification() -> None:
    assert digest(b"", "xxh3-128").hex() == "99aa06d3014798d86001c324468d497f"
    assert digest(b"", "sha256").hex() == hashlib.sha256().hexdigest()


@pytest.mark.parametrize("nbytes", [1, 3, 16, 17, 128, 129, 240, 241, 4096, 1 << 20])
def test_xxh3_is_canonical_high_half_first_with_seed_0(nbytes: int) -> None:
    data = bytes(i * 7 % 256 for i in range(nbytes))
    assert int.from_bytes(digest(data, "xxh3-128"), "big") == xxhash.xxh3_128_intdigest(data, 0)


@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_any_buffer_has_the_digest_of_its_bytes(algorithm: str) -> None:
    data = bytes(range(64))
    array: Any = np.frombuffer(data, np.uint8)
    expected = digest(data, algorithm)
    assert len(expected) == DIGEST_NBYTES[algorithm]
    for buffer in (bytearray(data), memoryview(data), memoryview(array)):
        assert digest(buffer, algorithm) == expected
    assert digest_function(algorithm)(data) == expected


def test_codes_are_those_of_the_specification() -> None:
    assert {code: name for name, code in ALGORITHM_CODES.items()} == {1: "xxh3-128", 2: "sha256"}
    assert [algorithm_name(code, "x") for code in (1, 2)] == ["xxh3-128", "sha256"]
    for code in (0, 3, 255):
        with pytest.raises(UnsupportedError) as caught:
            algorithm_name(code, "here")
        assert caught.value.kind == "unsupported-digest"


def test_an_unknown_algorithm_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'md5'") as caught:
        digest(b"", "md5")
    assert caught.value.kind == "usage-digest"
