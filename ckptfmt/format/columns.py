"""Sections and tables: msgpack maps whose columns are little-endian arrays of fixed width.

A million rows become NumPy arrays without a million objects, and are range-checked with vector
operations before anything is believed. Spec: 07-index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import msgpack
import numpy as np

from ckptfmt.errors import CorruptError, InternalError

if TYPE_CHECKING:
    from numpy.typing import NDArray

U8 = np.dtype("<u1")
U16 = np.dtype("<u2")
U32 = np.dtype("<u4")
U64 = np.dtype("<u8")

Column: TypeAlias = "NDArray[Any]"
Table: TypeAlias = Mapping[str, Any]

CURE = 'restore another step or run "ckptfmt verify"'


def corrupt(
    what: str, reason: str, where: str, expected: object = None, found: object = None
) -> NoReturn:
    """Raise CorruptError with the usual cure."""
    raise CorruptError(what, reason=reason, where=where, expected=expected, found=found, do=CURE)


def _unique_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        corrupt("duplicate key in a map", "msgpack", f"key {ascii(_first_twice(pairs))[:80]}")
    return made


def _first_twice(pairs: list[tuple[Any, Any]]) -> Any:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return None


def parse_map(data: bytes | memoryview, where: str) -> dict[str, Any]:
    """One msgpack map with str keys, nothing after it, no key twice; array headers are bounded."""
    try:
        # A header may claim as many items as there are bytes left, at each of 1,024 levels, and
        # the list for them is allocated at once. Skipping counts without allocating.
        scan = msgpack.Unpacker(max_buffer_size=len(data))
        scan.feed(data)
        scan.skip()
    except NOT_MSGPACK as error:
        corrupt("not a msgpack map", "msgpack", where, found=f"{type(error).__name__}: {error}")
    return check_map(unpack(data, where), where)


NOT_MSGPACK = (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException)
"""What msgpack raises for bytes that it does not understand."""


def unpack(data: bytes | memoryview, where: str) -> Any:
    """One msgpack object whose counts were checked before, nothing after it, no key twice."""
    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=True, object_pairs_hook=_unique_pairs, use_list=True
        )
    except CorruptError:
        raise
    except NOT_MSGPACK as error:
        corrupt("not a msgpack map", "msgpack", where, found=f"{type(error).__name__}: {error}")


def check_map(made: object, where: str) -> dict[str, Any]:
    """What was unpacked, which is a map with str keys."""
    if not isinstance(made, dict) or not all(type(key) is str for key in made):
        corrupt("not a msgpack map", "msgpack", where, "a map with str keys", type(made).__name__)
    return made


def pack_map(table: Table) -> bytes:
    """The reverse of `parse_map`; columns are NumPy arrays or buffers."""
    parts: list[bytes | memoryview] = []
    _pack_into(parts, table, msgpack.Packer(use_bin_type=True))
    return b"".join(parts)


def _pack_into(parts: list[bytes | memoryview], value: Any, packer: msgpack.Packer) -> None:
    """The bytes of a map, its columns as views: they are copied once, when all is joined."""
    if isinstance(value, Mapping):
        parts.append(packer.pack_map_header(len(value)))
        for key, item in value.items():
            parts.append(packer.pack(key))
            _pack_into(parts, item, packer)
    elif isinstance(value, np.ndarray):
        column = np.ascontiguousarray(value)
        parts += (_bin_header(column.nbytes), column.reshape(-1).view(np.uint8).data)
    elif hasattr(value, "packed"):  # PackedNames
        parts.append(value.packed)
    else:
        try:
            parts.append(packer.pack(value))
        except TypeError:
            raise InternalError(
                "not a column", reason="column", found=type(value).__name__, do="please report this"
            ) from None


def _bin_header(nbytes: int) -> bytes:
    for code, width in ((0xC4, 1), (0xC5, 2)):
        if nbytes < 1 << 8 * width:
            return bytes([code]) + nbytes.to_bytes(width, "big")
    return b"\xc6" + nbytes.to_bytes(4, "big")


def get_map(table: Table, key: str, where: str) -> dict[str, Any]:
    """A nested map. CorruptError if it is missing or something else."""
    value = table.get(key)
    if not isinstance(value, dict) or not all(type(k) is str for k in value):
        corrupt("missing or wrong entry", "section-entry", f"{where}.{key}", "a map", _kind(value))
    return value


def get_column(table: Table, key: str, dtype: np.dtype[Any], where: str) -> Column:
    """A column as a read-only array. CorruptError if it is missing or not a whole number of rows."""
    value = table.get(key)
    if not isinstance(value, bytes | memoryview):
        corrupt("missing or wrong column", "section-entry", f"{where}.{key}", "bin", _kind(value))
    if len(value) % dtype.itemsize:
        corrupt(
            "column is not a whole number of rows",
            "column-length",
            f"{where}.{key}",
            f"a multiple of {dtype.itemsize} bytes",
            len(value),
        )
    return np.frombuffer(value, dtype)


def get_digests(table: Table, key: str, nbytes: int, where: str) -> Column:
    """A column of digests as an array of shape (rows, nbytes)."""
    flat = get_column(table, key, U8, where)
    if len(flat) % nbytes:
        corrupt(
            "column is not a whole number of digests",
            "column-length",
            f"{where}.{key}",
            f"a multiple of {nbytes} bytes",
            len(flat),
        )
    return flat.reshape(-1, nbytes)


def get_list(table: Table, key: str, kind: type, where: str) -> list[Any]:
    """An array whose items are all exactly of one type (str or bytes)."""
    value = table.get(key)
    if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
        corrupt(
            "missing or wrong entry",
            "section-entry",
            f"{where}.{key}",
            f"an array of {kind.__name__}",
            _kind(value),
        )
    return value


def get_scalar(table: Table, key: str, kind: type, where: str) -> Any:
    """A single value of exactly one type."""
    value = table.get(key)
    if type(value) is not kind:
        corrupt(
            "missing or wrong entry", "section-entry", f"{where}.{key}", kind.__name__, _kind(value)
        )
    return value


def check_rows(where: str, count: int, **columns: Sequence[Any] | Column) -> None:
    """All columns of a table have `count` rows."""
    for key, column in columns.items():
        if len(column) != count:
            corrupt(
                "columns of unequal length",
                "column-length",
                f"{where}.{key}",
                f"{count} rows",
                f"{len(column)} rows",
            )


def check_all(
    good: Column, what: str, reason: str, where: str, column: Column, *, start: int = 0
) -> None:
    """Every row of a block that begins at row `start` satisfies a condition; else the first that
    does not is named."""
    if not good.all():
        row = int(np.argmin(good))
        corrupt(what, reason, f"{where}[{start + row}]", found=column[row])


def check_unique(names: list[str], where: str) -> None:
    """No name stands twice: kind `corrupt-duplicate-name`.

    Sorting hashes takes a third of the time of making a set, and a string keeps its hash for the
    table of positions that is made later.
    """
    hashes = np.fromiter(map(hash, names), np.int64, len(names))
    hashes.sort()
    if (hashes[1:] != hashes[:-1]).all() or len(set(names)) == len(names):
        return
    twice = _first_twice([(name, None) for name in names])
    corrupt("duplicate name", "duplicate-name", where, found=ascii(twice)[:200])


def starts(counts: Column) -> Column:
    """Offsets (n + 1) of runs with these lengths, as int64."""
    made = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=made[1:])
    return made


def ragged(begins: Column, counts: Column) -> Column:
    """All integers of [begin, begin + count) for each pair, one after another, as int64."""
    counts = counts.astype(np.int64)
    at = starts(counts)
    made: Column = np.arange(int(at[-1])) + np.repeat(begins.astype(np.int64) - at[:-1], counts)
    return made


def first_use_order(rows: Column, count: int) -> bool:
    """True if 0 … count-1 all occur in `rows` and each occurs first after all smaller ones."""
    if len(rows) == 0 or count == 0:
        return len(rows) == count
    if len(rows) == count:  # none occurs twice
        return is_count(rows)
    seen = np.maximum.accumulate(rows)
    # The steps of what never falls are exact in any unsigned type.
    return int(seen[0]) == 0 and int(seen[-1]) == count - 1 and bool((np.diff(seen) <= 1).all())


def is_count(rows: Column) -> bool:
    """True if the rows are 0, 1, 2, … in this order."""
    if len(rows) == 0:
        return True
    # Differences may wrap around; the last row says whether they have.
    ends = int(rows[0]) == 0 and int(rows[-1]) == len(rows) - 1
    return ends and bool((rows[1:] - rows[:-1] == 1).all())


BLOCK_ROWS = 1 << 16


def blocks(count: int) -> Iterator[slice]:
    """All rows in blocks whose intermediate columns stay in the cache: with whole columns an index
    of a million tensors took 61 ms instead of 47, for the first touch of their memory."""
    for begin in range(0, count, BLOCK_ROWS):
        yield slice(begin, min(begin + BLOCK_ROWS, count))


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
