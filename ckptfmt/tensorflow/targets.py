"""What a restore fills: one variable, an object full of variables, an optimizer.

Each compares names, dtypes and shapes first and touches nothing; `bind` assigns in place and keeps
the old values, which `undo` puts back bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ckptfmt.engine import (
    ORDER_OPTIMIZER,
    ORDER_RNG,
    ORDER_TENSOR,
    Comparison,
    Staged,
    StoredLeaf,
    Target,
)
from ckptfmt.format import join_name
from ckptfmt.tensorflow import keras_optimizer
from ckptfmt.tensorflow.distributed import assign_as_one, is_sync_on_read, keep_value
from ckptfmt.tensorflow.keras_optimizer import Peers
from ckptfmt.tensorflow.objects import is_built, survey
from ckptfmt.tensorflow.own_state import own_state
from ckptfmt.tensorflow.replicas import SUFFIX, ReplicasTarget, beside
from ckptfmt.tensorflow.survey import Found, Survey, name_of
from ckptfmt.tensorflow.tensors import (
    ALIASES,
    FULL_NAME,
    adopt,
    dtype_name,
    expected_shape,
    make_tensor,
    raw_variable,
    tie_of,
)
from ckptfmt.tensorflow.vocabularies import settle

_BUILD_FIRST = "build it first: call it once, or build()"


def absolute(where: str, name: str) -> str:
    """The name below `where` of something that is called `name` within it."""
    return join_name(where, name) if name else where


class _Assigned:
    """Variables assigned so far, with their old values."""

    def __init__(self) -> None:
        self._old: list[Callable[[], None]] = []

    def assign(self, variable: Any, array: Any, name: str, *, keep: bool = True) -> None:
        raw = raw_variable(variable, name)
        # Restoring may be called while Keras or TensorFlow trace: the values must not end up there.
        with tf.init_scope():
            # Where memory is bounded, TensorFlow's own takes the values, which it used before: what
            # is adopted comes on top until the old is given back to the system.
            value = adopt(array, name) if keep else make_tensor(array, name)
            if keep:
                self._old.append(keep_value(raw))
            assign_as_one(raw, value)

    def undo(self) -> None:
        with tf.init_scope():
            while self._old:
                self._old.pop()()


class VariableTarget:
    """A tf.Variable or Keras variable that stands in the tree itself."""

    def __init__(self, variable: Any, name: str) -> None:
        self.name = name
        self.order = ORDER_TENSOR
        self._variable = variable
        self._raw = raw_variable(variable, name)
        self.identities: dict[str, Hashable] = {name: tie_of(self._raw)}
        self._assigned = _Assigned()

    def compare(self, comparison: Comparison) -> None:
        ask(comparison, self._raw, self.name, self.name)

    def bind(self, staged: Staged) -> None:
        if self.name in staged:
            value = staged.own(self.name)
            self._assigned.assign(self._variable, value, self.name, keep=staged.undoable)

    def undo(self) -> None:
        self._assigned.undo()


def ask(comparison: Comparison, raw: Any, name: str, source: str, rule: str = "") -> bool:
    """Ask for a variable's values."""
    leaf = comparison.stored(source).get(source)
    stored = leaf.shape if leaf is not None and leaf.dtype else None
    return comparison.tensor(
        name,
        dtype_name(raw.dtype, name),
        expected_shape(raw, stored),
        source=source if source != name else None,
        rule=rule,
    )


class ObjectTarget:
    """A module, layer, model, metric or generator."""

    def __init__(self, obj: Any, name: str) -> None:
        self.name = name
        self.identities: dict[str, Hashable] = {}
        random = isinstance(obj, (tf.random.Generator, keras.random.SeedGenerator))
        self.order = ORDER_RNG if random else ORDER_TENSOR
        self._obj = obj
        self._assigned = _Assigned()
        self._asked: list[tuple[str, Any]] = []
        self._held: list[Target] = []
        self._nodes: list[Any] = []

    def compare(self, comparison: Comparison) -> None:
        made = survey(self._obj, self.name)
        stored = comparison.stored(self.name)
        self._nodes = [obj for _, obj in made.nodes]
        if (
            not made.found
            and not made.holders
            and list(stored) == [self.name]
            and stored[self.name].value == {}
        ):
            comparison.value(self.name)  # what an object without variables is stored as
            return
        sources = match(made.found, stored, self.name)
        taken: set[str] = set()
        self._asked, self._held = [], []
        self.identities = {}
        for one, (source, rule) in zip(made.found, sources):
            name = absolute(self.name, one.name)
            raw = raw_variable(one.variable, name)
            fits = ask(comparison, raw, name, source or name, rule)
            replicas = replicas_target(comparison, one, raw, self.name, source or name)
            if replicas is not None:
                self._held.append(replicas)
            elif fits:
                self._asked.append((name, one.variable))
            others = _claim_aliases(comparison, one, stored, self.name, source)
            self.identities |= dict.fromkeys([name, *others], tie_of(raw))
            taken |= {source or name, *others}
        self._held += [holder_target(one, comparison, self.name) for one in made.holders]
        for held in self._held:
            held.compare(comparison)
            self.identities |= getattr(held, "identities", {})
            taken.update(comparison.stored(held.name))
        taken |= {name for name in stored if name.endswith(SUFFIX)}
        _report_swaps(comparison, made.found, sources, stored, self.name)
        _report_unbuilt(comparison, made, [name for name in stored if name not in taken], self.name)

    def bind(self, staged: Staged) -> None:
        for held in self._held:
            held.bind(staged)
        for name, variable in self._asked:
            if name in staged:
                self._assigned.assign(variable, staged.own(name), name, keep=staged.undoable)
        self._settle()

    def undo(self) -> None:
        self._assigned.undo()
        for held in reversed(self._held):
            held.undo()
        self._settle()

    def _settle(self) -> None:
        for obj in self._nodes:
            settle(obj)


def replicas_target(
    comparison: Comparison, one: Found, raw: Any, where: str, source: str
) -> ReplicasTarget | None:
    """Of a variable whose replicas' own values are stored beside `source`, if it takes them.

    They are no surplus where it does not: other objects have one value only.
    """
    name = absolute(where, name_of(beside(one.keys), where))
    stored = comparison.stored(where)
    found = next((n for n in (f"{source}{SUFFIX}", name) if n in stored), None)
    if found is None:
        return None
    comparison.take(found)
    if not is_sync_on_read(raw):
        return None
    target = ReplicasTarget(raw, name, found)
    return target if target.fits(stored) else None


def holder_target(one: Found, comparison: Comparison, where: str) -> Target:
    """The target of an object with a state of its own, under the name where something is stored."""
    names = [absolute(where, name) for name in (one.name, *one.aliases)]
    name = next((name for name in names if comparison.stored(name)), names[0])
    own = own_state(one.variable)
    assert own is not None  # which is how it became a holder
    return own.target(one.variable, name)


Source = tuple[str, str]
"""(stored name, rule): both empty where nothing was found or the name itself matched."""


def match(found: Sequence[Found], stored: Mapping[str, StoredLeaf], where: str) -> list[Source]:
    """Find each variable's stored leaf: by path, by an alias, by a unique full name.

    A leaf that one variable has by its path is nobody else's by full name.
    """
    names = {absolute(where, one.name) for one in found}
    by_alias = {
        absolute(where, alias): name
        for name, leaf in stored.items()
        for alias in _texts(leaf.attributes.get(ALIASES))
    }
    by_full = _unique_full_names(stored)
    uses = Counter(one.full_name for one in found)
    made: list[Source] = []
    for one in found:
        name = absolute(where, one.name)
        aliases = [absolute(where, alias) for alias in one.aliases]
        full = by_full.get(one.full_name, "")
        if name in stored:
            made.append((name, ""))
        elif name in by_alias:
            made.append((by_alias[name], "alias"))
        elif (alias := next((a for a in aliases if a in stored), "")) != "":
            made.append((alias, "alias"))
        elif (alias := next((a for a in aliases if a in by_alias), "")) != "":
            made.append((by_alias[alias], "alias"))
        elif full and full not in names and one.trusted and uses[one.full_name] == 1:
            made.append((full, "full name"))
        else:
            made.append(("", ""))
    return made


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def _unique_full_names(stored: Mapping[str, StoredLeaf]) -> dict[str, str]:
    """Full name -> stored name, where only one stored leaf has it."""
    names = {
        name: str(leaf.attributes[FULL_NAME])
        for name, leaf in stored.items()
        if FULL_NAME in leaf.attributes
    }
    uses = Counter(names.values())
    return {full: name for name, full in names.items() if uses[full] == 1}


def _claim_aliases(
    comparison: Comparison,
    one: Found,
    stored: Mapping[str, StoredLeaf],
    where: str,
    source: str,
) -> list[str]:
    """Ask for what is stored under a variable's other paths: it must hold the same values.

    Returns:
        The stored names taken.
    """
    taken = []
    if source:
        raw = raw_variable(one.variable, absolute(where, one.name))
        for alias in (absolute(where, text) for text in one.aliases):
            if alias in stored and alias != source:
                ask(comparison, raw, alias, alias)
                taken.append(alias)
    return taken


def _report_swaps(
    comparison: Comparison,
    found: Sequence[Found],
    sources: Sequence[Source],
    stored: Mapping[str, StoredLeaf],
    where: str,
) -> None:
    """Refuse variables whose path and full name lead to two different tensors of one shape.

    Keras counts full names by process, so an untrusted one is believed only where both sides have
    exactly the same set of them: then they were counted alike, and crossed ones were swapped.
    """
    by_full = _unique_full_names(stored)
    uses = Counter(one.full_name for one in found)
    counted_alike = set(uses) == {
        str(leaf.attributes[FULL_NAME]) for leaf in stored.values() if FULL_NAME in leaf.attributes
    }
    for one, (source, _) in zip(found, sources):
        other = by_full.get(one.full_name, "")
        if not source or not other or other == source or uses[one.full_name] > 1:
            continue
        if not (one.trusted or (one.numbered and counted_alike)):
            continue
        here, there = stored[source], stored[other]
        if here.tensor != there.tensor and (here.dtype, here.shape) == (there.dtype, there.shape):
            comparison.mismatch(
                absolute(where, one.name),
                f"full name {one.full_name}, which is stored as {other}",
                f"full name {here.attributes.get(FULL_NAME, '')} under this path",
            )


def _report_unbuilt(comparison: Comparison, made: Survey, left: Sequence[str], where: str) -> None:
    """Refuse stored names below objects that have no variables yet, one entry per object."""
    empty = {
        name: obj
        for name, obj in made.nodes
        if not is_built(obj)
        or not any(
            not name or one.name == name or one.name.startswith(name + "/") for one in made.found
        )
    }
    waiting: Counter[str] = Counter()
    for stored_name in left:
        relative = stored_name[len(where) :].lstrip("/") if where else stored_name
        holders = [n for n in empty if not n or relative == n or relative.startswith(n + "/")]
        if holders:
            waiting[max(holders, key=len)] += 1
            comparison.pending(stored_name)
    for name, count in waiting.items():
        comparison.mismatch(
            absolute(where, name),
            f"variables ({count} are stored)",
            f"a {type(empty[name]).__name__} without them; {_BUILD_FIRST}",
        )


class OptimizerTarget:
    """A Keras optimizer. One that is not built yet is built when it is bound, not before.

    `undo` leaves such an optimizer built, with its slots at their initial values, which is how its
    first step would have found them.
    """

    def __init__(self, optimizer: Any, name: str, peers: Peers) -> None:
        self.name = name
        self.order = ORDER_OPTIMIZER
        self._optimizer = optimizer
        self._peers = peers
        self._assigned = _Assigned()
        self._build_on: list[Any] = []
        self._asked: list[str] = []

    def compare(self, comparison: Comparison) -> None:
        stored = comparison.stored(self.name)
        shown = self._optimizer
        self._build_on = []
        if not shown.built:
            owners = keras_optimizer.names_of_owners(stored, self.name)
            if owners:
                self._build_on = keras_optimizer.variables_to_build_on(shown, self._peers, owners)
                if not self._build_on:
                    self._report_unbuilt(comparison, stored, len(owners))
                    return
                shown = keras_optimizer.built_copy(shown, self._build_on)
        self._asked = []
        for name, (variable, aliases) in self._variables(shown).items():
            raw = raw_variable(variable, name)
            source = next((n for n in (name, *aliases) if n in stored), name)
            if ask(comparison, raw, name, source, "alias" if source != name else ""):
                self._asked.append(name)

    def _report_unbuilt(
        self, comparison: Comparison, stored: Mapping[str, StoredLeaf], count: int
    ) -> None:
        for name in stored:
            comparison.pending(name)
        comparison.mismatch(
            self.name,
            f"a model with the {count} variables whose state is stored",
            f"none of them in the tree's models; put the model into the tree, and {_BUILD_FIRST}",
        )

    def _variables(self, optimizer: Any) -> dict[str, tuple[Any, list[str]]]:
        """Absolute name -> the optimizer's variable, and other names it may be stored under."""
        trainable = list(optimizer._trainable_variables)
        named = keras_optimizer.owners(self._peers, self.name, trainable)
        return {
            absolute(self.name, name_of(keys, self.name)): (
                variable,
                [absolute(self.name, name_of(alias, self.name)) for alias in aliases],
            )
            for keys, variable, aliases in keras_optimizer.optimizer_variables(
                optimizer, named, self.name
            )
        }

    def bind(self, staged: Staged) -> None:
        asked = [name for name in self._asked if name in staged]
        if not asked:
            return
        if self._build_on and not self._optimizer.built:
            keras_optimizer.build(self._optimizer, self._build_on)
        variables = self._variables(self._optimizer)
        for name in asked:
            self._assigned.assign(variables[name][0], staged.own(name), name, keep=staged.undoable)

    def undo(self) -> None:
        self._assigned.undo()
