"""A file's groups and datasets, each checked; values are read when they are asked for."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.file_map import view
from ckptfmt.foreign.flat import box_of_runs
from ckptfmt.foreign.hdf5.attributes import GlobalHeap, read_texts
from ckptfmt.foreign.hdf5.chunks import Chunks
from ckptfmt.foreign.hdf5.cursor import REASON, UNDEFINED, Cursor, File, corrupt, unsupported
from ckptfmt.foreign.hdf5.messages import (
    VARIABLE,
    Datatype,
    Layout,
    parse_dataspace,
    parse_datatype,
    parse_filters,
    parse_layout,
)
from ckptfmt.foreign.hdf5.objects import (
    DATASPACE,
    DATATYPE,
    EXTERNAL,
    FILTERS,
    LAYOUT,
    Message,
    members,
    read_header,
)
from ckptfmt.foreign.mapping import check_apart, check_bools, native
from ckptfmt.format import Dtype, dtype_named

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.streaming import BoxReader

SIGNATURE = b"\x89HDF\r\n\x1a\n"
OBJECTS_MAX = 1 << 18
_DEPTH_MAX = 64


@dataclass(slots=True)
class Group:
    """A group, or the file's root. `attributes`: text and lists of text alone."""

    path: str
    attributes: dict[str, str | list[str]] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    tensors: dict[str, ForeignTensor] = field(default_factory=dict)

    def below(self, path: str) -> Group | None:
        """The group at a relative path."""
        node: Group | None = self
        for part in path.split("/"):
            node = node.groups.get(part) if node is not None else None
        return node


def read_hdf5(
    data: mmap.mmap | bytes, span: tuple[int, int], where: str
) -> tuple[Group, dict[str, str]]:
    """All groups and datasets of a file that lies in data[start:stop), and what is left out.

    Raises:
        CorruptError: It is damaged or hostile.
        UnsupportedError: It leads to other files, or has what only newer writers write.
    """
    file = File(data, *span, where)
    walk = _Walk(file)
    root = walk.group(_superblock(file), "", 0)
    check_apart(walk.spans, REASON, where)
    return root, walk.skipped


def _superblock(file: File) -> int:
    """Address of the root's object header."""
    c = file.cursor(0, min(96, file.nbytes), "superblock")
    c.expect(SIGNATURE)
    version = c.number(1)
    if version in (0, 1):
        c.take(4)
        file.offset_nbytes, file.length_nbytes = c.number(1), c.number(1)
        c.take(9 + (4 if version else 0))
    elif version in (2, 3):
        file.offset_nbytes, file.length_nbytes = c.number(1), c.number(1)
        c.take(1)
    else:
        raise unsupported("an unknown superblock", c.where, version)
    if file.offset_nbytes not in (4, 8) or file.length_nbytes not in (4, 8):
        raise corrupt("widths that no file has", "superblock", c.where, file.offset_nbytes)
    if c.address() != 0:
        raise unsupported("a file that begins elsewhere", c.where)
    c.address()
    c.address()
    if version < 2:
        c.address()
        c.address()  # of the root's name
    return c.address()


class _Walk:
    """Goes through a file once.

    Attributes:
        spans: Where values lie in one piece.
        skipped: Path -> why it is not carried.
    """

    def __init__(self, file: File) -> None:
        self.file = file
        self.spans: list[tuple[int, int, str]] = []
        self.skipped: dict[str, str] = {}
        self._heap = GlobalHeap(file)
        self._groups: set[int] = set()
        self._tensors: dict[int, ForeignTensor | str] = {}
        self._count = 0

    def _where(self, path: str) -> str:
        return f"{self.file.where}, {ascii(path)[1:-1][:200]}"

    def group(self, at: int, path: str, depth: int) -> Group:
        where = self._where(path)
        if at in self._groups or depth > _DEPTH_MAX:
            raise corrupt("a group within itself, or twice, or too deep", "group", where)
        self._groups.add(at)
        messages = read_header(self.file, at)
        found = members(self.file, messages, where)
        if found is None:
            raise corrupt("not a group", "group", where)
        made = Group(path, read_texts(self._heap, messages))
        for name, address in found:
            self._count += 1
            if self._count > OBJECTS_MAX:
                raise corrupt("too many objects", "limit", where, self._count)
            if name in made.groups or name in made.tensors:
                raise corrupt("a name stands twice", "duplicate", where, ascii(name)[:80])
            self._member(made, name, address, depth)
        return made

    def _member(self, group: Group, name: str, address: int, depth: int) -> None:
        path = f"{group.path}/{name}" if group.path else name
        if address in self._tensors:  # the same dataset under another name: a tie
            tensor = self._tensors[address]
        else:
            messages = read_header(self.file, address)
            if any(message.kind == LAYOUT for message in messages):
                tensor = self._tensors[address] = self._dataset(messages, address, path)
            elif any(message.kind == DATATYPE for message in messages):
                tensor = "a datatype, which is no value"
            else:
                group.groups[name] = self.group(address, path, depth + 1)
                return
        if isinstance(tensor, str):
            self.skipped[path] = tensor
        else:
            group.tensors[name] = tensor

    def _dataset(self, messages: list[Message], address: int, path: str) -> ForeignTensor | str:
        """The lazy tensor, or why it is not carried."""
        where = self._where(path)
        found = {message.kind: message for message in reversed(messages)}
        if EXTERNAL in found:
            raise unsupported("a dataset whose values are in other files", where)
        if DATATYPE not in found or DATASPACE not in found:
            raise corrupt("a dataset without a datatype or a shape", "dataset", where)
        if found[DATATYPE].is_shared or found[DATASPACE].is_shared:
            return "a dataset of a named datatype"
        shape = parse_dataspace(found[DATASPACE].cursor)
        datatype = parse_datatype(found[DATATYPE].cursor)
        filters = parse_filters(found[FILTERS].cursor) if FILTERS in found else []
        if shape is None:
            return "a dataset without a value"
        if read_texts(self._heap, messages).get("dtype") == "bfloat16" and datatype.nbytes == 2:
            datatype = Datatype("bfloat16", 2)
        if not datatype.name:
            return datatype.what
        layout = parse_layout(found[LAYOUT].cursor)
        if layout.chunk:
            return self._chunked(layout, datatype, shape, filters, where=where, key=address)
        nbytes = math.prod(shape) * datatype.nbytes
        run = self._whole(layout, datatype, nbytes, where)
        if datatype.name == VARIABLE:
            return self._strings(run, shape, where)
        return _tensor(run, datatype, shape, where, ("hdf5", self.file.where, address))

    def _whole(self, layout: Layout, datatype: Datatype, nbytes: int, where: str) -> _Raw:
        """What gives the bytes of a dataset in one piece."""
        if layout.data is not None:
            if len(layout.data) != nbytes:
                raise corrupt("values do not fit the shape", "size", where, len(layout.data))
            values = np.frombuffer(layout.data, np.uint8)
            return lambda: values
        if nbytes and layout.address == UNDEFINED:
            raise corrupt("a dataset that was never written", "unwritten", where)
        if layout.nbytes != nbytes:
            raise corrupt("values do not fit the shape", "size", where, layout.nbytes)
        if not nbytes:
            return lambda: np.empty(0, np.uint8)
        self.file.check(layout.address, nbytes, "dataset")
        self.spans.append((layout.address, layout.address + nbytes, where))
        start = self.file.start + layout.address
        return lambda: view(self.file.data, start, nbytes)

    def _strings(self, run: _Raw, shape: tuple[int, ...], where: str) -> ForeignTensor:
        width = 8 + self.file.offset_nbytes
        count = math.prod(shape)

        def fetch() -> NDArray[Any]:
            raw = run().tobytes()
            made = np.empty(count, object)
            for at in range(count):
                part = raw[at * width : (at + 1) * width]
                made[at] = self._heap.read(Cursor(part, self.file, where))
            return made.reshape(shape)

        return ForeignTensor(*("", "", "bytes", shape, count * width, where), fetch=fetch)

    def _chunked(
        self,
        layout: Layout,
        datatype: Datatype,
        shape: tuple[int, ...],
        filters: list[int],
        *,
        where: str,
        key: int,
    ) -> ForeignTensor | str:
        if datatype.name == VARIABLE:
            return "strings of any length, in chunks"
        file, width = self.file, datatype.nbytes
        chunks: Chunks | None = None
        if math.prod(shape):
            chunks = Chunks(
                *(file, layout.address, shape, layout.chunk),
                width=width,
                filters=filters,
                where=where,
            )
        dtype = _dtype(datatype)
        swapped = datatype.is_big != (sys.byteorder == "big")

        def box(sides: tuple[slice, ...]) -> NDArray[Any]:
            extent = [side.stop - side.start for side in sides]
            raw = np.empty(0, np.uint8)
            if chunks is not None:
                raw = chunks.read(sides).reshape(-1).view(np.uint8)
            if dtype.name == "bool" and raw.size:
                check_bools(raw, REASON, where)
            return native(raw, dtype, swapped=swapped).reshape(extent)

        return ForeignTensor(
            *("", "", dtype.name, shape, math.prod(shape) * width, where),
            fetch=partial(box, tuple(slice(0, n) for n in shape)),
            must_check=dtype.name == "bool",
            identity=("hdf5", file.where, key) if math.prod(shape) else None,
            box=box if chunks is not None else None,
        )


_Raw = Callable[[], "NDArray[np.uint8]"]


def _dtype(datatype: Datatype) -> Dtype:
    found = dtype_named(datatype.name)
    assert found is not None
    return found


def _tensor(
    raw: _Raw, datatype: Datatype, shape: tuple[int, ...], where: str, key: Hashable
) -> ForeignTensor:
    """A tensor whose values lie in one piece."""
    dtype, count = _dtype(datatype), math.prod(shape)
    swapped = datatype.is_big != (sys.byteorder == "big")
    size = dtype.itemsize

    def run(first: int, last: int) -> NDArray[Any]:
        part = raw()[first * size : last * size]
        if dtype.name == "bool" and part.size:
            check_bools(part, REASON, where)
        return native(part, dtype, swapped=swapped)

    box: BoxReader | None = box_of_runs(shape, run) if swapped and size > 1 else None
    return ForeignTensor(
        *("", "", dtype.name, shape, count * size, where),
        fetch=lambda: run(0, count).reshape(shape),
        must_check=dtype.name == "bool",
        identity=key if count else None,
        box=box if count else None,
    )
