"""Children of Keras layers, models, metrics and seed generators, and how they are called.

Keras numbers names by process (`dense_7`), so neither `variable.path` nor an automatic name says
anything in another process. A child is called by the name that the user gave it, else by its
attribute, else by its class, numbered within its parent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from ckptfmt.errors import UsageError
from ckptfmt.tensorflow.own_store import KEY as OWN_VARIABLES
from ckptfmt.tensorflow.own_store import own_store
from ckptfmt.tensorflow.survey import Edge, Keys
from ckptfmt.tensorflow.tensors import identity_of, is_optimizer, is_variable
from ckptfmt.tensorflow.trackables import (
    has_own_format,
    is_container,
    is_keras,
    is_stateful,
    refuse_own_format,
)

# Where Keras keeps what it tracks, and what a compiled model adds: no names of the user's.
_BOOKKEEPING = frozenset(
    [
        "_tracker",
        "_tracked",
        "_trainable_variables",
        "_non_trainable_variables",
        "_variables",
        "_layers",
        "_metrics",
        "_seed_generators",
        "_functional",
        "_operations",
        "_nodes",
        "_operations_by_depth",
        "_nodes_by_depth",
        "_inbound_nodes",
        "_outbound_nodes",
        "_input_layers",
        "_output_layers",
        "_losses",
        "_loss_ids",
        "_losses_override",
        "optimizer",
        "_optimizer",
        "loss",
        "_compile_loss",
        "_compile_metrics",
        "_loss_tracker",
    ]
)


@dataclass(frozen=True, slots=True)
class _Child:
    """`given`: the user's name, or "". `attribute`: keys of an attribute that holds it, or ()."""

    obj: Any
    given: str
    attribute: Keys
    class_name: str


def snake_case(name: str) -> str:
    """Keras's automatic name of a class, without its number."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def given_name(obj: Any) -> str:
    """The name of an object if somebody chose it, else "".

    Automatic names are told by their pattern: Keras does not record who chose a name, and a model
    that was loaded or cloned passes automatic ones on as if they were chosen.
    """
    name = getattr(obj, "name", None)
    if not isinstance(name, str) or not name:
        return ""
    automatic = "variable" if is_variable(obj) else snake_case(type(obj).__name__)
    # Bidirectional derives `forward_lstm_3` from an automatic name.
    return "" if re.fullmatch(rf"(forward_|backward_)?{automatic}(_\d+)?", name) else name


def trust_full_name(variable: Any, chosen: frozenset[str]) -> bool:
    """True if every part of a variable's full name was chosen by the user."""
    if not isinstance(variable, keras.Variable):
        return True
    *scopes, _ = str(variable.path).split("/")
    return bool(given_name(variable)) and all(scope in chosen for scope in scopes)


def keras_children(obj: Any, where: str) -> list[Edge]:
    """Edges of a layer, model, metric or seed generator.

    Metrics of a layer are left out, as `layer.variables` leaves them out: a metric is saved where
    it stands in the tree itself.
    """
    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            "Keras objects are carried with the TensorFlow backend only",
            reason="backend",
            where=where,
            found=f"backend {keras.backend.backend()}",
            do="set KERAS_BACKEND=tensorflow",
        )
    if isinstance(obj, keras.random.SeedGenerator):
        return [Edge(("state",), obj.state)]
    _refuse_assets(obj, where)
    attributes, foreign = _look_at_attributes(obj, where)
    children = [
        _Child(
            child,
            given_name(child),
            attributes.get(identity_of(child), ()),
            "variable" if is_variable(child) else snake_case(type(child).__name__),
        )
        for child in _own_children(obj)
    ]
    edges = _name_children(children)
    own = own_store(obj)
    if own is not None:
        foreign.append(Edge((OWN_VARIABLES,), own))
    taken = {edge.keys[0] for edge in edges}
    for edge in foreign:
        if edge.keys[0] in taken:
            raise UsageError(
                "an attribute has the name of a layer or variable beside it",
                reason="name",
                where=where,
                found=str(edge.keys[0]),
                do="give one of them another name",
            )
    return edges + foreign


def _own_children(obj: Any) -> list[Any]:
    """Variables, seed generators and layers (metrics, of a metric) directly below, each once."""
    if isinstance(obj, keras.metrics.Metric):
        listed = [*getattr(obj, "_variables", ()), *getattr(obj, "_metrics", ())]
    else:
        listed = [
            *getattr(obj, "_trainable_variables", ()),
            *getattr(obj, "_non_trainable_variables", ()),
            *getattr(obj, "_seed_generators", ()),
            *getattr(obj, "_layers", ()),
        ]
    unique = {
        identity_of(child): child
        for child in listed
        if not isinstance(child, keras.layers.InputLayer)
    }
    return list(unique.values())


def _look_at_attributes(obj: Any, where: str) -> tuple[dict[int, Keys], list[Edge]]:
    """Attribute keys of Keras children by identity, and edges to what Keras itself does not track."""
    attributes: dict[int, Keys] = {}
    foreign: dict[int, Edge] = {}
    loose: dict[int, Edge] = {}
    own = {identity_of(child) for child in _own_children(obj)}
    for attribute, value in vars(obj).items():
        if attribute in _BOOKKEEPING or attribute.startswith("_self_"):
            continue
        for keys, child in _items((attribute,), value, ()):
            ident = identity_of(child)
            if is_optimizer(child):
                foreign.setdefault(ident, Edge(keys, child))
            elif is_keras(child) or isinstance(child, keras.Variable):
                attributes.setdefault(ident, keys)
                if ident not in own and is_variable(child):
                    loose.setdefault(ident, Edge(keys, child))
            elif has_own_format(child):
                refuse_own_format(child, where)
            elif ident not in own:
                foreign.setdefault(ident, Edge(keys, child))
    if loose:
        # The states of a stateful RNN: Keras hides them, and forgets them in its own files.
        known = {identity_of(variable) for variable in obj.variables}
        foreign |= {ident: edge for ident, edge in loose.items() if ident not in known}
    return attributes, list(foreign.values())


def _items(keys: Keys, value: Any, above: tuple[int, ...]) -> Iterator[tuple[Keys, Any]]:
    """The stateful things in an attribute's value: itself, or items of containers, sets included."""
    if is_container(value) or isinstance(value, (set, frozenset)):
        if id(value) in above:
            return
        above = (*above, id(value))
        if isinstance(value, Mapping):
            pairs = list(value.items())
        elif isinstance(value, (set, frozenset)):
            return  # no order and no keys: what is in it is named by class
        else:
            pairs = [(str(position), item) for position, item in enumerate(value)]
        for key, item in pairs:
            yield from _items((*keys, key), item, above)
    elif is_variable(value) or is_stateful(value):
        yield keys, value


def _name_children(children: Sequence[_Child]) -> list[Edge]:
    """Name each child; no first key is used twice but by the items of one container."""
    uses = Counter(child.given for child in children if child.given)
    named: dict[int, Edge] = {}
    for row, child in enumerate(children):
        if uses[child.given] == 1:
            named[row] = Edge((child.given,), child.obj, given=child.given)
    taken: set[object] = {edge.keys[0] for edge in named.values()}
    for row, child in enumerate(children):
        if row not in named and child.attribute and child.attribute[0] not in taken:
            named[row] = Edge(child.attribute, child.obj, given=child.given)
    taken |= {edge.keys[0] for edge in named.values()}
    counts: Counter[str] = Counter()
    for row, child in enumerate(children):
        if row in named:
            continue
        while True:
            number = counts[child.class_name]
            counts[child.class_name] += 1
            key = f"{child.class_name}_{number}" if number else child.class_name
            if key not in taken:
                break
        taken.add(key)
        named[row] = Edge((key,), child.obj, given=child.given, numbered=True)
    return [named[row] for row in range(len(children))]


def _refuse_assets(obj: Any, where: str) -> None:
    """Refuse a layer of the user's that writes files of its own: nobody can tell what is in them."""
    save_assets = getattr(type(obj), "save_assets", None)
    if save_assets is not None and save_assets is not getattr(
        keras.layers.Layer, "save_assets", None
    ):
        raise UsageError(
            "a layer that saves assets of its own cannot be saved",
            reason="assets",
            where=where,
            found=type(obj).__name__,
            do="keep what it needs in variables, or in a StringLookup or IntegerLookup",
        )
