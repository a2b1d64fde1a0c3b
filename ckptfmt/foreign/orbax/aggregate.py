"""`checkpoint`, which older releases wrote: the tree in Flax's msgpack, arrays by reference."""

from __future__ import annotations

import os
from typing import Any

from ckptfmt.foreign.flax import read_msgpack
from ckptfmt.foreign.orbax.structure import Path

AGGREGATE = "checkpoint"
_REFERENCE = "PLACEHOLDER://"


def read_aggregate(folder: str, where: str) -> tuple[Any, dict[str, Path]]:
    """The tree, and name of an array -> where it belongs in it."""
    root = read_msgpack(os.path.join(folder, AGGREGATE), f"{where}/{AGGREGATE}")
    places: dict[str, Path] = {}

    def walk(node: Any, path: Path) -> None:
        if isinstance(node, dict):
            for key, item in node.items():
                walk(item, (*path, key))
        elif isinstance(node, list):
            for at, item in enumerate(node):
                walk(item, (*path, at))
        elif isinstance(node, str) and node.startswith(_REFERENCE):
            places[node.removeprefix(_REFERENCE)] = path

    walk(root, ())
    return root, places
