"""Paths, URLs and selectors. Spec: 02-store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Store
from ckptfmt.engine.where import choose_at, parse_where, whole_number


@pytest.mark.parametrize(
    ("text", "url", "which"),
    [
        ("runs/a@7", "runs/a", 7),
        ("runs/a@0012", "runs/a", 12),
        ("runs/a@best", "runs/a", "best"),
        ("runs/a@latest", "runs/a", "latest"),
        ("runs/a@b@c", "runs/a@b", "c"),
        ("user@host/a", "user@host/a", None),
        ("user@host/a@3", "user@host/a", 3),
        ("memory://x@best", "memory://x", "best"),
        ("runs/a", "runs/a", None),
        ("runs/a@7/", "runs/a@7/", None),
        ("runs/a@²", "runs/a", "²"),
    ],
)
def test_a_text_is_split_at_the_last_at_of_its_last_segment(
    text: str, url: str, which: Any
) -> None:
    store, at = parse_where(text)
    assert at == which
    assert store.url == ckptfmt.Store(url).url


@pytest.mark.parametrize("scheme", ["hf", "github", "git"])
def test_schemes_that_use_the_sign_themselves_are_never_split(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfmt.engine.store.open_backend", lambda url, **_: _Fake(url))
    store, at = parse_where(f"{scheme}://org/repo@main")
    assert (store.url, at) == (f"{scheme}://org/repo@main", None)


class _Fake:
    def __init__(self, url: str) -> None:
        self.url = url


def test_a_path_a_store_and_what_exists_are_never_split(tmp_path: Path) -> None:
    assert parse_where(tmp_path / "a@7")[1] is None
    store = ckptfmt.Store(tmp_path / "b@8")
    assert parse_where(store) == (store, None)
    (tmp_path / "c@9").mkdir()
    found, at = parse_where(f"{tmp_path}/c@9")
    assert (found.url, at) == (f"{tmp_path}/c@9", None)


def test_a_folder_with_the_sign_in_its_name_works_as_a_path(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path / "run@7")
    assert os.listdir(tmp_path) == ["run@7"]
    assert ckptfmt.load(f"{tmp_path}/run@7") == {"a": 1}
    assert ckptfmt.load(f"{tmp_path}/run@7@main") == {"a": 1}


@pytest.mark.parametrize("path", ["runs/a@", "x.ckptz", "x.ckptz/"])
def test_what_selects_nothing_or_is_not_built_yet_is_refused(path: str) -> None:
    with pytest.raises(ckptfmt.UsageError):
        parse_where(path)


@pytest.mark.parametrize("path", [None, 5, b"runs/a", ["runs/a"], {"a": 1}])
def test_what_is_no_place_is_refused(path: Any) -> None:
    with pytest.raises(ckptfmt.UsageError):
        parse_where(path)


def test_one_choice_is_taken_and_two_are_refused() -> None:
    assert choose_at(None, None, None) is None
    assert choose_at("best", None, None) == "best"
    assert choose_at(None, 7, None) == 7
    assert choose_at(None, None, "x") == "x"
    for chosen in (("best", 7, None), (3, None, 3), (None, 7, 7), ("a", 1, "b")):
        with pytest.raises(ckptfmt.UsageError, match="twice"):
            choose_at(*chosen)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0), (np.int64(5), 5), (np.uint8(5), 5), (np.array(7), 7), (None, None)],
)
def test_integers_of_any_kind_are_steps(step: Any, expected: int | None) -> None:
    made = whole_number(step)
    assert made == expected
    assert type(made) is type(expected)


@pytest.mark.parametrize(
    "step", [-1, 2**53, 1.0, "1", True, np.bool_(True), np.zeros(2, int), b"1"]
)
def test_what_is_no_count_is_refused(step: Any) -> None:
    with pytest.raises(ckptfmt.UsageError, match="step"):
        whole_number(step)


def test_arguments_that_look_swapped_are_told(tmp_path: Path) -> None:
    tree = {"w": np.zeros(2)}
    calls: list[Any] = [ckptfmt.save, ckptfmt.restore, ckptfmt.plan]
    for call in calls:
        for path in (str(tmp_path), tmp_path):
            with pytest.raises(
                ckptfmt.UsageError, match=r"look swapped: found .* as (tree|target)"
            ):
                call(path, tree)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "cure"),
    [
        ("typo", "check the path, or save one first"),
        (Path("runs@3"), "only a str is split at its @"),
        ("model.safetensors", "open_foreign"),
    ],
)
def test_a_place_without_checkpoints_says_what_may_be_wrong(
    path: str | Path, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ckptfmt.NotFoundError, match=cure) as caught:
        ckptfmt.load(path)
    assert caught.value.kind == "not-found-latest"
    assert "there is no checkpoint" in str(caught.value)


def test_a_choice_of_another_type_is_told_by_its_argument(tmp_path: Path) -> None:
    ckptfmt.save({"w": 1}, tmp_path, step=1)
    with pytest.raises(ckptfmt.UsageError, match=r"at is not an integer: .*or a name"):
        ckptfmt.load(tmp_path, at=[1])  # type: ignore[call-overload]


def test_a_store_may_be_called_like_a_file_a_path_is_asked_about(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, Store(tmp_path / "epoch=3.ckpt"))
    with pytest.warns(ckptfmt.CkptWarning, match="becomes a folder"):
        ckptfmt.save({"a": 1}, tmp_path / "model.ckpt")
