"""An object without state, restored: its empty dict is neither missing nor unexpected."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

import ckptfmt

torch = pytest.importorskip("torch")


def test_a_module_without_state_is_restored_beside_others(tmp_path: Path) -> None:
    tree = {"act": torch.nn.ReLU(), "w": torch.ones(2), "plain": {}}
    ckptfmt.save(tree, tmp_path / "s")
    assert ckptfmt.load(tmp_path / "s")["act"] == OrderedDict()
    report = ckptfmt.restore(tree, tmp_path / "s")
    assert sorted(report.matched) == ["act", "plain", "w"]


def test_state_that_the_target_lacks_is_still_unexpected(tmp_path: Path) -> None:
    ckptfmt.save({"layer": torch.nn.Linear(1, 1)}, tmp_path / "s")
    with pytest.raises(ckptfmt.MismatchError, match="layer/weight"):
        ckptfmt.restore({"layer": torch.nn.ReLU()}, tmp_path / "s")


def test_state_that_is_not_stored_is_still_missing(tmp_path: Path) -> None:
    ckptfmt.save({"layer": torch.nn.ReLU()}, tmp_path / "s")
    with pytest.raises(ckptfmt.MismatchError, match="layer/weight"):
        ckptfmt.restore({"layer": torch.nn.Linear(1, 1)}, tmp_path / "s")
