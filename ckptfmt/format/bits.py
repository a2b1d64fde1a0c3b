"""Elements of 1 to 7 bits, without gaps in a little-endian bit string.


NumPy and ml_dtypes keep one byte an element in memory; element i is bits [i*b, (i+1)*b) on disk.
Spec: 04-dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckptfmt.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PACK_BLOCK = 1 << 20
"""Elements at a time where every bit takes a byte on the way: a multiple of 8."""


def pack_bits(raw: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """One byte an element -> `bits` an element. Bits above are dropped: some makers extend signs."""
    packed = np.zeros((raw.size * bits + 7) // 8, np.uint8)
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        per_byte = 8 // bits
        for place in range(per_byte):
            part = raw[place::per_byte] & mask
            packed[: part.size] |= part << (place * bits)
        return packed
    for start in range(0, raw.size, _PACK_BLOCK):
        block = raw[start : start + _PACK_BLOCK, None]
        made = np.packbits(
            np.unpackbits(block, axis=1, count=bits, bitorder="little"), bitorder="little"
        )
        packed[start * bits // 8 : start * bits // 8 + made.size] = made
    return packed


def parse_bits(raw: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """`bits` an element -> one byte an element, the bits above zero.

    Raises:
        CorruptError: A spare bit of the last byte is set.
    """
    spare = raw.size * 8 - count * bits
    if spare and int(raw[-1]) >> (8 - spare):
        raise CorruptError(
            "spare bits of a packed region are not zero", reason="padding", found=hex(int(raw[-1]))
        )
    made = np.empty(count, np.uint8)
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        per_byte = 8 // bits
        for place in range(per_byte):
            into = made[place::per_byte]
            into[...] = (raw[: into.size] >> (place * bits)) & mask
        return made
    for start in range(0, count, _PACK_BLOCK):
        stop = min(start + _PACK_BLOCK, count)
        block = raw[start * bits // 8 : (stop * bits + 7) // 8]
        flat = np.unpackbits(block, count=(stop - start) * bits, bitorder="little")
        made[start:stop] = np.packbits(flat.reshape(-1, bits), axis=1, bitorder="little").reshape(
            -1
        )
    return made
