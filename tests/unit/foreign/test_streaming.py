"""Values that are no view of their file come in pieces: the same bytes, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt import CorruptError
from ckptfmt.foreign import ForeignTensor, importer_names, read_foreign, streaming
from ckptfmt.foreign.hdf5 import chunks
from ckptfmt.foreign.inflating import Inflater
from ckptfmt.foreign.registry import get_importer
from ckptfmt.foreign.streaming import PackedStream, Window, boxes_of
from ckptfmt.format import dtype_named, numpy_dtype, pack_array


def test_the_boxes_of_a_run_are_its_elements_in_order() -> None:
    for shape in [(), (5,), (3, 4), (2, 3, 4), (1, 1, 6), (4, 1, 3)]:
        array = np.arange(int(np.prod(shape))).reshape(shape)
        flat = array.reshape(-1)
        for first in range(array.size + 1):
            for last in range(first, array.size + 1):
                boxes = list(boxes_of(shape, first, last))
                found = [array[box].reshape(-1) for box in boxes]
                assert np.concatenate([flat[:0], *found]).tolist() == flat[first:last].tolist()
                assert len(boxes) <= max(2 * len(shape), 1)


@pytest.mark.parametrize("name", ["float32", "uint4", "int2", "uint1", "float6_e2m3fn", "bfloat16"])
def test_any_range_of_the_packed_bytes_is_that_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 24)
    dtype = dtype_named(name)
    assert dtype is not None
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 1 << min(dtype.bits, 8), (5, 7, 3 * dtype.itemsize), np.uint8)
    array = raw.view(numpy_dtype(dtype)).reshape(5, 7, 3)
    whole = bytes(pack_array(array))
    stream = PackedStream(array.shape, dtype, lambda sides: array[sides])
    assert stream.nbytes == len(whole)
    for start in range(0, len(whole), 3):
        for stop in (start + 1, start + 13, len(whole)):
            out = np.zeros(min(stop, len(whole)) - start, np.uint8)
            stream.fill(out, start)
            assert out.tobytes() == whole[start : start + len(out)]
    window = Window(stream)
    pieces = [bytes(window.read(at, min(10, len(whole) - at))) for at in range(0, len(whole), 10)]
    assert b"".join(pieces) == whole


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything is streamed, in pieces of 64 bytes; nothing that has boxes is fetched whole."""
    for name in importer_names():
        get_importer(name)  # imported now, with the bound as it is
    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1)
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 64)
    streamed: list[str] = []
    fill = PackedStream.fill

    def counted(self: PackedStream, out: np.ndarray, start: int) -> None:
        streamed.append(str(start))
        fill(self, out, start)

    monkeypatch.setattr(PackedStream, "fill", counted)
    return streamed


def test_gathered_tensors_of_torch_stream_to_the_same_checkpoint(
    tmp_path: Path, small_pieces: list[str]
) -> None:
    torch.manual_seed(0)
    base = torch.randn(12, 10, 4)
    state = {
        "transposed": base.permute(2, 0, 1),
        "stepped": base[::2, 1::3],
        "bool": base[..., 1] > 0,
        "conj": torch.randn(6, 5, dtype=torch.complex64).conj(),
        "neg": torch.randn(6, 5, dtype=torch.complex64).conj().imag,
        "x2": torch.arange(90, dtype=torch.uint8).reshape(9, 10).view(torch.float4_e2m1fn_x2),
        "plain": base,
    }
    torch.save(state, tmp_path / "a.pt")
    loaded = {
        name: tensor.resolve_conj().resolve_neg().contiguous() for name, tensor in state.items()
    }
    ckptfmt.convert(tmp_path / "a.pt", tmp_path / "s", durable=False, codec="zstd")
    assert len(small_pieces) > 10
    found = ckptfmt.load(tmp_path / "s")
    for name, tensor in loaded.items():
        if name == "x2":
            raw = tensor.view(torch.uint8).numpy()
            halves = np.stack([raw & 15, raw >> 4], axis=-1).reshape(9, 20)
            assert found[name].view(np.uint8).tolist() == halves.tolist()
        else:
            assert found[name].tobytes() == tensor.numpy().tobytes(), name
            assert found[name].shape == tuple(tensor.shape)


def test_a_large_view_is_converted_in_little_memory(tmp_path: Path) -> None:
    """Three times the bound in one transposed tensor."""
    wide = torch.arange(24 << 20, dtype=torch.int64).reshape(3 << 10, -1)
    torch.save({"t": wide.t()}, tmp_path / "a.pt")
    tracemalloc.start()
    try:
        ckptfmt.convert(tmp_path / "a.pt", tmp_path / "s", durable=False)
        assert tracemalloc.get_traced_memory()[1] < 192 << 20
    finally:
        tracemalloc.stop()
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        assert np.array_equal(checkpoint["t"].read(np.s_[:5]), wide.t()[:5].numpy())
        assert np.array_equal(checkpoint["t"].read(np.s_[-5:]), wide.t()[-5:].numpy())


def test_every_box_of_a_foreign_tensor_is_a_part_of_it(tmp_path: Path) -> None:
    torch.save({"t": torch.randn(8, 9).t(), "f": torch.randn(4, 4)}, tmp_path / "a.pt")
    tensors = read_foreign(tmp_path / "a.pt").tensors
    gathered: ForeignTensor = tensors["t"]
    assert tensors["f"].box is None
    assert gathered.box is not None
    for box in [(slice(1, 4), slice(0, 8)), (slice(0, 9), slice(7, 8))]:
        assert gathered.box(box).tobytes() == gathered.fetch()[box].tobytes()


def test_deflated_storages_are_inflated_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of torch that somebody packed again: none of its entries is in memory whole."""
    long = torch.arange(9 << 20, dtype=torch.int64) % 100
    torch.save({"a": long[1000:], "b": long[:1000]}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as stored,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    parts: list[int] = []
    read = Inflater.read

    def counted(self: Inflater, start: int, nbytes: int) -> Any:
        parts.append(nbytes)
        return read(self, start, nbytes)

    monkeypatch.setattr(Inflater, "read", counted)
    ckptfmt.convert(tmp_path / "b.pt", tmp_path / "s", durable=False)
    assert max(parts) == 16 << 20  # of 72 MiB
    found = ckptfmt.load(tmp_path / "s")
    assert np.array_equal(found["a"], long[1000:].numpy())
    assert np.array_equal(found["b"], long[:1000].numpy())


def test_elements_of_half_a_byte_are_unpacked_in_parts(
    tmp_path: Path, small_pieces: list[str]
) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 70, np.uint8)
    header = json.dumps({"w": {"dtype": "F4", "shape": [7, 20], "data_offsets": [0, 70]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw.tobytes())
    tensor = read_foreign(path).tensors["w"]
    want = np.stack([raw & 15, raw >> 4], axis=-1).reshape(7, 20)
    assert tensor.box is not None
    for box in [(slice(1, 4), slice(3, 18)), (slice(0, 7), slice(19, 20)), (slice(2, 3),) * 2]:
        assert tensor.box(box).view(np.uint8).tolist() == want[box].tolist()
    ckptfmt.convert(path, tmp_path / "s", durable=False)
    assert small_pieces
    assert ckptfmt.load(tmp_path / "s")["w"].view(np.uint8).tolist() == want.tolist()


def test_a_large_chunk_of_hdf5_is_undone_once_while_it_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: list[str]
) -> None:
    h5py = pytest.importorskip("h5py")
    values = np.random.default_rng(0).integers(0, 9, (40, 50))
    with h5py.File(tmp_path / "x.h5", "w", libver="earliest") as file:
        for name, more in (("gzip", {"compression": "gzip", "shuffle": True}), ("raw", {})):
            file.create_dataset(name, data=values, chunks=(20, 50), **more)
    undone: list[tuple[int, ...]] = []
    undo = chunks.Chunks._undone

    def counted(self: chunks.Chunks, place: tuple[int, ...]) -> bytes:
        undone.append(place)
        return undo(self, place)

    monkeypatch.setattr(chunks.Chunks, "_undone", counted)
    monkeypatch.setattr(chunks, "_KEPT_NBYTES_MIN", 1)
    ckptfmt.convert(tmp_path / "x.h5", tmp_path / "s", durable=False)
    found = ckptfmt.load(tmp_path / "s")
    assert np.array_equal(found["gzip"], values)
    assert np.array_equal(found["raw"], values)
    assert len(small_pieces) > 2
    # To be hashed, to be written, and to be compared; the raw ones never.
    assert set(undone) == {(0, 0), (1, 0)}
    assert len(undone) <= 6


def test_a_chunk_that_two_datasets_claim_is_checked_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h5py = pytest.importorskip("h5py")
    monkeypatch.setattr(chunks, "_KEPT_NBYTES_MIN", 1)
    values = np.random.default_rng(0).integers(0, 99, (20, 50))
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        for name, rows in (("a", 20), ("b", 10)):
            file.create_dataset(name, data=values[:rows], chunks=(rows, 50), compression="gzip")
        info = {name: file[name].id.get_chunk_info(0) for name in ("a", "b")}
    data = path.read_bytes()
    for part, nbytes in (("byte_offset", 8), ("size", 4)):
        old, new = (getattr(info[n], part).to_bytes(nbytes, "little") for n in ("b", "a"))
        assert data.count(old) == 1
        data = data.replace(old, new)
    path.write_bytes(data)
    tensors = read_foreign(path).tensors
    assert np.array_equal(tensors["a"].fetch(), values)
    with pytest.raises(CorruptError, match="longer than its shape"):
        tensors["b"].fetch()
