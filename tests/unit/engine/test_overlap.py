"""Targets that lie over each other: each holds what is stored for it, or nothing changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine.overlap import clusters, memories_of, overlaps_itself
from ckptfmt.engine.targets import ArrayTarget
from ckptfmt.errors import MismatchError, UsageError


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


@pytest.mark.parametrize("atomic", [True, False])
def test_in_bounded_memory_too_nothing_is_touched(atomic: bool, tmp_path: Path) -> None:
    ckptfmt.save({"head": np.arange(12.0), "tail": np.arange(12.0)}, tmp_path)
    b = np.zeros(20)
    with ckptfmt.configure(staging_nbytes=1), pytest.raises(MismatchError) as caught:
        ckptfmt.restore({"head": b[:12], "tail": b[8:]}, tmp_path, atomic=atomic)
    assert caught.value.kind == "mismatch-overlap"
    assert not b.any()


def overlapping(arrays: dict[str, np.ndarray]) -> list[list[str]]:
    memories = memories_of([ArrayTarget(name, array) for name, array in arrays.items()])
    return [[m.name for m in cluster] for cluster in clusters(memories)]


def test_interleaved_views_share_nothing(tmp_path: Path) -> None:
    ckptfmt.save({"even": np.arange(10.0), "odd": np.arange(10.0) * 5}, tmp_path)
    b = np.zeros(20)
    ckptfmt.restore({"even": b[::2], "odd": b[1::2]}, tmp_path)
    assert b[2:6].tolist() == [1, 5, 2, 10]
    both = {"even": b[::2], "odd": b[1::2]}
    assert overlapping(both) == []
    assert overlapping({**both, "all": b}) == [["even", "odd", "all"]]
    assert overlapping({"one": b, "two": b}) == []
    apart = {"a": b[:3], "b": b[2:4], "c": b[10:12][::-1], "d": b[11:13]}
    assert overlapping(apart) == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("equal", [True, False])
def test_one_array_under_two_names_takes_two_copies_only_if_their_bytes_are_equal(
    equal: bool, tmp_path: Path
) -> None:
    """Cut differently, so that their digests say nothing."""
    a = np.arange(4096.0)
    b = a if equal else a + 1
    ckptfmt.save({"a": a, "b": b.copy()}, tmp_path, chunk_nbytes={"a": 4096, "b": 8192})
    one = np.zeros(4096)
    target = {"a": one, "b": one}
    assert "b" in ckptfmt.plan(target, tmp_path).ties
    if equal:
        assert ckptfmt.restore(target, tmp_path).clean
        assert one.tobytes() == a.tobytes()
    else:
        with pytest.raises(MismatchError, match="two stored values"):
            ckptfmt.restore(target, tmp_path)
        assert not one.any()


def test_two_copies_in_a_source_tree_may_fill_one_array() -> None:
    one, values = np.zeros(3), np.arange(3.0)
    assert ckptfmt.restore({"a": one, "b": one}, {"a": values, "b": values.copy()}).clean
    with pytest.raises(MismatchError, match="two stored values"):
        ckptfmt.restore({"a": one, "b": one}, {"a": values, "b": values + 1})
    assert one.tolist() == [0, 1, 2]


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
    assert not overlaps_itself(view.shape, view.strides, view.itemsize)
