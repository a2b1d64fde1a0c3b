"""`open_foreign`: a foreign file as a lazy mapping of leaf names, a source for load and restore."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import CorruptError, NotFoundError, UsageError
from ckptfmt.foreign.base import ForeignTensor, ForeignTree
from ckptfmt.foreign.registry import read_foreign
from ckptfmt.reports import Damage, VerifyReport
from ckptfmt.types import CheckpointInfo, Mode, Select, StrPath

if TYPE_CHECKING:
    from numpy.typing import NDArray


def open_foreign(path: StrPath) -> ForeignCheckpoint:
    """Open a file or folder of another format (`.safetensors`). Its values are not read yet.

    Raises:
        NotFoundError: There is no such file; or shards of a folder are missing: all are named.
        UnsupportedError: No importer recognises it.
        CorruptError: It is damaged or hostile.
    """
    return ForeignCheckpoint(os.fspath(path), read_foreign(path))


class ForeignStored:
    """A tensor of a foreign file, lazily; reads like a `StoredTensor`."""

    codec = "raw"

    def __init__(self, tensor: ForeignTensor) -> None:
        self._tensor = tensor

    @property
    def name(self) -> str:
        return self._tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tensor.shape

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    @property
    def dtype_name(self) -> str:
        """The format's name of the dtype (spec 04)."""
        return self._tensor.dtype

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
        from ckptfmt.format import Dtype, numpy_dtype

        bits = self.nbytes * 8 // max(1, int(np.prod(self.shape, dtype=object)))
        if self.nbytes:
            return numpy_dtype(Dtype(self.dtype_name, bits))
        return self._tensor.fetch().dtype

    def read(
        self, region: Any = ..., *, out: NDArray[Any] | None = None, verify: bool = True
    ) -> NDArray[Any]:
        """The tensor, or a part of it, in memory of its own. A foreign file has no digests, so
        `verify` has nothing to check.
        """
        made = self._tensor.fetch()[region]
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
        return self._tensor.fetch()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        made = self._tensor.fetch()
        if dtype is not None and dtype != made.dtype:
            return made.astype(dtype)
        return np.array(made) if copy else made


class ForeignCheckpoint(Mapping[str, ForeignStored]):
    """A foreign file or folder, seen as a checkpoint. A context manager."""

    def __init__(self, path: str, foreign: ForeignTree) -> None:
        self.path, self.foreign = path, foreign

    def __repr__(self) -> str:
        return f"<ForeignCheckpoint {self.path} ({self.foreign.format}): {len(self)} tensors>"

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
    def info(self) -> CheckpointInfo:
        """What is known without a store: size, count and the file's own metadata."""
        return CheckpointInfo(
            name=os.path.basename(os.path.normpath(self.path)),
            step=None,
            generation=0,
            created=datetime.fromtimestamp(os.stat(self.path).st_mtime, UTC),
            url=self.path,
            nbytes=self.foreign.nbytes,
            stored_nbytes=self.foreign.nbytes,
            written_nbytes=0,
            tensors=len(self),
            digest="",
            metadata=dict(self.foreign.metadata),
            metrics={},
            parent=None,
            writer=self.foreign.format,
            seconds=0.0,
        )

    def __len__(self) -> int:
        return len(self.foreign.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.foreign.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.foreign.tensors

    def __getitem__(self, name: str) -> ForeignStored:
        tensor = self.foreign.tensors.get(name)
        if tensor is None:
            from ckptfmt.engine import nearest

            raise NotFoundError(
                "no such leaf",
                reason="name",
                where=self.path,
                expected=repr(name),
                do=nearest(name, self),
            )
        return ForeignStored(tensor)

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
        """No format that is read so far knows ties."""
        return []

    def tree(self) -> Any:
        """Dicts as the file's keys say, a `ForeignStored` for each tensor."""
        return self._nest(list(self), lambda stored: stored)

    def load(self, *, names: Select | None = None, mode: Mode = "auto", verify: bool = True) -> Any:
        """The tree as NumPy arrays, writable and private to the caller."""
        return self._nest(self.select(names), lambda stored: stored.read())

    def read(self, regions: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Boxes of many tensors."""
        return {name: self[name].read(region) for name, region in regions.items()}

    def verify(self, names: Select = "**") -> VerifyReport:
        """Read the selected leaves. There are no digests: only what cannot be valid is found."""
        problems = []
        chosen = self.select(names)
        for name in chosen:
            try:
                self[name].read()
            except CorruptError as error:
                problems.append(Damage(self.path, 0, 0, "", name, str(error)))
        nbytes = sum(self.foreign.tensors[name].nbytes for name in chosen)
        return VerifyReport(problems, checkpoints=1, files=1, nbytes=nbytes)

    def _nest(self, names: list[str], make: Any) -> Any:
        made: dict[str, Any] = {}
        for name in names:
            node = made
            *parents, last = self.foreign.keys[name]
            for key in parents:
                node = node.setdefault(key, {})
            node[last] = make(self[name])
        return made
