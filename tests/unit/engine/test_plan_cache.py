"""The plan of the last save is reused if nothing has changed that decided it, and else made anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
import ckptfmt.engine.plan
from ckptfmt.engine.plan import SaveOptions, SavePlan, plan_save
from ckptfmt.engine.plan_cache import PLANS, PLANS_MAX, PlanCache, Structure
from ckptfmt.engine.tree import flatten
from ckptfmt.format import pack_tree
from ckptfmt.testing import difference


@pytest.fixture(autouse=True)
def _fresh() -> None:
    PLANS.clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An item for every layout that is made, not found."""
    made: list[int] = []
    lay_out = ckptfmt.engine.plan._lay_out

    def counting(*arguments: Any) -> Any:
        made.append(1)
        return lay_out(*arguments)

    monkeypatch.setattr("ckptfmt.engine.plan._lay_out", counting)
    return made


def state(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tensors = {f"layer.{i}": rng.standard_normal((i % 3 + 1, 8)) for i in range(30)}
    return {"model": tensors, "text": np.array(["a", "bcd"], object), "step": seed, "x": [1, 2]}


def plan(tree: Any, **options: Any) -> SavePlan:
    return plan_save(flatten(tree), SaveOptions(**options))


def test_a_tree_of_one_structure_is_planned_once(made: list[int]) -> None:
    assert pack_tree(plan(state()).tree) == pack_tree(plan(state()).tree)
    plan(state(1))  # other weights, other values
    assert made == [1]


def with_dtype(tree: dict[str, Any]) -> None:
    tree["model"]["layer.3"] = tree["model"]["layer.3"].view(np.int64)


def with_shape(tree: dict[str, Any]) -> None:
    tree["model"]["layer.5"] = tree["model"]["layer.5"].reshape(-1).copy()


def with_transposed_shape(tree: dict[str, Any]) -> None:
    tree["model"]["layer.5"] = np.ascontiguousarray(tree["model"]["layer.5"].T)


def with_size(tree: dict[str, Any]) -> None:
    tree["model"]["layer.29"] = np.ones(7)


def with_other_order(tree: dict[str, Any]) -> None:
    tree["model"] = dict(reversed(tree["model"].items()))


def with_other_name(tree: dict[str, Any]) -> None:
    tree["model"]["renamed"] = tree["model"].pop("layer.29")


def with_swapped_names(tree: dict[str, Any]) -> None:
    a = tree["model"]
    a["layer.0"], a["layer.1"] = a["layer.1"], a["layer.0"]


def with_a_tie(tree: dict[str, Any]) -> None:
    tree["model"]["layer.3"] = tree["model"]["layer.0"]


def with_another_leaf(tree: dict[str, Any]) -> None:
    tree["model"]["more"] = np.ones(2)


def with_a_leaf_less(tree: dict[str, Any]) -> None:
    del tree["model"]["layer.29"]


def with_a_value_for_a_tensor(tree: dict[str, Any]) -> None:
    tree["model"]["layer.7"] = 0.5


def with_longer_text(tree: dict[str, Any]) -> None:
    tree["text"] = np.array(["a", "bcde"], object)


def with_an_empty_tensor(tree: dict[str, Any]) -> None:
    tree["model"]["layer.7"] = np.zeros((0, 8))


def with_another_container(tree: dict[str, Any]) -> None:
    tree["x"] = (1, 2)


CHANGES: list[Callable[[dict[str, Any]], None]] = [
    with_dtype, with_shape, with_transposed_shape, with_size, with_other_order, with_other_name,
    with_swapped_names, with_a_tie, with_another_leaf, with_a_leaf_less, with_a_value_for_a_tensor,
    with_longer_text, with_an_empty_tensor, with_another_container,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_tree_that_differs_is_saved_as_it_is(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    before, after = state(), state(1)
    change(after)
    fresh = pack_tree(plan(after).tree)
    PLANS.clear()
    ckptfmt.save(before, tmp_path, step=1)
    assert pack_tree(plan(after).tree) == fresh
    ckptfmt.save(after, tmp_path, step=2)
    ckptfmt.save(before, tmp_path, step=3)
    assert difference(ckptfmt.load(tmp_path, step=2), after) == ""
    assert difference(ckptfmt.load(tmp_path, step=3), before) == ""
    assert ckptfmt.Store(tmp_path).verify().ok


def save(tree: Any, path: Path, step: int, background: bool) -> None:
    if background:
        ckptfmt.save_async(tree, path, step=step).result()
    else:
        ckptfmt.save(tree, path, step=step)


@pytest.mark.parametrize("background", [False, True])
def test_other_tensors_under_the_same_names_are_what_is_saved(
    background: bool, tmp_path: Path, made: list[int]
) -> None:
    """A stale plan is the classic way to save old weights."""
    tree = state()
    save(tree, tmp_path, 1, background)
    new = state(1)
    for name in tree["model"]:
        tree["model"][name] = new["model"][name]  # the objects are replaced
    save(tree, tmp_path, 2, background)
    for array in tree["model"].values():
        array += 1  # in place
    save(tree, tmp_path, 3, background)
    assert made == [1]
    expected = state(1)
    assert difference(ckptfmt.load(tmp_path, step=2)["model"], expected["model"]) == ""
    for array in expected["model"].values():
        array += 1
    assert difference(ckptfmt.load(tmp_path, step=3)["model"], expected["model"]) == ""


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("change", [with_size, with_longer_text])
def test_a_stale_plan_fails_the_save_and_nothing_is_committed(
    change: Callable[[dict[str, Any]], None],
    background: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a plan of another tree were taken all the same, the sizes of the tensors would tell."""
    ckptfmt.save(state(), tmp_path, step=1)
    monkeypatch.setattr(Structure, "is_same", lambda self, other: True)
    after = state(1)
    change(after)
    with pytest.raises(ckptfmt.ConflictError) as caught:
        save(after, tmp_path, 2, background)
    assert caught.value.kind == "conflict-stale-plan"
    assert ckptfmt.Store(tmp_path).steps() == [1]


def test_options_that_decide_the_plan_are_compared(made: list[int]) -> None:
    tree = state()
    plan(tree)
    plan(tree, chunk_nbytes=8192)
    plan(tree, codec="zstd")
    plan(tree, digest="sha256")
    assert len(made) == 4
    plan(tree, durable=False)
    assert len(made) == 4


def test_a_mapping_of_options_that_is_changed_in_place_makes_another_plan() -> None:
    tree, chunk_nbytes = {"a": np.ones(4096)}, {"a": 4096}
    assert plan(tree, chunk_nbytes=chunk_nbytes).tree.region_nchunks.tolist() == [8]
    chunk_nbytes["a"] = 8192
    assert plan(tree, chunk_nbytes=chunk_nbytes).tree.region_nchunks.tolist() == [4]
    first = {"a": "raw", "*": "zstd"}
    assert [c[0] for c in plan(tree, codec=first).codecs] == [()]
    assert [c[0] for c in plan(tree, codec=dict(reversed(first.items()))).codecs] == [(("zstd",),)]


def test_few_plans_are_kept_and_only_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(1, 3 * PLANS_MAX):
        plan({f"k{i}": np.ones(2) for i in range(count)})
    assert len(PLANS._kept) == PLANS_MAX
    monkeypatch.setattr("ckptfmt.engine.plan_cache.PLANS_NBYTES_MAX", 1000)
    plan({f"k{i}": np.ones(3) for i in range(100)})
    assert PLANS.nbytes == 0
    plan({"a": np.ones(3)})
    assert 0 < PLANS.nbytes <= 1000


def test_the_plan_that_was_not_used_for_longest_goes_first(made: list[int]) -> None:
    trees = [{f"k{i}": np.ones(2) for i in range(count)} for count in range(1, PLANS_MAX + 2)]
    for tree in trees[:PLANS_MAX]:
        plan(tree)
    plan(trees[0])
    plan(trees[PLANS_MAX])  # the second one goes
    made.clear()
    plan(trees[0])
    assert made == []
    plan(trees[1])
    assert made == [1]


def test_a_kept_plan_holds_no_tensor_and_cannot_be_changed() -> None:
    tree = {"a": np.arange(100.0), "t": np.array(["x"], object)}
    gone = [weakref.ref(array) for array in tree.values()]
    columns = plan(tree).tree
    assert PLANS.nbytes > 0
    with pytest.raises(ValueError, match="read-only"):
        columns.region_nchunks[0] = 7
    columns.chunk_digests[0] = 7  # these are of one save
    assert not plan(tree).tree.chunk_digests.any()
    del tree, columns
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_cache_is_empty_at_first() -> None:
    assert PlanCache().nbytes == 0
