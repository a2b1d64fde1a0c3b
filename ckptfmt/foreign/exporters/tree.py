"""What is exported: the leaves of a checkpoint or of a foreign file, their values in pieces.

Values are digested as they are read, so that the file that was written can be compared with what the
source held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine import (
    Checkpoint,
    CheckpointSource,
    Pipeline,
    StoredLeaf,
    TreeSource,
    build_tree,
)
from ckptfmt.errors import NotFoundError
from ckptfmt.format import Hasher, dtype_named, hasher, numpy_dtype, pack_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.base import ForeignTensor
    from ckptfmt.foreign.opening import ForeignCheckpoint

Array: TypeAlias = "NDArray[Any]"
Piece: TypeAlias = tuple["NDArray[Any]", bytes]
"""Values, and their digest."""
PIECE_NBYTES = 32 << 20
"""A tensor above this is read in pieces; memory is a few of them."""
_READ_AHEAD = 2
"""Threads that read; twice as many pieces wait."""


@dataclass(slots=True, eq=False)
class ExportTensor:
    """A tensor, whatever number of names it has.

    Attributes:
        names: Of the leaves that are this tensor, the first one first.
        row: Its number in the source.
        dtype: Name in our format.
        attributes: Of the first leaf.
        array: Its values, if it is none of the source's: a plain value as a tensor.
        digests: Of its values, piece by piece, once they have been handed out.
    """

    names: list[str]
    row: int
    dtype: str
    shape: tuple[int, ...]
    attributes: Mapping[str, object]
    array: Array | None = None
    digests: list[bytes] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Of the pieces; that of an unknown dtype is void."""
        known = dtype_named(self.dtype)
        return np.dtype("V1") if known is None else numpy_dtype(known)

    @property
    def is_variable(self) -> bool:
        """Text or bytes of any length: no fixed size."""
        return self.dtype in ("string", "bytes")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of its pieces together: types under 8 bits take a byte an element. 0 if it is variable."""
        return 0 if self.is_variable else self.size * self.numpy_dtype.itemsize


@dataclass(slots=True)
class ExportTree:
    """All that is to be exported.

    Attributes:
        leaves: Name -> tensor, or the plain value in a `Value`, in the order of the tree.
        tensors: Each once, by first use.
        containers: Name -> (kind, packed argument), for inner nodes that are no plain dict.
        container_attributes: Name -> attributes of a container.
        metadata, metrics, step: The checkpoint's.
        title: What the source is called in messages.
        root: The container whose content this is; "" for all.
    """

    leaves: dict[str, ExportTensor | Value]
    tensors: list[ExportTensor]
    containers: dict[str, tuple[str, bytes]]
    container_attributes: dict[str, dict[str, Any]]
    metadata: Mapping[str, object]
    title: str
    root: str
    _open: Callable[[Sequence[ExportTensor]], Iterator[Iterator[Piece]]]
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    _advance: Callable[[int], None] = field(default=lambda nbytes: None)

    def on_progress(self, advance: Callable[[int], None]) -> None:
        """Tell `advance` how many bytes were handed out."""
        self._advance = advance

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def read(
        self, tensors: Sequence[ExportTensor]
    ) -> Iterator[tuple[ExportTensor, Iterator[Array]]]:
        """The tensors in this order, each with its values: boxes in C order, which are to be taken
        before the next tensor is asked for."""
        opened = self._open([tensor for tensor in tensors if tensor.array is None])
        for tensor in tensors:
            pieces = next(opened) if tensor.array is None else iter([digested(tensor.array)])
            yield tensor, self._counted(tensor, pieces)

    def _counted(self, tensor: ExportTensor, pieces: Iterator[Piece]) -> Iterator[Array]:
        tensor.digests = []
        for piece, digest in pieces:
            tensor.digests.append(digest)
            yield piece
            self._advance(piece.nbytes)

    def nested(
        self,
        leaf: Callable[[str, ExportTensor | Value], Any],
        makers: Mapping[str, Callable[[Any], Any]],
    ) -> Any:
        """The nested tree, with `leaf(name, ...)` for each leaf. `makers`: container -> what makes
        one object of it."""
        made = [leaf(name, item) for name, item in self.leaves.items()]
        rows = [(name, kind, argument) for name, (kind, argument) in self.containers.items()]
        return build_tree(
            list(self.leaves), made, rows, partial=True, makers=makers, registered=False
        )


@dataclass(frozen=True, slots=True)
class Value:
    """A leaf that is a plain value."""

    value: Any


def new_digest() -> Hasher:
    return hasher("xxh3-128")


def digested(piece: Array) -> Piece:
    """A piece with the digest of its values."""
    digest = new_digest()
    if piece.dtype.kind in "OT":
        digest.update(pack_array(piece))
    elif piece.dtype.name in ("int2", "int4"):
        # By value: above the bits that count, a writer may have their sign or zeros.
        digest.update(raw_bytes(piece.astype(np.int8)))
    else:
        digest.update(raw_bytes(piece))
    return piece, digest.digest()


def raw_bytes(piece: Array) -> NDArray[np.uint8]:
    """The bytes of values as they lie in memory in C order; no copy where they lie so."""
    if not piece.nbytes:  # also of a width of zero, which has no view as bytes
        return np.empty(0, np.uint8)
    flat = np.ascontiguousarray(piece).reshape(-1)
    if flat.dtype.byteorder == ">":
        flat = flat.astype(flat.dtype.newbyteorder("<"))
    return flat.view(np.ndarray).view(np.uint8)


def packed_halves(pieces: Iterable[Array]) -> Iterator[NDArray[np.uint8]]:
    """Elements of 4 bits, an even number of them: two a byte, the first in the low bits."""
    rest = np.empty(0, np.uint8)
    for piece in pieces:
        raw = np.concatenate([rest, raw_bytes(piece)]) if rest.size else raw_bytes(piece)
        even = raw.size - raw.size % 2
        rest = raw[even:]
        yield np.bitwise_or(raw[:even:2] & 0xF, raw[1:even:2] << 4, dtype=np.uint8)


def foreign_pieces(tensor: ForeignTensor) -> Iterator[Array]:
    """The values in boxes; of a view of the file these are views, too."""
    known = dtype_named(tensor.dtype)
    nbytes = 0 if known is None else math.prod(tensor.shape) * known.itemsize
    if tensor.box is not None and known is not None and nbytes > PIECE_NBYTES:
        for box in boxes(tensor.shape, known.itemsize):
            yield tensor.box(box)
        return
    array = tensor.fetch()
    if array.dtype.kind in "OT" or array.nbytes <= PIECE_NBYTES:
        yield array
        return
    for box in boxes(array.shape, array.dtype.itemsize):
        yield array[box]


def boxes(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Boxes in C order, each a run of elements of at most about `PIECE_NBYTES`."""
    axis, inner = 0, math.prod(shape) * itemsize
    while axis < len(shape) and inner > PIECE_NBYTES:
        inner //= shape[axis]
        axis += 1
    if axis == 0:
        yield tuple(slice(0, n) for n in shape)
        return
    rows = max(1, PIECE_NBYTES // inner)
    tail = tuple(slice(0, n) for n in shape[axis:])
    for outer in np.ndindex(*shape[: axis - 1]):
        head = tuple(slice(i, i + 1) for i in outer)
        for start in range(0, shape[axis - 1], rows):
            yield (*head, slice(start, min(start + rows, shape[axis - 1])), *tail)


@dataclass(frozen=True, slots=True)
class _Task:
    """What is read at once: a box of a tensor, or neighbours that are small."""

    tensors: Sequence[ExportTensor]
    box: tuple[slice, ...] | None = None


def _tasks(tensors: Sequence[ExportTensor]) -> list[_Task]:
    tasks: list[_Task] = []
    small: list[ExportTensor] = []
    nbytes = 0
    for tensor in tensors:
        large = tensor.nbytes > PIECE_NBYTES
        if small and (large or nbytes + tensor.nbytes > PIECE_NBYTES):
            tasks.append(_Task(small))
            small, nbytes = [], 0
        if large:
            tasks += [_Task([tensor], box) for box in boxes(tensor.shape, _itemsize(tensor))]
        else:
            small.append(tensor)
            nbytes += tensor.nbytes
    return [*tasks, _Task(small)] if small else tasks


def _itemsize(tensor: ExportTensor) -> int:
    return tensor.numpy_dtype.itemsize


def _count(tensor: ExportTensor) -> int:
    """In how many pieces a tensor is read."""
    return sum(1 for _ in boxes(tensor.shape, _itemsize(tensor))) if tensor.nbytes else 1


def tree_of_checkpoint(checkpoint: Checkpoint, root: str) -> ExportTree:
    """The leaves of a checkpoint; every byte of them is checked when it is read."""
    source = CheckpointSource(checkpoint)

    def read(task: _Task) -> list[Piece]:
        return [digested(piece) for piece in values(task)]

    def values(task: _Task) -> list[Array]:
        if task.box is None:
            rows = [tensor.row for tensor in task.tensors]
            found = source.tensors(rows, mode="auto", verify=True, progress=False)
            return [found[row] for row in rows]
        origin = tuple(side.start for side in task.box)
        extent = tuple(side.stop - side.start for side in task.box)
        return source.boxes([(task.tensors[0].row, (origin, extent))], verify=True)

    def open_(tensors: Sequence[ExportTensor]) -> Iterator[Iterator[Piece]]:
        tasks = _tasks(tensors)
        # A few tasks are read ahead, while the pieces before them are written.
        with Pipeline(_READ_AHEAD) as threads:
            pieces = chain.from_iterable(threads.map(read, tasks))
            for tensor in tensors:
                yield islice(pieces, _count(tensor))

    info = checkpoint.info
    return _made(
        source.leaves(None),
        source.containers(),
        source.container_attributes(),
        root=root,
        about=(f"{info.name} of {info.url}", info.metadata, info.metrics, info.step),
        open_=open_,
    )


def tree_of_foreign(foreign: ForeignCheckpoint, root: str) -> ExportTree:
    """The leaves of a foreign file."""
    source = TreeSource(foreign)
    by_row = {leaf.tensor: found for leaf, found in source.tensor_leaves()}
    of = foreign.foreign

    def open_(tensors: Sequence[ExportTensor]) -> Iterator[Iterator[Piece]]:
        for tensor in tensors:
            found: ForeignTensor = by_row[tensor.row].keep  # type: ignore[assignment]
            yield map(digested, foreign_pieces(found))

    return _made(
        source.leaves(None),
        source.containers(),
        source.container_attributes(),
        root=root,
        about=(foreign.path, of.metadata, of.metrics, of.step),
        open_=open_,
    )


def _made(
    leaves: list[StoredLeaf],
    containers: Mapping[str, tuple[str, bytes]],
    container_attributes: Mapping[str, dict[str, Any]],
    *,
    root: str,
    about: tuple[str, Mapping[str, object], Mapping[str, float], int | None],
    open_: Callable[[Sequence[ExportTensor]], Iterator[Iterator[Piece]]],
) -> ExportTree:
    prefix = f"{root}/" if root else ""
    title, metadata, metrics, step = about
    below = [
        replace(leaf, name=leaf.name[len(prefix) :])
        for leaf in leaves
        if leaf.name.startswith(prefix)
    ]
    if not below:
        raise NotFoundError(
            "no container of this name",
            reason="name",
            where=title,
            expected=repr(root),
            do="root= names a dict or list of the checkpoint, whose content is exported",
        )
    by_row: dict[int, ExportTensor] = {}
    made: dict[str, ExportTensor | Value] = {}
    for leaf in below:
        if not leaf.dtype:
            made[leaf.name] = Value(leaf.value)
            continue
        tensor = by_row.get(leaf.tensor)
        if tensor is None:
            tensor = by_row[leaf.tensor] = ExportTensor(
                [], leaf.tensor, leaf.dtype, tuple(leaf.shape), leaf.attributes
            )
        tensor.names.append(leaf.name)
        made[leaf.name] = tensor
    there = {"", *(name[:i] for name in made for i, c in enumerate(name) if c == "/")}

    def relative(table: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, row in table.items():
            inner = "" if name == root else name[len(prefix) :]
            if (name == root or name.startswith(prefix)) and inner in there:
                found[inner] = row
        return found

    return ExportTree(
        made,
        list(by_row.values()),
        relative(containers),
        relative(container_attributes),
        metadata,
        title,
        root,
        open_,
        metrics,
        step,
    )
