"""CRC-32C of any buffer: google-crc32c where it is installed, else NumPy, an order slower.

Without the library a buffer is cut into interleaved lanes of 32-bit words. One step of all lanes is
four table look-ups and an exclusive or over whole vectors, because "advance by that many zero bits"
is linear; the lanes are joined at the end the same way. Measured over 64 MiB in one process on a
busy 2-core machine: google-crc32c 11 GB/s, NumPy with 2^14 lanes 0.7 GB/s, a byte at a time in
Python 0.01 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_LANE_BITS = (14, 10, 6)
"""Lanes are powers of two: many for long buffers, few for short ones."""
_MASK_DELTA = 0xA282EAD8
_ALL = 0xFFFFFFFF


def crc32c(data: Any, before: int = 0) -> int:
    """The checksum of a buffer, or of one that goes on after others with the checksum `before`."""
    library = _library()
    array = np.frombuffer(data, np.uint8)
    if library is not None:
        return library(before, array)
    return crc32c_numpy(array, before)


def masked(crc: int) -> int:
    """As LevelDB tables and TensorBundles store it: rotated, and a constant added."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL


@cache
def _library() -> Callable[[int, Any], int] | None:
    try:
        import google_crc32c
    except ImportError:
        return None
    extend: Callable[[int, Any], int] = google_crc32c.extend
    return extend


def crc32c_numpy(data: NDArray[Any], before: int = 0) -> int:
    """The same without the library. `data`: bytes."""
    crc = before ^ _ALL
    for bits in _LANE_BITS:
        nbytes = data.size // (4 << bits) * (4 << bits)
        if nbytes >= 8 << bits:
            crc = _lanes(data[:nbytes], crc, bits)
            data = data[nbytes:]
    table = _byte_table()
    for byte in data.tobytes():
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ _ALL


def _lanes(data: NDArray[Any], crc: int, bits: int) -> int:
    """The register after whole rows of 2^bits words."""
    rows = np.frombuffer(data, "<u4").reshape(-1, 1 << bits)
    state = rows[0].astype(np.uint32)
    state[0] ^= np.uint32(crc)
    made, part = np.empty_like(state), np.empty_like(state)
    for row in rows[1:]:
        _advance(state, bits, made, part)
        np.bitwise_xor(made, row, out=state)
    while bits:
        bits -= 1
        half = 1 << bits
        left, right = np.ascontiguousarray(state[:half]), state[half:]
        made, part = np.empty_like(left), np.empty_like(left)
        _advance(left, bits, made, part)
        state = np.bitwise_xor(made, right)
    _advance(state, 0, made, part)
    return int(made[0])


def _advance(state: NDArray[Any], bits: int, out: NDArray[Any], part: NDArray[Any]) -> None:
    """Every register after 2^bits more words of zeros."""
    tables = _tables(bits)
    columns = state.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4)
    # "clip": the default mode copies `out` to be able to raise.
    np.take(tables[0], columns[:, 0], out=out, mode="clip")
    for column in (1, 2, 3):
        np.take(tables[column], columns[:, column], out=part, mode="clip")
        np.bitwise_xor(out, part, out=out)


@cache
def _byte_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


@cache
def _matrix(bits: int) -> tuple[int, ...]:
    """Columns of the matrix that advances a register by 2^bits words of zeros."""
    if bits:
        half = _matrix(bits - 1)
        return tuple(_times(half, column) for column in half)
    columns = []
    table = _byte_table()
    for bit in range(32):
        value = 1 << bit
        for _ in range(4):
            value = table[value & 0xFF] ^ (value >> 8)
        columns.append(value)
    return tuple(columns)


def _times(matrix: tuple[int, ...], value: int) -> int:
    made = 0
    for bit, column in enumerate(matrix):
        if value >> bit & 1:
            made ^= column
    return made


@cache
def _tables(bits: int) -> NDArray[Any]:
    """`_matrix` as four tables, one for each byte of the register."""
    columns = _matrix(bits)
    tables = np.zeros((4, 256), np.uint32)
    for byte in range(4):
        for bit in range(8):
            known = tables[byte, : 1 << bit]
            tables[byte, 1 << bit : 2 << bit] = known ^ np.uint32(columns[8 * byte + bit])
    return tables
