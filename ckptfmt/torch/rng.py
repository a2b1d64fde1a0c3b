"""Random number generators: a live handle for the process's own, and `torch.Generator` objects.

A restore sets them last, after all code that might draw from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ckptfmt.engine import ORDER_RNG, Captured, Comparison, Staged, StoredLeaf
from ckptfmt.errors import MismatchError
from ckptfmt.format import join_name
from ckptfmt.torch.tensors import from_array


class RngState:
    """The generators of this process: read when it is saved, set when it is restored.

    Python's `random`, NumPy's legacy global generator, torch's CPU generator and, with `cuda`, that
    of each CUDA device.
    """

    def __init__(self, *, cuda: bool = True) -> None:
        self.cuda = cuda

    def __repr__(self) -> str:
        return f"rng_state(cuda={self.cuda})"


def rng_state(*, cuda: bool = True) -> RngState:
    """A live handle for the tree: reads the generators when saved, sets them when restored."""
    return RngState(cuda=cuda)


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what `load` returned for an `rng_state()`.

    Raises:
        MismatchError: It is not the state of such generators; nothing was set.
    """
    if not isinstance(state, Mapping):
        raise _refusal(type(state).__name__)
    unknown = sorted(map(str, set(state) - {"python", "numpy", "torch", "cuda"}))
    if unknown or not state:
        raise _refusal(f"unknown keys {', '.join(unknown)[:80]}" if unknown else "nothing in it")
    _checked(state)
    old = read_rng_state(cuda="cuda" in state)
    try:
        _set(state)
    except BaseException:
        _set(old)
        raise


def read_rng_state(*, cuda: bool) -> dict[str, Any]:
    """The state of all generators, as a tree."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
    }
    if cuda and torch.cuda.is_available():
        state["cuda"] = {
            str(i): torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())
        }
    return state


def keep_generators() -> Callable[[], None]:
    """torch's own generators as they are now: what is returned puts them back."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        state["cuda"] = {str(i): torch.cuda.get_rng_state(i) for i in range(count)}
    return lambda: _set(state)


def _numpy_state() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)  # legacy=False says so
    return {**state, "state": {**state["state"], "key": state["state"]["key"].copy()}}


def _set(state: Mapping[str, Any]) -> None:
    if "python" in state:
        random.setstate(_python_state(state["python"]))
    if "numpy" in state:
        np.random.set_state(_numpy_form(state["numpy"]))
    if "torch" in state:
        torch.set_rng_state(_byte_tensor(state["torch"]))
    for device, value in state.get("cuda", {}).items():
        torch.cuda.set_rng_state(_byte_tensor(value), int(device))


def _python_state(state: Any) -> Any:
    version, internal, gauss = state
    return (version, tuple(internal), gauss)


def _numpy_form(state: Any) -> Any:
    key = state["state"]["key"]
    if isinstance(key, torch.Tensor):
        key = key.cpu().numpy()
    return {**state, "state": {**state["state"], "key": key}}


def _byte_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = from_array(value.copy())
    return value.cpu()


def _checked(state: Mapping[str, Any]) -> None:
    """Refuse a state that a generator would refuse half-way."""
    try:
        if "python" in state:
            random.Random().setstate(_python_state(state["python"]))
        if "numpy" in state:
            np.random.RandomState().set_state(_numpy_form(state["numpy"]))
        if "torch" in state:
            torch.Generator(device="cpu").set_state(_byte_tensor(state["torch"]))
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise _refusal(f"{type(error).__name__}: {error}") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in state.get("cuda", {}):
        if not str(device).isdigit() or int(device) >= count:
            raise _refusal(f"CUDA device {device} of {count}")


def _refusal(found: str) -> MismatchError:
    return MismatchError(
        "not the state of these generators",
        reason="torch-rng",
        expected="what load returned for an rng_state()",
        found=found,
        do="restore the checkpoint that it came from again",
    )


def capture(rng: RngState) -> Captured:
    return Captured(read_rng_state(cuda=rng.cuda))


def capture_generator(generator: Any) -> Captured:
    return Captured({"state": generator.get_state()})


class RngTarget:
    """Sets the process's generators, after everything else."""

    order = ORDER_RNG

    def __init__(self, rng: RngState, name: str) -> None:
        self.name = name
        self._rng = rng
        self._asked: list[str] = []
        self._stored: Mapping[str, StoredLeaf] = {}
        self._undo: Callable[[], None] | None = None

    def compare(self, comparison: Comparison) -> None:
        self._stored = stored = comparison.stored(self.name)
        self._asked = []
        live = read_rng_state(cuda=self._rng.cuda)
        for part in ("python", "numpy"):
            name = join_name(self.name, part)
            if any(n == name or n.startswith(name + "/") for n in stored):
                comparison.subtree(name)
                self._asked.append(part)
            else:
                comparison.missing(name)
        tensors = {"torch": live["torch"]}
        tensors.update({f"cuda/{i}": value for i, value in live.get("cuda", {}).items()})
        for part, value in tensors.items():
            if comparison.tensor(join_name(self.name, part), "uint8", tuple(value.shape)):
                self._asked.append(part)

    def bind(self, staged: Staged) -> None:
        state: dict[str, Any] = {}
        for part in self._asked:
            name = join_name(self.name, part)
            if part in ("python", "numpy"):
                if name in staged:
                    state[part] = staged.subtree(name)
            elif name in staged:
                where = state if part == "torch" else state.setdefault("cuda", {})
                where[part.removeprefix("cuda/")] = staged[name]
        _checked(state)
        old = read_rng_state(cuda="cuda" in state)
        self._undo = lambda: _set(old)
        _set(state)

    def undo(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None


class GeneratorTarget:
    """A `torch.Generator`, set in place."""

    order = ORDER_RNG

    def __init__(self, generator: Any, name: str) -> None:
        self.name = name
        self._generator = generator
        self._old: Any = None

    @property
    def _state_name(self) -> str:
        return join_name(self.name, "state")

    def compare(self, comparison: Comparison) -> None:
        shape = tuple(self._generator.get_state().shape)
        comparison.tensor(self._state_name, "uint8", shape)

    def bind(self, staged: Staged) -> None:
        if self._state_name in staged:
            self._old = self._generator.get_state()
            self._generator.set_state(_byte_tensor(staged[self._state_name]))

    def undo(self) -> None:
        if self._old is not None and not torch.equal(self._generator.get_state(), self._old):
            self._generator.set_state(self._old)
        self._old = None
