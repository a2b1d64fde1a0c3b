"""Names of Keras layers in an object graph, as this package's own checkpoints have them.

Keras saves the layers of a Sequential or functional model under numbers (`_functional/_operations/1`)
and a kernel as `_kernel`. What they are called stands in the variable's full name,
`sequential/head/kernel`: a part for each object on the way, the model's own first or left out, none
for lists. A path whose objects do not fit its full name stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ckptfmt.foreign.bundle.graph import Keys, Walk
from ckptfmt.foreign.keras_layers import counted, is_automatic

_HOLDERS = frozenset({"_operations", "_layers"})
_FUNCTIONAL = "_functional"
_VARIABLE = re.compile(r"(variable|seed_generator_state)(_[0-9]+)?\Z")


@dataclass(frozen=True, slots=True)
class _Step:
    """An object on the way to a variable, or the variable.

    Attributes:
        holder: The list that has it, by the list's number; 0 for none.
        attribute: Keys by which its parent has it: a name, or a list's name and a position.
        name: Its part of the full name.
    """

    holder: int
    attribute: Keys
    name: str

    @property
    def is_numbered(self) -> bool:
        """Nobody gave it an attribute: it is one of a model's layers."""
        return self.attribute[0] in _HOLDERS and len(self.attribute) == 2


def keras_paths(
    walk: Walk, variables: Mapping[int, Keys], full_names: Mapping[int, str], *, depth: int
) -> dict[int, list[Keys]]:
    """Variable -> its paths by the names of layers, the best one first, where there are such.

    Args:
        variables: Number -> path in the graph; none below an optimizer.
        full_names: Number -> full name.
        depth: How many keys lead to the object in the user's tree: it keeps its name.
    """
    steps: dict[int, list[_Step]] = {}
    models: set[Keys] = set()
    for number, keys in variables.items():
        full = full_names.get(number, "").split("/")
        chain = walk.chain(number)
        found = _steps(keys, chain, full, depth) if chain is not None else None
        if found:
            steps[number] = found
        if _is_of_keras(keys, full):
            models.add(keys[:depth])
    numbers = _counted(step for found in steps.values() for step in found)
    made = {}
    for number, found in steps.items():
        keys = variables[number]
        if keys[:depth] in models:
            given = [_keys_of(step, numbers, named=True) for step in found]
            plain = [_keys_of(step, numbers, named=False) for step in found]
            last = found[-1]
            tail = last.attribute if _VARIABLE.match(last.name) else (last.name,)
            paths = [(*keys[:depth], *_flat(way[:-1]), *tail) for way in (given, plain)]
            if paths[0] != keys:
                made[number] = list(dict.fromkeys(paths))
    return made


def _is_of_keras(keys: Keys, full: list[str]) -> bool:
    """Whether a path is of the kind that only Keras makes."""
    hidden = keys[-1].startswith("_") and keys[-1][1:] == full[-1]
    return hidden or _FUNCTIONAL in keys or not _HOLDERS.isdisjoint(keys)


def _steps(keys: Keys, chain: list[int], full: list[str], depth: int) -> list[_Step] | None:
    """The objects below the user's; None where the full name has not one part for each."""
    made: list[_Step] = []
    at, part = len(keys) - 1, len(full) - 1
    while at >= depth:
        if keys[at] == _FUNCTIONAL:  # the same model once more
            at -= 1
            continue
        if part < 0:
            return None
        listed = keys[at].isdigit() and at > depth
        begin = at - 1 if listed else at
        holder = chain[begin] if listed else 0
        made.append(_Step(holder, keys[begin : at + 1], full[part]))
        at, part = begin - 1, part - 1
    if part > 0:
        return None
    if part < 0 and len(made) > 1 and not made[-1].is_numbered:
        # A model that was called before it was built: its own name stands where a layer's should.
        made[1:] = [replace(step, name="") for step in made[1:]]
    return made[::-1]


def _counted(steps: Iterable[_Step]) -> dict[tuple[int, str], str]:
    """Names of a model's layers: those that somebody chose, else the class, numbered within it."""
    holders: dict[int, dict[str, str]] = {}
    for step in steps:
        if step.is_numbered:
            holders.setdefault(step.holder, {})[step.attribute[1]] = step.name
    made: dict[tuple[int, str], str] = {}
    for holder, names in holders.items():
        positions = sorted(names, key=lambda text: (len(text), text))
        for position, name in zip(positions, counted(names[p] for p in positions)):
            made[holder, position] = name
    return made


def _keys_of(step: _Step, numbers: Mapping[tuple[int, str], str], *, named: bool) -> Keys:
    """What leads to an object: its name if somebody chose one and `named`, else the attribute."""
    if step.is_numbered:
        return (numbers[step.holder, step.attribute[1]],)
    chosen = named and step.name and not is_automatic(step.name)
    return (step.name,) if chosen else step.attribute


def _flat(parts: Iterable[Keys]) -> Iterable[str]:
    return (key for keys in parts for key in keys)
