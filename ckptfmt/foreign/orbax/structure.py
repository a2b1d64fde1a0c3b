"""The structure of a tree, from `_METADATA`: typed keys, and what each leaf was."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptfmt.foreign.base import open_regular
from ckptfmt.foreign.orbax.arrays import corrupt
from ckptfmt.foreign.strict_json import SMALL_NBYTES_MAX, parse_small_json
from ckptfmt.foreign.tree_record import RECORD_KEY

METADATA, STRINGS = "_METADATA", "_strings.json"
_SEQUENCE, _DICT = 1, 2
_DEPTH_MAX = 90
_LEAVES_MAX = 1 << 18
EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": {}}
"""What a leaf without data is, by the name of its type."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf: `kind` as Orbax names it (`jax.Array`, `scalar`, `string`), `name` of its array."""

    path: Path
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Structure:
    """All leaves of a tree, and how its arrays are stored; `record`: what an export of ours has to say
    beside."""

    leaves: list[Leaf]
    is_zarr3: bool
    is_complete: bool
    record: str | None = None


def read_json(folder: str, name: str, where: str) -> Any:
    """A small JSON file of a folder."""
    at = f"{where}/{name}"
    descriptor, nbytes = open_regular(os.path.join(folder, name), at)
    try:
        data = os.read(descriptor, min(nbytes, SMALL_NBYTES_MAX) + 1)
    finally:
        os.close(descriptor)
    return parse_small_json(data, at, "orbax")


def read_structure(folder: str, where: str) -> Structure:
    """The structure of an item.

    Raises:
        CorruptError: `_METADATA` does not hold.
    """
    found = read_json(folder, METADATA, where)
    at = f"{where}/{METADATA}"
    table = found.get("tree_metadata") if isinstance(found, dict) else None
    if not isinstance(table, dict) or len(table) > _LEAVES_MAX:
        raise corrupt("no table of leaves", "metadata", at)
    leaves = [_leaf(row, f"{at}, {ascii(key)[:200]}") for key, row in table.items()]
    custom = found.get("custom_metadata")
    record = custom.get(RECORD_KEY) if isinstance(custom, dict) else None
    return Structure(
        leaves,
        is_zarr3=found.get("use_zarr3") is True,
        is_complete=found.get("store_array_data_equal_to_fill_value") is True,
        record=record if isinstance(record, str) else None,
    )


def _leaf(row: Any, where: str) -> Leaf:
    keys = row.get("key_metadata") if isinstance(row, dict) else None
    value = row.get("value_metadata") if isinstance(row, dict) else None
    if not isinstance(keys, list) or not isinstance(value, dict) or len(keys) > _DEPTH_MAX:
        raise corrupt("a leaf of no known form", "metadata", where)
    path: list[str | int] = []
    for part in keys:
        key, kind = (part.get(n) for n in ("key", "key_type")) if isinstance(part, dict) else "  "
        if type(key) is not str or kind not in (_SEQUENCE, _DICT):
            raise corrupt("a key of no known type", "metadata", where, ascii(part)[:80])
        if kind == _SEQUENCE and not (key.isascii() and key.isdigit() and len(key) < 8):
            raise corrupt("a position that is no number", "metadata", where, ascii(key)[:80])
        path.append(int(key) if kind == _SEQUENCE else key)
    kind = value.get("value_type")
    if type(kind) is not str:
        raise corrupt("a leaf of no type", "metadata", where)
    return Leaf(tuple(path), kind, ".".join(str(key) for key in path))


def read_strings(folder: str, where: str) -> dict[str, str]:
    """Texts by the names of their leaves."""
    if not os.path.lexists(os.path.join(folder, STRINGS)):
        return {}
    found = read_json(folder, STRINGS, where)
    if not isinstance(found, dict) or not all(type(text) is str for text in found.values()):
        raise corrupt("not a table of texts", "strings", f"{where}/{STRINGS}")
    return found


class Level(dict[str | int, Any]):
    """A level of a tree that is being made."""


def put(root: Level, path: Path, value: Any, where: str) -> None:
    """Put a leaf where its path leads."""
    node = root
    for key in path[:-1]:
        inner = node.setdefault(key, Level())
        if type(inner) is not Level:
            raise corrupt("a leaf below another", "metadata", where, ascii(path[:8]))
        node = inner
    if path[-1] in node:
        raise corrupt("two leaves of one path", "metadata", where, ascii(path[:8]))
    node[path[-1]] = value


def settled(level: Any) -> Any:
    """The tree: positions make lists where none is missing, keys dicts."""
    if type(level) is not Level:
        return level
    made = {key: settled(item) for key, item in level.items()}
    if made and all(type(key) is int for key in made):
        if set(made) == set(range(len(made))):
            return [made[at] for at in range(len(made))]
        return {key: made[key] for key in sorted(made)}
    return made
