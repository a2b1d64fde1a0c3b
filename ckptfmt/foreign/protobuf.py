"""Protocol buffer messages from strangers: fields one after another, every length checked.

Only the wire format is known here; what a field means is the caller's. Groups, which no message
that is read has, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfmt.errors import CorruptError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_VARINT_NBYTES_MAX = 10
_SIGN = 1 << 63


def parse_varint(data: bytes, position: int, stop: int, where: str) -> tuple[int, int]:
    """(value below 2^64, position behind it) of a varint that ends before `stop`."""
    value = shift = 0
    for byte in data[position : min(stop, position + _VARINT_NBYTES_MAX)]:
        position += 1
        if byte < 0x80:
            value |= byte << shift
            if value >> 64:
                break
            return value, position
        value |= (byte & 0x7F) << shift
        shift += 7
    raise CorruptError(
        "a varint is too long or cut off",
        reason="protobuf-varint",
        where=f"{where}, byte {position}",
        expected="at most 64 bits",
        do="get the file again",
    )


def signed(value: int) -> int:
    """A varint of an int32 or int64 field: negative ones are 64-bit two's complement."""
    return value - (1 << 64) if value & _SIGN else value


def parse_fields(data: bytes, where: str) -> Iterator[tuple[int, int, int | bytes]]:
    """(field number, wire type, value) in order: an int below 2^64, or bytes."""
    position, stop = 0, len(data)
    while position < stop:
        begin = position
        tag, position = parse_varint(data, position, stop, where)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise _malformed("field number 0", where, begin)
        value: int | bytes
        if kind == VARINT:
            value, position = parse_varint(data, position, stop, where)
        elif kind == BYTES:
            nbytes, position = parse_varint(data, position, stop, where)
            if nbytes > stop - position:
                raise _malformed("a field ends behind its message", where, begin)
            value = data[position : position + nbytes]
            position += nbytes
        elif kind in (FIXED32, FIXED64):
            nbytes = 4 if kind == FIXED32 else 8
            if nbytes > stop - position:
                raise _malformed("a field ends behind its message", where, begin)
            value = int.from_bytes(data[position : position + nbytes], "little")
            position += nbytes
        else:
            raise _malformed(f"wire type {kind}", where, begin)
        yield number, kind, value


def _malformed(what: str, where: str, position: int) -> CorruptError:
    return CorruptError(
        what,
        reason="protobuf-field",
        where=f"{where}, byte {position}",
        do="get the file again",
    )


def int_field(value: int | bytes, kind: int, what: str, where: str) -> int:
    """The value of a field that must be a number."""
    if isinstance(value, bytes):
        raise _wrong_kind(what, where, kind)
    return value


def bytes_field(value: int | bytes, kind: int, what: str, where: str) -> bytes:
    """The value of a field that must be bytes, text or a message."""
    if isinstance(value, int):
        raise _wrong_kind(what, where, kind)
    return value


def _wrong_kind(what: str, where: str, kind: int) -> CorruptError:
    return CorruptError(
        f"{what} has another type",
        reason="protobuf-type",
        where=where,
        found=f"wire type {kind}",
        do="get the file again",
    )


def pack_varint(value: int) -> bytes:
    """A varint of a value in [0, 2^64)."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def pack_field(number: int, value: int | bytes) -> bytes:
    """A field: a varint, or bytes with their length."""
    if isinstance(value, int):
        return pack_varint(number << 3 | VARINT) + pack_varint(value)
    return pack_varint(number << 3 | BYTES) + pack_varint(len(value)) + value
