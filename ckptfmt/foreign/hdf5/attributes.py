"""Attributes that are text, or a list of texts: all that a reader of checkpoints wants of them."""

from __future__ import annotations

import math

from ckptfmt.foreign.hdf5.cursor import UNDEFINED, Cursor, File, corrupt
from ckptfmt.foreign.hdf5.messages import VARIABLE, parse_dataspace, parse_datatype
from ckptfmt.foreign.hdf5.objects import ATTRIBUTE, Message

_TEXTS_MAX = 1 << 20
_COLLECTION_NBYTES_MAX = 64 << 20


def read_texts(heap: GlobalHeap, messages: list[Message]) -> dict[str, str | list[str]]:
    """Name -> text or texts; attributes of other types are left out."""
    made: dict[str, str | list[str]] = {}
    for message in messages:
        if message.kind == ATTRIBUTE and not message.is_shared:
            found = _texts(message.cursor, heap)
            if found is not None:
                made[found[0]] = found[1]
    return made


def _texts(c: Cursor, heap: GlobalHeap) -> tuple[str, str | list[str]] | None:
    version, flags = c.number(1), c.number(1)
    if version not in (1, 2, 3):
        raise corrupt("an unknown attribute", "attribute", c.where, version)
    sizes = [c.number(2) for _ in range(3)]
    if version == 3:
        c.take(1)
    parts = []
    for size in sizes:
        raw = c.take(size)
        c.take(-size % 8 if version == 1 else 0)
        parts.append(Cursor(raw, c.file, c.where))
    if flags & 3:
        return None  # of a datatype that stands elsewhere
    name = parts[0].take(parts[0].left).rstrip(b"\0").decode("utf-8", "replace")
    datatype, shape = parse_datatype(parts[1]), parse_dataspace(parts[2])
    is_text = datatype.name == VARIABLE or datatype.name.startswith("bytes")
    if not is_text or shape is None or len(shape) > 1:
        return None
    count = math.prod(shape)
    if count > _TEXTS_MAX or count * datatype.nbytes > c.left:
        raise corrupt("an attribute of too many texts", "limit", c.where, count)
    found = []
    for _ in range(count):
        raw = c.take(datatype.nbytes)
        if datatype.name == VARIABLE:
            raw = heap.read(Cursor(raw, c.file, c.where))
        found.append(raw.partition(b"\0")[0].decode("utf-8", "replace"))
    return name, found if shape else found[0]


class GlobalHeap:
    """The strings of any length of one file: collections of numbered objects."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._found: dict[int, dict[int, bytes]] = {}

    def read(self, c: Cursor) -> bytes:
        """The bytes that an element refers to: how many, the collection, the object's number."""
        length, at, number = c.number(4), c.address(), c.number(4)
        if not length or at in (0, UNDEFINED):
            return b""
        if at not in self._found:
            self._found[at] = self._collection(at)
        found = self._found[at].get(number)
        if found is None or length > len(found):
            raise corrupt("a text that is not there", "heap", c.where, number)
        return found[:length]

    def _collection(self, at: int) -> dict[int, bytes]:
        file = self._file
        head = 8 + file.length_nbytes
        c = file.cursor(at, head, "global heap")
        c.expect(b"GCOL")
        c.take(4)
        nbytes = c.length()
        if not head <= nbytes <= _COLLECTION_NBYTES_MAX:
            raise corrupt("a global heap of no size", "heap", c.where, nbytes)
        c = file.cursor(at + head, nbytes - head, "global heap")
        made: dict[int, bytes] = {}
        while c.left >= head:
            number = c.number(2)
            c.take(6)
            size = c.length()
            if not number:
                break
            made[number] = c.take(size)
            c.take(min(-size % 8, c.left))
        return made
