"""Targets that lie over each other: each holds what is stored for it, or nothing changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine.overlap import overlapping, overlaps_itself
from ckptfmt.errors import MismatchError, PartialRestoreError, UsageError


def test_views_that_share_a_part_are_restored_where_the_values_agree(tmp_path: Path) -> None:
    a = np.arange(20.0)
    a[10] = np.nan
    ckptfmt.save({"head": a[:12], "tail": a[8:]}, tmp_path)
    b = np.zeros(20)
    assert ckptfmt.restore({"head": b[:12], "tail": b[8:]}, tmp_path).clean
    assert b.tobytes() == a.tobytes()


def test_views_that_share_a_part_take_no_values_that_differ_there(tmp_path: Path) -> None:
    ckptfmt.save({"head": np.arange(12.0), "own": np.ones(3), "tail": np.arange(12.0)}, tmp_path)
    b, own = np.full(20, -0.0), np.zeros(3)
    before = b.tobytes()
    with pytest.raises(MismatchError) as caught:
        ckptfmt.restore({"head": b[:12], "own": own, "tail": b[8:]}, tmp_path)
    assert caught.value.kind == "mismatch-overlap"
    assert b.tobytes() == before
    assert not own.any()


def test_in_bounded_memory_the_error_says_what_changed(tmp_path: Path) -> None:
    ckptfmt.save({"head": np.arange(12.0), "tail": np.arange(12.0)}, tmp_path)
    b = np.zeros(20)
    with pytest.raises(PartialRestoreError) as caught:
        ckptfmt.restore({"head": b[:12], "tail": b[8:]}, tmp_path, atomic=False)
    assert {"head", "tail"} <= set(caught.value.changed)


def test_interleaved_views_share_nothing(tmp_path: Path) -> None:
    ckptfmt.save({"even": np.arange(10.0), "odd": np.arange(10.0) * 5}, tmp_path)
    b = np.zeros(20)
    ckptfmt.restore({"even": b[::2], "odd": b[1::2]}, tmp_path)
    assert b[2:6].tolist() == [1, 5, 2, 10]
    both = {"even": b[::2], "odd": b[1::2]}
    assert overlapping(both) == []
    assert sorted(overlapping({**both, "all": b})) == ["all", "even", "odd"]
    assert overlapping({"one": b, "two": b}) == []


def test_an_array_over_itself_is_no_target(tmp_path: Path) -> None:
    ckptfmt.save({"w": np.arange(9.0).reshape(3, 3)}, tmp_path)
    over = np.lib.stride_tricks.as_strided(np.zeros(9), (3, 3), (8, 8))
    with pytest.raises(UsageError, match="share memory"):
        ckptfmt.restore({"w": over}, tmp_path)


@pytest.mark.parametrize(
    "view",
    [
        np.zeros((4, 6)).T,
        np.zeros((4, 6))[::2, ::-3],
        np.zeros((4, 6, 2)).transpose(2, 0, 1)[:, 1:, ::2],
        np.zeros((4, 1, 6))[:, :, 1:],
        np.zeros((0, 3))[::2],
        np.zeros(5)[::-1],
    ],
)
def test_ordinary_views_do_not_lie_over_themselves(view: np.ndarray) -> None:
    assert not overlaps_itself(view)
