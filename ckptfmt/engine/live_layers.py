"""The layers of the live models of a tree, and the groups of its optimizers, for a conversion between
frameworks. No tensor is looked at: a model may still be on a meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptfmt.engine.dispatch import adapter_of, framework_of
from ckptfmt.engine.walk import peers_of, walk


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model of a tree.

    Attributes:
        name: Its name in the tree.
        framework: Root module of its adapter: `torch`, `keras`.
        layers: (path below the model, the framework's own class, its constants) of each layer.
    """

    name: str
    framework: str
    layers: list[tuple[str, str, dict[str, float]]]


def live_models(tree: object) -> list[LiveModel]:
    """The models of a tree whose adapters know their layers (`Adapter.layers`)."""
    made = []
    for visit in walk(tree):
        ask = getattr(adapter_of(visit.obj), "layers", None) if visit.kind == "stateful" else None
        layers = ask(visit.obj) if ask is not None else []
        if layers:
            made.append(LiveModel(visit.name, framework_of(visit.obj), layers))
    return made


def live_groups(tree: object) -> dict[str, list[dict[str, Any]]]:
    """Name of an optimizer -> its groups, constants and names of parameters, for those whose adapters
    know groups (`Adapter.groups`)."""
    visits = list(walk(tree))
    peers = peers_of(visits)
    made = {}
    for visit in visits:
        adapter = adapter_of(visit.obj) if visit.kind == "stateful" else None
        ask = getattr(adapter, "groups", None)
        groups = ask(visit.obj, visit.name, peers[id(adapter)]) if ask is not None else []
        if groups:
            made[visit.name] = groups
    return made
