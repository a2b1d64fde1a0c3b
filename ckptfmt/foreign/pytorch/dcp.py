"""Directories of `torch.distributed.checkpoint`: each item is a file of `torch.save` within a file.

Shards are put together, whoever held them. Values are read when the directory is opened, tensors
when they are asked for.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.base import (
    ForeignTensor,
    ForeignTree,
    Importer,
    like,
    open_regular,
    tree_of,
)
from ckptfmt.foreign.mapping import check_apart, corrupt, map_file
from ckptfmt.foreign.pickle_machine import PICKLE_NBYTES_MAX
from ckptfmt.foreign.pickle_tree import OMIT
from ckptfmt.foreign.pieces import check_coverage, gather
from ckptfmt.foreign.pytorch.dcp_metadata import FORM, Items, Place, TensorItem, parse_metadata
from ckptfmt.foreign.pytorch.dtypes import X2, TorchDtype
from ckptfmt.foreign.pytorch.reading import tree_maker
from ckptfmt.foreign.pytorch.tensors import Strided, bits_of, numpy_of
from ckptfmt.foreign.pytorch.zipped import TorchArchive, read_object
from ckptfmt.foreign.shards import check_inside
from ckptfmt.foreign.streaming import STREAMED_NBYTES_MIN, BoxReader
from ckptfmt.foreign.tree_record import with_record
from ckptfmt.foreign.zip_archive import MAGIC as ZIP_MAGIC
from ckptfmt.foreign.zip_archive import ZipArchive

if TYPE_CHECKING:
    from numpy.typing import NDArray

METADATA = ".metadata"
_PICKLE_MAGIC = b"\x80"
_DEPTH_MAX = 90


class DcpImporter(Importer):
    """Row `dcp` of IMPORTERS."""

    def detect(self, path: str) -> bool:
        file = _metadata_path(path)
        if file is None or not os.path.isfile(file):
            return False
        try:
            with open(file, "rb") as opened:
                return opened.read(1) == _PICKLE_MAGIC
        except OSError:
            return False

    def read(self, path: str) -> ForeignTree:
        file = _metadata_path(path) or os.path.join(path, METADATA)
        descriptor, nbytes = open_regular(os.path.realpath(file), file)
        try:
            if nbytes > PICKLE_NBYTES_MAX:
                raise corrupt(FORM, "the metadata is too long", "limit", file, f"{nbytes} bytes")
            data = os.read(descriptor, nbytes)
        finally:
            os.close(descriptor)
        return _Reader(os.path.dirname(file) or ".", parse_metadata(data, METADATA)).tree()


def _metadata_path(path: str) -> str | None:
    """The metadata of a directory, or of a path to it."""
    if os.path.isdir(path):
        return os.path.join(path, METADATA)
    return path if os.path.basename(path) == METADATA else None


class _Reader:
    """Reads one directory."""

    def __init__(self, folder: str, items: Items) -> None:
        self._folder, self._items = folder, items
        self._files: dict[str, tuple[mmap.mmap, int]] = {}
        self._skipped: dict[str, str] = {}
        self._ignored: dict[str, str] = {}
        self._opaque: dict[str, str] = {}

    def tree(self) -> ForeignTree:
        self._check_places()
        if self._items.record is not None:
            return self._described(self._items.record)
        made: dict[tuple[str | int, ...], Any] = {}
        for name, item in self._items.tensors.items():
            path = self._items.paths.get(name, (name,))
            if self._is_carried(name, item):
                made[path] = self._tensor(name, item)
        for name, place in self._items.values.items():
            value = self._value(name, place)
            if value is not OMIT:
                made[self._items.paths.get(name, (name,))] = value
        return tree_of(
            _nested(made),
            FORM,
            skipped=self._skipped,
            ignored=self._ignored,
            opaque=self._opaque,
        )

    def _described(self, record: str) -> ForeignTree:
        """The tree as an export of ours describes it; it tells the values, too."""
        tensors = {
            name: like(self._tensor(name, item), name=name, foreign_name=name)
            for name, item in self._items.tensors.items()
            if self._is_carried(name, item)
        }
        return with_record(ForeignTree(FORM, tensors, skipped=self._skipped), METADATA, record)

    def _is_carried(self, name: str, item: TensorItem) -> bool:
        carried = item.dtype.packed == 1 or item.dtype.name == X2
        if not carried:
            self._skipped[name] = f"{item.dtype.name} in shards, several elements a byte"
        return carried

    def _check_places(self) -> None:
        """Every item lies in its file, and no two overlap."""
        spans: dict[str, list[tuple[int, int, str]]] = {}
        places = [(name, place) for name, place in self._items.values.items()]
        for name, item in self._items.tensors.items():
            places += [(name, chunk.place) for chunk in item.chunks]
        for name, place in places:
            data, nbytes = self._file(place.file)
            if place.stop > nbytes:
                at = f"{place.file}[{place.start}:{place.stop}), {ascii(name)[:200]}"
                what = "an item ends behind its file (truncated?)"
                raise corrupt(FORM, what, "truncated", at, f"{nbytes} bytes")
            if data[place.start : place.start + len(ZIP_MAGIC)] != ZIP_MAGIC:
                raise UnsupportedError(
                    "an item that torch.save did not write",
                    reason=f"{FORM}-item",
                    where=f"{place.file}[{place.start}:{place.stop}), {ascii(name)[:200]}",
                    do="save with the serialization format torch_save",
                )
            spans.setdefault(place.file, []).append((place.start, place.stop, name))
        for file, found in spans.items():
            check_apart(found, FORM, file)

    def _file(self, name: str) -> tuple[mmap.mmap, int]:
        if name not in self._files:
            path = check_inside(self._folder, name, where=METADATA)
            self._files[name] = map_file(path, name, FORM)
        return self._files[name]

    def _archive(self, place: Place) -> TorchArchive:
        where = f"{place.file}[{place.start}:{place.stop})"
        data, _ = self._file(place.file)
        return TorchArchive(ZipArchive.within(data, (place.start, place.stop), where, FORM))

    def _value(self, name: str, place: Place) -> Any:
        """A plain value; what is not carried of it is noted."""
        archive = self._archive(place)
        machine, obj, nbytes = read_object(archive)
        maker = tree_maker(machine, archive.where, nbytes)
        value = maker.make(obj)
        for notes, found in (
            (self._skipped, maker.skipped),
            (self._ignored, maker.ignored),
            (self._opaque, maker.opaque),
        ):
            notes |= {f"{name}/{key}" if key else name: reason for key, reason in found.items()}
        return value

    def _tensor(self, name: str, item: TensorItem) -> ForeignTensor:
        if item.dtype.name == X2:
            item = _in_elements(item)
        total = math.prod(item.shape)
        pieces = [_Piece(self, chunk.place, chunk.box, item, name) for chunk in item.chunks]
        filled = [piece for piece in pieces if piece.numel]
        boxes = [piece.box for piece in filled]
        where = f"{METADATA}, {ascii(name)[:200]}"
        if check_coverage(item.shape, boxes, FORM, where):
            raise corrupt(FORM, "two chunks of a tensor overlap", "overlap", where)
        box: BoxReader | None = None
        if len(filled) > 1:
            box = partial(gather, [(piece.box, piece.read) for piece in filled])
        elif filled and total * item.dtype.itemsize >= STREAMED_NBYTES_MIN:
            box = filled[0].tensor().box
        whole = tuple(slice(0, n) for n in item.shape)
        return ForeignTensor(
            name="",
            foreign_name="",
            dtype=item.dtype.stored,
            shape=item.shape,
            nbytes=-(-total * bits_of(item.dtype) // 8),
            where=filled[0].where if filled else where,
            fetch=partial(_fetch, filled, box, whole, item.dtype),
            must_check=item.dtype.stored == "bool",
            attributes={
                **item.dtype.attributes,
                **({"torch.requires_grad": True} if item.requires_grad else {}),
            },
            box=box,
        )


def _in_elements(item: TensorItem) -> TensorItem:
    """Of a dtype with two elements a byte, in elements: twice as many along the last axis."""
    if not item.shape:
        raise corrupt(FORM, "two elements a byte without an axis", "shape", METADATA)

    def doubled(side: slice) -> slice:
        return slice(2 * side.start, 2 * side.stop)

    chunks = (replace(c, box=(*c.box[:-1], doubled(c.box[-1]))) for c in item.chunks)
    return replace(item, shape=(*item.shape[:-1], 2 * item.shape[-1]), chunks=tuple(chunks))


def _fetch(
    pieces: list[_Piece], box: BoxReader | None, whole: tuple[slice, ...], dtype: TorchDtype
) -> NDArray[Any]:
    import numpy as np

    if not pieces:
        return np.empty([side.stop for side in whole], numpy_of(dtype.stored))
    return pieces[0].tensor().fetch() if box is None or len(pieces) == 1 else box(whole)


class _Piece:
    """A box of a tensor, which is an item of its own; opened when it is first asked for."""

    def __init__(
        self, reader: _Reader, place: Place, box: tuple[slice, ...], item: TensorItem, name: str
    ) -> None:
        self._reader, self._place, self.box, self._item = reader, place, box, item
        self._name = name
        self._tensor: ForeignTensor | None = None
        self.shape = tuple(side.stop - side.start for side in box)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def where(self) -> str:
        return f"{self._place.file}[{self._place.start}:{self._place.stop})"

    def tensor(self) -> ForeignTensor:
        """The item's tensor, which is what the metadata says."""
        if self._tensor is None:
            _, obj, _ = read_object(self._reader._archive(self._place))
            at = f"{self.where}, {ascii(self._name)[:200]}"
            if not isinstance(obj, Strided):
                raise corrupt(FORM, "an item that is no tensor", "item", at, type(obj).__name__)
            found = obj.tensor()
            if (found.shape, found.dtype) != (self.shape, self._item.dtype.stored):
                what = "a chunk of another dtype or shape"
                raise corrupt(FORM, what, "item", at, (found.dtype, found.shape))
            self._tensor = found
        return self._tensor

    def read(self, sides: tuple[slice, ...]) -> NDArray[Any]:
        tensor = self.tensor()
        return tensor.fetch()[sides] if tensor.box is None else tensor.box(sides)


def _nested(items: dict[tuple[str | int, ...], Any]) -> Any:
    """The tree of paths: keys make dicts, positions lists where none is missing."""
    root: dict[str | int, Any] = {}
    for path, value in items.items():
        node = root
        if len(path) > _DEPTH_MAX:
            raise corrupt(FORM, "nested too deep", "depth", METADATA, len(path))
        for key in path[:-1]:
            inner = node.setdefault(key, _Level())
            if type(inner) is not _Level:
                raise corrupt(FORM, "an item below another", "metadata", METADATA, path[:8])
            node = inner
        if path[-1] in node:
            raise corrupt(FORM, "two items of one path", "metadata", METADATA, path[:8])
        node[path[-1]] = value
    return _settled(root)


class _Level(dict[str | int, Any]):
    """A level of the tree that is being made."""


def _settled(level: dict[str | int, Any]) -> Any:
    made = {k: _settled(v) if type(v) is _Level else v for k, v in level.items()}
    if made and all(type(key) is int for key in made) and set(made) == set(range(len(made))):
        return [made[at] for at in range(len(made))]
    return made
