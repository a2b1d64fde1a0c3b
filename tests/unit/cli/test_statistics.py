"""Statistics in blocks agree with statistics at once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptfmt.cli import statistics
from ckptfmt.cli.statistics import blocks, tensor_statistics


def stats(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return tensor_statistics(lambda region: array[region], array.shape, array.dtype)


def test_blocks_cover_the_first_axis_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK_NBYTES", 64)
    regions = list(blocks((10, 4), 8))
    assert [r[0].indices(10)[:2] for r in regions] == [(n, n + 2) for n in range(0, 10, 2)]
    assert list(blocks((), 8)) == [()]
    assert list(blocks((0, 4), 8)) == []
    assert len(list(blocks((3, 1000), 8))) == 3


def test_blockwise_sums_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK_NBYTES", 256)
    array = np.random.default_rng(3).normal(1e6, 1.0, (500, 7))
    found = stats(array)
    assert found["mean"] == pytest.approx(array.mean(), rel=1e-12)
    assert found["std"] == pytest.approx(array.std(), rel=1e-9)
    assert found["norm"] == pytest.approx(np.linalg.norm(array), rel=1e-12)
    assert (found["min"], found["max"]) == (array.min(), array.max())


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    found = stats(np.array([1.0, np.nan, np.inf, -np.inf, 0.0, 3.0], np.float32))
    assert (found["count"], found["finite"], found["nan"], found["inf"], found["zero"]) == (
        6,
        3,
        1,
        2,
        1,
    )
    assert (found["min"], found["max"], found["mean"]) == (0.0, 3.0, pytest.approx(4 / 3))


def test_large_integers_are_exact() -> None:
    found = stats(np.array([2**63 + 1, 2**63 + 3], np.uint64))
    assert (found["min"], found["max"]) == (2**63 + 1, 2**63 + 3)


def test_small_floats_of_ml_dtypes_have_statistics() -> None:
    found = stats(np.array([[0.5, -2.0]], ml_dtypes.float8_e4m3fn))
    assert (found["min"], found["max"], found["mean"]) == (-2.0, 0.5, -0.75)


def test_complex_numbers_have_no_order_and_do_have_a_mean() -> None:
    found = stats(np.array([1 + 2j, 3 - 2j], np.complex64))
    assert "min" not in found
    assert found["mean"] == 2 + 0j


def test_text_and_empty_tensors_have_only_a_count() -> None:
    assert stats(np.array(["a", "b"], object)) == {"count": 2}
    assert stats(np.zeros((0, 3)))["count"] == 0
    assert "mean" not in stats(np.zeros((0, 3)))


def test_numbers_at_the_ends_of_their_range_overflow_to_infinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    big = np.array([1.7e308, -1.7e308, 1.0])
    monkeypatch.setattr("ckptfmt.cli.statistics.BLOCK_NBYTES", 8)
    found = tensor_statistics(lambda part: big[part], big.shape, big.dtype)
    assert (found["min"], found["max"], found["norm"]) == (-1.7e308, 1.7e308, np.inf)
