"""What a restore fills: one variable, an object full of variables. Optimizers: `optimizer_target`.

Each compares names, dtypes and shapes first and touches nothing; `bind` assigns in place and keeps
the old values, which `undo` puts back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ckptfmt.engine import ORDER_RNG, ORDER_TENSOR, Comparison, Staged, StoredLeaf, Target
from ckptfmt.tensorflow.arrivals import ObjectWaiting, counters_of, has_unbuilt, waits_below
from ckptfmt.tensorflow.assigning import Assigned, held_values
from ckptfmt.tensorflow.building import note_recorded
from ckptfmt.tensorflow.deferred import is_collecting, note_counter, note_target
from ckptfmt.tensorflow.keras_optimizer import Peers
from ckptfmt.tensorflow.matching import (
    absolute,
    ask,
    claim_aliases,
    home_by_alias,
    match,
    report_swaps,
)
from ckptfmt.tensorflow.objects import survey
from ckptfmt.tensorflow.optimizer_target import OptimizerTarget
from ckptfmt.tensorflow.own_state import own_state
from ckptfmt.tensorflow.replicas import SUFFIX, ReplicasTarget, beside, can_take_replicas
from ckptfmt.tensorflow.survey import Found, name_of
from ckptfmt.tensorflow.tensors import is_optimizer, raw_variable, tie_of
from ckptfmt.tensorflow.vocabularies import settle


class VariableTarget:
    """A tf.Variable or Keras variable that stands in the tree itself."""

    def __init__(self, variable: Any, name: str) -> None:
        self.name = name
        self.order = ORDER_TENSOR
        self._variable = variable
        self._raw = raw_variable(variable, name)
        self.identities: dict[str, Hashable] = {name: tie_of(self._raw)}
        self._assigned = Assigned()
        self._replicas: ReplicasTarget | None = None

    def compare(self, comparison: Comparison) -> None:
        ask(comparison, self._raw, self.name, self.name)
        beside = f"{self.name}{SUFFIX}"
        self._replicas = replicas_target(comparison, self._raw, beside, [beside])
        if self._replicas is not None:
            self._replicas.compare(comparison)

    def bind(self, staged: Staged) -> None:
        if self._replicas is not None:
            self._replicas.bind(staged)
        elif self.name in staged:
            note_counter(self.name, self._raw)
            value = staged.own(self.name)
            self._assigned.assign(self._variable, value, self.name, keep=staged.undoable)

    def undo(self) -> None:
        self._assigned.undo()
        if self._replicas is not None:
            self._replicas.undo()


class ObjectTarget:
    """A module, layer, model, metric or generator."""

    def __init__(self, obj: Any, name: str, peers: Peers) -> None:
        self.name = name
        self.identities: dict[str, Hashable] = {}
        random = isinstance(obj, (tf.random.Generator, keras.random.SeedGenerator))
        self.order = ORDER_RNG if random else ORDER_TENSOR
        self._obj = obj
        self._peers = peers
        self._assigned = Assigned()
        self._asked: list[tuple[str, Any]] = []
        self._held: list[Target] = []
        self._nodes: list[Any] = []
        self._known: dict[int, Any] = {}
        self._stored: Mapping[str, StoredLeaf] = {}
        self._pending: list[str] = []
        self._unbuilt = False
        self._wanted: Callable[[str], bool] = lambda name: True
        self._waiting: ObjectWaiting | None = None

    def compare(self, comparison: Comparison) -> None:
        made = survey(self._obj, self.name)
        stored = comparison.stored(self.name)
        self._nodes = [obj for _, obj in made.nodes]
        note_recorded(self._obj, self.name, comparison)
        if (
            not made.found
            and not made.holders
            and list(stored) == [self.name]
            and stored[self.name].value == {}
        ):
            comparison.value(self.name)  # what an object without variables is stored as
            return
        sources, counters = match(made.found, stored, self.name), counters_of(made)
        taken: set[str] = set()
        self._asked, self._held = [], []
        self.identities = {}
        for one, (source, rule) in zip(made.found, sources):
            name = absolute(self.name, one.name)
            raw = raw_variable(one.variable, name)
            if not source and one.name in counters:
                comparison.missing(name, spare=True)
                continue
            fits = ask(comparison, raw, name, source or name, rule)
            own = absolute(self.name, name_of(beside(one.keys), self.name))
            replicas = replicas_target(comparison, raw, own, [f"{source or name}{SUFFIX}", own])
            if replicas is not None:
                self._held.append(replicas)
            elif fits:
                self._asked.append((name, one.variable))
            others = claim_aliases(comparison, one, stored, self.name, source)
            self.identities |= dict.fromkeys([name, *others], tie_of(raw))
            taken |= {source or name, *others}
        self._held += [
            holder_target(one, comparison, self.name, self._peers) for one in made.holders
        ]
        for held in self._held:
            held.compare(comparison)
            self.identities |= getattr(held, "identities", {})
            taken.update(comparison.stored(held.name))
        taken |= {f"{name}{SUFFIX}" for name in taken}
        report_swaps(comparison, made.found, sources, stored, self.name)
        self._known = {id(one.variable): one.variable for one in made.found}
        self._stored = stored
        self._wanted = comparison.wanted
        self._unbuilt = has_unbuilt(obj for _, obj in made.nodes)
        self._pending = waits_below(made, [name for name in stored if name not in taken], self.name)
        for name in self._pending:
            comparison.pending(name)

    def bind(self, staged: Staged) -> None:
        for held in self._held:
            held.bind(staged)
        for name, variable in self._asked:
            if name in staged:
                note_counter(name, raw_variable(variable, name))
                self._assigned.assign(variable, staged.own(name), name, keep=staged.undoable)
        self._settle()
        values = held_values(staged, self._pending, self._stored)
        if values or (self._unbuilt and is_collecting()):
            self._waiting = ObjectWaiting(self._obj, self.name, values, self._stored, self._missing)
            self._waiting.start()
        note_target(self)

    def undo(self) -> None:
        if self._waiting is not None:
            self._waiting.deferred.drop(self._waiting)
            self._waiting = None
        self._assigned.undo()
        for held in reversed(self._held):
            held.undo()
        self._settle()

    def _settle(self) -> None:
        for obj in self._nodes:
            settle(obj)

    def unfilled(self) -> list[str]:
        """Names of variables that were made after the restore and had no value in it."""
        came = {} if self._waiting is None else self._waiting.came
        return [
            name
            for one in survey(self._obj, self.name).found
            if id(one.variable) not in came
            and (name := absolute(self.name, one.name))
            and self._missing(one.variable, name)
        ]

    def _missing(self, variable: Any, name: str) -> bool:
        """True for a variable that was not there and takes part in the restore."""
        return id(variable) not in self._known and self._wanted(name)


def replicas_target(
    comparison: Comparison, raw: Any, name: str, names: Sequence[str]
) -> ReplicasTarget | None:
    """Of a variable whose replicas' own values are stored under one of these names, if it takes them.

    They are no surplus where it does not: other objects have one value only.
    """
    found = next((n for n in names if n in comparison.stored(n)), None)
    if found is None:
        return None
    comparison.take(found)
    if not can_take_replicas(raw):
        return None
    target = ReplicasTarget(raw, name, found)
    return target if target.fits(comparison.stored(found)) else None


def holder_target(one: Found, comparison: Comparison, where: str, peers: Peers) -> Target:
    """The target of an optimizer, or of an object with a state of its own, under the name where
    something is stored."""
    names = [absolute(where, name) for name in (one.name, *one.aliases)]
    name = next((n for n in names if comparison.stored(n)), "")
    name = name or home_by_alias(names, comparison.stored(where), where) or names[0]
    if is_optimizer(one.variable):
        return OptimizerTarget(one.variable, name, peers)
    own = own_state(one.variable)
    assert own is not None  # which is how it became a holder
    return own.target(one.variable, name)
