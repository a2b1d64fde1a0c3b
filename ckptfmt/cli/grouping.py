"""Names as a tree of few rows: five thousand tensors fit a screen.

Names are cut at `/` and at the dots of module paths. Siblings that differ in one number and are
alike below (the layers of a network) share a row, `layer.[0-11]`; what lies deeper than asked for
is summed in its parent's row. Counts and sizes of a row are those of all that it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckptfmt.cli.leaves import TENSOR, Leaf

PARTS_MAX = 24
"""A hostile name may have a million dots; more parts than these stay one part."""
_RANGES_MAX = 4
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Row:
    """A row: a leaf, or a group of them. `level` is how far it is indented."""

    level: int
    label: str
    tensors: int
    values: int
    dtype: str
    content: str
    nbytes: int


@dataclass(slots=True)
class Node:
    """A part of names, beginning with the separator before it, except at the top.

    `rest` is the label of the only child that was joined to it, so that the numbers in `part` are
    its own.
    """

    part: str
    rest: str = ""
    by_part: dict[str, Node] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)
    leaf: Leaf | None = None
    tensors: int = 0
    values: int = 0
    nbytes: int = 0
    dtypes: dict[str, None] = field(default_factory=dict)
    signature: int = 0

    @property
    def label(self) -> str:
        return self.part + self.rest


def split_parts(name: str) -> list[str]:
    """Parts with the separator before each: `model/a.0.w` -> `model`, `/a`, `.0`, `.w`."""
    parts: list[str] = []
    for position, key in enumerate(name.split("/")):
        pieces = [key] if key.startswith("~3") else key.split(".")
        if not all(pieces):
            # "0." or "a..b" would leave empty rows.
            pieces = [key]
        parts += [
            ("/" if position and not i else "." if i else "") + p for i, p in enumerate(pieces)
        ]
    if len(parts) > PARTS_MAX:
        parts[PARTS_MAX - 1 :] = ["".join(parts[PARTS_MAX - 1 :])]
    return parts


def build(leaves: Sequence[Leaf]) -> Node:
    """The tree of all names, summed, alike siblings merged, chains of only children joined."""
    root = Node("")
    for leaf in leaves:
        node = root
        for part in split_parts(leaf.name):
            node = node.by_part.setdefault(part, Node(part))
        # A leaf's name is never a prefix of another's up to a "/", but may be up to a dot.
        node.leaf = leaf
    _sum_up(root)
    return root


def _sum_up(node: Node) -> None:
    if node.leaf is not None:
        leaf = node.leaf
        node.tensors += leaf.kind == TENSOR and not leaf.tied_to
        node.values += leaf.kind != TENSOR
        node.nbytes += leaf.counted_nbytes
        node.dtypes[leaf.dtype] = None
    for child in node.by_part.values():
        _sum_up(child)
    node.children = list(_merge(list(node.by_part.values())))
    for child in node.children:
        node.tensors += child.tensors
        node.values += child.values
        node.nbytes += child.nbytes
        node.dtypes.update(child.dtypes)
    _join_only_child(node)
    shape = None
    if node.leaf is not None:
        # Values differ from layer to layer; that they are values of one type is alike enough.
        shape = (node.leaf.kind, node.leaf.dtype, node.leaf.shape, bool(node.leaf.tied_to))
    node.signature = hash((shape, tuple((c.label, c.signature) for c in node.children)))


def _join_only_child(node: Node) -> None:
    if not node.part or node.leaf is not None or len(node.children) != 1:
        return
    (child,) = node.children
    node.rest += child.label
    node.children, node.leaf = child.children, child.leaf


def _merge(siblings: list[Node]) -> Iterator[Node]:
    """Siblings of one pattern and one signature become one node whose label holds the numbers."""
    groups: dict[tuple[tuple[str, ...], str, int], list[Node]] = {}
    for node in siblings:
        numbers = _NUMBER.findall(node.part)
        # Without a number of its own a node is alone: its text is a key that no pattern equals.
        pattern = tuple(_NUMBER.split(node.part)) if len(numbers) == 1 else (node.part,)
        groups.setdefault((pattern, node.rest, node.signature), []).append(node)
    for (pattern, _, _), nodes in groups.items():
        if len(nodes) == 1 or len(pattern) == 1:
            yield from nodes
            continue
        numbers = [n for node in nodes for n in _NUMBER.findall(node.part)]
        merged = nodes[0]
        merged.part = f"[{format_ranges(numbers)}]".join(pattern)
        for node in nodes[1:]:
            _add(merged, node)
        yield merged


def _add(node: Node, other: Node) -> None:
    """Count an alike node into this one, all the way down."""
    node.tensors += other.tensors
    node.values += other.values
    node.nbytes += other.nbytes
    if node.leaf is not None and node.leaf.kind != TENSOR:
        node.leaf = Leaf(node.leaf.name, node.leaf.kind, node.leaf.dtype, value=...)
    for mine, theirs in zip(node.children, other.children):
        _add(mine, theirs)


def format_ranges(numbers: Sequence[str]) -> str:
    """`0-3,5,7-9`; leading zeros stay; after a few ranges, an ellipsis."""
    ordered = sorted(numbers, key=lambda n: (int(n), n))
    ranges: list[list[str]] = []
    for number in ordered:
        if ranges and int(number) == int(ranges[-1][1]) + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [a if a == b else f"{a}-{b}" for a, b in ranges]
    if len(texts) > _RANGES_MAX:
        texts = [*texts[: _RANGES_MAX - 1], "…", texts[-1]]
    return ",".join(texts)


def rows_to_depth(root: Node, depth: int, limit: int | None = None) -> list[Row]:
    """Rows of all nodes down to `depth` levels; at most `limit` siblings under one parent."""
    rows: list[Row] = []
    _walk(root, 0, depth, limit, rows)
    return rows


def _walk(node: Node, level: int, depth: int, limit: int | None, rows: list[Row]) -> None:
    children = node.children
    shown = children if limit is None or len(children) <= limit else children[: limit - 1]
    for child in shown:
        rows.append(_row(child, level))
        if level + 1 < depth:
            _walk(child, level + 1, depth, limit, rows)
    if len(shown) < len(children):
        rest = children[len(shown) :]
        rows.append(
            Row(
                level,
                f"… {len(rest):,} more",
                sum(c.tensors for c in rest),
                sum(c.values for c in rest),
                _dtypes({name: None for c in rest for name in c.dtypes}),
                "",
                sum(c.nbytes for c in rest),
            )
        )


def _row(node: Node, level: int) -> Row:
    label = node.label.lstrip("./") or node.label
    leaf = node.leaf
    alone = leaf is not None and not node.children
    content = ""
    if leaf is not None and alone:
        content = "" if leaf.value is ... else leaf.content
    return Row(level, label, node.tensors, node.values, _dtypes(node.dtypes), content, node.nbytes)


def _dtypes(names: dict[str, None]) -> str:
    return next(iter(names), "") if len(names) <= 1 else f"{len(names)} kinds"


def automatic_depth(root: Node, rows_max: int, limit: int) -> int:
    """The deepest level at which the rows still fit `rows_max`; at least 1."""
    depth = 1
    while depth < PARTS_MAX:
        deeper = len(rows_to_depth(root, depth + 1, limit))
        if deeper > rows_max or deeper == len(rows_to_depth(root, depth, limit)):
            break
        depth += 1
    return depth
