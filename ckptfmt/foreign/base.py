"""What an importer is: it finds out whether a file is its own, and reads it as a tree of lazy leaves.

Saving stays the engine's work. What an importer cannot carry raises `UnsupportedError` naming the
leaf, or is listed in `skipped`; nothing is dropped in silence.
"""

from __future__ import annotations

import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import (
    CorruptError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.engine import FlatTree
    from ckptfmt.foreign.streaming import BoxReader


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor of a foreign file that has not been read.

    Attributes:
        name: Its name in the checkpoint.
        foreign_name: Its name in the file.
        dtype: Name in our format: `bfloat16`.
        shape: In elements.
        nbytes: Bytes of its values in the checkpoint.
        where: File and byte range.
        fetch: Gives the values as a read-only array; a view of the mapped file where that can be.
        must_check: Only `fetch` finds out whether the values can be carried.
        identity: Equal for two leaves that are one tensor in the file: a tie. None: its own.
        attributes: Dotted key -> plain value, kept with the leaf: `torch.requires_grad`.
        box: Gives a box of the values, reading little more than that: where `fetch` makes a copy.
    """

    name: str
    foreign_name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    where: str
    fetch: Callable[[], NDArray[Any]]
    must_check: bool = False
    identity: Hashable | None = None
    attributes: Mapping[str, object] = field(default_factory=dict)
    box: BoxReader | None = None

    def __post_init__(self) -> None:
        # Other shapes are as large as bytes that are there. This one is (2^60, 0, 2^60), which NumPy
        # refuses although it is empty.
        if not self.nbytes and math.prod(n for n in self.shape if n) >= _EMPTY_NUMEL_MAX:
            raise CorruptError(
                "an empty tensor whose other lengths overflow",
                reason="foreign-shape",
                where=self.where,
                found=ascii(self.shape)[:200],
                do="get the file again",
            )


_NAMES_FREE, _NAMES_EXPANSION_MAX = 8 << 20, 8
_EMPTY_NUMEL_MAX = 1 << 58
"""Of its lengths but the zeros: with elements of 16 bytes the product stays below 2^63."""
_FIELDS = tuple(item.name for item in fields(ForeignTensor))


def like(tensor: ForeignTensor, **changes: Any) -> ForeignTensor:
    """A tensor with some other fields; also of a kind that looks its fields up (`replace` would
    ask that kind to make it)."""
    values = {name: getattr(tensor, name) for name in _FIELDS}
    return ForeignTensor(**{**values, **changes})


@dataclass(frozen=True, slots=True, eq=False)
class ForeignContainer:
    """A dict with attributes of its own, kept as a container: the parts of a composite tensor, or
    what a module wrote beside its state.

    `attributes`: dotted key -> plain value.
    """

    tree: dict[str, Any]
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ForeignValue:
    """A plain value of a framework that need not be installed, as its adapter packs it:
    ("torch.Size", [2, 3])."""

    tag: str
    payload: object


@dataclass(frozen=True, slots=True)
class ForeignTree:
    """All of a foreign checkpoint.

    Flat: `tensors` and `keys`. A format that also knows values, lists and ties gives a `root`, and
    is made by `tree_of`.

    Attributes:
        format: The format's name.
        tensors: By name in the checkpoint, in the order of the file. Tied ones stand under each name.
        metadata: What the file says about itself, for the checkpoint's metadata.
        skipped: Foreign name -> reason, for tensors and values that are not carried.
        ignored: File -> reason, for files beside that are not part of it.
        keys: Name in the checkpoint -> the dict keys that lead to it.
        opaque: Name -> class, for objects that are carried as the plain data they consist of.
        root: The nested tree: dicts, lists, tuples and values with a `ForeignTensor`,
            `ForeignContainer` or `ForeignValue` where one belongs.
        flat: The same as columns.
        file: The file that was opened, where the path given is none itself: a prefix.
        step, metrics: Of the checkpoint that was exported, where the file tells them.
    """

    format: str
    tensors: Mapping[str, ForeignTensor]
    metadata: Mapping[str, object] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    opaque: Mapping[str, str] = field(default_factory=dict)
    root: Any = None
    flat: FlatTree | None = None
    file: str = ""
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all values; a tie counts once."""
        once = {t.identity or name: t.nbytes for name, t in self.tensors.items()}
        return sum(once.values())


def tree_of(
    root: Any,
    file_format: str,
    *,
    metadata: Mapping[str, object] = MappingProxyType({}),
    nbytes: int | None = None,
    skipped: Mapping[str, str] = MappingProxyType({}),
    ignored: Mapping[str, str] = MappingProxyType({}),
    opaque: Mapping[str, str] = MappingProxyType({}),
) -> ForeignTree:
    """The foreign tree of a nested one, whose tensors are all `ForeignTensor`s; they get the names
    that a save would give them.

    Args:
        nbytes: Of the file, if it is a stranger's: the names of all leaves are bounded by it. A long
            key above a hundred thousand short ones is a small file and gigabytes of names.
    Raises:
        UnsupportedError: Something in it is of no kind that a checkpoint has; it is named.
    """
    from ckptfmt.engine import flatten
    from ckptfmt.format import LEAF_TENSOR, SECTIONS_NBYTES_MAX, split_name

    room = SECTIONS_NBYTES_MAX
    if nbytes is not None:
        room = min(room, _NAMES_FREE + _NAMES_EXPANSION_MAX * nbytes)
    try:
        flat = flatten(root, names_nbytes_max=room)
    except UsageError as error:
        raise UnsupportedError(
            f"the file holds what no checkpoint can: {error.what}",
            reason="foreign-value",
            where=error.where,
            expected=error.expected,
            found=error.found,
            do="load it with the framework that wrote it, and save plain data",
        ) from error
    tensors = {}
    for name, kind, row in zip(flat.names, flat.kinds, flat.rows, strict=True):
        if kind == LEAF_TENSOR:
            made = flat.tensors[row].keep
            assert isinstance(made, ForeignTensor)
            foreign = name
            if "~" in name:
                foreign = "/".join(_plain(part) for part in split_name(name))
            if made.name or type(made) is not ForeignTensor:
                made = like(made, name=name, foreign_name=foreign)
            else:
                # Nobody else has seen it: a copy for each name would be a third of the time.
                object.__setattr__(made, "name", name)
                object.__setattr__(made, "foreign_name", foreign)
            tensors[name] = made
    return ForeignTree(
        file_format,
        tensors,
        metadata=metadata,
        skipped=skipped,
        ignored=ignored,
        opaque=opaque,
        root=root,
        flat=flat,
    )


def _plain(part: str) -> str:
    from ckptfmt.format import parse_key

    key = parse_key(part)
    return key if isinstance(key, str) else repr(key)


class Importer(ABC):
    """One foreign format. Stateless."""

    @abstractmethod
    def detect(self, path: str) -> bool:
        """Whether a file or folder is of this format, by its content. Raises nothing for others."""

    @abstractmethod
    def read(self, path: str) -> ForeignTree:
        """The tree, its tensors unread; everything that can be checked without them is."""


def open_regular(path: str, where: str) -> tuple[int, int]:
    """(descriptor, size) of a regular file, opened without following a link at the last step.

    The caller resolves links first and decides which are legal. A FIFO or device is refused, and
    opening one does not wait.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    flags |= getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise NotFoundError("no such file", reason="file", where=where) from None
    except OSError as error:
        raise StorageError(
            "cannot open the file",
            reason="access" if isinstance(error, PermissionError) else "open",
            where=where,
            found=error.strerror,
            errno=error.errno,
        ) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CorruptError(
            "not a regular file", reason="foreign-file-type", where=where, do="give a file"
        )
    return descriptor, status.st_size
