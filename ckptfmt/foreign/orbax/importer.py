"""Which of Orbax's layouts a folder is, and its tree."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from ckptfmt.errors import CorruptError, NotFoundError
from ckptfmt.foreign.base import ForeignTensor, ForeignTree, Importer, like, tree_of
from ckptfmt.foreign.orbax.aggregate import AGGREGATE, read_aggregate
from ckptfmt.foreign.orbax.arrays import OCDBT, ZARR, ZARR3, Arrays, check_folder, corrupt
from ckptfmt.foreign.orbax.structure import (
    EMPTY,
    METADATA,
    Level,
    Path,
    Structure,
    put,
    read_json,
    read_strings,
    read_structure,
    settled,
)
from ckptfmt.foreign.tree_record import with_record

FORMAT = "orbax"
CHECKPOINT = "_CHECKPOINT_METADATA"
_JSON, _DEFAULT = "metadata", "default"
_STEP = re.compile(r"(?:[a-zA-Z0-9_-]*?_)?([0-9]{1,12})\Z")
_NOT_ITEMS = ("array_metadatas", "d")
_PLAIN = (np.dtype("int64"), np.dtype("float64"), np.dtype("bool"), np.dtype("complex128"))


class OrbaxImporter(Importer):
    """Row `orbax` of IMPORTERS."""

    def detect(self, path: str) -> bool:
        if not os.path.isdir(path):
            return False
        try:
            names = set(os.listdir(path))
        except OSError:
            return False
        known = bool(names & {CHECKPOINT, METADATA, OCDBT})
        return known or bool(_steps(path)) or _has_arrays(path, names)

    def read(self, path: str) -> ForeignTree:
        folder = os.path.realpath(path)
        if not os.path.isdir(folder):
            raise NotFoundError("no such folder", reason="file", where=path)
        steps = _steps(folder)
        if steps and not os.path.lexists(os.path.join(folder, CHECKPOINT)):
            folder = os.path.join(folder, steps[max(steps)])
        where = os.path.basename(folder)
        nbytes = check_folder(folder, where)
        made = _Reader(nbytes)
        if os.path.isfile(os.path.join(folder, METADATA)):
            structure = read_structure(folder, where)
            if structure.record is not None:
                return made.recorded(folder, where, structure)
        if _is_item(folder):
            root = made.item(folder, where)
        else:
            root = made.composite(folder, where)
        return tree_of(root, FORMAT, skipped=made.skipped, ignored=made.ignored)


def _steps(folder: str) -> dict[int, str]:
    """Step -> name of its folder, of a `CheckpointManager`'s folder; those that are complete."""
    made: dict[int, str] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return made
    for name in names:
        match = _STEP.match(name)
        if match and os.path.isfile(os.path.join(folder, name, CHECKPOINT)):
            made[int(match[1])] = name
    return made


def _is_item(folder: str) -> bool:
    names = set(os.listdir(folder))
    return bool(names & {METADATA, OCDBT, AGGREGATE}) or _has_arrays(folder, names)


def _has_arrays(folder: str, names: set[str]) -> bool:
    """Whether a folder in it is an array."""
    arrays = (os.path.join(folder, name) for name in names)
    return any(os.path.isfile(os.path.join(a, z)) for a in arrays for z in (ZARR, ZARR3))


class _Reader:
    """Reads one checkpoint. `nbytes`: of all its files."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.skipped: dict[str, str] = {}
        self.ignored: dict[str, str] = {}

    def composite(self, folder: str, where: str) -> Any:
        """The items of a composite: one that is called `default` is the tree itself."""
        made: dict[str, Any] = {}
        for name in sorted(os.listdir(folder)):
            inner, at = os.path.join(folder, name), f"{where}/{name}"
            if not os.path.isdir(inner) or name in _NOT_ITEMS:
                continue
            if _is_item(inner):
                made[name] = self.item(inner, at)
            elif os.path.isfile(os.path.join(inner, _JSON)):
                made[name] = read_json(inner, _JSON, at)
            else:
                self.skipped[name] = "an item of a kind that is not known"
        if not made and not self.skipped:
            raise corrupt("a checkpoint without an item", "empty", where)
        return made[_DEFAULT] if set(made) == {_DEFAULT} and not self.skipped else made

    def item(self, folder: str, where: str) -> Any:
        """The tree of one item."""
        if os.path.isfile(os.path.join(folder, METADATA)):
            return self._described(folder, where, read_structure(folder, where))
        arrays = Arrays(folder, where, nbytes=self._nbytes, is_complete=False)
        if os.path.isfile(os.path.join(folder, AGGREGATE)):
            root, places = read_aggregate(folder, where)
        else:
            root, places = Level(), {name: tuple(name.split(".")) for name in arrays.names()}
            for path in places.values():
                put(root, path, None, where)
        found = self._opened(arrays, list(places), folder)
        tree: Any = root
        for name, path in places.items():
            tree = _replaced(tree, path, found[name])
        return settled(tree)

    def recorded(self, folder: str, where: str, structure: Structure) -> ForeignTree:
        """The tree as an export of ours describes it; it tells the values, too."""
        arrays = Arrays(folder, where, nbytes=self._nbytes, is_complete=structure.is_complete)
        names = [
            leaf.name
            for leaf in structure.leaves
            if leaf.kind not in EMPTY and leaf.kind != "string"
        ]
        openings = [(name, arrays.begin(name, is_zarr3=structure.is_zarr3)) for name in names]
        tensors = {}
        for name, opening in openings:
            found = arrays.finish(name, opening)
            if isinstance(found, str):
                raise corrupt(found, "dtype", f"{where}, {ascii(name)[:200]}")
            tensors[name] = like(found, name=name, foreign_name=name)
        return with_record(ForeignTree(FORMAT, tensors), where, structure.record)

    def _described(self, folder: str, where: str, structure: Structure) -> Any:
        arrays = Arrays(folder, where, nbytes=self._nbytes, is_complete=structure.is_complete)
        strings = read_strings(folder, where)
        wanted = [
            leaf for leaf in structure.leaves if leaf.kind not in EMPTY and leaf.kind != "string"
        ]
        opened = arrays.opened([leaf.name for leaf in wanted], is_zarr3=structure.is_zarr3)
        root = Level()
        for leaf in structure.leaves:
            value: Any
            if leaf.kind in EMPTY:
                value = EMPTY[leaf.kind]
            elif leaf.kind == "string":
                if leaf.name not in strings:
                    raise corrupt(
                        "a text that is not there", "strings", where, ascii(leaf.name)[:80]
                    )
                value = strings[leaf.name]
            else:
                value = next(opened)
                if isinstance(value, str):
                    self.skipped["/".join(map(str, leaf.path))] = value
                    continue
                if leaf.kind == "scalar" and not value.shape:
                    value = _scalar(value)
            if not leaf.path:
                return value
            put(root, leaf.path, value, where)
        return settled(root)

    def _opened(self, arrays: Arrays, names: list[str], folder: str) -> dict[str, Any]:
        """Arrays by name, of a folder that does not say how they are stored."""
        made: dict[str, Any] = {}
        openings = [(name, arrays.begin(name, is_zarr3=False)) for name in names]
        for name, opening in openings:
            try:
                found = arrays.finish(name, opening)
            except CorruptError:
                found = arrays.finish(name, arrays.begin(name, is_zarr3=True))
            if isinstance(found, str):
                self.skipped[name] = found
            made[name] = None if isinstance(found, str) else found
        return made


def _scalar(tensor: ForeignTensor) -> Any:
    """A number: Python's own where it is of their widths, else with its dtype."""
    array = tensor.fetch()
    return array.item() if array.dtype in _PLAIN else array[()]


def _replaced(node: Any, path: Path, value: Any) -> Any:
    """The tree with a leaf in place of what stood there."""
    if not path:
        return value
    node[path[0]] = _replaced(node[path[0]], path[1:], value)
    return node
