"""One entry of an index, a protocol buffer message: all of it checked. Zero fields are left out."""

from __future__ import annotations

import math

from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.bundle.types import STRING, TYPES, Entry, Slice
from ckptfmt.foreign.protobuf import bytes_field, int_field, parse_fields, signed
from ckptfmt.foreign.sstable import REASON, corrupt

NDIM_MAX = 64
INT63_MAX = (1 << 63) - 1
_FULL = -1
"""The length of a slice's extent along an axis that it takes whole."""


def parse_entry(value: bytes, where: str) -> Entry:
    found = {1: 0, 3: 0, 4: 0, 5: 0, 6: 0}
    shape: tuple[int, ...] = ()
    slices: list[Slice] = []
    for number, kind, part in parse_fields(value, where):
        if number in found:
            found[number] = int_field(part, kind, f"field {number}", where)
        elif number == 2:
            shape = parse_shape(bytes_field(part, kind, "shape", where), where)
        elif number == 7:
            slices.append(_parse_slice(bytes_field(part, kind, "slice", where), where))
        else:
            raise corrupt("an unknown field", "entry", where, None, f"field {number}")
    if found[4] + found[5] > INT63_MAX or found[3] > INT63_MAX:
        raise corrupt("the range overflows", "entry", where)
    if found[1] not in TYPES:
        raise UnsupportedError(
            "unknown dtype",
            reason=f"{REASON}-dtype",
            where=where,
            expected=f"one of {', '.join(row.name for row in TYPES.values())}",
            found=f"number {found[1]}",
            do="upgrade ckptfmt",
        )
    return Entry(found[1], shape, found[3], found[4], found[5], found[6], tuple(slices))


def parse_shape(value: bytes, where: str) -> tuple[int, ...]:
    dims: list[int] = []
    for number, kind, found in parse_fields(value, where):
        if number == 2:
            size = 0
            dim = bytes_field(found, kind, "dim", where)
            for inner, wire, part in parse_fields(dim, where):
                if inner == 1:
                    size = signed(int_field(part, wire, "size", where))
            if size < 0:
                raise corrupt("a negative dimension", "shape", where, "0 or more", size)
            dims.append(size)
        elif number == 3 and found:
            raise corrupt("the shape has no rank", "shape", where)
    if len(dims) > NDIM_MAX:
        raise UnsupportedError(
            "too many dimensions",
            reason=f"{REASON}-ndim",
            where=where,
            expected=f"at most {NDIM_MAX}",
            found=len(dims),
        )
    return tuple(dims)


def _parse_slice(value: bytes, where: str) -> Slice:
    starts: list[int] = []
    lengths: list[int] = []
    for number, kind, found in parse_fields(value, where):
        if number != 1:
            continue
        start, length = 0, _FULL
        extent = bytes_field(found, kind, "extent", where)
        for inner, wire, part in parse_fields(extent, where):
            if inner == 1:
                start = signed(int_field(part, wire, "start", where))
            elif inner == 2:
                length = signed(int_field(part, wire, "length", where))
                if length < 0:
                    raise corrupt("a slice of negative length", "slice", where, None, length)
        if start < 0 or (length == _FULL and start):
            raise corrupt("a slice's start is not legal", "slice", where, None, start)
        starts.append(start)
        lengths.append(length)
    return Slice(tuple(starts), tuple(lengths))


def check_size(entry: Entry, where: str) -> None:
    """Refuse bytes that do not fit dtype and shape."""
    # The product of the non-zero dims: NumPy refuses [0, 2^62, 2^62] although it is empty.
    most = math.prod(n for n in entry.shape if n)
    count = 0 if 0 in entry.shape else most
    each = TYPES[entry.type].nbytes
    if most * max(each, 8) > INT63_MAX:
        raise corrupt("the product of the shape overflows", "shape", where, None, entry.shape)
    if entry.type == STRING:
        if entry.nbytes < count:
            raise corrupt("fewer bytes than strings", "size", where, count, entry.nbytes)
    elif entry.nbytes != count * each:
        raise corrupt(
            "bytes do not match shape and dtype",
            "size",
            where,
            f"{count * each} for {list(entry.shape)} of {TYPES[entry.type].name}",
            entry.nbytes,
        )
