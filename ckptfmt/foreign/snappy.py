"""Snappy's raw format, decoded: blocks of tables may be compressed so. Checked byte for byte.

A block holds at most some hundred kilobytes, so a loop in Python is enough and no library is needed.
"""

from __future__ import annotations

from ckptfmt.errors import CorruptError
from ckptfmt.foreign.protobuf import parse_varint

_EXPANSION_MAX = 22
"""The densest element makes 64 bytes of 3."""


def decode_snappy(data: bytes, nbytes_max: int, where: str) -> bytes:
    """The raw bytes of one compressed block.

    Raises:
        CorruptError: It is malformed, or says that it holds more than `nbytes_max` bytes.
    """
    nbytes, position = parse_varint(data, 0, len(data), where)
    if nbytes > min(nbytes_max, len(data) * _EXPANSION_MAX):
        raise _corrupt("a compressed block says that it is too long", where, nbytes)
    made = bytearray()
    while position < len(data):
        tag = data[position]
        position += 1
        length, extra = tag >> 2, 0
        if tag & 3 == 0:
            if length >= 60:
                extra = length - 59
                length = int.from_bytes(data[position : position + extra], "little")
            length += 1
            position += extra
            if position + length > len(data):
                raise _corrupt("a literal ends behind its block", where, length)
            made += data[position : position + length]
            position += length
        else:
            position = _copy(data, position, tag, made, where)
        if len(made) > nbytes:
            raise _corrupt("a compressed block is longer than it says", where, len(made))
    if len(made) != nbytes:
        raise _corrupt("a compressed block is shorter than it says", where, len(made))
    return bytes(made)


def _copy(data: bytes, position: int, tag: int, made: bytearray, where: str) -> int:
    """Carry out one copy element; the position behind it."""
    kind = tag & 3
    width = (1, 2, 4)[kind - 1]
    if position + width > len(data):
        raise _corrupt("a copy is cut off", where, width)
    offset = int.from_bytes(data[position : position + width], "little")
    if kind == 1:
        length = (tag >> 2 & 7) + 4
        offset |= (tag >> 5) << 8
    else:
        length = (tag >> 2) + 1
    if not 0 < offset <= len(made):
        raise _corrupt("a copy begins before its block", where, offset)
    begin = len(made) - offset
    piece = bytes(made[begin : begin + length])
    # A copy may read what it has just written: then the piece repeats itself.
    made += (piece * (length // len(piece) + 1))[:length]
    return position + width


def _corrupt(what: str, where: str, found: object) -> CorruptError:
    return CorruptError(what, reason="snappy", where=where, found=found, do="get the file again")
