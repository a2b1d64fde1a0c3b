"""`translate`: what one framework wrote, as the live models of the other one want it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import UnsupportedError, UsageError, warn
from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.layer_rules import KerasToTorch, LayerRule, Layers, TorchToKeras
from ckptfmt.foreign.layers import LAYERS, Layer
from ckptfmt.foreign.lazy import nbytes_of
from ckptfmt.foreign.mapped import KEEP, map_tree
from ckptfmt.foreign.opening import ForeignCheckpoint, read_source
from ckptfmt.foreign.optimizer_rules import (
    LiveOptimizer,
    OptimizerRule,
    below,
    keras_constants,
    keras_parts,
)
from ckptfmt.foreign.optimizer_ways import KerasOptimizers, TorchOptimizers
from ckptfmt.foreign.optimizers import row_of_class, row_of_group
from ckptfmt.foreign.rules import Leaf, Leaves, Pattern, Rename, Rule, Table
from ckptfmt.types import StrPath

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.engine import Checkpoint, LiveModel, Store, TensorSource

_OWN = re.compile(r"(^|/)(seed_generator/state|states(/\d+)+)$")
_DEFAULTS = {"torch": ("Keras", 1e-3), "keras": ("PyTorch", 1e-5)}
"""Framework of the target -> the other one, and the epsilon of its normalization layers."""


def translate(
    source: StrPath | Store | Checkpoint,
    like: object,
    *,
    rename: Mapping[str, str] = {},
    layers: Mapping[str, str] = {},
    allow_partial: bool = False,
) -> ForeignCheckpoint:
    """What Keras wrote as PyTorch modules want it, or the other way: names and layouts. Optimizers
    that stand in `like` get the state of theirs.

    The live models of `like` say which layer is of which kind, how many heads it has, and what its
    weights are called. Nothing is read yet; the result is a source for `restore` and `plan`.

    Args:
        source: A store, or a file of another format.
        like: The tree to be restored: `{"model": model}`. Its models are all of one framework.
        rename: Layer in the source -> layer of `like`, as paths: `{"model/dense": "model/fc"}`;
            what is below goes along. "" is the top: `{"": "model"}` for a bare state dict.
        layers: What a layer of the source is that `like` has not, by pattern, as in a preset of
            `convert`: `{"^model/extra$": "keep"}`; an optimizer may be kept as well.
        allow_partial: Go on without what of an optimizer has no equal in the other framework.
    Raises:
        UsageError: `like` has no model of PyTorch or Keras, or a `rename` finds nothing.
        UnsupportedError: A layer has no equal in the other framework; or something of an optimizer
            has none: all of it is named.
    Warns:
        CkptWarning: A normalization layer has another epsilon than is usual in the other framework:
            equal weights would give unequal outputs. Or an optimizer has other constants.
    """
    from ckptfmt.engine import live_models

    models = live_models(like)
    frameworks = {model.framework for model in models}
    if len(frameworks) != 1 or not frameworks <= {"torch", "keras"}:
        raise UsageError(
            "like= must have models of one framework, PyTorch or Keras",
            reason="like",
            found=", ".join(sorted(frameworks)) or "none",
            do='pass the tree that is to be restored: {"model": model}',
        )
    rules: list[Rule] = [_moved(old, new) for old, new in rename.items()]
    given = [(Pattern(pattern), kind) for pattern, kind in layers.items()]
    of_models = [_rule_of(model, given) for model in models]
    if frameworks == {"torch"}:
        rules.append(KerasOptimizers(of_models, _torch_optimizers(like)))
        rules += [*of_models, _KerasOwn({})]
    else:
        live = _live_leaves(like)
        rules.append(TorchOptimizers(of_models, _keras_optimizers(live)))
        rules += [*of_models, _KerasOwn(live)]
    read = read_source(source)
    mapped = map_tree(read.tree, read.columns, rules)
    lost = {n: why for n, why in mapped.tree.skipped.items() if n not in read.tree.skipped}
    told = "could not carry: " + "; ".join(f"{name}: {why}" for name, why in lost.items())
    if lost and not allow_partial:
        raise UnsupportedError(
            "an optimizer has what the other framework has not",
            reason="optimizer",
            where=read.path,
            found=told,
            do="allow_partial=True goes on without",
        )
    notes = [
        note for rule in mapped.rules for note in rule.notes if rule.rule == OptimizerRule.text
    ]
    for note in [*[told] * bool(lost), *notes]:
        warn(note)
    for model in models:
        _warn_of_constants(model)
    return ForeignCheckpoint(read.path, mapped.tree, read.info)


def _moved(old: str, new: str) -> Rule:
    """What lies at and below one path lies at another; "" is the top."""
    to = new.replace("\\", r"\\")
    if not old:
        return Rename(Pattern("^(?=.)", f"{to}/" if to else ""))
    if not new:
        return Rename(Pattern(rf"^{re.escape(old)}[/.]", ""))
    return Rename(Pattern(rf"^{re.escape(old)}(?=/|\.|$)", to))


class _KerasOwn(Rule):
    """Seeds of Keras's dropout and states of its stateful RNNs, which PyTorch has none of: left
    behind, or those that the target has already."""

    text = "seed generators and RNN states"
    must_touch = False

    def __init__(self, live: Leaves) -> None:
        self._live = live

    def apply(self, leaves: Leaves) -> Table:
        table = Table(self.text)
        for name, leaf in leaves.items():
            if _OWN.search(name):
                table.change({name: leaf}, {})
            else:
                table.keep(name, leaf)
        for name, leaf in self._live.items():
            if leaf.tensor is not None and _OWN.search(name):
                table.keep(name, leaf)
        return table


def _live_leaves(tree: object) -> Leaves:
    """The leaves of live objects, as a save would find them."""
    from ckptfmt.engine import flatten
    from ckptfmt.format import LEAF_TENSOR, LEAF_VALUE, parse_value

    flat = flatten(tree)
    attributes: dict[int, dict[str, object]] = {}
    for key, rows in flat.attributes.items():
        for at, data in rows:
            attributes.setdefault(at, {})[key] = parse_value(data, KEEP, where=key)
    made: Leaves = {}
    for at, (name, kind, row) in enumerate(zip(flat.names, flat.kinds, flat.rows)):
        if kind == LEAF_VALUE:
            made[name] = Leaf((), None, parse_value(flat.values[row], KEEP, where=name))
        elif kind == LEAF_TENSOR:
            source = flat.tensors[row]
            shape = tuple(source.shape)
            tensor = ForeignTensor(
                *(name, "", source.dtype, shape, nbytes_of(source.dtype, shape, 0), "the target"),
                fetch=partial(_copy, source),
                attributes=attributes.get(at, {}),
            )
            made[name] = Leaf((), tensor)
    return made


def _copy(source: TensorSource) -> NDArray[Any]:
    return np.array(source.fetch())


def _torch_optimizers(tree: object) -> dict[str, LiveOptimizer]:
    from ckptfmt.engine import live_groups

    found = live_groups(tree)
    return {name: LiveOptimizer(row_of_group(groups[0]), groups) for name, groups in found.items()}


def _keras_optimizers(live: Leaves) -> dict[str, LiveOptimizer]:
    """The optimizers among live leaves."""
    found: dict[str, LiveOptimizer] = {}
    for name in KerasOptimizers([]).find(live):
        mine = {at: leaf for at, leaf in live.items() if at.startswith(below(name))}
        state, single = keras_parts(name, mine)
        constants = keras_constants(single)
        found[name] = LiveOptimizer(
            row_of_class(str(constants.get("class"))),
            constants=constants,
            owners=frozenset(owner for slot in state.values() for owner in slot),
            single={key: leaf.tensor for key, leaf in single.items() if leaf.tensor is not None},
        )
    return found


def _rule_of(model: LiveModel, given: list[tuple[Pattern, str]]) -> LayerRule:
    known: dict[str, Layer] = {}
    for path, kind, facts in model.layers:
        if kind in LAYERS:
            below = path.replace(".", "/") if model.framework == "torch" else path
            full = "/".join(filter(None, (model.name, below)))
            known[full] = _layer(full, kind, facts)
    rule = KerasToTorch if model.framework == "torch" else TorchToKeras
    return rule(Layers(given, known), model.name)


def _layer(path: str, kind: str, facts: Mapping[str, float]) -> Layer:
    """A layer with its facts under Keras's names. A convolution of PyTorch with a group for each
    channel is a depthwise one."""
    made = Layer(path, kind, {{"eps": "epsilon"}.get(key, key): n for key, n in facts.items()})
    groups = facts.get("groups", 1)
    if groups > 1 and groups == facts.get("in_channels") and re.fullmatch(r"Conv[12]d", kind):
        multiplier = facts["out_channels"] // groups
        return replace(
            made, kind=f"DepthwiseConv{kind[4]}D", facts={"depth_multiplier": multiplier}
        )
    return made


def _warn_of_constants(model: LiveModel) -> None:
    other, usual = _DEFAULTS[model.framework]
    odd: dict[float, list[str]] = {}
    for path, kind, facts in model.layers:
        epsilon = facts.get("eps", facts.get("epsilon", usual))
        if "Norm" in kind and "RMS" not in kind and epsilon != usual:
            odd.setdefault(epsilon, []).append(path or model.name)
    for epsilon, paths in odd.items():
        warn(
            f"{', '.join(paths[:5])}{' and more' if len(paths) > 5 else ''}: epsilon is {epsilon:g} "
            f"here and {usual:g} in {other} unless it was chosen: equal weights may give unequal "
            "outputs (it is not among the weights)"
        )
