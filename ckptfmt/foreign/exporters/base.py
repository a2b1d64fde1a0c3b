"""What an exporter is: it says what its format can hold of a tree, writes it, and finds it again.

Placing, durability, names and comparison stay `exporting`'s work. What the format cannot hold is
listed in `skipped`; nothing is dropped in silence.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ckptfmt.foreign.base import ForeignTree
from ckptfmt.foreign.exporters.staging import Staging, split_destination
from ckptfmt.foreign.exporters.tree import ExportTensor, ExportTree, Value
from ckptfmt.foreign.file_map import locating
from ckptfmt.foreign.registry import detect_format, read_foreign
from ckptfmt.foreign.tree_record import RECORD_KEY
from ckptfmt.format import dtype_of

IN_RECORD = f"{RECORD_KEY} in the metadata"
"""Where a value is that the format has no place for."""
_WIDE: Mapping[type, type[np.generic]] = {
    bool: np.bool_,
    float: np.float64,
    complex: np.complex128,
}


@dataclass(slots=True)
class ExportPlan:
    """What goes into the file.

    Attributes:
        tree: All of the source.
        tensors: Those that are carried, in the order in which they are written.
        names: Name of a leaf -> its name in the file, for every leaf that is carried.
        dtypes: Name of a leaf -> dtype of what the importer finds, where it is another one.
        skipped: Name -> why it is not carried.
        transformed: Name -> what became of it, where that is not what it was.
        metadata: What is written beside the tensors.
        state: What else the exporter remembers.
    """

    tree: ExportTree
    tensors: list[ExportTensor] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    transformed: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    state: Any = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def skip(self, tensor: ExportTensor, reason: str) -> None:
        self.skipped.update(dict.fromkeys(tensor.names, reason))

    def skip_values(self, names: Iterable[str], reason: str) -> None:
        """Values that were to be notes, where there is no place for notes."""
        for name in names:
            self.skipped[name] = reason
            self.transformed.pop(name, None)

    def stored(self, tensor: ExportTensor) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape that the importer is to find."""
        return self.dtypes.get(tensor.name, tensor.dtype), tensor.shape

    def carry_scalars(
        self, named: Callable[[str], str], refuse: Callable[[ExportTensor], str]
    ) -> None:
        """Carry numbers and texts as tensors without axes, as other formats have nothing else; what
        is neither is a note.

        Args:
            named: A leaf's name in the file.
            refuse: Why a tensor cannot be carried, or "".
        """
        for name, value in self.values():
            made = scalar_tensor(name, value)
            reason = refuse(made) if made is not None else ""
            if made is None or reason:
                self.carry_in_record(name)
                continue
            self.tensors.append(made)
            self.names[name] = named(name)
            self.transformed[name] = f"a tensor of {made.dtype}"

    def carry_in_record(self, name: str) -> None:
        """A value that the format cannot hold is a note beside, which imports read."""
        self.names[name] = IN_RECORD
        self.transformed[name] = "a note that an import reads"

    def values(self) -> list[tuple[str, Any]]:
        """The plain values by name."""
        return [(n, leaf.value) for n, leaf in self.tree.leaves.items() if isinstance(leaf, Value)]


def scalar_tensor(name: str, value: Any) -> ExportTensor | None:
    """A number or a text as a tensor without axes; None for other values."""
    if isinstance(value, str | bytes) and not isinstance(value, np.generic):
        array = np.empty((), object)
        array[()] = value
    elif isinstance(value, np.generic):
        array = np.asarray(value)
    elif type(value) is int and -(1 << 63) <= value < 1 << 63:
        array = np.asarray(value, np.int64)
    elif type(value) in _WIDE:
        array = np.asarray(value, _WIDE[type(value)])
    else:
        return None
    return ExportTensor([name], -1, dtype_of(array).name, (), {}, array)


class Exporter(ABC):
    """One destination of one foreign format.

    Attributes:
        shape: What an export is: a file, or several of one prefix; or a folder.
        keeps_composites: Tensors of tensors (sparse, quantized) are such again.
        has_record: What the format cannot say stands beside, and an import gives the same tree.
        parent, name: Of the destination.
    """

    format: str
    shape: Literal["file", "folder"] = "file"
    keeps_composites = False
    has_record = True

    def __init__(self, dst: str) -> None:
        self.parent, self.name = split_destination(dst)

    @abstractmethod
    def plan(self, tree: ExportTree, options: Mapping[str, Any]) -> ExportPlan:
        """What is carried, under which names. Writes nothing.

        Args:
            options: `shard_nbytes`, `like`.
        Raises:
            UnsupportedError: The format has no names for these leaves.
        """

    @abstractmethod
    def write(self, plan: ExportPlan, staging: Staging) -> Sequence[tuple[str, str]]:
        """Write all of it.

        Returns:
            (name in the staging folder, final name), in the order in which they are to be given;
            of a folder nothing.
        """

    def read_back(self, plan: ExportPlan, staging: Staging) -> ForeignTree:
        """What the importer finds in what was written, under the names of the leaves."""
        path = staging.folder if self.shape == "folder" else staging.path(self.name)
        with locating():
            return read_foreign(path, source_format=self.format)

    @property
    def path(self) -> str:
        return os.path.join(self.parent, self.name)

    def targets(self) -> Sequence[str]:
        """Paths that must not be there already."""
        return [self.path]

    def is_own(self, path: str) -> bool:
        """Whether what is there is of this format, and may be replaced."""
        return detect_format(path) == self.format

    def published(self) -> None:  # noqa: B027  (most formats need nothing)
        """Called when all files have their names."""
