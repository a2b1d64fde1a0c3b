"""Saving again what is stored already mends what is stored, if something of it was lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckptfmt
from ckptfmt.storage.local import LocalBackend
from ckptfmt.types import Key


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray], Path]:
    """A store whose step 2 has one tensor in the file of step 1, which holds another one too."""
    a, b, c = (np.random.default_rng(i).integers(0, 255, 200_000, np.uint8) for i in range(3))
    ckptfmt.save({"a": a, "b": b}, tmp_path, step=1)
    (first,) = (tmp_path / "data").iterdir()
    tree = {"a": a, "b": c}
    ckptfmt.save(tree, tmp_path, step=2, metrics={"loss": 1.0})
    ckptfmt.Store(tmp_path).annotate(2, metrics={"later": 2.0})
    return tmp_path, tree, first


@pytest.mark.parametrize("how", ["gone", "cut", "marked"])
def test_a_step_whose_file_is_lost_is_whole_after_it_is_saved_again(
    shared: tuple[Path, dict[str, np.ndarray], Path], how: str
) -> None:
    path, tree, first = shared
    if how == "gone":
        first.unlink()
    elif how == "cut":
        with first.open("r+b") as file:
            file.truncate(8192)
    else:
        data = bytearray(first.read_bytes())
        data[5000] ^= 1
        first.write_bytes(data)
        LocalBackend(path).put(Key(f"damaged/{first.name}"), b"")
    info = ckptfmt.save(tree, path, step=2, metrics={"loss": 3.0})
    loaded = ckptfmt.load(path, step=2)
    assert all(np.array_equal(loaded[name], tree[name]) for name in tree)
    assert info.metrics == {"loss": 3.0, "later": 2.0}
    assert ckptfmt.Store(path).verify(2).ok
    assert ckptfmt.Store(path).steps() == [1, 2]


def test_a_tag_stays_on_what_was_mended(
    shared: tuple[Path, dict[str, np.ndarray], Path],
) -> None:
    path, tree, first = shared
    ckptfmt.Store(path).tag("best", 2)
    first.unlink()
    ckptfmt.save(tree, path, step=2)
    assert np.array_equal(ckptfmt.load(path, at="best")["a"], tree["a"])


def test_nothing_is_committed_again_where_nothing_is_lost(
    shared: tuple[Path, dict[str, np.ndarray], Path],
) -> None:
    path, tree, _ = shared
    before = sorted((path / "data").iterdir()), sorted((path / "checkpoints").iterdir())
    ckptfmt.save(tree, path, step=2)
    assert before == (sorted((path / "data").iterdir()), sorted((path / "checkpoints").iterdir()))
