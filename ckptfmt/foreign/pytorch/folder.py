"""A folder of `pytorch_model-00001-of-00002.bin` shards, as its `*.bin.index.json` says."""

from __future__ import annotations

import os
from typing import Any

from ckptfmt.errors import UsageError
from ckptfmt.foreign.base import ForeignContainer, ForeignTree, tree_of
from ckptfmt.foreign.pytorch.reading import FORMAT, REASON, corrupt
from ckptfmt.foreign.shards import (
    check_homes,
    check_inside,
    ignored_files,
    read_index,
    resolve,
    twice,
)

INDEX_SUFFIX = ".bin.index.json"
SINGLE = "pytorch_model.bin"
SUFFIX = ".bin"


def is_folder(names: list[str]) -> bool:
    """Whether a folder with these files is one of torch's."""
    return SINGLE in names or any(name.endswith(INDEX_SUFFIX) for name in names)


def read_directory(path: str) -> ForeignTree:
    """The tree of a folder: its one index, or its one file."""
    from ckptfmt.foreign.pytorch.importer import read_file

    names = sorted(os.listdir(path))
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) == 1:
        return read_folder(path, indexes[0])
    if not indexes and SINGLE in names:
        return read_file(check_inside(path, SINGLE, where=path), SINGLE)
    raise UsageError(
        "the folder does not say what to read",
        reason=f"{REASON}-folder",
        where=path,
        expected=f"one *{INDEX_SUFFIX}, or {SINGLE}",
        found=", ".join(indexes)[:500] or "neither",
        do="give the file itself",
    )


def read_folder(folder: str, index_name: str) -> ForeignTree:
    """The tree that an index describes.

    Raises:
        NotFoundError: Shards are missing; all are named.
        CorruptError: The index leads out of the folder, names a tensor that its shard lacks, or a
            tensor stands in two shards.
    """
    from ckptfmt.foreign.pytorch.importer import read_file

    weight_map, info = read_index(folder, index_name, REASON)
    files = list(dict.fromkeys(weight_map.values()))
    found: dict[str, Any] = {}
    homes: dict[str, str] = {}
    skipped: dict[str, str] = {}
    opaque: dict[str, str] = {}
    for file, path in resolve(folder, files, index_name).items():
        shard = read_file(path, file)
        skipped |= {f"{file}: {name}": reason for name, reason in shard.skipped.items()}
        opaque |= shard.opaque
        for name, item in _items(shard.root, file).items():
            if name in homes:
                raise twice(name, (homes[name], file), index_name, REASON)
            homes[name] = file
            if name in weight_map:
                found[name] = item
            else:
                skipped[name] = f"tensor of {file} that {index_name} does not name"
    check_homes(homes, weight_map, index_name, REASON)
    return tree_of(
        {name: found[name] for name in weight_map},
        FORMAT,
        metadata={"index": info} if info else {},
        skipped=skipped,
        ignored=ignored_files(folder, files, index_name, SUFFIX),
        opaque=opaque,
    )


def _items(root: Any, file: str) -> dict[str, Any]:
    items = root.tree if isinstance(root, ForeignContainer) else root
    if not isinstance(items, dict) or any(type(key) is not str for key in items):
        raise corrupt("a shard is no dict of names", "shard", file)
    return items
