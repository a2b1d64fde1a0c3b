"""The index of a TensorBundle: its header, and where each tensor's bytes are. All of it checked.

The empty key holds the header. A tensor in pieces has an entry that lists its slices, and one for
each slice under an encoded key. Zero fields are left out by writers.
"""

from __future__ import annotations

import numpy as np

from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.bundle.columns import Columns, parse_columns
from ckptfmt.foreign.bundle.entries import parse_entry
from ckptfmt.foreign.bundle.types import TYPES, Entry
from ckptfmt.foreign.protobuf import bytes_field, int_field, parse_fields
from ckptfmt.foreign.sstable import REASON, corrupt, parse_table

SHARDS_MAX = 100_000


class BundleIndex:
    """Everything an index says: where every tensor is, as columns, a row for each.

    Attributes:
        shards: How many data files there are.
        big_endian: How values are written.
        names: Of the tensors, in the order of the file.
        columns: Where they are.
        sliced: Row -> entry of tensors that are in slices.
        slices: The slices' entries, by the encoded key.
    """

    def __init__(
        self,
        header: tuple[int, bool],
        names: list[str],
        columns: Columns,
        sliced: dict[int, Entry],
        slices: dict[bytes, Entry],
    ) -> None:
        self.shards, self.big_endian = header
        self.names, self.columns, self.sliced, self.slices = names, columns, sliced, slices

    def entry(self, row: int) -> Entry:
        """The entry of a tensor."""
        return self.sliced.get(row) or self.columns.entry(row)


def parse_index(data: bytes, where: str) -> BundleIndex:
    """Parse and check a whole index.

    Raises:
        CorruptError: It does not hold; UnsupportedError: a name, dtype or version that is not known.
    """
    keys: list[bytes] = []
    values: list[bytes] = []
    slices: dict[bytes, Entry] = {}
    header: tuple[int, bool] | None = None
    for key, value in parse_table(data, where):
        if not key:
            header = _parse_header(value, f"{where}, header")
        elif header is None:
            break
        elif key[0] == 0:
            slices[key] = _named_entry(key, value, header[0], where)
        else:
            keys.append(key)
            values.append(value)
    if header is None:
        raise corrupt("the table has no header of a bundle", "header", where)
    columns, odd = parse_columns(values)
    sliced: dict[int, Entry] = {}
    for row in odd:
        # Fields in another order, slices, or something that is not legal: one by one.
        entry = _named_entry(keys[row], values[row], header[0], where)
        columns.put(row, entry)
        if entry.slices:
            sliced[row] = entry
    known = np.zeros(256, bool)
    known[list(TYPES)] = True
    wrong = ~known[np.minimum(columns.types, 255)] | (columns.shards >= header[0])
    for row in np.flatnonzero(wrong).tolist():
        _named_entry(keys[row], values[row], header[0], where)
    return BundleIndex(header, _texts(keys, where), columns, sliced, slices)


def _texts(keys: list[bytes], where: str) -> list[str]:
    try:
        return [key.decode() for key in keys]
    except UnicodeDecodeError as error:
        raise UnsupportedError(
            "a name is not UTF-8",
            reason=f"{REASON}-name",
            where=f"{where}, entry {ascii(error.object)[1:200]}",
            do="rename the variable",
        ) from None


def _named_entry(key: bytes, value: bytes, shards: int, where: str) -> Entry:
    """An entry; errors have its name."""
    where = f"{where}, entry {ascii(key)[1:200]}"
    entry = parse_entry(value, where)
    if entry.shard >= shards:
        raise corrupt("no such shard", "shard", where, f"below {shards}", entry.shard)
    return entry


def parse_header(data: bytes, where: str) -> int:
    """The number of shards alone."""
    for key, value in parse_table(data, where):
        if not key:
            return _parse_header(value, where)[0]
        break
    raise corrupt("the table has no header of a bundle", "header", where)


def _parse_header(value: bytes, where: str) -> tuple[int, bool]:
    shards, endianness, minimum = 0, 0, 0
    for number, kind, found in parse_fields(value, where):
        if number == 1:
            shards = int_field(found, kind, "num_shards", where)
        elif number == 2:
            endianness = int_field(found, kind, "endianness", where)
        elif number == 3:
            version = bytes_field(found, kind, "version", where)
            for inner, wire, part in parse_fields(version, where):
                if inner == 2:
                    minimum = int_field(part, wire, "min_consumer", where)
    if not 0 < shards <= SHARDS_MAX:
        raise corrupt("the number of shards is not legal", "shards", where, None, shards)
    if endianness not in (0, 1):
        raise corrupt("the byte order is not legal", "endianness", where, "0 or 1", endianness)
    if minimum > 1:
        raise UnsupportedError(
            "a newer version of the format",
            reason=f"{REASON}-version",
            where=where,
            expected="min_consumer at most 1",
            found=minimum,
            do="upgrade ckptfmt",
        )
    return shards, bool(endianness)
