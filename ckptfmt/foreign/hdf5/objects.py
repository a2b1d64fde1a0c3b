"""Object headers, and the two forms in which a group lists its members."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptfmt.foreign.hdf5.cursor import UNDEFINED, Cursor, File, corrupt, unsupported

DATASPACE, LINK_INFO, DATATYPE, LINK, EXTERNAL = 1, 2, 3, 6, 7
LAYOUT, FILTERS, ATTRIBUTE, CONTINUATION, SYMBOLS = 8, 11, 12, 16, 17
_SHARED = 2
_BLOCKS_MAX, _HEADER_NBYTES_MAX = 4096, 64 << 20
_NODES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """One message of an object header."""

    kind: int
    is_shared: bool
    cursor: Cursor


def read_header(file: File, at: int) -> list[Message]:
    """All messages of an object."""
    if file.bytes(at, 4, "object header") == b"OHDR":
        return _read_version_2(file, at)
    c = file.cursor(at, 16, "object header")
    version, _, count, _, nbytes = (c.number(n) for n in (1, 1, 2, 4, 4))
    if version != 1:
        raise corrupt("no object header", "header", c.where, version)
    blocks = [(at + 16, nbytes)]
    made: list[Message] = []
    total = 0
    for begin, length in blocks:  # grows as it is read
        total += length
        _check_blocks(blocks, total, c)
        block = file.cursor(begin, length, "object header")
        while block.left >= 8 and len(made) < count:
            kind, size, flags = block.number(2), block.number(2), block.number(1)
            block.take(3)
            inner = Cursor(block.take(size), file, f"{block.where}, message {kind}")
            made.append(Message(kind, bool(flags & _SHARED), inner))
            if kind == CONTINUATION:
                blocks.append((inner.address(), inner.length()))
    return made


def _check_blocks(blocks: list[tuple[int, int]], total: int, c: Cursor) -> None:
    if len(blocks) > _BLOCKS_MAX or total > _HEADER_NBYTES_MAX or len(set(blocks)) < len(blocks):
        raise corrupt("an object header without end", "header", c.where)


def _read_version_2(file: File, at: int) -> list[Message]:
    c = file.cursor(at, min(40, file.nbytes - at), "object header")
    c.expect(b"OHDR")
    version, flags = c.number(1), c.number(1)
    if version != 2:
        raise corrupt("an unknown object header", "header", c.where, version)
    c.take((16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0))
    nbytes = c.number(1 << (flags & 3))
    blocks = [(at + c.at, nbytes)]
    made: list[Message] = []
    total = 0
    for number, (begin, length) in enumerate(blocks):
        total += length
        _check_blocks(blocks, total, c)
        block = file.cursor(begin, length, "object header")
        if number:
            block.expect(b"OCHK")
            block = Cursor(block.take(max(block.left - 4, 0)), file, block.where)
        while block.left >= (6 if flags & 4 else 4):
            kind, size, marks = block.number(1), block.number(2), block.number(1)
            block.take(2 if flags & 4 else 0)
            inner = Cursor(block.take(size), file, f"{block.where}, message {kind}")
            made.append(Message(kind, bool(marks & _SHARED), inner))
            if kind == CONTINUATION:
                blocks.append((inner.address(), inner.length()))
    return made


def members(file: File, messages: list[Message], where: str) -> Iterator[tuple[str, int]] | None:
    """Name and header address of a group's members; None for what is no group."""
    for message in messages:
        if message.kind == SYMBOLS:
            tree, heap = message.cursor.address(), message.cursor.address()
            return _symbols(file, tree, heap)
    kinds = {message.kind for message in messages}
    if LINK_INFO not in kinds and LINK not in kinds:
        return None
    for message in messages:
        if message.kind == LINK_INFO:
            c = message.cursor
            c.number(1)
            c.take(8 if c.number(1) & 1 else 0)
            if c.address() != UNDEFINED:
                raise unsupported("a group of many members in the new form", where)
    return (_link(m.cursor, where) for m in messages if m.kind == LINK)


def _link(c: Cursor, where: str) -> tuple[str, int]:
    version, flags = c.number(1), c.number(1)
    kind = c.number(1) if flags & 8 else 0
    c.take((8 if flags & 4 else 0) + (1 if flags & 0x10 else 0))
    name = _name(c.take(c.number(1 << (flags & 3))), c.where)
    if version != 1 or kind:
        raise _outside(where, name)
    return name, c.address()


def _outside(where: str, name: str) -> Exception:
    return unsupported("a link that leads elsewhere", f"{where}/{ascii(name)[1:-1][:200]}")


def _name(raw: bytes, where: str) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise corrupt("a name that is not UTF-8", "name", where, ascii(raw)[:80]) from None
    if not name or "/" in name:
        raise corrupt("not a name", "name", where, ascii(raw)[:80])
    return name


def _symbols(file: File, tree: int, heap: int) -> Iterator[tuple[str, int]]:
    """The members of a group in the old form: a B-tree of tables, names in a heap."""
    c = file.cursor(heap, 8 + 2 * file.length_nbytes + file.offset_nbytes, "local heap")
    c.expect(b"HEAP")
    c.take(4)
    size, _, begin = c.length(), c.length(), c.address()
    names = file.cursor(begin, size, "local heap").data
    width = 2 * file.offset_nbytes + 24
    for node in leaves(file, tree, 0, 0):
        c = file.cursor(node, 8, "symbol table")
        c.expect(b"SNOD")
        c.take(2)
        count = c.number(2)
        c = file.cursor(node + 8, count * width, "symbol table")
        for _ in range(count):
            at, header, kind = c.address(), c.address(), c.number(4)
            c.take(20)
            end = names.find(b"\0", at) if 0 <= at < len(names) else -1
            if end < 0:
                raise corrupt("a name that is not there", "name", c.where, at)
            name = _name(names[at:end], c.where)
            if kind == 2:
                raise _outside(file.where, name)
            yield name, header


def leaves(file: File, root: int, kind: int, key_nbytes: int) -> Iterator[int]:
    """What the leaf nodes of a B-tree of groups lead to."""
    for _, child in tree_entries(file, root, kind, key_nbytes or file.length_nbytes):
        yield child


def tree_entries(file: File, root: int, kind: int, key_nbytes: int) -> Iterator[tuple[bytes, int]]:
    """(key, child) of all leaves of a version 1 B-tree, from left to right."""
    stack = [(root, -1)]
    seen: set[int] = set()
    head = 8 + 2 * file.offset_nbytes
    while stack:
        at, level = stack.pop()
        c = file.cursor(at, head, "B-tree node")
        c.expect(b"TREE")
        found, depth, count = c.number(1), c.number(1), c.number(2)
        if found != kind or at in seen or (level >= 0 and depth != level) or len(seen) > _NODES_MAX:
            raise corrupt("a B-tree that is none", "tree", c.where, (found, depth))
        seen.add(at)
        c = file.cursor(at + head, count * (key_nbytes + file.offset_nbytes), "B-tree node")
        rows = [(c.take(key_nbytes), c.address()) for _ in range(count)]
        if depth:
            stack += [(child, depth - 1) for _, child in reversed(rows)]
        else:
            yield from rows
