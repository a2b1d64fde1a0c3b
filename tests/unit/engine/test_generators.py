"""Generators of NumPy and of Python: captured as plain data, set in place."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptfmt.engine.rng import generator_kind, generator_state, set_generator_state
from ckptfmt.engine.tree import EXTEND, flatten, unflatten
from ckptfmt.errors import UsageError
from ckptfmt.format import parse_value

MAKE: dict[str, Callable[[int], Any]] = {
    "PCG64": np.random.default_rng,
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "SFC64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "PCG64DXSM": lambda seed: np.random.Generator(np.random.PCG64DXSM(seed)),
    "RandomState": np.random.RandomState,
    "BitGenerator": lambda seed: np.random.PCG64(seed),
    "random.Random": random.Random,
}


def draw(generator: Any) -> list[Any]:
    if isinstance(generator, np.random.BitGenerator):
        return [int(generator.random_raw()) for _ in range(5)]
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1), generator.getrandbits(70)]
    return [generator.normal(), generator.normal(), *generator.permutation(10).tolist()]


def through_a_tree(state: Any) -> Any:
    flat = flatten(state)
    arrays = [source.fetch() for source in flat.tensors]
    leaves = [
        (
            arrays[row]
            if kind == 0
            else parse_value(flat.values[row] if kind == 1 else arrays[row].tobytes(), EXTEND)
        )
        for kind, row in zip(flat.kinds, flat.rows)
    ]
    return unflatten(flat.names, leaves, {n: (k, a) for n, k, a in flat.containers})


@pytest.mark.parametrize("kind", MAKE)
def test_a_generator_goes_on_where_it_was(kind: str) -> None:
    generator = MAKE[kind](1)
    draw(generator)
    stored = copy.deepcopy(through_a_tree({"g": generator})["g"])
    expected = draw(generator)
    other = MAKE[kind](2)
    set_generator_state(other, stored)
    assert draw(other) == expected
    set_generator_state(generator, stored)
    assert draw(generator) == expected


@pytest.mark.parametrize("kind", MAKE)
def test_a_state_of_another_kind_is_refused_before_anything_changes(kind: str) -> None:
    generator, twin = MAKE[kind](1), MAKE[kind](1)
    other = "PCG64" if generator_kind(generator) != "PCG64" else "Philox"
    for state in (generator_state(MAKE[other](3)), {}, None, [1]):
        with pytest.raises(UsageError) as caught:
            set_generator_state(generator, state, "rng/g")
        assert caught.value.where == "rng/g"
    assert draw(generator) == draw(twin)


def test_the_systems_generator_has_no_state() -> None:
    with pytest.raises(UsageError):
        flatten({"g": random.SystemRandom()})
