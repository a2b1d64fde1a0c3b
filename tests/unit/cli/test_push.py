"""`ckptfmt push` and `ckptfmt pull`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        ckptfmt.save({"w": np.full(5000, step)}, tmp_path / "source", step=step)
    return tmp_path / "source"


def test_the_latest_one_or_all_go_over(
    source: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    target = tmp_path / "target"
    result = run("push", source, target)
    assert result.code == 0
    assert result.out.startswith("1 checkpoint copied to ")
    assert Store(target).steps() == [3]
    assert run("push", f"{source}@1", target).code == 0
    assert Store(target).steps() == [1, 3]
    document = run("push", source, target, "--all", "--json").json
    assert [len(document["copied"]), len(document["kept"]), document["files"]] == [1, 2, 1]
    assert Store(target).verify().ok


def test_pull_is_the_other_way_round(source: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    assert run("pull", tmp_path / "mine", f"{source}@2").code == 0
    assert Store(tmp_path / "mine").steps() == [2]


def test_wrong_selectors_and_missing_stores_are_errors(
    source: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    assert run("push", source, f"{tmp_path}/x@3").code == 2
    assert run("push", f"{source}@3", tmp_path / "x", "--all").code == 2
    assert run("push", tmp_path / "none", tmp_path / "x").code == 10
    assert run("push", f"{source}@9", tmp_path / "x").code == 10
