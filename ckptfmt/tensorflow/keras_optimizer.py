"""What a Keras optimizer holds, called by the variables that it optimizes.

`iterations`, `learning_rate`, and `state/<variable>/<slot>`: `state/dense/kernel/momentum`. The
variable's name is the one its model has for it, found by identity in the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from ckptfmt.engine import StoredLeaf
from ckptfmt.errors import UsageError, warn
from ckptfmt.format import join_name, parse_key, split_name
from ckptfmt.tensorflow.objects import empty_nodes, survey
from ckptfmt.tensorflow.survey import Found, Keys, name_of
from ckptfmt.tensorflow.tensors import full_name_of, identity_of, is_optimizer, is_variable
from ckptfmt.tensorflow.trackables import is_keras, is_stateful, trackable_children

Peers = Sequence[tuple[str, object]]
STATE = "state"
CONSTANTS = "tf.optimizer"
"""Attribute of `iterations`: the optimizer's class and constants, for a reader of another framework."""
_CONSTANTS = (
    *("beta_1", "beta_2", "rho", "momentum", "epsilon", "nesterov", "amsgrad", "centered"),
    *("initial_accumulator_value", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm"),
)
_BOOKKEEPING = frozenset(["_variables", "_trainable_variables", "_tracker"])


@dataclass(frozen=True, slots=True)
class Owner:
    """What the tree calls a variable: keys below `state`, and the aliases of those as names."""

    keys: Keys
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class _Model:
    name: str
    obj: Any
    found: dict[int, Found] = field(default_factory=dict)
    held: Sequence[Found] = ()


def models_of(peers: Peers) -> list[_Model]:
    """Everything in the tree that may hold variables which an optimizer optimizes."""
    models = []
    for name, obj in _opened(peers):
        # Peers are all objects whose framework is ours: handles of our own, too.
        if not is_stateful(obj) or is_optimizer(obj):
            continue
        if is_keras(obj) and not isinstance(obj, keras.layers.Layer):
            continue
        made = survey(obj, name)
        found = {identity_of(one.variable): one for one in made.found}
        models.append(_Model(name, obj, found, made.holders))
    return models


def _opened(peers: Peers, above: tuple[int, ...] = ()) -> list[tuple[str, object]]:
    """Before each tf.train.Checkpoint what it holds: names are then as in a dict of the same."""
    made: list[tuple[str, object]] = []
    for name, obj in peers:
        if isinstance(obj, tf.train.Checkpoint) and id(obj) not in above:
            edges = trackable_children(obj, name)
            inner = [(join_name(name, name_of(one.keys, name)), one.child) for one in edges]
            made += _opened([row for row in inner if is_stateful(row[1])], (*above, id(obj)))
        made.append((name, obj))
    return made


def in_other_company(holder: _Model, name: str) -> list[str]:
    """What a variable may be called below `state`: within its holder, and with parts of the holder's
    own name before that, which is how one is called that lies further out. The longest first. Without
    its first parts, where the holder is a module: in a dict the objects in it stand by themselves."""
    parts = holder.name.split("/") if holder.name else []
    made = ["/".join([*parts[at:], name]) for at in range(len(parts) + 1)]
    if not is_keras(holder.obj):
        below = name.split("/")
        made += ["/".join(below[at:]) for at in range(1, len(below))]
    return made


def owners(
    peers: Peers, where: str, variables: Sequence[Any], *, elsewhere: bool = False
) -> list[Owner]:
    """The tree's name of each variable, in the order of `variables`.

    Relative to the one object that holds them all; by full names if no single one does; by position
    if none of them is in the tree.

    Args:
        elsewhere: Count what they are called where the same objects are held otherwise, in a
            tf.train.Checkpoint or a dict of dicts, among their aliases.
    Raises:
        UsageError: Some of the variables are in the tree and some are not.
    """
    if not variables:
        return []
    models = models_of(peers)
    idents = [identity_of(variable) for variable in variables]
    whole = next((one for one in models if all(i in one.found for i in idents)), None)
    made: list[Owner | None] = []
    for ident in idents:
        holder = whole or next((model for model in models if ident in model.found), None)
        if holder is None:
            made.append(None)
            continue
        one = holder.found[ident]
        others = tuple(in_other_company(holder, one.name)) if elsewhere else ()
        if whole is not None:
            made.append(Owner(one.keys, (*one.aliases, *others)))
            continue
        prefix = tuple(parse_key(part) for part in split_name(holder.name))
        aliases = tuple(f"{holder.name}/{alias}" for alias in one.aliases)
        made.append(Owner(prefix + one.keys, (*aliases, *others)))
    known = [owner for owner in made if owner is not None]
    if len(known) == len(made):
        return known
    if known:
        lost = [full_name_of(v) for v, owner in zip(variables, made) if owner is None]
        raise UsageError(
            "an optimizer has variables that no model in the tree has",
            reason="optimizer",
            where=where,
            found=f"{len(lost)} of {len(made)}: {', '.join(lost[:5])}",
            do="put all models that it optimizes into the tree",
        )
    return [Owner((str(position),)) for position in range(len(variables))]


def warn_if_positional(named: Sequence[Owner], peers: Peers, where: str, variables: Any) -> None:
    """Warn where `owners` had to fall back on positions."""
    if not named or named[0].keys != ("0",):
        return
    held = {ident for model in models_of(peers) for ident in model.found}
    if not any(identity_of(variable) in held for variable in variables):
        warn(
            f"{where}: the optimizer's variables are not in the tree, so its state is saved by "
            "position; put its model into the tree to save it by name"
        )


def optimizer_variables(
    optimizer: Any, named: Sequence[Owner], where: str
) -> list[tuple[Keys, Any, tuple[Keys, ...]]]:
    """(keys, variable, keys of the aliases) of everything that an optimizer holds, in its order.

    Args:
        optimizer: Built or not.
        named: For each of its trainable variables, in order.
        where: Its own name, for errors.
    Raises:
        UsageError: Keras counts other variables than were found.
    """
    slots, single, inner = _look_at_attributes(optimizer, len(named))
    listed = {identity_of(v): v for v in getattr(optimizer, "_variables", ())}
    listed |= {ident: v for ident, (v, _) in single.items() if ident not in listed}
    listed |= {ident: v for ident, (v, _, _) in slots.items() if ident not in listed}
    references = list(getattr(optimizer, "_trainable_variables", ()))
    made: dict[Keys, tuple[Any, tuple[Keys, ...]]] = {}
    for position, (ident, variable) in enumerate(listed.items()):
        aliases: tuple[Keys, ...] = ()
        if ident in slots:
            _, attribute, row = slots[ident]
            slot = _slot_name(variable, references[row] if row < len(references) else None)
            keys: Keys = (STATE, *named[row].keys, slot or attribute.lstrip("_"))
            if keys in made or not slot:
                keys = (*keys[:-1], attribute.lstrip("_"))
            aliases = tuple(
                (STATE, *(parse_key(part) for part in split_name(alias)), keys[-1])
                for alias in named[row].aliases
            )
        else:
            keys = (_own_name(optimizer, variable, single.get(ident), position),)
        if keys in made:
            keys = ("variables", str(position))
        made[keys] = (variable, aliases)
    rows = [(keys, variable, aliases) for keys, (variable, aliases) in made.items()]
    for attribute, child in inner.items():
        rows += [
            ((attribute, *keys), variable, tuple((attribute, *alias) for alias in aliases))
            for keys, variable, aliases in optimizer_variables(child, named, where)
        ]
    _check_complete(optimizer, rows, where)
    return rows


def _look_at_attributes(
    optimizer: Any, count: int
) -> tuple[dict[int, tuple[Any, str, int]], dict[int, tuple[Any, str]], dict[str, Any]]:
    """Slots (a list with an item per trainable variable), single variables, inner optimizers."""
    slots: dict[int, tuple[Any, str, int]] = {}
    single: dict[int, tuple[Any, str]] = {}
    inner: dict[str, Any] = {}
    for attribute, value in vars(optimizer).items():
        if attribute in _BOOKKEEPING or attribute.startswith("_self_"):
            continue
        if isinstance(value, keras.optimizers.Optimizer):
            inner[attribute] = value
        elif is_variable(value):
            single.setdefault(identity_of(value), (value, attribute))
        elif isinstance(value, (list, tuple)) and len(value) == count:
            for row, item in enumerate(value):
                if is_variable(item):
                    slots.setdefault(identity_of(item), (item, attribute, row))
    return slots, single, inner


def _slot_name(variable: Any, reference: Any) -> str:
    """`momentum` of `sequential_dense_kernel_momentum`; "" where the name does not follow that."""
    if reference is None:
        return ""
    if isinstance(reference, keras.Variable):
        prefix = str(reference.path).replace("/", "_")
    else:
        prefix = str(reference.name).replace("/", "_").replace(":", "_")
    name = str(variable.name)
    return name[len(prefix) + 1 :] if name.startswith(prefix + "_") else ""


def _own_name(optimizer: Any, variable: Any, attribute: tuple[Any, str] | None, at: int) -> str:
    """The name of a variable that belongs to no other: `iterations`, `learning_rate`."""
    if variable is getattr(optimizer, "_iterations", None):
        return "iterations"
    if attribute is not None:
        return attribute[1].lstrip("_")
    return str(at)


def _check_complete(
    optimizer: Any, rows: Sequence[tuple[Keys, Any, tuple[Keys, ...]]], where: str
) -> None:
    found = {identity_of(variable) for _, variable, _ in rows}
    lost = [one for one in optimizer.variables if identity_of(one) not in found]
    if lost or len({name_of(keys, where) for keys, _, _ in rows}) != len(rows):
        raise UsageError(
            "an optimizer has variables that could not be named",
            reason="optimizer",
            where=where,
            expected=f"{len(optimizer.variables)} variables",
            found=f"{len(found)}",
            do="keep one list per kind of slot, an item for each trainable variable, as attributes",
        )


def constants(optimizer: Any, variable: Any) -> dict[str, object]:
    """Of the leaf of an optimizer's number of steps: which class of Keras's it is, with what numbers."""
    if variable is not getattr(optimizer, "_iterations", None):
        return {}
    found = {key: getattr(optimizer, key, None) for key in _CONSTANTS}
    numbers = {key: item for key, item in found.items() if isinstance(item, (bool, int, float))}
    return {CONSTANTS: {"class": class_of(optimizer).__name__, **numbers}}


def class_of(optimizer: Any) -> type:
    """Keras's own class of it: that which a class of the user's is derived from."""
    return next(c for c in type(optimizer).__mro__ if c.__module__.startswith("keras."))


def other_class(leaves: Mapping[str, StoredLeaf], optimizer: Any) -> str:
    """The class whose state is stored, if an optimizer has nothing to do with it; else "".

    Of two classes one of which is derived from the other, as AdamW is from Adam, names decide.
    """
    rows = (leaf.attributes.get(CONSTANTS) for leaf in leaves.values())
    found = next((str(row.get("class", "")) for row in rows if isinstance(row, Mapping)), "")
    own, theirs = class_of(optimizer), getattr(keras.optimizers, found, None)
    if not found or found in {one.__name__ for one in own.__mro__}:
        return ""
    return "" if isinstance(theirs, type) and issubclass(theirs, own) else found


def all_exist(owners: set[str], peers: Peers) -> bool:
    """False if an optimizer's variables are still to come: none is in the tree, or one of those that
    have stored state is below a layer that is not built.

    Args:
        owners: Names of variables with stored state, below `state`.
    """
    models = models_of(peers)
    there = {
        name
        for model in models
        for one in model.found.values()
        for path in (one.name, *one.aliases)
        for name in in_other_company(model, path)
    }
    if owners <= there:
        return True
    return bool(owners & there) and not any(empty_nodes(survey(m.obj, m.name)) for m in models)


def variables_to_build_on(
    optimizer: Any, peers: Peers, stored_owners: set[str], others: set[str]
) -> list[Any]:
    """The trainable variables that an unbuilt optimizer should be built on.

    Of the model that is compiled with it, else of every model that has a variable whose state is
    stored; without those whose state another optimizer has.

    Args:
        optimizer: The optimizer.
        peers: All stateful objects in the tree.
        stored_owners: Names of variables with stored state, below `state`.
        others: Names of variables that only other optimizers have stored state of.
    """
    chosen: dict[int, Any] = {}
    models = models_of(peers)
    there = [*(obj for _, obj in peers), *(one.variable for model in models for one in model.held)]
    several = len({identity_of(one) for one in there if is_optimizer(one)})
    for model in models:
        found = [one.variable for one in model.found.values()]
        trainable = [v for v in found if getattr(v, "trainable", False)]
        if is_keras(model.obj):
            trainable = list(model.obj.trainable_variables)
        named = {
            identity_of(v): one.name
            for v in trainable
            if (one := model.found.get(identity_of(v))) is not None
        }
        company = {ident: {*in_other_company(model, n)} for ident, n in named.items()}
        foreign = {
            i for i, names in company.items() if others & names and not stored_owners & names
        }
        trainable = [v for v in trainable if identity_of(v) not in foreign]
        if is_keras(model.obj) and getattr(model.obj, "optimizer", None) is optimizer:
            return trainable
        mine = [name for ident, name in named.items() if stored_owners & company[ident]]
        # One of several optimizers has a part of a model: what lies below all that it has state of.
        part = _common(mine) if several > 1 else ""
        # A module may hold trainable variables beside its model, which no optimizer has.
        only = None if is_keras(model.obj) else set(mine)
        if mine:
            chosen |= {
                identity_of(v): v
                for v in trainable
                if (only is None or named.get(identity_of(v)) in only)
                and (not part or named.get(identity_of(v), "").startswith(f"{part}/"))
            }
    return list(chosen.values())


def _common(names: Sequence[str]) -> str:
    """The innermost container that all of the names lie in."""
    paths = [name.split("/")[:-1] for name in names]
    depth = 0
    while paths and all(len(path) > depth and path[depth] == paths[0][depth] for path in paths):
        depth += 1
    return "/".join(paths[0][:depth]) if paths else ""


def built_copy(optimizer: Any, variables: Sequence[Any]) -> Any:
    """A throw-away optimizer of the same configuration, built: it tells names, shapes and dtypes.

    Returns:
        The optimizer itself, built, where its configuration cannot make another one.
    """
    try:
        with _scope(optimizer):
            made = type(optimizer).from_config(optimizer.get_config())
            made.build(list(variables))
    except Exception:  # the caller's own code, which may raise anything
        build(optimizer, variables)
        return optimizer
    return made


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make the slots, as the first step would: at their initial values."""
    with _scope(optimizer):
        optimizer.build(list(variables))


def _scope(optimizer: Any) -> AbstractContextManager[Any]:
    """The distribution strategy that the optimizer was made under: its slots must be too."""
    strategy = getattr(optimizer, "_distribution_strategy", None)
    if strategy is None or strategy is tf.distribute.get_strategy():
        return nullcontext()
    scope: AbstractContextManager[Any] = strategy.scope()
    return scope


def names_of_owners(stored: Iterable[str], name: str) -> set[str]:
    """Names of the variables that state is stored for: `dense/kernel`."""
    made = set()
    for one in stored:
        parts = split_name(one[len(name) :].lstrip("/"))
        if STATE in parts:
            made.add("/".join(parts[parts.index(STATE) + 1 : -1]))
    return made - {""}
