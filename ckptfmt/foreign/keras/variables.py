"""What a layer's variables are called: the file numbers them, a class has them in an order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_KERNEL = ("kernel", "bias")
_CELL = ("kernel", "recurrent_kernel", "bias")
_SEPARABLE = ("depthwise_kernel", "pointwise_kernel", "bias")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv1d_transpose", "conv2d_transpose")
# The last ones may be missing: a layer without a bias.
_BY_CLASS: Mapping[str, tuple[str, ...]] = {
    "dense": _KERNEL,
    "einsum_dense": _KERNEL,
    **dict.fromkeys((*_CONVOLUTIONS, "conv3d_transpose"), _KERNEL),
    **dict.fromkeys(("depthwise_conv1d", "depthwise_conv2d"), _KERNEL),
    **dict.fromkeys(("separable_conv1d", "separable_conv2d"), _SEPARABLE),
    **dict.fromkeys(("simple_rnn_cell", "gru_cell", "lstm_cell"), _CELL),
    "embedding": ("embeddings",),
    "p_re_lu": ("alpha",),
    "rms_normalization": ("scale",),
    "seed_generator": ("state",),
}
# Options of the class decide which of these there are.
_GAMMA_BETA = (("gamma", "scale"), ("beta", "center"))
_BY_OPTIONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "batch_normalization": (*_GAMMA_BETA, ("moving_mean", ""), ("moving_variance", "")),
    "layer_normalization": _GAMMA_BETA,
    "group_normalization": _GAMMA_BETA,
    "normalization": (("mean", ""), ("variance", ""), ("count", "")),
}
_NOT_TRAINED = frozenset({"moving_mean", "moving_variance", "mean", "variance", "count", "state"})
CHILDREN: Mapping[str, Mapping[str, str]] = {
    "multi_head_attention": dict.fromkeys(
        ("query_dense", "key_dense", "value_dense", "output_dense"), "einsum_dense"
    ),
    "grouped_query_attention": dict.fromkeys(
        ("query_dense", "key_dense", "value_dense", "output_dense"), "einsum_dense"
    ),
    "lstm": {"cell": "lstm_cell"},
    "gru": {"cell": "gru_cell"},
    "simple_rnn": {"cell": "simple_rnn_cell"},
    "rnn": {"cell": ""},
    "stacked_rnn_cells": {"cells": ""},
    "bidirectional": {"forward_layer": "", "backward_layer": ""},
    "time_distributed": {"layer": ""},
}
"""Class -> its parts, in the order of their variables, and the class of each ("": it is told)."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a model's configuration says of one layer. `snake`: its class, as the file spells it."""

    snake: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


def variable_names(
    snake: str, shapes: Sequence[Sequence[int]], options: Mapping[str, Any] | None
) -> list[str] | None:
    """The names of a class's variables, or None where they are not known for certain.

    Args:
        snake: The class, "" if unknown.
        shapes: Of the variables there are, in order.
        options: Of the class; None if unknown.
    """
    count = len(shapes)
    if snake in _BY_OPTIONS:
        rows = _BY_OPTIONS[snake]
        if options is not None:
            rows = tuple(row for row in rows if not row[1] or options.get(row[1], True))
        names = [name for name, _ in rows]
        return names if len(names) == count else None
    known = _BY_CLASS.get(snake)
    if known is None and not snake and count == 2 and len(shapes[0]) > 1:
        # Whatever has a matrix and a vector of its columns calls them so.
        known = _KERNEL if list(shapes[1]) == list(shapes[0][-1:]) else None
    return list(known[:count]) if known is not None and count <= len(known) else None


def is_trained(name: str) -> bool:
    """Whether an optimizer has state for a variable of this name."""
    return name not in _NOT_TRAINED
