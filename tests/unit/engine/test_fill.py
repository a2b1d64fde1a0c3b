"""Boxes of stored tensors into arrays that are there: every cut of both sides gives the same bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import ckptfmt
from ckptfmt.engine import Fill, fill_boxes
from ckptfmt.engine import fill as module


def _row(checkpoint: ckptfmt.Checkpoint, name: str) -> int:
    leaf = checkpoint[name]
    assert isinstance(leaf, ckptfmt.StoredTensor)
    return leaf.row


def _boxes(rng: random.Random, shape: Sequence[int], count: int) -> list[tuple[slice, ...]]:
    made = []
    for _ in range(count):
        bounds = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
        made.append(tuple(slice(a, b) for a, b in bounds))
    return made


def _filled(
    checkpoint: ckptfmt.Checkpoint, name: str, box: tuple[slice, ...], *, strided: bool
) -> NDArray[Any]:
    leaf = checkpoint[name]
    assert isinstance(leaf, ckptfmt.StoredTensor)
    extent = [b.stop - b.start for b in box]
    carrier = np.dtype(f"i{leaf.dtype.itemsize}")
    if strided:
        base = np.zeros([2 * n for n in extent], carrier)
        every_other: Any = (..., *(slice(None, None, 2) for _ in extent))
        out = base[every_other]
    else:
        out = np.zeros(extent, carrier)
    fill_boxes(checkpoint, [Fill(leaf.row, tuple(b.start for b in box), out)])
    made: NDArray[Any] = out.view(leaf.dtype)
    return made


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("strided", [False, True])
def test_any_box_is_what_numpy_cuts(tmp_path: Path, seed: int, codec: str, strided: bool) -> None:
    rng = random.Random(seed)
    data = np.random.default_rng(seed)
    arrays = {
        "flat": data.standard_normal(5000).astype("f4"),
        "deep": data.integers(0, 1 << 15, (7, 33, 61)).astype("i2"),
        "wide": data.integers(0, 255, (3, 40_000)).astype("u1"),
        "point": np.array(3.5),
    }
    ckptfmt.save(arrays, tmp_path / "s", codec=codec, chunk_nbytes=4096)
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        for name, array in arrays.items():
            for box in _boxes(rng, array.shape, 40):
                found = _filled(checkpoint, name, box, strided=strided)
                assert found.tobytes() == array[box].tobytes(), (name, box)


def test_large_parts_go_straight_and_pieces_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STRAIGHT_NBYTES_MIN", 8192)
    monkeypatch.setattr(module, "STRAIGHT_NBYTES_MAX", 16384)
    monkeypatch.setattr(module, "BATCH_NBYTES", 10_000)
    array = np.arange(300 * 200, dtype="f8").reshape(300, 200)
    ckptfmt.save({"w": array}, tmp_path / "s", chunk_nbytes=4096)
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        for box in (np.s_[0:300, 0:200], np.s_[5:290, 0:200], np.s_[5:290, 3:150], np.s_[7:8, 1:2]):
            assert np.array_equal(_filled(checkpoint, "w", box, strided=False), array[box])


def test_several_boxes_of_several_tensors_at_once(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.arange(i, i + 50, dtype="i4") for i in range(20)}
    ckptfmt.save(arrays, tmp_path / "s")
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        outs = {name: np.zeros(30, "i4") for name in arrays}
        fill_boxes(checkpoint, [Fill(_row(checkpoint, n), (10,), out) for n, out in outs.items()])
    for name, out in outs.items():
        assert np.array_equal(out, arrays[name][10:40])


@pytest.mark.parametrize("nbytes", [4000, 4 << 20])
def test_a_flipped_bit_is_found(tmp_path: Path, nbytes: int) -> None:
    ckptfmt.save({"w": np.ones(nbytes, "u1")}, tmp_path / "s")
    (file,) = (tmp_path / "s/data").iterdir()
    raw = bytearray(file.read_bytes())
    raw[raw.index(b"\x01" * 64) + 50] ^= 4
    file.write_bytes(raw)
    with ckptfmt.open(tmp_path / "s") as checkpoint, pytest.raises(ckptfmt.CorruptError):
        fill_boxes(checkpoint, [Fill(_row(checkpoint, "w"), (0,), np.zeros(nbytes, "u1"))])


def test_nothing_is_read_for_a_box_without_elements(tmp_path: Path) -> None:
    ckptfmt.save({"w": np.ones((4, 4)), "e": np.ones((0, 4))}, tmp_path / "s")
    (file,) = (tmp_path / "s/data").iterdir()
    file.unlink()
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        fill_boxes(checkpoint, [Fill(_row(checkpoint, "w"), (1, 1), np.zeros((0, 2)))])
        fill_boxes(checkpoint, [Fill(_row(checkpoint, "e"), (0, 0), np.zeros((0, 4)))])
