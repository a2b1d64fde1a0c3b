"""LevelDB tables, as TensorFlow writes them: sorted keys and values in checked blocks.

The last 48 bytes lead to an index block, whose values are the handles of data blocks. A block is
entries (lengths as varints, the part of the key that its predecessor does not share, the value),
u32 restart offsets and their count; behind it stand a type byte and a masked CRC-32C.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.crc32c import crc32c, masked
from ckptfmt.foreign.mapping import corrupt as damage
from ckptfmt.foreign.protobuf import pack_varint, parse_varint
from ckptfmt.foreign.snappy import decode_snappy

FOOTER_NBYTES = 48
MAGIC = bytes.fromhex("57fb808b247547db")
KEY_NBYTES_MAX = 1 << 20
BLOCK_NBYTES_MAX = 256 << 20
REASON = "tensorbundle"
_TRAILER_NBYTES = 5
_NO_COMPRESSION, _SNAPPY = 0, 1
_BLOCK_NBYTES = 64 << 10
_RESTART_EVERY = 16
# A writer repeats the whole key at every 16th entry; a table whose keys take much more room than
# its bytes is made to fill memory.
_KEYS_EXPANSION_MAX, _KEYS_NBYTES_MIN = 64, 16 << 20


def is_table(tail: bytes) -> bool:
    """Whether a file with this end is a table."""
    return len(tail) >= FOOTER_NBYTES and tail.endswith(MAGIC)


def parse_table(data: bytes, where: str) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a whole table, in ascending order of the keys.

    Raises:
        CorruptError: Anything in it does not hold; UnsupportedError: an unknown compression.
    """
    if not is_table(data):
        raise corrupt("no table: its last bytes are others", "magic", where, MAGIC.hex())
    footer = data[-FOOTER_NBYTES : -len(MAGIC)]
    position = 0
    handles = []
    for _ in range(4):
        value, position = parse_varint(footer, position, len(footer), f"{where}, footer")
        handles.append(value)
    room = max(_KEYS_NBYTES_MIN, _KEYS_EXPANSION_MAX * len(data))
    limit = len(data) - FOOTER_NBYTES
    last, before = b"", 0
    first = True
    for _, handle in _entries(_block(data, handles[2], handles[3], limit, where), where, room):
        offset, at = parse_varint(handle, 0, len(handle), where)
        nbytes, _ = parse_varint(handle, at, len(handle), where)
        if offset < before:
            raise corrupt("data blocks overlap", "block", f"{where}, byte {offset}")
        before = offset + nbytes + _TRAILER_NBYTES
        block = _block(data, offset, nbytes, limit, where)
        for key, entry in _entries(block, f"{where}, block at {offset}", room):
            if key <= last and not first:
                raise corrupt("keys are out of order", "order", where, found=ascii(key)[:200])
            first = False
            last = key
            room -= len(key)
            yield key, entry


def _block(data: bytes, offset: int, nbytes: int, limit: int, where: str) -> bytes:
    """The raw bytes of a block, its checksum compared."""
    at = f"{where}[{offset}:{offset + nbytes})"
    if offset + nbytes + _TRAILER_NBYTES > limit or nbytes > BLOCK_NBYTES_MAX:
        raise corrupt("a block lies outside of the table", "block", at, f"at most {limit} bytes")
    stop = offset + nbytes
    expected = int.from_bytes(data[stop + 1 : stop + _TRAILER_NBYTES], "little")
    found = masked(crc32c(data[offset : stop + 1]))
    if found != expected:
        raise corrupt(
            "a block's checksum differs", "block-crc", at, f"{expected:08x}", f"{found:08x}"
        )
    kind = data[stop]
    if kind == _NO_COMPRESSION:
        return data[offset:stop]
    if kind == _SNAPPY:
        return decode_snappy(data[offset:stop], BLOCK_NBYTES_MAX, at)
    raise UnsupportedError(
        "an unknown block compression",
        reason=f"{REASON}-compression",
        where=at,
        expected="0 (none) or 1 (snappy)",
        found=kind,
        do="write the checkpoint again without compression",
    )


def _entries(block: bytes, where: str, room: int) -> Iterator[tuple[bytes, bytes]]:
    """Entries of one block. `room`: bytes that all keys together may take."""
    stop = _check_restarts(block, where)
    key, position = b"", 0
    while position < stop:
        begin = position
        # Lengths below 128, which nearly all are, without a call: half of the time otherwise.
        shared, position = block[position], position + 1
        if shared > 127:
            shared, position = parse_varint(block, begin, stop, where)
        at = position
        fresh = block[position] if position < stop else 255
        position += 1
        if fresh > 127:
            fresh, position = parse_varint(block, at, stop, where)
        at = position
        nbytes = block[position] if position < stop else 255
        position += 1
        if nbytes > 127:
            nbytes, position = parse_varint(block, at, stop, where)
        middle = position + fresh
        position = middle + nbytes
        if shared > len(key) or position > stop or shared + fresh > KEY_NBYTES_MAX:
            raise corrupt("an entry's lengths do not fit", "entry", f"{where}, byte {begin}")
        room -= shared + fresh
        if room < 0:
            raise corrupt("the keys are too long together", "limit", f"{where}, byte {begin}")
        key = key[:shared] + block[middle - fresh : middle]
        yield key, block[middle:position]


def _check_restarts(block: bytes, where: str) -> int:
    """Where the entries end."""
    count = int.from_bytes(block[-4:], "little") if len(block) >= 4 else 0
    stop = len(block) - 4 * (count + 1)
    if count == 0 or stop < 0:
        raise corrupt("a block's restarts do not fit", "restarts", where, None, count)
    return stop


def pack_table(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A table of keys and values, which ascend by their keys."""
    table, handles = bytearray(), list[tuple[bytes, bytes]]()
    block = list[tuple[bytes, bytes]]()
    nbytes = 0
    for key, value in items:
        block.append((key, value))
        nbytes += len(key) + len(value)
        if nbytes >= _BLOCK_NBYTES:
            handles.append((key, _put_block(table, _pack_block(block, _RESTART_EVERY))))
            block, nbytes = [], 0
    if block:
        handles.append((block[-1][0], _put_block(table, _pack_block(block, _RESTART_EVERY))))
    meta = _put_block(table, _pack_block([], 1))
    index = _put_block(table, _pack_block(handles, 1))
    footer = (meta + index).ljust(FOOTER_NBYTES - len(MAGIC), b"\0")
    return bytes(table + footer + MAGIC)


def _pack_block(entries: list[tuple[bytes, bytes]], every: int) -> bytes:
    made, restarts, before = bytearray(), [0], b""
    for number, (key, value) in enumerate(entries):
        shared = 0
        if number % every == 0:
            restarts.append(len(made))
        else:
            limit = min(len(key), len(before))
            while shared < limit and key[shared] == before[shared]:
                shared += 1
        made += pack_varint(shared) + pack_varint(len(key) - shared) + pack_varint(len(value))
        made += key[shared:] + value
        before = key
    starts = restarts[1:] or restarts  # an empty block has one, too
    return bytes(made) + b"".join(n.to_bytes(4, "little") for n in (*starts, len(starts)))


def _put_block(table: bytearray, block: bytes) -> bytes:
    """The block's handle."""
    handle = pack_varint(len(table)) + pack_varint(len(block))
    stored = block + bytes([_NO_COMPRESSION])
    table += stored + masked(crc32c(stored)).to_bytes(4, "little")
    return handle


def corrupt(
    what: str, reason: str, where: str, expected: object = None, found: object = None
) -> CorruptError:
    return damage(REASON, what, reason, where, found, expected=expected)
