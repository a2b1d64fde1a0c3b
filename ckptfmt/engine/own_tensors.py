"""The state of an object that takes it itself: a copy of the old one, and its own kind of tensors.


Spec: 04-dtypes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckptfmt.engine.adapter import StoredLeaf
from ckptfmt.engine.composites import Composites
from ckptfmt.engine.dispatch import ADAPTERS, adapter_of, load_adapter
from ckptfmt.engine.source import TreeSource
from ckptfmt.engine.tree import FRAMEWORK, flatten, unflatten, walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


def copy_state(state: Any) -> Any:
    """A deep copy of an object's state, also where it holds tensors that know no deep copy, such as
    those that an autograd graph leads to."""
    source = TreeSource(state)
    composites = Composites(source.container_attributes())
    memo: dict[int, Any] = {}
    for leaf, tensor in source.tensor_leaves():
        kept = tensor.keep
        if kept is None or isinstance(kept, np.ndarray) or composites.adapter_of(leaf.name):
            continue
        try:
            memo[id(kept)] = copy.deepcopy(kept)
        except Exception:
            memo[id(kept)] = maker_of(kept)(tensor.fetch().copy())
    if composites.makers:
        for visit in walk(state):
            if visit.kind == "composite":
                memo[id(visit.obj)] = adapter_of(visit.obj).copy(visit.obj)  # type: ignore[union-attr]
    return copy.deepcopy(state, memo)


def as_own_tensors(state: Any, current: Any, stored: Mapping[str, StoredLeaf]) -> Any:
    """Arrays of a loaded state as the tensors that the object had.

    Like those of its current state where it has one of that name; else of the framework that the
    leaf was saved from; else, where nothing was recorded, like the first one of the current state.
    """
    flat = flatten(current)
    makers: dict[str, Callable[[Array], Any]] = {}
    for name, kind, row in zip(flat.names, flat.kinds, flat.rows):
        if kind == 0 and flat.tensors[row].keep is not None:
            makers[name] = maker_of(flat.tensors[row].keep)
    recorded = {
        name: leaf for name, leaf in stored.items() if leaf.attributes.get(FRAMEWORK) in ADAPTERS
    }
    if not makers and not recorded:
        return state
    default = None if recorded else next(iter(makers.values()))
    new = flatten(state)
    leaves: list[Any] = []
    arrays: dict[int, Any] = {}
    source = TreeSource(state)
    composites = Composites(source.container_attributes())
    for leaf in source.leaves(None):
        if leaf.dtype:
            if leaf.tensor not in arrays:
                array = new.tensors[leaf.tensor].fetch()
                maker = makers.get(leaf.name, default)
                if composites.adapter_of(leaf.name) is not None:
                    maker = partial(composites.part, leaf.name, attributes=leaf.attributes)
                elif leaf.name in recorded and maker is default:
                    maker = _maker_of_framework(recorded[leaf.name])
                arrays[leaf.tensor] = array if maker is None else maker(array)
            leaves.append(arrays[leaf.tensor])
        else:
            leaves.append(leaf.value)
    return unflatten(new.names, leaves, source.containers(), makers=composites.makers)


def _maker_of_framework(leaf: StoredLeaf) -> Callable[[Array], Any]:
    adapter = load_adapter(str(leaf.attributes[FRAMEWORK]))
    return lambda array: adapter.tensor(array, leaf.attributes)


def maker_of(like: Any) -> Callable[[Array], Any]:
    """How to make a tensor of `like`'s framework from an array."""
    adapter = adapter_of(like)
    if adapter is not None:
        return lambda array: adapter.make(like, array)
    space = getattr(like, "__array_namespace__", None)
    if space is None or isinstance(like, np.ndarray):
        return lambda array: array
    # By the array API standard (JAX and others): a new array on the same device.
    return lambda array: space().asarray(array, device=like.device)
