"""A wrong kind of argument is a UsageError that says what was expected, before anything is touched."""

# mypy: disable-error-code="arg-type, list-item, call-overload, operator"

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments") / "a"
    ckptfmt.save({"w": np.zeros(3), "n": [1, {"a": np.ones(2)}]}, folder, step=1)
    return folder


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "names a number": (lambda at: ckptfmt.load(at, names=3), "a pattern, several, or a function"),
    "names of numbers": (lambda at: ckptfmt.load(at, names=[3]), "found int 3"),
    "max_nbytes a str": (lambda at: ckptfmt.load(at, max_nbytes="1G"), "found str '1G'"),
    "metadata a list": (
        lambda at: ckptfmt.save(1, at, step=2, metadata=[1]),
        "metadata= is no dict",
    ),
    "metrics None": (lambda at: ckptfmt.save(1, at, step=2, metrics=None), "metrics= is no dict"),
    "bases a number": (
        lambda at: ckptfmt.save(1, at, step=2, bases=1),
        r"for example bases=\[1000\]",
    ),
    "bases a name": (lambda at: ckptfmt.save(1, at, step=2, bases="best"), "is a list"),
    "rename a list": (
        lambda at: ckptfmt.restore({"w": np.zeros(3)}, at, names="w", rename=["w"]),
        "neither a dict nor a function",
    ),
    "an empty target": (lambda at: ckptfmt.restore({}, at), "nothing that could be filled"),
    "a generator to fill": (
        lambda at: ckptfmt.restore(iter([1]), at),
        "nothing that could be filled",
    ),
    "threads a str": (lambda at: ckptfmt.configure(threads="4"), "an int, 1 or more, found '4'"),
    "a store of None": (lambda at: ckptfmt.Store(None), "not a path or a URL: found NoneType"),
    "a negative step": (lambda at: ckptfmt.save(1, at, step=-1), "count the steps"),
    "a generator": (lambda at: ckptfmt.save(iter([1]), at, step=2), r"or save list\(x\)"),
    "a file": (lambda at: ckptfmt.save(io.BytesIO(), at, step=2), "or save its name"),
    "an object without a dict": (lambda at: ckptfmt.save(object(), at, step=2), "or leave it out"),
    "an export of a live tree": (lambda at: ckptfmt.export({"w": 1}, at / "x.npz"), "found dict"),
    "an export to None": (lambda at: ckptfmt.export(at, None), "dst is no path: found NoneType"),
    "shards of a text": (
        lambda at: ckptfmt.export(at, at / "x.npz", shard_nbytes="5GB"),
        "a number of bytes, found '5GB'",
    ),
    "a conversion of a number": (lambda at: ckptfmt.convert(3, at), "found int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_kind_of_argument_is_a_usage_error_that_says_so(store: Path, case: str) -> None:
    call, says = WRONG[case]
    with pytest.raises(ckptfmt.UsageError, match=says):
        call(store)
    assert ckptfmt.Store(store).steps() == [1]


def test_a_file_is_not_taken_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"something")
    with pytest.raises(ckptfmt.UsageError, match="a store is a folder, and a file is there"):
        ckptfmt.save({"w": 1}, tmp_path / "old")
    with pytest.raises(ckptfmt.NotFoundError, match="found a file"):
        ckptfmt.load(tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"something"


def test_a_container_or_a_number_for_a_leaf_is_told_what_to_take(store: Path) -> None:
    with ckptfmt.open(store) as checkpoint:
        with pytest.raises(ckptfmt.NotFoundError, match=r"it holds 2 leaves, take one: 'n/0'"):
            checkpoint["n"]
        with pytest.raises(ckptfmt.NotFoundError, match="found by name"):
            checkpoint[3]  # type: ignore[index]


def test_a_store_opens_as_a_source_without_rules(store: Path) -> None:
    source = ckptfmt.open_foreign(store)
    assert source.names() == ["w", "n/0", "n/1/a"]
    assert np.array_equal(source.load()["w"], np.zeros(3))
