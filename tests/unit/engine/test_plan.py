"""A plan says what a restore would do, and how bytes are cut and joined. Spec: 05, 07, 08."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine.adapter import TensorSource
from ckptfmt.engine.plan import SaveOptions, packed_bytes, plan_runs, plan_save
from ckptfmt.engine.stage import stage_tensor
from ckptfmt.engine.tree import flatten
from ckptfmt.format import PlacementSection
from ckptfmt.testing import difference

# -- what restore would do ----------------------------------------------------------------------


def test_a_plan_reports_everything_and_raises_nothing_but_not_found(counted: Any) -> None:
    saved = {"a": np.ones((2, 3)), "b": np.ones(2, np.float32), "c": 1, "old": 2, "ok": np.ones(1)}
    ckptfmt.save(saved, counted.store, step=9)
    target: dict[str, Any] = {
        "a": np.zeros(6),
        "b": np.zeros(2),
        "c": np.zeros(1),
        "new": 0,
        "ok": np.zeros(1),
    }
    before = copy.deepcopy(target)
    counted.backend.forget()
    report = ckptfmt.plan(target, counted.store)
    assert counted.backend.data_reads() == []
    assert not difference(target, before)
    assert report.step == 9
    assert list(report.matched) == ["ok"]
    assert list(report.missing) == ["new"]
    assert list(report.unexpected) == ["old"]
    assert [m.name for m in report.shapes] == ["a"]
    assert [m.name for m in report.dtypes] == ["b"]
    assert [m.name for m in report.kinds] == ["c"]
    assert not report.clean
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.plan(target, counted.store, step=1)
    assert not ckptfmt.plan({"x": 1}, counted.store)


def test_a_plan_is_the_report_of_the_restore_that_follows(tmp_path: Path) -> None:
    shared = np.ones(2)
    saved = {"m": {"a": shared, "b": shared}, "h": np.ones(3, np.float32), "v": 1}
    ckptfmt.save(saved, tmp_path)
    target = {"n": {"a": np.zeros(2), "b": np.zeros(2)}, "h": np.zeros(3), "v": 0}
    options: dict[str, Any] = {"rename": {"m": "n"}, "allow_cast": "h"}
    planned = ckptfmt.plan(target, tmp_path, **options)
    assert planned == ckptfmt.restore(target, tmp_path, **options)
    assert planned.cast == {"h": "float32 -> float64"}
    assert planned.renamed == {"m/a": "n/a", "m/b": "n/b"}
    assert list(planned.ties) == ["n/b"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strict": False},
        {"allow_missing": "new"},
        {"allow_missing": "new", "allow_unexpected": "old"},
        {"allow_missing": "new", "allow_unexpected": "old", "max_nbytes": 8},
        {"names": "ok", "strict": True, "atomic": False, "verify": False},
        {"names": "old", "strict": False},
        {"strict": False, "max_nbytes": 7},
    ],
)
def test_a_plan_takes_what_restore_takes_and_has_its_error(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    ckptfmt.save({"ok": np.ones(1), "old": 2}, tmp_path)
    target = {"ok": np.zeros(1), "new": 0}
    report = ckptfmt.plan(target, tmp_path, **options)
    if report.error is None:
        assert report == ckptfmt.restore(target, tmp_path, **options)
        return
    with pytest.raises(type(report.error)) as caught:
        ckptfmt.restore(target, tmp_path, **options)
    assert str(report.error) == str(caught.value)
    kind = caught.value.kind
    assert f"restore would raise {type(caught.value).__name__} ({kind})" in str(report)


def test_a_plan_of_a_part_expects_nothing_else(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(2), "b": 1}, tmp_path)
    assert list(ckptfmt.plan({"a": np.zeros(2)}, tmp_path, names="a").unexpected) == []


# -- how a save is cut --------------------------------------------------------------------------


def planned(tree: Any, **options: Any) -> Any:
    return plan_save(flatten(tree), SaveOptions(**options)).tree


def test_regions_are_cut_into_chunks_of_one_length_but_the_last() -> None:
    tree = planned(
        {"a": np.zeros(10_000, np.uint8), "b": np.zeros(8192, np.uint8)}, chunk_nbytes=4096
    )
    assert tree.region_nchunks.tolist() == [3, 2]
    assert tree.chunk_raw.tolist() == [4096, 4096, 1808, 4096, 4096]


def test_a_tensor_without_elements_has_no_region() -> None:
    tree = planned({"a": np.zeros((0, 5)), "b": np.zeros(()), "c": np.zeros((3, 0))})
    assert tree.region_tensors.tolist() == [1]
    assert tree.tensor_dims.tolist() == [0, 5, 3, 0]


def test_a_plan_touches_no_bytes_of_a_tensor() -> None:
    huge = np.broadcast_to(np.zeros(1, np.uint8), (1 << 45,))
    tree = planned({"huge": huge}, chunk_nbytes=1 << 30)
    assert int(tree.tensor_nbytes[0]) == 1 << 45
    assert len(tree.chunk_raw) == 1 << 15


def test_no_memory_for_a_copy_is_a_usage_error_that_names_the_leaf(tmp_path: Path) -> None:
    """No address space has 2^48 bytes; a list of strings may be too long as well."""
    huge = np.broadcast_to(np.zeros(1, np.uint8), (1 << 48,))
    told = r"no memory .*'a/huge'.*uint8 of shape"
    with pytest.raises(ckptfmt.UsageError, match=told):
        ckptfmt.save({"a": {"huge": huge}}, tmp_path, chunk_nbytes=1 << 30)
    future = ckptfmt.save_async({"a": {"huge": huge}}, tmp_path, chunk_nbytes=1 << 30)
    with pytest.raises(ckptfmt.UsageError, match=told):
        future.result()
    assert ckptfmt.Store(tmp_path).names() == []

    def fetch() -> Any:
        raise MemoryError

    source = TensorSource("string", (3,), fetch)
    with pytest.raises(ckptfmt.UsageError, match=r"no memory .*'s'"):
        packed_bytes(source, "s")


def test_an_index_that_would_be_too_large_is_refused_before_staging() -> None:
    huge = np.broadcast_to(np.zeros(1, np.uint8), (1 << 38,))
    with pytest.raises(ckptfmt.UsageError, match="raise chunk_nbytes"):
        planned({"huge": huge}, chunk_nbytes=4096)


def test_a_tensor_that_changes_its_size_while_it_is_saved_is_a_conflict() -> None:
    # A real tensor cannot change between plan and stage in one thread; a source can.
    source = TensorSource("float64", (2,), lambda: np.ones(3))
    with pytest.raises(ckptfmt.ConflictError, match="changed while it was saved"):
        stage_tensor(source, "w", 16)


# -- how reads are joined -----------------------------------------------------------------------


def placement(rows: list[tuple[int, int, int]]) -> PlacementSection:
    files, offsets, stored = (np.array(column) for column in zip(*rows))
    return PlacementSection(
        files.astype(np.uint32),
        offsets.astype(np.uint64),
        stored.astype(np.uint32),
        np.zeros(len(rows), np.uint8),
        None,
        ((),),
    )


def runs(rows: list[tuple[int, int, int]], **options: Any) -> list[tuple[int, int, int, list[int]]]:
    wanted = np.arange(len(rows))
    made = plan_runs(placement(rows), wanted, **options)
    return [(run.file, run.start, run.stop, run.chunks.tolist()) for run in made]


def test_neighbours_join_and_gaps_are_read_over_up_to_a_limit() -> None:
    rows = [(0, 64, 100), (0, 192, 10), (0, 1000, 5), (1, 64, 8), (0, 5000, 1)]
    assert runs(rows, gap_nbytes=100) == [
        (0, 64, 202, [0, 1]),
        (0, 1000, 1005, [2]),
        (0, 5000, 5001, [4]),
        (1, 64, 72, [3]),
    ]
    assert runs(rows, gap_nbytes=10_000) == [(0, 64, 5001, [0, 1, 2, 4]), (1, 64, 72, [3])]


def test_runs_end_at_their_size_but_not_within_a_region() -> None:
    rows = [(0, 64 * i, 64) for i in range(1, 11)]
    assert [len(r[3]) for r in runs(rows, run_nbytes=192)] == [3, 3, 3, 1]
    groups = np.array([0, 0, 1, 1, 1, 1, 1, 2, 2, 2])
    assert [r[3] for r in runs(rows, run_nbytes=192, groups=groups)] == [
        [0, 1, 2, 3, 4, 5, 6],
        [7, 8, 9],
    ]


def test_offsets_beyond_32_bits_are_exact() -> None:
    rows = [(0, (1 << 33) + 64 * i, 64) for i in range(3)] + [(0, 1 << 60, 4)]
    assert runs(rows) == [
        (0, 1 << 33, (1 << 33) + 192, [0, 1, 2]),
        (0, 1 << 60, (1 << 60) + 4, [3]),
    ]


def test_nothing_wanted_is_no_run() -> None:
    assert plan_runs(placement([(0, 64, 1)]), np.zeros(0, np.int64)) == []
