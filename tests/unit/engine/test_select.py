"""Selecting leaves by name. Spec: 03-names."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.engine.select import Matcher, nearest, select_positions
from ckptfmt.errors import NotFoundError

NAMES = ["model/enc.0.w", "model/enc.0.b", "model/dec/w", "opt/lr", "opt/~3i1/m", "step", "a*b/c"]


def chosen(select: Any) -> list[str]:
    return [name for name in NAMES if Matcher(select)(name)]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("model", ["model/enc.0.w", "model/enc.0.b", "model/dec/w"]),
        ("mode", []),
        ("model/enc.0.w", ["model/enc.0.w"]),
        ("model/enc", []),
        ("model/*.w", ["model/enc.0.w"]),
        ("model/*", ["model/enc.0.w", "model/enc.0.b", "model/dec/w"]),
        ("*/w", []),
        ("**/w", ["model/dec/w"]),
        ("**w", ["model/enc.0.w", "model/dec/w"]),
        ("*", NAMES),
        ("**", NAMES),
        ("", NAMES),
        ("st*p", ["step"]),
        ("opt/~3i1", ["opt/~3i1/m"]),
        ("opt/.*", []),
        ("enc.0.w", []),
        (["opt/lr", "step"], ["opt/lr", "step"]),
        ((), []),
        ([], []),
        (lambda name: name.endswith("/m"), ["opt/~3i1/m"]),
        (None, NAMES),
        ("model/enc?0?w", []),
        ("a*b/c", ["a*b/c"]),
    ],
)
def test_what_a_pattern_selects(select: Any, expected: list[str]) -> None:
    assert chosen(select) == expected


def test_patterns_that_matched_nothing_are_known() -> None:
    matcher = Matcher(["model/dec", "nothing", "**/m"])
    for name in NAMES:
        matcher(name)
    assert matcher.unused() == ["nothing"]
    assert Matcher("**").unused() == []


def test_every_pattern_must_match_something() -> None:
    assert select_positions(NAMES, ["step", "opt"], "here") == [3, 4, 5]
    with pytest.raises(NotFoundError, match="'nothing'") as caught:
        select_positions(NAMES, ["step", "nothing"], "here")
    assert caught.value.kind == "not-found-name"
    assert select_positions([], None, "here") == []
    with pytest.raises(NotFoundError):
        select_positions([], "x", "here")


def test_the_nearest_names_are_offered() -> None:
    assert "'model/enc.0.w'" in nearest("model/enc.1.w", NAMES)
    assert "'opt/lr'" in nearest("optimizer/lr", NAMES)
    assert "ckptfmt show" in nearest("zzzzz", NAMES)
    assert "ckptfmt show" in nearest("x", [])


def test_a_million_names_are_matched_in_moments() -> None:
    names = [f"model/layer.{i}.weight" for i in range(200_000)]
    start = time.process_time()
    assert len(select_positions(names, ["model/layer.1*", "**.weight"], "here")) == 200_000
    assert "ckptfmt show" in nearest("model/layer.x", names)
    assert time.process_time() - start < 5


def matches(pattern: str, name: str) -> bool:
    """The rule, as plainly as it can be said."""
    if pattern.startswith("**"):
        return any(matches(pattern[2:], name[at:]) for at in range(len(name) + 1))
    if pattern.startswith("*"):
        stop = name.find("/") if "/" in name else len(name)
        return any(matches(pattern[1:], name[at:]) for at in range(stop + 1))
    if not pattern:
        return name == "" or name.startswith("/")
    return name[:1] == pattern[0] and matches(pattern[1:], name[1:])


@settings(max_examples=500)
@given(st.text("ab/*", min_size=1, max_size=9), st.text("ab/", max_size=9))
def test_a_pattern_selects_by_the_rule(pattern: str, name: str) -> None:
    # Of three stars the first two are the double one, as in the rule.
    assert Matcher(pattern)(name) == matches(pattern, name)


def test_a_hostile_pattern_takes_no_time() -> None:
    name = "a" * 3000
    start = time.process_time()
    assert not Matcher("*a*a*a*a*a*b")(name)
    assert not Matcher("**a**a**a**a**b")(name)
    assert time.process_time() - start < 5
