"""open: store, step -> a lazy checkpoint: its index is read, its data is not. Spec: 02, 07."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.arrays import read_tensors
from ckptfmt.engine.box import Box, assemble, chunks_of, refuse, settle
from ckptfmt.engine.catalog import (
    Listed,
    find,
    info_of,
    latest_order,
    list_checkpoints,
    list_notes,
    names_text,
    newest,
    newest_readable,
    nothing_there,
    read_index,
    read_notes,
    warn_skipped,
)
from ckptfmt.engine.leaves import nest, packed_values, parse_leaf_value
from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.read import ChunkReader
from ckptfmt.engine.select import Matcher, nearest
from ckptfmt.errors import (
    CorruptError,
    FormatError,
    MissingExtraError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from ckptfmt.events import Progress
from ckptfmt.format import LEAF_TENSOR, LEAF_VALUE, digest, numpy_dtype
from ckptfmt.format import Index as Document
from ckptfmt.reports import VerifyReport
from ckptfmt.storage import Backend
from ckptfmt.types import At, CheckpointInfo, Index, Mode, Plain, Select

if TYPE_CHECKING:
    import tensorstore
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
_SILENT: Progress = False
_LARGE_NBYTES = 1 << 20
"""A whole tensor of this size is read into its own memory, not chunk by chunk."""


def open_checkpoint(backend: Backend, at: At | None = None) -> Checkpoint:
    """Choose a checkpoint and read its index.

    Args:
        at: A step, a name, a tag; None or "latest": the highest readable step, else `main`.
    Raises:
        NotFoundError: There is none; the message lists what there is.
        FormatError: It was asked for by name and no generation of it can be read.
    """
    found = list_checkpoints(backend)
    if at is not None and at != "latest":
        return _open_chosen(backend, found, at)
    for name in latest_order(found):
        chosen = newest_readable(backend, found[name])
        if chosen is not None:
            return _made(backend, *chosen)
    others = [name for name in found if name not in set(latest_order(found))]
    damaged = [name for name in found if name not in others]
    if not found:
        raise nothing_there(backend)
    raise NotFoundError(
        "no readable checkpoint is the latest" if damaged else "no checkpoint is the latest",
        reason="latest",
        where=backend.url,
        found=names_text(dict.fromkeys(found)),
        do='run "ckptfmt verify"'
        if damaged
        else f"name one: at={others[0]!r}, or @{others[0]} behind the store",
    )


def _open_chosen(backend: Backend, found: Mapping[str, Sequence[Listed]], at: At) -> Checkpoint:
    generations = find(backend, found, at)
    skipped: dict[str, FormatError] = {}
    relist = isinstance(at, int) or at == generations[-1].name
    chosen = newest(backend, generations, read_index, skipped.__setitem__, relist=relist)
    if chosen is not None:
        for key, error in skipped.items():
            warn_skipped(key, error)
        return _made(backend, *chosen)
    if len(skipped) == 1:
        raise next(iter(skipped.values()))  # it was asked for: what is wrong with it is the answer
    if skipped:
        raise CorruptError(
            "no generation of this checkpoint can be read",
            reason="index",
            where=", ".join(skipped),
            found="; ".join(error.what for error in skipped.values()),
            do='restore another step or run "ckptfmt verify"',
        )
    raise NotFoundError(
        "the checkpoint was deleted while it was opened",
        reason="checkpoint",
        where=backend.url,
        expected=f"step {at}" if isinstance(at, int) else repr(at),
        do="choose another one",
    )


def _made(backend: Backend, listed: Listed, index: Document) -> Checkpoint:
    notes = list_notes(backend).get(index.about.txn.hex(), [])
    info = info_of(backend, listed, index.about, index.files, read_notes(backend, notes))
    return Checkpoint(backend, index, info)


class Checkpoint(Mapping[str, Any]):
    """One checkpoint, lazily: leaf name -> `StoredTensor` or plain value.

    A context manager; what it returned outlives `close()`.
    """

    info: CheckpointInfo

    def __init__(self, backend: Backend, index: Document, info: CheckpointInfo) -> None:
        self.backend, self.index, self.info = backend, index, info
        self._readers: dict[bool, ChunkReader] = {}

    def __repr__(self) -> str:
        return f"<Checkpoint {self.info.name} of {self.info.url}: {len(self)} leaves>"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back connections; arrays and values stay."""
        self.backend.close()

    def _reader(self, verify: bool) -> ChunkReader:
        """Kept: a loop over a million small tensors works its columns out once."""
        if verify not in self._readers:
            self._readers[verify] = ChunkReader(self.backend, self.index, verify=verify)
        return self._readers[verify]

    @cached_property
    def object_rows(self) -> frozenset[int]:
        """Tensors of strings that were object arrays, and come back as such."""
        tree = self.index.tree
        attribute = tree.leaf_attributes.get("numpy.object")
        if attribute is None:
            return frozenset()
        kinds = tree.leaf_kinds[attribute.rows]
        return frozenset(tree.leaf_rows[attribute.rows[kinds == LEAF_TENSOR]].tolist())

    def __len__(self) -> int:
        return len(self.index.tree.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.tree.leaf_names)

    def __contains__(self, name: object) -> bool:
        return name in self.index.tree.leaf_positions

    def __getitem__(self, name: str) -> StoredTensor | Plain:
        """A `StoredTensor`, or the plain value. NotFoundError names the nearest."""
        position = self.index.tree.leaf_positions.get(name)
        if position is None:
            raise NotFoundError(
                "no such leaf",
                reason="name",
                where=f"{self.info.name} of {self.info.url}",
                expected=repr(name),
                do=nearest(name, self.index.tree.leaf_names),
            )
        return self._leaf(position)

    def _leaf(self, position: int) -> Any:
        tree = self.index.tree
        row, kind = int(tree.leaf_rows[position]), int(tree.leaf_kinds[position])
        if kind == LEAF_TENSOR:
            return StoredTensor(self, tree.leaf_names[position], row)
        if kind == LEAF_VALUE:
            return parse_leaf_value(tree.values[row], tree.leaf_names[position])
        return packed_values(self.backend, self.index, [position])[position]

    def names(self, select: Select = "**") -> list[str]:
        """Leaf names, in order. A pattern that matches nothing gives none."""
        matcher = Matcher(select)
        return [name for name in self.index.tree.leaf_names if matcher(name)]

    def ties(self) -> list[list[str]]:
        """Names that are one tensor, for every tensor that has several."""
        tree = self.index.tree
        made: dict[int, list[str]] = {}
        counts = np.bincount(tree.leaf_rows[tree.leaf_kinds == LEAF_TENSOR], minlength=1)
        for name, kind, row in zip(tree.leaf_names, tree.leaf_kinds, tree.leaf_rows):
            if kind == LEAF_TENSOR and counts[row] > 1:
                made.setdefault(int(row), []).append(name)
        return list(made.values())

    def tree(self) -> Any:
        """Containers and plain values, a `StoredTensor` for each tensor: no tensor's data is read."""
        positions = range(len(self))
        return nest(self.index, positions, [self._leaf(p) for p in positions])

    def load(
        self,
        *,
        names: Select | None = None,
        like: Any = None,
        mode: Mode = "auto",
        verify: bool = True,
        max_nbytes: int | None = None,
        progress: Progress = False,
    ) -> Any:
        """The tree (or the selected part of it) as NumPy arrays; see `ckptfmt.load`."""
        from ckptfmt.engine.like import load_like
        from ckptfmt.engine.load import load_tree
        from ckptfmt.engine.restore import RestoreRequest

        if like is not None:
            request = RestoreRequest(
                names=names, verify=verify, max_nbytes=max_nbytes, progress=progress
            )
            return load_like(like, self, request, mode=mode)
        return load_tree(
            self, names=names, mode=mode, verify=verify, max_nbytes=max_nbytes, progress=progress
        )

    def read(self, regions: Mapping[str, Index]) -> dict[str, NDArray[Any]]:
        """Boxes of many tensors, their requests joined: leaf name -> NumPy index -> array.

        Every chunk that a box touches is read whole and verified.
        """
        return _read_boxes(self, regions, verify=True)

    def verify(self, names: Select = "**") -> VerifyReport:
        """Read and check every byte of the selected leaves; returns the damages, never raises them."""
        from ckptfmt.engine.verify import verify_checkpoint

        return verify_checkpoint(self, names)


class StoredTensor:
    """A tensor of a checkpoint, lazily.

    Attributes:
        name: The leaf name it was taken by.
        shape: In elements.
        dtype: NumPy dtype that `read` gives.
        nbytes: Raw bytes (types under 8 bits packed).
    """

    name: str

    def __init__(self, checkpoint: Checkpoint, name: str, row: int) -> None:
        self._checkpoint, self.name, self.row = checkpoint, name, row

    def __repr__(self) -> str:
        return f"<StoredTensor {self.name!r} {self.dtype_name} {list(self.shape)}>"

    @property
    def shape(self) -> tuple[int, ...]:
        return self._checkpoint.index.tree.shape(self.row)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        if self.row in self._checkpoint.object_rows:
            return np.dtype(object)
        return numpy_dtype(self._checkpoint.index.tree.dtype(self.row))

    @property
    def dtype_name(self) -> str:
        """The format's name of the dtype (spec 04)."""
        return self._checkpoint.index.tree.dtype(self.row).name

    @property
    def nbytes(self) -> int:
        return int(self._checkpoint.index.tree.tensor_nbytes[self.row])

    def _chunk_rows(self) -> slice:
        tree = self._checkpoint.index.tree
        first, last = (int(x) for x in tree.tensor_region_starts[self.row : self.row + 2])
        at = tree.region_chunk_starts
        return slice(int(at[first]), int(at[last]))

    @property
    def stored_nbytes(self) -> int:
        """Bytes of its chunks as they are stored."""
        return int(self._checkpoint.index.placement.stored[self._chunk_rows()].sum())

    @property
    def codec(self) -> str:
        """How its chunks are stored: `raw`, `zstd`, or several joined by `, `."""
        placement = self._checkpoint.index.placement
        used = np.unique(placement.codecs[self._chunk_rows()]).tolist()
        names = ["+".join(str(s[0]) for s in placement.pipelines[c]) or "raw" for c in used]
        return ", ".join(names) or "raw"

    @property
    def digest(self) -> str:
        """Hex digest of its chunks' digests: equal for equal content, cut alike."""
        index = self._checkpoint.index
        joined = index.tree.chunk_digests[self._chunk_rows()].tobytes()
        return digest(joined, index.header.algorithm).hex()

    @property
    def attributes(self) -> dict[str, Any]:
        """The leaf's attributes, of the name it was taken by."""
        tree = self._checkpoint.index.tree
        position, made = tree.leaf_positions[self.name], {}
        for key, attribute in tree.leaf_attributes.items():
            at = int(np.searchsorted(attribute.rows, position))
            if at < len(attribute.rows) and int(attribute.rows[at]) == position:
                made[key] = parse_leaf_value(attribute.values[at], self.name)
        return made

    def read(
        self, region: Index = ..., *, out: NDArray[Any] | None = None, verify: bool = True
    ) -> NDArray[Any]:
        """The tensor, or a part of it by a NumPy index; only the chunks it touches are read, whole.

        Args:
            region: ints, slices and an Ellipsis read a part; any other index reads all first.
            out: Filled and returned if given; its shape and dtype must be those of the result.
            verify: Check the chunks read.
        Raises:
            UsageError: The index or `out` does not fit.
        """
        if out is not None:
            _check_out(out, self)
        made = _read_boxes(self._checkpoint, {self.name: region}, verify=verify)[self.name]
        if out is None:
            return made
        if out.shape != made.shape:
            raise UsageError(
                "out has another shape",
                reason="out",
                where=repr(self.name),
                expected=made.shape,
                found=out.shape,
                do="pass an array of that shape",
            )
        np.copyto(out, made)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise UsageError(
                "a stored tensor cannot be an array without a copy",
                reason="copy",
                where=repr(self.name),
                do="use .mmap()",
            )
        made = self.read()
        return made if dtype is None else made.astype(dtype)

    def mmap(self) -> NDArray[Any]:
        """A private copy-on-write map: lazy, and its bytes are not checked.

        Raises:
            UnsupportedError: The store cannot be mapped, or the tensor is encoded or in pieces.
        """
        checkpoint = self._checkpoint
        with Reporter(_SILENT, "read", 0) as reporter:
            return read_tensors(
                checkpoint.backend,
                checkpoint.index,
                [self.row],
                mode="mmap",
                verify=False,
                reporter=reporter,
            )[self.row]

    def tensorstore(self) -> tensorstore.TensorStore:
        """A read-only TensorStore of this tensor: slices read only the chunks they touch.

        Raises:
            MissingExtraError: tensorstore is not installed.
            UnsupportedError: TensorStore has no such dtype.
        """
        try:
            import tensorstore
        except ImportError as error:
            raise MissingExtraError(
                "tensorstore is not installed",
                reason="tensorstore",
                do="pip install tensorstore",
            ) from error

        def fill(domain: Any, chunk: Any, parameters: Any) -> None:
            chunk[...] = self.read(domain.index_exp)

        try:
            dtype = tensorstore.dtype(self.dtype)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(
                "TensorStore has no such dtype",
                reason="dtype",
                where=repr(self.name),
                found=self.dtype_name,
                do="use .read()",
            ) from error
        shape = self._grid()
        layout = tensorstore.ChunkLayout(chunk_shape=shape) if self.ndim else None
        return tensorstore.virtual_chunked(fill, dtype=dtype, shape=self.shape, chunk_layout=layout)

    def _grid(self) -> list[int]:
        """The shape of about one chunk: what a view reads at a time."""
        index = self._checkpoint.index
        rows = index.tree.chunk_raw[self._chunk_rows()]
        left = max(1, int(rows.max()) // self.dtype.itemsize) if len(rows) else 1
        made: list[int] = []
        for length in reversed(self.shape):
            made.insert(0, max(1, min(length, left)))
            left //= made[0]
        return made


def _check_out(out: Array, tensor: StoredTensor) -> None:
    if out.dtype != tensor.dtype or not out.flags.writeable:
        raise UsageError(
            "out has another dtype, or is read-only",
            reason="out",
            where=repr(tensor.name),
            expected=f"writable {tensor.dtype}",
            found=str(out.dtype),
            do="pass a writable array of that dtype",
        )


def _read_boxes(
    checkpoint: Checkpoint, regions: Mapping[str, Any], *, verify: bool
) -> dict[str, Array]:
    index = checkpoint.index
    boxes, rows = {}, {}
    for name, region in regions.items():
        leaf = checkpoint[name]
        if not isinstance(leaf, StoredTensor):
            raise UsageError(
                "not a tensor",
                reason="region",
                where=repr(name),
                found=type(leaf).__name__,
                do="plain values are read whole: checkpoint[name]",
            )
        boxes[name] = settle(index, leaf.row, region, name)
    made = {}
    with Reporter(_SILENT, "read", 0) as reporter:
        for name, box in boxes.items():
            row = box.tensor
            large = int(index.tree.tensor_nbytes[row]) >= _LARGE_NBYTES
            if large and box.is_whole(index.tree.shape(row)):
                # Straight into its own memory. One by one: two names may be one tensor.
                made[name] = read_tensors(
                    checkpoint.backend, index, [row], mode="read", verify=verify, reporter=reporter
                )[row]
        rows = {name: chunks_of(index, box) for name, box in boxes.items() if name not in made}
        wanted = [touched for by_region in rows.values() for touched in by_region.values()]
        if wanted:
            chunks = checkpoint._reader(verify).chunks(np.concatenate(wanted), reporter)
        else:
            chunks = {}
    made |= {name: assemble(index, boxes[name], rows[name], chunks) for name in rows}
    return {name: _finished(checkpoint, box, made[name], name) for name, box in boxes.items()}


def _finished(checkpoint: Checkpoint, box: Box, array: Array, name: str) -> Array:
    """The index's flips and dropped axes applied; strings in the kind of array they were."""
    if box.tensor in checkpoint.object_rows:
        array = array.astype(object)
    try:
        return np.asarray(array[box.local]) if box.local else array
    except (IndexError, TypeError, ValueError) as error:
        refuse(box.local, name, error)
