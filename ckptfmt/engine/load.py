"""Loading: a checkpoint as a new tree. open -> index -> plan -> read -> decode. Spec: 03, 08."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.adapter import StoredLeaf
from ckptfmt.engine.arrays import read_tensors
from ckptfmt.engine.composites import holder_of
from ckptfmt.engine.leaves import attributes_by_row, nest, parse_leaf_value
from ckptfmt.engine.open import Checkpoint
from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.select import select_positions
from ckptfmt.engine.source import CheckpointSource, grouped
from ckptfmt.errors import UsageError
from ckptfmt.events import Progress
from ckptfmt.format import LEAF_TENSOR, LEAF_VALUE
from ckptfmt.types import Mode, Select

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
Convert = Callable[[Array, StoredLeaf], object]
Compose = Callable[[Mapping[str, object], str], Callable[[Any], Any] | None]


def load_tree(
    checkpoint: Checkpoint,
    *,
    names: Select | None = None,
    mode: Mode = "auto",
    verify: bool = True,
    max_nbytes: int | None = None,
    progress: Progress = False,
    convert: Convert | None = None,
    compose: Compose | None = None,
    fused: bool = False,
) -> Any:
    """The tree that was saved (or the selected part), with NumPy arrays, writable and private.

    Args:
        convert: Makes another framework's tensor of each array; tied leaves come with one array.
        compose: Says how a container with these attributes becomes one tensor of its parts.
        fused: `convert` copies: arrays are read in groups and dropped when they are converted, so
            that memory never holds the state twice.
    """
    tree, info = checkpoint.index.tree, checkpoint.info
    positions = select_positions(
        tree.leaf_names, names, f"{checkpoint.info.name} of {checkpoint.info.url}"
    )
    kinds = tree.leaf_kinds[positions] if positions else tree.leaf_kinds[:0]
    rows = tree.leaf_rows[positions] if positions else tree.leaf_rows[:0]
    wanted = np.unique(rows[kinds != LEAF_VALUE])
    total = int(tree.tensor_nbytes[wanted].sum())
    if mode != "mmap" or max_nbytes is not None:  # a map takes no memory that cannot be given back
        check_limit(total, max_nbytes)
    makers = _makers(CheckpointSource(checkpoint).container_attributes(), compose)
    attributes = attributes_by_row(tree.leaf_attributes, tree.leaf_names) if convert else {}
    leaves: list[Any] = [None] * len(positions)
    of_row: dict[int, list[int]] = {}
    for at, (position, kind, row) in enumerate(zip(positions, kinds.tolist(), rows.tolist())):
        if kind == LEAF_VALUE:
            leaves[at] = parse_leaf_value(tree.values[row], tree.leaf_names[position])
        else:
            of_row.setdefault(row, []).append(at)

    def made(at: int, array: Array) -> object:
        position, row = positions[at], int(rows[at])
        name = tree.leaf_names[position]
        if kinds[at] != LEAF_TENSOR:
            return parse_leaf_value(array.tobytes(), name)
        if convert is None:
            return array
        part = holder_of(name, makers) is not None
        extra = attributes.get(position, {})
        stored = StoredLeaf(name, tree.dtype(row).name, array.shape, row, None, extra, part=part)
        return convert(array, stored)

    groups = grouped(list(of_row), tree.tensor_nbytes) if fused else [list(of_row)]
    with Reporter(progress, "load", total, checkpoint=info.name, step=info.step) as reporter:
        for group in groups:
            arrays = read_tensors(
                checkpoint.backend, checkpoint.index, group,
                mode=mode, verify=verify, own=fused, reporter=reporter,
            )  # fmt: skip
            for row in checkpoint.object_rows & arrays.keys():
                arrays[row] = arrays[row].astype(object)
            for row in group:
                array = arrays.pop(row)
                for at in of_row[row]:
                    leaves[at] = made(at, array)
    return nest(checkpoint.index, positions, leaves, partial=names is not None, makers=makers)


def _makers(
    containers: Mapping[str, Mapping[str, Any]], compose: Compose | None
) -> dict[str, Callable[[Any], Any]]:
    if compose is None:
        return {}
    found = {name: compose(attributes, name) for name, attributes in containers.items()}
    return {name: maker for name, maker in found.items() if maker is not None}


def check_limit(nbytes: int, max_nbytes: int | None) -> None:
    """Before any allocation: no more logical bytes than asked for, nor than this machine has."""
    limit, do = max_nbytes, "raise max_nbytes, or take part with names="
    if isinstance(limit, bool) or not isinstance(limit, int | None):
        raise UsageError(
            "max_nbytes is no number of bytes",
            reason="max-nbytes",
            expected="an int",
            found=f"{type(limit).__name__} {limit!r}"[:80],
            do="for example max_nbytes=4 << 30",
        )
    if limit is None:
        limit = _memory_nbytes()
        do = 'take part with names=, or use mode="mmap"; max_nbytes= overrides this'
    if limit is not None and nbytes > limit:
        raise UsageError(
            "checkpoint is larger than allowed",
            reason="max-nbytes",
            expected=f"at most {limit} bytes",
            found=f"{nbytes} bytes",
            do=do,
        )


def _memory_nbytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
