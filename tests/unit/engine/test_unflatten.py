"""Leaves back to a tree, from names and containers that nobody vouches for. Spec: 03-names §3.3."""

from __future__ import annotations

import collections
import time
from typing import Any

import pytest

from ckptfmt.engine.tree import ABSENT, unflatten
from ckptfmt.errors import CorruptError
from ckptfmt.format import pack_value

NIL = pack_value(None)
POINT = pack_value(["Point", ["x", "y"]])


def build(names: list[str], containers: dict[str, tuple[str, bytes]], **options: Any) -> Any:
    return unflatten(names, list(range(len(names))), containers, **options)


def test_every_kind_of_container_is_rebuilt() -> None:
    names = ["l/0", "l/1", "t/0", "p/0", "p/1", "o/b", "o/a", "d/~3i1", "n/x"]
    kinds = {
        "l": ("list", NIL),
        "t": ("tuple", NIL),
        "p": ("namedtuple", POINT),
        "o": ("odict", NIL),
        "d": ("defaultdict", pack_value("list")),
    }
    made = build(names, kinds)
    assert made == {
        "l": [0, 1],
        "t": (2,),
        "p": (3, 4),
        "o": collections.OrderedDict(b=5, a=6),
        "d": {1: 7},
        "n": {"x": 8},
    }
    assert type(made["o"]) is collections.OrderedDict
    assert made["d"].default_factory is list
    assert (made["p"].x, made["p"].y) == (3, 4)
    assert type(made["p"]).__name__ == "Point"


def test_the_root_may_be_a_leaf_or_any_container() -> None:
    assert unflatten([""], ["x"], {}) == "x"
    assert build(["0", "1"], {"": ("list", NIL)}) == [0, 1]
    assert build(["0", "1"], {}) == {"0": 0, "1": 1}


@pytest.mark.parametrize(
    ("names", "containers"),
    [
        (["a", "a"], {}),
        (["a", "a/b"], {}),
        (["a/b", "a"], {}),
        (["a/b/c", "x", "a/b"], {}),
        ([], {}),
        (["a"], {"b": ("list", NIL)}),
        (["a"], {"a": ("list", NIL)}),
        ([""], {"": ("list", NIL)}),
        (["a/1", "a/0"], {"a": ("list", NIL)}),
        (["a/0", "a/2"], {"a": ("list", NIL)}),
        (["a/00"], {"a": ("list", NIL)}),
        (["a/x"], {"a": ("tuple", NIL)}),
        (["a/~3i0"], {"a": ("list", NIL)}),
        (["a/0"], {"a": ("namedtuple", POINT)}),
        (["a/0", "a/1", "a/2"], {"a": ("namedtuple", POINT)}),
        (["a/~3i1", "a/~3b1"], {}),
        (["a/~3i0", "a/~3f0.0"], {"a": ("odict", NIL)}),
    ],
)
def test_names_that_make_no_tree_are_corrupt(
    names: list[str], containers: dict[str, tuple[str, bytes]]
) -> None:
    """M03-5, M03-6."""
    with pytest.raises(CorruptError) as caught:
        build(names, containers)
    assert caught.value.kind == "corrupt-structure"


@pytest.mark.parametrize("name", ["", "a//b", "/a", "a/", "a/~", "~3i01"])
def test_names_with_wrong_parts_are_corrupt(name: str) -> None:
    """M03-1."""
    with pytest.raises(CorruptError) as caught:
        build(["x", name], {})
    assert caught.value.kind in ("corrupt-name", "corrupt-structure")


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        *(("list", 1), ("tuple", []), ("odict", "list"), ("dict", 1), ("defaultdict", "eval")),
        *(
            ("defaultdict", 1),
            ("namedtuple", None),
            ("namedtuple", ["A"]),
            ("namedtuple", ["A", [1]]),
        ),
        *(
            ("namedtuple", ["A", ["class"]]),
            ("namedtuple", ["a b", ["x"]]),
            ("namedtuple", [1, ["x"]]),
        ),
        *(("type", None), ("type", ["a", "list"]), ("type", [1, "list", None])),
    ],
)
def test_a_wrong_argument_of_a_container_is_corrupt(kind: str, argument: object) -> None:
    """M03-7, M03-8."""
    with pytest.raises(CorruptError) as caught:
        build(["a/0"], {"a": (kind, pack_value(argument))})
    assert caught.value.kind == "corrupt-value"


def test_an_unknown_kind_of_container_is_corrupt() -> None:
    """M03-7."""
    for kind, argument in (("set", NIL), ("type", pack_value(["a", "type", None]))):
        with pytest.raises(CorruptError) as caught:
            build(["a/0"], {"a": (kind, argument)})
        assert caught.value.kind == "corrupt-column-range"


def test_an_argument_that_is_no_value_is_corrupt() -> None:
    with pytest.raises(CorruptError):
        build(["a/0"], {"a": ("list", b"\xc1")})


def test_a_list_with_gaps_becomes_its_positions() -> None:
    kinds = {"l": ("list", NIL), "p": ("namedtuple", POINT), "t": ("tuple", NIL)}
    names = ["l/0", "l/1", "l/2", "p/0", "p/1", "t/0", "t/1"]
    leaves = ["l0", ABSENT, "l2", "p0", ABSENT, "t0", ABSENT]
    assert unflatten(names, leaves, kinds, partial=True) == {
        "l": {0: "l0", 2: "l2"},
        "p": {0: "p0"},
        "t": {0: "t0"},  # the end is a gap too
    }
    assert unflatten(["l/1", "l/10"], [1, 10], kinds, partial=True) == {"l": {1: 1, 10: 10}}


def test_a_container_without_a_chosen_leaf_is_left_out() -> None:
    leaves = [ABSENT, ABSENT, 2]
    assert unflatten(["a/b/0", "a/c", "d"], leaves, {"a/b": ("list", NIL)}, partial=True) == {
        "d": 2
    }
    assert unflatten(["a"], [ABSENT], {}, partial=True) == {}


def test_a_deep_name_needs_no_stack_and_little_memory() -> None:
    made = build(["/".join("a" * 100_000)], {})
    for _ in range(1000):
        made = made["a"]
    assert list(made) == ["a"]
    while isinstance(made, dict):  # taking it apart in one go would recurse in C
        made = made["a"]


def test_100_000_leaves_are_put_back_in_a_moment() -> None:
    names = [f"layer{i}/w{j}" for i in range(1000) for j in range(100)]
    start = time.process_time()
    made = unflatten(names, names, {})
    assert time.process_time() - start < 2  # 0.04 s alone on the machine
    assert made["layer999"]["w99"] == "layer999/w99"
