"""Trees to save: names and shapes as models have them, values that do not compress."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Flat = dict[str, NDArray[np.float32]]


def many_tensors(count: int, nbytes: int = 1024) -> Flat:
    """`count` tensors of `nbytes` each, under names of the length that layers have."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((count, nbytes // 4), dtype=np.float32)
    return {f"layers.{i // 20}.block.{i % 20}.weight": values[i].copy() for i in range(count)}


def transformer(nbytes: int) -> Flat:
    """About `nbytes` of layers: an eighth of it one embedding, per layer four matrices and norms."""
    rng = np.random.default_rng(0)
    shapes = _shapes(nbytes)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def _shapes(nbytes: int, layers: int = 12) -> dict[str, tuple[int, ...]]:
    elements = nbytes // 4
    width = max(8, int((elements / (layers * 12 + 12)) ** 0.5) // 8 * 8)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (max(1, elements // 8 // width), width)}
    rest = elements - elements // 8
    inner = max(8, (rest // layers // width - 4 * width) // 2)
    for layer in range(layers):
        name = f"layers.{layer}"
        shapes |= {
            f"{name}.attention.qkv.weight": (3 * width, width),
            f"{name}.attention.out.weight": (width, width),
            f"{name}.mlp.up.weight": (inner, width),
            f"{name}.mlp.down.weight": (width, inner),
            f"{name}.norm.weight": (width,),
            f"{name}.norm.bias": (width,),
        }
    return shapes


def zeros(nbytes: int) -> Flat:
    """What `transformer` gives, of zeros that are in memory."""
    return {name: np.full(shape, 0, np.float32) for name, shape in _shapes(nbytes).items()}


def transformer_nbytes(nbytes: int) -> int:
    """How many bytes `transformer(nbytes)` has."""
    return sum(math.prod(shape) * 4 for shape in _shapes(nbytes).values())


def nbytes_of(tree: Flat) -> int:
    return sum(array.nbytes for array in tree.values())


def touch(loaded: Mapping[str, Any]) -> None:
    """Read a byte of every page: what a lazy map leaves to its first user belongs to the load."""
    for array in loaded.values():
        flat = np.asarray(array).reshape(-1).view(np.uint8)
        int(flat[::4096].sum())


def assert_same(loaded: object, saved: Flat) -> None:
    """A peer that loads something else is not measured."""
    assert isinstance(loaded, dict)
    assert set(loaded) == set(saved)
    assert all(np.array_equal(np.asarray(loaded[name]), saved[name]) for name in saved)
