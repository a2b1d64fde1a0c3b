"""The header of a `.safetensors` file, checked before anything in it is believed.

Eight bytes of length, a JSON object, then the values of all tensors without gaps. Each entry is
`"name": {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}`; `__metadata__` maps text to
text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.mapping import corrupt as damage
from ckptfmt.foreign.strict_json import JsonCursor

if TYPE_CHECKING:
    import mmap

LENGTH_NBYTES = 8
HEADER_NBYTES_MAX = 100_000_000
"""The limit of the format's own library."""
ENTRY_NBYTES_MAX = 4096
NAME_NBYTES_MAX = 64 << 10
METADATA_NBYTES_MAX = 16 << 20
METADATA_KEYS_MAX = 1 << 17
NDIM_MAX = 64
INT63_MAX = (1 << 63) - 1
REASON = "safetensors"

DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F4": ("float4_e2m1fn", 4),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
}
"""Name in the file -> (name in our format, bits)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: `start` and `stop` are bytes of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """All entries, in the header's order, and the file's metadata."""

    entries: list[Entry]
    metadata: dict[str, str]


def header_length(prefix: bytes, file_nbytes: int, where: str) -> int:
    """The length of the JSON, checked against the limit and the file."""
    if len(prefix) < LENGTH_NBYTES:
        raise _corrupt(
            "the file is too short", "length", where, f"at least {LENGTH_NBYTES} bytes", file_nbytes
        )
    length = int.from_bytes(prefix, "little")
    if length > HEADER_NBYTES_MAX:
        raise _corrupt(
            "the header is too long", "length", where, f"at most {HEADER_NBYTES_MAX}", length
        )
    if length > file_nbytes - LENGTH_NBYTES:
        raise _corrupt(
            "the header ends behind the file",
            "length",
            where,
            f"at most {file_nbytes - LENGTH_NBYTES}",
            length,
        )
    if length < 2:
        raise _corrupt("the header is too short", "length", where, "at least 2", length)
    return length


def parse_header(data: bytes | mmap.mmap, file_nbytes: int, where: str) -> FileHeader:
    """Check and take the header of a file that is at hand in full, or up to its header's end.

    Raises:
        CorruptError: Any length, name, range or size does not hold; the message says which.
        UnsupportedError: A dtype that is not known, or more than 64 dimensions.
    """
    length = header_length(bytes(data[:LENGTH_NBYTES]), file_nbytes, where)
    begin = LENGTH_NBYTES + length
    cursor = JsonCursor(data, LENGTH_NBYTES, begin, where=where, reason=REASON)
    entries: list[Entry] = []
    metadata: dict[str, str] = {}
    for name in cursor.keys(NAME_NBYTES_MAX, "name"):
        if name == "__metadata__":
            metadata = _metadata(cursor)
        else:
            entry = cursor.flat_object(ENTRY_NBYTES_MAX, f"the entry of {ascii(name)[:200]}")
            entries.append(_entry(name, entry, begin, where))
    cursor.end()
    _check_ranges(entries, begin, file_nbytes, where)
    return FileHeader(entries, metadata)


def _metadata(cursor: JsonCursor) -> dict[str, str]:
    made: dict[str, str] = {}
    first = cursor.position
    for key in cursor.keys(NAME_NBYTES_MAX, "key in __metadata__"):
        made[key] = cursor.string(METADATA_NBYTES_MAX, "a value in __metadata__")
        if len(made) > METADATA_KEYS_MAX:
            cursor.fail(
                "__metadata__ has too many keys", "limit", expected=f"at most {METADATA_KEYS_MAX}"
            )
        if cursor.position - first > METADATA_NBYTES_MAX:
            cursor.fail(
                "__metadata__ is too long", "limit", expected=f"at most {METADATA_NBYTES_MAX} bytes"
            )
    return made


def _entry(name: str, entry: dict[str, Any], begin: int, where: str) -> Entry:
    at = f"{where}, tensor {ascii(name)[:200]}"
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(
            "wrong fields", "entry", at, "dtype, shape, data_offsets", ascii(sorted(entry))[:200]
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedError(
            "unknown dtype",
            reason=f"{REASON}-dtype",
            where=at,
            expected=f"one of {', '.join(DTYPES)}",
            found=ascii(dtype)[:80],
        )
    if not _are_counts(shape):
        raise _corrupt("the shape is no list of counts", "shape", at, None, ascii(shape)[:200])
    if len(shape) > NDIM_MAX:
        raise UnsupportedError(
            "too many dimensions",
            reason=f"{REASON}-ndim",
            where=at,
            expected=f"at most {NDIM_MAX}",
            found=len(shape),
        )
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(n) is int for n in offsets)
    ):
        raise _corrupt(
            "data_offsets are no pair of ints", "offsets", at, None, ascii(offsets)[:200]
        )
    start, stop = offsets
    if start < 0 or stop < 0:
        raise _corrupt("negative offset", "offsets", at, "0 or more", f"[{start}, {stop}]")
    if start > stop:
        raise _corrupt("reversed offsets", "offsets", at, "begin <= end", f"[{start}, {stop}]")
    _check_size(dtype, shape, stop - start, at)
    return Entry(name, dtype, tuple(shape), begin + start, begin + stop)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_size(dtype: str, shape: Sequence[int], nbytes: int, at: str) -> None:
    # The product of the non-zero dims: NumPy refuses [0, 2^62, 2^62] although it is empty.
    bits = DTYPES[dtype][1] * math.prod(n for n in shape if n)
    if bits > INT63_MAX:
        raise _corrupt(
            "the product of the shape overflows", "shape-overflow", at, "below 2^63 bits",
            f"{list(shape)} of {dtype}",
        )  # fmt: skip
    bits = 0 if 0 in shape else bits
    if bits % 8 or bits // 8 != nbytes:
        need: object = bits // 8 if bits % 8 == 0 else f"{bits} bits, no whole bytes"
        raise _corrupt(
            "bytes do not match shape and dtype",
            "size",
            at,
            f"{need} for {list(shape)} of {dtype}",
            nbytes,
        )


def _check_ranges(entries: list[Entry], begin: int, file_nbytes: int, where: str) -> None:
    """The tensors cover the bytes behind the header exactly once."""
    position, before = begin, ""
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        at = f"{where}, tensor {ascii(entry.name)[:200]}"
        if entry.start < position:
            raise _corrupt(
                f"overlaps tensor {ascii(before)[:200]}",
                "overlap",
                at,
                f"bytes from {position}",
                f"from {entry.start}",
            )
        if entry.start > position:
            raise _corrupt(
                "gap before the tensor", "gap", at, f"bytes from {position}", f"from {entry.start}"
            )
        position, before = entry.stop, entry.name
        if position > file_nbytes:
            raise _corrupt(
                "the tensor ends behind the file (truncated?)",
                "truncated",
                at,
                f"a file of at least {position} bytes",
                file_nbytes,
            )
    if position != file_nbytes:
        raise _corrupt(
            "bytes behind the last tensor",
            "trailing",
            where,
            f"a file of {position} bytes",
            file_nbytes,
        )


def _corrupt(
    what: str, reason: str, where: str, expected: object = None, found: object = None
) -> CorruptError:
    return damage(REASON, what, reason, where, found, expected=expected)
