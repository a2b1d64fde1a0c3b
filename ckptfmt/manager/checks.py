"""Ready-made validators, for `Manager(validate=[...])`: each looks at what a restore has staged, before
any target changes, and rejects a checkpoint by raising.

    checks.all_finite("model")       no NaN and no infinity among the weights
    checks.step_is("step")           the state says that it is of the checkpoint's step
    checks.optimizer_has_stepped()   the optimizer's own counters are above zero
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptfmt.engine import Matcher
from ckptfmt.errors import CorruptError
from ckptfmt.manager.healing import Validator
from ckptfmt.types import CheckpointInfo, Select


def all_finite(select: Select = "**") -> Validator:
    """Every floating or complex tensor among those selected is finite.

    Plain values are left out: a best loss may well begin as infinity.

    Args:
        select: Which leaves, by name.
    """
    matches = Matcher(select)

    def check(arrays: Mapping[str, Any], info: CheckpointInfo) -> None:
        for name, value in _tensors(arrays, matches).items():
            if value.dtype.kind in "biu":
                continue
            try:
                bad = value.size - np.count_nonzero(np.isfinite(value))
            except TypeError:
                continue  # no numbers: text, bytes, what only its own framework knows
            if bad:
                raise _rejected(info, name, "finite numbers", f"{bad:,} of {value.size:,} are not")

    return check


def step_is(name: str = "step") -> Validator:
    """The leaf of this name is the checkpoint's step: the state goes on where the name says.

    Args:
        name: Of a plain value, or of a tensor with one element.
    """

    def check(arrays: Mapping[str, Any], info: CheckpointInfo) -> None:
        found = arrays.get(name)
        if found is None or np.size(found) != 1 or int(np.asarray(found).item()) != info.step:
            seen = "no such leaf" if found is None else str(found)[:40]
            raise _rejected(info, name, f"step {info.step}", seen)

    return check


def optimizer_has_stepped(select: Select = ("**/step", "**/iterations")) -> Validator:
    """Every counter of the optimizer is above zero, and there is one: what was saved was trained.

    Args:
        select: Which leaves count steps: those of PyTorch and of Keras.
    """
    matches = Matcher(select)

    def check(arrays: Mapping[str, Any], info: CheckpointInfo) -> None:
        found = {name: value for name, value in arrays.items() if matches(name)}
        for name, value in found.items():
            if not np.all(np.asarray(value) > 0):
                raise _rejected(info, name, "a count above 0", str(value)[:40])
        if not found:
            raise _rejected(info, str(select), "a counter of steps", "none")

    return check


def _tensors(arrays: Mapping[str, Any], matches: Matcher) -> dict[str, np.ndarray[Any, Any]]:
    return {n: a for n, a in arrays.items() if isinstance(a, np.ndarray) and matches(n)}


def _rejected(info: CheckpointInfo, name: str, expected: str, found: str) -> CorruptError:
    return CorruptError(
        "a check of what is to be restored failed",
        reason="check",
        where=f"{info.name}: {name}",
        expected=expected,
        found=found,
        do="restore another step",
    )
