"""`unchanged=`: tensors that the caller vouches for are taken from a base by name: neither read nor
hashed (experimental). Spec: 08-protocol.

Nothing is taken on trust but the bytes: name, dtype, shape and cuts must be those of the base, and
its chunks must still be stored when the save is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ckptfmt.engine.plan import SavePlan
from ckptfmt.engine.select import Matcher
from ckptfmt.errors import UsageError
from ckptfmt.format import LEAF_VALUE, Index, TreeSection
from ckptfmt.types import Select


def vouch(plan: SavePlan, bases: Sequence[Index], select: Select) -> SavePlan:
    """The plan with the digests of the tensors that are vouched for filled in.

    Args:
        bases: Whose chunks may be reused, the first one first.
        select: Leaf names; a container takes the tensors below it.
    Raises:
        UsageError: A pattern matches no tensor, or no base has this tensor as it is now.
    """
    tree = plan.tree
    rows = _selected(tree, select)
    known = [
        (index.tree, _tensors(index.tree))
        for index in bases
        if index.header.algorithm == plan.options.digest
    ]
    for tensor, name in rows.items():
        found = [(old, names[name]) for old, names in known if name in names]
        same = next((at for at in found if _facts(*at) == _facts(tree, tensor)), None)
        if same is None:
            raise UsageError(
                "a tensor that is said to be unchanged is not in the base as it is now",
                reason="unchanged",
                where=repr(name),
                expected=_text(tree, tensor),
                found=_text(*found[0]) if found else "no tensor of this name",
                do="leave it out of unchanged=, or name a base that has it",
            )
        old, row = same
        tree.chunk_digests[_chunks(tree, tensor)] = old.chunk_digests[_chunks(old, row)]
    return replace(plan, vouched=frozenset(rows))


def _selected(tree: TreeSection, select: Select) -> dict[int, str]:
    """Tensor row -> a name under which it was selected."""
    matcher = Matcher(select)
    rows: dict[int, str] = {}
    for name, tensor in _tensors(tree).items():
        if matcher(name):
            rows.setdefault(tensor, name)
    unused = matcher.unused()
    if unused or not rows:
        raise UsageError(
            "unchanged= names no tensor",
            reason="unchanged",
            where=repr(unused[0]) if unused else "",
            do="name leaves of the tree, or containers of them",
        )
    return rows


def _tensors(tree: TreeSection) -> dict[str, int]:
    """Leaf name -> tensor row."""
    return {
        name: row
        for name, kind, row in zip(
            tree.leaf_names, tree.leaf_kinds.tolist(), tree.leaf_rows.tolist()
        )
        if kind != LEAF_VALUE
    }


def _chunks(tree: TreeSection, tensor: int) -> slice:
    first, last = tree.tensor_region_starts[tensor], tree.tensor_region_starts[tensor + 1]
    return slice(int(tree.region_chunk_starts[first]), int(tree.region_chunk_starts[last]))


def _dims(tree: TreeSection, tensor: int) -> list[int]:
    start = int(tree.dims_starts[tensor])
    dims: list[int] = tree.tensor_dims[start : start + int(tree.tensor_ndims[tensor])].tolist()
    return dims


def _facts(tree: TreeSection, tensor: int) -> tuple[object, ...]:
    """All that decides which bytes a chunk's digest is of, but the bytes."""
    regions = slice(*map(int, tree.tensor_region_starts[tensor : tensor + 2]))
    boxes = slice(
        int(tree.region_dims_starts[regions.start]), int(tree.region_dims_starts[regions.stop])
    )
    columns = (
        tree.region_origins[boxes],
        tree.region_extents[boxes],
        tree.region_nchunks[regions],
        tree.chunk_raw[_chunks(tree, tensor)],
    )
    dtype = tree.dtype(tensor)
    return dtype, _dims(tree, tensor), *(column.astype(np.int64).tolist() for column in columns)


def _text(tree: TreeSection, tensor: int) -> str:
    chunks = _chunks(tree, tensor)
    cut = f"in {chunks.stop - chunks.start} chunks" if chunks.stop - chunks.start > 1 else ""
    return f"{tree.dtype(tensor).name} {_dims(tree, tensor)} {cut}".rstrip()
