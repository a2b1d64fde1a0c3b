"""CRC-32C: the published values, and both implementations alike at every length."""

from __future__ import annotations

import numpy as np
import pytest

from ckptfmt.foreign.crc32c import crc32c, crc32c_numpy, masked


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_published_values(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc
    assert crc32c_numpy(np.frombuffer(data, np.uint8)) == crc


def test_the_mask_is_that_of_tables() -> None:
    assert masked(0) == 0xA282EAD8
    assert masked(0xE3069283) == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) % (1 << 32)


def test_lanes_give_what_bytes_give_at_every_length(seed: int) -> None:
    """Around all the lengths at which the number of lanes changes; a byte at a time is the truth."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, 150_001, np.uint8)
    slow = {0: 0}
    crc = 0
    for position in range(0, 150_000, 300):
        # Pieces that are too short for lanes.
        for begin in (position, position + 150):
            crc = crc32c_numpy(data[begin : begin + 150], crc)
        slow[position + 300] = crc
    for length in [0, 300, 600, 4200, 8400, 65_700, 131_100, 131_400, 150_000]:
        assert crc32c_numpy(data[:length]) == slow[length], length
    for length in (511, 512, 513, 8191, 8192, 131_071, 131_072, 131_073):
        whole, cut = data[:length], length // 3
        assert crc32c_numpy(whole[cut:], crc32c_numpy(whole[:cut])) == crc32c_numpy(whole)


def test_the_library_agrees(seed: int) -> None:
    library = pytest.importorskip("google_crc32c")
    data = np.random.default_rng(seed).bytes(200_001)
    for length in (0, 1, 100, 5000, 200_001):
        assert library.value(data[:length]) == crc32c_numpy(np.frombuffer(data, np.uint8, length))
