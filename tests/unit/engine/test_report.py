"""From a comparison to a report, and to one error that says everything. Spec: 08-protocol."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.reports import Mismatch, RestoreReport


def mismatch(target: Any, saved: Any, **options: Any) -> ckptfmt.MismatchError:
    with pytest.raises(ckptfmt.MismatchError) as caught:
        ckptfmt.restore(target, saved, **options)
    return caught.value


def test_a_report_prints_as_a_table() -> None:
    report = RestoreReport(
        None,
        0,
        matched=("a", "b"),
        missing=("c",),
        unexpected=("d",),
        shapes=(Mismatch("e", "[1]", "[2]"),),
        cast={"f": "float64 -> float32"},
        ties={"g": "lost"},
    )
    lines = str(report).splitlines()
    assert lines[0] == "2 matched"
    assert [line.split() for line in lines[1:]] == [
        ["missing", "c"],
        ["unexpected", "d"],
        ["shape", "e:", "expected", "[1],", "found", "[2]"],
        ["cast", "f:", "float64", "->", "float32"],
        ["ties", "g:", "lost"],
    ]


def test_a_report_is_true_if_anything_matched() -> None:
    assert RestoreReport(None, 0, matched=("a",))
    assert not RestoreReport(None, 0, missing=("a",))
    assert RestoreReport(None, 0, matched=("a",)).clean
    assert not RestoreReport(None, 0, matched=("a",), unexpected=("b",)).clean


def test_the_report_names_the_checkpoint(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=3)
    assert str(ckptfmt.plan({"a": 0}, tmp_path)).startswith("step-0000000000000003: 1 matched")


def test_the_cure_is_a_line_to_add() -> None:
    one = {"a": np.zeros(1)}
    error = mismatch({**one, "b": 0}, one)
    assert error.do == "nothing was changed; to go on: allow_missing='b'"
    error = mismatch(one, {**one, "b": 0, "c": 1})
    assert "allow_unexpected=('b', 'c'), or take part with names=" in error.do
    many = {f"head/{i}".replace("/", "."): i for i in range(9)}
    error = mismatch(one, {**one, "head": many, "x": {"y": 1}})
    assert "allow_unexpected=('head', 'x')" in error.do
    ckptfmt.restore(one, {**one, "head": many, "x": {"y": 1}}, allow_unexpected=("head", "x"))
    error = mismatch({"a": np.zeros(1, np.float32), "b": 0}, {**one, "b": 1})
    assert "allow_cast=" in error.do
    assert error.kind == "mismatch-tree"


def test_a_cure_is_offered_only_where_it_helps() -> None:
    one = {"a": np.zeros(1), "b": 1}
    shape = mismatch({"a": np.zeros(2), "b": 0}, one)
    assert "names=" in shape.do
    assert "allow_cast" not in shape.do  # converts dtypes, never shapes
    nothing = mismatch({"x": np.zeros(1)}, one)
    assert "allow_" not in nothing.do  # a restore that matches nothing raises all the same
    assert "x" in str(nothing)
    assert "compare the names" in nothing.do


@pytest.mark.parametrize("strict", [True, False])
def test_a_target_that_is_a_part_of_what_is_stored_is_told_how(strict: bool) -> None:
    stored = {"model": {"w": np.ones(2), "b": np.ones(1)}, "optimizer": {"lr": 1.0}}
    target = {"w": np.zeros(2), "b": np.zeros(1)}
    error = mismatch(target, stored, strict=strict)
    assert "names='model', rename={'model': ''}" in error.do
    ckptfmt.restore(target, stored, names="model", rename={"model": ""})
    assert target["w"].tolist() == [1, 1]


def test_a_name_is_told_once_and_the_root_has_a_word() -> None:
    error = mismatch(np.zeros(3), {"a": np.zeros(3), "b": np.zeros(3)})
    assert "the root: expected" in str(error)


def test_no_match_has_a_kind_of_its_own() -> None:
    error = mismatch({"x": np.zeros(1)}, {"y": np.zeros(1)}, strict=False)
    assert error.kind == "mismatch-nothing-matches"


def test_an_error_of_thousands_of_names_comes_in_a_moment() -> None:
    target = {f"model.layers.{i}.weight": np.zeros(1) for i in range(1000)}
    saved = {f"model.layer.{i}.weights": np.zeros(1) for i in range(1000)}
    start = time.process_time()
    text = str(mismatch(target, saved))
    assert time.process_time() - start < 20  # 2 s alone on the machine
    assert "rename={'model.layer.0.weights': 'model.layers.0.weight'}" in text


def test_errors_survive_pickling_with_their_report() -> None:
    import pickle

    error = mismatch({"a": np.zeros(2), "b": 1}, {"a": np.zeros(1)})
    back = pickle.loads(pickle.dumps(error))
    assert str(back) == str(error)
    assert back.report == error.report
