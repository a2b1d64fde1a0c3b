"""What a running `fit` has beside its model and its data: metrics, generators, other callbacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from ckptfmt.errors import warn
from ckptfmt.tensorflow.distributed import keep_value
from ckptfmt.tensorflow.keras_objects import snake_case
from ckptfmt.tensorflow.objects import survey
from ckptfmt.tensorflow.rng import keep_generators, plain_generators, plain_setter
from ckptfmt.tensorflow.tensors import is_optimizer, raw_variable

# What Keras's own callbacks carry from epoch to epoch. Those with methods for it need no row.
_ATTRIBUTES: Mapping[type, tuple[str, ...]] = {
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.EarlyStopping: (
        *("wait", "best", "best_epoch", "stopped_epoch", "best_weights"),
    ),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.ModelCheckpoint: (
        *("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
}


def model_tree(model: Any) -> dict[str, Any]:
    """The model, and the optimizer that it is compiled with."""
    optimizer = getattr(model, "optimizer", None)
    return {"model": model, **({"optimizer": optimizer} if is_optimizer(optimizer) else {})}


def metric_variables(model: Any) -> dict[str, dict[str, Any]]:
    """The variables of a model's metrics, by place: names of metrics count layers by process."""
    return {
        f"{place}.{snake_case(type(metric).__name__)}": {
            f"{number}.{variable.name}": variable
            for number, variable in enumerate(metric.variables)
        }
        for place, metric in enumerate(model.metrics)
    }


def numbers(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """The logs that are numbers, as a checkpoint's metrics."""
    return {
        name: float(value)
        for name, value in (logs or {}).items()
        if isinstance(value, (int, float)) or getattr(value, "shape", None) == ()
    }


class Snapshot:
    """The values of variables and generators as they are now, to be put back later.

    TensorFlow copies on write: it costs memory only for what changes meanwhile.
    """

    def __init__(self, model: Any) -> None:
        tree = model_tree(model)
        made = survey(tree.pop("model"), "model")
        variables = [one.variable for one in made.found]
        holders = [*tree.values(), *(one.variable for one in made.holders)]
        for optimizer in filter(is_optimizer, holders):
            variables += optimizer.variables
        for metric in metric_variables(model).values():
            variables += metric.values()
        self._put_back = [keep_value(raw_variable(one, "")) for one in variables]
        self._put_back += [keep_generators(), plain_setter(plain_generators(), "")]

    def put_back(self) -> None:
        for put_back in self._put_back:
            put_back()


def _named(callbacks: Sequence[Any]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    made = {}
    for callback in callbacks:
        kind = type(callback).__name__
        made[f"{kind}.{counts[kind]}" if counts[kind] else kind] = callback
        counts[kind] += 1
    return made


def callback_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """The state of each callback that has any: by `state_dict`, `get_state`, or of a kind of Keras's."""
    made: dict[str, Any] = {}
    for name, callback in _named(callbacks).items():
        if callable(getattr(callback, "state_dict", None)):
            made[name] = callback.state_dict()
        elif callable(getattr(callback, "get_state", None)):
            made[name] = callback.get_state()
        else:
            attributes = _attributes(callback)
            if attributes:
                made[name] = {key: _plain(getattr(callback, key, None)) for key in attributes}
    return made


def set_callback_states(callbacks: Sequence[Any], states: Mapping[str, Any]) -> None:
    """Put back what `callback_states` gave; callbacks that are not there any more are warned of."""
    named = _named(callbacks)
    lost = sorted(name for name in states if name not in named)
    if lost:
        warn(f"fit goes on without callbacks that had a state: {', '.join(lost)}")
    for name, state in states.items():
        callback = named.get(name)
        if callback is None:
            continue
        if callable(getattr(callback, "load_state_dict", None)):
            callback.load_state_dict(state)
        elif callable(getattr(callback, "set_state", None)):
            callback.set_state(state)
        else:
            for key in set(_attributes(callback)) & set(state):
                setattr(callback, key, state[key])


def was_stopped(callbacks: Sequence[Any], states: Mapping[str, Any]) -> bool:
    """Whether an EarlyStopping had ended the fit, and has no more patience now."""
    return any(
        isinstance(callback, keras.callbacks.EarlyStopping)
        and states.get(name, {}).get("stopped_epoch", 0) > 0
        and states[name]["wait"] >= callback.patience
        for name, callback in _named(callbacks).items()
    )


def _attributes(callback: Any) -> tuple[str, ...]:
    return next((found for kind, found in _ATTRIBUTES.items() if isinstance(callback, kind)), ())


def _plain(value: Any) -> Any:
    """Lists and dicts of its own, which the run goes on to change."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
