"""Conversion by value: exact or in range, never quiet. Spec: 08-protocol."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptfmt.engine.cast import cast_array
from ckptfmt.errors import MismatchError


@pytest.mark.parametrize(
    ("values", "source", "target"),
    [
        ([1.5, -0.0, math.inf, math.nan], "float64", "float32"),
        ([1.5, 2.25], "float32", "bfloat16"),
        ([1.5, 2.0], "bfloat16", "float32"),
        ([448.0, -448.0], "float32", "float8_e4m3fn"),
        ([math.inf, -math.inf], "float32", "float16"),
        ([1, 2, 127, -128], "int64", "int8"),
        ([0, 255], "int64", "uint8"),
        ([1, 0], "int64", "bool"),
        ([True, False], "bool", "int8"),
        ([3.0, -4.0], "float64", "int16"),
        ([1, 2**53], "int64", "float64"),
        ([7, -8], "int64", "int4"),
        ([1, 2], "int4", "float32"),
        ([1 + 2j], "complex128", "complex64"),
        ([1.5], "float64", "complex64"),
        ([], "float64", "int8"),
        ([2**63], "uint64", "float32"),
        ([2**64 - 1], "uint64", "uint64"),
    ],
)
def test_values_that_fit_are_converted(values: list[Any], source: str, target: str) -> None:
    kinds = [np.dtype(getattr(ml_dtypes, name, name)) for name in (source, target)]
    array = np.array(values).astype(kinds[0])
    made = cast_array(array, target, "x")
    assert made.dtype == kinds[1]
    assert made.tobytes() == array.astype(kinds[1]).tobytes()


@pytest.mark.parametrize(
    ("values", "source", "target"),
    [
        ([1e39], "float64", "float32"),
        ([70_000.0], "float32", "float16"),
        ([500.0], "float32", "float8_e4m3fn"),
        ([1e10], "float32", "float8_e5m2"),
        ([128], "int64", "int8"),
        ([-1], "int64", "uint8"),
        ([256], "int64", "uint8"),
        ([2], "int64", "bool"),
        ([1.5], "float64", "int32"),
        ([math.nan], "float64", "int32"),
        ([math.inf], "float64", "int64"),
        ([1e30], "float64", "int64"),
        ([2.0**63], "float64", "int64"),
        ([8], "int64", "int4"),
        ([2**63], "uint64", "int64"),
        ([-1], "int64", "uint64"),
        ([2**64 - 1], "uint64", "int64"),
        ([70_000], "int64", "float16"),
        ([1 + 2j], "complex128", "float64"),
        ([1 + 0j], "complex64", "int32"),
        ([1e39 + 0j], "complex128", "complex64"),
        ([1e39j], "complex128", "complex64"),
        ([2**53 + 1], "int64", "int32"),
        ([3], "int64", "uint1"),
    ],
)
def test_a_value_that_would_change_its_meaning_raises(
    values: list[Any], source: str, target: str
) -> None:
    kind = np.dtype(getattr(ml_dtypes, source, source))
    with pytest.raises(MismatchError, match="'layer/w'") as caught:
        cast_array(np.array(values).astype(kind), target, "layer/w")
    assert caught.value.kind == "mismatch-cast"


@pytest.mark.parametrize(
    "target", ["string", "bytes", "str4", "datetime64[ns]", "void8", "nothing"]
)
def test_what_is_no_number_does_not_convert(target: str) -> None:
    with pytest.raises(MismatchError):
        cast_array(np.ones(2), target, "x")


@pytest.mark.parametrize("dtype", ["U3", "S2", "M8[D]", "V4", object])
def test_nor_does_what_was_none(dtype: Any) -> None:
    with pytest.raises(MismatchError):
        cast_array(np.zeros(2, dtype), "float32", "x")


def test_large_integers_are_compared_exactly() -> None:
    """2^53 + 1 is not in a double: through one, it would seem to fit."""
    exact = np.array([2**53 + 1, -(2**53) - 1], np.int64)
    assert cast_array(exact, "int64", "x").tolist() == exact.tolist()
    with pytest.raises(MismatchError):
        cast_array(np.array([2**63 + 1], np.uint64), "int64", "x")
    made = cast_array(np.array([2**63 - 1], np.uint64), "int64", "x")
    assert made.tolist() == [2**63 - 1]


def test_the_values_given_are_left_alone() -> None:
    array = np.array([1.5, 2.5])
    made = cast_array(array, "float64", "x")
    made[:] = 0
    assert array.tolist() == [1.5, 2.5]
