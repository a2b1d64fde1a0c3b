"""`per_rank`: a value of each rank's own, under the rank's number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine import flatten, per_rank
from ckptfmt.errors import MismatchError


def test_a_process_alone_is_rank_0_of_1(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    ckptfmt.save({"rng": per_rank(generator), "pos": [per_rank(7)]}, tmp_path)
    expected = generator.random(4).tolist()
    assert ckptfmt.load(tmp_path)["pos"] == [{"0": 7}]
    target: dict[str, Any] = {"rng": per_rank(np.random.default_rng(0)), "pos": [per_rank(0)]}
    assert ckptfmt.restore(target, tmp_path).clean
    assert target["pos"][0].value == 7
    assert target["rng"].value.random(4).tolist() == expected


def test_names_hold_the_rank_whose_they_are() -> None:
    tree = {"a": per_rank({"x": np.zeros(1), "y": 1}), "b": per_rank(per_rank(2))}
    assert flatten(tree, rank=3).names == ["a/3/x", "a/3/y", "b/3/3"]


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ({"rng": {"0": 1, "1": 2}}, "expected the value of one process, found a value for each of"),
        ({"rng": {"x": 1}}, "expected the value of one process, found a value that belongs to no"),
        ({"rng": 1}, "found a value that belongs to no rank"),
    ],
)
def test_another_number_of_ranks_is_a_mismatch_and_nothing_changes(
    stored: dict[str, Any], text: str, tmp_path: Path
) -> None:
    ckptfmt.save({**stored, "w": np.ones(2)}, tmp_path)
    target = {"rng": per_rank(9), "w": np.zeros(2)}
    with pytest.raises(MismatchError, match=text):
        ckptfmt.restore(target, tmp_path, strict=False)
    assert target["rng"].value == 9  # type: ignore[attr-defined]
    assert not target["w"].any()  # type: ignore[attr-defined]


def test_a_failure_later_puts_the_old_value_back(tmp_path: Path) -> None:
    class Late:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("no")

    ckptfmt.save({"pos": per_rank(7), "w": np.ones(1), "late": Late()}, tmp_path)
    target: dict[str, Any] = {"pos": per_rank(1), "w": np.zeros(1), "late": Late()}
    with pytest.raises(Exception, match="no"):
        ckptfmt.restore(target, tmp_path)
    assert target["pos"].value == 1
