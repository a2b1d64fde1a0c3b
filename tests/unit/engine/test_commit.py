"""The index goes last, once, and is taken back if its data is taken away. Spec: 08-protocol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.storage import Backend, Buffer, open_backend
from ckptfmt.testing import FaultyBackend, difference
from ckptfmt.types import Key


def indexes(path: Path) -> list[str]:
    return sorted(os.listdir(path / "checkpoints")) if (path / "checkpoints").is_dir() else []


def test_the_index_is_put_after_everything_it_needs(counted: Any) -> None:
    ckptfmt.save({"a": np.ones(5)}, counted.store, step=1)
    calls = counted.backend.calls
    put = calls.index(("put_if_absent", "checkpoints/step-0000000000000001~0.index"))
    assert [kind for kind, key in calls[put + 1 :] if kind in ("create", "put_if_absent")] == []
    assert any(kind == "create" and key.startswith("tmp/") for kind, key in calls[:put])
    assert calls[-1][0] == "delete"
    assert calls[-1][1].endswith("/open")


def test_lower_generations_go_after_the_commit_lowest_first(counted: Any) -> None:
    first = ckptfmt.save({"a": 0}, counted.store)
    backend = counted.backend
    old = bytes(backend.get(Key("checkpoints/main~0.index")))
    ckptfmt.save({"a": 1}, counted.store)
    backend.put(Key("checkpoints/main~0.index"), old)
    assert first.generation == 0
    backend.forget()
    ckptfmt.save({"a": 2}, counted.store)
    calls = backend.calls
    put = calls.index(("put_if_absent", "checkpoints/main~2.index"))
    deletes = [
        calls.index(("delete", f"checkpoints/main~{generation}.index")) for generation in (0, 1)
    ]
    assert put < deletes[0] < deletes[1]
    assert calls.index(("sync", "checkpoints/")) > deletes[1]


class Interfering(Backend):
    """Does something at the moment an index is put."""

    def __init__(self, inner: Backend, *, before: Any = None, after: Any = None) -> None:
        self.inner, self.url = inner, inner.url
        self.before, self.after = before, after

    capabilities = property(lambda self: self.inner.capabilities)

    def get(self, *args: Any, **options: Any) -> memoryview:
        return self.inner.get(*args, **options)

    def create(self, *args: Any) -> Any:
        return self.inner.create(*args)

    def put_if_absent(self, key: Key, data: Buffer, *, durable: bool) -> bool:
        is_index = key.startswith("checkpoints/")
        if is_index and self.before is not None:
            act, self.before = self.before, None
            act()
        done = self.inner.put_if_absent(key, data, durable=durable)
        if is_index and self.after is not None:
            act, self.after = self.after, None
            act()
        return done

    def list(self, *args: Any) -> Any:
        return self.inner.list(*args)

    def stat(self, key: Key) -> Any:
        return self.inner.stat(key)

    def delete(self, key: Key) -> None:
        self.inner.delete(key)

    def sync(self, keys: Any) -> None:
        self.inner.sync(keys)


def interfering(path: Path, **acts: Any) -> ckptfmt.Store:
    store = ckptfmt.Store(path)
    store.backend = Interfering(open_backend(path), **acts)
    return store


def test_another_writer_that_comes_first_with_the_same_tree_is_no_conflict(tmp_path: Path) -> None:
    tree = {"a": np.arange(9)}
    store = interfering(tmp_path, before=lambda: ckptfmt.save(tree, tmp_path, step=1))
    info = ckptfmt.save(tree, store, step=1, metrics={"x": 1.0})
    assert info.generation == 0
    assert info.metrics == {"x": 1.0}
    assert indexes(tmp_path) == ["step-0000000000000001~0.index"]


def test_another_writer_that_comes_first_with_another_tree_wins(tmp_path: Path) -> None:
    other = {"a": np.zeros(9, np.int64)}
    store = interfering(tmp_path, before=lambda: ckptfmt.save(other, tmp_path, step=1))
    with pytest.raises(ckptfmt.ExistsError, match="rank 0 only"):
        ckptfmt.save({"a": np.arange(9)}, store, step=1)
    assert not difference(ckptfmt.load(tmp_path), other)
    assert not (tmp_path / "parts").exists() or os.listdir(tmp_path / "parts") == []


def test_with_replace_the_later_commit_is_the_next_generation(tmp_path: Path) -> None:
    other = {"a": np.zeros(9, np.int64)}
    store = interfering(tmp_path, before=lambda: ckptfmt.save(other, tmp_path))
    info = ckptfmt.save({"a": np.arange(9)}, store)
    assert info.generation == 1
    assert indexes(tmp_path) == ["main~1.index"]
    assert not difference(ckptfmt.load(tmp_path), {"a": np.arange(9)})


def test_a_collector_that_takes_a_file_before_the_commit_costs_a_second_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    save = importlib.import_module("ckptfmt.engine.output")
    taken: list[str] = []
    real = save.unusable

    def collect_once(backend: Backend, files: Any) -> Any:
        if not taken and files:
            [taken_id] = files
            taken.append(taken_id)
            (tmp_path / "data" / taken_id).unlink()
        return real(backend, files)

    monkeypatch.setattr(save, "unusable", collect_once)
    ckptfmt.save({"a": np.arange(999)}, tmp_path, step=1)
    assert taken
    assert not difference(ckptfmt.load(tmp_path), {"a": np.arange(999)})


def test_a_collector_that_takes_a_file_after_the_commit_withdraws_the_index(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.zeros(9)}, tmp_path, step=1)

    def collect() -> None:
        index = ckptfmt.Store(tmp_path).open(2).index
        for file in index.files.ids:
            (tmp_path / "data" / file).unlink()

    store = interfering(tmp_path, after=collect)
    with pytest.raises(ckptfmt.ConflictError, match="save again"):
        ckptfmt.save({"a": np.arange(999)}, store, step=2)
    assert ckptfmt.Store(tmp_path).steps() == [1]
    assert ckptfmt.load(tmp_path)["a"].tolist() == [0.0] * 9
    ckptfmt.save({"a": np.arange(999)}, tmp_path, step=2)
    assert ckptfmt.Store(tmp_path).verify().ok


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_reply_to_the_commit_is_looked_into(tmp_path: Path, when: Any) -> None:
    """An unknown outcome is found out by the commit id: put after all, or not."""
    store = ckptfmt.Store(tmp_path)
    store.backend = FaultyBackend(
        open_backend(tmp_path),
        fail_at=0,
        when=when,
        only=lambda operation: (
            operation.kind == "put_if_absent" and operation.key.startswith("checkpoints/")
        ),
    )
    if when == "after":
        info = ckptfmt.save({"a": np.arange(9)}, store, step=1)
        assert info.step == 1
        assert not difference(ckptfmt.load(tmp_path), {"a": np.arange(9)})
    else:
        with pytest.raises(ckptfmt.StorageError):
            ckptfmt.save({"a": np.arange(9)}, store, step=1)
        assert ckptfmt.Store(tmp_path).steps() == []
    assert not (tmp_path / "parts").exists() or os.listdir(tmp_path / "parts") == []


def test_a_commit_whose_outcome_stays_unknown_cleans_nothing_up(tmp_path: Path) -> None:
    store = ckptfmt.Store(tmp_path)
    store.backend = FaultyBackend(
        open_backend(tmp_path),
        fail_at=0,
        mode="from",
        when="after",
        only=lambda operation: (
            operation.key.startswith("checkpoints/") and operation.kind in ("put_if_absent", "get")
        ),
    )
    with pytest.raises(ckptfmt.StorageError, match="outcome of the commit is unknown") as caught:
        ckptfmt.save({"a": np.arange(9)}, store, step=1, timeout_s=0.1)
    assert caught.value.outcome_unknown
    assert caught.value.kind == "storage-commit-unknown"
    assert not difference(ckptfmt.load(tmp_path), {"a": np.arange(9)})
    [txn] = os.listdir(tmp_path / "parts")
    assert os.listdir(tmp_path / "parts" / txn) == ["open"]
