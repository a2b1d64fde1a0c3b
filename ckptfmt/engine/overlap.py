"""Targets that share a part of their memory: whether all of them can hold what is stored.

Equal tensors are ties and are compared by identity; here it is about views such as `a[:12]` and
`a[8:]`, of one framework or of several over one memory. They may be restored, if the values agree
where they lie over each other. It is tried out beside that memory, before a target is touched.
Spec: 08-protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.adapter import Memory, Staged, Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
_WORK_MAX = 100_000
"""How long NumPy may look whether two views share an element, before that is assumed."""


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether two elements of one view may share a byte, as those of `as_strided` do."""
    if 0 in shape:
        return False
    reach = itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(strides, shape) if n > 1):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


def memories_of(targets: Iterable[Target]) -> list[Memory]:
    """Where the targets' values will lie; nothing if each has memory of its own, as most have."""
    if all(getattr(target, "owns_memory", not hasattr(target, "memory")) for target in targets):
        return []
    return [m for target in targets if hasattr(target, "memory") for m in target.memory()]


def clusters(memories: Sequence[Memory]) -> list[list[Memory]]:
    """Those that share bytes, with one another or within themselves, in the order given.

    Two of one identity are one tensor, which the comparison of ties has settled.
    """
    parent = list(range(len(memories)))

    def root(at: int) -> int:
        while parent[at] != at:
            at = parent[at]
        return at

    ranges = sorted((m.space, *_bounds(m), at) for at, m in enumerate(memories) if 0 not in m.shape)
    involved: set[int] = set()
    active: list[tuple[str, int, int, int]] = []
    for space, low, high, at in ranges:
        mine = memories[at]
        if overlaps_itself(mine.shape, mine.strides, mine.itemsize):
            involved.add(at)
        active = [other for other in active if other[0] == space and other[2] > low]
        for *_, other in active:
            if _share(memories[other], mine):
                involved |= {other, at}
                parent[root(max(other, at))] = root(min(other, at))
        active.append((space, low, high, at))
    made: dict[int, list[Memory]] = {}
    for at in sorted(involved):
        made.setdefault(root(at), []).append(memories[at])
    return list(made.values())


def disagreeing(memories: Sequence[Memory], wanted: Staged) -> tuple[str, list[str]] | None:
    """The first target that would not hold what is stored for it, and those it shares memory with."""
    for cluster in clusters([m for m in memories if m.name in wanted]):
        low = min(_bounds(m)[0] for m in cluster)
        high = max(_bounds(m)[1] for m in cluster)
        scratch = np.zeros(high - low, np.uint8)
        for m in cluster:
            _view(m, scratch, low)[...] = _elements(m, wanted)
        for m in cluster:
            held = _view(m, scratch, low).copy()
            if held.tobytes() != _elements(m, wanted).tobytes():
                return m.name, [other.name for other in cluster if other is not m]
    return None


def _view(m: Memory, scratch: Array, low: int) -> Array:
    kind = np.dtype(f"V{m.itemsize}")
    return np.ndarray(m.shape, kind, scratch.data, m.address - low, m.strides)


def _elements(m: Memory, wanted: Staged) -> Array:
    """The stored values as elements of the memory: opaque, of its width."""
    array = np.ascontiguousarray(m.encode(wanted[m.name])).reshape(m.shape)
    return array.view(np.dtype(f"V{m.itemsize}"))


def _bounds(m: Memory) -> tuple[int, int]:
    low = high = m.address
    for stride, length in zip(m.strides, m.shape):
        if stride < 0:
            low += stride * (length - 1)
        else:
            high += stride * (length - 1)
    return low, high + m.itemsize


class _Place:
    """What NumPy needs to reason about memory; nothing of it is ever read."""

    def __init__(self, m: Memory) -> None:
        self.__array_interface__: Mapping[str, object] = {
            "data": (m.address, True),
            "shape": tuple(m.shape),
            "strides": tuple(m.strides),
            "typestr": f"|V{m.itemsize}",
            "version": 3,
        }


def _share(a: Memory, b: Memory) -> bool:
    if a.identity is not None and a.identity == b.identity:
        return False
    try:
        return np.shares_memory(np.asarray(_Place(a)), np.asarray(_Place(b)), max_work=_WORK_MAX)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
