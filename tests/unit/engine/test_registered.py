"""Registered types: with and without tensors, known and unknown. Spec: 03-names §3.3, §3.5."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ckptfmt.engine import registered
from ckptfmt.engine.registered import register_type
from ckptfmt.engine.tree import ABSENT, EXTEND, flatten, unflatten
from ckptfmt.errors import CkptWarning, CorruptError, UsageError
from ckptfmt.format import parse_value

ARRAY = np.arange(3.0)


@dataclasses.dataclass
class Box:
    weight: Any
    note: Any = None


@dataclasses.dataclass
class Other:
    a: int = 0


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    types, names = dict(registered.BY_TYPE), dict(registered.BY_NAME)
    yield
    registered.BY_TYPE.clear()
    registered.BY_TYPE.update(types)
    registered.BY_NAME.clear()
    registered.BY_NAME.update(names)


def register() -> None:
    register_type(Box, "test.Box", pack=lambda b: vars(b), unpack=lambda state: Box(**state))


def round_trip(tree: Any) -> Any:
    flat = flatten(tree)
    arrays = [source.fetch() for source in flat.tensors]
    leaves = [
        arrays[row] if kind == 0 else parse_value(flat.values[row], EXTEND)
        for kind, row in zip(flat.kinds, flat.rows)
    ]
    return unflatten(flat.names, leaves, {n: (k, a) for n, k, a in flat.containers})


def test_a_registered_type_comes_back_wherever_it_stands() -> None:
    register()
    tree = {
        "a": Box(1),
        "b": [Box(2, Box(3))],
        "c": Box(ARRAY, [Box(ARRAY)]),
        "d": {"e": Box(ARRAY)},
    }
    assert flatten(tree).names == [
        "a",
        "b",
        "c/weight",
        "c/note/0/weight",
        "c/note/0/note",
        "d/e/weight",
        "d/e/note",
    ]
    assert round_trip(tree) == tree


def test_a_type_that_packs_into_a_list_keeps_its_order() -> None:
    register_type(
        Box, "test.List", pack=lambda b: (b.weight, b.note), unpack=lambda state: Box(*state)
    )
    assert round_trip([Box(ARRAY, 5)]) == [Box(ARRAY, 5)]


def test_an_unknown_type_is_its_plain_data_with_a_warning() -> None:
    """M03-9, M03-14."""
    register()
    flat = flatten({"v": Box(1), "c": Box(ARRAY)})
    registered.BY_NAME.clear()
    with pytest.warns(CkptWarning, match=r"test\.Box"):
        assert parse_value(flat.values[0], EXTEND, where="v") == {"weight": 1, "note": None}
    with pytest.warns(CkptWarning, match=r"c is of the registered type 'test\.Box'"):
        made = unflatten(flat.names, [0, 1, 2], {n: (k, a) for n, k, a in flat.containers})
    assert made == {"v": 0, "c": {"weight": 1, "note": 2}}


def test_a_part_of_a_registered_type_stays_plain() -> None:
    register()
    flat = flatten({"c": Box(ARRAY, 5)})
    kinds = {n: (k, a) for n, k, a in flat.containers}
    assert unflatten(flat.names, [ARRAY, ABSENT], kinds, partial=True) == {"c": {"weight": ARRAY}}


def test_unpack_that_fails_makes_the_data_corrupt() -> None:
    register_type(Box, "test.Box", pack=vars, unpack=lambda state: Box(state["gone"]))
    flat = flatten([Box(1)])
    with pytest.raises(CorruptError, match="KeyError"):
        parse_value(flat.values[0], EXTEND)
    with pytest.raises(CorruptError, match=r"test\.Box"):
        round_trip({"c": Box(ARRAY)})


def test_pack_that_fails_is_a_usage_error_with_the_path() -> None:
    register_type(Box, "test.Box", pack=lambda b: b.note.missing, unpack=Box)
    with pytest.raises(UsageError, match="AttributeError") as caught:
        flatten({"a": {"b": Box(1)}})
    assert caught.value.where == "a/b"


def test_a_lone_tensor_is_no_packed_form() -> None:
    register_type(Box, "test.Box", pack=lambda b: b.weight, unpack=Box)
    with pytest.raises(UsageError, match="dict, list or tuple") as caught:
        flatten({"a": Box(ARRAY)})
    assert caught.value.where == "a"


def test_a_subclass_is_not_registered_with_its_base() -> None:
    register()

    class Sub(Box):
        pass

    with pytest.raises(UsageError, match="not registered"):
        flatten({"a": Sub(1)})


def test_a_class_statement_that_ran_again_takes_the_name_over() -> None:
    register()
    again = type("Box", (), {"__module__": Box.__module__, "__qualname__": Box.__qualname__})
    register_type(again, "test.Box", pack=lambda b: {}, unpack=lambda state: again())
    assert type(round_trip([again()])[0]) is again
    with pytest.raises(UsageError):
        flatten([Box(1)])


@pytest.mark.parametrize(
    "cls", [int, dict, np.ndarray, np.float32, list, object, type, "Box", None]
)
def test_types_that_trees_hold_anyway_cannot_be_registered(cls: Any) -> None:
    with pytest.raises(UsageError) as caught:
        register_type(cls, "test.X", pack=lambda x: x, unpack=lambda x: x)
    assert caught.value.kind == "usage-register-type"


def test_a_name_belongs_to_one_type() -> None:
    register()
    with pytest.raises(UsageError, match="another registered type"):
        register_type(Other, "test.Box", pack=vars, unpack=lambda state: Other(**state))


@pytest.mark.parametrize("name", ["", "x" * 256, 5, None])
def test_a_registered_name_is_a_short_text(name: Any) -> None:
    with pytest.raises(UsageError):
        register_type(Other, name, pack=vars, unpack=lambda state: Other(**state))
