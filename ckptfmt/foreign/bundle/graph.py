"""TensorFlow's object graph: which objects there were, and all the names of their variables.

A variable is written once, under the first path that was found to it. Here the graph is walked
breadth first for the other paths, for what the framework called a variable, and for slots. Nothing
recurses: a graph may be cyclic and of any depth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from ckptfmt.foreign.protobuf import bytes_field, int_field, parse_fields
from ckptfmt.foreign.sstable import corrupt

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
RECORD_FIELD = 50_001
"""Of the graph: what an export of ours has to say beside (`tree_record`). TensorFlow skips it."""
ALIASES_MAX = 32
DEPTH_MAX = 256
Keys = tuple[str, ...]


@dataclass(slots=True)
class Node:
    """An object.

    Attributes:
        children: (local name, number of the node), in order.
        attributes: Key in the checkpoint -> what the framework calls the variable.
        slots: (number of the variable, slot's name, number of the slot variable).
    """

    children: list[tuple[str, int]] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    slots: list[tuple[int, str, int]] = field(default_factory=list)

    def child(self, name: str) -> int:
        """The number of a child, or -1."""
        return next((number for local, number in self.children if local == name), -1)


def parse_graph(data: bytes, where: str) -> list[Node]:
    """All objects; the first is the root.

    Raises:
        CorruptError: It is malformed, or an object refers to one that is not there.
    """
    nodes = [
        _parse_node(bytes_field(value, kind, "node", where), where)
        for number, kind, value in parse_fields(data, where)
        if number == 1
    ]
    count = len(nodes)
    for node in nodes:
        numbers = [number for _, number in node.children]
        numbers += [n for variable, _, slot in node.slots for n in (variable, slot)]
        if numbers and max(numbers) >= count:
            raise corrupt("an object that is not there", "graph", where, count, max(numbers))
    return nodes


def record_in(data: bytes, where: str) -> str | None:
    """The text of the record in a graph, if there is one."""
    for number, kind, value in parse_fields(data, where):
        if number == RECORD_FIELD:
            return _text(bytes_field(value, kind, "record", where), where)
    return None


def _parse_node(data: bytes, where: str) -> Node:
    node = Node()
    for number, kind, value in parse_fields(data, where):
        if number == 1:
            node.children.append(_parse_child(bytes_field(value, kind, "child", where), where))
        elif number == 2:
            part = bytes_field(value, kind, "attribute", where)
            texts = {n: v for n, _, v in parse_fields(part, where) if isinstance(v, bytes)}
            node.attributes[_text(texts.get(3, b""), where)] = _text(texts.get(2, b""), where)
        elif number == 3:
            part = bytes_field(value, kind, "slot", where)
            found = {n: v for n, _, v in parse_fields(part, where)}
            variable, name, slot = found.get(1, 0), found.get(2, b""), found.get(3, 0)
            if isinstance(variable, bytes) or isinstance(name, int) or isinstance(slot, bytes):
                raise corrupt("a slot of other types", "graph", where)
            node.slots.append((variable, _text(name, where), slot))
    return node


def _parse_child(data: bytes, where: str) -> tuple[str, int]:
    number, name = 0, b""
    for at, kind, value in parse_fields(data, where):
        if at == 1:
            number = int_field(value, kind, "node_id", where)
        elif at == 2:
            name = bytes_field(value, kind, "local_name", where)
    return _text(name, where), number


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise corrupt("a name is not UTF-8", "graph", where, None, ascii(data)[:200]) from None


@dataclass(slots=True)
class Walk:
    """Where every object is: by its parent and its name there, and by other edges to it.

    Attributes:
        nodes: The graph.
        parents: Number -> (number of the parent, name there); the root has none.
        others: Number -> edges to it that are on no shortest path.
    """

    nodes: list[Node]
    parents: dict[int, tuple[int, str]]
    others: dict[int, list[tuple[int, str]]]

    def path(self, number: int) -> Keys | None:
        """The shortest path to an object; None if nothing leads to it or it is too long."""
        chain = self.chain(number)
        return None if chain is None else tuple(self.parents[n][1] for n in chain)

    def chain(self, number: int) -> list[int] | None:
        """The objects on that path, without the root."""
        made: list[int] = []
        while number:
            if number not in self.parents or len(made) >= DEPTH_MAX:
                return None
            made.append(number)
            number = self.parents[number][0]
        return made[::-1]

    def aliases(self, number: int) -> list[Keys]:
        """Other paths: to the object, or to one above it, joined with the rest of the way."""
        chain = self.chain(number)
        if chain is None:
            return []
        keys = tuple(self.parents[n][1] for n in chain)
        made: dict[Keys, None] = {}
        looked = 0
        for depth in range(len(chain) - 1, -1, -1):
            for parent, name in self.others.get(chain[depth], ()):
                looked += 1
                if looked > 4 * ALIASES_MAX:
                    return list(made)
                above = self.path(parent)
                # Not a way back to the object itself.
                if above is None or above[: depth + 1] == keys[: depth + 1]:
                    continue
                made[(*above, name, *keys[depth + 1 :])] = None
                if len(made) == ALIASES_MAX:
                    return list(made)
        return list(made)


def walk_graph(nodes: list[Node], last: Container[int]) -> Walk:
    """Walk breadth first. `last`: objects whose children are looked at when all else has been:
    what an optimizer refers to has a better name elsewhere.
    """
    parents: dict[int, tuple[int, str]] = {}
    others: dict[int, list[tuple[int, str]]] = {}
    seen = {0}
    queue, later = deque([0] if nodes else []), deque[int]()
    while queue or later:
        number = queue.popleft() if queue else later.popleft()
        for name, child in nodes[number].children:
            if child in seen:
                if child and len(others.setdefault(child, [])) < ALIASES_MAX:
                    others[child].append((number, name))
                continue
            seen.add(child)
            parents[child] = (number, name)
            (later if child in last else queue).append(child)
    return Walk(nodes, parents, others)


def optimizers(nodes: list[Node]) -> set[int]:
    """Objects that are optimizers: of Keras, by what they hold, or with slots of their own."""
    return {
        number
        for number, node in enumerate(nodes)
        if node.slots or (node.child("_trainable_variables") >= 0 and node.child("_variables") >= 0)
    }
