"""A policy that makes no sense is refused when the manager is made, not when it is first asked."""

# mypy: disable-error-code="arg-type, list-item, call-overload, operator"

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Alarm, Manager, Mirror, checks, keep, when

WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "keep a str": (lambda at: Manager(at, keep="3"), "found '3'"),
    "keep a float": (lambda at: Manager(at, keep=1.5), "found 1.5"),
    "save_when a str": (lambda at: Manager(at, save_when="10"), "found '10'"),
    "preemption a signal": (lambda at: Manager(at, preemption="SIGTERM"), "found 'SIGTERM'"),
    "hooks a function": (lambda at: Manager(at, hooks=print), r"for example hooks=\[print\]"),
    "hooks of numbers": (lambda at: Manager(at, hooks=[3]), "takes a list of functions"),
    "validate a function": (
        lambda at: Manager(at, validate=checks.all_finite("w")),
        "validate= takes a list of functions",
    ),
    "a mirror that keeps a str": (lambda at: Mirror("b", keep="3"), "found '3'"),
    "a mirror's rate a str": (lambda at: Mirror("b", bytes_per_s="2MB"), "found '2MB'"),
    "an alarm of a str": (lambda at: Alarm(stall_s="5"), "limits above 0"),
    "keep or a number": (lambda at: keep.last(3) | 3, "on both sides"),
    "when and a number": (lambda at: when.every(steps=3) & 3, "on both sides"),
    "stages in a list": (lambda at: when.staged([1]), "a dict of a stage or more"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_policy_that_makes_no_sense_is_refused_at_once(tmp_path: Path, case: str) -> None:
    call, says = WRONG[case]
    with pytest.raises(ckptfmt.UsageError, match=says):
        call(tmp_path / "a")


def test_a_step_may_be_any_integer(tmp_path: Path) -> None:
    with Manager(tmp_path / "a", asynchronous=False) as manager:
        manager.save({"w": np.zeros(3)}, step=np.int64(7))
    assert ckptfmt.Store(tmp_path / "a").steps() == [7]
