"""What an optimizer of tf.compat.v1.train holds: slots by variable and name, and single variables.

Named as a Keras optimizer's state is: `state/<variable>/<slot>`, and `beta1_power`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ckptfmt.errors import UsageError
from ckptfmt.format import parse_key, split_name
from ckptfmt.tensorflow.keras_optimizer import STATE, Peers, in_other_company, models_of, owners
from ckptfmt.tensorflow.survey import Keys
from ckptfmt.tensorflow.tensors import identity_of, raw_variable


def slot_variables(
    optimizer: Any, where: str, peers: Peers, *, elsewhere: bool = False
) -> list[tuple[Keys, Any, tuple[Keys, ...]]]:
    """(keys, variable, keys of the aliases) of everything that an optimizer holds.

    Raises:
        UsageError: It has slots for a variable that is not in the tree.
    """
    single = list(tf.train.TrackableView.children(optimizer).items())
    rows: list[tuple[Keys, Any, tuple[Keys, ...]]] = [((name,), v, ()) for name, v in single]
    slots = list(optimizer.get_slot_names())
    optimized = [
        one.variable
        for model in models_of(peers)
        for one in model.found.values()
        if any(_slot(optimizer, one.variable, slot) is not None for slot in slots)
    ]
    optimized = list({identity_of(v): v for v in optimized}.values())
    for variable, owner in zip(optimized, owners(peers, where, optimized, elsewhere=elsewhere)):
        for slot in slots:
            held = _slot(optimizer, variable, slot)
            if held is not None:
                aliases = tuple(
                    (STATE, *(parse_key(part) for part in split_name(alias)), slot)
                    for alias in owner.aliases
                )
                rows.append(((STATE, *owner.keys, slot), held, aliases))
    named = {id(variable) for _, variable, _ in rows}
    lost = [v.name for v in optimizer.variables() if id(v) not in named]
    if lost:
        raise UsageError(
            "an optimizer has slots for variables that no model in the tree has",
            reason="optimizer",
            where=where,
            found=f"{len(lost)}: {', '.join(lost[:5])}",
            do="put all modules that it optimizes into the tree",
        )
    return rows


def _slot(optimizer: Any, variable: Any, slot: str) -> Any:
    return optimizer.get_slot(raw_variable(variable, ""), slot)


def optimized_by(peers: Peers, stored_owners: set[str]) -> list[Any]:
    """The variables of the tree that state is stored for, under any of their names."""
    return [
        raw_variable(one.variable, "")
        for model in models_of(peers)
        for one in model.found.values()
        if stored_owners & {n for p in (one.name, *one.aliases) for n in in_other_company(model, p)}
    ]


def built_copy(optimizer: Any, variables: Sequence[Any]) -> Any:
    """A throw-away optimizer with the slots that this one would have."""
    made = copy.copy(optimizer)
    made._slots = {name: dict(slots) for name, slots in optimizer._slots.items()}
    made._non_slot_dict = dict(optimizer._non_slot_dict)
    made._self_unconditional_deferred_dependencies = {}
    build(made, variables)
    return made


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make the slots, as the first step would: at their initial values."""
    with tf.init_scope():
        optimizer._create_slots(list(variables))
