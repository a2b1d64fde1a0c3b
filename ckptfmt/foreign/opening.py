"""`open_foreign`: a foreign file as a lazy mapping of leaf names, a source for load and restore."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import CorruptError, NotFoundError, UsageError, warn
from ckptfmt.foreign.base import ForeignTensor, ForeignTree
from ckptfmt.foreign.mapped import map_tree
from ckptfmt.foreign.registry import read_foreign
from ckptfmt.foreign.rule_rows import parse_rules
from ckptfmt.foreign.stored import FORMAT, is_store, open_stored, read_stored
from ckptfmt.foreign.streaming import is_streamed
from ckptfmt.reports import Damage, VerifyReport
from ckptfmt.types import CheckpointInfo, Mode, Rules, Select, StrPath

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.engine import Checkpoint, FlatTree, Store, TreeSource


def open_foreign(
    path: StrPath | Store | Checkpoint, *, source_format: str | None = None, rules: Rules = ()
) -> ForeignCheckpoint:
    """Open a file or folder of another format, or a TensorFlow prefix. Its values are not read yet.

    Args:
        source_format: Its format, where it shall not be found out from the content.
        rules: Other names and layouts, as in `convert`; with rules the path may be a store's too.
            A `Store` or a `Checkpoint` may stand in its place.
    Raises:
        NotFoundError: There is no such file; or shards of a folder are missing: all are named.
        UnsupportedError: No importer recognises it.
        CorruptError: It is damaged or hostile.
        UsageError: A rule is not understood, touches nothing or does not fit.
    Warns:
        CkptWarning: A preset could not carry something of an optimizer.
    """
    source = read_source(path, source_format=source_format)
    if not rules and source.info is None:
        return ForeignCheckpoint(source.path, source.tree)
    mapped = map_tree(source.tree, source.columns, parse_rules(rules))
    for name, why in mapped.tree.skipped.items():
        if name not in source.tree.skipped:
            warn(f"the rules could not carry {name}: {why}")
    return ForeignCheckpoint(source.path, mapped.tree, source.info)


@dataclass(frozen=True, slots=True)
class SourceTree:
    """What a conversion starts from: a tree, what gives it as columns, what it is called, and, of a
    store, the checkpoint."""

    tree: ForeignTree
    columns: Callable[[], FlatTree]
    path: str
    info: CheckpointInfo | None = None


def read_source(
    path: StrPath | Store | Checkpoint, *, source_format: str | None = None
) -> SourceTree:
    """The tree of a foreign file, or of a checkpoint of a store, its values unread."""
    if source_format == FORMAT or (source_format is None and is_store(path)):
        checkpoint = open_stored(path)
        made, flat = read_stored(checkpoint)
        title = f"{checkpoint.info.url}@{checkpoint.info.name}"
        return SourceTree(made, lambda: flat, title, checkpoint.info)
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            "a store has no foreign format", reason="source-format", found=repr(source_format)
        )
    tree, name = read_foreign(path, source_format=source_format), os.fspath(path)
    return SourceTree(tree, lambda: ForeignCheckpoint(name, tree).flat, name)


class ForeignStored:
    """A tensor of a foreign file, lazily; reads like a `StoredTensor`."""

    codec = "raw"

    def __init__(self, tensor: ForeignTensor) -> None:
        self.foreign = tensor

    @property
    def name(self) -> str:
        return self.foreign.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.foreign.shape

    @property
    def nbytes(self) -> int:
        return self.foreign.nbytes

    @property
    def dtype_name(self) -> str:
        """The format's name of the dtype (spec 04)."""
        return self.foreign.dtype

    def __repr__(self) -> str:
        return f"<ForeignStored {self.name!r} {self.dtype_name} {list(self.shape)}>"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def stored_nbytes(self) -> int:
        return self.nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        from ckptfmt.format import dtype_named, numpy_dtype

        known = dtype_named(self.dtype_name)
        return self.foreign.fetch().dtype if known is None else numpy_dtype(known)

    def read(
        self, region: Any = ..., *, out: NDArray[Any] | None = None, verify: bool = True
    ) -> NDArray[Any]:
        """The tensor, or a part of it, in memory of its own. A foreign file has no digests, so
        `verify` has nothing to check.
        """
        box, sides = self.foreign.box, _sides_of(region, self.shape)
        if box is not None and sides is not None and is_streamed(self.foreign):
            made = box(sides)
        else:
            made = self.foreign.fetch()[region]
        if out is None:
            return np.array(made)
        if out.shape != made.shape or out.dtype != made.dtype:
            raise UsageError(
                "out does not fit",
                reason="out",
                where=repr(self.name),
                expected=f"{made.dtype} {made.shape}",
                found=f"{out.dtype} {out.shape}",
            )
        np.copyto(out, made)
        return out

    def mmap(self) -> NDArray[Any]:
        """A read-only view of the mapped file."""
        return self.foreign.fetch()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        made = self.foreign.fetch()
        if dtype is not None and dtype != made.dtype:
            return made.astype(dtype)
        return np.array(made) if copy else made


def _sides_of(region: Any, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """The box that an index of slices is; None for any other index."""
    items = region if isinstance(region, tuple) else (region,)
    if not all(isinstance(item, slice) or item is ... for item in items):
        return None
    if items.count(...) == 0:
        items = (*items, ...)
    at, missing = items.index(...), len(shape) - len(items) + 1
    items = (*items[:at], *(slice(None),) * missing, *items[at + 1 :])
    if len(items) != len(shape) or any(item is ... for item in items):
        return None
    ends = [item.indices(n) for item, n in zip(items, shape)]
    if any(step != 1 or start >= stop for start, stop, step in ends):
        return None
    return tuple(slice(start, stop) for start, stop, _ in ends)


class ForeignCheckpoint(Mapping[str, Any]):
    """A foreign file or folder, seen as a checkpoint: leaf name -> `ForeignStored` or plain value.

    A context manager.
    """

    def __init__(self, path: str, foreign: ForeignTree, info: CheckpointInfo | None = None) -> None:
        self.path, self.foreign, self._info = path, foreign, info
        self._flat = foreign.flat
        self._positions: dict[str, int] | None = None

    def __repr__(self) -> str:
        return f"<ForeignCheckpoint {self.path} ({self.foreign.format}): {len(self)} leaves>"

    def __enter__(self) -> ForeignCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to give back: the maps live as long as an array in them."""

    @property
    def flat(self) -> FlatTree:
        """The leaves as columns, as a save would make them."""
        if self._flat is None:
            from ckptfmt.engine import flatten

            self._flat = flatten(self.tree())
        return self._flat

    @property
    def info(self) -> CheckpointInfo:
        """What is known without a store: size, count and the file's own metadata; of a store, what
        its checkpoint says."""
        if self._info is not None:
            return self._info
        return CheckpointInfo(
            name=os.path.basename(os.path.normpath(self.path)),
            step=self.foreign.step,
            generation=0,
            created=datetime.fromtimestamp(os.stat(self.foreign.file or self.path).st_mtime, UTC),
            url=self.path,
            nbytes=self.foreign.nbytes,
            stored_nbytes=self.foreign.nbytes,
            written_nbytes=0,
            tensors=len(self.foreign.tensors),
            digest="",
            metadata=dict(self.foreign.metadata),
            metrics=dict(self.foreign.metrics),
            parent=None,
            writer=self.foreign.format,
            seconds=0.0,
        )

    def __len__(self) -> int:
        return len(self.flat.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.flat.names)

    def __contains__(self, name: object) -> bool:
        return name in self._leaf_positions

    @property
    def _leaf_positions(self) -> dict[str, int]:
        if self._positions is None:
            self._positions = {name: at for at, name in enumerate(self.flat.names)}
        return self._positions

    def __getitem__(self, name: str) -> Any:
        tensor = self.foreign.tensors.get(name)
        if tensor is not None:
            return ForeignStored(tensor)
        position = self._leaf_positions.get(name)
        if position is None:
            from ckptfmt.engine import nearest

            raise NotFoundError(
                "no such leaf",
                reason="name",
                where=self.path,
                expected=repr(name),
                do=nearest(name, self),
            )
        return self._source().value(position)

    def _source(self) -> TreeSource:
        from ckptfmt.engine import TreeSource

        return TreeSource(self)

    def select(self, names: Select | None) -> list[str]:
        """Selected names, in order. NotFoundError if a pattern matches nothing."""
        from ckptfmt.engine import select_positions

        every = list(self)
        return [every[position] for position in select_positions(every, names, self.path)]

    def names(self, select: Select = "**") -> list[str]:
        """Leaf names, in order. A pattern that matches nothing gives none."""
        try:
            return self.select(select)
        except NotFoundError:
            return []

    def ties(self) -> list[list[str]]:
        """Names that are one tensor in the file, where its format knows ties."""
        found: dict[Hashable, list[str]] = {}
        for name, tensor in self.foreign.tensors.items():
            if tensor.identity is not None and tensor.nbytes:
                found.setdefault(tensor.identity, []).append(name)
        return [names for names in found.values() if len(names) > 1]

    def tree(self) -> Any:
        """The tree as the file has it, with something lazy for each tensor: a source for `save`."""
        if self.foreign.root is not None or self.foreign.flat is not None:  # it may be `None`
            return self.foreign.root
        made: dict[str, Any] = {}
        for name, tensor in self.foreign.tensors.items():
            node = made
            *parents, last = self.foreign.keys[name]
            for key in parents:
                node = node.setdefault(key, {})
            node[last] = ForeignStored(tensor)
        return made

    def load(self, *, names: Select | None = None, mode: Mode = "auto", verify: bool = True) -> Any:
        """The tree as NumPy arrays, writable and private to the caller."""
        if names is not None:
            self.select(names)  # whose error names the file
        return self._source().load(names)

    def read(self, regions: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Boxes of many tensors."""
        return {name: self[name].read(region) for name, region in regions.items()}

    def verify(self, names: Select = "**") -> VerifyReport:
        """Read the selected leaves. There are no digests: only what cannot be valid is found."""
        problems = []
        chosen = [name for name in self.select(names) if name in self.foreign.tensors]
        for name in chosen:
            try:
                self[name].read()
            except CorruptError as error:
                problems.append(Damage(self.path, 0, 0, "", name, str(error)))
        nbytes = sum(self.foreign.tensors[name].nbytes for name in chosen)
        return VerifyReport(problems, checkpoints=1, files=1, nbytes=nbytes)
