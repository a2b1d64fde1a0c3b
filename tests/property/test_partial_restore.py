"""Part of a restore is the restore of a part; a failed one changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.engine.select import Matcher
from ckptfmt.testing import difference

KEYS = st.sampled_from(["a", "b", "enc", "w", "x.y"])
SHAPES = st.sampled_from([(), (3,), (2, 2), (0, 2)])


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from([np.float32, np.int64]))
    return np.full(draw(SHAPES), draw(st.integers(1, 9)), dtype)


LEAVES = arrays() | st.integers(1, 9)
TREES: Any = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES, lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3), max_leaves=6
    ),
    min_size=1,
    max_size=4,
)


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, item in tree.items():
        if isinstance(item, dict):
            made |= leaves(item, f"{prefix}{key}/")
        else:
            made[prefix + key] = item
    return made


def zeroed(tree: Any) -> Any:
    return {
        key: zeroed(item)
        if isinstance(item, dict)
        else np.zeros_like(item)
        if isinstance(item, np.ndarray)
        else 0
        for key, item in tree.items()
    }


@settings(max_examples=80)
@given(TREES, st.data())
def test_a_part_restored_is_that_part_of_the_whole(tree: Any, data: st.DataObject) -> None:
    store = ckptfmt.Store("memory://")
    ckptfmt.save(tree, store, durable=False)
    every = leaves(tree)
    names = sorted({name[:at] for name in every for at, c in enumerate(name + "/") if c == "/"})
    pattern = data.draw(st.sampled_from([*names, "**", "*", "*/w", "**/a"]))
    matcher = Matcher(pattern)
    expected = {name for name in every if matcher(name)}
    target = zeroed(tree)
    if not expected:
        with pytest.raises(ckptfmt.NotFoundError):
            ckptfmt.restore(target, store, names=pattern)
        return
    report = ckptfmt.restore(target, store, names=pattern)
    assert set(report.matched) == expected
    blank = leaves(zeroed(tree))
    for name, leaf in leaves(target).items():
        assert not difference(leaf, every[name] if name in expected else blank[name]), name


@settings(max_examples=120)
@given(TREES, TREES, st.booleans())
def test_a_restore_fills_all_or_raises_and_changes_nothing(
    saved: Any, target: Any, strict: bool
) -> None:
    store = ckptfmt.Store("memory://")
    ckptfmt.save(saved, store, durable=False)
    target = zeroed(target)
    before = copy.deepcopy(target)
    plan = ckptfmt.plan(target, store)
    assert not difference(target, before)
    wrong = bool(plan.shapes or plan.dtypes or plan.kinds or not plan.matched)
    names = bool(plan.missing or plan.unexpected)
    if wrong or (strict and names):
        with pytest.raises(ckptfmt.MismatchError) as caught:
            ckptfmt.restore(target, store, strict=strict)
        assert not difference(target, before)
        assert caught.value.report == plan
        return
    assert ckptfmt.restore(target, store, strict=strict) == plan
    have, blank = leaves(saved), leaves(before)
    for name, leaf in leaves(target).items():
        assert not difference(leaf, have[name] if name in plan.matched else blank[name]), name
    assert set(plan.matched) | set(plan.missing) == set(blank)
    assert set(plan.matched) | set(plan.unexpected) == set(have)


@settings(max_examples=40)
@given(TREES)
def test_load_like_and_restore_and_load_agree(tree: Any) -> None:
    store = ckptfmt.Store("memory://")
    ckptfmt.save(tree, store, durable=False)
    like = zeroed(tree)
    loaded = ckptfmt.load(store, like=like)
    ckptfmt.restore(like, store)
    assert not difference(loaded, tree)
    assert not difference(like, tree)
    assert not difference(ckptfmt.load(store), tree)
