"""Restore fills what it is given, all of it or nothing. Spec: 08-protocol."""

from __future__ import annotations

import collections
import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.events import Event
from ckptfmt.testing import difference


def zeroed(tree: Any) -> Any:
    """The same structure with other values."""
    made = copy.deepcopy(tree)

    def empty(obj: Any) -> None:
        items = obj.items() if isinstance(obj, dict) else enumerate(obj)
        for key, item in list(items):
            if isinstance(item, np.ndarray):
                item[...] = np.zeros((), item.dtype)
            elif isinstance(item, dict | list):
                empty(item)
            elif not isinstance(obj, tuple):
                obj[key] = None

    empty(made)
    return made


# -- what is filled -----------------------------------------------------------------------------


def test_arrays_are_filled_in_place_and_values_replaced(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    tree["pair"] = [1, [None, "x"]]
    ckptfmt.save(tree, tmp_path, step=4)
    target = zeroed(tree)
    arrays = {id(a) for a in target["model"].values()}
    report = ckptfmt.restore(target, tmp_path)
    assert not difference(target, tree)
    assert {id(a) for a in target["model"].values()} == arrays
    assert bool(report)
    assert report.clean
    assert report.step == 4
    assert report.info is not None
    assert report.info.name == "step-0000000000000004"
    assert sorted(report.matched) == sorted(ckptfmt.open(tmp_path).names())
    assert not report.cast
    assert not report.renamed


def test_strided_targets_are_filled_through_their_strides(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(12.0).reshape(3, 4), "b": np.arange(5)}, tmp_path)
    whole = np.zeros((8, 6))
    target: dict[str, Any] = {"a": whole[1:7:2, ::-1][:, :4], "b": np.zeros(5, ">i8")}
    ckptfmt.restore(target, tmp_path)
    assert target["a"].tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert whole[0].tolist() == [0] * 6
    assert target["b"].tolist() == [0, 1, 2, 3, 4]
    assert target["b"].dtype == np.dtype(">i8")


def test_a_target_may_be_one_array(tmp_path: Path) -> None:
    ckptfmt.save(np.arange(4), tmp_path)
    target = np.zeros(4, np.int64)
    ckptfmt.restore(target, tmp_path)
    assert target.tolist() == [0, 1, 2, 3]


def test_a_source_may_be_a_checkpoint_a_store_or_a_tree(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"a": np.arange(3), "b": [1, 2], "c": {"d": "x"}}
    ckptfmt.save(saved, tmp_path, step=1)
    for source in (ckptfmt.open(tmp_path), ckptfmt.Store(tmp_path), saved, f"{tmp_path}@1"):
        target: dict[str, Any] = {"a": np.zeros(3, np.int64), "b": None, "c": {"d": None}}
        report = ckptfmt.restore(target, source)
        assert not difference(target, saved)
        assert report.step == (0 if source is saved else 1)
        target["a"][:] = 9
        assert saved["a"].tolist() == [0, 1, 2]
        assert (report.info is None) == (source is saved)


@pytest.mark.parametrize("options", [{"step": 1}, {"at": "main"}])
def test_a_source_that_is_chosen_already_is_not_chosen_again(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1)
    for source in (ckptfmt.open(tmp_path), {"a": 1}):
        with pytest.raises(ckptfmt.UsageError, match="leave them out"):
            ckptfmt.restore({"a": 0}, source, **options)


def test_which_checkpoint_is_chosen_as_in_load(tmp_path: Path) -> None:
    for step in (1, 2):
        ckptfmt.save({"v": step}, tmp_path, step=step)
    for options, expected in (({}, 2), ({"step": 1}, 1), ({"at": "latest"}, 2)):
        target: dict[str, Any] = {"v": 0}
        assert ckptfmt.restore(target, tmp_path, **options).step == expected
        assert target == {"v": expected}
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.restore({"v": 0}, tmp_path, step=3)


def test_a_main_checkpoint_has_step_0(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path)
    assert ckptfmt.restore({"a": 0}, tmp_path).step == 0


def test_nothing_of_the_source_is_shared_with_the_target(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"a": [1, [2, {"k": [3]}]], "w": np.ones(2)}
    ckptfmt.save(saved, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    one: Any = {"a": None, "w": np.zeros(2)}
    two: Any = {"a": None, "w": np.zeros(2)}
    ckptfmt.restore(one, checkpoint)
    one["a"][1][1]["k"].append(9)
    ckptfmt.restore(two, checkpoint)
    assert two["a"] == [1, [2, {"k": [3]}]]


# -- containers and templates -------------------------------------------------------------------


@pytest.mark.parametrize("template", [[], [0], [0, 0, 0], None, {}, ()])
def test_a_value_without_tensors_is_replaced_whole_whatever_the_template_holds(
    tmp_path: Path, template: Any
) -> None:
    saved: dict[str, Any] = {"l": [{"a": 1}, {"b": 2}], "d": {"x": 1}, "w": np.ones(1)}
    ckptfmt.save(saved, tmp_path)
    target: dict[str, Any] = {"l": template, "d": {"x": 0}, "w": np.zeros(1)}
    ckptfmt.restore(target, tmp_path)
    assert not difference(target, saved)


@pytest.mark.parametrize("saved", [[], {}, (), None, [[]], [None], {"a": {}}, "x", 5])
def test_every_empty_value_comes_back_as_itself(tmp_path: Path, saved: Any) -> None:
    ckptfmt.save({"v": saved, "w": np.ones(1)}, tmp_path)
    templates: list[Any] = [[], {}, (), None, [1, 2], "text"]
    for template in templates:
        if isinstance(saved, dict) and saved and not (template == {} and template is not None):
            continue
        target: dict[str, Any] = {"v": copy.deepcopy(template), "w": np.zeros(1)}
        ckptfmt.restore(target, tmp_path)
        assert not difference(target["v"], saved, f"{template!r}")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_tensor_list_of_another_length_is_one_mismatch_and_nothing_merged(
    tmp_path: Path, count: int
) -> None:
    ckptfmt.save({"l": [np.full(2, 1.0), np.full(2, 2.0)], "v": 5}, tmp_path)
    target: dict[str, Any] = {"l": [np.zeros(2) for _ in range(count)], "v": 0}
    before = copy.deepcopy(target)
    with pytest.raises(ckptfmt.MismatchError) as caught:
        ckptfmt.restore(target, tmp_path)
    assert not difference(target, before)
    report: Any = caught.value.report
    if count == 1:
        assert list(report.unexpected) == ["l/1"]
    elif count == 3:
        assert list(report.missing) == ["l/2"]


def test_a_tensor_where_a_value_was_saved_is_a_mismatch_of_kind_and_the_reverse(
    tmp_path: Path,
) -> None:
    ckptfmt.save({"a": np.ones(2), "b": 5, "c": {"x": np.ones(1)}, "d": 1}, tmp_path)
    target: dict[str, Any] = {"a": 1, "b": np.zeros(2), "c": 3, "d": {"y": np.zeros(1)}}
    report = ckptfmt.plan(target, tmp_path)
    assert {m.name for m in report.kinds} >= {"a", "b", "c"}
    with pytest.raises(ckptfmt.MismatchError) as caught:
        ckptfmt.restore(target, tmp_path)
    for name in ("a", "b", "c", "d"):
        assert f"  {name}" in str(caught.value) or f": {name}" in str(caught.value)


def test_a_plain_value_inside_a_tuple_cannot_be_filled(tmp_path: Path) -> None:
    ckptfmt.save({"p": (np.ones(2), 3)}, tmp_path)
    target: dict[str, Any] = {"p": (np.zeros(2), 0)}
    with pytest.raises(ckptfmt.UsageError, match="'p/1'"):
        ckptfmt.restore(target, tmp_path)
    assert target["p"][0].tolist() == [0, 0]


def test_arrays_inside_a_tuple_are_filled(tmp_path: Path) -> None:
    ckptfmt.save({"p": (np.ones(2), np.full(1, 5.0))}, tmp_path)
    target: dict[str, Any] = {"p": (np.zeros(2), np.zeros(1))}
    ckptfmt.restore(target, tmp_path)
    assert not difference(target, {"p": (np.ones(2), np.full(1, 5.0))})


def test_a_read_only_target_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(2), "b": np.ones(2)}, tmp_path)
    target: dict[str, Any] = {"a": np.zeros(2), "b": np.zeros(2)}
    target["b"].flags.writeable = False
    with pytest.raises(ckptfmt.UsageError, match="'b'"):
        ckptfmt.restore(target, tmp_path)
    assert target["a"].tolist() == [0, 0]


def test_ordered_and_default_dicts_keep_their_class(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "o": collections.OrderedDict(a=1),
        "d": collections.defaultdict(list, k=np.ones(1)),
    }
    ckptfmt.save(saved, tmp_path)
    target: dict[str, Any] = {
        "o": collections.OrderedDict(a=0),
        "d": collections.defaultdict(list, k=np.zeros(1)),
    }
    kept = (target["o"], target["d"])
    ckptfmt.restore(target, tmp_path)
    assert not difference(target, saved)
    assert (target["o"], target["d"]) == kept


# -- the report and strictness ------------------------------------------------------------------


def test_strict_raises_everything_at_once_and_touches_nothing(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "enc": {"w": np.ones((2, 3)), "b": np.ones(3), "scale": np.ones(1, np.float32)},
        "steps": 7,
        "old": np.ones(1),
    }
    ckptfmt.save(saved, tmp_path, step=1)
    target: dict[str, Any] = {
        "enc": {"w": np.zeros((3, 2)), "b": np.zeros(3), "scale": np.zeros(1, np.float16)},
        "steps": np.zeros(()),
        "new": np.zeros(4),
    }
    before = copy.deepcopy(target)
    with pytest.raises(ckptfmt.MismatchError) as caught:
        ckptfmt.restore(target, tmp_path)
    assert not difference(target, before)
    report: Any = caught.value.report
    assert [(m.name, m.expected, m.found) for m in report.shapes] == [("enc/w", "[3, 2]", "[2, 3]")]
    assert [(m.name, m.expected, m.found) for m in report.dtypes] == [
        ("enc/scale", "float16", "float32")
    ]
    assert [m.name for m in report.kinds] == ["steps"]
    assert list(report.missing) == ["new"]
    assert list(report.unexpected) == ["old"]
    assert list(report.matched) == ["enc/b"]
    text = str(caught.value)
    for part in ("enc/w", "enc/scale", "steps", "new", "old", "allow_missing='new'"):
        assert part in text
    assert "enc/w" in str(report)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ((5,), ()),
        ((1,), ()),
        ((1, 1), ()),
        ((), (1,)),
        ((1, 4), (32, 4)),
        ((4, 3), (3, 4)),
        ((3, 4), (12,)),
        ((0, 3), (0,)),
        ((0, 3), (3, 0)),
    ],
)
def test_every_unequal_shape_is_a_mismatch_in_every_mode(
    tmp_path: Path, stored: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    ckptfmt.save({"a": np.ones(stored), "b": np.ones(2)}, tmp_path)
    for strict in (True, False):
        target: dict[str, Any] = {"a": np.zeros(wanted), "b": np.zeros(2)}
        with pytest.raises(ckptfmt.MismatchError, match="a: expected"):
            ckptfmt.restore(target, tmp_path, strict=strict, allow_cast=True)
        assert not target["a"].any()
        assert not target["b"].any()


def test_strict_false_reports_names_and_restores_the_rest(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(2), "b": 1}, tmp_path)
    target: dict[str, Any] = {"a": np.zeros(2), "c": 5}
    report = ckptfmt.restore(target, tmp_path, strict=False)
    assert (list(report.missing), list(report.unexpected)) == (["c"], ["b"])
    assert not report.clean
    assert not difference(target, {"a": np.ones(2), "c": 5})


@pytest.mark.parametrize("strict", [True, False])
def test_no_match_at_all_always_raises(tmp_path: Path, strict: bool) -> None:
    ckptfmt.save({"a": np.ones(2), "b": 1}, tmp_path)
    target: dict[str, Any] = {"x": np.zeros(2)}
    with pytest.raises(ckptfmt.MismatchError, match="nothing in the checkpoint matches"):
        ckptfmt.restore(target, tmp_path, strict=strict, allow_missing="**", allow_unexpected="**")


def test_exceptions_to_strict_are_by_name(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(2), "old": {"x": 1, "y": 2}}, tmp_path)
    target: dict[str, Any] = {"a": np.zeros(2), "head": {"w": np.zeros(1), "b": np.zeros(1)}}
    with pytest.raises(ckptfmt.MismatchError):
        ckptfmt.restore(target, tmp_path, allow_missing="head/w", allow_unexpected="old")
    report = ckptfmt.restore(
        target, tmp_path, allow_missing=["head/w", "head/b"], allow_unexpected="old"
    )
    assert sorted(report.missing) == ["head/b", "head/w"]
    assert sorted(report.unexpected) == ["old/x", "old/y"]
    assert target["a"].tolist() == [1, 1]
    ckptfmt.restore(target, tmp_path, allow_missing="head", allow_unexpected="ol*")


def test_the_error_suggests_the_near_miss_and_the_line_to_add(tmp_path: Path) -> None:
    ckptfmt.save({"model": {"encoder.weight": np.ones(2), "b": np.ones(1)}}, tmp_path)
    target: dict[str, Any] = {"model": {"encoder.weights": np.zeros(2), "b": np.zeros(1)}}
    with pytest.raises(ckptfmt.MismatchError) as caught:
        ckptfmt.restore(target, tmp_path)
    text = str(caught.value)
    assert "rename={'model/encoder.weight': 'model/encoder.weights'}" in text
    assert "allow_missing=" in text
    assert "allow_unexpected=" in text


def test_many_mismatches_are_counted_not_all_listed(tmp_path: Path) -> None:
    ckptfmt.save({f"w{i}": np.ones(2) for i in range(500)}, tmp_path)
    with pytest.raises(ckptfmt.MismatchError) as caught:
        ckptfmt.restore({f"w{i}": np.zeros(3) for i in range(500)}, tmp_path)
    assert len(str(caught.value).splitlines()) < 60
    assert "more" in str(caught.value)
    report: Any = caught.value.report
    assert len(report.shapes) == 500


# -- names, rename, cast ------------------------------------------------------------------------


def test_names_take_a_part_of_both_sides(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"model": {"w": np.ones(2)}, "opt": {"m": np.ones(2)}, "step": 3}
    ckptfmt.save(saved, tmp_path)
    targets: list[dict[str, Any]] = [
        {"model": {"w": np.zeros(2)}},
        {"model": {"w": np.zeros(2)}, "opt": {"m": np.zeros(2)}, "step": 0, "more": 1},
    ]
    for target in targets:
        report = ckptfmt.restore(target, tmp_path, names="model")
        assert list(report.matched) == ["model/w"]
        assert target["model"]["w"].tolist() == [1, 1]
        assert "opt" not in target or target["opt"]["m"].tolist() == [0, 0]
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.restore({"model": {"w": np.zeros(2)}}, tmp_path, names="modle")
    with pytest.raises(ckptfmt.MismatchError):
        ckptfmt.restore({"model": {"v": np.zeros(2)}}, tmp_path, names="model")


def test_rename_takes_names_prefixes_and_functions(tmp_path: Path) -> None:
    ckptfmt.save({"net": {"a": np.ones(2), "b": {"c": np.full(1, 2.0)}}, "n": 5}, tmp_path)

    def target() -> dict[str, Any]:
        return {"model": {"a": np.zeros(2), "b": {"c": np.zeros(1)}}, "count": 0}

    expected = {"model": {"a": np.ones(2), "b": {"c": np.full(1, 2.0)}}, "count": 5}
    rules: list[Any] = [
        {"net": "model", "n": "count"},
        {"net/a": "model/a", "net/b": "model/b", "n": "count"},
        lambda name: name.replace("net", "model") if name != "n" else "count",
    ]
    for rename in rules:
        filled = target()
        report = ckptfmt.restore(filled, tmp_path, rename=rename)
        assert not difference(filled, expected)
        assert report.renamed["net/b/c"] == "model/b/c"
        assert report.renamed["n"] == "count"


def test_the_longest_rule_wins(tmp_path: Path) -> None:
    ckptfmt.save({"a": {"b": np.ones(1), "c": np.full(1, 2.0)}}, tmp_path)
    target: dict[str, Any] = {"x": np.zeros(1), "y": {"c": np.zeros(1)}}
    ckptfmt.restore(target, tmp_path, rename={"a": "y", "a/b": "x"})
    assert not difference(target, {"x": np.ones(1), "y": {"c": np.full(1, 2.0)}})


@pytest.mark.parametrize(
    "rename",
    [
        {"nothing": "x"},
        {"a": "x", "b": "x"},
        {"a": "b"},
        {"model": "m", "mod": "x"},
        lambda name: "same",
    ],
)
def test_a_rule_that_matches_nothing_or_joins_two_names_is_refused(
    tmp_path: Path, rename: Any
) -> None:
    ckptfmt.save({"a": np.ones(1), "b": np.ones(1), "model": 1}, tmp_path)
    with pytest.raises(ckptfmt.UsageError, match=r"rule|one name"):
        ckptfmt.restore({"x": np.zeros(1)}, tmp_path, rename=rename, strict=False)


def test_dtypes_are_converted_only_where_allowed(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "a": np.array([1.5, -2.0]),
        "b": np.arange(3),
        "h": np.ones(2, ml_dtypes.bfloat16),
    }
    ckptfmt.save(saved, tmp_path)
    target: dict[str, Any] = {
        "a": np.zeros(2, np.float32),
        "b": np.zeros(3, np.int8),
        "h": np.zeros(2),
    }
    with pytest.raises(ckptfmt.MismatchError):
        ckptfmt.restore(target, tmp_path, allow_cast="a")
    assert not target["a"].any()
    report = ckptfmt.restore(target, tmp_path, allow_cast=["a", "b", "h"])
    assert target["a"].tolist() == [1.5, -2.0]
    assert target["b"].tolist() == [0, 1, 2]
    assert target["h"].tolist() == [1, 1]
    assert report.cast == {
        "a": "float64 -> float32",
        "b": "int64 -> int8",
        "h": "bfloat16 -> float64",
    }


def test_an_overflow_raises_and_changes_nothing(tmp_path: Path) -> None:
    ckptfmt.save({"ok": np.ones(2), "big": np.array([1e39, 1.0])}, tmp_path)
    target: dict[str, Any] = {"ok": np.zeros(2, np.float32), "big": np.zeros(2, np.float32)}
    with pytest.raises(ckptfmt.MismatchError, match="'big'"):
        ckptfmt.restore(target, tmp_path, allow_cast=True)
    assert not target["ok"].any()


# -- ties ---------------------------------------------------------------------------------------


def test_a_tied_target_takes_a_stored_tie(tmp_path: Path) -> None:
    weight = np.arange(3.0)
    ckptfmt.save({"a": weight, "b": weight}, tmp_path)
    one = np.zeros(3)
    report = ckptfmt.restore({"a": one, "b": one}, tmp_path)
    assert one.tolist() == [0, 1, 2]
    assert not report.ties


def test_a_tied_target_with_equal_stored_values_is_filled(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(3.0), "b": np.arange(3.0)}, tmp_path)
    one = np.zeros(3)
    ckptfmt.restore({"a": one, "b": one}, tmp_path)
    assert one.tolist() == [0, 1, 2]


def test_a_tied_target_with_two_stored_values_is_a_mismatch(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(3.0), "b": np.ones(3)}, tmp_path)
    one = np.zeros(3)
    with pytest.raises(ckptfmt.MismatchError, match="one array"):
        ckptfmt.restore({"a": one, "b": one}, tmp_path)
    assert not one.any()
    with pytest.raises(ckptfmt.MismatchError):
        ckptfmt.restore({"a": one, "b": one}, {"a": np.arange(3.0), "b": np.ones(3)})


def test_a_tie_lost_is_reported(tmp_path: Path) -> None:
    weight = np.arange(3.0)
    ckptfmt.save({"a": weight, "b": weight}, tmp_path)
    target: dict[str, Any] = {"a": np.zeros(3), "b": np.zeros(3)}
    report = ckptfmt.restore(target, tmp_path)
    assert list(report.ties) == ["b"]
    assert "'a'" in report.ties["b"]
    assert not difference(target, {"a": weight, "b": weight.copy()})


# -- stateful objects and generators ------------------------------------------------------------


class Counter:
    """Takes and gives its state itself."""

    def __init__(self, count: int = 0, fail: bool = False) -> None:
        self.count, self.fail = count, fail
        self.buffer = np.full(3, count, np.float32)
        self.log: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "buffer": self.buffer, "log": [self.count]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log.append(state)
        self.count, self.buffer = state["count"], state["buffer"]
        if self.fail:
            self.fail = False
            raise RuntimeError("will not load")


class Getter:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get_state(self) -> Any:
        return self.value

    def set_state(self, state: Any) -> None:
        self.value = state


def test_stateful_objects_are_given_what_they_gave(tmp_path: Path) -> None:
    ckptfmt.save({"c": Counter(5), "g": Getter([1, {"x": np.ones(2)}]), "h": Getter(3)}, tmp_path)
    counter, getter, plain = Counter(), Getter(None), Getter(None)
    report = ckptfmt.restore({"c": counter, "g": getter, "h": plain}, tmp_path)
    assert (counter.count, counter.buffer.tolist()) == (5, [5, 5, 5])
    assert not difference(getter.value, [1, {"x": np.ones(2)}])
    assert plain.value == 3
    assert sorted(report.matched) == ["c/buffer", "c/count", "c/log", "g/0", "g/1/x", "h"]
    loaded = ckptfmt.load(tmp_path)
    assert not difference(loaded["c"], Counter(5).state_dict())


def test_a_stateful_object_gets_a_copy_of_its_own(tmp_path: Path) -> None:
    ckptfmt.save({"c": Counter(5)}, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    one, two = Counter(), Counter()
    ckptfmt.restore({"c": one}, checkpoint)
    one.log[0]["log"].append("mine")
    one.buffer[:] = 0
    ckptfmt.restore({"c": two}, checkpoint)
    assert two.log[0]["log"] == [5]
    assert two.buffer.tolist() == [5, 5, 5]


def test_a_stateful_object_of_which_nothing_is_stored_is_missing(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(1)}, tmp_path)
    with pytest.raises(ckptfmt.MismatchError) as caught:
        ckptfmt.restore({"a": np.zeros(1), "c": Counter()}, tmp_path)
    report: Any = caught.value.report
    assert list(report.missing) == ["c"]


GENERATORS: dict[str, Callable[[int], Any]] = {
    "pcg": lambda seed: np.random.default_rng(seed),
    "mt": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "sfc": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "legacy": lambda seed: np.random.RandomState(seed),
    "python": lambda seed: random.Random(seed),
}


def draws(generator: Any) -> list[float]:
    if isinstance(generator, np.random.Generator):
        return [*generator.random(20).tolist(), *generator.integers(0, 9, 5, np.int32).tolist()]
    if isinstance(generator, np.random.RandomState):
        return list(generator.standard_normal(21))
    return [generator.gauss(0, 1) for _ in range(21)]


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_go_on_where_they_were(tmp_path: Path, kind: str) -> None:
    generator = GENERATORS[kind](1)
    draws(generator)
    ckptfmt.save({"g": generator}, tmp_path)
    expected = draws(generator)
    other = GENERATORS[kind](2)
    ckptfmt.restore({"g": other}, tmp_path)
    assert draws(other) == expected


def test_another_kind_of_generator_is_a_mismatch(tmp_path: Path) -> None:
    for name, make in GENERATORS.items():
        ckptfmt.save({"g": make(1)}, tmp_path / name)
    for name in GENERATORS:
        for other, make in GENERATORS.items():
            if other == name:
                continue
            target = make(3)
            expected = draws(make(3))
            with pytest.raises(ckptfmt.MismatchError):
                ckptfmt.restore({"g": target}, tmp_path / name)
            assert draws(target) == expected, (name, other)


def test_a_generator_is_no_counter(tmp_path: Path) -> None:
    ckptfmt.save({"g": {"kind": "x"}, "a": 1}, tmp_path)
    with pytest.raises(ckptfmt.MismatchError):
        ckptfmt.restore({"g": random.Random(1), "a": 0}, tmp_path)


# -- all or nothing -----------------------------------------------------------------------------


def bits(target: dict[str, Any]) -> Any:
    """Everything a caller can see of a target with counters and generators."""
    return {
        "arrays": [target["a"].copy(), target["z"].copy()],
        "values": copy.deepcopy([target["v"], target["l"]]),
        "counter": (target["c"].count, target["c"].buffer.copy()),
        "python": target["r"].getstate(),
        "numpy": repr(target["n"].bit_generator.state),
    }


def everything(value: int, *, fail: bool = False) -> dict[str, Any]:
    return {
        "a": np.full(5, value, np.float32),
        "v": value,
        "c": Counter(value),
        "l": [value, [value]],
        "z": np.full((2, 2), math.nan if value else -0.0),
        "r": random.Random(value),
        "n": np.random.default_rng(value),
        "last": Counter(value, fail=fail),
    }


@pytest.mark.parametrize("which", ["last", "c"])
def test_an_error_while_binding_rolls_everything_back_bit_for_bit(
    tmp_path: Path, which: str
) -> None:
    """I5."""
    ckptfmt.save(everything(1), tmp_path)
    target = everything(0)
    before = bits(target)
    identities = {key: id(item) for key, item in target.items()}
    target[which].fail = True
    with pytest.raises(RuntimeError, match="will not load"):
        ckptfmt.restore(target, tmp_path)
    assert not difference(bits(target), before)
    assert {key: id(item) for key, item in target.items()} == identities
    ckptfmt.restore(target, tmp_path)
    assert not difference(bits(target), bits(everything(1)))


def test_an_interrupt_while_binding_rolls_back_too(tmp_path: Path) -> None:
    class Interrupts(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["count"] == 1:
                raise KeyboardInterrupt
            super().load_state_dict(state)

    ckptfmt.save(everything(1), tmp_path)
    target = everything(0)
    target["last"] = Interrupts(0)
    before = bits(target)
    with pytest.raises(KeyboardInterrupt):
        ckptfmt.restore(target, tmp_path)
    assert not difference(bits(target), before)


def test_what_refuses_its_old_state_is_named(tmp_path: Path) -> None:
    class Stubborn(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("never")

    ckptfmt.save({"a": np.ones(2), "s": Counter(1)}, tmp_path)
    target: dict[str, Any] = {"a": np.zeros(2), "s": Stubborn(0)}
    with pytest.raises(ckptfmt.PartialRestoreError) as caught:
        ckptfmt.restore(target, tmp_path)
    assert caught.value.changed == ("s",)
    assert "never" in str(caught.value)
    assert target["a"].tolist() == [0, 0]


@pytest.mark.parametrize("how", ["flipped", "missing", "progress"])
def test_damage_is_found_before_anything_is_touched(tmp_path: Path, how: str) -> None:
    ckptfmt.save(everything(1) | {"zz": np.arange(90_000)}, tmp_path)
    [file] = (tmp_path / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[-8200] ^= 1
    if how == "flipped":
        file.write_bytes(data)
    elif how == "missing":
        file.unlink()
    target = everything(0) | {"zz": np.zeros(90_000, np.int64)}
    before = bits(target)

    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    progress = stop if how == "progress" else False
    with pytest.raises((ckptfmt.CorruptError, KeyboardInterrupt)):
        ckptfmt.restore(target, tmp_path, progress=progress)
    assert not difference(bits(target), before)
    assert not target["zz"].any()


def test_without_verify_damage_is_taken(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.zeros(5000, np.uint8)}, tmp_path)
    [file] = (tmp_path / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    target: dict[str, Any] = {"a": np.zeros(5000, np.uint8)}
    ckptfmt.restore(target, tmp_path, verify=False)
    assert int(target["a"].sum()) == 1


def test_not_atomic_names_what_may_have_changed(tmp_path: Path) -> None:
    ckptfmt.save({"c": Counter(1), "d": Counter(1), "w": np.ones(2)}, tmp_path)
    target: dict[str, Any] = {"c": Counter(0), "d": Counter(0, fail=True), "w": np.zeros(2)}
    with pytest.raises(ckptfmt.PartialRestoreError) as caught:
        ckptfmt.restore(target, tmp_path, atomic=False)
    assert caught.value.changed == ("c", "d")
    assert target["c"].count == 1
    assert target["w"].tolist() == [0, 0]
    ckptfmt.restore(target, tmp_path, atomic=False)
    assert target["w"].tolist() == [1, 1]


def test_a_state_beyond_the_memory_allowed_is_checked_first_and_read_again(counted: Any) -> None:
    ckptfmt.save(everything(1), counted.store)
    target = everything(0)
    counted.backend.forget()
    with ckptfmt.configure(staging_nbytes=0):
        ckptfmt.restore(target, counted.store)
    assert not difference(bits(target), bits(everything(1)))
    reads = counted.backend.data_reads()
    assert len(reads) == 2 * len(set(reads))


@pytest.mark.parametrize("which", ["last", "c"])
def test_beyond_the_memory_allowed_code_of_the_caller_is_still_rolled_back(
    tmp_path: Path, which: str
) -> None:
    """I5: it comes first, and keeps its old state."""
    ckptfmt.save(everything(1), tmp_path)
    target = everything(0)
    before = bits(target)
    target[which].fail = True
    with ckptfmt.configure(staging_nbytes=0), pytest.raises(RuntimeError, match="will not load"):
        ckptfmt.restore(target, tmp_path)
    assert not difference(bits(target), before)


def test_beyond_the_memory_allowed_damage_is_found_before_anything_is_touched(
    tmp_path: Path,
) -> None:
    ckptfmt.save(everything(1) | {"zz": np.arange(90_000)}, tmp_path)
    [file] = (tmp_path / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[-8200] ^= 1
    file.write_bytes(data)
    target = everything(0) | {"zz": np.zeros(90_000, np.int64)}
    before = bits(target)
    with ckptfmt.configure(staging_nbytes=0), pytest.raises(ckptfmt.CorruptError):
        ckptfmt.restore(target, tmp_path)
    assert not difference(bits(target), before)


def test_not_atomic_gives_the_same_as_atomic(tmp_path: Path, tree: dict[str, Any]) -> None:
    tree["pair"] = [1]
    ckptfmt.save(tree, tmp_path)
    target = zeroed(tree)
    report = ckptfmt.restore(target, tmp_path, atomic=False)
    assert not difference(target, tree)
    assert report == ckptfmt.restore(zeroed(tree), tmp_path)


def test_max_nbytes_refuses_before_anything_is_touched(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(100), "b": np.ones(1)}, tmp_path)
    target: dict[str, Any] = {"a": np.zeros(100), "b": np.zeros(1)}
    with pytest.raises(ckptfmt.UsageError, match="808 bytes"):
        ckptfmt.restore(target, tmp_path, max_nbytes=807)
    assert not target["b"].any()
    ckptfmt.restore(target, tmp_path, max_nbytes=808)
    tree = {"a": np.ones(100), "b": np.ones(1)}
    with pytest.raises(ckptfmt.UsageError, match="808 bytes"):
        ckptfmt.restore(target, tree, max_nbytes=807)


def test_what_was_not_selected_is_left_alone_whatever_it_is(tmp_path: Path) -> None:
    saved = everything(1)
    ckptfmt.save(saved, tmp_path)
    target = everything(0)
    before = bits(target)
    ckptfmt.restore(target, tmp_path, names="v")
    assert target["v"] == 1
    target["v"] = 0
    assert not difference(bits(target), before)


def test_progress_counts_the_bytes_of_the_restore(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(100_000), "b": np.ones(1)}, tmp_path, step=2)
    events: list[Event] = []
    target: dict[str, Any] = {"a": np.zeros(100_000), "b": np.zeros(1)}
    ckptfmt.restore(target, tmp_path, progress=events.append)
    assert (events[-1].kind, events[-1].step) == ("restore", 2)
    assert events[-1].nbytes == events[-1].total_nbytes == 800_008


def test_only_what_the_target_asks_for_is_read(counted: Any) -> None:
    tree = {f"{i}": np.full(100_000, i, np.uint8) for i in range(10)}
    ckptfmt.save(tree, counted.store)
    counted.backend.forget()
    ckptfmt.restore({"4": np.zeros(100_000, np.uint8)}, counted.store, allow_unexpected="*")
    assert counted.backend.data_nbytes() < 110_000


def test_every_dtype_is_restored_in_place(tmp_path: Path) -> None:
    dtypes = ["bool", "int8", "uint64", "float16", "complex64", "U3", "S2", "M8[ns]", "V4"]
    rng = np.random.default_rng(0)
    saved: dict[str, Any] = {}
    for name in dtypes:
        dtype = np.dtype(name)
        raw = rng.integers(0, 2 if name in ("bool", "U3") else 256, 24 * dtype.itemsize, np.uint8)
        saved[name] = np.frombuffer(raw.tobytes(), dtype).reshape(4, 6).copy()
    for name in ("bfloat16", "float8_e4m3fn", "int4", "uint2", "float4_e2m1fn", "float6_e3m2fn"):
        kind = np.dtype(getattr(ml_dtypes, name))
        saved[name] = np.arange(24).reshape(4, 6).astype(kind)
    saved["string"] = np.array(["a", "é"], np.dtypes.StringDType())
    saved["object"] = np.array([b"a", b""], object)
    ckptfmt.save(saved, tmp_path)
    target: dict[str, Any] = {name: np.zeros_like(array) for name, array in saved.items()}
    target["object"] = np.array([b"x", b"y"], object)
    ckptfmt.restore(target, tmp_path)
    assert not difference(target, saved)
