"""The two families of optimizers, as a save and a restore see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import keras

from ckptfmt.engine import StoredLeaf
from ckptfmt.tensorflow import keras_optimizer, v1_optimizer
from ckptfmt.tensorflow.keras_optimizer import Peers
from ckptfmt.tensorflow.survey import Keys


class OptimizerKind(Protocol):
    """Stateless.

    Attributes:
        builds: Name of the method that makes the slots.
        whole: That method makes all of them at once.
    """

    builds: str
    whole: bool

    def is_built(self, optimizer: Any) -> bool: ...
    def check(self, optimizer: Any, where: str, peers: Peers) -> None:
        """At a save: warn of state that has no names."""

    def variables(
        self, optimizer: Any, where: str, peers: Peers, *, elsewhere: bool = False
    ) -> list[tuple[Keys, Any, tuple[Keys, ...]]]:
        """(keys, variable, keys of the aliases) of everything that it holds; `elsewhere` as of
        `keras_optimizer.owners`."""

    def constants(self, optimizer: Any, variable: Any) -> dict[str, object]:
        """Attributes of the leaf of one of its variables: its number of steps says what it is."""

    def other_class(self, leaves: Mapping[str, StoredLeaf], optimizer: Any) -> str:
        """The class whose state is stored, if it is known and another than the optimizer's."""

    def build_on(
        self, optimizer: Any, peers: Peers, stored_owners: set[str], others: set[str]
    ) -> list[Any]:
        """The variables of the tree that it should be built on: see `variables_to_build_on`."""

    def built_copy(self, optimizer: Any, variables: Sequence[Any]) -> Any: ...
    def build(self, optimizer: Any, variables: Sequence[Any]) -> None: ...


class _Keras:
    builds, whole = "build", True

    def is_built(self, optimizer: Any) -> bool:
        return bool(optimizer.built)

    def check(self, optimizer: Any, where: str, peers: Peers) -> None:
        trainable = list(optimizer._trainable_variables)
        named = keras_optimizer.owners(peers, where, trainable)
        keras_optimizer.warn_if_positional(named, peers, where, trainable)

    def variables(
        self, optimizer: Any, where: str, peers: Peers, *, elsewhere: bool = False
    ) -> list[tuple[Keys, Any, tuple[Keys, ...]]]:
        trainable = list(optimizer._trainable_variables)
        named = keras_optimizer.owners(peers, where, trainable, elsewhere=elsewhere)
        return keras_optimizer.optimizer_variables(optimizer, named, where)

    def constants(self, optimizer: Any, variable: Any) -> dict[str, object]:
        return keras_optimizer.constants(optimizer, variable)

    def other_class(self, leaves: Mapping[str, StoredLeaf], optimizer: Any) -> str:
        return keras_optimizer.other_class(leaves, optimizer)

    def build_on(
        self, optimizer: Any, peers: Peers, stored_owners: set[str], others: set[str]
    ) -> list[Any]:
        return keras_optimizer.variables_to_build_on(optimizer, peers, stored_owners, others)

    def built_copy(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        return keras_optimizer.built_copy(optimizer, variables)

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        keras_optimizer.build(optimizer, variables)


class _V1:
    builds, whole = "_create_slots", False

    def is_built(self, optimizer: Any) -> bool:
        return False  # it makes slots for the variables of each step anew, where they are not there

    def check(self, optimizer: Any, where: str, peers: Peers) -> None:
        """All of its state has names, or is refused."""

    def variables(
        self, optimizer: Any, where: str, peers: Peers, *, elsewhere: bool = False
    ) -> list[tuple[Keys, Any, tuple[Keys, ...]]]:
        return v1_optimizer.slot_variables(optimizer, where, peers, elsewhere=elsewhere)

    def constants(self, optimizer: Any, variable: Any) -> dict[str, object]:
        return {}

    def other_class(self, leaves: Mapping[str, StoredLeaf], optimizer: Any) -> str:
        return ""

    def build_on(
        self, optimizer: Any, peers: Peers, stored_owners: set[str], others: set[str]
    ) -> list[Any]:
        return v1_optimizer.optimized_by(peers, stored_owners)

    def built_copy(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        return v1_optimizer.built_copy(optimizer, variables)

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        v1_optimizer.build(optimizer, variables)


_KERAS, _V1_TRAIN = _Keras(), _V1()


def kind_of(optimizer: Any) -> OptimizerKind:
    return _KERAS if isinstance(optimizer, keras.optimizers.Optimizer) else _V1_TRAIN
