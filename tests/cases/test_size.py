"""Case 30: more than 2 or 4 GiB: short writes, 64-bit arithmetic, and the real thing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine.box import chunks_of, settle
from ckptfmt.engine.read import ChunkReader
from ckptfmt.format import (
    About,
    FilesSection,
    PlacementSection,
    TreeSection,
    digest,
    dtype_named,
    pack_index,
    pack_tree,
    parse_index,
)
from ckptfmt.testing import difference
from ckptfmt.types import Key

GIB = 1 << 30


@pytest.mark.parametrize("limit", [7, 4096, 2**31 - 4096])
@pytest.mark.parametrize("call", ["pwrite", "write"])
def test_short_writes_are_continued_until_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, limit: int
) -> None:
    """Case 30 (a): every write call takes at most so many bytes."""
    tree = {"a": np.arange(9000, dtype=np.int32), "b": np.arange(5), "s": np.array(["x"], object)}
    real: Any = getattr(os, call)
    calls: list[int] = []

    def short(fd: int, data: Any, *rest: Any) -> int:
        calls.append(len(data))
        return int(real(fd, memoryview(data).cast("B")[:limit], *rest))

    with ckptfmt.configure(direct_io="off"):
        monkeypatch.setattr(os, call, short)
        ckptfmt.save(tree, tmp_path)
        monkeypatch.undo()
    for mode in ("auto", "read", "mmap"):
        assert not difference(ckptfmt.load(tmp_path, mode=mode), tree)
    assert ckptfmt.Store(tmp_path).verify().ok
    if call == "pwrite":
        assert len(calls) > (5000 if limit == 7 else 0)


def test_a_write_that_takes_nothing_is_an_error_not_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 30 (a): continued until done, or raised."""
    monkeypatch.setattr(os, "pwrite", lambda *arguments: 0)
    with ckptfmt.configure(direct_io="off"), pytest.raises(ckptfmt.StorageError):
        ckptfmt.save({"a": np.arange(9000)}, tmp_path)
    monkeypatch.undo()
    assert ckptfmt.Store(tmp_path).names() == []


@pytest.mark.parametrize("call", ["pread", "preadv", "readv", "read"])
def test_short_reads_are_continued_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Case 30 (a), the other way."""
    tree = {"a": np.arange(3000, dtype=np.int16), "b": 1}
    ckptfmt.save(tree, tmp_path)
    real: Any = getattr(os, call)

    def short(fd: int, what: Any, *rest: Any) -> Any:
        if isinstance(what, int):
            return real(fd, min(what, 7), *rest)
        return real(fd, [memoryview(buffer).cast("B")[:7] for buffer in what][:1], *rest)

    monkeypatch.setattr(os, call, short)
    with ckptfmt.configure(direct_io="off"):
        assert not difference(ckptfmt.load(tmp_path, mode="read"), tree)
        assert ckptfmt.Store(tmp_path).verify().ok


def large_index(shape: tuple[int, ...], dtype: str, chunk: int, file_nbytes: int, at: int) -> Any:
    """A tensor in chunks one after another from an offset of one file."""
    kind = dtype_named(dtype)
    assert kind is not None
    nbytes = int(np.prod([int(d) for d in shape], dtype=object)) * kind.bits // 8
    count = -(-nbytes // chunk)
    raw = np.full(count, chunk, np.uint32)
    raw[-1] = nbytes - (count - 1) * chunk
    one = np.array([1], np.uint32)
    ndim = len(shape)
    tree = TreeSection(
        dtypes=(kind,),
        names=["big"],
        leaf_kinds=np.zeros(1, np.uint8),
        leaf_rows=np.zeros(1, np.uint32),
        values=[],
        container_names=[],
        container_kinds=[],
        container_arguments=[],
        tensor_dtypes=np.zeros(1, np.uint16),
        tensor_ndims=np.array([ndim], np.uint8),
        tensor_dims=np.array(shape, np.uint64),
        region_tensors=np.zeros(1, np.uint32),
        region_origins=np.zeros(ndim, np.uint64),
        region_extents=np.array(shape, np.uint64),
        region_nchunks=one * count,
        chunk_raw=raw,
        chunk_digests=np.zeros((count, 16), np.uint8),
    )
    placement = PlacementSection(
        np.zeros(count, np.uint32),
        (at + chunk * np.arange(count)).astype(np.uint64),
        raw,
        np.zeros(count, np.uint8),
        None,
        ((),),
    )
    files = FilesSection(["00" * 16], np.array([file_nbytes], np.uint64))
    return tree, files, placement


def packed(tree: Any, files: Any, placement: Any) -> bytes:
    body = pack_tree(tree)
    about = About(
        name="main",
        step=None,
        created="2026-01-01T00:00:00Z",
        txn=bytes(16),
        parent=None,
        writer="test",
        algorithm="xxh3-128",
        tree_digest=digest(body, "xxh3-128"),
    )
    return pack_index(about, files, placement, body, bytes(16))


def test_offsets_and_sizes_beyond_32_bits_are_exact() -> None:
    """Case 30 (b): index arithmetic over terabytes, without a byte of data."""
    nbytes = 9 << 40
    tree, files, placement = large_index((9 << 30, 1024), "uint8", 1 << 30, (9 << 40) + 8192, 4096)
    index = parse_index(packed(tree, files, placement))
    assert int(index.tree.tensor_nbytes[0]) == nbytes
    assert int(index.placement.offsets[-1]) == nbytes - (1 << 30) + 4096
    last = settle(index, 0, np.s_[-1, -5:], "big")
    assert {k: v.tolist() for k, v in chunks_of(index, last).items()} == {0: [9215]}
    first = settle(index, 0, np.s_[:: 3 << 30], "big")
    assert chunks_of(index, first)[0].tolist() == [0, 3072, 6144]


def test_a_sparse_file_is_read_beyond_4_gib(tmp_path: Path) -> None:
    """Case 30 (b): marks around 2^31 and 2^32 in a sparse file, read by slices and by a map."""
    nbytes, start = (1 << 32) + 4096, 4096
    marks = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, nbytes - 1]
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / ("00" * 16)
    file_nbytes = -(-(start + nbytes + 64) // 4096) * 4096
    with file.open("wb") as handle:
        handle.truncate(file_nbytes)
        for number, mark in enumerate(marks):
            handle.seek(start + mark)
            handle.write(bytes([number + 1]))
    tree, files, placement = large_index((nbytes,), "uint8", 1 << 20, file_nbytes, start)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "main~0.index").write_bytes(packed(tree, files, placement))
    stored = ckptfmt.open(tmp_path)["big"]
    for number, mark in enumerate(marks):
        near = stored.read(np.s_[max(0, mark - 2) : mark + 1], verify=False)
        assert int(near[-1]) == number + 1, mark
    with pytest.raises(ckptfmt.CorruptError, match=rf"\[{start + (1 << 32)}:"):
        stored.read(np.s_[2**32 :])
    mapped = stored.mmap()
    assert [int(mapped[mark]) for mark in marks] == [1, 2, 3, 4, 5, 6]
    reader = ChunkReader(ckptfmt.Store(tmp_path).backend, ckptfmt.open(tmp_path).index)
    assert f"[{start + (4095 << 20)}:{start + (1 << 32)})" in reader.where(4095)


def test_a_part_of_a_tensor_larger_than_memory_can_be_read() -> None:
    """Case 30 (b): 64 GiB, of which every chunk is the same stored one."""
    chunk = np.arange(1 << 20, dtype=np.uint8)
    store = ckptfmt.Store("memory://")
    ckptfmt.save({"c": np.tile(chunk, 4)}, store)
    one, count = store.open().index, 1 << 14
    tree, _, placement = large_index((count * 4, 1 << 20), "uint8", 4 << 20, 1 << 46, 4096)
    digests = np.tile(one.tree.chunk_digests[:1], (count, 1))
    tree = TreeSection(**{**vars_of(tree), "chunk_digests": digests})
    placement = PlacementSection(
        placement.files,
        np.full(count, int(one.placement.offsets[0]), np.uint64),
        placement.stored,
        placement.codecs,
        None,
        ((),),
    )
    store.backend.put(Key("checkpoints/main~7.index"), packed(tree, one.files, placement))
    stored = store.open("main")["big"]
    assert stored.nbytes == 1 << 36
    for part in (np.s_[5, :300], np.s_[:: 1 << 14, 77], np.s_[-3:, ::-65536], np.s_[::64, 9]):
        expected = np.broadcast_to(chunk, (count * 4, 1 << 20))[part]
        assert not difference(stored.read(part), np.ascontiguousarray(expected))
    with pytest.raises(ckptfmt.UsageError, match="larger than allowed"):
        ckptfmt.load(store, at="main", max_nbytes=1 << 35)


def vars_of(tree: TreeSection) -> dict[str, Any]:
    return {name: getattr(tree, name) for name in tree.__dataclass_fields__}


def test_no_payload_is_ever_in_a_msgpack_bin(tmp_path: Path) -> None:
    """Case 30: whose limit is 2^32 - 1 bytes: a long value is a tensor of its packed bytes."""
    ckptfmt.save({"long": b"x" * 5_000_000, "w": np.zeros(5_000_000, np.uint8)}, tmp_path)
    [index] = (tmp_path / "checkpoints").iterdir()
    assert index.stat().st_size < 10_000
    assert ckptfmt.load(tmp_path)["long"] == b"x" * 5_000_000


@pytest.mark.timeout(120)
def test_a_hundred_thousand_small_tensors_are_no_trouble() -> None:
    """Many instead of large."""
    tree = {f"l{i}": {f"w{j}": np.full(9, i, np.float32) for j in range(100)} for i in range(1000)}
    store = ckptfmt.Store("memory://a-hundred-thousand")
    ckptfmt.save(tree, store, step=1, durable=False)
    assert ckptfmt.save(tree, store, step=2, durable=False).written_nbytes == 0
    checkpoint = ckptfmt.open(store)
    assert len(checkpoint) == 100_000
    assert all(checkpoint[f"l{i}/w{i}"].read()[0] == i for i in range(100))
    assert not difference(ckptfmt.load(store), tree)
    assert store.verify().ok


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tensor_of_more_than_4_gib_comes_back_whole(tmp_path: Path) -> None:
    """Case 30 (c): 2^32 + 1 bytes with marks where 32 bits end."""
    nbytes = (1 << 32) + 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    disk = os.statvfs(tmp_path)
    if memory < 10 * GIB or disk.f_bavail * disk.f_frsize < 12 * GIB:
        pytest.skip("needs 10 GiB of memory and 12 GiB of disk")
    array = np.zeros(nbytes, np.uint8)
    marks = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
    array[marks] = [1, 2, 3, 4, 5]
    ckptfmt.save({"big": array}, tmp_path, durable=False)
    del array
    loaded = ckptfmt.load(tmp_path)["big"]
    assert loaded.shape == (nbytes,)
    assert loaded[marks].tolist() == [1, 2, 3, 4, 5]
    assert int(np.count_nonzero(loaded)) == 5
    assert ckptfmt.open(tmp_path)["big"].read(np.s_[-1:]).tolist() == [5]
