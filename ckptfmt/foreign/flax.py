"""Flax's msgpack files (`flax.serialization`): arrays are views of the mapped file.

Three extensions: 1 an array (shape, name of the dtype, bytes), 2 a complex number, 3 a NumPy
scalar. An array of over 1 GiB stands as a dict of flat chunks, which are joined as they are read.
"""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.errors import CheckpointError, UnsupportedError
from ckptfmt.foreign.base import ForeignTensor, ForeignTree, Importer, tree_of
from ckptfmt.foreign.file_map import view
from ckptfmt.foreign.flat import box_of_runs
from ckptfmt.foreign.mapping import check_bools, corrupt, map_file, native, numel
from ckptfmt.foreign.msgpack_reader import MsgpackReader, Span
from ckptfmt.format import Dtype, dtype_named, escape_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = "flax"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
_MAPS = (*range(0x81, 0x90), 0xDE, 0xDF)
_EXTENSIONS = (*range(0xC7, 0xCA), *range(0xD4, 0xD9))
_NDIM_MAX = 64
_PLAIN = frozenset([str, int, float, bool, type(None)])
_Path: TypeAlias = "tuple[Any, Any] | None"
"""What leads to a value: the path above and the key or position there."""
_SCALAR_NBYTES_MAX = 1 << 16
_OLD_NAMES = {b"V2": "bfloat16"}
"""What NumPy called it before ml_dtypes did."""


class FlaxImporter(Importer):
    """Row `flax` of IMPORTERS."""

    def detect(self, path: str) -> bool:
        """There is no magic: a file of one msgpack value, with an array in it."""
        if not os.path.isfile(path):  # a FIFO would wait for a writer
            return False
        try:
            with open(path, "rb") as file:
                head = file.read(2)
            if len(head) < 2 or head[0] not in (*_MAPS, *_EXTENSIONS):
                return False
            return _Reader(os.path.realpath(path), path).arrays > 0
        except (CheckpointError, OSError):
            return False

    def read(self, path: str) -> ForeignTree:
        reader = _Reader(os.path.realpath(path), os.path.basename(path))
        made = reader.carry(reader.root, None)
        return tree_of(made, FORMAT, nbytes=reader.nbytes, skipped=reader.skipped)


def read_msgpack(path: str, where: str) -> Any:
    """The tree of a file, of which everything is carried."""
    reader = _Reader(path, where)
    made = reader.carry(reader.root, None)
    for name, reason in reader.skipped.items():
        raise corrupt(FORMAT, reason, "extension", f"{where}, {name[:200]}")
    return made


class _Reader:
    """Reads one file.

    Attributes:
        root: The value that it is.
        arrays: How many arrays there are in it.
        skipped: Name -> reason.
    """

    def __init__(self, path: str, where: str) -> None:
        self.data, self.nbytes = map_file(path, where, FORMAT)
        self.where, self.arrays = where, 0
        self.skipped: dict[str, str] = {}
        reader = MsgpackReader(
            self.data, 0, self.nbytes, where=where, form=FORMAT, ext=self._extension
        )
        self.root = reader.value()
        if reader.at != self.nbytes:
            raise reader.fail("something stands behind the value", "end")

    def _extension(self, code: int, start: int, stop: int) -> Any:
        if code == _ARRAY:
            self.arrays += 1
            return self._array(start, stop)
        if code == _SCALAR:
            array = self._array(start, stop)
            if array.shape or array.nbytes > _SCALAR_NBYTES_MAX or array.dtype is None:
                raise corrupt(FORMAT, "not a scalar", "scalar", array.where, list(array.shape))
            return array.values()[()]
        if code == _COMPLEX:
            parts = self._inner(start, stop)
            if not (type(parts) is list and list(map(type, parts)) == [float, float]):
                raise corrupt(
                    FORMAT, "not a complex number", "complex", f"{self.where}[{start}:{stop})"
                )
            return complex(*parts)
        return _Unknown(code)

    def _inner(self, start: int, stop: int) -> Any:
        """The value that an extension's bytes are."""
        inner = MsgpackReader(
            self.data, start, stop, where=self.where, form=FORMAT, ext=_no_extension
        )
        made = inner.value()
        if inner.at != stop:
            raise inner.fail("something stands behind the value", "end")
        return made

    def _array(self, start: int, stop: int) -> _Array:
        where = f"{self.where}[{start}:{stop})"
        parts = self._inner(start, stop)
        if not (type(parts) is list and len(parts) == 3 and type(parts[0]) is list):
            raise corrupt(FORMAT, "not an array", "array", where)
        shape, name, span = parts
        if len(shape) > _NDIM_MAX or not all(type(n) is int and n >= 0 for n in shape):
            raise corrupt(FORMAT, "not a shape", "shape", where, ascii(shape)[:80])
        if isinstance(name, Span):
            raw = bytes(self.data[name.start : min(name.stop, name.start + 40)])
            name = _OLD_NAMES.get(raw, raw.decode("latin-1"))
        name = _OLD_NAMES.get(name.encode(), name) if isinstance(name, str) else ""
        if not isinstance(span, Span):
            raise corrupt(FORMAT, "an array without bytes", "array", where)
        dtype = dtype_named(name)
        if dtype is not None and (dtype.is_variable or not dtype.bits):
            dtype = None
        size = dtype.itemsize if dtype is not None else 0
        if dtype is not None and numel(shape) * size != span.stop - span.start:
            found = f"{list(shape)[:8]} of {name} in {span.stop - span.start} bytes"
            raise corrupt(FORMAT, "bytes do not fit the shape", "array", where, found)
        return _Array(self.data, tuple(shape), name, dtype, span, self.where)

    def carry(self, value: Any, path: _Path) -> Any:
        """What stands in the tree for a value."""
        if isinstance(value, _Array):
            return self._carry_array([value], value.shape, path)
        if isinstance(value, _Unknown):
            self.skipped[_name(path) or "(root)"] = f"the unknown msgpack extension {value.code}"
            return None
        if isinstance(value, Span):
            return bytes(self.data[value.start : value.stop])
        if isinstance(value, list):
            if _PLAIN.issuperset(map(type, value)):
                return value
            return [self.carry(v, (path, at)) for at, v in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if _CHUNKED in value:
            return self._carry_chunked(value, path)
        return {
            key: v if type(v) in _PLAIN else self.carry(v, (path, key)) for key, v in value.items()
        }

    def _carry_array(self, parts: list[_Array], shape: tuple[int, ...], path: _Path) -> Any:
        dtype = parts[0].dtype
        if dtype is None:
            raise UnsupportedError(
                "a dtype that no checkpoint has",
                reason=f"{FORMAT}-dtype",
                where=f"{self.where}, {_name(path)[:200]}",
                found=ascii(parts[0].name)[:80],
                do="load it with Flax, and save plain arrays",
            )
        return _tensor(parts, shape, dtype)

    def _carry_chunked(self, value: dict[Any, Any], path: _Path) -> Any:
        where = f"{self.where}, {_name(path)[:200]}"
        shape = _positions(value.get("shape"), where)
        chunks = _positions(value.get("chunks"), where)
        if not all(type(n) is int and n >= 0 for n in shape) or len(shape) > _NDIM_MAX:
            raise corrupt(FORMAT, "not a shape", "shape", where)
        flat = all(isinstance(c, _Array) and len(c.shape) == 1 for c in chunks)
        if not chunks or not flat or len({c.name for c in chunks}) != 1:
            raise corrupt(FORMAT, "not the chunks of an array", "chunks", where)
        if sum(c.shape[0] for c in chunks) != numel(shape):
            raise corrupt(FORMAT, "chunks do not fit the shape", "chunks", where, list(shape)[:8])
        return self._carry_array(chunks, tuple(shape), path)


def _name(path: _Path) -> str:
    """The name of a path: made only where something is told about what lies there."""
    parts: list[str] = []
    while path is not None:
        path, key = path
        parts.append(escape_key(key) if type(key) is not int else str(key))
    return "/".join(reversed(parts))


def _positions(value: Any, where: str) -> list[Any]:
    """A tuple as Flax writes it: a dict of positions."""
    count = len(value) if isinstance(value, dict) else -1
    if count < 0 or not all(str(n) in value for n in range(count)):
        raise corrupt(FORMAT, "a chunked array without shape or chunks", "chunks", where)
    return [value[str(n)] for n in range(count)]


def _no_extension(code: int, start: int, stop: int) -> Any:
    raise corrupt(FORMAT, "an extension in an extension", "array", f"bytes [{start}:{stop})", code)


class _Unknown:
    """An extension that Flax does not write."""

    def __init__(self, code: int) -> None:
        self.code = code


@dataclass(frozen=True, slots=True)
class _Array:
    """An array where it lies. `dtype`: None for one that cannot be carried."""

    data: mmap.mmap
    shape: tuple[int, ...]
    name: str
    dtype: Dtype | None
    span: Span
    file: str

    @property
    def where(self) -> str:
        return f"{self.file}[{self.span.start}:{self.span.stop})"

    @property
    def nbytes(self) -> int:
        return self.span.stop - self.span.start

    def run(self, first: int, last: int) -> NDArray[Any]:
        """Elements as they follow one another."""
        assert self.dtype is not None
        size = self.dtype.itemsize
        start = self.span.start + first * size
        raw = view(self.data, start, (last - first) * size)
        if self.dtype.name == "bool":
            check_bools(raw, FORMAT, self.where)
        return native(raw, self.dtype, swapped=sys.byteorder == "big")

    def values(self) -> NDArray[Any]:
        return self.run(0, numel(self.shape)).reshape(self.shape)


def _tensor(parts: list[_Array], shape: tuple[int, ...], dtype: Dtype) -> ForeignTensor:
    bits = numel(shape) * dtype.bits
    run = partial(_joined, parts)
    return ForeignTensor(
        name="",
        foreign_name="",
        dtype=dtype.name,
        shape=shape,
        nbytes=-(-bits // 8),
        where=parts[0].where,
        fetch=lambda: run(0, numel(shape)).reshape(shape),
        must_check=dtype.name == "bool",
        box=box_of_runs(shape, run) if len(parts) > 1 else None,
    )


def _joined(parts: list[_Array], first: int, last: int) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0].run(first, last)
    ends = list(accumulate(part.shape[0] for part in parts))
    found = []
    for part, end in zip(parts, ends):
        begin = end - part.shape[0]
        low, high = max(first, begin), min(last, end)
        if low < high:
            found.append(part.run(low - begin, high - begin))
    return np.concatenate(found) if found else parts[0].run(0, 0)
