"""The one table of layers that Keras and PyTorch both have, and how the weights of one become those
of the other: transposed, gates in another order, biases split or joined.

A *group* is a layer's tensors by their name within it, as the framework calls them: `kernel`,
`bias`; `weight_ih_l0`. Both directions are exact moves of values, but that the two biases of a
PyTorch LSTM are added (Keras has one); Keras -> PyTorch -> Keras is the identity, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptfmt.errors import UnsupportedError, UsageError
from ckptfmt.foreign import lazy
from ckptfmt.foreign.base import ForeignTensor

Group: TypeAlias = "dict[str, ForeignTensor]"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: its path, its class in either framework, and what decides how its weights lie.

    `facts`: `num_heads`, `depth_multiplier`, `reset_after`, `epsilon`, `momentum`, where known.
    `moments`: its tensors are not the weights but what an optimizer keeps of their gradients.
    """

    path: str
    kind: str
    facts: Mapping[str, float] = field(default_factory=dict)
    moments: bool = False


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A row of the table: classes of both frameworks, and the two directions."""

    keras: tuple[str, ...]
    torch: tuple[str, ...]
    to_torch: Callable[[Group, Layer], Group]
    to_keras: Callable[[Group, Layer], Group]


def _reversed_kernel(kernel: ForeignTensor) -> ForeignTensor:
    """(space..., in, out) <-> (out, in, space...): Dense, Conv, and Conv...Transpose, where both
    have in and out the other way round."""
    rank = len(kernel.shape)
    return lazy.permuted(kernel, (rank - 1, rank - 2, *range(rank - 2)))


def _unreversed_kernel(weight: ForeignTensor) -> ForeignTensor:
    return lazy.permuted(weight, (*range(2, len(weight.shape)), 1, 0))


def _kernel_to_torch(group: Group, layer: Layer) -> Group:
    made = {"weight": _reversed_kernel(group["kernel"])}
    return made | ({"bias": group["bias"]} if "bias" in group else {})


def _kernel_to_keras(group: Group, layer: Layer) -> Group:
    made = {"kernel": _unreversed_kernel(group["weight"])}
    return made | ({"bias": group["bias"]} if "bias" in group else {})


def _depthwise_to_torch(group: Group, layer: Layer) -> Group:
    kernel = group["kernel" if "kernel" in group else "depthwise_kernel"]
    *space, channels, multiplier = kernel.shape
    rank = len(kernel.shape)
    turned = lazy.permuted(kernel, (rank - 2, rank - 1, *range(rank - 2)))
    made = {"weight": lazy.reshaped(turned, (channels * multiplier, 1, *space))}
    return made | ({"bias": group["bias"]} if "bias" in group else {})


def _depthwise_to_keras(group: Group, layer: Layer) -> Group:
    weight = group["weight"]
    count, one, *space = weight.shape
    multiplier = int(layer.facts.get("depth_multiplier", 1))
    if one != 1 or multiplier < 1 or count % multiplier:
        raise _does_not_fit(layer, weight, f"[{multiplier} * channels, 1, ...]")
    apart = lazy.reshaped(weight, (count // multiplier, multiplier, *space))
    rank = len(weight.shape)
    made = {"kernel": lazy.permuted(apart, (*range(2, rank), 0, 1))}
    return made | ({"bias": group["bias"]} if "bias" in group else {})


_Names = tuple[tuple[str, str], ...]


def _named(
    names: _Names,
) -> tuple[Callable[[Group, Layer], Group], Callable[[Group, Layer], Group]]:
    """Tensors that only change their names."""

    def to_torch(group: Group, layer: Layer) -> Group:
        return {torch: group[keras] for keras, torch in names if keras in group}

    def to_keras(group: Group, layer: Layer) -> Group:
        return {keras: group[torch] for keras, torch in names if torch in group}

    return to_torch, to_keras


_AFFINE = (("gamma", "weight"), ("beta", "bias"))
_STATISTICS = (("moving_mean", "running_mean"), ("moving_variance", "running_var"))


def _batch_norm_to_torch(group: Group, layer: Layer) -> Group:
    made = _named(_AFFINE + _STATISTICS)[0](group, layer)
    mean = made["running_mean"]
    if ("weight" in made) != ("bias" in made):
        # PyTorch has both or none.
        made.setdefault("weight", lazy.filled(mean, mean.shape, 1.0))
        made.setdefault("bias", lazy.filled(mean, mean.shape, 0.0))
    made["num_batches_tracked"] = lazy.filled(mean, (), 0, "int64")
    order = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return {name: made[name] for name in order if name in made}


def _gates(layer: Layer) -> tuple[int, ...]:
    """Order of the blocks of the gates; it is its own inverse. GRU: z, r, h <-> r, z, n."""
    return {"LSTM": (0, 1, 2, 3), "GRU": (1, 0, 2)}.get(layer.kind, (0,))


def _turned(tensor: ForeignTensor, layer: Layer, axis: int) -> ForeignTensor:
    order = _gates(layer)
    return tensor if order == tuple(sorted(order)) else lazy.blocks(tensor, axis, order)


def _rnn_to_torch(group: Group, layer: Layer) -> Group:
    """A recurrent layer; `backward/...` in the group is its second direction."""
    made: Group = {}
    for prefix, suffix in (("", "_l0"), ("backward/", "_l0_reverse")):
        if prefix + "kernel" not in group:
            continue
        kernel, recurrent = group[prefix + "kernel"], group[prefix + "recurrent_kernel"]
        made["weight_ih" + suffix] = _turned(lazy.permuted(kernel), layer, 0)
        made["weight_hh" + suffix] = _turned(lazy.permuted(recurrent), layer, 0)
        if prefix + "bias" in group:
            ih, hh = _split_bias(group[prefix + "bias"], layer)
            made["bias_ih" + suffix] = _turned(ih, layer, 0)
            made["bias_hh" + suffix] = _turned(hh, layer, 0)
    if layer.kind == "GRU" and layer.facts.get("reset_after") == 0:
        raise _reset_after(layer, "reset_after=False")
    return made


def _split_bias(bias: ForeignTensor, layer: Layer) -> tuple[ForeignTensor, ForeignTensor]:
    if layer.kind != "GRU":
        # The gradient of a sum is that of each part.
        return bias, bias if layer.moments else lazy.filled(bias, bias.shape, 0.0)
    if len(bias.shape) != 2 or bias.shape[0] != 2:
        raise _reset_after(layer, f"a bias of shape {list(bias.shape)}: reset_after=False")
    rows = lazy.split(bias, 0, None, 2)
    width = (bias.shape[1],)
    return lazy.reshaped(rows[0], width), lazy.reshaped(rows[1], width)


def _reset_after(layer: Layer, found: str) -> UnsupportedError:
    return UnsupportedError(
        "PyTorch has no GRU that applies its reset gate before the matrix product",
        reason="layer",
        where=repr(layer.path),
        found=found,
        expected="reset_after=True, Keras's default",
        do="convert the rest without it: layers={'that layer': 'keep'}",
    )


def _rnn_to_keras(group: Group, layer: Layer) -> Group:
    group["weight_ih_l0"]  # whose absence the caller tells
    if any(not re.fullmatch(r"(weight|bias)_(ih|hh)_l0(_reverse)?", name) for name in group):
        raise UnsupportedError(
            "Keras has no layer that stacks recurrent layers",
            reason="layer",
            where=repr(layer.path),
            found=", ".join(sorted(group)),
            expected="num_layers=1 and proj_size=0",
            do="rename weight_ih_l1 to a module of its own first: a rule "
            r"{rename = '(.*)\.(\w+)_l1$', to = '\1_1.\2_l0'}",
        )
    both_ways = "weight_ih_l0_reverse" in group
    made: Group = {}
    for suffix, wrapped in (("_l0", "forward_layer/"), ("_l0_reverse", "backward_layer/")):
        if "weight_ih" + suffix not in group:
            continue
        prefix = f"{wrapped}cell/" if both_ways else "cell/"
        ih, hh = group["weight_ih" + suffix], group["weight_hh" + suffix]
        made[prefix + "kernel"] = lazy.permuted(_turned(ih, layer, 0))
        made[prefix + "recurrent_kernel"] = lazy.permuted(_turned(hh, layer, 0))
        if "bias_ih" + suffix in group:
            biases = [_turned(group[f"bias_{x}h" + suffix], layer, 0) for x in "ih"]
            made[prefix + "bias"] = _join_bias(biases, layer)
    return made


def _join_bias(biases: list[ForeignTensor], layer: Layer) -> ForeignTensor:
    if layer.kind != "GRU":
        if layer.moments:  # equal where both are trained; one that is not has no name
            return next((bias for bias in biases if bias.foreign_name), biases[0])
        return lazy.added(*biases)
    return lazy.joined([lazy.reshaped(bias, (1, *bias.shape)) for bias in biases], 0)


def _attention_to_torch(group: Group, layer: Layer) -> Group:
    """(features, heads, width) kernels of query, key and value <-> one (3 * heads * width, features)."""
    weights, biases = [], []
    for part in ("query", "key", "value"):
        kernel = group[f"{part}/kernel"]
        features, heads, width = kernel.shape
        weights.append(lazy.permuted(lazy.reshaped(kernel, (features, heads * width))))
        if f"{part}/bias" in group:
            biases.append(lazy.reshaped(group[f"{part}/bias"], (heads * width,)))
    out = group["attention_output/kernel"]
    heads, width, features = out.shape
    embed = weights[0].shape[1]
    if any(w.shape[0] != embed for w in weights) or features != embed or heads * width != embed:
        raise _does_not_fit(
            layer, out, f"heads * width of query, key and value equal to the {embed} features"
        )
    made: Group = {}
    if all(weight.shape[1] == embed for weight in weights):
        made["in_proj_weight"] = lazy.joined(weights, 0)
    else:
        made |= {f"{x}_proj_weight": weight for x, weight in zip("qkv", weights)}
    if biases:
        made["in_proj_bias"] = lazy.joined(biases, 0)
    made["out_proj.weight"] = lazy.permuted(lazy.reshaped(out, (heads * width, features)))
    if "attention_output/bias" in group:
        made["out_proj.bias"] = group["attention_output/bias"]
    return made


def _attention_to_keras(group: Group, layer: Layer) -> Group:
    heads = int(layer.facts.get("num_heads", 0))
    if heads < 1:
        raise UsageError(
            "the weights of an attention do not say how many heads it has",
            reason="layer",
            where=repr(layer.path),
            do=f'layers={{"{layer.path}": "MultiheadAttention(num_heads=8)"}}',
        )
    if "bias_k" in group:
        raise UnsupportedError(
            "Keras's attention has no bias of keys and values that are added",
            reason="layer",
            where=repr(layer.path),
            found="bias_k, bias_v (add_bias_kv=True)",
        )
    out = group["out_proj.weight"]
    embed = out.shape[0]
    if embed % heads:
        raise _does_not_fit(layer, out, f"a number of features that {heads} heads divide")
    if "in_proj_weight" in group:
        weights = lazy.split(group["in_proj_weight"], 0, None, 3)
    else:
        weights = [group[f"{x}_proj_weight"] for x in "qkv"]
    width = embed // heads
    biases = lazy.split(group["in_proj_bias"], 0, None, 3) if "in_proj_bias" in group else []
    made: Group = {}
    for at, part in enumerate(("query", "key", "value")):
        turned = lazy.permuted(weights[at])
        made[f"{part}/kernel"] = lazy.reshaped(turned, (turned.shape[0], heads, width))
        if biases:
            made[f"{part}/bias"] = lazy.reshaped(biases[at], (heads, width))
    made["attention_output/kernel"] = lazy.reshaped(lazy.permuted(out), (heads, width, embed))
    if "out_proj.bias" in group:
        made["attention_output/bias"] = group["out_proj.bias"]
    return made


def _does_not_fit(layer: Layer, tensor: ForeignTensor, expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"a {layer.kind} has no equal in the other framework",
        reason="layer",
        where=repr(layer.path),
        expected=expected,
        found=f"{tensor.dtype} {list(tensor.shape)}",
    )


def _each(name: str, ranks: str = "123", suffix: str = "") -> tuple[str, ...]:
    return tuple(f"{name}{rank}{suffix}" for rank in ranks)


_TABLE = (
    LayerRow(("Dense",), ("Linear",), _kernel_to_torch, _kernel_to_keras),
    LayerRow(
        _each("Conv", suffix="D") + _each("Conv", suffix="DTranspose"),
        _each("Conv", suffix="d") + _each("ConvTranspose", suffix="d"),
        _kernel_to_torch,
        _kernel_to_keras,
    ),
    LayerRow(_each("DepthwiseConv", "12", "D"), (), _depthwise_to_torch, _depthwise_to_keras),
    LayerRow(("Embedding",), ("Embedding",), *_named((("embeddings", "weight"),))),
    LayerRow(
        ("BatchNormalization",),
        (*_each("BatchNorm", suffix="d"), "SyncBatchNorm"),
        _batch_norm_to_torch,
        _named(_AFFINE + _STATISTICS)[1],
    ),
    LayerRow(
        ("LayerNormalization", "GroupNormalization"), ("LayerNorm", "GroupNorm"), *_named(_AFFINE)
    ),
    LayerRow(("RMSNormalization",), ("RMSNorm",), *_named((("scale", "weight"),))),
    LayerRow(("LSTM",), ("LSTM",), _rnn_to_torch, _rnn_to_keras),
    LayerRow(("GRU",), ("GRU",), _rnn_to_torch, _rnn_to_keras),
    LayerRow(("SimpleRNN",), ("RNN",), _rnn_to_torch, _rnn_to_keras),
    LayerRow(
        ("MultiHeadAttention",),
        ("MultiheadAttention",),
        _attention_to_torch,
        _attention_to_keras,
    ),
)

LAYERS: dict[str, LayerRow] = {kind: row for row in _TABLE for kind in (*row.keras, *row.torch)}
"""Class of either framework -> the row that carries it over."""
