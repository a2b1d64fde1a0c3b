"""The tensors of a bundle, each made when it is asked for: there may be tens of thousands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.bundle.index import BundleIndex
from ckptfmt.foreign.bundle.names import Names
from ckptfmt.foreign.bundle.slices import Pieces, join, join_box, parse_pieces
from ckptfmt.foreign.bundle.types import BOOL, QUANTIZED, STRING, TYPES, Entry
from ckptfmt.foreign.bundle.values import DataFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.streaming import BoxReader


class BundleTensors(Mapping[str, ForeignTensor]):
    """Tensors by name.

    Args:
        rows: Key in the file -> row of the index, for those that are carried.
    """

    def __init__(
        self, index: BundleIndex, files: DataFiles, rows: Mapping[str, int], named: Names
    ) -> None:
        self.index, self.files, self.named = index, files, named
        self.pieces = {
            row: parse_pieces(index, key, index.sliced[row], f"tensor {ascii(key)[:200]}")
            for key, row in rows.items()
            if row in index.sliced
        }
        self._rows = rows
        self._foreign = {name: key for key, name in named.names.items()}

    def __len__(self) -> int:
        return len(self._foreign)

    def __iter__(self) -> Iterator[str]:
        return iter(self._foreign)

    def __contains__(self, name: object) -> bool:
        return name in self._foreign

    def __getitem__(self, name: str) -> ForeignTensor:
        key = self._foreign[name]
        return _BundleTensor(name, key, self, self._rows[key])


class _BundleTensor(ForeignTensor):
    """A tensor whose attributes are looked up when they are asked for.

    To list 50,000 tensors takes half as long as with those of the base class, filled.
    """

    __slots__ = ("_all", "_row")
    _all: BundleTensors
    _row: int

    def __init__(self, name: str, key: str, every: BundleTensors, row: int) -> None:
        put = object.__setattr__  # frozen, as the base class is
        put(self, "name", name)
        put(self, "foreign_name", key)
        put(self, "_all", every)
        put(self, "_row", row)

    @property
    def _entry(self) -> Entry:
        return self._all.index.entry(self._row)

    @property
    def _pieces(self) -> Pieces | None:
        return self._all.pieces.get(self._row)

    @property
    def dtype(self) -> str:
        return TYPES[self._all.index.columns.types.item(self._row)].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._all.index.columns.shape(self._row)

    @property
    def nbytes(self) -> int:
        pieces = self._pieces
        return self._all.index.columns.nbytes.item(self._row) if pieces is None else pieces.nbytes

    @property
    def where(self) -> str:
        pieces, files = self._pieces, self._all.files
        return files.where(self._entry) if pieces is None else pieces.where(files)

    @property
    def fetch(self) -> Callable[[], NDArray[Any]]:
        pieces, files = self._pieces, self._all.files
        if pieces is None:
            return partial(files.fetch, self._entry, self.foreign_name)
        return partial(join, files, pieces, self.foreign_name)

    @property
    def box(self) -> BoxReader | None:
        """Where values are joined or swapped; slices that overlap are compared, which takes all."""
        pieces, files = self._pieces, self._all.files
        kind = self._all.index.columns.types.item(self._row)
        if kind == STRING:
            return None
        if pieces is None:
            if not (files.big_endian and TYPES[kind].nbytes > 1):
                return None
            return partial(files.fetch_box, self._entry, self.foreign_name)
        return None if pieces.overlap else partial(join_box, files, pieces, self.foreign_name)

    @property
    def must_check(self) -> bool:
        pieces = self._pieces
        return self._entry.type == BOOL or (pieces is not None and pieces.overlap)

    @property
    def identity(self) -> None:
        return None

    @property
    def attributes(self) -> Mapping[str, object]:
        made = self._all.named.attributes(self.foreign_name)
        kind = self._all.index.columns.types.item(self._row)
        if kind in QUANTIZED:
            made["tf.dtype"] = TYPES[kind].name
        return made


class NameKeys(Mapping[str, tuple[str, ...]]):
    """Name -> the dict keys that lead to it."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> tuple[str, ...]:
        from ckptfmt.format import parse_key, split_name

        return tuple(str(parse_key(part)) for part in split_name(name))
