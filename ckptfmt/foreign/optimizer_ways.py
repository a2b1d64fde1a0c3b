"""The two ways of an optimizer: from Keras to PyTorch, from PyTorch to Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptfmt.foreign import lazy
from ckptfmt.foreign.base import ForeignTensor, like
from ckptfmt.foreign.optimizer_rules import (
    Job,
    OptimizerRule,
    below,
    keras_constants,
    keras_home,
    keras_parts,
    number_of,
    scalar_leaf,
    slot_leaf,
    torch_groups,
    torch_home,
)
from ckptfmt.foreign.optimizers import (
    CONSTANTS,
    DECAY,
    DECOUPLED,
    STEP,
    OptimizerRow,
    group_value,
    keras_value,
    row_of_class,
    row_of_group,
    rows_of_slots,
    set_group_value,
    torch_value,
)
from ckptfmt.foreign.rules import Leaf, Leaves
from ckptfmt.format import escape_key, join_name, parse_key

NO_EQUAL = "only Adam, AdamW, SGD, RMSprop, Adagrad, Adamax and Nadam are in both"
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")
_INNER = "inner_optimizer"
_FLOAT = "float32"
"""Of PyTorch's `step`, and of Keras's `learning_rate`."""


class KerasOptimizers(OptimizerRule):
    """`optimizer/state/enc/dense/kernel/momentum` -> `optimizer/state/enc.dense.weight/exp_avg`."""

    def find(self, leaves: Leaves) -> list[str]:
        ends = [n for n, x in leaves.items() if n.rpartition("/")[2] == "iterations" and x.tensor]
        names = [n.rpartition("/")[0] for n in ends]
        found = [
            name
            for name, tensor in zip(names, (leaves[at].tensor for at in ends))
            if f"{below(name)}learning_rate" in leaves
            or (tensor is not None and CONSTANTS in tensor.attributes)
            or any(at.startswith(f"{below(name)}state/") for at in leaves)
        ]
        return [
            n
            for n in found
            if n.removesuffix(f"/{_INNER}") == n or n[: -len(_INNER) - 1] not in found
        ]

    def carry(self, job: Job) -> None:
        leaves = _without_scaling(job)
        state, single = keras_parts(job.name, leaves)
        constants = keras_constants(single)
        row, why = self._row(job, {*state, *single}, constants)
        home = keras_home({owner: 0 for slot in state.values() for owner in slot}, job.models)
        if row is not None and home is None and state:
            row, why = None, "the model whose variables it optimizes is not in the source"
        if row is None:
            job.lose("", why)
            return
        owners, model = home or ({}, "")
        known = {slot.keras for slot in row.slots}
        other = [f"state/*/{key}" for key in state if key not in known]
        own = ("iterations", "learning_rate", *row.scalars)
        for key in [*other, *(key for key in single if key not in own)]:
            job.lose(key, f"PyTorch's {row.torch[0]} keeps no such thing")
        rate = number_of(single["learning_rate"]) if "learning_rate" in single else None
        present = {slot.when for slot in row.slots if slot.when and slot.keras in state}
        groups = _groups(job, row, constants, present, rate)
        by_parameter: dict[str, Leaves] = {}
        for slot in row.slots:
            if slot.keras not in state and not (slot.when and groups[0].get(slot.when)):
                continue
            if slot.rate and not rate and slot.keras in state:
                of = "a schedule's, which is not stored" if rate is None else "0"
                job.lose(f"state/*/{slot.keras}", f"the learning rate is in it, and that is {of}")
                continue
            moments: dict[str, ForeignTensor | None] = {
                **dict.fromkeys(owners),
                **state.get(slot.keras, {}),
            }
            moved, root = self.moved(job.models, moments, owners)
            factor = slot.rate / rate if slot.rate and rate else 1.0
            for at, tensor in moved.items():
                leaf = slot_leaf(tensor, factor, f"{slot.keras} -> {slot.torch}")
                by_parameter.setdefault(_torch_name(at, root, model), {})[slot.torch] = leaf
        if job.live is None:
            moved, root = self.moved(job.models, dict.fromkeys(owners), owners)
            groups[0]["params"] = [_torch_name(at, root, model) for at in moved]
        parameters = [str(p) for group in groups for p in group["params"]]
        _note_others(job, by_parameter, parameters)
        counted = {STEP: "iterations"} if row.counts else {}
        counted |= {torch: keras for keras, torch in row.scalars.items()}
        for parameter in [p for p in parameters if p in by_parameter]:
            at = join_name(join_name(job.name, "state"), escape_key(parameter))
            for key, keras in counted.items():
                number = single[keras].tensor if keras in single else None
                if number is not None:
                    job.after[f"{at}/{key}"] = scalar_leaf(number, _FLOAT)
            job.after |= {f"{at}/{key}": leaf for key, leaf in by_parameter[parameter].items()}
        if not job.after:
            job.after[join_name(job.name, "state")] = Leaf((), None, {})
        job.after[join_name(job.name, "param_groups")] = Leaf((), None, groups)

    def _row(
        self, job: Job, keys: set[str], constants: Mapping[str, object]
    ) -> tuple[OptimizerRow | None, str]:
        """What it is; or why that is not known."""
        live, told = job.live, self.told(job.name) or str(constants.get("class", ""))
        slots = keys - {"iterations", "learning_rate"}
        found = [row_of_class(told)] if told else [*rows_of_slots(slots)]
        if not told and not found and live is not None:
            found = [live.row]  # it may keep more than the table knows, which is told
        rows = [row for row in found if row is not None]
        if not rows:
            return None, f"PyTorch has no equal of Keras's {told}" if told else NO_EQUAL
        names = " or ".join(row.keras[0] for row in rows)
        if live is not None:
            wanted = NO_EQUAL if live.row is None else f"not {live.row.torch[0]}, but {names}"
            return (live.row, "") if live.row in rows else (None, wanted)
        if len(rows) > 1:
            which = f"{names}: say which, layers={{'^{job.name}$': "
            return (
                None,
                f"{which}'{rows[0].keras[0]}'}} (--layer '^{job.name}$={rows[0].keras[0]}')",
            )
        return rows[0], ""


class TorchOptimizers(OptimizerRule):
    """`optimizer/state/enc.dense.weight/exp_avg` -> `optimizer/state/enc/dense/kernel/momentum`."""

    def find(self, leaves: Leaves) -> list[str]:
        names: dict[str, None] = {}
        for at in leaves:
            parts = at.split("/")
            if "param_groups" in parts:
                names["/".join(parts[: parts.index("param_groups")])] = None
        return [name for name in names if torch_groups(name, leaves)]

    def carry(self, job: Job) -> None:
        live, groups = job.live, torch_groups(job.name, job.leaves)
        row = row_of_group(groups[0])
        entries = [entry for group in groups for entry in _named(group)]
        home = torch_home([parameter for _, parameter, _ in entries], job.models)
        if row is None or (live is not None and live.row is None):
            job.lose("", f"Keras has no equal of it: {NO_EQUAL}")
        elif live is not None and live.row is not None and live.row is not row:
            job.lose("", f"not {live.row.keras[0]}, but {row.torch[0]}")
        elif home is None or not job.models:
            job.lose("", "its parameters have no names that the source has too (saved by position, "
                         "or without the model)")  # fmt: skip
        else:
            self._carry(job, row, groups, entries, home)

    def _carry(
        self,
        job: Job,
        row: OptimizerRow,
        groups: Sequence[Mapping[str, Any]],
        entries: Sequence[_Entry],
        home: tuple[dict[str, str], str],
    ) -> None:
        owners, container = home
        constants = _check_groups(job, row, groups)
        state = _torch_state(job, entries)
        known = {slot.torch for slot in row.slots} | {STEP} | {*row.scalars.values()}
        for parameter, found in state.items():
            for key in found.keys() - known:
                job.lose(
                    f"state/{escape_key(parameter)}/{key}",
                    f"Keras's {row.keras[0]} keeps no such thing",
                )
        _keep_own(job, row, state, groups[0])
        steps = job.after[f"{below(job.name)}iterations"]
        if steps.tensor is not None:
            noted = like(steps.tensor, attributes={CONSTANTS: constants})
            job.after[f"{below(job.name)}iterations"] = Leaf((), noted)
        rates = {parameter: group.get("lr") for _, parameter, group in entries}
        for slot in row.slots:
            if slot.when and not any(group.get(slot.when) for group in groups):
                continue
            moments: dict[str, ForeignTensor | None] = {}
            for parameter in owners:
                leaf = state.get(parameter, {}).get(slot.torch)
                moments[parameter] = tensor = leaf.tensor if leaf is not None else None
                rate = rates[parameter]
                if slot.rate and tensor is not None and isinstance(rate, int | float):
                    moments[parameter] = lazy.scaled(tensor, rate / slot.rate)
            moved, _ = self.moved(job.models, moments, owners)
            for at, tensor in moved.items():
                owner = at.removeprefix(below(container)) if container else at
                if job.live is None or not job.live.owners or owner in job.live.owners:
                    where = f"{below(job.name)}state/{owner}/{slot.keras}"
                    job.after[where] = slot_leaf(tensor, 1.0, f"{slot.torch} -> {slot.keras}")
        idle = [p for p in owners if not state.get(p)]
        if idle and len(idle) < len(owners):
            job.note(f"no state yet, which is 0 in Keras: {_few(idle)}")


_Entry = tuple[object, str, Mapping[str, Any]]
"""(key in the state, name, group) of a parameter."""


def _without_scaling(job: Job) -> Leaves:
    """The leaves of an optimizer, of one that scales the loss those of the optimizer within."""
    inner = f"{below(job.name)}{_INNER}/"
    within = {
        below(job.name) + n.removeprefix(inner): x
        for n, x in job.leaves.items()
        if n.startswith(inner)
    }
    for key in ("dynamic_scale", "step_counter") if within else ():
        job.lose(key, "PyTorch scales the loss outside of the optimizer: torch.amp.GradScaler")
    return within or job.leaves


def _keep_own(
    job: Job, row: OptimizerRow, state: Mapping[str, Leaves], group: Mapping[str, Any]
) -> None:
    """The number of steps, the learning rate, what else is the optimizer's own in Keras."""
    some = next(leaf.tensor for leaf in job.models.values() if leaf.tensor is not None)
    single = job.live.single if job.live is not None else {}

    def put(key: str, value: float, dtype: str) -> None:
        dtype = single[key].dtype if key in single else dtype
        job.after[below(job.name) + key] = Leaf((), lazy.filled(some, (), value, dtype))

    counts = {p: number_of(found[STEP]) or 0 for p, found in state.items() if STEP in found}
    if len(set(counts.values())) > 1:
        least, most = (choose(counts, key=counts.__getitem__) for choose in (min, max))
        told = f"{counts[most]:g} of {most}, {counts[least]:g} of {least}"
        job.lose("iterations", f"Keras counts once for all: {told}")
    put("iterations", max(counts.values(), default=0), "int64")
    if not row.counts:
        if "iterations" in single:
            job.after[below(job.name) + "iterations"] = Leaf((), single["iterations"])
        job.note(f"PyTorch's {row.torch[0]} counts no steps: iterations stays")
    rate = group.get("lr")
    if isinstance(rate, int | float) and (job.live is None or "learning_rate" in single):
        put("learning_rate", rate, _FLOAT)
    for keras, torch in row.scalars.items():
        found = [number_of(slots[torch]) for slots in state.values() if torch in slots]
        put(keras, found[0] if found and found[0] is not None else 1.0, _FLOAT)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _torch_name(at: str, root: str, model: str) -> str:
    """A parameter's name in its optimizer: the key in its module, which is named if `model` is not
    (the optimizer has variables of several)."""
    above, _, last = at.rpartition("/")
    if not model and above:
        return f"{above}.{parse_key(last)}"
    parts = at.removeprefix(below(root)).split("/")
    return ".".join(str(parse_key(part)) for part in parts)


def _note_others(job: Job, found: Mapping[str, object], parameters: Sequence[str]) -> None:
    """Variables that only one side optimizes."""
    frozen = [p for p in found if p not in parameters]
    fresh = [p for p in parameters if p not in found] if found else []
    if frozen:
        job.note(f"the target does not optimize {_few(frozen)}")
    if fresh:
        job.note(f"the source has no state of {_few(fresh)}")


def _groups(
    job: Job,
    row: OptimizerRow,
    constants: Mapping[str, object],
    present: set[str],
    rate: float | None,
) -> list[dict[str, Any]]:
    """PyTorch's groups: the target's, or one as its class makes it, with Keras's numbers."""
    live = job.live
    groups = [dict(g) for g in live.groups] if live is not None else [{**row.group, "params": []}]

    def put(key: str, value: object) -> None:
        if len({repr(group_value(group, key)) for group in groups}) > 1:
            job.note(f"{key} differs between groups and stays; Keras has {value}")
            return
        for group in groups:
            set_group_value(group, key, value)

    if rate is not None:
        put("lr", rate)
    for keras, torch in row.constants.items():
        if keras in constants:
            put(torch, torch_value(row, torch, constants[keras]))
    for when in (slot.when for slot in row.slots if slot.when):
        if when not in present:
            put(when, 0.0 if when == "momentum" else False)
        elif when != "momentum":
            put(when, True)
        elif not groups[0].get(when):
            job.note("the source does not say its momentum: set it in the target")
    for key, value in row.fixed.items():
        put(key, value)
    decay = constants.get(DECAY)
    if decay:
        if live is None and DECOUPLED in row.group:
            put(DECOUPLED, True)
        if all(_is_decoupled(row, group) for group in groups):
            put(DECAY, decay)
        else:
            job.lose(
                DECAY,
                f"{decay} of each variable in Keras, of its gradient in PyTorch's {row.torch[0]}",
            )
    elif "class" in constants:
        put(DECAY, 0.0)
    clips = [f"{key}={constants[key]}" for key in _CLIPPING if constants.get(key)]
    if clips:
        job.note(f"PyTorch's optimizers do not clip ({', '.join(clips)})")
    return groups


def _is_decoupled(row: OptimizerRow, group: Mapping[str, Any]) -> bool:
    """Whether weight decay does what Keras's does. Without momentum there is no other."""
    plain = row.torch == ("SGD",) and not group.get("momentum")
    return bool(group.get(DECOUPLED, plain))


def _named(group: Mapping[str, Any]) -> list[_Entry]:
    """A plain state_dict has positions, and names beside if the optimizer was made of some."""
    names, keys = group.get("param_names"), group["params"]
    named = names if isinstance(names, list) and len(names) == len(keys) else keys
    return [(key, str(parameter), group) for key, parameter in zip(keys, named)]


def _torch_state(job: Job, entries: Sequence[_Entry]) -> dict[str, Leaves]:
    """Parameter -> key -> leaf, for those that have state."""
    parameter_of = {escape_key(key): parameter for key, parameter, _ in entries}
    made: dict[str, Leaves] = {}
    for at, leaf in job.leaves.items():
        owner, _, key = at.removeprefix(f"{below(job.name)}state/").rpartition("/")
        if owner in parameter_of and (leaf.tensor is not None or leaf.value is not None):
            made.setdefault(parameter_of[owner], {})[key] = leaf
    return made


def _check_groups(
    job: Job, row: OptimizerRow, groups: Sequence[Mapping[str, Any]]
) -> dict[str, object]:
    """What Keras has once for all, or not at all, and how its optimizer is to be built: its class and
    constants, as a save of it notes them."""
    first, live = groups[0], job.live
    for key in dict.fromkeys(["lr", DECAY, *row.constants.values()]):
        values = list(dict.fromkeys(repr(group_value(group, key)) for group in groups))
        if len(values) > 1:
            job.lose(
                f"param_groups/{key}",
                f"Keras has one for all variables: {values[0]} and {values[1]}",
            )
    for key, value in {**row.fixed, "maximize": False}.items():
        if first.get(key, value) != value:
            job.lose(f"param_groups/{key}", f"Keras's {row.keras[0]} has none: {first[key]}")
    told = {keras: keras_value(row, first, key) for keras, key in row.constants.items()}
    if first.get(DECAY) and _is_decoupled(row, first):
        told[DECAY] = first[DECAY]
    elif first.get(DECAY):
        job.lose(f"param_groups/{DECAY}", "of the gradient in PyTorch, of each variable in Keras")
    have = live.constants if live is not None else {}
    odd = [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in told.items()
           if v is not None and (live is None or (have.get(k) or 0) != v)]  # fmt: skip
    if odd:
        job.note(f"build Keras's {row.keras[0]} with {', '.join(odd)}")
    numbers = {key: item for key, item in told.items() if isinstance(item, int | float)}
    return {"class": row.keras[0], **numbers}
