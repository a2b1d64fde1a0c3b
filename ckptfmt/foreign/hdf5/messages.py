"""Messages of an object header: what a dataset's elements are, how many, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckptfmt.foreign.hdf5.cursor import Cursor, corrupt, unsupported

_FLOATS: dict[tuple[int, ...], str] = {
    (2, 10, 5, 0, 10, 15): "float16",
    (4, 23, 8, 0, 23, 127): "float32",
    (8, 52, 11, 0, 52, 1023): "float64",
    (2, 7, 8, 0, 7, 127): "bfloat16",
}
_COMPLEX = {"float32": "complex64", "float64": "complex128"}
_INTEGER, _FLOAT, _STRING, _OPAQUE, _COMPOUND, _ENUM, _VLEN = 0, 1, 3, 5, 6, 8, 9
VARIABLE = "bytes"
"""The name of strings of any length."""
_MEMBERS_MAX = 4096
_NDIM_MAX = 32
_DEPTH_MAX = 4
_NUMEL_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class Datatype:
    """What an element is. `name`: of our dtype; "" for none, and then `what` it is."""

    name: str
    nbytes: int
    is_big: bool = False
    what: str = ""


def parse_datatype(c: Cursor, depth: int = 0) -> Datatype:
    head = c.number(1)
    kind, version = head & 15, head >> 4
    bits, size = c.number(3), c.number(4)
    is_big = bool(bits & 1)
    if depth > _DEPTH_MAX or not 1 <= version <= 4 or not size:
        raise corrupt("a datatype of no known form", "datatype", c.where, (kind, version, size))
    if kind == _INTEGER:
        offset, precision = c.number(2), c.number(2)
        if offset or precision != 8 * size or size not in (1, 2, 4, 8):
            return Datatype("", size, what=f"integers of {precision} bits in {size} bytes")
        return Datatype(f"{'int' if bits & 8 else 'uint'}{8 * size}", size, is_big)
    if kind == _FLOAT:
        offset, _ = c.number(2), c.number(2)
        found = _FLOATS.get((size, *(c.number(1) for _ in range(4)), c.number(4)))
        if found is None or offset or bits & 0x40:
            return Datatype("", size, what="floats of a form of their own")
        return Datatype(found, size, is_big)
    if kind == _STRING:
        return Datatype(f"bytes{8 * size}", size)
    if kind == _OPAQUE:
        c.take(-(-(bits & 0xFF) // 8) * 8)
        return Datatype(f"void{8 * size}", size)
    if kind == _COMPOUND:
        return _parse_compound(c, version, bits & 0xFFFF, size, depth)
    if kind == _ENUM:
        return _parse_enum(c, version, bits & 0xFFFF, size, depth)
    if kind == _VLEN:
        inner = parse_datatype(c, depth + 1)
        is_text = bits & 15 == 1
        return Datatype(VARIABLE if is_text else "", size, what=f"sequences of {inner.name}")
    names = {2: "times", 4: "bit fields", 7: "references", 10: "arrays as elements"}
    return Datatype("", size, what=names.get(kind, "a datatype that nobody has numbered"))


def _parse_compound(c: Cursor, version: int, count: int, size: int, depth: int) -> Datatype:
    """Complex numbers; other structures are carried by nobody."""
    if count > _MEMBERS_MAX:
        raise corrupt("too many members", "datatype", c.where, count)
    members = []
    for _ in range(count):
        name = c.text(1 if version >= 3 else 8)
        width = 4 if version < 3 else (size.bit_length() + 7) // 8
        offset = c.number(width)
        if version == 1:
            c.take(28)
        inner = parse_datatype(c, depth + 1)
        if not inner.name and inner.what.startswith(("arrays", "times", "bit", "ref")):
            return Datatype("", size, what="a structure")  # whose end is not known
        members.append((name, offset, inner))
    if [name for name, _, _ in members] == ["r", "i"]:
        (_, first, real), (_, second, other) = members
        name = _COMPLEX.get(real.name, "")
        if name and real == other and (first, second, size) == (0, real.nbytes, 2 * real.nbytes):
            return Datatype(name, size, real.is_big)
    return Datatype("", size, what="a structure")


def _parse_enum(c: Cursor, version: int, count: int, size: int, depth: int) -> Datatype:
    """h5py's bools, and integers that have names."""
    base = parse_datatype(c, depth + 1)
    if count > _MEMBERS_MAX or base.nbytes != size:
        raise corrupt("an enumeration of no known form", "datatype", c.where, count)
    names = [c.text(1 if version >= 3 else 8) for _ in range(count)]
    values = [c.take(size) for _ in range(count)]
    if names == ["FALSE", "TRUE"] and values == [b"\0", b"\1"]:
        return Datatype("bool", 1)
    return base


def parse_dataspace(c: Cursor) -> tuple[int, ...] | None:
    """The shape; None for no value at all."""
    version, ndim, flags = c.number(1), c.number(1), c.number(1)
    kind = c.number(1)
    if version == 1:
        c.take(4)
    elif version != 2:
        raise corrupt("an unknown dataspace", "dataspace", c.where, version)
    elif kind == 2:
        return None
    if ndim > _NDIM_MAX or flags & 2:
        raise corrupt("too many dimensions", "dataspace", c.where, ndim)
    shape = tuple(c.length() for _ in range(ndim))
    if math.prod(n for n in shape if n) >= _NUMEL_MAX:
        raise corrupt("a dataset without end", "dataspace", c.where, shape[:8])
    return shape


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the values are: `data` itself, or an address and bytes, or the B-tree of chunks."""

    data: bytes | None = None
    address: int = -1
    nbytes: int = 0
    chunk: tuple[int, ...] = ()


def parse_layout(c: Cursor) -> Layout:
    version, kind = c.number(1), c.number(1)
    if version not in (3, 4):
        raise unsupported("an old form of layout", c.where, version)
    if kind == 0:
        return Layout(data=c.take(c.number(2)))
    if kind == 1:
        return Layout(address=c.address(), nbytes=c.length())
    if kind == 3:
        raise unsupported("a virtual dataset, which is made of others", c.where)
    if kind != 2 or version == 4:
        raise unsupported("a new form of layout", c.where, (version, kind))
    ndim = c.number(1)
    address = c.address()
    dims = tuple(c.number(4) for _ in range(ndim))
    if not 2 <= ndim <= _NDIM_MAX + 1 or not all(dims):
        raise corrupt("not the shape of a chunk", "layout", c.where, dims[:8])
    return Layout(address=address, chunk=dims[:-1])


DEFLATE, SHUFFLE, FLETCHER = 1, 2, 3
_NAMES = {DEFLATE: "deflate", SHUFFLE: "shuffle", FLETCHER: "fletcher32"}
_FILTERS_MAX = 8


def parse_filters(c: Cursor) -> list[int]:
    """The filters, in the order in which they were applied."""
    version, count = c.number(1), c.number(1)
    if version not in (1, 2) or count > _FILTERS_MAX:
        raise corrupt("an unknown filter pipeline", "filter", c.where, (version, count))
    if version == 1:
        c.take(6)
    made = []
    for _ in range(count):
        number = c.number(2)
        named = c.number(2) if version == 1 or number >= 256 else 0
        c.take(2)
        values = c.number(2)
        c.take(-(-named // 8) * 8 if version == 1 else named)
        c.take(4 * values + (4 if version == 1 and values % 2 else 0))
        if number not in _NAMES:
            expected = ", ".join(_NAMES.values())
            raise unsupported(f"a filter other than {expected}", c.where, number)
        made.append(number)
    return made
