"""Bytes on their way to a file: from the arena as they lie, else through the ring. Spec: 05."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine import background, outlet, write
from ckptfmt.engine.arena import PIECE_NBYTES
from ckptfmt.testing import difference

MIB = 1 << 20


def _tree(rng: np.random.Generator) -> dict[str, Any]:
    sizes = [100, 9 * MIB + 17, 64, 70_000, 3 * MIB, 5000, 1, 12 * MIB, 65_536, 4 * MIB + 4096]
    tree: dict[str, Any] = {f"{i}": rng.integers(0, 255, n, np.uint8) for i, n in enumerate(sizes)}
    tree |= {f"s{i}": rng.integers(0, 255, 60 + i, np.uint8) for i in range(5000)}
    tree["text"] = np.array(["a", "bcd", "e" * 1000], object)
    return tree


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what goes through the ring."""
    made: list[int] = []
    send = outlet._send

    def counting(writer: Any, offset: int, piece: Any, nbytes: int, ring: Any) -> None:
        made.append(nbytes)
        send(writer, offset, piece, nbytes, ring)

    monkeypatch.setattr(outlet, "_send", counting)
    return made


def test_a_background_save_writes_the_very_file_of_a_save(tmp_path: Path) -> None:
    tree = _tree(np.random.default_rng(0))
    ckptfmt.save(tree, tmp_path / "a", step=1)
    background._arena.trim()
    for fill in (0, 255):  # what an earlier save left in the arena must not reach the padding
        memory = background._arena.take(64 * MIB)
        memory[:] = fill
        background._arena.back(memory)
        store = tmp_path / f"b{fill}"
        ckptfmt.save_async(tree, store, step=1).result(60)
        names = [
            sorted(p.name for p in (path / "data").iterdir()) for path in (tmp_path / "a", store)
        ]
        assert names[0] == names[1]
        assert ckptfmt.Store(store).verify().ok
        assert not difference(ckptfmt.load(store), tree)


def test_what_lies_in_the_arena_as_in_the_file_is_not_copied_again(
    tmp_path: Path, copied: list[int]
) -> None:
    ckptfmt.save_async(_tree(np.random.default_rng(0)), tmp_path, step=1).result(60)
    assert sum(copied) < 2 * MIB  # the head, the table
    copied.clear()
    ckptfmt.save(_tree(np.random.default_rng(1)), tmp_path, step=2)
    assert sum(copied) > 30 * MIB


@pytest.mark.parametrize("codec", ["raw", {"2*": "zstd", "**": "raw"}])
def test_regions_that_are_stored_already_leave_no_trace_in_the_padding(
    tmp_path: Path, copied: list[int], codec: Any
) -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 255, 5 * MIB + 100, np.uint8)
    small = rng.integers(1, 255, 3000, np.uint8)
    tree = {
        "0": first,
        "1": small,
        "20": first,  # equal to another of this save
        "21": small,
        "22": rng.integers(0, 9, 5 * MIB, np.uint8),
        "3": rng.integers(0, 255, 9 * MIB + 5, np.uint8),
        "4": rng.integers(0, 255, 6 * MIB, np.uint8),
    }
    ckptfmt.save({"old": tree["3"][: 4 * MIB]}, tmp_path, step=0)  # a chunk that a base has
    ckptfmt.save_async(tree, tmp_path, step=1, codec=codec).result(60)
    assert ckptfmt.Store(tmp_path).verify().ok
    assert not difference(ckptfmt.load(tmp_path, step=1), tree)
    if codec == "raw":
        assert sum(copied) < 4 * MIB + MIB  # the base's save, and edges


def test_files_that_end_early_are_laid_out_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    from ckptfmt.engine import stage

    monkeypatch.setattr(stage, "FILE_NBYTES_TARGET", 6 * MIB)
    monkeypatch.setattr(write, "FILE_NBYTES_TARGET", 6 * MIB)
    tree = _tree(np.random.default_rng(0))
    ckptfmt.save_async(tree, tmp_path, step=1).result(60)
    assert len(list((tmp_path / "data").iterdir())) >= 3
    assert ckptfmt.Store(tmp_path).verify().ok
    assert not difference(ckptfmt.load(tmp_path), tree)
    assert sum(copied) < 2 * MIB, copied


def test_pieces_are_of_several_mib_and_begin_on_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfmt.storage.local_writer import LocalWriter

    written: list[tuple[int, int]] = []
    real = LocalWriter.write

    def noting(self: Any, offset: int, buffer: Any) -> None:
        written.append((offset, len(buffer)))
        real(self, offset, buffer)

    monkeypatch.setattr(LocalWriter, "write", noting)
    tree = {f"{i}": np.random.default_rng(i).random(500_000) for i in range(8)}
    ckptfmt.save_async(tree, tmp_path, step=1).result(60)
    assert all(offset % 4096 == 0 for offset, _ in written)
    assert sum(nbytes == PIECE_NBYTES for _, nbytes in written) >= 7
    assert len(written) <= 11
