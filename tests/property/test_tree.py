"""Any tree comes back from its leaves: names, order, kinds, ties. Spec: 03-names."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptfmt.engine.tree import ABSENT, EXTEND, FlatTree, flatten, unflatten, walk
from ckptfmt.format import parse_key, parse_value, split_name

Point = collections.namedtuple("Point", ["x", "y"])
POOL: list[NDArray[Any]] = [
    np.arange(6.0).reshape(2, 3),
    np.array(3, np.int8),
    np.zeros((0, 2), np.float16),
    np.array([math.nan, -0.0], np.float32),
    np.array(["a", "é"], object),
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.text("~/0123", max_size=3)
KEYS: st.SearchStrategy[Any] = st.one_of(
    *(TEXT, st.integers(-2, 12), st.booleans(), st.none(), st.floats(allow_nan=False)),
    *(st.binary(max_size=2), st.tuples(TEXT, st.integers(0, 2))),
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | TEXT
    | st.binary(max_size=3)
    | st.sampled_from(
        [np.float32(1.5), np.str_("a\0"), np.datetime64("2020", "ns"), 2**70, "x" * 5000]
    )
    | st.frozensets(st.integers(0, 3), max_size=2)
)
LEAVES = SCALARS | st.sampled_from(POOL)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    dicts = st.dictionaries(KEYS, inner, max_size=4)
    return (
        items
        | items.map(tuple)
        | st.tuples(inner, inner).map(lambda pair: Point(*pair))
        | dicts
        | dicts.map(collections.OrderedDict)
        | dicts.map(lambda d: collections.defaultdict(list, d))
    )


TREES = st.recursive(LEAVES, containers, max_leaves=12)


def stored_leaves(flat: FlatTree) -> list[Any]:
    """What a reader has for the leaves: one array a tensor, values parsed from their bytes."""
    arrays = [source.fetch() for source in flat.tensors]
    made: list[Any] = []
    for name, kind, row in zip(flat.names, flat.kinds, flat.rows):
        if kind == 0:
            made.append(arrays[row])
        else:
            data = flat.values[row] if kind == 1 else arrays[row].tobytes()
            made.append(parse_value(data, EXTEND, where=name))
    return made


def rebuilt(flat: FlatTree) -> Any:
    kinds = {name: (kind, argument) for name, kind, argument in flat.containers}
    return unflatten(flat.names, stored_leaves(flat), kinds)


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, all the way down."""
    if isinstance(a, np.ndarray):
        if a.dtype == object:
            return bool(a.tolist() == b.tolist())
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, tuple) and hasattr(a, "_fields"):
        return (
            type(a).__name__ == type(b).__name__
            and a._fields == b._fields
            and same(tuple(a), tuple(b))
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, frozenset):
        return bool(a == b)
    return repr(a) == repr(b)


@settings(max_examples=300)
@given(TREES)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    flat = flatten(tree)
    back = rebuilt(flat)
    assert same(back, tree), (back, tree)


@given(TREES)
def test_the_same_tree_gives_the_same_columns(tree: Any) -> None:
    """M03-10: what comes back flattens to the same bytes."""
    one, two = flatten(tree), flatten(rebuilt(flatten(tree)))
    assert one.names == two.names
    assert one.kinds == two.kinds
    assert one.rows == two.rows
    assert one.values == two.values
    assert one.containers == two.containers
    assert [(t.dtype, t.shape) for t in one.tensors] == [(t.dtype, t.shape) for t in two.tensors]


@given(TREES)
def test_names_are_unique_and_each_part_is_a_key(tree: Any) -> None:
    flat = flatten(tree)
    assert len(set(flat.names)) == len(flat.names)
    for name in flat.names:
        for part in split_name(name):
            parse_key(part)


@given(TREES)
def test_rows_are_numbered_by_first_use(tree: Any) -> None:
    flat = flatten(tree)
    for of in ((0, 2), (1,)):
        rows = [row for kind, row in zip(flat.kinds, flat.rows) if kind in of]
        first = list(dict.fromkeys(rows))
        assert first == list(range(len(first)))


@given(TREES)
def test_arrays_are_tied_exactly_where_they_are_one_memory(tree: Any) -> None:
    flat = flatten(tree)
    arrays = [visit.obj for visit in walk(tree) if visit.kind == "tensor"]
    rows = [row for kind, row in zip(flat.kinds, flat.rows) if kind == 0]
    assert len(arrays) == len(rows)
    for i, a in enumerate(arrays):
        for j, b in enumerate(arrays[:i]):
            assert (rows[i] == rows[j]) == (a is b and a.size > 0)


@given(TREES)
def test_walking_meets_the_leaves_that_flattening_makes(tree: Any) -> None:
    visits = list(walk(tree))
    assert [visit.name for visit in visits] == flatten(tree).names
    for visit in visits:
        if visit.name:
            assert visit.parent[visit.key] is visit.obj


@given(TREES, st.data())
def test_a_part_of_a_tree_is_the_tree_without_the_rest(tree: Any, data: st.DataObject) -> None:
    flat = flatten(tree)
    leaves = stored_leaves(flat)
    chosen = data.draw(st.sets(st.integers(0, len(leaves) - 1)))
    kinds = {name: (kind, argument) for name, kind, argument in flat.containers}
    some = [leaf if i in chosen else ABSENT for i, leaf in enumerate(leaves)]
    part = unflatten(flat.names, some, kinds, partial=True)
    assert same(part, pruned(tree, iter(range(len(leaves))), chosen, leaves))


def pruned(tree: Any, counter: Any, chosen: set[int], leaves: list[Any]) -> Any:
    """The definition, by recursion over the tree itself."""
    absent = object()

    def go(obj: Any) -> Any:
        at = [visit for visit in walk(obj) if visit.name == ""]
        if at:
            number = next(counter)
            return leaves[number] if number in chosen else absent
        items = list(obj.items()) if isinstance(obj, dict) else list(enumerate(obj))
        made = [(key, go(item)) for key, item in items]
        kept = [(key, item) for key, item in made if item is not absent]
        if not kept:
            return absent
        if isinstance(obj, dict):
            if isinstance(obj, collections.defaultdict):
                return collections.defaultdict(obj.default_factory, kept)
            return type(obj)(kept)
        positions = [key for key, _ in kept]
        whole = len(kept) == len(obj)
        if positions != list(range(len(kept))) or not whole:
            return dict(kept)
        if isinstance(obj, Point):
            return Point(*(item for _, item in kept))
        return type(obj)(item for _, item in kept)

    found = go(tree)
    if found is absent:
        return ABSENT if len(leaves) == 1 and next(walk(tree)).name == "" else {}
    return found
