"""What `show`, `cat` and `diff` look at: a checkpoint of a store, or a foreign file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckptfmt.cli.comparison import CHANGED, UNKNOWN, Comparison, Difference, Side, compare
from ckptfmt.cli.leaves import TENSOR, VALUE, Leaf, leaves_of_index
from ckptfmt.cli.statistics import blocks
from ckptfmt.cli.where import parse_store
from ckptfmt.engine import Checkpoint, select_positions
from ckptfmt.errors import NotFoundError, UnsupportedError
from ckptfmt.events import Event, Progress

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign import ForeignCheckpoint
    from ckptfmt.types import CheckpointInfo


class Source(Protocol):
    """What `show`, `cat` and `diff` look at: a checkpoint, or a foreign file."""

    title: str
    info: CheckpointInfo | None

    def __contains__(self, name: object) -> bool: ...
    def leaves(self, select: Iterable[str] | None) -> list[Leaf]:
        """The selected leaves, in order. NotFoundError if a pattern matches nothing."""

    def item(self, name: str) -> Any:
        """A tensor (it has shape and dtype, and is not read yet), or a plain value."""

    def dtype(self, name: str) -> str:
        """A tensor's dtype, by its name in our format."""

    def read(self, name: str, region: Any) -> NDArray[Any]:
        """Values of a part of a tensor, checked."""

    def side(self, select: Iterable[str] | None) -> Side: ...


class _Stored:
    """A checkpoint of a store."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.info: CheckpointInfo | None = checkpoint.info
        self.title = f"{checkpoint.info.url}@{checkpoint.info.name}"

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint

    def leaves(self, select: Iterable[str] | None) -> list[Leaf]:
        names = None
        if select is not None:
            tree = self.checkpoint.index.tree
            names = [
                tree.leaf_names[p]
                for p in select_positions(tree.leaf_names, list(select), self.title)
            ]
        return leaves_of_index(self.checkpoint.index, self.checkpoint.__getitem__, names)

    def item(self, name: str) -> Any:
        return self.checkpoint[name]

    def dtype(self, name: str) -> str:
        return str(self.checkpoint[name].dtype_name)

    def read(self, name: str, region: Any) -> NDArray[Any]:
        return self.checkpoint[name].read(region)

    def side(self, select: Iterable[str] | None) -> Side:
        return Side({leaf.name: leaf for leaf in self.leaves(select)}, self.checkpoint.index)


class _Foreign:
    """A file of another format."""

    def __init__(self, path: str, checkpoint: ForeignCheckpoint) -> None:
        self.checkpoint, self.title = checkpoint, path
        self.info: CheckpointInfo | None = None

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint

    def leaves(self, select: Iterable[str] | None) -> list[Leaf]:
        tensors = self.checkpoint.foreign.tensors
        names = list(self.checkpoint) if select is None else self.checkpoint.select(list(select))
        first = {name: tied[0] for tied in self.checkpoint.ties() for name in tied[1:]}
        long = self._long_values()
        made = []
        for n in names:
            if n in tensors:
                t = tensors[n]
                made.append(Leaf(n, TENSOR, t.dtype, t.shape, t.nbytes, first.get(n, "")))
            elif n in long:
                made.append(Leaf(n, VALUE, "value", nbytes=long[n]))
            else:
                value = self.checkpoint[n]
                made.append(Leaf(n, VALUE, type(value).__name__, value=value))
        return made

    def _long_values(self) -> dict[str, int]:
        """Values that a checkpoint keeps as data -> their packed bytes."""
        from ckptfmt.format import LEAF_PACKED

        flat = self.checkpoint.flat
        rows = zip(flat.names, flat.kinds, flat.rows, strict=True)
        return {name: flat.tensors[row].shape[0] for name, kind, row in rows if kind == LEAF_PACKED}

    def item(self, name: str) -> Any:
        return self.checkpoint[name]

    def dtype(self, name: str) -> str:
        return self.checkpoint.foreign.tensors[name].dtype

    def read(self, name: str, region: Any) -> NDArray[Any]:
        return np.array(self.checkpoint[name].read(region))

    def side(self, select: Iterable[str] | None) -> Side:
        return Side({leaf.name: leaf for leaf in self.leaves(select)}, None)


@contextmanager
def open_source(text: str, options: Mapping[str, object]) -> Iterator[Source]:
    """Open `STORE[@NAME]`, or a foreign file or folder, which must exist on this machine."""
    if foreign_format(text) is not None:
        from ckptfmt.foreign import open_foreign

        with open_foreign(text) as foreign:
            yield _Foreign(text, foreign)
        return
    store, at = parse_store(text, options, read_only=True)
    with store.open(at) as checkpoint:
        yield _Stored(checkpoint)


def foreign_format(text: str) -> str | None:
    """The format of a file or folder on this machine that is no store; None for a store, and where
    there is nothing.

    Raises:
        UnsupportedError: A file is there, and no importer recognises it.
    """
    # A TensorFlow checkpoint is named by what its files share; `.index` is one of them.
    there = os.path.exists(text) or os.path.exists(text + ".index")
    if not there or os.path.isdir(os.path.join(text, "checkpoints")):
        return None
    # Imported here: most paths are stores, and their commands do without importers.
    from ckptfmt.foreign import detect_format, importer_names, suffix_format

    found = detect_format(text) or suffix_format(text)
    if found is None and os.path.isfile(text):  # a folder may become a store
        raise UnsupportedError(
            "neither a store nor of a format that can be read",
            reason="foreign-format",
            where=text,
            expected=f"one of {', '.join(importer_names())}",
            do='check the path; "ckptfmt convert --list" has the formats',
        )
    return found


def compare_sources(
    a: Source,
    b: Source,
    names: list[str] | None,
    *,
    read: bool,
    progress: Progress,
) -> Comparison:
    """Compare by digests; with `read`, what they do not decide by the values of both sides."""
    found = compare(*_sides(a, b, names), part=names is not None)
    if not read:
        return found
    unknown = [d for d in found.differences if d.status == UNKNOWN]
    report = progress if callable(progress) else lambda event: None
    done, total = 0, sum(d.leaf.nbytes for d in unknown)
    for difference in unknown:
        position = found.differences.index(difference)
        name = difference.leaf.name
        if difference.leaf.kind == TENSOR:
            changed = _changed_nbytes(a, b, difference.leaf)
        else:  # a long value
            changed = difference.leaf.nbytes * (repr(a.item(name)) != repr(b.item(name)))
        done += difference.leaf.nbytes
        report(Event("diff", time.time(), nbytes=done, total_nbytes=total))
        if changed:
            made = Difference(CHANGED, difference.leaf, "values", changed)
            found.differences[position] = made
        else:
            del found.differences[position]
            found.same += 1
            found.same_nbytes += difference.leaf.counted_nbytes
    return found


def _sides(a: Source, b: Source, names: list[str] | None) -> tuple[Side, Side]:
    """Both sides; a pattern may match nothing on one of them, but not on both."""
    made: list[Side | None] = []
    errors: list[NotFoundError] = []
    for source in (a, b):
        try:
            made.append(source.side(names))
        except NotFoundError as error:
            errors.append(error)
            made.append(None)
    if len(errors) == 2:
        raise errors[0]
    side_a, side_b = (side or Side({}, None) for side in made)
    return side_a, side_b


def _changed_nbytes(a: Source, b: Source, leaf: Leaf) -> int:
    """Bytes of elements that differ, as bits: NaN payloads and the sign of zero count."""
    changed = 0
    item = a.item(leaf.name)
    for region in blocks(tuple(item.shape), max(1, item.dtype.itemsize)):
        one, other = a.read(leaf.name, region), b.read(leaf.name, region)
        if one.dtype.kind in "OT":
            changed += int((one != other).sum()) * one.dtype.itemsize
            continue
        bits = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (one, other)]
        rows = bits[0].reshape(-1, one.dtype.itemsize) != bits[1].reshape(-1, one.dtype.itemsize)
        changed += int(rows.any(axis=1).sum()) * one.dtype.itemsize
    return changed
