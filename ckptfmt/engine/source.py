"""Where a restore reads from: a checkpoint of a store, or any tree of arrays, seen the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from ckptfmt.engine.adapter import Box, StoredLeaf, TensorSource
from ckptfmt.engine.arrays import read_tensors
from ckptfmt.engine.box import assemble, chunks_of, settle, slices_of
from ckptfmt.engine.leaves import (
    attributes_by_row,
    containers_of,
    packed_values,
    parse_leaf_value,
)
from ckptfmt.engine.open import Checkpoint
from ckptfmt.engine.pipeline import Pipeline
from ckptfmt.engine.plan import dtype_of_source
from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.read import ChunkReader
from ckptfmt.engine.select import select_positions
from ckptfmt.engine.tree import ABSENT, FlatTree, flatten, unflatten
from ckptfmt.errors import UsageError
from ckptfmt.events import Progress
from ckptfmt.format import LEAF_PACKED, LEAF_TENSOR, LEAF_VALUE, pack_array, packed_nbytes
from ckptfmt.types import CheckpointInfo, Mode, Select

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
_SILENT: Progress = False


_NONE: Mapping[str, Any] = {}


class Source(Protocol):
    """Stored leaves, and the tensors' data on demand."""

    @property
    def info(self) -> CheckpointInfo | None: ...

    def leaves(self, names: Select | None) -> list[StoredLeaf]:
        """The selected leaves, in order. NotFoundError if a pattern matches nothing."""

    def nbytes(self, tensors: Sequence[int]) -> int: ...
    def tensors(
        self, rows: Sequence[int], *, mode: Mode, verify: bool, progress: Progress
    ) -> dict[int, Array]: ...
    def boxes(self, wanted: Sequence[tuple[int, Box]], *, verify: bool) -> list[Array]:
        """Boxes of tensors, in the order asked for; of each no more is read than its chunks."""

    def same(self, a: int, b: int) -> bool | None:
        """Whether two tensors are equal in dtype, shape and bytes; None: only reading would tell."""

    def containers(self) -> dict[str, tuple[str, bytes]]: ...
    def container_attributes(self) -> dict[str, dict[str, Any]]:
        """Container name -> its attributes, for containers that have any."""


class CheckpointSource:
    """A checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.info = checkpoint, checkpoint.info

    def leaves(self, names: Select | None) -> list[StoredLeaf]:
        checkpoint, tree = self.checkpoint, self.checkpoint.index.tree
        positions = select_positions(
            tree.leaf_names, names, f"{checkpoint.info.name} of {checkpoint.info.url}"
        )
        packed = [p for p in positions if tree.leaf_kinds[p] == LEAF_PACKED]
        values = packed_values(checkpoint.backend, checkpoint.index, packed) if packed else {}
        attributes = attributes_by_row(tree.leaf_attributes, tree.leaf_names)
        made = []
        # Lists: a million rows of columns, one by one, take longer than all the rest.
        names_list, all_rows, kinds = (
            tree.leaf_names,
            tree.leaf_rows.tolist(),
            tree.leaf_kinds.tolist(),
        )
        dtypes, dims, at = (
            tree.tensor_dtypes.tolist(),
            tree.tensor_dims.tolist(),
            tree.dims_starts.tolist(),
        )
        dtype_names = [dtype.name for dtype in tree.dtypes]
        for position in positions:
            name, row = names_list[position], all_rows[position]
            kind, extra = kinds[position], attributes.get(position, _NONE)
            if kind == LEAF_TENSOR:
                shape = tuple(dims[at[row] : at[row + 1]])
                made.append(StoredLeaf(name, dtype_names[dtypes[row]], shape, row, None, extra))
            else:
                value = (
                    parse_leaf_value(tree.values[row], name)
                    if kind == LEAF_VALUE
                    else values[position]
                )
                made.append(StoredLeaf(name, value=value, attributes=extra))
        return made

    def nbytes(self, tensors: Sequence[int]) -> int:
        rows = np.unique(np.asarray(tensors, np.int64))
        return int(self.checkpoint.index.tree.tensor_nbytes[rows].sum())

    def tensors(
        self, rows: Sequence[int], *, mode: Mode, verify: bool, progress: Progress
    ) -> dict[int, Array]:
        info = self.checkpoint.info
        with Reporter(
            progress, "restore", self.nbytes(rows), checkpoint=info.name, step=info.step
        ) as reporter:
            return read_tensors(
                self.checkpoint.backend,
                self.checkpoint.index,
                rows,
                mode=mode,
                verify=verify,
                reporter=reporter,
            )

    def boxes(self, wanted: Sequence[tuple[int, Box]], *, verify: bool) -> list[Array]:
        index = self.checkpoint.index
        boxes = [settle(index, row, slices_of(box), "") for row, box in wanted]
        rows = [chunks_of(index, box) for box in boxes]
        touched = [found for by_region in rows for found in by_region.values()]
        chunks: dict[int, NDArray[np.uint8]] = {}
        if touched:
            with Reporter(_SILENT, "restore", 0) as reporter:
                reader = ChunkReader(self.checkpoint.backend, index, verify=verify)
                chunks = reader.chunks(np.unique(np.concatenate(touched)), reporter)
        return [assemble(index, box, of, chunks) for box, of in zip(boxes, rows)]

    def same(self, a: int, b: int) -> bool | None:
        tree = self.checkpoint.index.tree
        if tree.dtype(a).name != tree.dtype(b).name or tree.shape(a) != tree.shape(b):
            return False
        one, other = self._pieces(a), self._pieces(b)
        # Digests tell only of equal cuts, of the boxes and of the chunks.
        return one[1] == other[1] if one[0] == other[0] else None

    def _pieces(self, tensor: int) -> tuple[object, bytes]:
        """How a tensor is cut, and the digests of its pieces."""
        tree = self.checkpoint.index.tree
        first, last = (int(x) for x in tree.tensor_region_starts[tensor : tensor + 2])
        at = tree.region_chunk_starts
        chunks = slice(int(at[first]), int(at[last]))
        boxes = tuple(tree.box(region) for region in range(first, last))
        counts = tuple((at[first + 1 : last + 1] - at[first:last]).tolist())
        cut = boxes, counts, tree.chunk_raw[chunks].tobytes()
        return cut, tree.chunk_digests[chunks].tobytes()

    def containers(self) -> dict[str, tuple[str, bytes]]:
        return containers_of(self.checkpoint.index)

    def container_attributes(self) -> dict[str, dict[str, Any]]:
        tree = self.checkpoint.index.tree
        found = attributes_by_row(tree.container_attributes, tree.container_names)
        return {tree.container_names[position]: made for position, made in found.items()}


class TreeSource:
    """A tree in memory: nested dicts and lists of arrays of any framework."""

    def __init__(self, tree: object) -> None:
        self.info: CheckpointInfo | None = None
        flat = getattr(tree, "flat", None)
        if isinstance(flat, FlatTree):
            self._flat = flat  # what open_foreign gives: flattened already
        elif isinstance(tree, Mapping) and not isinstance(tree, dict):
            # A mapping of leaf names: they are taken as they are.
            self._flat = _flat_of(tree)
        else:
            self._flat = flatten(tree)

    def leaves(self, names: Select | None) -> list[StoredLeaf]:
        flat, made = self._flat, []
        attributes = self._attributes(flat.attributes, flat.names)
        for position in select_positions(flat.names, names, "the source tree"):
            name, row = flat.names[position], flat.rows[position]
            if flat.kinds[position] == LEAF_TENSOR:
                source = flat.tensors[row]
                shape, extra = tuple(source.shape), attributes.get(position, {})
                made.append(StoredLeaf(name, source.dtype, shape, row, None, extra))
            else:
                made.append(StoredLeaf(name, value=self.value(position)))
        return made

    def tensor_leaves(self) -> list[tuple[StoredLeaf, TensorSource]]:
        """The tensors, with where they come from."""
        rows = [(leaf, leaf.tensor) for leaf in self.leaves(None) if leaf.dtype]
        return [(leaf, self._flat.tensors[row]) for leaf, row in rows]

    def nbytes(self, tensors: Sequence[int]) -> int:
        sources = [self._flat.tensors[row] for row in set(tensors)]
        return sum(packed_nbytes(dtype_of_source(s), math.prod(s.shape)) for s in sources)

    def tensors(
        self, rows: Sequence[int], *, mode: Mode, verify: bool, progress: Progress
    ) -> dict[int, Array]:
        return {row: np.array(self._flat.tensors[row].fetch()) for row in set(rows)}

    def boxes(self, wanted: Sequence[tuple[int, Box]], *, verify: bool) -> list[Array]:
        return [np.array(self._flat.tensors[row].fetch()[slices_of(box)]) for row, box in wanted]

    def same(self, a: int, b: int) -> bool | None:
        one, other = self._flat.tensors[a], self._flat.tensors[b]
        if one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
            return False
        return bytes(pack_array(one.fetch())) == bytes(pack_array(other.fetch()))

    def load(self, names: Select | None = None) -> Any:
        """The tree, or the selected part, with arrays of its own; a tie is one array."""
        flat = self._flat
        every: list[Any] = [ABSENT] * len(flat.names)
        arrays: dict[int, Array] = {}
        for position in select_positions(flat.names, names, "the source tree"):
            row = flat.rows[position]
            if flat.kinds[position] == LEAF_TENSOR:
                if row not in arrays:
                    arrays[row] = np.array(flat.tensors[row].fetch())
                every[position] = arrays[row]
            else:
                every[position] = self.value(position)
        return unflatten(flat.names, every, self.containers(), partial=names is not None)

    def value(self, position: int) -> Any:
        """The plain value that a leaf is."""
        flat = self._flat
        name, row = flat.names[position], flat.rows[position]
        if flat.kinds[position] == LEAF_VALUE:
            return parse_leaf_value(flat.values[row], name)
        return parse_leaf_value(flat.tensors[row].fetch().tobytes(), name)

    def containers(self) -> dict[str, tuple[str, bytes]]:
        return {name: (kind, argument) for name, kind, argument in self._flat.containers}

    def container_attributes(self) -> dict[str, dict[str, Any]]:
        names = [name for name, _, _ in self._flat.containers]
        found = self._attributes(self._flat.container_attributes, names)
        return {names[position]: made for position, made in found.items()}

    def _attributes(
        self, table: Mapping[str, Sequence[tuple[int, bytes]]], names: Sequence[str]
    ) -> dict[int, dict[str, Any]]:
        made: dict[int, dict[str, Any]] = {}
        for key, rows in table.items():
            for position, value in rows:
                made.setdefault(position, {})[key] = parse_leaf_value(value, names[position])
        return made


def _flat_of(mapping: Mapping[str, Any]) -> FlatTree:
    made = FlatTree()
    for name in mapping:
        leaf = flatten(mapping[name])
        if leaf.names != [""]:
            raise UsageError(
                "a mapping of leaf names holds a container",
                reason="source",
                where=repr(name),
                do="pass a nested dict instead",
            )
        made.names.append(name)
        made.kinds += leaf.kinds
        made.rows.append(len(made.values) if leaf.kinds[0] == LEAF_VALUE else len(made.tensors))
        made.values += leaf.values
        made.tensors.extend(leaf.tensors)
    return made


GROUP_NBYTES = 64 << 20
"""Tensors that are read together where memory is bounded."""


def grouped(rows: Sequence[int], nbytes_of: Any) -> list[list[int]]:
    """Neighbours together, up to `GROUP_NBYTES`; what is larger alone."""
    groups: list[list[int]] = []
    nbytes = GROUP_NBYTES
    for row in rows:
        size = int(nbytes_of[row])
        if not groups or nbytes + size > GROUP_NBYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(row)
        nbytes += size
    return groups


class BoxesOnDemand(Mapping[str, list[Array]]):
    """The boxes that are taken of a source's tensors, read when they are asked for; none is kept."""

    def __init__(
        self, source: Source, wanted: Mapping[str, list[tuple[int, Box]]], *, verify: bool
    ) -> None:
        self._source, self._wanted, self._verify = source, wanted, verify

    def __getitem__(self, name: str) -> list[Array]:
        return self._source.boxes(self._wanted[name], verify=self._verify)

    def __len__(self) -> int:
        return len(self._wanted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def read(self) -> dict[str, list[Array]]:
        """All of them, their requests joined."""
        flat = [one for boxes in self._wanted.values() for one in boxes]
        arrays = iter(self._source.boxes(flat, verify=self._verify))
        return {name: [next(arrays) for _ in boxes] for name, boxes in self._wanted.items()}


class _Ahead:
    """A group that is read while the one before it is bound."""

    def __init__(self, group: int, read: Callable[[], dict[int, Array]]) -> None:
        self.group = group
        self._made: list[dict[int, Array]] = []
        self._thread = Pipeline(1)
        self._thread.submit(lambda: self._made.append(read()), 0)

    def take(self) -> dict[int, Array]:
        with self._thread:
            self._thread.drain()
        return self._made.pop()

    def drop(self) -> None:
        """Wait for it; nobody asks what became of it."""
        with self._thread:
            self._thread.wait()


class GroupedArrays(Mapping[int, Array]):
    """A source's tensors, read in groups of neighbours when the first of a group is asked for.

    One group is held, and of a checkpoint the next one is read meanwhile, unless one of the two is a
    larger tensor: it is alone in memory. `given` counts what was handed out. A context manager:
    leaving it ends that read.
    """

    def __init__(
        self, source: Source, rows: Sequence[int], *, verify: bool, progress: Progress
    ) -> None:
        self._source, self._verify, self._progress = source, verify, progress
        nbytes = {row: source.nbytes([row]) for row in rows}
        self.groups = grouped(rows, nbytes)
        sizes = [sum(map(nbytes.__getitem__, group)) for group in self.groups]
        is_stored = isinstance(source, CheckpointSource)
        self._may_go_on = [is_stored and max(two) <= GROUP_NBYTES for two in pairwise(sizes)]
        self._group_of = {row: at for at, group in enumerate(self.groups) for row in group}
        self._held: dict[int, Array] = {}
        self._current = -1
        self._ahead: _Ahead | None = None
        self.given = 0

    def read(self, group: Sequence[int]) -> dict[int, Array]:
        """A group's tensors; nothing of it is kept."""
        return self._source.tensors(
            group, mode="auto", verify=self._verify, progress=self._progress
        )

    def __getitem__(self, row: int) -> Array:
        group = self._group_of[row]
        if group != self._current:
            in_order = group == self._current + 1
            self._held, self._current = {}, -1  # before the next is read
            self._held, self._current = self._take(group), group
            if in_order and any(self._may_go_on[group : group + 1]):
                read = partial(self.read, self.groups[group + 1])
                self._ahead = _Ahead(group + 1, read)
        self.given += 1
        return self._held[row]

    def _take(self, group: int) -> dict[int, Array]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.group == group:
            return ahead.take()
        if ahead is not None:
            ahead.drop()
        return self.read(self.groups[group])

    def __enter__(self) -> GroupedArrays:
        return self

    def __exit__(self, *error: object) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.drop()

    def __len__(self) -> int:
        return len(self._group_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._group_of)
