"""Reading: few requests, each byte once, checked, and errors that name what is hit. Spec: 05, 06, 07."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine import read as read_module
from ckptfmt.engine.plan import plan_runs
from ckptfmt.storage import open_backend
from ckptfmt.testing import FaultyBackend, difference
from ckptfmt.types import Key


@pytest.mark.parametrize("late_key", [True, False])
def test_pieces_and_runs_of_any_size_give_the_same(
    monkeypatch: pytest.MonkeyPatch, late_key: bool
) -> None:
    rng = np.random.default_rng(0)
    tree = {
        f"{i:02}": rng.integers(0, 255, int(n), np.uint8)
        for i, n in enumerate(rng.integers(1, 60_000, 40))
    }
    tree["tied"] = tree["07"]
    tree["equal"] = tree["12"].copy()
    store = ckptfmt.Store("memory://", storage_options={"late_key": late_key})
    ckptfmt.save(tree, store, chunk_nbytes=4096)
    for piece, run in ((1, 1), (5000, 10_000), (1 << 20, 30_000), (8 << 20, 256 << 20)):
        monkeypatch.setattr(read_module, "PIECE_NBYTES", piece)
        monkeypatch.setattr(read_module, "plan_runs", partial(plan_runs, run_nbytes=run))
        for mode in ("auto", "read"):
            assert not difference(ckptfmt.load(store, mode=mode), tree)


def test_no_byte_is_read_twice(counted: Any) -> None:
    tree = {f"{i}": np.full(3000 + i, i, np.int64) for i in range(60)}
    tree["tied"] = tree["3"]
    tree["equal"] = tree["4"].copy()
    ckptfmt.save(tree, counted.store, chunk_nbytes=8192)
    [entry] = counted.backend.list("data/")
    counted.backend.forget()
    ckptfmt.load(counted.store, mode="read")
    assert counted.backend.data_nbytes() <= entry.nbytes


def test_over_small_gaps_is_read_and_over_large_ones_is_not(counted: Any) -> None:
    tree = {f"{i}": np.full(20_000 if i % 2 else 600_000, i, np.uint8) for i in range(8)}
    ckptfmt.save(tree, counted.store)
    counted.backend.forget()
    ckptfmt.load(counted.store, names=["1", "3", "5", "7"])
    assert counted.backend.data_nbytes() < 200_000
    counted.backend.forget()
    ckptfmt.load(counted.store, names=["0", "2"])
    assert len(counted.backend.data_reads()) == 1


def test_a_storage_error_of_the_medium_is_raised_as_it_is(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(5000)}, tmp_path)
    for operation in range(30):
        store = ckptfmt.Store(tmp_path)
        faulty = FaultyBackend(open_backend(tmp_path), fail_at=operation)
        store.backend = faulty
        try:
            loaded = ckptfmt.load(store)
        except ckptfmt.StorageError:
            assert faulty.fired
            continue
        if not faulty.fired:
            assert not difference(loaded, {"a": np.arange(5000)})
            break
    else:
        pytest.fail("a load takes fewer operations than that")
    assert not (tmp_path / "damaged").exists(), "the medium's failure is no damage"


def test_a_file_that_is_replaced_by_a_shorter_one_while_it_is_read_is_corrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ckptfmt.Store("memory://")
    ckptfmt.save({"a": np.arange(5000)}, store)
    [entry] = store.backend.list("data/")
    checkpoint = store.open()
    store.backend.put(Key(entry.key), bytes(store.backend.get(entry.key))[:4096])
    with pytest.raises(ckptfmt.CorruptError, match="'a'"):
        checkpoint.load()


def test_zstd_frames_that_are_damaged_never_reach_the_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptfmt.save({"a": np.zeros(50_000)}, tmp_path, codec="zstd")
    [file] = (tmp_path / "data").iterdir()
    data = bytearray(file.read_bytes())
    start = int(ckptfmt.open(tmp_path).index.placement.offsets[0])
    data[start + 3] ^= 1
    file.write_bytes(data)

    def never(*args: Any, **kwargs: Any) -> bytes:
        raise AssertionError("decoded before it was checked")

    monkeypatch.setattr("ckptfmt.format.codecs.zstd.Zstd.decode", never)
    for verify in (True, False):
        with pytest.raises(ckptfmt.CorruptError, match="chunk digest differs"):
            ckptfmt.load(tmp_path, verify=verify)


def test_a_damaged_file_is_marked_only_if_it_may_be(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(5000)}, tmp_path)
    [file] = (tmp_path / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(ckptfmt.CorruptError):
        ckptfmt.load(ckptfmt.Store(tmp_path, read_only=True))
    assert not (tmp_path / "damaged").exists()


def test_an_empty_selection_of_bytes_reads_nothing(counted: Any) -> None:
    tree = {"z": np.zeros((0, 3)), "v": 1, "y": np.zeros((2, 0, 2), np.int8)}
    ckptfmt.save(tree, counted.store)
    counted.backend.forget()
    for mode in ("auto", "read", "mmap"):
        assert not difference(ckptfmt.load(counted.store, mode=mode), tree)
    assert counted.backend.data_reads() == []
