"""Reading a part gives what NumPy gives, and touches no chunk that it need not. Spec: 07-index."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.testing import difference

INDEXES: list[Any] = [
    np.s_[...],
    np.s_[:],
    np.s_[()],
    np.s_[0],
    np.s_[-1],
    np.s_[3:7],
    np.s_[3:7, 5],
    np.s_[..., 5],
    np.s_[5, ..., 1],
    np.s_[::2],
    np.s_[::-1],
    np.s_[8:2:-3, ::-2],
    np.s_[-4:, -3:-1],
    np.s_[100:],
    np.s_[4:4],
    np.s_[2:1, 0],
    np.s_[:, :, 0],
    np.s_[1, 2, 3],
    np.s_[1, 2, 3, ...],
    np.s_[-1:-100:-1, 1::3, ::-1],
    np.s_[np.int64(2), np.uint8(1)],
    np.s_[5:0:-1, 3, 2:3],
    np.s_[:, 1:2, :],
]


@pytest.fixture(scope="module")
def array() -> Any:
    return np.arange(10 * 12 * 40, dtype=np.int32).reshape(10, 12, 40)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_basic_index_gives_what_numpy_gives(tmp_path: Path, array: Any, codec: str) -> None:
    ckptfmt.save({"a": array}, tmp_path, chunk_nbytes=4096, codec=codec)
    stored = ckptfmt.open(tmp_path)["a"]
    for index in INDEXES:
        assert not difference(np.asarray(stored.read(index)), np.asarray(array[index])), index


def test_a_part_is_private_and_writable(tmp_path: Path, array: Any) -> None:
    ckptfmt.save({"a": array}, tmp_path, chunk_nbytes=4096)
    stored = ckptfmt.open(tmp_path)["a"]
    for index in (np.s_[2:4], np.s_[0], np.s_[...], np.s_[::-1]):
        part = stored.read(index)
        part[...] = 0
    assert not difference(stored.read(), array)


def test_other_indexes_are_applied_to_the_whole_as_numpy_does(tmp_path: Path, array: Any) -> None:
    ckptfmt.save({"a": array}, tmp_path, chunk_nbytes=4096)
    stored = ckptfmt.open(tmp_path)["a"]
    mask = (array.sum((1, 2)) % 2) == 0
    indexes: list[Any] = [
        np.s_[[1, 3]],
        np.s_[mask],
        np.s_[None, 2],
        np.s_[:, [0, 5], 1],
        np.s_[True],
    ]
    for index in indexes:
        assert not difference(stored.read(index), array[index]), index


@pytest.mark.parametrize(
    "index", [np.s_[10], np.s_[-11], np.s_[0, 12], np.s_[0, 0, 0, 0], np.s_[..., ...]]
)
def test_an_index_out_of_range_is_refused(tmp_path: Path, array: Any, index: Any) -> None:
    ckptfmt.save({"a": array}, tmp_path)
    with pytest.raises(ckptfmt.UsageError, match="'a'"):
        ckptfmt.open(tmp_path)["a"].read(index)


@pytest.mark.parametrize("index", ["x", 1.5, np.s_[1.0:2], np.s_["a":]])
def test_what_is_no_index_is_refused(tmp_path: Path, array: Any, index: Any) -> None:
    ckptfmt.save({"a": array}, tmp_path)
    with pytest.raises(ckptfmt.UsageError):
        ckptfmt.open(tmp_path)["a"].read(index)


def test_0d_and_empty_tensors_take_their_indexes(tmp_path: Path) -> None:
    saved = {"n": np.array(5.5), "z": np.zeros((0, 3), np.int8), "e": np.zeros((2, 0))}
    ckptfmt.save(saved, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    for index in (np.s_[...], np.s_[()]):
        assert not difference(np.asarray(checkpoint["n"].read(index)), saved["n"])
        assert not difference(checkpoint["z"].read(index), saved["z"])
    assert not difference(checkpoint["z"].read(np.s_[:, 1]), saved["z"][:, 1])
    assert not difference(checkpoint["e"].read(np.s_[1]), saved["e"][1])
    with pytest.raises(ckptfmt.UsageError):
        checkpoint["n"].read(0)


@pytest.mark.parametrize("kind", ["int4", "uint2", "float4_e2m1fn", "float6_e2m3fn", "int2"])
def test_parts_of_types_under_8_bits_are_exact(tmp_path: Path, kind: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, kind))
    array = (np.arange(7 * 11 * 13) % 4 - 1).reshape(7, 11, 13).astype(dtype)
    ckptfmt.save({"a": array}, tmp_path)
    stored = ckptfmt.open(tmp_path)["a"]
    for index in INDEXES:
        try:
            expected = np.asarray(array[index])
        except IndexError:
            continue
        assert not difference(np.asarray(stored.read(index)), expected), index


def test_parts_of_strings_are_exact(tmp_path: Path) -> None:
    words = np.array([["a", "", "ccc"], ["é", "e" * 5000, "f"]], object)
    saved = {"o": words, "n": words.astype(np.dtypes.StringDType()), "u": words.astype("U4")}
    ckptfmt.save(saved, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    for name, index in itertools.product(
        saved, (np.s_[0], np.s_[:, 1], np.s_[::-1, ::2], np.s_[...])
    ):
        found = checkpoint[name].read(index)
        assert found.tolist() == saved[name][index].tolist(), (name, index)
    assert checkpoint["n"].read(np.s_[1]).dtype == np.dtypes.StringDType()
    assert checkpoint["o"].read(np.s_[1]).dtype == object


def touched(counted: Any, index: Any, name: str = "a") -> int:
    counted.backend.forget()
    ckptfmt.open(counted.store)[name].read(index)
    return int(counted.backend.data_nbytes())


def test_only_the_chunks_that_a_part_touches_are_read(counted: Any) -> None:
    rows = np.arange(1024 * 1024, dtype=np.int32).reshape(1024, 1024)  # a row is one chunk
    ckptfmt.save({"a": rows}, counted.store, chunk_nbytes=4096)
    assert touched(counted, np.s_[5]) == 4096
    assert touched(counted, np.s_[5, 3:9]) == 4096
    assert touched(counted, np.s_[5:8]) == 3 * 4096
    assert touched(counted, np.s_[::512]) == 2 * 4096
    assert touched(counted, np.s_[900:100:-400, 7]) == 2 * 4096
    assert touched(counted, np.s_[4:4]) == 0
    assert touched(counted, np.s_[:, 0]) == rows.nbytes


def test_chunks_between_the_steps_of_a_slice_along_an_inner_axis_are_not_read(counted: Any) -> None:
    wide = np.arange(4 * 65536, dtype=np.uint8).reshape(4, 65536)
    ckptfmt.save({"a": wide}, counted.store, chunk_nbytes=4096)
    assert touched(counted, np.s_[1:3, 8192:12288]) == 2 * 4096
    assert touched(counted, np.s_[0, 4095:4097]) == 2 * 4096


def test_boxes_of_many_tensors_are_read_in_joined_requests(counted: Any) -> None:
    saved = {f"{i}": np.full((16, 512), i, np.int64) for i in range(20)}
    ckptfmt.save(saved, counted.store, chunk_nbytes=4096)
    checkpoint = ckptfmt.open(counted.store)
    counted.backend.forget()
    boxes = checkpoint.read(dict.fromkeys(saved, np.s_[15:]) | {"0": np.s_[:2], "1": ...})
    assert list(boxes) == list(saved)
    assert not difference(boxes["0"], saved["0"][:2])
    assert not difference(boxes["1"], saved["1"])
    assert all((boxes[f"{i}"] == i).all() for i in range(20))
    assert counted.backend.data_nbytes() == 4096 * (18 + 2 + 16)
    assert checkpoint.read({}) == {}


def test_boxes_of_values_and_unknown_names_are_refused(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(3), "v": 5}, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    with pytest.raises(ckptfmt.UsageError, match="'v'"):
        checkpoint.read({"v": ...})
    with pytest.raises(ckptfmt.NotFoundError):
        checkpoint.read({"b": ...})


def test_tied_and_equal_tensors_give_independent_parts(tmp_path: Path) -> None:
    one = np.arange(10)
    ckptfmt.save({"a": one, "b": one, "c": one.copy()}, tmp_path)
    boxes = ckptfmt.open(tmp_path).read({"a": ..., "b": np.s_[2:], "c": ...})
    boxes["a"][:] = 0
    assert boxes["b"].tolist() == list(range(2, 10))
    assert boxes["c"].tolist() == list(range(10))


def test_damage_in_a_chunk_hits_the_parts_that_touch_it_alone(tmp_path: Path) -> None:
    array = np.arange(8192, dtype=np.uint8).reshape(8, 1024)
    ckptfmt.save({"a": array}, tmp_path, chunk_nbytes=4096)
    [file] = (tmp_path / "data").iterdir()
    start = int(ckptfmt.open(tmp_path).index.placement.offsets[1])
    data = bytearray(file.read_bytes())
    data[start + 5] ^= 1
    file.write_bytes(data)
    stored = ckptfmt.open(tmp_path)["a"]
    assert (stored.read(np.s_[:4]) == array[:4]).all()
    with pytest.raises(ckptfmt.CorruptError, match=rf"\[{start}:{start + 4096}\), tensor 'a'"):
        stored.read(np.s_[3:5])
    assert int((stored.read(np.s_[4], verify=False) != array[4]).sum()) == 1


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_tensor_of_several_regions_reads_as_one(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    import importlib

    module = importlib.import_module("ckptfmt.engine.save")
    monkeypatch.setattr(module, "FILE_NBYTES_TARGET_REMOTE", 32 << 10)
    store = ckptfmt.Store("memory://", storage_options={"late_key": False})
    array = np.arange(1 * 60 * 1000, dtype=np.int32).reshape(1, 60, 1000)
    ckptfmt.save({"a": array, "b": array.astype(np.int16)}, store, codec="zstd", chunk_nbytes=4096)
    checkpoint = store.open()
    assert len(checkpoint.index.tree.region_tensors) > 10
    stored = checkpoint["a"]
    for index in [i for i in INDEXES if i not in (np.s_[1, 2, 3], np.s_[1, 2, 3, ...])]:
        try:
            expected = array[index]
        except IndexError:
            continue
        assert not difference(np.asarray(stored.read(index)), np.asarray(expected)), index
    assert not difference(ckptfmt.load(store)["b"], array.astype(np.int16))
