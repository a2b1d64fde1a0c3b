"""An optimizer's variables: numbered in `.weights.h5`, by names of their own in the older format.

They follow the trained variables of the model, in its order. Where that order is known and every
shape agrees, they get the names `optimizer/state/<variable>/<slot>`; else they keep their numbers:
to guess would be to give one variable another's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.keras.configuration import fields_of, told
from ckptfmt.foreign.keras.naming import Keys, Trained

STATE, ITERATIONS, RATE = "state", "iterations", "learning_rate"
_PAIR = ("momentum", "velocity")
# Slots that stand together stand in one run for each variable; runs follow one another.
_RUNS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "sgd": (("momentum",),),
    "rm_sprop": (("velocity",), ("momentum",), ("average_gradient",)),
    "adam": (_PAIR, ("velocity_hat",)),
    "adam_w": (_PAIR, ("velocity_hat",)),
    "nadam": (_PAIR,),
    "adamax": (("momentum", "norm"),),
    "adadelta": (("accumulated_grad", "accumulated_delta_var"),),
    "adagrad": (("accumulator",),),
    "ftrl": (("accumulator", "linear"),),
    "lion": (("momentum",),),
    "lamb": (_PAIR,),
}
# (class, first slot of a run) -> the option that it depends on.
_OPTIONAL = {
    ("sgd", "momentum"): "momentum",
    ("rm_sprop", "momentum"): "momentum",
    ("rm_sprop", "average_gradient"): "centered",
    ("adam", "velocity_hat"): "amsgrad",
    ("adam_w", "velocity_hat"): "amsgrad",
}
_OWN_LAST = {"nadam": "u_product"}


def name_numbered(
    rows: Sequence[ForeignTensor], trained: Sequence[Trained] | None, config: Any
) -> list[Keys] | None:
    """Keys of an optimizer's variables below the optimizer, or None where they are not certain.

    Args:
        config: The optimizer's configuration, or None.
    """
    found = told(config)
    if found is None or trained is None or found.snake not in _RUNS:
        return None
    options = fields_of(config)
    made: list[tuple[Keys, tuple[int, ...]]] = [((ITERATIONS,), ())]
    if not isinstance(options.get(RATE), dict):
        made.append(((RATE,), ()))
    runs = [
        run
        for run in _RUNS[found.snake]
        if options.get(_OPTIONAL.get((found.snake, run[0]), ""), True)
    ]
    if options.get("use_ema"):
        runs.insert(0, ("average",))
    for run in runs:
        made += [((STATE, *one.keys, slot), one.shape) for one in trained for slot in run]
    if found.snake in _OWN_LAST:
        made.append(((_OWN_LAST[found.snake],), ()))
    if [shape for _, shape in made] != [tensor.shape for tensor in rows]:
        return None
    return [keys for keys, _ in made]


def constants_of(config: Any) -> dict[str, object]:
    """Its class and numbers, as the adapter for Keras notes them with an optimizer's steps."""
    numbers = {
        key: item for key, item in fields_of(config).items() if isinstance(item, int | float)
    }
    numbers.pop(RATE, None)  # a variable
    return {"class": config["class_name"], **numbers}


_OLD_SLOTS = {"m": "momentum", "v": "velocity", "vhat": "velocity_hat", "iter": ITERATIONS}


def name_by_text(names: Sequence[str], variables: Mapping[str, Keys]) -> dict[str, Keys]:
    """Keys below the optimizer, from the names that the older format has.

    Args:
        names: `adam/dense_kernel_momentum`, `Adam/dense/kernel/m:0`.
        variables: Full name of a variable -> its keys.
    """
    flat = {full.replace("/", "_"): keys for full, keys in variables.items()}
    made: dict[str, Keys] = {}
    taken: set[Keys] = set()
    for name in names:
        text = name.removesuffix(":0")
        keys = _by_text(text.partition("/")[2] or text, flat)
        if keys in taken:
            keys = (text,)
        taken.add(keys)
        made[name] = keys
    return made


def _by_text(text: str, flat: Mapping[str, Keys]) -> Keys:
    """`dense_kernel_momentum`, `dense/kernel/m`, and `m/dense/kernel` of Keras 2.11 to 2.15: the
    longest variable's name that it begins or ends with."""
    if text in ("iteration", "iter"):
        return (ITERATIONS,)
    plain = text.replace("/", "_")
    cuts = [at for at, letter in enumerate(plain) if letter == "_"]
    found: list[tuple[int, str, str]] = []
    for at in cuts:
        before, after = plain[:at], plain[at + 1 :]
        if before in flat and after:
            found.append((len(before), before, after))
        if after in flat and before:
            found.append((len(after), after, before))
    if not found:
        return (text,)
    _, full, slot = max(found)
    return (STATE, *flat[full], _OLD_SLOTS.get(slot, slot))
