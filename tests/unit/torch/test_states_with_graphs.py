"""Objects whose state holds tensors with an autograd graph: saved, restored, rolled back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt


class Average:
    """Keeps a tensor that was computed from a parameter, as hand-written averages do."""

    def __init__(self, value: float, fails: bool = False) -> None:
        self.mean = torch.full((3,), value, requires_grad=True) * 2
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "list": [self.mean, 1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]
        if self.fails:
            self.fails = False
            raise ValueError("half-way")


def test_a_state_with_a_graph_is_restored(tmp_path: Path) -> None:
    ckptfmt.save({"mean": Average(1.0)}, tmp_path)
    target = Average(5.0)
    ckptfmt.restore({"mean": target}, tmp_path)
    assert target.mean.tolist() == [2.0, 2.0, 2.0]


def test_a_state_with_a_graph_is_rolled_back(tmp_path: Path) -> None:
    ckptfmt.save({"mean": Average(1.0)}, tmp_path)
    target = Average(5.0, fails=True)
    with pytest.raises(ValueError, match="half-way"):
        ckptfmt.restore({"mean": target}, tmp_path)
    assert target.mean.tolist() == [10.0, 10.0, 10.0]
