"""What an index says of its tree: values, containers and attributes parse, and names make a tree.

One promise: nothing that a process registered runs, and no framework is loaded. Spec: 03-names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from ckptfmt.engine.arrays import read_tensors
from ckptfmt.engine.leaves import containers_of
from ckptfmt.engine.progress import Reporter
from ckptfmt.engine.unflatten import unflatten
from ckptfmt.errors import FormatError, NotFoundError
from ckptfmt.format import LEAF_PACKED, LEAF_VALUE, Attribute, Index, parse_value
from ckptfmt.storage import Backend

Problem = tuple[str, str]
"""The name of a leaf or container ("" where it is none alone), and what is wrong."""


class _Plain:
    """Kinds of frameworks and registered types as the plain data that they are stored as."""

    def pack(self, obj: object) -> None:
        return None

    def unpack(self, tag: str, payload: object) -> object:
        return payload


_PLAIN = _Plain()


def problems_of_tree(index: Index, positions: Sequence[int] | None = None) -> list[Problem]:
    """What of an index's values, containers, attributes and names does not parse; of all leaves, or
    of those at some positions alone. Long values are data: `problems_of_long_values`.
    """
    tree = index.tree
    every = positions is None
    wanted = range(len(tree.leaf_names)) if positions is None else positions
    kinds, rows = tree.leaf_kinds, tree.leaf_rows
    found: list[Problem] = []
    for position in wanted:
        if kinds[position] == LEAF_VALUE:
            found += _attempt(tree.values[int(rows[position])], tree.leaf_names[position])
    found += _of_attributes(tree.leaf_attributes, tree.leaf_names, None if every else set(wanted))
    if every:
        for name, argument in zip(tree.container_names, tree.container_arguments):
            found += _attempt(argument, name)
        found += _of_attributes(tree.container_attributes, tree.container_names, None)
        if not found:
            found += _of_names(index)
    return found


def _of_names(index: Index) -> list[Problem]:
    names = index.tree.leaf_names
    try:
        unflatten(names, [None] * len(names), containers_of(index), registered=False)
    except FormatError as error:
        return [(error.where or "", str(error))]
    return []


def _of_attributes(
    table: Mapping[str, Attribute], names: Sequence[str], wanted: set[int] | None
) -> Iterator[Problem]:
    for key, attribute in table.items():
        for row, value in zip(attribute.rows.tolist(), attribute.values):
            if wanted is None or row in wanted:
                yield from _attempt(value, names[row], f"attribute {key}: ")


def _attempt(packed: bytes, name: str, what: str = "") -> list[Problem]:
    try:
        parse_value(packed, _PLAIN, where=name)
    except FormatError as error:
        return [(name, f"{what}{error}")]
    return []


def problems_of_long_values(
    backend: Backend, index: Index, positions: Sequence[int], sound: Callable[[str], bool]
) -> list[Problem]:
    """Of values that are stored as tensors of their packed bytes, those that do not parse.

    Args:
        sound: Whether the data of a leaf is known to be as it was written.
    """
    tree, found = index.tree, list[list[Problem]]()
    for position in positions:
        name, row = tree.leaf_names[position], int(tree.leaf_rows[position])
        if tree.leaf_kinds[position] != LEAF_PACKED or not sound(name):
            continue
        try:
            with Reporter(False, "read", 0) as reporter:
                array = read_tensors(backend, index, [row], verify=False, reporter=reporter)[row]
        except (FormatError, NotFoundError):
            continue  # gone since it was read
        found.append(_attempt(array.tobytes(), name))
    return list(chain.from_iterable(found))
