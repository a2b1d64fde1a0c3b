"""What the readers of torch's file formats share: a pickle and its storages become a tree."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import CorruptError
from ckptfmt.foreign.base import ForeignTree, tree_of
from ckptfmt.foreign.pickle_machine import PickleMachine, illegal
from ckptfmt.foreign.pickle_tree import OMIT, TreeMaker
from ckptfmt.foreign.pytorch.builders import Rebuild, attributes_of, storage_finder, value_of
from ckptfmt.foreign.pytorch.dtypes import TorchDtype
from ckptfmt.foreign.pytorch.storages import Storage

if TYPE_CHECKING:
    from ckptfmt.foreign.pickle_machine import Builder

FORMAT = "pytorch"
REASON = "pytorch"


def corrupt(what: str, reason: str, where: str, found: object = None) -> CorruptError:
    return CorruptError(
        what, reason=f"{REASON}-{reason}", where=where, found=found, do="get the file again"
    )


class StorageTable:
    """The storages that a pickle refers to, each made at its first reference.

    Args:
        make: (key, dtype, bytes, untyped) -> the storage; raises `illegal(...)` if there is none such.
    """

    def __init__(self, make: Callable[[str, TorchDtype, int, bool], Storage]) -> None:
        self.make = make
        self.found: dict[str, Storage] = {}
        self._typed: dict[tuple[str, str], Storage] = {}

    def find(self, key: Any, dtype: TorchDtype, nbytes: int, is_untyped: bool) -> Storage:
        name = str(key) if type(key) is int else key
        if type(name) is not str:
            raise illegal("a storage's key that is no text")
        first = self.found.get(name)
        if first is None:
            made = self.found[name] = self.make(name, dtype, nbytes, is_untyped)
            return made
        if first.nbytes != nbytes:
            raise illegal(f"storage {name[:80]} has {first.nbytes} bytes and {nbytes}")
        if first.dtype is dtype and first.is_untyped == is_untyped:
            return first
        # One storage under two dtypes: the same bytes.
        kind = f"{dtype.name}{is_untyped}"
        other = self._typed.get((name, kind))
        if other is None:
            other = first.part(0, nbytes)
            other.dtype, other.is_untyped = dtype, is_untyped
            self._typed[name, kind] = other
        return other


def machine_for(
    data: bytes | mmap.mmap,
    span: tuple[int, int],
    where: str,
    *,
    file_nbytes: int,
    storages: StorageTable,
    more: Mapping[str, Builder] = {},
) -> PickleMachine:
    """A machine for torch's pickles, over data[start:stop)."""
    return PickleMachine(
        data,
        *span,
        where=where,
        reason=REASON,
        builders={**Rebuild(file_nbytes).builders(), **more},
        persistent=storage_finder(storages.find),
    )


def tree_maker(machine: PickleMachine, where: str, nbytes: int) -> TreeMaker:
    """What makes trees of what a machine made of a pickle of `nbytes` bytes."""
    return TreeMaker(
        machine.states,
        where=where,
        reason=REASON,
        nbytes=nbytes,
        value_of=value_of,
        attributes_of=attributes_of,
    )


def finish(
    machine: PickleMachine,
    obj: Any,
    where: str,
    *,
    nbytes: int,
    metadata: Mapping[str, object],
) -> ForeignTree:
    """The tree of what a machine made of a pickle of `nbytes` bytes."""
    maker = tree_maker(machine, where, nbytes)
    root = maker.make(obj)
    return tree_of(
        {} if root is OMIT else root,
        FORMAT,
        metadata=metadata,
        nbytes=nbytes,
        skipped=maker.skipped,
        ignored=maker.ignored,
        opaque=maker.opaque,
    )
