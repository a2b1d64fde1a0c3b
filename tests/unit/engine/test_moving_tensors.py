"""Tensors that somebody writes to while they are saved: what is committed can be read, or nothing is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine import encode, write
from ckptfmt.errors import ConflictError
from ckptfmt.storage.memory import MemoryBackend


def _before(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, call: Callable[[], Any]) -> None:
    """`call` runs just before each call of a method: between a tensor's digest and its writing."""
    original = getattr(cls, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call()
        return original(*args, **kwargs)

    monkeypatch.setattr(cls, name, wrapped)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("nbytes", [70_000, 3 << 20, 9 << 20])
def test_a_tensor_that_changes_between_its_digest_and_the_file_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, codec: str
) -> None:
    array = np.zeros(nbytes, np.uint8)
    ckptfmt.save({"w": array}, tmp_path, step=1)

    def change() -> None:
        array[::1000] += 1

    _before(monkeypatch, write.DataFiles, "add", change)
    with pytest.raises(ConflictError) as caught:
        ckptfmt.save({"w": array}, tmp_path, step=2, bases=[], codec=codec)
    assert caught.value.kind == "conflict-changed"
    assert "'w'" in str(caught.value)
    assert ckptfmt.Store(tmp_path).steps() == [1]
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.is_file()]


def test_where_chunks_are_kept_for_later_a_copy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.zeros(3 << 20, np.uint8)

    class Late(MemoryBackend):
        @property
        def capabilities(self) -> Any:
            from dataclasses import replace

            return replace(super().capabilities, late_key=False)

    store = ckptfmt.Store("memory://kept")
    store.backend = Late("memory://kept")

    def change() -> None:
        array[::1000] += 1

    _before(monkeypatch, write.DataFiles, "_finish", change)
    ckptfmt.save({"w": array}, store, step=1)
    assert np.array_equal(ckptfmt.load(store)["w"], np.zeros(3 << 20, np.uint8))


@pytest.mark.parametrize("count", [3, 500])
def test_small_tensors_are_saved_as_they_were_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    tree = {str(i): np.full(100, i, np.int32) for i in range(count)}

    def change() -> None:
        for array in tree.values():
            array[1:] += 1

    _before(monkeypatch, write.DataFiles, "add_small", change)
    _before(monkeypatch, write.DataFiles, "add", change)
    ckptfmt.save(tree, tmp_path)
    assert ckptfmt.Store(tmp_path).verify().ok
    for name, array in ckptfmt.load(tmp_path).items():
        assert array[0] == int(name)


def test_what_is_staged_is_not_digested_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(algorithm: str) -> Any:
        raise AssertionError(algorithm)

    monkeypatch.setattr(write, "hasher", never)
    monkeypatch.setattr(encode, "changed", never)
    ckptfmt.save_async({"w": np.arange(2_000_000)}, tmp_path).result()
    assert ckptfmt.load(tmp_path)["w"][-1] == 1_999_999
