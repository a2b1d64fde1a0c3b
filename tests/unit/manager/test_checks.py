"""Ready-made validators: what each lets pass, and what it rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptfmt import CkptWarning, CorruptError, Manager, Store, checks


def tensors(value: float) -> dict[str, Any]:
    return {
        "w": np.array([0.0, value], np.float32),
        "half": np.array([value], ml_dtypes.bfloat16),
        "z": np.array([complex(1, value)]),
    }


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["w", "half", "z"])
def test_one_element_that_is_not_finite_is_enough(info: Any, value: float, name: str) -> None:
    good = tensors(1.0) | {"count": np.array([3]), "best": float("inf"), "text": np.array(["nan"])}
    checks.all_finite()(good, info(7))
    with pytest.raises(CorruptError, match=rf"step-0*7: {name}: expected finite.*1 of \d are not"):
        checks.all_finite()(good | {name: tensors(value)[name]}, info(7))
    checks.all_finite("model")(good | {name: tensors(value)[name]}, info(7))


@pytest.mark.parametrize("wrong", [6, np.array(6), np.array([7, 7]), None])
def test_the_state_s_step_is_the_checkpoint_s(info: Any, wrong: Any) -> None:
    for right in (7, np.array(7), np.array([7], np.int32)):
        checks.step_is()({"step": right}, info(7))
    checks.step_is("loop/step")({"loop/step": 7}, info(7))
    with pytest.raises(CorruptError, match="expected step 7"):
        checks.step_is()({} if wrong is None else {"step": wrong}, info(7))


def test_an_optimizer_that_never_stepped_is_no_trained_state(info: Any) -> None:
    check = checks.optimizer_has_stepped()
    torch_s = {"optimizer/state/w/step": np.array(3.0), "optimizer/state/b/step": np.array(1.0)}
    check(torch_s, info(7))
    check({"optimizer/iterations": np.array(4)}, info(7))
    with pytest.raises(CorruptError, match="optimizer/state/b/step: expected a count above 0"):
        check(torch_s | {"optimizer/state/b/step": np.array(0.0)}, info(7))
    with pytest.raises(CorruptError, match="found none"):
        check({"model/w": np.ones(3)}, info(7))


def test_a_manager_passes_over_what_a_check_rejects(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {"model": {"w": np.full(3000, value)}, "step": int(value) if value == value else 3}

    with Manager(tmp_path) as manager:
        for step, value in ((1, 1.0), (2, 2.0), (3, np.nan)):
            manager.save(state(value), step=step)
    mine = state(0.0)
    ready = [checks.all_finite("model"), checks.step_is()]
    with Manager(tmp_path, validate=ready) as manager:
        with pytest.warns(CkptWarning, match="3,000 of 3,000 are not"):
            assert manager.restore(mine).step == 2
        assert (mine["model"]["w"] == 2).all()
        manager.save(state(3.0), step=3)
    assert Store(tmp_path).steps() == [1, 2, 3]
    assert [i.step for i in Store(tmp_path).checkpoints(quarantined=True)] == [3]
