"""GGUF: tensors of llama.cpp, with the keys and values that stand before them.

Floats and integers are tensors. Quantized ones stay as they are: an element of the dtype
`gguf.Q4_K` is one block, so that nothing is decoded and nothing is lost. The tree is
`{"metadata": {key: value}, "tensors": {name: tensor}}`; numbers keep their width.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ckptfmt.errors import NotFoundError, UnsupportedError
from ckptfmt.foreign.base import ForeignTensor, ForeignTree, Importer, tree_of
from ckptfmt.foreign.file_map import view
from ckptfmt.foreign.flat import box_of_runs
from ckptfmt.foreign.gguf_types import BLOCKS, NUMBERS, Block
from ckptfmt.foreign.mapping import check_apart, corrupt, map_file, native, numel, starts_with
from ckptfmt.format import Dtype, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = "gguf"
MAGIC = b"GGUF"
STRING, ARRAY, BOOL = 8, 9, 7
ALIGNMENT, COUNT, PART = "general.alignment", "split.count", "split.no"
_VERSIONS = (2, 3)
_NDIM_MAX, _DEPTH_MAX = 64, 8
_NUMEL_MAX = 1 << 62
_ITEMS_MAX = 4 << 20
_KEYS_MAX, _LISTS_MAX = 1 << 16, 1 << 16
"""llama.cpp writes some dozens of keys and no list of lists."""
_SPLIT_MAX = 4096


class GgufImporter(Importer):
    """Row `gguf` of IMPORTERS."""

    def detect(self, path: str) -> bool:
        return starts_with(path, MAGIC)

    def read(self, path: str) -> ForeignTree:
        first = _read_file(os.path.realpath(path), os.path.basename(path))
        files = [first, *_others(path, first)]
        skipped: dict[str, str] = {}
        tensors: dict[str, ForeignTensor] = {}
        for file in files:
            for name, tensor in file.tensors.items():
                if name in tensors:
                    raise corrupt(FORMAT, "a name stands twice", "duplicate", f"{path}, {name!r}")
                tensors[name] = tensor
            skipped |= file.skipped
        root = {"metadata": first.values, "tensors": tensors}
        return tree_of(root, FORMAT, nbytes=sum(file.nbytes for file in files), skipped=skipped)


@dataclass(frozen=True, slots=True)
class _File:
    """What one file holds."""

    values: dict[str, Any]
    tensors: dict[str, ForeignTensor]
    skipped: dict[str, str]
    nbytes: int


def _others(path: str, first: _File) -> Iterator[_File]:
    """The other files of a model that is split, beside the first: `x-00002-of-00003.gguf`."""
    count, number = (int(first.values.get(key, 0)) for key in (COUNT, PART))
    if count < 2:
        return
    end = f"-{1:05d}-of-{count:05d}.gguf"
    if number or not path.endswith(end) or count > _SPLIT_MAX:
        raise UnsupportedError(
            "a part of a split model",
            reason=f"{FORMAT}-split",
            where=path,
            expected=f"the first part, *{end}",
            do="give the first part; the others stand beside it",
        )
    folder = os.path.realpath(os.path.dirname(path) or ".")
    stem = os.path.basename(path).removesuffix(end)
    names = [f"{stem}-{part:05d}-of-{count:05d}.gguf" for part in range(2, count + 1)]
    missing = [name for name in names if not os.path.lexists(os.path.join(folder, name))]
    if missing:
        raise NotFoundError(
            f"{len(missing)} of {count} parts are missing",
            reason="shards",
            where=f"{path}: {', '.join(missing[:20])}",
            do="get the missing files",
        )
    for name in names:
        yield _read_file(os.path.realpath(os.path.join(folder, name)), name)


def _read_file(path: str, where: str) -> _File:
    data, nbytes = map_file(path, where, FORMAT)
    reader = _Reader(data, nbytes, where)
    tensors, values = reader.header()
    made = {}
    for _ in range(values):
        key = reader.key()
        if key in made:
            raise reader.corrupt(f"the key {ascii(key)[:80]} stands twice", "duplicate")
        made[key] = reader.value(reader.u32(), 0)
    infos = [reader.info() for _ in range(tensors)]
    start = _data_start(reader, made)
    tensors_of, skipped = _tensors(infos, reader, start)
    return _File(made, tensors_of, skipped, nbytes)


def _data_start(reader: _Reader, values: dict[str, Any]) -> int:
    alignment = values.get(ALIGNMENT, np.uint32(32))
    if not isinstance(alignment, np.uint32) or alignment == 0 or alignment & (alignment - 1):
        raise reader.corrupt("the alignment is no power of two", "alignment", repr(alignment)[:80])
    step = int(alignment)
    return -(-reader.at // step) * step


def _tensors(
    infos: list[_Info], reader: _Reader, start: int
) -> tuple[dict[str, ForeignTensor], dict[str, str]]:
    """The tensors of one file, and those that are of no type known here."""
    made: dict[str, ForeignTensor] = {}
    skipped: dict[str, str] = {}
    spans = []
    for info in infos:
        at = f"{reader.where}, tensor {ascii(info.name)[:200]}"
        if info.name in made or info.name in skipped:
            raise corrupt(FORMAT, "a name stands twice", "duplicate", at)
        block = BLOCKS.get(info.type)
        if block is None:
            skipped[info.name] = f"the unknown type {info.type}"
            continue
        if block.elements > 1 and (not info.shape or info.shape[-1] % block.elements):
            raise corrupt(FORMAT, "rows are no whole blocks", "shape", at, list(info.shape))
        count = numel(info.shape) // block.elements
        begin, nbytes = start + info.offset, count * block.nbytes
        if begin + nbytes > reader.nbytes:
            what = "a tensor ends behind its file (truncated?)"
            size = f"{reader.nbytes} bytes"
            raise corrupt(FORMAT, what, "truncated", at, size, expected=begin + nbytes)
        if block.elements > 1 and reader.swapped:
            skipped[info.name] = f"{block.name} in a big-endian file: its blocks are not defined"
            continue
        spans.append((begin, begin + nbytes, info.name))
        made[info.name] = _tensor(info, block, reader, begin, nbytes)
    check_apart(spans, FORMAT, reader.where)
    return made, skipped


def _tensor(info: _Info, block: Block, reader: _Reader, begin: int, nbytes: int) -> ForeignTensor:
    attributes: dict[str, object] = {}
    shape = info.shape
    if block.elements > 1:
        shape = (*shape[:-1], shape[-1] // block.elements)
        attributes["gguf.shape"] = list(info.shape)
    dtype = block.dtype
    run = partial(_run, reader.data, begin, dtype, swapped=reader.swapped)
    return ForeignTensor(
        name="",
        foreign_name="",
        dtype=dtype.name,
        shape=shape,
        nbytes=nbytes,
        where=f"{reader.where}[{begin}:{begin + nbytes})",
        fetch=partial(_whole, run, shape),
        attributes=attributes,
        box=box_of_runs(shape, run) if reader.swapped and dtype.bits > 8 else None,
    )


def _run(
    data: mmap.mmap, begin: int, dtype: Dtype, first: int, last: int, *, swapped: bool
) -> NDArray[Any]:
    size = dtype.itemsize
    raw = view(data, begin + first * size, (last - first) * size)
    return native(raw, dtype, swapped=swapped)


def _whole(run: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    made: NDArray[Any] = run(0, numel(shape)).reshape(shape)
    return made


@dataclass(frozen=True, slots=True)
class _Info:
    """What stands about one tensor; `shape` as NumPy has it, `offset` from where data begins."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class _Reader:
    """Reads what stands before the data, from its begin to its end.

    Attributes:
        at: Where it is.
        swapped: The file has the other byte order than the machine.
    """

    def __init__(self, data: mmap.mmap, nbytes: int, where: str) -> None:
        self.data, self.nbytes, self.where = data, nbytes, where
        self.at = 0
        self.order, self.swapped = "<", sys.byteorder == "big"
        self._items = self._lists = 0

    def corrupt(self, what: str, reason: str, found: object = None) -> Exception:
        return corrupt(FORMAT, what, reason, f"{self.where}, byte {self.at}", found)

    def fail(self) -> NoReturn:
        raise self.corrupt("the header ends behind the file (truncated?)", "truncated")

    def take(self, nbytes: int) -> bytes:
        stop = self.at + nbytes
        if stop > self.nbytes:
            self.fail()
        made = self.data[self.at : stop]
        self.at = stop
        return made

    def number(self, code: str) -> int:
        made: int = struct.unpack(self.order + code, self.take(struct.calcsize(code)))[0]
        return made

    def u32(self) -> int:
        return self.number("I")

    def u64(self) -> int:
        return self.number("Q")

    def header(self) -> tuple[int, int]:
        """How many tensors and values there are."""
        if self.take(4) != MAGIC:
            raise self.corrupt("no GGUF file", "magic")
        version = self.u32()
        if version & 0xFFFF == 0:
            self.at, self.order, self.swapped = 4, ">", sys.byteorder == "little"
            version = self.u32()
        if version not in _VERSIONS:
            raise UnsupportedError(
                "an unknown version of the format",
                reason=f"{FORMAT}-version",
                where=self.where,
                expected="2 or 3",
                found=version,
                do="write the file again with a newer llama.cpp",
            )
        tensors, values = self.u64(), self.u64()
        # The shortest: an empty key with a byte; an empty name, no axes, type and offset.
        if tensors * 24 + values * 13 > self.nbytes:
            raise self.corrupt("more tensors or values than bytes", "limit", (tensors, values))
        if values > _KEYS_MAX:
            raise self.corrupt("too many keys", "limit", values)
        return tensors, values

    def raw_text(self) -> bytes:
        length = self.u64()
        if length > self.nbytes - self.at:
            self.fail()
        return self.take(length)

    def text(self) -> str | bytes:
        """Text; bytes where it is no UTF-8, as pieces of a tokenizer may be."""
        raw = self.raw_text()
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def key(self) -> str:
        raw = self.text()
        if not isinstance(raw, str):
            raise self.corrupt("a key that is not UTF-8", "key", ascii(raw)[:80])
        return raw

    def value(self, kind: int, depth: int) -> Any:
        """A value: NumPy scalars, bools, text; long arrays of numbers are tensors."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array(depth)
        if kind == BOOL:
            return self._bool()
        if kind not in NUMBERS:
            raise self.corrupt("a value of an unknown type", "type", kind)
        return self._numbers(kind, 1)[0]

    def _bool(self) -> bool:
        (found,) = self.take(1)
        if found > 1:
            raise self.corrupt("a bool is neither 0 nor 1", "bool", found)
        return bool(found)

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        found = numpy_dtype(NUMBERS[kind]).newbyteorder("<" if self.order == "<" else ">")
        raw = np.frombuffer(self.take(count * found.itemsize), found)
        return raw.astype(found.newbyteorder("="))

    def _array(self, depth: int) -> Any:
        kind, count = self.u32(), self.u64()
        if depth > _DEPTH_MAX:
            raise self.corrupt("nested too deep", "depth")
        self._lists += 1
        if self._lists > _LISTS_MAX:
            raise self.corrupt("too many lists", "limit", self._lists)
        if kind in NUMBERS:
            size = NUMBERS[kind].itemsize
            if count * size > self.nbytes - self.at:
                self.fail()
            begin = self.at
            self.at += count * size
            span = f"{self.where}[{begin}:{self.at})"
            run = partial(_run, self.data, begin, NUMBERS[kind], swapped=self.swapped)
            return ForeignTensor(
                *("", "", NUMBERS[kind].name, (count,), count * size, span),
                fetch=partial(_whole, run, (count,)),
            )
        self._items += count
        least = {STRING: 8, ARRAY: 12, BOOL: 1}.get(kind, 1)
        if count * least > self.nbytes - self.at or self._items > _ITEMS_MAX:
            raise self.corrupt("an array of too many items", "limit", count)
        if kind == BOOL:
            raw = self.take(count)
            if count and max(raw) > 1:
                raise self.corrupt("a bool is neither 0 nor 1", "bool", max(raw))
            return [item == 1 for item in raw]
        return [self.value(kind, depth + 1) for _ in range(count)]

    def info(self) -> _Info:
        name, ndim = self.key(), self.u32()
        if ndim > _NDIM_MAX:
            raise self.corrupt("too many dimensions", "shape", ndim)
        dims = [self.u64() for _ in range(ndim)]
        kind, offset = self.u32(), self.u64()
        if numel(n for n in dims if n) * 512 >= _NUMEL_MAX or offset >= _NUMEL_MAX:
            raise self.corrupt("a tensor without end", "shape", dims[:8])
        return _Info(name, tuple(reversed(dims)), kind, offset)
