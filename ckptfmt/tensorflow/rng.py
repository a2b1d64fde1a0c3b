"""Random number generators of the process: a live handle for the tree.

A restore sets them last, after all code that might draw from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator
from tensorflow.python.ops import stateful_random_ops as _tf_generators

from ckptfmt.engine import ORDER_RNG, Captured, Comparison, Staged
from ckptfmt.errors import MismatchError
from ckptfmt.format import join_name
from ckptfmt.tensorflow.tensors import dtype_name, make_tensor, raw_variable, read

_PLAIN = ("python", "numpy")


class RngState:
    """The generators of this process: read when it is saved, set when it is restored.

    Python's `random` and NumPy's legacy global generator, which Keras draws seeds from; the global
    `tf.random.Generator`; the seed generator that Keras falls back on. The counters that TensorFlow
    keeps within stateful operations (`tf.random.uniform`) cannot be read and are not part of it.

    Keras and TensorFlow make theirs when they are first used; a handle makes them, so that neither a
    save nor a restore draws a number; nor does it itself.
    """

    def __init__(self) -> None:
        _variables()

    def __repr__(self) -> str:
        return "rng_state()"


def rng_state() -> RngState:
    """A live handle for the tree: reads the generators when saved, sets them when restored."""
    return RngState()


# What Keras and TensorFlow have made is looked up where they keep it: their public functions would
# make it. Only one that is there needs to be put back after a restore that failed.
def _variables() -> dict[str, tf.Variable]:
    """The generators that are variables; both exist from here on."""
    made = {"keras": raw_variable(_seed_generator().state, "")}
    try:
        made["generator"] = tf.random.get_global_generator().state
    except RuntimeError:
        pass  # op determinism is enabled, and nobody has set one: there is none
    return made


def _seed_generator() -> Any:
    """Keras's, which draws its seed from Python's `random` when it is made: a run with a handle goes on
    with the numbers of one without."""
    made = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if made is not None:
        return made
    before = random.getstate()
    made = global_seed_generator()
    random.setstate(before)
    return made


def read_rng_state() -> dict[str, Any]:
    """The state of all generators, as a tree of plain values and variables."""
    return {**_variables(), **plain_generators()}


def plain_generators() -> dict[str, Any]:
    """The state of Python's and NumPy's generators."""
    numpy: Any = np.random.get_state(legacy=False)
    numpy = {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].copy()}}
    return {"python": random.getstate(), "numpy": numpy}


def keep_generators() -> Callable[[], None]:
    """Keras's and TensorFlow's own generators as they are now: what is returned puts them back."""
    made = [
        global_state.get_global_attribute(GLOBAL_SEED_GENERATOR),
        _tf_generators.global_generator,
    ]
    states = [raw_variable(one.state, "") for one in made if one is not None]
    old = [(state, read(state)) for state in states]

    def put_back() -> None:
        for variable, value in old:
            variable.assign(value)

    return put_back


def capture(rng: RngState) -> Captured:
    return Captured(read_rng_state())


class RngTarget:
    """Sets the process's generators, after everything else."""

    order = ORDER_RNG

    def __init__(self, rng: RngState, name: str) -> None:
        self.name = name
        self._asked: list[str] = []
        self._undo: Callable[[], None] | None = None

    def compare(self, comparison: Comparison) -> None:
        self._asked = []
        stored = comparison.stored(self.name)
        for part in _PLAIN:
            name = join_name(self.name, part)
            if any(one == name or one.startswith(name + "/") for one in stored):
                comparison.subtree(name)
                self._asked.append(part)
            else:
                comparison.missing(name)
        for part, variable in _variables().items():
            name = join_name(self.name, part)
            if comparison.tensor(name, dtype_name(variable.dtype, name), tuple(variable.shape)):
                self._asked.append(part)

    def bind(self, staged: Staged) -> None:
        plain: dict[str, Any] = {}
        values: dict[str, tf.Tensor] = {}
        for part in self._asked:
            name = join_name(self.name, part)
            if name in staged and part in _PLAIN:
                plain[part] = staged.subtree(name)
            elif name in staged:
                values[part] = make_tensor(staged[name], name)
        set_plain = plain_setter(plain, self.name)
        old_plain = {part: value for part, value in plain_generators().items() if part in plain}
        variables = _variables()
        old = [(variables[part], read(variables[part])) for part in values]
        self._undo = lambda: _put_back(old, old_plain, self.name)
        for part, value in values.items():
            variables[part].assign(value)
        set_plain()

    def undo(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None


def _put_back(
    variables: list[tuple[tf.Variable, tf.Tensor]], plain: Mapping[str, Any], name: str
) -> None:
    for variable, value in variables:
        variable.assign(value)
    plain_setter(plain, name)()


def plain_setter(state: Mapping[str, Any], name: str) -> Callable[[], None]:
    """What sets Python's and NumPy's generators; a state that they would refuse is refused here."""
    python, numpy = random.Random(), np.random.RandomState()
    try:
        if "python" in state:
            version, words, gauss = state["python"]
            python.setstate((version, tuple(words), gauss))
        if "numpy" in state:
            numpy.set_state(state["numpy"])
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise MismatchError(
            "not the state of these generators",
            reason="rng",
            where=name,
            expected="what an rng_state() was saved as",
            found=f"{type(error).__name__}: {error}"[:200],
            do="leave it out with names=",
        ) from error

    def set_them() -> None:
        if "python" in state:
            random.setstate(python.getstate())
        if "numpy" in state:
            np.random.set_state(numpy.get_state(legacy=False))

    return set_them
