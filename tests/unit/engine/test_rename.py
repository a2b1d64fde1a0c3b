"""Stored names to target names, one to one. Spec: 08-protocol."""

from __future__ import annotations

from typing import Any

import pytest

from ckptfmt.engine.adapter import StoredLeaf
from ckptfmt.engine.rename import renamed_keys, renamed_leaves
from ckptfmt.errors import UsageError


def renamed(names: list[str], rename: Any) -> list[str]:
    made, changed = renamed_leaves([StoredLeaf(name) for name in names], rename)
    assert changed == {n: m.name for n, m in zip(names, made) if n != m.name}
    return [leaf.name for leaf in made]


@pytest.mark.parametrize(
    ("names", "rename", "expected"),
    [
        (["a/w", "b"], {}, ["a/w", "b"]),
        (["a/w", "a/v", "ab"], {"a": "x/y"}, ["x/y/w", "x/y/v", "ab"]),
        (["a/w", "a/v"], {"a": "x", "a/v": "q"}, ["x/w", "q"]),
        (["a/w", "b"], {"": "top"}, ["top/a/w", "top/b"]),
        (["a/w", "a/v"], {"a": ""}, ["w", "v"]),
        (["a/b/c"], {"a/b": "z"}, ["z/c"]),
        (["a", "b"], {"a": "b", "b": "a"}, ["b", "a"]),
        (["a/1", "a/2"], lambda name: name.replace("/", "."), ["a.1", "a.2"]),
        (["", "x"], {"x": "y"}, ["", "y"]),
    ],
)
def test_what_a_rule_makes(names: list[str], rename: Any, expected: list[str]) -> None:
    assert renamed(names, rename) == expected


@pytest.mark.parametrize("rename", [{"a": "b"}, {"a": "c", "b": "c"}, lambda name: "one"])
def test_two_leaves_never_get_one_name(rename: Any) -> None:
    with pytest.raises(UsageError, match="'a'"):
        renamed(["a", "b"], rename)


def test_a_rule_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="'c'"):
        renamed(["a"], {"a": "b", "c": "d"})
    with pytest.raises(UsageError, match="'a/'"):
        renamed(["a/x"], {"a/": "b/"})


def test_a_rule_hidden_behind_longer_ones_matches_nothing() -> None:
    with pytest.raises(UsageError):
        renamed(["a/x"], {"a": "b", "a/x": "c"})


@pytest.mark.parametrize("wrong", [5, None, b"x"])
def test_a_function_must_give_a_name(wrong: Any) -> None:
    with pytest.raises(UsageError):
        renamed(["a"], lambda name: wrong)


def test_containers_follow_their_leaves() -> None:
    table = {"a": 1, "a/b": 2, "c": 3}
    assert renamed_keys(table, {"a": "x"}) == {"x": 1, "x/b": 2, "c": 3}
    assert renamed_keys(table, {}) == table
    assert renamed_keys(table, {"a/b/w": "y"}) == table
