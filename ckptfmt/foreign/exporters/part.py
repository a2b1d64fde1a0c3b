"""A part of a tree: what was chosen, or what a format can hold. A list that lost an item is a dict of
positions, as it is for a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ckptfmt.foreign.exporters.tree import ExportTensor, ExportTree, Value
from ckptfmt.format import escape_key, split_name

_LISTS = ("list", "tuple", "namedtuple")


def part_of(tree: ExportTree, kept: Collection[str]) -> ExportTree:
    """The tree with these leaves alone; its tensors know no other names."""
    wanted = set(kept)
    if len(wanted) == len(tree.leaves):
        return tree
    before, after = _containers(tree.leaves), _containers(n for n in tree.leaves if n in wanted)
    renamed = _renamer(
        {
            name
            for name, (kind, _) in tree.containers.items()
            if kind in _LISTS and after.get(name) != before.get(name)
        }
    )
    tensors: dict[int, ExportTensor] = {}
    leaves: dict[str, ExportTensor | Value] = {}
    for name, leaf in tree.leaves.items():
        if name in wanted and isinstance(leaf, ExportTensor):
            made = tensors.setdefault(leaf.row, replace(leaf, names=[]))
            made.names.append(renamed(name))
            leaves[renamed(name)] = made
        elif name in wanted:
            leaves[renamed(name)] = leaf
    return replace(
        tree,
        leaves=leaves,
        tensors=list(tensors.values()),
        containers={
            renamed(name): row
            for name, row in tree.containers.items()
            if name in after and not (row[0] in _LISTS and after[name] != before[name])
        },
        # What makes one object of a container needs all of it.
        container_attributes={
            renamed(name): attributes
            for name, attributes in tree.container_attributes.items()
            if after.get(name) == before.get(name)
        },
    )


def _containers(names: Iterable[str]) -> dict[str, set[str]]:
    """Inner node -> the parts that it holds."""
    made: dict[str, set[str]] = {}
    for name in names:
        above = ""
        for part in split_name(name):
            made.setdefault(above, set()).add(part)
            above = f"{above}/{part}" if above else part
    return made


def _renamer(gapped: set[str]) -> Callable[[str], str]:
    """Positions in these lists as the keys of a dict."""

    def renamed(name: str) -> str:
        above, parts = "", []
        for part in split_name(name):
            parts.append(escape_key(int(part)) if above in gapped else part)
            above = f"{above}/{part}" if above else part
        return "/".join(parts)

    return renamed if gapped else lambda name: name
