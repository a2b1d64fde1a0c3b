"""`per_rank`: a value of each rank's own, under the rank's number."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import FileGroup
from ckptfmt.engine import PerRank, flatten, per_rank
from ckptfmt.errors import MismatchError, UsageError


def test_a_process_alone_is_rank_0_of_1(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    ckptfmt.save({"rng": per_rank(generator), "pos": [per_rank(7)]}, tmp_path)
    expected = generator.random(4).tolist()
    assert ckptfmt.load(tmp_path)["pos"] == [{"0": 7}]
    target: dict[str, Any] = {"rng": per_rank(np.random.default_rng(0)), "pos": [per_rank(0)]}
    assert ckptfmt.restore(target, tmp_path).clean
    assert target["pos"][0].value == 7
    assert target["rng"].value.random(4).tolist() == expected


def test_names_hold_the_rank_whose_they_are() -> None:
    tree = {"a": per_rank({"x": np.zeros(1), "y": 1}), "b": per_rank(per_rank(2))}
    assert flatten(tree, rank=3).names == ["a/3/x", "a/3/y", "b/3/3"]


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ({"rng": {"0": 1, "1": 2}}, "expected the value of one process, found a value for each of"),
        ({"rng": {"x": 1}}, "expected the value of one process, found a value that belongs to no"),
        ({"rng": 1}, "found a value that belongs to no rank"),
    ],
)
def test_another_number_of_ranks_is_a_mismatch_and_nothing_changes(
    stored: dict[str, Any], text: str, tmp_path: Path
) -> None:
    ckptfmt.save({**stored, "w": np.ones(2)}, tmp_path)
    target = {"rng": per_rank(9), "w": np.zeros(2)}
    with pytest.raises(MismatchError, match=text):
        ckptfmt.restore(target, tmp_path, strict=False)
    assert target["rng"].value == 9  # type: ignore[attr-defined]
    assert not target["w"].any()  # type: ignore[attr-defined]


def test_a_failure_later_puts_the_old_value_back(tmp_path: Path) -> None:
    class Late:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("no")

    ckptfmt.save({"pos": per_rank(7), "w": np.ones(1), "late": Late()}, tmp_path)
    target: dict[str, Any] = {"pos": per_rank(1), "w": np.zeros(1), "late": Late()}
    with pytest.raises(Exception, match="no"):
        ckptfmt.restore(target, tmp_path)
    assert target["pos"].value == 1


class Holder:
    """An object that is given its state back whole."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def state_dict(self) -> object:
        return self.inner

    def load_state_dict(self, state: object) -> None:
        self.inner = state


def test_a_value_of_a_rank_in_an_objects_state_is_refused_by_its_path(tmp_path: Path) -> None:
    tree = {"a": [Holder({"k": 1, "p": per_rank(7)})]}
    with pytest.raises(UsageError) as caught:
        ckptfmt.save(tree, tmp_path)
    assert str(caught.value) == (
        "a value of each rank's own stands in an object that is given all of its state back: a/0/p: "
        "found per_rank in the state of Holder; mark the object: per_rank(x); or give the value a place "
        "of its own in the tree"
    )
    assert ckptfmt.Store(tmp_path).names() == []
    ckptfmt.save({"a": [per_rank(Holder({"k": 1})), per_rank(7)]}, tmp_path)  # as it says


NESTED: dict[str, Callable[[int], Any]] = {
    "in dicts": lambda n: {"a": {"b": per_rank({"x": np.full(2, n), "n": n})}},
    "in a list": lambda n: {"a": [np.ones(1), per_rank(n), [per_rank({"t": (n,)})]]},
    "in a list without tensors": lambda n: {"a": [1, per_rank(n)]},
    "in a tuple": lambda n: {"a": (np.ones(1), per_rank(n), {"b": per_rank(np.full(3, n))})},
    "at the root": lambda n: per_rank({"k": np.full(1, n)}),
    "in mappings of a kind": lambda n: {
        "a": OrderedDict(z=per_rank(n), y=np.ones(2)),
        "b": defaultdict(list, z=per_rank([n])),
    },
    "of an object": lambda n: {"a": {"s": per_rank(Holder({"k": np.full(1, n)}))}},
    "empty": lambda n: {"a": {"b": per_rank({})}, "c": per_rank(n)},
    "one within another": lambda n: {"a": per_rank({"q": per_rank(n), "r": [per_rank({"x": n})]})},
}


def plain(obj: Any) -> Any:
    if isinstance(obj, PerRank):
        return "of a rank", plain(obj.value)
    if isinstance(obj, Holder):
        return "object", plain(obj.inner)
    if isinstance(obj, dict):
        return {key: plain(item) for key, item in obj.items()}
    if isinstance(obj, list | tuple):
        return [plain(item) for item in obj]
    return obj.tolist() if isinstance(obj, np.ndarray) else obj


@pytest.mark.parametrize("name", NESTED)
def test_values_of_ranks_come_back_wherever_they_stand_in_the_tree(
    name: str, tmp_path: Path
) -> None:
    make = NESTED[name]
    targets = [make(0), make(0)]

    def run(rank: int) -> bool:
        group = FileGroup(rank, 2)
        ckptfmt.save(make(5 + rank), tmp_path, step=1, group=group)
        return ckptfmt.restore(targets[rank], tmp_path, group=group).clean

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [True, True]
    assert [plain(target) for target in targets] == [plain(make(5)), plain(make(6))]
    if name != "empty":
        with pytest.raises(MismatchError, match="a value for each of 2 ranks"):
            ckptfmt.restore(make(0), tmp_path)
