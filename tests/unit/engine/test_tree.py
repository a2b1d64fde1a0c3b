"""Flattening a tree: what is a leaf, what is refused, what is tied. Spec: 03-names."""

from __future__ import annotations

import collections
import time
import types
from typing import Any

import numpy as np
import pytest

from ckptfmt.engine.adapter import TensorSource
from ckptfmt.engine.tree import EXTEND, FlatTree, find_peers, flatten, walk
from ckptfmt.errors import UsageError
from ckptfmt.format import parse_value

ARRAY = np.arange(6.0)


def value_of(flat: FlatTree, name: str) -> Any:
    row = flat.names.index(name)
    assert flat.kinds[row] == 1
    return parse_value(flat.values[flat.rows[row]], EXTEND)


def test_a_list_without_a_tensor_is_one_leaf() -> None:
    tree: dict[str, Any] = {
        "a": [1, {"b": (2, [])}],
        "b": [],
        "c": {},
        "d": (),
        "e": {1, 2},
        "f": None,
    }
    flat = flatten(tree)
    assert flat.names == list("abcdef")
    assert flat.containers == []
    assert value_of(flat, "a") == [1, {"b": (2, [])}]
    assert value_of(flat, "c") == {}


def test_a_list_with_a_tensor_anywhere_below_is_a_container() -> None:
    flat = flatten({"l": [1, (2, {"x": {"y": ARRAY}}), [3]]})
    assert flat.names == ["l/0", "l/1/0", "l/1/1/x/y", "l/2"]
    assert [(name, kind) for name, kind, _ in flat.containers] == [("l", "list"), ("l/1", "tuple")]


def test_a_dict_is_walked_into_with_or_without_tensors() -> None:
    assert flatten({"a": {"b": {"c": 1}}}).names == ["a/b/c"]


def test_keys_of_every_kind_have_their_own_name() -> None:
    flat = flatten({1: 0, "1": 0, True + 1: 0, None: 0, "": 0, "a/b": 0, "~": 0, (1, "x"): 0})
    assert flat.names == ["~3i1", "1", "~3i2", "~3n", "~2", "a~1b", "~0", '~3t["~03i1","x"]']


def test_the_root_leaf_has_the_empty_name() -> None:
    trees: list[Any] = [5, ARRAY, [], [1, 2], {}]
    for tree in trees:
        assert flatten(tree).names == [""]


def test_a_long_value_is_a_tensor_of_its_bytes() -> None:
    flat = flatten({"a": list(range(5000)), "b": "x" * 4093, "c": "x" * 4094})
    assert flat.kinds == [2, 1, 2]
    assert flat.rows == [0, 0, 1]
    source = flat.tensors[0]
    assert source.dtype == "uint8"
    assert source.shape == (len(source.fetch()),)
    assert parse_value(source.fetch().tobytes()) == list(range(5000))


def test_one_memory_is_one_tensor_and_equal_bytes_are_not() -> None:
    base = np.zeros(10)
    flat = flatten(
        {
            "a": base,
            "again": base,
            "whole view": base[:],
            "part": base[:5],
            "same part": base[0:5],
            "other part": base[5:],
            "reversed": base[::-1],
            "cast": base.view("i8"),
            "shaped": base.reshape(2, 5),
            "copy": base.copy(),
            "empty": base[:0],
            "also empty": base[:0],
        }
    )
    assert flat.rows == [0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8]


def test_two_views_of_a_buffer_that_is_no_array_are_tied() -> None:
    buffer = bytearray(16)
    one, two = np.frombuffer(buffer, "f4"), np.frombuffer(buffer, "f4")
    assert flatten([one, two, np.frombuffer(buffer, "i4")]).rows == [0, 0, 1]


def test_a_numpy_scalar_is_a_value_and_a_0d_array_a_tensor() -> None:
    flat = flatten({"scalar": np.float32(1), "array": np.array(1, "f4")})
    assert flat.kinds == [1, 0]
    assert flat.tensors[0].shape == ()
    assert flat.tensors[0].fetch().shape == ()


def test_every_layout_is_fetched_in_c_order() -> None:
    base = np.arange(12, dtype="i4").reshape(3, 4)
    for array in (np.asfortranarray(base), base.T, base[::-1], base[:, ::2], base.astype(">i4")):
        (source,) = flatten([array]).tensors
        fetched = source.fetch()
        assert fetched.flags.c_contiguous
        assert fetched.dtype == np.dtype("i4")
        assert fetched.tolist() == array.tolist()


def test_fetching_copies_nothing_where_it_need_not() -> None:
    assert np.shares_memory(flatten([ARRAY]).tensors[0].fetch(), ARRAY)


def test_objects_of_text_are_marked_to_come_back_as_objects() -> None:
    tree = {"n": 0, "o": np.array(["a"], object), "s": np.array(["a"], np.dtypes.StringDType())}
    flat = flatten(tree)
    assert [source.dtype for source in flat.tensors] == ["string", "string"]
    assert {
        key: [(row, parse_value(v)) for row, v in rows] for key, rows in flat.attributes.items()
    } == {"numpy.object": [(1, True)]}


def test_a_memmap_is_an_array(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", "f4", "w+", shape=(3,))
    assert flatten({"m": mapped}).tensors[0].shape == (3,)


class Counting:
    """State in the manner of PyTorch: `get` and `set` on the object itself."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"n": 3, "w": ARRAY}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Loader:
    def get_state(self) -> list[int]:
        return [1, 2]

    def set_state(self, state: list[int]) -> None: ...


def test_an_array_that_stands_twice_in_a_dict_of_arrays_is_one_tensor() -> None:
    one, other = np.ones(3), np.zeros(3)
    flat = flatten({"a": {"x": one, "y": other, "z": one}, "b": {"u": other, "v": np.ones(2)}})
    assert flat.rows == [0, 1, 0, 1, 2]
    assert len(flat.tensors) == 3


def test_a_stateful_object_is_its_state() -> None:
    flat = flatten({"c": Counting(), "l": [Loader(), 5], "w": ARRAY})
    assert flat.names == ["c/n", "c/w", "l/0", "l/1", "w"]
    assert flat.rows[1] == flat.rows[4]  # tied across objects
    assert value_of(flat, "l/0") == [1, 2]


def test_a_class_is_no_stateful_object() -> None:
    with pytest.raises(UsageError, match="code cannot be saved"):
        flatten({"c": Counting})


def test_peers_are_found_by_name_wherever_they_lie() -> None:
    one, two = Counting(), Loader()
    tree = {"a": {"b": [1, one]}, "c": (two, ARRAY)}
    assert find_peers(tree) == {id(None): [("a/b/1", one), ("c/0", two)]}


def test_walking_tells_parents_and_keys() -> None:
    inner = [1, ARRAY]
    tree = {"a": inner, 5: {"b": Loader()}}
    visits = [(v.name, v.key, v.kind) for v in walk(tree)]
    assert visits == [("a/0", 0, "value"), ("a/1", 1, "tensor"), ("~3i5/b", "b", "stateful")]
    assert next(walk(tree)).parent is inner


def test_a_source_in_the_tree_is_a_tensor() -> None:
    source = TensorSource("int4", (3,), lambda: ARRAY)
    assert list(flatten({"lazy": source}).tensors) == [source]


class Masked(np.ndarray[Any, Any]):
    pass


@pytest.mark.parametrize(
    ("bad", "where", "text"),
    [
        (object(), "a/b", "register_type"),
        ([ARRAY, {"k": object()}], "a/b/1/k", "register_type"),
        ([1, {"k": object()}], "a/b/1/k", "register_type"),
        (np.ma.masked_array([1.0]), "a/b", "np.asarray"),
        (ARRAY.view(Masked), "a/b", "np.asarray"),
        (np.zeros(2, "f4,i4"), "a/b", "dict of its fields"),
        (np.array([1, None], object), "a/b", "object array"),
        (np.zeros(1, np.longdouble), "a/b", "float64"),
        ({np.int64(1): 0}, "a/b", "as keys"),
        ({float("nan"): 0, -float("nan"): 0}, "a/b", "one name"),
        (collections.deque([ARRAY]), "a/b/0", "array"),
        (types.SimpleNamespace(w=ARRAY), "a/b/w", "array"),
        (collections.defaultdict(lambda: ARRAY, w=ARRAY), "a/b", "factory"),
        ("\ud800", "a/b", "surrogate"),
        (lambda: 0, "a/b", "code"),
        (iter([]), "a/b", "list_iterator"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_come_back_is_refused_with_its_path(bad: object, where: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        flatten({"ok": ARRAY, "a": {"b": bad}})
    assert caught.value.where == where
    assert text in str(caught.value)


def test_an_error_at_the_root_says_so() -> None:
    with pytest.raises(UsageError, match="the tree's root"):
        flatten(object())


def loops() -> list[Any]:
    mapping: dict[str, Any] = {"a": ARRAY}
    mapping["me"] = mapping
    sequence: list[Any] = [ARRAY]
    sequence.append(sequence)
    plain: list[Any] = [1]
    plain.append(plain)
    deep: Any = ARRAY
    flat: Any = 1
    for _ in range(150):
        deep, flat = [deep], {"k": flat}
    return [mapping, sequence, plain, deep, flat]


@pytest.mark.parametrize("number", range(5))
def test_loops_and_bottomless_trees_are_refused(number: int) -> None:
    with pytest.raises(UsageError, match="nested deeper"):
        flatten({"x": loops()[number]})


def test_one_object_in_two_places_is_no_loop() -> None:
    shared = {"w": ARRAY, "l": [1]}
    flat = flatten({"a": shared, "b": [shared, shared]})
    assert flat.names == ["a/w", "a/l", "b/0/w", "b/0/l", "b/1/w", "b/1/l"]


def test_100_000_small_arrays_flatten_in_about_half_a_second() -> None:
    tree = {f"layer{i}": {f"w{j}": np.zeros(4, "f4") for j in range(100)} for i in range(1000)}
    start = time.process_time()
    flat = flatten(tree)
    seconds = time.process_time() - start
    assert len(flat.tensors) == 100_000
    assert seconds < 5  # 0.4 s alone on the machine; the bound only catches what grows faster
