"""The presets `keras-to-torch` and `torch-to-keras`: layers are found by the names of their weights,
and carried over by the table in `layers`.

Where names and shapes leave two answers, the caller is asked (`layers=`): nothing is guessed that a
restore would not notice.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptfmt.errors import UsageError
from ckptfmt.foreign.base import like
from ckptfmt.foreign.layers import LAYERS, Group, Layer
from ckptfmt.foreign.lazy import attributes_without
from ckptfmt.foreign.rules import Leaf, Leaves, Pattern, Rule, Table, shown
from ckptfmt.format import escape_key, join_name, parse_key, split_name

_NOTED = {"keras": "tf.", "torch": "torch."}

KEEP = "keep"
"""In place of a kind: the layer's tensors stay as they are."""

_COUNTER = "num_batches_tracked"
"""Of PyTorch's batch normalization; Keras counts none."""
_KIND = re.compile(r"(\w+)(?:\(([^()]*)\))?")
_RNN = {4: "LSTM", 3: "GRU", 1: "SimpleRNN"}
_PARTS = ("query", "key", "value", "attention_output")
_KERAS_WEIGHTS = frozenset(
    [
        "kernel",
        "depthwise_kernel",
        "recurrent_kernel",
        "bias",
        "embeddings",
        "gamma",
        "beta",
        "moving_mean",
        "moving_variance",
        "scale",
    ]
)
_TORCH_WEIGHTS = re.compile(
    r"weight|bias|running_mean|running_var|num_batches_tracked|(weight|bias)_(ih|hh|hr)_l\d+(_reverse)?"
    r"|in_proj_(weight|bias)|[qkv]_proj_weight|bias_[kv]|out_proj\.(weight|bias)"
)


@dataclass(slots=True)
class Layers:
    """What is known of layers beside their weights: `given` by the caller (pattern, kind), and
    by path (`known`), which goes first."""

    given: Sequence[tuple[Pattern, str]] = ()
    known: Mapping[str, Layer] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.given or self.known)

    def find(self, path: str) -> Layer | None:
        if path in self.known:
            return self.known[path]
        for pattern, text in self.given:
            if pattern.matches(path):
                return parse_layer(path, text)
        return None


def parse_layer(path: str, text: str) -> Layer:
    """A layer from `MultiheadAttention(num_heads=8)`."""
    found = _KIND.fullmatch(text.strip())
    facts: dict[str, float] = {}
    if found is not None and (found[1] in LAYERS or found[1] == KEEP):
        try:
            for item in filter(None, map(str.strip, (found[2] or "").split(","))):
                key, _, number = item.partition("=")
                facts[key.strip()] = float({"True": 1, "False": 0}.get(number.strip(), number))
            return Layer(path, found[1], facts)
        except ValueError:
            pass
    raise UsageError(
        "not a kind of layer",
        reason="rule-layer",
        where=repr(path),
        expected=f"{KEEP}, or one of {', '.join(LAYERS)}; with numbers, like "
        "MultiheadAttention(num_heads=8)",
        found=repr(text),
    )


@dataclass(slots=True)
class _Found:
    """A layer that was found: its leaves by their name within it."""

    path: str
    leaves: dict[str, tuple[str, Leaf]]

    def group(self) -> Group:
        made = {}
        for inner, (name, leaf) in self.leaves.items():
            assert leaf.tensor is not None
            made[inner] = like(leaf.tensor, name=name)
        return made


class LayerRule(Rule):
    """Layers of one framework as the other has them.

    Args:
        root: The container that becomes, or was, a state dict: paths below it are one key, and
            nothing else is looked at. None: the first key that all layers share.
    """

    preset = ""
    source = ""
    other, epsilon = "", ""
    usual = (0.0, 0.0)
    """Epsilon and momentum of the source's normalization layers, unless they are chosen."""

    def __init__(self, layers: Layers, root: str | None) -> None:
        self.layers, self.root = layers, root
        self.text = f"preset {self.preset}"

    def patterns(self) -> Iterator[str]:
        yield "kernel" if self.source == "keras" else "weight"

    def apply(self, leaves: Leaves) -> Table:
        return self.carried(leaves)[0]

    def carried(self, leaves: Leaves, *, moments: bool = False) -> tuple[Table, str]:
        """The table after it, and the container that is, or was, a state dict. `moments`: the
        leaves are what an optimizer keeps of the weights of these names."""
        table = Table(self.text)
        part = f"{self.root}/" if self.root else ""
        mine = {name: leaf for name, leaf in leaves.items() if name.startswith(part)}
        found = {layer.path: layer for layer in self._find(mine)}
        kinds = self._kinds(found)
        owner = {name: path for path in kinds for name, _ in found[path].leaves.values()}
        root = self.root if self.root is not None else _common_root(list(kinds))
        done: set[str] = set()
        for name, leaf in leaves.items():
            path = owner.get(name)
            if path is None:
                table.keep(name, leaf)
            elif path not in done:
                done.add(path)
                self._carry(table, found[path], replace(kinds[path], moments=moments), root)
        table.notes += self._notes(list(kinds.values()))
        return table, root

    def _kinds(self, found: Mapping[str, _Found]) -> dict[str, Layer]:
        """The layers to carry over. Raises for all at once whose kind is not certain."""
        made, unclear = {}, {}
        for path, layer in found.items():
            known = self.layers.find(path)
            if known is None:
                kind = self._kind(layer)
                if "?" in kind:
                    unclear[path] = kind
                    continue
                known = Layer(path, kind)
            if known.kind != KEEP and known.kind:
                made[path] = known
        if unclear:
            shown_ = [f"{path}: {kind}" for path, kind in list(unclear.items())[:10]]
            first, kind = next(iter(unclear.items()))
            raise UsageError(
                f"{len(unclear)} layers may be of two kinds",
                reason="rule-layer",
                where=self.text,
                found="; ".join(shown_) + (" and more" if len(unclear) > 10 else ""),
                do=f'say which: layers={{"^{re.escape(first)}$": "{kind.split(" or ")[0]}"}} '
                f"(--layer '^{re.escape(first)}$={kind.split(' or ')[0]}')",
            )
        return made

    def _carry(self, table: Table, found: _Found, layer: Layer, root: str) -> None:
        row, group = LAYERS[layer.kind], found.group()
        try:
            made = (row.to_torch if self.source == "keras" else row.to_keras)(group, layer)
        except KeyError as error:
            raise UsageError(
                "a layer lacks a weight that its kind has",
                reason="rule-layer",
                where=repr(found.path),
                expected=f"{layer.kind}: {error.args[0]}",
                found=", ".join(found.leaves),
                do=f'say what it is, or layers={{"{found.path}": "{KEEP}"}}',
            ) from None
        as_they_are = set(map(id, group.values()))
        after = {}
        for inner, tensor in made.items():
            steps = () if id(tensor) in as_they_are else (f"{layer.kind} -> {shown(tensor)}",)
            clean = attributes_without(tensor, _NOTED[self.source])
            leaf = Leaf((tensor.foreign_name,), clean, None, steps)
            after[self._name(found.path, inner, root)] = leaf
        before = dict(found.leaves.values())
        counter = found.leaves.get(_COUNTER)
        if counter is not None and self.source == "torch":
            table.change({counter[0]: before.pop(counter[0])}, {}, layer.kind)
        table.change(before, after, layer.kind)

    @abstractmethod
    def _find(self, leaves: Leaves) -> list[_Found]: ...

    @abstractmethod
    def _kind(self, found: _Found) -> str:
        """A class of the table; "" for none; "A or B?" where only the caller can tell."""

    @abstractmethod
    def _name(self, path: str, inner: str, root: str) -> str: ...

    def _notes(self, layers: list[Layer]) -> list[str]:
        """Normalization layers by class and constants, known or by default, and how to build theirs."""
        epsilon, momentum = self.usual
        found: dict[tuple[str, float, float], list[str]] = {}
        for layer in layers:
            if "Norm" in layer.kind and "RMS" not in layer.kind:
                facts = layer.facts
                key = (layer.kind, facts.get("epsilon", epsilon), facts.get("momentum", momentum))
                found.setdefault(key, []).append(layer.path or "the model")
        made = []
        for (kind, epsilon, momentum), paths in found.items():
            text = f"{kind}: build {self.other} with {self.epsilon}={epsilon:g}"
            if kind.startswith(("Batch", "Sync")):
                text += f", momentum={1 - momentum:.6g}"
            more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
            made.append(f"{text}: {', '.join(paths[:5])}{more}")
        return made


class KerasToTorch(LayerRule):
    """Layers of Keras under the names, and in the layouts, of PyTorch's."""

    preset, source = "keras-to-torch", "keras"
    other, epsilon, usual = "PyTorch's", "eps", (1e-3, 0.99)

    def _find(self, leaves: Leaves) -> list[_Found]:
        by_path: dict[str, dict[str, tuple[str, Leaf]]] = {}
        for name, leaf in leaves.items():
            path, _, inner = name.rpartition("/")
            if leaf.tensor is not None and inner in _KERAS_WEIGHTS:
                by_path.setdefault(path, {})[inner] = (name, leaf)
        _lift_cells(by_path)
        _join_directions(by_path)
        _join_attention(by_path)
        return [_Found(path, rows) for path, rows in by_path.items()]

    def _kind(self, found: _Found) -> str:
        group = found.group()
        names = set(group) - {"bias"}
        if "recurrent_kernel" in names:
            units, width = group["recurrent_kernel"].shape
            return _RNN.get(width // max(units, 1), "")
        if "query/kernel" in names:
            return "MultiHeadAttention"
        if "embeddings" in names:
            return "Embedding"
        if {"moving_mean", "moving_variance"} <= names:
            return "BatchNormalization"
        if names == {"kernel"}:
            return _kernel_kind(found.path, group)
        if names and names <= {"gamma", "beta"}:
            return "LayerNormalization"
        return "RMSNormalization" if names == {"scale"} else ""

    def _name(self, path: str, inner: str, root: str) -> str:
        below = split_name(path)[len(split_name(root)) if root else 0 :] if path else []
        key = ".".join([*(str(parse_key(part)) for part in below), inner])
        return join_name(root, escape_key(key))


class TorchToKeras(LayerRule):
    """Modules of PyTorch under the names, and in the layouts, of Keras's layers."""

    preset, source = "torch-to-keras", "torch"
    other, epsilon, usual = "Keras's", "epsilon", (1e-5, 0.1)

    def _find(self, leaves: Leaves) -> list[_Found]:
        by_path: dict[str, dict[str, tuple[str, Leaf]]] = {}
        for name, leaf in leaves.items():
            above, _, last = name.rpartition("/")
            key = parse_key(last) if last else None
            if leaf.tensor is None or not isinstance(key, str):
                continue
            module, _, inner = key.rpartition(".")
            if _TORCH_WEIGHTS.fullmatch(inner):
                path = above
                for part in filter(None, module.split(".")):
                    path = join_name(path, escape_key(part))
                by_path.setdefault(path, {})[inner] = (name, leaf)
        for path in list(by_path):
            above = path.removesuffix("/out_proj")
            joint = by_path.get(above, {})
            if above != path and ("in_proj_weight" in joint or "q_proj_weight" in joint):
                joint |= {f"out_proj.{inner}": row for inner, row in by_path.pop(path).items()}
        return [_Found(path, rows) for path, rows in by_path.items()]

    def _kind(self, found: _Found) -> str:
        group = found.group()
        if "weight_hh_l0" in group:
            width, units = group["weight_hh_l0"].shape
            kind = _RNN.get(width // max(units, 1), "")
            return "RNN" if kind == "SimpleRNN" else kind
        if "in_proj_weight" in group or "q_proj_weight" in group:
            return "MultiheadAttention"
        if "running_mean" in group:
            return "BatchNorm1d"
        if "weight" not in group or not group.keys() <= {"weight", "bias"}:
            return ""
        rank, alone = len(group["weight"].shape), "bias" not in group
        if rank == 1:
            return "LayerNorm or RMSNorm?" if alone else "LayerNorm"
        if rank == 2:
            named = "emb" in found.path.rpartition("/")[2].lower()
            return "Linear" if not alone else "Embedding" if named else "Linear or Embedding?"
        return f"Conv{rank - 2}d" if rank <= 5 else ""

    def _name(self, path: str, inner: str, root: str) -> str:
        for part in inner.split("/"):
            path = join_name(path, part)
        return path


def _lift_cells(by_path: dict[str, dict[str, tuple[str, Leaf]]]) -> None:
    """The weights of `lstm/cell`, `lstm/lstm_cell` are those of `lstm`."""
    for path in list(by_path):
        above, slash, last = path.rpartition("/")
        if slash and "recurrent_kernel" in by_path[path] and re.fullmatch(r"(\w+_)?cell", last):
            by_path[above] = by_path.pop(path)


def _join_directions(by_path: dict[str, dict[str, tuple[str, Leaf]]]) -> None:
    """A layer that wraps a forward and a backward one is one module of PyTorch."""
    for path in list(by_path):
        above, slash, last = path.rpartition("/")
        if not last.startswith("forward_"):
            continue
        other = f"{above}{slash}backward_{last.removeprefix('forward_')}"
        if "recurrent_kernel" in by_path[path] and "recurrent_kernel" in by_path.get(other, {}):
            backward = by_path.pop(other)
            joint = by_path.pop(path) | {f"backward/{key}": row for key, row in backward.items()}
            by_path[above] = joint


def _join_attention(by_path: dict[str, dict[str, tuple[str, Leaf]]]) -> None:
    """Kernels (features, heads, width) of query, key, value and output are one attention."""
    for path in list(by_path):
        above, slash, last = path.rpartition("/")
        if last != "query":
            continue
        paths = {part: f"{above}{slash}{part}" for part in _PARTS}
        rows = {part: by_path.get(at, {}) for part, at in paths.items()}
        tensors = [row["kernel"][1].tensor for row in rows.values() if "kernel" in row]
        if len(tensors) == len(_PARTS) and all(t and len(t.shape) == 3 for t in tensors):
            by_path[above] = {
                f"{part}/{inner}": row for part in _PARTS for inner, row in rows[part].items()
            }
            for at in paths.values():
                del by_path[at]


def _kernel_kind(path: str, group: Group) -> str:
    """Dense or a convolution. A depthwise kernel (space, in, multiplier) tells by its bias, or not."""
    shape = group["kernel"].shape
    rank, last = len(shape), path.rpartition("/")[2].lower()
    if rank == 2:
        return "Dense"
    if not 3 <= rank <= 5:
        return ""
    if "depthwise" in last and rank <= 4:
        return f"DepthwiseConv{rank - 2}D"
    bias = group.get("bias")
    if bias is not None and len(bias.shape) != 1:
        return ""  # of an EinsumDense
    if "transpose" in last or bias is None or bias.shape[0] == shape[-1]:
        return f"Conv{rank - 2}D"
    transposed = bias.shape[0] == shape[-2]
    depthwise = bias.shape[0] == shape[-1] * shape[-2] and rank <= 4
    if transposed and depthwise:
        return f"DepthwiseConv{rank - 2}D or Conv{rank - 2}DTranspose?"
    if transposed:
        return f"Conv{rank - 2}DTranspose"
    return f"DepthwiseConv{rank - 2}D" if depthwise else ""


def _common_root(paths: list[str]) -> str:
    """The first key of all paths, if it is the same one and no layer itself: the model's name."""
    firsts = {path.partition("/")[0] for path in paths}
    return firsts.pop() if len(firsts) == 1 and all("/" in path for path in paths) else ""
