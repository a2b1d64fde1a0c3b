"""The adapter for TensorFlow and Keras 3: see `ckptfmt/engine/adapter.py` for what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ckptfmt.engine import SPARE, Captured, ObjectKind, Target, TensorSource
from ckptfmt.errors import UnsupportedError, warn
from ckptfmt.format import escape_key, join_name
from ckptfmt.tensorflow import composites
from ckptfmt.tensorflow.arrivals import counters_of
from ckptfmt.tensorflow.building import BUILD, build_configs
from ckptfmt.tensorflow.deferred import warn_of_waiting
from ckptfmt.tensorflow.distributed import is_sync_on_read
from ckptfmt.tensorflow.keras_optimizer import Peers
from ckptfmt.tensorflow.layers import layers_of
from ckptfmt.tensorflow.objects import survey
from ckptfmt.tensorflow.optimizer_kinds import kind_of
from ckptfmt.tensorflow.optimizer_target import OptimizerTarget
from ckptfmt.tensorflow.own_state import own_state
from ckptfmt.tensorflow.replicas import SUFFIX, keeps_replicas, source_of_replicas
from ckptfmt.tensorflow.rng import RngState, RngTarget, keep_generators
from ckptfmt.tensorflow.rng import capture as capture_rng
from ckptfmt.tensorflow.strategy_group import rank_of
from ckptfmt.tensorflow.survey import Found, Keys, name_of, nest
from ckptfmt.tensorflow.targets import ObjectTarget, VariableTarget
from ckptfmt.tensorflow.tensors import (
    ALIASES,
    identity_of,
    is_optimizer,
    is_tensor,
    is_variable,
    make_like,
    raw_variable,
    refuse_graph,
    source_of,
    stored_tensor,
)
from ckptfmt.tensorflow.trackables import is_stateful, refuse_own_format

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DTYPE, _SHAPE = "tensorflow.DType", "tensorflow.TensorShape"


class TensorFlowAdapter:
    """Stateless: one object serves all calls."""

    def kind(self, obj: object) -> ObjectKind:
        if is_tensor(obj):
            return "tensor"
        if composites.kind_of(obj):
            return "composite"
        if isinstance(obj, (tf.DType, tf.TensorShape)):
            return "value"
        return "stateful" if is_stateful(obj) or isinstance(obj, RngState) else "unknown"

    def is_generator(self, obj: object) -> bool:
        return isinstance(obj, (tf.random.Generator, keras.random.SeedGenerator, RngState))

    def layers(self, obj: object) -> list[tuple[str, str, dict[str, float]]]:
        return layers_of(obj) if isinstance(obj, keras.layers.Layer) else []

    def keep_generators(self) -> Callable[[], None]:
        return keep_generators()

    def source(self, obj: Any, name: str) -> TensorSource:
        made = source_of(obj, name)
        if is_variable(obj) and keeps_replicas(raw := raw_variable(obj, name)):
            made.beside = {SUFFIX: source_of_replicas(raw, name)}
            if not is_sync_on_read(raw) and rank_of(raw.distribute_strategy) > 0:
                made.parts = []  # the one value is the first worker's
        return made

    def capture(self, obj: Any, name: str, peers: Peers) -> Captured:
        if isinstance(obj, RngState):
            return capture_rng(obj)
        if composites.kind_of(obj):
            return composites.capture(obj, name)
        refuse_own_format(obj, name)
        warn_of_waiting(obj, name)
        own = own_state(obj)
        if own is not None:
            return own.capture(obj, name)
        if is_optimizer(obj):
            return _capture_optimizer(obj, name, peers)
        made = survey(obj, name)
        _warn_of_optimizer(obj, name, peers)
        attributes: dict[str, Mapping[str, object]] = {
            one.name: {ALIASES: list(one.aliases)} for one in made.found if one.aliases
        }
        if configs := build_configs(made):
            attributes[""] = {BUILD: configs}
        if isinstance(obj, tf.random.Generator):
            attributes["state"] = {"tf.rng_algorithm": int(obj.algorithm)}
        for counter in counters_of(made):
            attributes[counter] = {**attributes.get(counter, {}), SPARE: True}
        pairs: list[tuple[Keys, Any]] = [(one.keys, one.variable) for one in made.found]
        for one in made.holders:
            held = _capture_held(one, name, peers)
            pairs.append((one.keys, held.tree))
            for part, more in held.attributes.items():
                attributes[join_name(one.name, part) if part else one.name] = more
        return Captured(nest(pairs, name), attributes)

    def target(self, obj: Any, name: str, peers: Peers) -> Target | None:
        refuse_graph(name)
        if is_variable(obj):
            return VariableTarget(obj, name)
        if is_tensor(obj):
            return None
        if isinstance(obj, RngState):
            return RngTarget(obj, name)
        if composites.kind_of(obj):
            made: Any = composites.CompositeTarget(obj, name)
            return made  # type: ignore[no-any-return]
        refuse_own_format(obj, name)
        own = own_state(obj)
        if own is not None:
            return own.target(obj, name)
        if is_optimizer(obj):
            return OptimizerTarget(obj, name, peers)
        return ObjectTarget(obj, name, peers)

    def pack_value(self, obj: Any) -> tuple[str, object]:
        if isinstance(obj, tf.DType):
            return _DTYPE, obj.name
        return _SHAPE, None if obj.rank is None else obj.as_list()

    def unpack_value(self, tag: str, payload: Any) -> object:
        try:
            if tag == _DTYPE:
                return tf.as_dtype(payload)
            if tag == _SHAPE:
                return tf.TensorShape(payload)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(
                "TensorFlow does not know this value", reason="value", found=f"{tag}: {error}"
            ) from None
        raise UnsupportedError(
            "a kind of value that this version does not know",
            reason="value",
            found=tag[:80],
            do="upgrade ckptfmt",
        )

    def tensor(self, array: NDArray[Any], attributes: Mapping[str, object]) -> object:
        return stored_tensor(array, attributes)

    def compose(self, attributes: Mapping[str, object], name: str) -> Callable[[Any], Any] | None:
        return composites.compose(attributes, name)

    def copy(self, obj: Any) -> object:
        return obj  # they are immutable

    def make(self, like: Any, array: NDArray[Any]) -> object:
        return make_like(like, array)


def _capture_held(one: Found, where: str, peers: Peers) -> Captured:
    if is_optimizer(one.variable):
        return _capture_optimizer(one.variable, join_name(where, one.name), peers)
    own = own_state(one.variable)
    assert own is not None  # which is how it became a holder
    held = own.capture(one.variable, join_name(where, one.name))
    if not one.aliases or not isinstance(held.tree, dict):
        return held
    parts = [escape_key(key) for key in held.tree]
    named = {part: {ALIASES: [join_name(alias, part) for alias in one.aliases]} for part in parts}
    return Captured(
        held.tree, {part: {**held.attributes.get(part, {}), **named[part]} for part in parts}
    )


def _capture_optimizer(optimizer: Any, name: str, peers: Peers) -> Captured:
    kind = kind_of(optimizer)
    kind.check(optimizer, name, peers)
    attributes: dict[str, Mapping[str, object]] = {}
    rows = kind.variables(optimizer, name, peers)
    for keys, variable, aliases in rows:
        more: dict[str, object] = kind.constants(optimizer, variable)
        if aliases:
            more[ALIASES] = [name_of(alias, name) for alias in aliases]
        if more:
            attributes[name_of(keys, name)] = more
    # As sources: what an optimizer assigns is equal on all replicas, and nobody compares it.
    pairs = ((keys, source_of(one, join_name(name, name_of(keys, name)))) for keys, one, _ in rows)
    return Captured(nest(pairs, name), attributes)


def _warn_of_optimizer(obj: Any, name: str, peers: Peers) -> None:
    """Say that a compiled model's optimizer stays behind, unless the tree has it."""
    if not isinstance(obj, keras.Model) or not getattr(obj, "compiled", False):
        return
    optimizer = getattr(obj, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return
    if all(identity_of(peer) != identity_of(optimizer) for _, peer in peers):
        warn(
            f"{name or 'the model'}: its optimizer is not in the tree and is not saved; add "
            'it: {"model": model, "optimizer": model.optimizer}'
        )
