"""What a map asks the system to read, before anything waits for it."""

from __future__ import annotations

import gc
import mmap
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.foreign import file_map
from ckptfmt.foreign.file_map import FileMap, open_map, view

MIB = 1 << 20
COMPAT = Path(__file__).parents[2] / "compat" / "import"
Asked = list[tuple[int, int]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Ranges (start, stop) that the system was asked to read."""
    made: Asked = []

    def madvise(self: FileMap, advice: int, start: int, nbytes: int) -> None:
        assert advice == mmap.MADV_WILLNEED
        assert start % mmap.PAGESIZE == 0
        made.append((start, start + nbytes))

    monkeypatch.setattr(FileMap, "madvise", madvise)
    return made


@pytest.fixture
def data(tmp_path: Path) -> FileMap:
    path = tmp_path / "x"
    with open(path, "wb") as file:
        file.truncate(256 * MIB)  # a hole
    made, nbytes = open_map(str(path), "x")
    assert made is not None
    assert nbytes == 256 * MIB
    return made


def test_ranges_that_follow_one_another_are_asked_for_ahead(data: FileMap, asked: Asked) -> None:
    for start in range(0, 256 * MIB, MIB):
        array = view(data, start + 64, MIB - 64)
        assert array.size == MIB - 64
        reached = max(stop for _, stop in asked)
        assert reached >= min(start + 50 * MIB, 256 * MIB)
        assert reached <= start + 65 * MIB
    assert asked[0][0] == 0
    assert all(a[1] - b[0] in range(mmap.PAGESIZE + 1) for a, b in pairwise(asked))
    assert len(asked) < 40


def test_of_a_range_by_itself_no_more_than_that_is_asked_for(data: FileMap, asked: Asked) -> None:
    view(data, 128 * MIB, 10 * MIB)
    view(data, 40 * MIB, 100)
    view(data, 200 * MIB, 50 * MIB)
    view(data, 200 * MIB, 50 * MIB)
    assert asked == [(128 * MIB, 138 * MIB), (200 * MIB, 250 * MIB)]


def test_a_tensor_larger_than_memory_is_not_asked_for_at_once(data: FileMap, asked: Asked) -> None:
    view(data, 0, 256 * MIB)
    assert asked == [(0, 64 * MIB)]


def test_a_system_that_refuses_advice_is_read_all_the_same(
    data: FileMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(FileMap, "madvise", refuse)
    assert view(data, 0, 20 * MIB).any() == np.False_
    monkeypatch.setattr(file_map, "_WILLNEED", None)
    assert view(data, 20 * MIB, 20 * MIB).any() == np.False_


@pytest.mark.parametrize("name", ["x.index", "x.pt", "x.npz", "x.safetensors"])
def test_a_conversion_has_its_file_read_before_it_waits_for_it(
    name: str, tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_map, "_STEP_NBYTES", 4096)
    monkeypatch.setattr(file_map, "_AHEAD_NBYTES", 16 << 10)
    tree = {f"t{n}": np.arange(n, n + 2000) for n in range(20)}
    ckptfmt.save(tree, tmp_path / "s", durable=False)
    ckptfmt.export(tmp_path / "s", tmp_path / name)
    asked.clear()
    ckptfmt.convert(tmp_path / name, tmp_path / "t", durable=False)
    covered = {page for start, stop in asked for page in range(start // 4096, -(-stop // 4096))}
    assert len(covered) >= 20 * 16_000 // 4096


@pytest.mark.parametrize("name", ["x.pt", "x.index", "x.npz", "x.safetensors", "every-dtype.gguf"])
def test_a_conversion_lets_go_of_its_file_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    maps: list[weakref.ref[FileMap]] = []

    def remembered(cls: type[FileMap], *given: Any, **named: Any) -> FileMap:
        made = mmap.mmap.__new__(cls, *given, **named)
        maps.append(weakref.ref(made))
        return made

    source = tmp_path / name
    if name.endswith(".gguf"):
        source = COMPAT / "gguf" / "every-type.gguf"
    else:
        tree = {"a": np.arange(6.0).reshape(2, 3), "b": [np.ones(2), np.zeros((0, 3))]}
        ckptfmt.save(tree, tmp_path / "runs")
        ckptfmt.export(tmp_path / "runs", source)
    monkeypatch.setattr(FileMap, "__new__", remembered)
    gc.disable()
    try:
        ckptfmt.convert(source, tmp_path / "made")
        assert maps
        assert not any(made() for made in maps)
    finally:
        gc.enable()
