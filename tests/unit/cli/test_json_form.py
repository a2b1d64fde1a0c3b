"""JSON for programs: strict, exact, and without a character that a terminal obeys."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptfmt.cli.json_form import json_value, write_json
from ckptfmt.reports import Damage


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
        (2**70, 2**70),
        (True, True),
        (1 + 2j, [1.0, 2.0]),
        (b"\x00\xff", "00ff"),
        ((1, (2, None)), [1, [2, None]]),
        (OrderedDict(a=1), {"a": 1}),
        ({3: "x"}, {"3": "x"}),
        (np.float32(0.5), 0.5),
        (np.array([[1, 2]], np.int8), [[1, 2]]),
        (np.array([np.nan, 1]), ["NaN", 1.0]),
        (np.array([0.5, np.inf], ml_dtypes.bfloat16), [0.5, "Infinity"]),
        (np.array([-8, 7], ml_dtypes.int4), [-8, 7]),
        (np.array(["2026-01-02"], "M8[D]"), ["2026-01-02"]),
    ],
)
def test_values_as_json(value: object, form: Any) -> None:
    assert json_value(value) == form


def test_a_report_is_an_object_of_its_fields() -> None:
    damage = Damage("data/ab", 0, 10, "main", "w", "digest")
    assert json_value(damage)["stop"] == 10


def test_the_document_is_strict_ascii_with_its_schema() -> None:
    file = io.StringIO()
    write_json({"name": "\x1b[31m\u202e", "x": float("nan")}, file)
    text = file.getvalue()
    assert text.isascii()
    assert "\x1b" not in text
    document = json.loads(text, parse_constant=lambda c: pytest.fail(c))
    assert document == {"schema": 1, "name": "\x1b[31m\u202e", "x": "NaN"}
