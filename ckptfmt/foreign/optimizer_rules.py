"""What an optimizer of one framework keeps, as the other's has it: the state of each variable lies
as the variable does, by the one table of layers.

A slot is carried over as if it were the model: for `momentum` the table of all weights, each in its
place the momentum that belongs to it. Where a live optimizer is known, what it is, its groups and the
variables that it optimizes are the target's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfmt.foreign import lazy
from ckptfmt.foreign.base import ForeignTensor, like
from ckptfmt.foreign.layer_rules import KEEP, LayerRule
from ckptfmt.foreign.optimizers import CONSTANTS, OptimizerRow, row_of_class
from ckptfmt.foreign.rules import Leaf, Leaves, Rule, Table
from ckptfmt.format import dtype_named, parse_key, split_name

Moments = Mapping[str, ForeignTensor | None]
"""Owner -> its state; None: it has none yet."""


@dataclass(slots=True)
class LiveOptimizer:
    """An optimizer of the target.

    Attributes:
        row: None: it has no equal.
        groups: PyTorch's, each with its constants and the names of its parameters.
        constants: Keras's: its class and numbers.
        owners: Variables of which it has state already; none: that is not known.
        single: Tensors of the whole optimizer.
    """

    row: OptimizerRow | None
    groups: list[dict[str, Any]] = field(default_factory=list)
    constants: Mapping[str, object] = field(default_factory=dict)
    owners: frozenset[str] = frozenset()
    single: Mapping[str, ForeignTensor] = field(default_factory=dict)


@dataclass(slots=True)
class Job:
    """One optimizer on its way.

    Attributes:
        name: Of its container.
        leaves: All that it keeps.
        models: All other tensors of the source.
        live: The target's of the same name, if it is known.
        after: What becomes of it; `lost` and `notes` as in a `Table`.
    """

    name: str
    leaves: Leaves
    models: Leaves
    live: LiveOptimizer | None = None
    after: Leaves = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lose(self, key: str, why: str) -> None:
        """Something below it cannot be carried; "": all of it."""
        self.lost[below(self.name) + key if key else self.name] = why

    def note(self, text: str) -> None:
        self.notes.append(f"{self.name}: {text}")


class OptimizerRule(Rule):
    """Optimizer state of one framework as the other has it.

    Args:
        rules: Those that carry the models over.
        live: Name -> optimizer of the target; others are left as they are. None: all are carried.
    """

    text = "optimizer state"
    must_touch = False

    def __init__(
        self, rules: Sequence[LayerRule], live: Mapping[str, LiveOptimizer] | None = None
    ) -> None:
        self.rules, self.live = rules, live

    def apply(self, leaves: Leaves) -> Table:
        table = Table(self.text)
        place: dict[str, str] = {}
        for name in self.find(leaves):
            if (self.live is None or name in self.live) and self.told(name) != KEEP:
                place |= dict.fromkeys((n for n in leaves if n.startswith(below(name))), name)
        models = {n: x for n, x in leaves.items() if n not in place and x.tensor is not None}
        done: set[str] = set()
        for at, leaf in leaves.items():
            if at not in place:
                table.keep(at, leaf)
                continue
            name = place[at]
            if name not in done:
                done.add(name)
                mine = {n: leaves[n] for n, of in place.items() if of == name}
                job = Job(name, mine, models, (self.live or {}).get(name))
                self.carry(job)
                table.change(mine, job.after, "optimizer")
                table.lost |= job.lost
                table.notes += job.notes
        return table

    @abstractmethod
    def find(self, leaves: Leaves) -> list[str]:
        """The containers that are optimizers of this framework."""

    @abstractmethod
    def carry(self, job: Job) -> None:
        """Fill `after`, and what there is to say."""

    def told(self, name: str) -> str:
        """What the caller says it is: a class of the table, or to keep it; "" for nothing."""
        for rule in self.rules:
            for pattern, text in rule.layers.given:
                if pattern.matches(name) and (text == KEEP or row_of_class(text)):
                    return text
        return ""

    def moved(
        self, models: Leaves, moments: Moments, owners: Mapping[str, str]
    ) -> tuple[dict[str, ForeignTensor], str]:
        """One slot of all variables under the names and in the layouts of the other framework's
        weights, and the container of its model.

        Args:
            models: All weights, by the names they have now.
            owners: Owner -> its weight in `models`.
        """
        owner_of = {name: owner for owner, name in owners.items()}
        table: Leaves = {}
        for name, leaf in models.items():
            assert leaf.tensor is not None
            owner = owner_of.get(name, "\0")
            found = moments.get(owner)
            tensor = _zeros(leaf.tensor) if found is None else like(found, attributes={})
            # What has no name afterwards is made of no moment: statistics, a frozen weight.
            named = (found.foreign_name if found else "") or name
            tensor = like(tensor, identity=None, foreign_name=named if owner in moments else "")
            table[name] = Leaf((name,), tensor)
        root = ""
        for rule in self.rules:
            made, root = rule.carried(table, moments=True)
            table = made.leaves
        return {n: x.tensor for n, x in table.items() if x.tensor and x.tensor.foreign_name}, root


def below(name: str) -> str:
    return f"{name}/" if name else ""


def _zeros(tensor: ForeignTensor) -> ForeignTensor:
    known = dtype_named(tensor.dtype)
    if known is None or known.is_variable:
        return tensor  # which no layer has
    return lazy.filled(tensor, tensor.shape, 0)


def slot_leaf(tensor: ForeignTensor, factor: float, step: str) -> Leaf:
    """A slot in its new place. Each has memory of its own, also where the variables were tied."""
    made = tensor if factor == 1 else lazy.scaled(tensor, factor)
    times = "" if factor == 1 else f", times {factor:.6g}"
    return Leaf((), like(made, identity=None), None, (step + times,))


def scalar_leaf(tensor: ForeignTensor, dtype: str) -> Leaf:
    """A number of the whole optimizer, at one of the places where the other has it."""
    made = lazy.reshaped(lazy.cast(tensor, dtype), ())
    return Leaf((), like(made, identity=None, foreign_name="", attributes={}))


def number_of(leaf: Leaf) -> float | None:
    """A number, as a plain value or a tensor of one element; None for all else."""
    value: Any = leaf.value
    if leaf.tensor is not None:
        array = leaf.tensor.fetch() if leaf.tensor.nbytes <= 16 else None
        if array is None or array.size != 1:
            return None
        value = array.reshape(-1)[0]
        # 0.001 in float32 is meant to be 0.001.
        value = float(str(value)) if array.dtype == "float32" else value.item()
    return value if isinstance(value, int | float) else None


def keras_parts(name: str, leaves: Leaves) -> tuple[dict[str, dict[str, ForeignTensor]], Leaves]:
    """(slot -> owner -> tensor, what is the optimizer's own) of Keras's."""
    state: dict[str, dict[str, ForeignTensor]] = {}
    single: Leaves = {}
    for at, leaf in leaves.items():
        inner = at[len(below(name)) :]
        owner, _, slot = inner.removeprefix("state/").rpartition("/")
        if inner.startswith("state/") and owner and leaf.tensor is not None:
            state.setdefault(slot, {})[owner] = leaf.tensor
        else:
            single[inner] = leaf
    return state, single


def keras_constants(single: Leaves) -> Mapping[str, object]:
    iterations = single["iterations"].tensor
    found = iterations.attributes.get(CONSTANTS) if iterations is not None else None
    return found if isinstance(found, Mapping) else {}


def torch_groups(name: str, leaves: Leaves) -> list[dict[str, Any]]:
    """The groups of PyTorch's; a constant that is a tensor as its number. [] where there are none."""
    at = f"{below(name)}param_groups"
    whole = leaves[at].value if at in leaves else None
    if isinstance(whole, list):
        groups = whole
    else:
        made: dict[int, dict[str, Any]] = {}
        for n, leaf in leaves.items():
            parts = split_name(n[len(at) + 1 :]) if n.startswith(at + "/") else []
            if len(parts) == 2 and parts[0].isdecimal():
                value = leaf.value if leaf.tensor is None else number_of(leaf)
                made.setdefault(int(parts[0]), {})[str(parse_key(parts[1]))] = value
        groups = [made[position] for position in sorted(made)]
    good = all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    return [dict(group) for group in groups] if good else []


def keras_home(owners: Iterable[str], models: Leaves) -> tuple[dict[str, str], str] | None:
    """(owner -> its weight, the model's name in the source) of Keras's. None: not all are there."""
    wanted = list(owners)
    by_origin = {leaf.origin[0]: n for n, leaf in models.items() if len(leaf.origin) == 1}
    first = wanted[0] if wanted else ""
    for origin in by_origin:
        if origin != first and not origin.endswith(f"/{first}"):
            continue
        model = origin[: len(origin) - len(first)]
        if all(model + owner in by_origin for owner in wanted):
            return {owner: by_origin[model + owner] for owner in wanted}, model.rstrip("/")
    return None


def torch_home(parameters: Sequence[str], models: Leaves) -> tuple[dict[str, str], str] | None:
    """(parameter -> its weight, the container of its module now, "" for several) of PyTorch's."""
    by_key: dict[str, dict[str, str]] = {}
    full: dict[str, str] = {}
    for name, leaf in models.items():
        above, _, last = (leaf.origin[0] if len(leaf.origin) == 1 else "").rpartition("/")
        key = str(parse_key(last)) if last else ""
        by_key.setdefault(above, {})[key] = name
        full[f"{above}.{key}"] = name
    for found in (*by_key.values(), full):
        if all(parameter in found for parameter in parameters):
            places = {found[parameter].rpartition("/")[0] for parameter in parameters}
            one = found is not full and len(places) == 1
            return {p: found[p] for p in parameters}, places.pop() if one else ""
    return None
