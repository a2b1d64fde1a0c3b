"""What a layer of the user's saves by `save_own_variables` beside its variables.

Keras lets a layer write arrays under keys of its own. Its variables are saved as everywhere; the rest
is saved under those keys, and `load_own_variables` of the layer is given all of it again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ckptfmt.engine import ORDER_USER_CODE, Captured, Comparison, Staged
from ckptfmt.format import join_name

KEY = "own_variables"
"""Under which it stands, below the layer."""


class OwnStore:
    """The part of a layer's state that the layer alone knows."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def _saved(self) -> dict[str, Any]:
        store: dict[str, Any] = {}
        self._layer.save_own_variables(store)
        return store

    def extras(self) -> dict[str, Any]:
        """What is in no variable, as arrays."""
        return {k: np.array(v) for k, v in self._saved().items() if not _is_variable(v)}

    def load(self, extras: Mapping[str, Any]) -> None:
        """Hand the layer its store: with its variables as they are."""
        store = {k: v.numpy() for k, v in self._saved().items() if _is_variable(v)}
        self._layer.load_own_variables({**store, **extras})


def own_store(layer: Any) -> OwnStore | None:
    """Of a built layer whose class, which is not Keras's, has a word in what is saved."""
    save = getattr(type(layer), "save_own_variables", None)
    home = getattr(save, "__module__", "") or ""
    if not isinstance(layer, keras.layers.Layer) or home.startswith("keras.") or not layer.built:
        return None
    return OwnStore(layer)


def _is_variable(value: object) -> bool:
    return isinstance(value, (keras.Variable, tf.Variable))


class _Stores:
    def holds(self, obj: object) -> bool:
        return isinstance(obj, OwnStore)

    def capture(self, obj: Any, name: str) -> Captured:
        return Captured(obj.extras())

    def target(self, obj: Any, name: str) -> StoreTarget:
        return StoreTarget(obj, name)


STORES = _Stores()


class StoreTarget:
    """A layer, whose own code takes the arrays, whatever they are; it gets its old ones back so."""

    order = ORDER_USER_CODE

    def __init__(self, own: OwnStore, name: str) -> None:
        self.name = name
        self.identities: dict[str, Hashable] = {}
        self._own = own
        self._old: dict[str, Any] | None = None

    def compare(self, comparison: Comparison) -> None:
        if comparison.stored(self.name):
            comparison.subtree(self.name)
            return
        for key in self._own.extras():
            comparison.missing(join_name(self.name, key))

    def bind(self, staged: Staged) -> None:
        if self.name in staged:
            self._old = self._own.extras()
            self._own.load(staged.subtree(self.name))

    def undo(self) -> None:
        if self._old is not None:
            self._own.load(self._old)
            self._old = None
