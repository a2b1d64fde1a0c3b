"""Stored tensors for a module's names where the names alone do not say it: by prefix, by position."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ckptfmt.engine import Comparison, StoredLeaf
from ckptfmt.format import join_name

Sources = dict[str, tuple[str, str]]
"""Own name -> (stored name, the rule that found it)."""

_PREFIXES = ("_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod.")


def by_position(
    module_name: str,
    own: Mapping[str, Hashable | None],
    stored: Mapping[str, StoredLeaf],
    comparison: Comparison,
) -> Sources:
    """In the order of both sides, which must have as many tensors: all names, or each tensor once.

    Args:
        own: Name -> identity of the tensor, in the module's order.
    """
    leaves = [leaf.name for leaf in stored.values() if leaf.dtype]
    if not leaves:
        for name in own:
            comparison.missing(name)
        return {}
    seen: set[Hashable] = set()
    once = []
    for name, identity in own.items():
        if identity is None or identity not in seen:
            once.append(name)
        seen.add(identity)
    for names in (list(own), once):
        if len(names) == len(leaves):
            return {name: (leaf, "position") for name, leaf in zip(names, leaves, strict=True)}
    comparison.mismatch(
        module_name, f"{len(own)} tensors, for match_by='position'", f"{len(leaves)} tensors"
    )
    comparison.leave(module_name)
    return {}


def by_prefix(
    module_name: str,
    names: Sequence[str],
    stored: Mapping[str, StoredLeaf],
    comparison: Comparison,
) -> Sources:
    """A plain dict that was saved under a wrapper's prefix, if exactly one explains all names.

    A `state_dict()` taken by hand from a wrapped module has no type to go by. Exact names come
    first; a prefix counts only where no name matches without it and all match with it.
    """
    if not names or any(name in stored for name in names):
        return {}

    def prefixed(name: str, prefix: str) -> str:
        return join_name(module_name, prefix + name[len(module_name) :].lstrip("/"))

    fitting = [
        prefix for prefix in _PREFIXES if all(prefixed(name, prefix) in stored for name in names)
    ]
    if len(fitting) > 1:
        comparison.mismatch(
            module_name, "one set of names", f"all of them under {' and '.join(map(repr, fitting))}"
        )
    if len(fitting) != 1:
        return {}
    rule = f"wrapper prefix {fitting[0]!r} removed"
    return {name: (prefixed(name, fitting[0]), rule) for name in names}
