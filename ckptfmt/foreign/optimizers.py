"""The one table of optimizers that Keras and PyTorch both have: what either calls the state of a
variable, and its constants.

The state means the same in both but where a `rate` is given: Keras's SGD and RMSprop keep a momentum
that has the learning rate in it already, so it is divided by the rate of the next step, and
multiplied on the way back. What differs and is no state: where epsilon is added (Keras: before the
correction of Adam's bias; in Adagrad and RMSprop under the root; PyTorch's Adamax: to the gradient).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CONSTANTS = "tf.optimizer"
"""Attribute of a Keras optimizer's `iterations`: its class and constants."""
STEP = "step"
"""What PyTorch calls the number of steps, which it counts for each parameter."""
DECAY, DECOUPLED = "weight_decay", "decoupled_weight_decay"


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of the shape of its variable. `rate`: PyTorch's is Keras's times `rate` / learning
    rate. `when`: the constant, of either, without which there is none."""

    keras: str
    torch: str
    rate: int = 0
    when: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """An optimizer of both.

    Attributes:
        keras, torch: Its classes.
        slots: State of each variable.
        constants: Keras's name -> key of PyTorch's group; "betas.0" is the first of a pair.
        group: PyTorch's group but for what is Keras's, as its class makes it by default.
        told_by: Keys of a group that no row before has.
        fixed: Keys of PyTorch's group and the only values with which it does what Keras's does.
        counts: PyTorch keeps the number of steps.
        scalars: Keras's variable of the whole optimizer -> PyTorch's of each parameter.
        under_root: Keras adds epsilon under the root, PyTorch behind it: the one's is the other's
            squared, which is the same where it matters most. (Adagrad's sums begin at 0.1.)
    """

    keras: tuple[str, ...]
    torch: tuple[str, ...]
    slots: tuple[Slot, ...]
    constants: Mapping[str, str]
    group: Mapping[str, object]
    told_by: frozenset[str]
    fixed: Mapping[str, object] = field(default_factory=dict)
    counts: bool = True
    scalars: Mapping[str, str] = field(default_factory=dict)
    under_root: bool = False


_BETAS = {"beta_1": "betas.0", "beta_2": "betas.1", "epsilon": "eps"}
_HOW = {"maximize": False, "foreach": None, "capturable": False, "differentiable": False}
_FUSED = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
_USUAL = {"lr": 1e-3, "eps": 1e-7, DECAY: 0.0}
_ADAM = {**_USUAL, "betas": (0.9, 0.999), **_HOW}
_TWO = (Slot("momentum", "exp_avg"), Slot("velocity", "exp_avg_sq"))

_TABLE: tuple[OptimizerRow, ...] = (
    OptimizerRow(
        ("Adam", "AdamW"),
        ("Adam", "AdamW"),
        (*_TWO, Slot("velocity_hat", "max_exp_avg_sq", when="amsgrad")),
        {**_BETAS, "amsgrad": "amsgrad"},
        {
            **_ADAM,
            "amsgrad": False,
            "fused": None,
            DECOUPLED: False,
        },
        frozenset(["betas", "amsgrad"]),
    ),
    OptimizerRow(
        ("SGD",),
        ("SGD",),
        (Slot("momentum", "momentum_buffer", -1, "momentum"),),
        {"momentum": "momentum", "nesterov": "nesterov"},
        {"lr": 0.01, "momentum": 0.0, "dampening": 0, DECAY: 0.0, "nesterov": False, **_FUSED},
        frozenset(["dampening"]),
        fixed={"dampening": 0},
        counts=False,
    ),
    OptimizerRow(
        ("RMSprop",),
        ("RMSprop",),
        (
            Slot("velocity", "square_avg"),
            Slot("momentum", "momentum_buffer", 1, "momentum"),
            Slot("average_gradient", "grad_avg", when="centered"),
        ),
        {"rho": "alpha", "momentum": "momentum", "epsilon": "eps", "centered": "centered"},
        {
            **_USUAL,
            **_HOW,
            "alpha": 0.9,
            "momentum": 0.0,
            "centered": False,
        },
        frozenset(["alpha", "centered"]),
        under_root=True,
    ),
    OptimizerRow(
        ("Adagrad",),
        ("Adagrad",),
        (Slot("accumulator", "sum"),),
        {"epsilon": "eps", "initial_accumulator_value": "initial_accumulator_value"},
        {
            **_USUAL,
            **_FUSED,
            "lr_decay": 0.0,
            "initial_accumulator_value": 0.1,
        },
        frozenset(["lr_decay"]),
        fixed={"lr_decay": 0},
    ),
    OptimizerRow(
        ("Nadam",),
        ("NAdam",),
        _TWO,
        _BETAS,
        {
            **_ADAM,
            "momentum_decay": 1.0,
            DECOUPLED: False,
        },
        frozenset(["momentum_decay"]),
        fixed={"momentum_decay": 1},
        scalars={"u_product": "mu_product"},
    ),
    OptimizerRow(
        ("Adamax",),
        ("Adamax",),
        (Slot("momentum", "exp_avg"), Slot("norm", "exp_inf")),
        _BETAS,
        _ADAM,
        frozenset(["betas", DECAY]),
    ),
)


def row_of_class(name: str) -> OptimizerRow | None:
    return next((row for row in _TABLE if name in (*row.keras, *row.torch)), None)


def row_of_group(group: Mapping[str, object]) -> OptimizerRow | None:
    """The optimizer whose group has these keys, which no two classes have alike."""
    found = next((row for row in _TABLE if row.told_by <= group.keys()), None)
    # RAdam's are Adamax's and that one.
    return None if found is _TABLE[-1] and DECOUPLED in group else found


def rows_of_slots(names: Iterable[str]) -> list[OptimizerRow]:
    """The optimizers of Keras that have this state, all of it that they always have included."""
    there = set(names)
    return [
        row
        for row in _TABLE
        if there <= {slot.keras for slot in row.slots} | row.scalars.keys()
        and {slot.keras for slot in row.slots if not slot.when} | row.scalars.keys() <= there
    ]


def group_value(group: Mapping[str, object], key: str) -> object:
    """A constant of a group; None where it has none. "betas.0" is the first of a pair."""
    name, _, at = key.partition(".")
    value = group.get(name)
    if not at:
        return value
    return value[int(at)] if isinstance(value, list | tuple) and len(value) == 2 else None


def keras_value(row: OptimizerRow, group: Mapping[str, object], key: str) -> object:
    """The same as Keras's optimizer has it."""
    value = group_value(group, key)
    return value**2 if key == "eps" and row.under_root and isinstance(value, float) else value


def torch_value(row: OptimizerRow, key: str, value: object) -> object:
    """A constant of Keras's as PyTorch's optimizer has it."""
    return value**0.5 if key == "eps" and row.under_root and isinstance(value, float) else value


def set_group_value(group: dict[str, object], key: str, value: object) -> None:
    name, _, at = key.partition(".")
    if not at:
        group[name] = value
        return
    pair = group.get(name)
    items = list(pair) if isinstance(pair, list | tuple) else [0.9, 0.999]
    items[int(at)] = value
    group[name] = tuple(items)
