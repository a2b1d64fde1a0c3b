"""Names from the object graph: the best path to each variable, its others, and slots by variable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptfmt.foreign.bundle.graph import Keys, Node, Walk, optimizers, walk_graph
from ckptfmt.foreign.bundle.keras_names import keras_paths
from ckptfmt.foreign.bundle.names import (
    ATTRIBUTES,
    VALUE,
    Names,
    name_of,
    object_is_root,
    split_object_key,
)

STATE = "state"
_LISTS = ("_variables", "_trainable_variables", "_trainable_variables_indices")


def name_objects(keys: Iterable[str], nodes: list[Node]) -> Names:
    """Names of a bundle with an object graph: paths, and what the graph knows more."""
    return _Naming(keys, nodes).done()


class _Naming:
    """Paths of the tensors while they are chosen.

    Attributes:
        paths: Key in the file -> path.
        holders: Number of an object -> key of its variable's value.
        full_of: Number of an object -> the variable's full name.
    """

    def __init__(self, keys: Iterable[str], nodes: list[Node]) -> None:
        self.paths = {key: split_object_key(key) for key in keys}
        self.aliases: dict[str, list[Keys]] = {}
        self.nodes = nodes
        self.holders: dict[int, str] = {}
        self.full_of: dict[int, str] = {}
        for number, node in enumerate(nodes):
            for key, full in node.attributes.items():
                if key in self.paths:
                    self.holders[number], self.full_of[number] = key, full

    def done(self) -> Names:
        last = optimizers(self.nodes)
        walk = walk_graph(self.nodes, last)
        root = object_is_root(self.nodes)
        variables: dict[int, Keys] = {}
        for number, key in self.holders.items():
            path = walk.path(number)
            if path and key.endswith(ATTRIBUTES + VALUE):
                if aliases := walk.aliases(number):
                    self.aliases[key] = aliases
                self._rename(number, path)
                if last.isdisjoint(walk.chain(number) or ()):
                    variables[number] = path
        found = keras_paths(walk, variables, self.full_of, depth=0 if root else 1)
        for number, paths in found.items():
            for better in reversed(paths):
                self._rename(number, better)
        for optimizer in sorted(last):
            self._name_slots(walk, optimizer)
        return Names(
            {key: name_of(path) for key, path in self.paths.items()},
            {self.holders[number]: full for number, full in self.full_of.items() if full},
            self.aliases,
            root,
        )

    def _rename(self, number: int, path: Keys) -> None:
        """Choose another path; the old one becomes an alias."""
        key = self.holders[number]
        old = self.paths[key]
        if old != path:
            others = [alias for alias in self.aliases.get(key, ()) if alias != path]
            self.aliases[key] = [old, *others]
            self.paths[key] = path

    def _name_slots(self, walk: Walk, optimizer: int) -> None:
        """`<optimizer>/state/<variable>/<slot>`, as this package's own checkpoints have them."""
        path = walk.path(optimizer)
        if path is None:
            return
        slots, own = _slots_of(self.nodes, optimizer, self.full_of)
        held = {v: self.paths[self.holders[v]] for v, _, _ in slots if v in self.holders}
        prefix = 0 if object_is_root(self.nodes) else _common_model(held.values())
        for variable, slot, number in slots:
            if variable in held and number in self.holders:
                self._rename(number, (*path, STATE, *held[variable][prefix:], slot))
        for number, name in own.items():
            if number in self.holders:
                self._rename(number, (*path, name))


def _common_model(paths: Iterable[Keys]) -> int:
    """1 if all variables are of one object in the user's tree: its name says nothing then."""
    held = list(paths)
    return 1 if len({path[0] for path in held}) == 1 and all(len(p) > 1 for p in held) else 0


def _slots_of(
    nodes: list[Node], optimizer: int, full_of: Mapping[int, str]
) -> tuple[list[tuple[int, str, int]], dict[int, str]]:
    """(variable, slot, slot variable) of an optimizer, and its own variables' names."""
    node = nodes[optimizer]
    slots = list(node.slots)
    own: dict[int, str] = {}
    children = dict(node.children)
    if "_trainable_variables" not in children:
        return slots, own
    trained = dict(nodes[children["_trainable_variables"]].children)
    for name, child in node.children:
        if child in full_of:
            own[child] = name.lstrip("_")
        elif name not in _LISTS:
            for position, number in nodes[child].children:
                variable = trained.get(position, -1)
                if variable in full_of and number in full_of:
                    slot = _slot_name(full_of[number], full_of[variable]) or name.lstrip("_")
                    slots.append((variable, slot, number))
    if "_iterations" in children:
        own[children["_iterations"]] = "iterations"
    return slots, own


def _slot_name(full_name: str, variable: str) -> str:
    """`momentum` of `adam/sequential_dense_kernel_momentum`; "" where it does not follow that.

    The scopes may be others (of a model that was called before it was built); the last part is not.
    """
    name = full_name.rpartition("/")[2]
    prefix = variable.replace("/", "_") + "_"
    if name.startswith(prefix):
        return name[len(prefix) :]
    last = variable.rpartition("/")[2]
    _, found, slot = name.rpartition(f"_{last}_")
    return slot if found else ""
