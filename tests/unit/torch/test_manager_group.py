"""A manager in each rank of a torch process group (gloo)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptfmt

JOBS = Path(__file__).with_name("manager_jobs.py")


def test_a_sharded_run_that_one_rank_had_to_leave_goes_on_exactly(
    ranks: Any, tmp_path: Path
) -> None:
    whole = ranks.run(JOBS, "train", 2, path=str(tmp_path / "a"), steps=6, told_at=-1)
    path = str(tmp_path / "b")
    left = ranks.run(JOBS, "train", 2, path=path, steps=6, told_at=3)
    assert [row[:2] for row in left] == [[0, 3]] * 2  # both, at the step at which one was told
    assert ckptfmt.Store(path).steps() == [2, 3]
    back = ranks.run(JOBS, "train", 2, path=path, steps=6, told_at=-1)
    assert [row[:2] for row in back] == [[3, 6]] * 2
    assert [row[2] for row in back] == [row[2] for row in whole]
    assert ckptfmt.Store(path).steps() == ckptfmt.Store(tmp_path / "a").steps() == [4, 6]
    assert [row[3] for row in whole] == [True, False]  # rank 0 alone retains
    assert ckptfmt.Store(path).verify().ok


@pytest.mark.slow
def test_an_error_in_the_loop_of_one_rank_is_heard_by_the_other(ranks: Any, tmp_path: Path) -> None:
    said = ranks.run(JOBS, "fail", 2, path=str(tmp_path / "a"))
    assert said[1] == "ZeroDivisionError: bad batch"
    assert said[0].startswith("ConflictError: a rank of the group is gone: rank 1 (")
    assert "ZeroDivisionError: bad batch" in said[0]
    assert ckptfmt.Store(tmp_path / "a").steps() == [2]
