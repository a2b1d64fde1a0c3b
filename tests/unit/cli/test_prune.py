"""`ckptfmt prune`: rules on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Manager, Store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Manager(tmp_path / "run") as manager:
        for step in range(1, 7):
            manager.save({"w": np.full(3, step)}, step=step, metrics={"acc": -abs(step - 2)})
    return tmp_path / "run"


def test_explain_says_why_and_changes_nothing(store: Path, run: Callable[..., Any]) -> None:
    result = run("prune", store, "--keep-last", 2, "--keep-best", "acc:1:max", "--explain")
    assert result.code == 0
    assert [line.split()[:2] for line in result.out.splitlines()[1:]] == [
        ["1", "waits"], ["2", "kept"], ["3", "waits"], ["4", "waits"], ["5", "kept"], ["6", "kept"],
    ]  # fmt: skip
    assert "among the best 1 by acc" in result.out
    assert "3 checkpoints would go once the newest is verified" in result.err
    assert Store(store).steps() == [1, 2, 3, 4, 5, 6]


def test_prune_deletes_and_tells_programs(store: Path, run: Callable[..., Any]) -> None:
    result = run("prune", store, "--keep-every-steps", 3, "--json")
    assert result.code == 0
    kept = [row["step"] for row in result.json["decisions"] if row["kept"]]
    assert kept == Store(store).steps() == [1, 3, 6]


def test_no_rule_or_a_wrong_one_is_a_usage_error(store: Path, run: Callable[..., Any]) -> None:
    assert run("prune", store).code == 2
    assert run("prune", store, "--keep-best", "acc:two").code == 2
    assert run("prune", store, "--keep-last", 0).code == 2
    assert run("prune", f"{store}@3", "--keep-last", 1).code == 2
    assert Store(store).steps() == [1, 2, 3, 4, 5, 6]


def test_an_empty_store_is_no_error(tmp_path: Path, run: Callable[..., Any]) -> None:
    ckptfmt.save({"x": 1}, tmp_path / "empty", step=1)
    Store(tmp_path / "empty").delete(1)
    result = run("prune", tmp_path / "empty", "--keep-last", 1)
    assert (result.code, result.out) == (0, "")
    assert "no checkpoint" in result.err


def test_what_is_set_aside_goes_only_when_told(store: Path, run: Callable[..., Any]) -> None:
    for step in (3, 4, 6):
        Store(store).quarantine(step, "a test")
    assert run("prune", store, "--keep-last", 1).code == 0
    assert len(Store(store).checkpoints(quarantined=True)) == 3
    told = run("prune", store, "--keep-quarantined", 1, "--explain")
    assert told.out.count("set aside, and no good checkpoint is verified yet") == 2
    result = run("prune", store, "--keep-quarantined", 1, "--json")
    gone = [
        (row["step"], row["quarantined"]) for row in result.json["decisions"] if not row["kept"]
    ]
    assert gone == [(3, True), (4, True)]
    assert [info.step for info in Store(store).checkpoints(quarantined=True)] == [6]
    assert Store(store).steps() == [5]
    run("prune", store, "--quarantined-days", 1)
    assert [info.step for info in Store(store).checkpoints(quarantined=True)] == [6]
    run("prune", store, "--keep-quarantined", 0)
    assert Store(store).checkpoints(quarantined=True) == []
    assert Store(store).verify().ok
    Store(store).gc(grace_s=0)
    assert len(list((store / "data").iterdir())) == 1
