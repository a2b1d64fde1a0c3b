"""Cases 7 to 9: keys, scalars, empties and None come back as what they were, or are refused."""

from __future__ import annotations

import collections
import copy
import dataclasses
import decimal
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.testing import difference

# -- case 7 -------------------------------------------------------------------------------------

KEYED: dict[str, dict[Any, Any]] = {
    "1 and '1'": {1: "int", "1": "str", True + 2: "three", "3": 3},
    "only integers": {5: np.ones(2), 9: np.zeros(1), -1: None, 0: 0, 2**70: "big"},
    "adam": {
        "state": {i: {"step": np.array(3.0), "exp_avg": np.full(2, i)} for i in range(3)},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1, 2]}],
    },
    "every kind": {None: 0, False: 1, 1.5: 2, (1, "1"): 3, b"x": 4, "": 5, float("inf"): 6},
    "ordered": {"o": collections.OrderedDict([(2, np.ones(1)), (1, "b")])},
    "default": {"d": collections.defaultdict(int, {25: 1, "25": 2})},
    "odd text": {
        "a/b": 1,
        "a": {"b": 2},
        "~": 3,
        "~1": 4,
        "\u00e9": 5,
        "e\u0301": 6,
        "\n": 7,
        " ": 8,
    },
    "numbers as text": {"0": np.ones(1), "1": np.zeros(1), "2": 5},
}


@pytest.mark.parametrize("name", KEYED)
def test_keys_keep_their_type_over_many_cycles(tmp_path: Path, name: str) -> None:
    """Case 7: save, load, save, load: the same tree, the same digest, nothing twice."""
    tree: Any = KEYED[name]
    digests = set()
    for step in range(4):
        digests.add(ckptfmt.save(tree, tmp_path, step=step).digest)
        loaded = ckptfmt.load(tmp_path, step=step)
        assert not difference(loaded, KEYED[name])
        tree = loaded
    assert len(digests) == 1


def test_a_counter_is_refused_or_kept_never_turned_into_a_dict(tmp_path: Path) -> None:
    """Case 7: Counter keeps type and order, or is refused by its path."""
    counter = collections.Counter({30: 1, 80: 2})
    try:
        ckptfmt.save({"milestones": counter, "w": np.ones(1)}, tmp_path)
    except ckptfmt.UsageError as error:
        assert "milestones" in str(error)  # noqa: PT017
        assert not tmp_path.joinpath("checkpoints").exists()
    else:
        back = ckptfmt.load(tmp_path)["milestones"]
        assert type(back) is collections.Counter
        assert back == counter


def test_keys_of_other_kinds_are_refused_by_path(tmp_path: Path) -> None:
    """Case 7: what a name cannot hold exactly."""
    keys: list[Any] = [np.int64(1), np.str_("a"), frozenset([1]), decimal.Decimal(1), object(), int]
    for key in keys:
        with pytest.raises(ckptfmt.UsageError, match="opt/state"):
            ckptfmt.save({"opt": {"state": {key: np.ones(1)}}}, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_optimizer_and_scheduler_state_of_torch_cycles_unchanged(tmp_path: Path) -> None:
    """Case 7, torch: Adam's integer ids and MultiStepLR's Counter of milestones, as plain trees."""
    torch = pytest.importorskip("torch")
    import ckptfmt.torch as ckt

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 80])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    tree: Any = {"opt": optimizer.state_dict(), "sched": scheduler.state_dict()}
    digests = set()
    for step in range(3):
        digests.add(ckt.save(tree, tmp_path, step=step).digest)
        tree = ckt.load(tmp_path, step=step)
        assert list(tree["opt"]["state"]) == [0, 1]
        assert tree["sched"]["milestones"] == collections.Counter([30, 80])
        assert type(tree["sched"]["milestones"]) is collections.Counter
    assert len(digests) == 1
    other = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
    other.load_state_dict(tree["opt"])
    torch.optim.lr_scheduler.MultiStepLR(other, [1]).load_state_dict(tree["sched"])


# -- case 8 -------------------------------------------------------------------------------------

SCALARS: dict[str, Any] = {
    **{
        name: getattr(np, name)(value)
        for name, value in {
            **dict.fromkeys(["float16", "float32", "float64"], 3),
            **dict.fromkeys(["int8", "int16", "int32", "int64", "uint8", "uint64"], 7),
            "complex64": 1 + 2j,
            "complex128": 1j,
            "bool_": True,
            "str_": "é",
            "bytes_": b"a\0b",
        }.items()
    },
    "nan": np.float32("nan"),
    "negative zero": np.float64(-0.0),
    "date": np.datetime64("2024-02-29", "D"),
    "nanoseconds": np.datetime64(2**40, "ns"),
    "not a time": np.datetime64("NaT", "us"),
    "delta": np.timedelta64(-5, "ms"),
    "0-d": np.array(2.5),
    "0-d date": np.array("2020", "M8[Y]"),
    "dates": np.array(["2020", "NaT"], "M8[s]"),
}


@pytest.mark.parametrize("name", SCALARS)
def test_numpy_scalars_come_back_with_their_very_type(tmp_path: Path, name: str) -> None:
    """Case 8: three levels deep, in a list and beside tensors."""
    leaf = SCALARS[name]
    tree = {"a": {"b": {"c": leaf}}, "l": [1, (leaf, [leaf])], "t": [np.ones(1), leaf]}
    ckptfmt.save(tree, tmp_path)
    loaded = ckptfmt.load(tmp_path)
    assert not difference(loaded, tree)
    assert type(loaded["a"]["b"]["c"]) is type(leaf)


def test_what_save_accepts_a_fresh_process_loads(tmp_path: Path) -> None:
    """Case 8, G2: with the default load, and nothing imported but the package."""
    legacy: Any = np.random.RandomState(3).get_state()
    tree = {
        "scalars": SCALARS,
        "legacy": legacy,
        "python": random.Random(1).getstate(),
        "set": {1, 2},
        "path": Path("a/b"),
    }
    ckptfmt.save(tree, tmp_path, step=1)
    code = (
        "import sys, ckptfmt; t = ckptfmt.load(sys.argv[1]);"
        "print(len(t['scalars']), t['legacy'][0], type(t['python']).__name__, t['set'], t['path'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, text=True, stdout=subprocess.PIPE
    )
    assert done.stdout.split()[:3] == [str(len(SCALARS)), "MT19937", "tuple"]
    loaded = ckptfmt.load(tmp_path)
    other = np.random.RandomState(0)
    other.set_state(loaded["legacy"])
    assert other.random_sample(5).tolist() == np.random.RandomState(3).random_sample(5).tolist()
    fresh = random.Random(0)
    fresh.setstate(loaded["python"])
    assert fresh.random() == random.Random(1).random()


@dataclasses.dataclass
class Metrics:
    best: float = 0.5


class Text(str):
    pass


class Number(float):
    pass


UNSUPPORTED: dict[str, Any] = {
    "objects": np.array([1, "a", None], object),
    "object": np.array(object(), object),
    "ragged": np.array([[1], [1, 2]], object),
    "structured": np.zeros(2, [("x", "i4")]),
    "record": np.rec.array([(1, 2.0)]),
    "extended precision": np.zeros(1, np.longdouble),
    "extended scalar": np.longdouble(1),
    "masked": np.ma.array([1, 2], mask=[False, True]),
    "dataclass": Metrics(),
    "function": len,
    "class": int,
    "module": sys,
    "generator": (letter for letter in ""),
    "iterator": iter([1]),
    "subclass of str": Text("x"),
    "subclass of float": Number(1.5),
    "file": sys.stdout,
    "decimal": decimal.Decimal("1.5"),
    "lone surrogate": "\udc80",
    "ellipsis": ...,
    "notimplemented": NotImplemented,
    "memoryview": memoryview(b"x"),
    "bytearray": bytearray(b"x"),
    "deque": collections.deque([1]),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_would_not_come_back_is_refused_with_its_path_or_comes_back(
    tmp_path: Path, name: str
) -> None:
    """Case 8, G2: no step appears; the error names sched/best."""
    path = tmp_path / "s"
    ckptfmt.save({"w": np.ones(1)}, path, step=1)
    for tree in (
        {"sched": {"best": UNSUPPORTED[name]}, "w": np.ones(2)},
        {"sched": {"best": [1, {"k": UNSUPPORTED[name]}]}, "w": np.ones(2)},
    ):
        try:
            ckptfmt.save(tree, path, step=2)
        except ckptfmt.UsageError as error:
            assert "sched/best" in str(error)  # noqa: PT017
            assert ckptfmt.Store(path).steps() == [1]
            assert [f.name for f in (path / "checkpoints").iterdir()] == [
                "step-0000000000000001~0.index"
            ]
        else:
            back = ckptfmt.load(path)["sched"]["best"]
            back = back[1]["k"] if isinstance(back, list) else back
            assert type(back) is type(UNSUPPORTED[name])
            assert repr(back) == repr(UNSUPPORTED[name])
            ckptfmt.Store(path).delete(2)


# -- case 9 -------------------------------------------------------------------------------------

EMPTY: dict[str, Any] = {
    "list": [],
    "dict": {},
    "tuple": (),
    "none": None,
    "list in list": [[]],
    "set": set(),
    "frozenset": frozenset(),
    "text": "",
    "bytes": b"",
    "ordered": collections.OrderedDict(),
    "default": collections.defaultdict(list),
    "deep": {"a": {"b": {}}, "c": [{}, [], (), None]},
    "dicts": [{"a": 1}, {"b": 2}],
    "nones": [None, None],
}


@pytest.mark.parametrize("with_tensor", [True, False])
def test_all_empties_stay_distinct_and_present(tmp_path: Path, with_tensor: bool) -> None:
    """Case 9: beside tensors, below them and alone."""
    tree: Any = dict(EMPTY)
    if with_tensor:
        tree |= {"w": np.ones(2), "mixed": [np.ones(1), [], {}, None, ()]}
    ckptfmt.save(tree, tmp_path)
    assert not difference(ckptfmt.load(tmp_path), tree)
    assert list(ckptfmt.load(tmp_path)) == list(tree)


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_alone_at_the_root_comes_back(tmp_path: Path, name: str) -> None:
    """Case 9: the whole checkpoint is one empty."""
    tree = EMPTY[name]
    ckptfmt.save(tree, ckptfmt.Store(tmp_path))
    assert not difference(ckptfmt.load(tmp_path), tree)


@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("saved", [[], [{"a": 1}], [{"a": 1}, {"b": 2}], [[], {}]])
def test_a_template_of_any_length_takes_a_list_of_values_whole(
    tmp_path: Path, saved: Any, length: int
) -> None:
    """Case 9: a list that was empty at the start and has entries at save time."""
    ckptfmt.save({"history": saved, "w": np.ones(1)}, tmp_path)
    target = {"history": [{"a": 0} for _ in range(length)], "w": np.zeros(1)}
    ckptfmt.restore(target, tmp_path)
    assert not difference(target, {"history": saved, "w": np.ones(1)})


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_list_of_tensors_of_another_length_is_one_error_and_nothing_is_merged(
    tmp_path: Path, length: int
) -> None:
    """Case 9."""
    ckptfmt.save(
        {"l": [np.full(2, 5.0), np.full(2, 6.0)], "n": {"x": 1}, "w": np.ones(1)}, tmp_path
    )
    target = {"l": [np.zeros(2) for _ in range(length)], "n": {"x": 0}, "w": np.zeros(1)}
    before = copy.deepcopy(target)
    with pytest.raises(ckptfmt.MismatchError, match=r"\bl(/\d)?\b"):
        ckptfmt.restore(target, tmp_path)
    assert not difference(target, before)


def test_an_empty_list_in_the_template_takes_no_tensors_half_way(tmp_path: Path) -> None:
    """Case 9: an empty container of the target is no place for stored tensors."""
    ckptfmt.save({"l": [np.ones(1)], "w": np.ones(1)}, tmp_path)
    target: dict[str, Any] = {"l": [], "w": np.zeros(1)}
    for strict in (True, False):
        with pytest.raises(ckptfmt.MismatchError, match="a container of 1 leaves"):
            ckptfmt.restore(target, tmp_path, strict=strict)
        assert not difference(target, {"l": [], "w": np.zeros(1)})
