"""Generators of NumPy and of Python's `random`: their state as plain data, and back in place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from ckptfmt.errors import UsageError

_PYTHON_KIND = "random.Random"


def is_generator(obj: object) -> bool:
    """True for the generators that this module knows."""
    if isinstance(obj, random.Random):
        return type(obj) is not random.SystemRandom
    return isinstance(obj, np.random.Generator | np.random.RandomState | np.random.BitGenerator)


def keep_own_generators() -> Callable[[], None]:
    """The generators of this process, Python's and NumPy's, as they are now: what is returned puts
    them back."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return put_back


def generator_state(obj: Any) -> dict[str, Any]:
    """A generator's state: a dict of plain values and arrays, which `set_generator_state` takes."""
    if isinstance(obj, random.Random):
        version, words, gauss = obj.getstate()
        return {"kind": _PYTHON_KIND, "version": version, "words": list(words), "gauss": gauss}
    if isinstance(obj, np.random.RandomState):
        return dict(obj.get_state(legacy=False))
    source = obj.bit_generator if isinstance(obj, np.random.Generator) else obj
    return dict(source.state)


def generator_kind(obj: Any) -> str:
    """Which generator it is: states fit only generators of the same kind."""
    if isinstance(obj, random.Random):
        return _PYTHON_KIND
    if isinstance(obj, np.random.RandomState):
        return _legacy(obj.get_state(legacy=False)["bit_generator"])
    source = obj.bit_generator if isinstance(obj, np.random.Generator) else obj
    return type(source).__name__


def state_kind(state: object) -> str:
    """Which generator a stored state is of; "" if it is none."""
    if not isinstance(state, dict):
        return ""
    if "has_gauss" in state:
        return _legacy(state.get("bit_generator"))
    return str(state.get("kind") or state.get("bit_generator") or "")


def _legacy(bit_generator: object) -> str:
    # A RandomState holds back every second normal number: its state says more than that of a
    # Generator over the same bits, and neither goes on from the other's.
    return f"RandomState({bit_generator})"


def set_generator_state(obj: Any, state: Any, name: str = "") -> None:
    """Put a state into a generator of the same kind. It raises before it changes anything.

    Raises:
        UsageError: The state is of another kind of generator, or not a state.
    """
    expected = generator_kind(obj)
    if state_kind(state) != expected:
        raise UsageError(
            "the stored state is of another generator",
            reason="generator",
            where=name,
            expected=expected,
            found=state_kind(state) or type(state).__name__,
            do=f"make the generator a {expected}'s kind, or leave it out",
        )
    try:
        if isinstance(obj, random.Random):
            obj.setstate((state["version"], tuple(state["words"]), state["gauss"]))
        elif isinstance(obj, np.random.RandomState):
            obj.set_state(state)
        else:
            source = obj.bit_generator if isinstance(obj, np.random.Generator) else obj
            source.state = state
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise UsageError(
            "the generator refuses the stored state",
            reason="generator",
            where=name,
            found=f"{type(error).__name__}: {error}"[:200],
        ) from error
