"""Plain arrays stand for themselves in a flat tree, with the same outcome as any other tensor."""

from __future__ import annotations

import gc
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine.adapter import TensorSource
from ckptfmt.engine.dispatch import array_source
from ckptfmt.engine.plan import SaveOptions, plan_save
from ckptfmt.engine.sources import Sources, are_plain, is_plain
from ckptfmt.engine.tree import FlatTree, flatten
from ckptfmt.format import pack_tree
from ckptfmt.testing import difference


class Masked(np.ndarray[Any, Any]):
    pass


ODD: dict[str, Callable[[], Any]] = {
    "transposed": lambda: np.arange(6.0).reshape(2, 3).T,
    "fortran": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "view": lambda: np.arange(6.0)[2:],
    "big-endian": lambda: np.arange(6, dtype=">i4"),
    "empty": lambda: np.zeros((0, 3)),
    "text": lambda: np.array(["a", "bc"]),
    "objects": lambda: np.array(["a", "bc"], object),
    "time": lambda: np.array(["2026-01-02"], "datetime64[s]"),
    "bfloat16": lambda: np.ones(3, ml_dtypes.bfloat16),
    "int4": lambda: np.ones(3, ml_dtypes.int4),
}


@pytest.mark.parametrize(
    "dtype", [*"?bhilqBHILQefdFD", "bool", "int8", "uint16", "float16", "complex128"]
)
def test_an_array_of_its_own_memory_is_plain(dtype: str) -> None:
    for shape in ((), (3,), (2, 3), (1, 1, 1)):
        assert is_plain(np.ones(shape, dtype))
    assert are_plain([np.ones(shape, dtype) for shape in ((), (3,), (2, 3))])


@pytest.mark.parametrize("odd", ODD)
def test_any_other_array_is_not_plain(odd: str) -> None:
    array = ODD[odd]()
    assert not is_plain(array)
    assert not are_plain([np.ones(2), array])


def test_a_subclass_is_not_plain() -> None:
    array = np.ones(3)
    assert not is_plain(np.ones(3).view(Masked))
    assert not are_plain([np.ones(2), np.ones(3).view(Masked)])
    assert not are_plain([array, 1.0])


def test_a_source_is_made_of_a_plain_array_when_it_is_asked_for() -> None:
    array, lazy = np.ones((2, 3), np.float32), TensorSource("int4", (3,), lambda: np.zeros(3))
    sources = Sources([array, lazy])
    assert len(sources) == 2
    assert list(sources.shapes()) == [(2, 3), (3,)]
    assert sources.dtypes() == [np.dtype("f4"), "int4"]
    assert sources[1] is lazy
    assert list(sources)[1] is lazy
    assert sources[0].dtype == "float32"
    assert sources[0].shape == (2, 3)
    assert sources[0].fetch() is array
    assert sources[0].identity == id(array)
    assert sources[:1].items == [array]
    assert sources.others() == [(1, lazy)]
    assert sources.far() == set()


def test_a_save_makes_no_source_of_a_plain_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counting(array: Any) -> TensorSource:
        made.append(array)
        return array_source(array)

    monkeypatch.setattr("ckptfmt.engine.sources.array_source", counting)
    tree = {f"layer.{i}": np.full(8, i, np.float32) for i in range(500)}
    ckptfmt.save(tree, tmp_path, step=1)
    assert len(made) < 10


def as_sources(tree: Any) -> FlatTree:
    """What flatten gives, each plain array with an object of its own: the slow path."""
    flat = flatten(tree)
    flat.tensors = Sources(list(flat.tensors))
    return flat


def trees() -> dict[str, Any]:
    many = {f"layer.{i}": np.full((i % 3 + 1, 4), i, "fdiq"[i % 4]) for i in range(40)}
    tied = np.arange(5)
    base = np.arange(4.0)
    return {
        "many": many,
        "nested": {"a": many, "b": {"c": dict(many)}, "step": 7},
        "tied across dicts": {"a": {**many, "t": tied}, "b": {"t": tied, **many}},
        "tied to a view that covers it": {"whole": base, "view": base[:], **many},
        "one that is odd": {**many, "odd": np.arange(6.0)[2:]},
        "values between": {**many, "lr": 0.5},
        "keys": {**{f"k/{i}": np.ones(i + 1) for i in range(9)}},
        "tilde": {**{f"~{i}": np.ones(i + 1) for i in range(9)}},
        "empty key": {**many, "": np.ones(2)},
        "not ascii": {**{f"ü{i}": np.ones(i + 1) for i in range(9)}},
        "numbers": {i: np.ones(i + 1) for i in range(9)},
        "same content": {f"k{i}": np.ones(3) for i in range(20)},
        "in a list": [np.ones(i + 1) for i in range(9)],
        "zeros": {**many, "none": np.zeros((0, 2))},
    }


@pytest.mark.parametrize("which", trees())
def test_a_dict_taken_at_once_is_what_it_is_item_by_item(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = trees()[which]
    fast = flatten(tree)
    monkeypatch.setattr("ckptfmt.engine.tree._MANY", 1 << 60)
    monkeypatch.setattr("ckptfmt.engine.tree.is_plain", lambda array: False)
    slow = flatten(tree)
    for column in ("names", "kinds", "rows", "values", "containers", "attributes"):
        assert getattr(fast, column) == getattr(slow, column)
    assert all(isinstance(item, TensorSource) for item in slow.tensors.items)
    assert [s.identity for s in fast.tensors] == [s.identity for s in slow.tensors]
    plans = [plan_save(flat, SaveOptions()) for flat in (fast, slow)]
    assert pack_tree(plans[0].tree) == pack_tree(plans[1].tree)


@pytest.mark.parametrize("which", trees())
def test_what_is_saved_of_plain_arrays_comes_back(which: str, tmp_path: Path) -> None:
    tree = trees()[which]
    ckptfmt.save(tree, tmp_path, step=1)
    assert difference(ckptfmt.load(tmp_path), tree) == ""
    assert ckptfmt.open(tmp_path).verify().ok
    assert ckptfmt.save(tree, tmp_path, step=2).written_nbytes == 0


def test_an_unknown_name_among_plain_arrays_has_its_own_bits() -> None:
    def lazy(nbytes: int) -> TensorSource:
        return TensorSource("float_of_tomorrow", (2,), lambda: np.zeros(2, f"V{nbytes}"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = flatten({"a": np.ones(2), "b": lazy(2), "c": lazy(3), "d": np.ones(3)})
        plan = plan_save(flat, SaveOptions())
    assert [d.bits for d in plan.tree.dtypes][:1] == [64]
    assert plan.tree.tensor_dtypes[0] == plan.tree.tensor_dtypes[3]


def test_a_save_of_many_arrays_makes_no_tracked_object_for_each(tmp_path: Path) -> None:
    """Else passes of the garbage collector over them, and over the trainer's objects, take as long
    as the save."""
    tree = {f"layer.{i}": np.full(8, i, np.float32) for i in range(20_000)}
    ckptfmt.save(tree, tmp_path, step=0, durable=False)  # imports
    gc.collect()
    passes = []

    def count(phase: str, info: dict[str, int]) -> None:
        stack = [frame.filename for frame in traceback.extract_stack(limit=40)]
        # The suite has the reference reader read what is saved, which makes objects.
        if phase == "start" and not any("reference" in name for name in stack):
            passes.append(info["generation"])

    gc.callbacks.append(count)
    try:
        ckptfmt.save({**tree, "more": np.ones(3)}, tmp_path / "other", step=1, durable=False)
    finally:
        gc.callbacks.remove(count)
    assert len(passes) < 5
    assert 2 not in passes


def test_a_save_keeps_no_array_alive(tmp_path: Path) -> None:
    array = np.arange(100.0)
    gone = weakref.ref(array)
    tree = {"a": array, **{f"k{i}": np.ones(i + 1) for i in range(20)}}
    ckptfmt.save(tree, tmp_path, step=1)
    del array, tree
    gc.collect()
    assert gone() is None


def test_a_save_in_the_background_has_small_arrays_as_they_were_at_the_call(
    tmp_path: Path,
) -> None:
    tree = {f"k{i}": np.full(8, i, np.float64) for i in range(500)}
    expected = {name: array.copy() for name, array in tree.items()}
    future = ckptfmt.save_async(tree, tmp_path, step=1)
    for array in tree.values():
        array[:] = -1
    future.result()
    assert difference(ckptfmt.load(tmp_path), expected) == ""
