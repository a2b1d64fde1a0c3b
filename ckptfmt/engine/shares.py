"""Who writes what several ranks hold: spread over them, the same for the same claims. Pure.

Spec: 08-protocol §8.9.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckptfmt.engine.merge import Boxes, check_tiled, gather_boxes
from ckptfmt.engine.merge_leaves import Leaves, merge_leaves
from ckptfmt.format import Fragment, TreeSection

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGE_NBYTES = 1 << 20
"""A box of this size goes to the rank that has least; smaller ones go in runs, neighbours together."""


def share_out(claims: Sequence[Fragment]) -> tuple[TreeSection, list[NDArray[np.bool_]]]:
    """Choose who writes each box.

    Args:
        claims: Of all ranks, by rank: fragments that list all they hold as replicas.
    Returns:
        The merged tree without regions, and for each rank which of its replicas it is to write.
    Raises:
        MismatchError: As `merge_fragments`, but for what only the bytes can tell.
    """
    leaves = merge_leaves(claims)
    boxes = gather_boxes(claims, leaves)
    check_tiled(leaves, boxes)
    owners = _owners(boxes, _nbytes(leaves, boxes), len(claims))
    masks = [np.zeros(len(claim.replicas.tensors), bool) for claim in claims]
    mine = boxes.ranks[boxes.order] == owners[boxes.group]
    for position in np.flatnonzero(mine).tolist():
        box = int(boxes.order[position])
        masks[int(boxes.ranks[box])][int(boxes.rows[box])] = True
    return leaves.tree(), masks


def _nbytes(leaves: Leaves, boxes: Boxes) -> list[int]:
    """About how many bytes each group's box has."""
    chosen = boxes.order[boxes.firsts]
    owners = boxes.tensors[chosen]
    bits = np.array([max(d.bits, 128 if d.is_variable else 1) for d in leaves.dtypes], np.int64)
    axes = np.arange(boxes.extents.shape[1]) < leaves.ndims[owners][:, None]
    volume = np.where(axes, boxes.extents[chosen], 1).prod(axis=1)
    made: list[int] = (volume.astype(np.int64) * bits[leaves.tensor_dtypes[owners]] // 8).tolist()
    return made


def _owners(boxes: Boxes, nbytes: list[int], size: int) -> NDArray[np.int64]:
    """Group -> the rank that writes it."""
    firsts = boxes.firsts.tolist()
    ends = [*firsts[1:], len(boxes.order)]
    ranks = boxes.ranks[boxes.order].tolist()
    owners = [0] * len(firsts)
    loads = [0] * size
    large: list[int] = []
    small: dict[tuple[int, ...], list[int]] = {}
    for group, (begin, end) in enumerate(zip(firsts, ends)):
        if end - begin == 1:
            owners[group] = ranks[begin]
            loads[ranks[begin]] += nbytes[group]
        elif nbytes[group] >= LARGE_NBYTES:
            large.append(group)
        else:
            small.setdefault(tuple(ranks[begin:end]), []).append(group)
    for group in sorted(large, key=lambda group: -nbytes[group]):
        holders = ranks[firsts[group] : ends[group]]
        chosen = min(holders, key=loads.__getitem__)
        owners[group] = chosen
        loads[chosen] += nbytes[group]
    for holders_of, groups in small.items():
        _spread(groups, nbytes, holders_of, loads, owners)
    return np.array(owners, np.int64)


def _spread(
    groups: list[int],
    nbytes: list[int],
    holders: tuple[int, ...],
    loads: list[int],
    owners: list[int],
) -> None:
    """Give each holder a run of neighbours, the least loaded first, until all are about even."""
    total = sum(nbytes[group] for group in groups) + sum(loads[rank] for rank in holders)
    even = -(-total // len(holders))
    queue = [(loads[rank], rank) for rank in holders]
    heapq.heapify(queue)
    load, rank = heapq.heappop(queue)
    for group in groups:
        if load + nbytes[group] > even and queue and queue[0][0] < load:
            loads[rank] = load
            load, rank = heapq.heappop(queue)
        owners[group] = rank
        load += nbytes[group]
    loads[rank] = load
