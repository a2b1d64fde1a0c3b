"""A checkpoint of a store as a source of a conversion, like a file of another format."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ckptfmt.foreign.base import ForeignTensor, ForeignTree
from ckptfmt.foreign.lazy import has_fixed_width
from ckptfmt.foreign.mapped import KEEP
from ckptfmt.foreign.stored_boxes import Maps

if TYPE_CHECKING:
    from ckptfmt.engine import Checkpoint, FlatTree, Store, StoredTensor
    from ckptfmt.types import StrPath

FORMAT = "ckptfmt"


def is_store(path: StrPath | Store | Checkpoint) -> bool:
    """Whether `STORE[@WHICH]` is a URL, or a store of this machine; or what is open already."""
    from ckptfmt.engine import Checkpoint, Store, parse_where

    if isinstance(path, Store | Checkpoint):
        return True
    url = parse_where(path)[0].url
    return "://" in url or os.path.isdir(os.path.join(url, "checkpoints"))


def open_stored(path: StrPath | Store | Checkpoint) -> Checkpoint:
    """The checkpoint that a path names."""
    from ckptfmt.engine import Checkpoint, parse_where

    if isinstance(path, Checkpoint):
        return path
    store, at = parse_where(path)
    return store.open(at)


def read_stored(checkpoint: Checkpoint) -> tuple[ForeignTree, FlatTree]:
    """A checkpoint's leaves, unread, and the same as columns.

    The tree has no `root`: rules make one, also if there are none (`map_tree`).
    """
    from ckptfmt.engine import FlatTree, StoredTensor, TensorSource
    from ckptfmt.format import LEAF_TENSOR, parse_value

    section = checkpoint.index.tree
    flat = FlatTree(
        names=list(section.leaf_names),
        kinds=section.leaf_kinds.tolist(),
        rows=section.leaf_rows.tolist(),
        values=list(section.values),
        containers=list(
            zip(section.container_names, section.container_kinds, section.container_arguments)
        ),
        container_attributes={
            key: list(zip(found.rows.tolist(), found.values))
            for key, found in section.container_attributes.items()
        },
    )
    attributes: dict[int, dict[str, object]] = {}
    for key, found in section.leaf_attributes.items():
        for position, data in zip(found.rows.tolist(), found.values):
            attributes.setdefault(position, {})[key] = parse_value(data, KEEP, where=key)
    tensors: dict[str, ForeignTensor] = {}
    maps = Maps(checkpoint)
    for position, (name, kind, row) in enumerate(zip(flat.names, flat.kinds, flat.rows)):
        if kind == LEAF_TENSOR:
            stored = StoredTensor(checkpoint, name, row)
            tensors[name] = _tensor(checkpoint, stored, attributes.get(position, {}), maps)
    for row in range(len(section.tensor_dtypes)):
        fetch = partial(maps.small, row)
        flat.tensors.append(TensorSource(section.dtype(row).name, section.shape(row), fetch))
    made = ForeignTree(FORMAT, tensors, metadata=dict(checkpoint.info.metadata))
    return made, flat


def _tensor(
    checkpoint: Checkpoint, stored: StoredTensor, attributes: dict[str, object], maps: Maps
) -> ForeignTensor:
    info, mapped = checkpoint.info, maps.is_mapped(stored)
    by_boxes = not mapped and has_fixed_width(stored.dtype_name)
    return ForeignTensor(
        name=stored.name,
        foreign_name=stored.name,
        dtype=stored.dtype_name,
        shape=stored.shape,
        nbytes=stored.nbytes,
        where=f"{info.url}@{info.name}: {stored.name}",
        fetch=partial(maps.whole, stored) if mapped else partial(maps.small, stored.row),
        identity=("row", stored.row),
        attributes=attributes,
        box=partial(maps.read, stored) if by_boxes else None,
    )
