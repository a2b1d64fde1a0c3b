"""The whole-model `.h5` of Keras before 3, and its weights-only form: variables have names there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.hdf5 import Group
from ckptfmt.foreign.keras.naming import FULL_NAME, Keys
from ckptfmt.foreign.keras.optimizer import name_by_text
from ckptfmt.foreign.keras_layers import counted, without_number
from ckptfmt.foreign.mapping import corrupt
from ckptfmt.format import dtype_named, numpy_dtype

_MODEL, _OPTIMIZER = "model_weights", "optimizer_weights"
_TOP = "top_level_model_weights"
_NAMES, _LAYERS = "weight_names", "layer_names"
_PARTS_MAX, _DEPTH_MAX = 4096, 64
_STACKED = "stacked_rnn_cells"
_CELLS = frozenset({"lstm_cell", "gru_cell", "simple_rnn_cell", _STACKED})


def is_legacy(root: Group) -> bool:
    """Whether a file lists its layers."""
    inner = root.groups.get(_MODEL, root)
    return _listed(inner, _LAYERS) is not None


def _listed(group: Group, name: str) -> list[str] | None:
    """A list of names, which stands in several attributes where it is long."""
    found = group.attributes.get(name)
    if isinstance(found, list):
        return found
    made: list[str] = []
    for part in range(_PARTS_MAX):
        more = group.attributes.get(f"{name}{part}")
        if not isinstance(more, list):
            break
        made += more
    empty = found == "" or f"{name}0" in group.attributes
    return made if made or empty else None


def name_legacy(root: Group, where: str) -> dict[Keys, ForeignTensor]:
    """The variables of a model and of its optimizer, by their keys."""
    inner = root.groups.get(_MODEL, root)
    layers = _listed(inner, _LAYERS) or []
    found: dict[str, tuple[str, ForeignTensor]] = {}
    for layer in (*layers, *([_TOP] if _TOP in inner.groups else [])):
        group = inner.groups.get(layer)
        if group is None:
            raise corrupt(
                "keras", "a layer that is listed is not there", "layer", where, ascii(layer)[:80]
            )
        for name in _listed(group, _NAMES) or []:
            found[f"{layer}\n{name}"] = (layer, _at(group, name, where))
    keys = _keys(found, layers)
    made: dict[Keys, ForeignTensor] = {}
    variables: dict[str, Keys] = {}
    for text, (_, tensor) in found.items():
        full = text.partition("\n")[2].removesuffix(":0")
        variables[full] = keys[text]
        named = replace(tensor, attributes={**tensor.attributes, FULL_NAME: full})
        made["model", *keys[text]] = named
    optimizer = root.groups.get(_OPTIMIZER)
    if optimizer is not None:
        names = _listed(optimizer, _NAMES) or []
        for name, place in name_by_text(names, variables).items():
            made["optimizer", *place] = _at(optimizer, name, where)
    return made


def _at(group: Group, name: str, where: str) -> ForeignTensor:
    path, _, last = name.rpartition("/")
    inner = group.below(path) if path else group
    tensor = inner.tensors.get(last) if inner is not None else None
    if tensor is None:
        raise corrupt(
            "keras", "a variable that is listed is not there", "variable", where, ascii(name)[:80]
        )
    return _as_bfloat16(tensor) if tensor.dtype == "void16" else tensor


def _as_bfloat16(tensor: ForeignTensor) -> ForeignTensor:
    """Two opaque bytes are the one dtype of Keras that HDF5 has no name for; nothing says so here."""
    found = dtype_named("bfloat16")
    assert found is not None
    dtype, fetch, box = numpy_dtype(found), tensor.fetch, tensor.box
    return replace(
        tensor,
        dtype="bfloat16",
        fetch=lambda: fetch().view(dtype),
        box=None if box is None else lambda sides: box(sides).view(dtype),
    )


def _keys(found: dict[str, tuple[str, ForeignTensor]], layers: list[str]) -> dict[str, Keys]:
    """Text -> keys: the layer as the model calls it, then what its name says within the layer."""
    named = dict(zip(layers, counted(layers)))
    paths: dict[str, Keys] = {}
    for text, (layer, _) in found.items():
        parts = tuple(text.partition("\n")[2].removesuffix(":0").split("/"))
        if len(parts) > _DEPTH_MAX:
            raise corrupt("keras", "nested too deep", "depth", layer[:80], len(parts))
        if layer == _TOP:
            paths[text] = parts[-1:]
            continue
        # `sequential/dense/kernel`, `dense/kernel`, `dense/dense/kernel`: from the layer on.
        begin = parts.index(layer) + 1 if layer in parts[:-1] else 0
        rest = parts[begin:] if begin else parts[-1:]
        paths[text] = (layer, *rest)
    below: dict[Keys, dict[str, int]] = {}
    for path in paths.values():
        for length in range(1, len(path) - 1):
            order = below.setdefault(path[:length], {})
            order.setdefault(path[length], len(order))
    numbers = {prefix: dict(zip(order, counted(order))) for prefix, order in below.items()}
    return {text: _renamed(path, named, below, numbers) for text, path in paths.items()}


def _renamed(
    path: Keys,
    named: Mapping[str, str],
    below: Mapping[Keys, Mapping[str, int]],
    numbers: Mapping[Keys, Mapping[str, str]],
) -> Keys:
    """Layers of a model within the model are numbered anew as well; parts go by their attribute.

    Args:
        below: Path -> objects below it, with their positions.
        numbers: The same, with their names as layers.
    """
    first = path[0]
    if len(path) == 1 or first not in named:
        return path
    made: Keys = (named[first],)
    prefix: Keys = (first,)
    for part in path[1:-1]:
        parent = without_number(prefix[-1])
        if parent == _STACKED:
            made = (*made, "cells", str(below[prefix][part]))
        else:
            made = (*made, _part(part, parent) or numbers[prefix][part])
        prefix = (*prefix, part)
    return (*made, path[-1])


def _part(name: str, parent: str) -> str:
    """The attribute that holds an object of another one, by their names; "" for a layer."""
    if without_number(name) in _CELLS:
        return "cell"
    if parent == "bidirectional" and name.startswith(("forward_", "backward_")):
        return f"{name.partition('_')[0]}_layer"
    return "layer" if parent == "time_distributed" else ""
