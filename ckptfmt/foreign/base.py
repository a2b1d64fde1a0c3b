"""What an importer is: it finds out whether a file is its own, and reads it as a tree of lazy leaves.

Saving stays the engine's work. What an importer cannot carry raises `UnsupportedError` naming the
leaf, or is listed in `skipped`; nothing is dropped in silence.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import CorruptError, NotFoundError, StorageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    """

    name: str
    foreign_name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    where: str
    fetch: Callable[[], NDArray[Any]]
    must_check: bool = False


@dataclass(frozen=True, slots=True)
class ForeignTree:
    """All of a foreign checkpoint.

    Attributes:
        format: The format's name.
        tensors: By name in the checkpoint, in the order of the file.
        metadata: What the file says about itself, for the checkpoint's metadata.
        skipped: Foreign name -> reason, for tensors that are not carried.
        ignored: File -> reason, for files beside that are not part of it.
        keys: Name in the checkpoint -> the dict keys that lead to it.
    """

    format: str
    tensors: Mapping[str, ForeignTensor]
    metadata: Mapping[str, object] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


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
