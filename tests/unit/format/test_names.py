"""Names: one text for each key, one key for each text. Spec: 02-store, 03-names."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptfmt.errors import CorruptError, UsageError
from ckptfmt.format.names import (
    STEP_MAX,
    check_checkpoint_name,
    check_tag,
    escape_key,
    index_key,
    join_name,
    parse_index_key,
    parse_key,
    split_name,
    step_name,
    step_of,
)

SCALAR_KEYS = (
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.text('~/0123nibfxt[]",', max_size=6)
    | st.integers()
    | st.booleans()
    | st.none()
    | st.floats()
    | st.binary(max_size=8)
)
KEYS = st.recursive(SCALAR_KEYS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


def same(a: Any, b: Any) -> bool:
    """Equal with equal types, all the way down; NaN is NaN, -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return bool(a == b)


@given(KEYS)
@example("~3i1")
@example("~2")
@example("")
@example(-0.0)
@example(math.nan)
def test_a_key_comes_back_from_its_part(key: object) -> None:
    part = escape_key(key)
    assert same(parse_key(part), key)
    assert "/" not in part
    assert part


@given(KEYS, KEYS)
def test_two_keys_have_two_parts(a: object, b: object) -> None:
    assert (escape_key(a) == escape_key(b)) == same(a, b)


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("encoder.0.weight", "encoder.0.weight"),
        ("", "~2"),
        ("a/b~c", "a~1b~0c"),
        ("~3i1", "~03i1"),
        ("0", "0"),
        (25, "~3i25"),
        (-7, "~3i-7"),
        (True, "~3b1"),
        (None, "~3n"),
        (0.5, "~3f0.5"),
        (-0.0, "~3f-0.0"),
        (math.inf, "~3finf"),
        (b"\x00\xff", "~3x00ff"),
        ((1, "a"), '~3t["~03i1","a"]'),
        (("x/y",), '~3t["x~01y"]'),
        ((), "~3t[]"),
        ("é", "é"),
    ],
)
def test_parts_are_those_of_the_specification(key: object, part: str) -> None:
    assert escape_key(key) == part
    assert same(parse_key(part), key)


@pytest.mark.parametrize(
    "key",
    [
        np.int64(1),
        np.str_("a"),
        np.float64(1.0),
        Colour.RED,
        Text("a"),
        frozenset(),
        object(),
        "\ud800",
        ("a", np.int64(1)),
        10**4001,
        ((((((((((),),),),),),),),),),
    ],
    ids=lambda key: type(key).__name__,
)
def test_keys_that_would_come_back_otherwise_are_refused(key: object) -> None:
    """M03-4."""
    with pytest.raises(UsageError) as caught:
        escape_key(key)
    assert caught.value.kind == "usage-key"


@pytest.mark.parametrize(
    "part",
    [
        *("", "~", "~4", "a~", "~2x", "~3", "~3q1", "~3i", "~3i01", "~3i+1", "~3i 1", "~3i1_0"),
        *("~3b2", "~3b", "~3n0", "~3f1", "~3fNaN", "~3f1.50", "~3xF", "~3xFF", "~3x0 0", "~3t"),
        *("~3t[1]", "~3t{}", '~3t["a", "b"]', '~3t["~"]', '~3t["\\ud800"]', "~3i" + "1" * 5000),
        *("~3t[" * 2000, "~3i-0", '~3t["~03"]', '~3t[""]'),
    ],
    ids=lambda part: part[:20],
)
def test_a_part_that_no_key_has_is_corrupt(part: str) -> None:
    """M03-1."""
    with pytest.raises(CorruptError) as caught:
        parse_key(part)
    assert caught.value.kind == "corrupt-name"


@given(st.text(max_size=30) | st.text('~0123tinbfx[]",/-', max_size=12))
def test_any_text_is_a_key_or_corrupt(part: str) -> None:
    """M03-1."""
    try:
        key = parse_key(part)
    except CorruptError:
        return
    if part.isascii():
        assert escape_key(key) == part


@given(st.lists(KEYS, min_size=1, max_size=4))
def test_a_name_splits_into_its_parts(keys: list[object]) -> None:
    name = ""
    for key in keys:
        name = join_name(name, escape_key(key))
    assert split_name(name) == [escape_key(key) for key in keys]


def test_the_root_has_the_empty_name() -> None:
    assert split_name("") == []
    assert join_name("", "a") == "a"


@pytest.mark.parametrize("name", ["/", "a//b", "/a", "a/"])
def test_a_name_with_an_empty_part_is_corrupt(name: str) -> None:
    """M03-1."""
    with pytest.raises(CorruptError, match="not a key"):
        split_name(name)


@pytest.mark.parametrize("name", ["main", "best.v2", "0-a", "a" * 120, "step-0000000000000007"])
def test_legal_checkpoint_names(name: str) -> None:
    check_checkpoint_name(name)


@pytest.mark.parametrize(
    ("name", "offer"),
    [
        ("Best Model", "best-model"),
        ("con", "run-con"),
        ("nul.txt", "run-nul.txt"),
        ("lpt9", "run-lpt9"),
        ("7", "run-7"),
        ("latest", "run-latest"),
        ("step-7", "at-7"),
        ("step-9999999999999999", "at-9999999999999999"),
        ("a.", "a"),
        ("", "main"),
        ("é", "main"),
        ("../x", "x"),
        ("a/b", "a-b"),
        ("a~0", "a-0"),
        ("a\n", "a"),
    ],
)
def test_an_illegal_checkpoint_name_is_refused_with_a_legal_offer(name: str, offer: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_checkpoint_name(name)
    assert caught.value.kind == "usage-name"
    assert repr(offer) in str(caught.value)
    check_checkpoint_name(offer, chosen=True)


@given(st.text(max_size=200))
def test_every_offer_is_legal(name: str) -> None:
    try:
        check_checkpoint_name(name, chosen=True)
    except UsageError as error:
        check_checkpoint_name(error.do.split("'")[1], chosen=True)


def test_a_step_cannot_be_chosen_as_name_or_tag() -> None:
    name = step_name(3)
    check_checkpoint_name(name)
    for refuse in (check_tag, lambda n: check_checkpoint_name(n, chosen=True)):
        with pytest.raises(UsageError, match="step="):
            refuse(name)


def test_main_cannot_be_chosen_as_tag() -> None:
    check_checkpoint_name("main", chosen=True)
    with pytest.raises(UsageError, match=r"not main, the name of a save.*'best'") as caught:
        check_tag("main")
    assert caught.value.kind == "usage-name"


@given(st.text(max_size=200))
def test_every_offer_of_a_tag_is_legal(tag: str) -> None:
    try:
        check_tag(tag)
    except UsageError as error:
        check_tag(error.do.split("'")[1])


@given(st.integers(0, STEP_MAX))
def test_a_step_comes_back_from_its_name(step: int) -> None:
    assert step_of(step_name(step)) == step


def test_names_of_steps_sort_as_steps_do() -> None:
    steps = [0, 9, 10, 999, 1000, STEP_MAX]
    assert sorted(map(step_name, steps)) == list(map(step_name, steps))


@pytest.mark.parametrize("step", [-1, STEP_MAX + 1, 1.0, True, "1", None, np.int64(3)])
def test_what_is_no_step_is_refused(step: Any) -> None:
    with pytest.raises(UsageError) as caught:
        step_name(step)
    assert caught.value.kind == "usage-step"


@pytest.mark.parametrize("name", ["main", "step-7", "step-00000000000000007", "step-9" * 3])
def test_other_names_are_of_no_step(name: str) -> None:
    assert step_of(name) is None


@given(st.integers(0, 2**63 - 1), st.sampled_from(["main", "a.b-c_d", step_name(12)]))
def test_an_index_key_comes_back(generation: int, name: str) -> None:
    key = index_key(name, generation)
    assert key.startswith("checkpoints/")
    assert parse_index_key(key) == (name, generation)
    assert parse_index_key(key.partition("/")[2]) == (name, generation)
    assert parse_index_key(key.replace("checkpoints", "quarantine")) == (name, generation)


@pytest.mark.parametrize(
    "key",
    [
        *(
            "checkpoints/main~00.index",
            "main~.index",
            "main~-1.index",
            "main.index",
            "Main~0.index",
        ),
        *("main~0.index.tmp", "main~0.indexx", "x/main~0.index", "con~0.index", "step-7~0.index"),
        *("main~9223372036854775808.index", "main~0.index\n", "checkpoints/", "", "latest~0.index"),
    ],
)
def test_keys_of_another_pattern_are_not_ours(key: str) -> None:
    assert parse_index_key(key) is None
