"""Direct I/O: the same bytes as through the page cache, and a fall-back where it is refused."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine.arena import aligned_buffer
from ckptfmt.storage import direct, open_backend, syscalls
from ckptfmt.types import Key


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    direct._refused.clear()
    yield
    direct._refused.clear()


def _count_direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    opened: list[int] = []
    real = os.open

    def spy(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        fd = real(path, flags, *rest, **more)
        if flags & getattr(os, "O_DIRECT", 0):
            opened.append(fd)
        return fd

    monkeypatch.setattr(os, "open", spy)
    return opened


def _data(nbytes: int) -> Any:
    made = aligned_buffer(nbytes)
    made[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    return made


needs_direct = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no direct I/O here")


@needs_direct
def test_aligned_pieces_go_directly_and_the_rest_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = _count_direct(monkeypatch)
    backend, data = open_backend(tmp_path), _data((4 << 20) + 4096)
    writer = backend.create(Key("data/a"), len(data))
    writer.write(0, data[: 4 << 20].data)
    writer.write(4 << 20, bytes(data[4 << 20 :]))
    writer.finish(durable=True)
    assert len(opened) == 1 or direct._refused
    assert bytes(backend.get(Key("data/a"))) == data.tobytes()


@needs_direct
def test_a_file_system_that_refuses_at_open_is_served_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    _round_trip(tmp_path)
    assert direct._refused


@needs_direct
def test_a_file_system_that_refuses_the_transfer_is_served_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = _count_direct(monkeypatch)
    real_write, real_read = os.pwrite, os.preadv

    def write(fd: int, data: Any, offset: int) -> int:
        if fd in opened:
            raise OSError(errno.EINVAL, "no")
        return real_write(fd, data, offset)

    def read(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if fd in opened:
            raise OSError(errno.EINVAL, "no")
        return real_read(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", read)
    _round_trip(tmp_path)


def _round_trip(path: Path) -> None:
    backend, data = open_backend(path), _data(3 << 20)
    backend.put(Key("data/a"), data.data)
    out = aligned_buffer(3 << 20)
    backend.get(Key("data/a"), 0, 3 << 20, out.data)
    np.testing.assert_array_equal(out, data)


def test_switched_off_nothing_goes_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = _count_direct(monkeypatch)
    with ckptfmt.configure(direct_io="off"):
        _round_trip(tmp_path)
    assert not opened


def test_a_cold_range_is_read_whole(tmp_path: Path) -> None:
    backend, data = open_backend(tmp_path), _data(8 << 20)
    backend.put(Key("data/a"), data.data, durable=True)
    with (tmp_path / "data" / "a").open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 1 << 20, 4 << 20, os.POSIX_FADV_DONTNEED)
    out = aligned_buffer(8 << 20)
    backend.get(Key("data/a"), 0, 8 << 20, out.data)
    np.testing.assert_array_equal(out, data)


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="no count of what was read")
def test_a_cold_range_is_read_from_the_disk_once(tmp_path: Path) -> None:
    """Asking whether it is cached must not start read-ahead of what is then read directly."""
    backend, key, piece = open_backend(tmp_path), Key("data/x"), 4 << 20
    backend.put(key, bytes(16 << 20), durable=True)
    path = tmp_path / "data/x"
    _evict(path)
    before = _disk_nbytes()
    for start in range(0, 16 << 20, piece):
        backend.get(key, start, start + piece, aligned_buffer(piece).data)
    _evict(path)  # waits for what is on its way
    assert _disk_nbytes() - before <= (16 << 20) + (1 << 20)


def _evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _disk_nbytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_write_back_of_what_goes_through_the_cache_starts_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, int]] = []
    real = syscalls.start_write_back

    def noting(fd: int, offset: int, nbytes: int) -> None:
        started.append((offset, nbytes))
        real(fd, offset, nbytes)

    monkeypatch.setattr(syscalls, "start_write_back", noting)
    backend, data = open_backend(tmp_path), _data(8 << 20)
    with ckptfmt.configure(direct_io="off"):
        writer = backend.create(Key("data/a"), len(data))
        writer.write(0, data[: 4 << 20].data)
        writer.write(4 << 20, data[4 << 20 : (4 << 20) + 100].data)
        assert started == [(0, 4 << 20)]
        writer.write((4 << 20) + 100, data[(4 << 20) + 100 :].data)
        writer.finish(durable=True)
    assert bytes(backend.get(Key("data/a"))) == data.tobytes()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_a_range_that_is_written_back_early_is_clean_or_on_its_way(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, bytes(1 << 20), 0)
        syscalls.start_write_back(fd, 0, 1 << 20)
        read_end, write_end = os.pipe()  # where it is not offered, that is no error
        syscalls.start_write_back(write_end, 0, 1 << 20)
        os.close(read_end)
        os.close(write_end)
    finally:
        os.close(fd)


def test_a_write_back_that_fails_at_once_fails_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(syscalls, "start_write_back", full)
    backend, data = open_backend(tmp_path), _data(2 << 20)
    with ckptfmt.configure(direct_io="off"):
        writer = backend.create(Key("data/a"), len(data))
        with pytest.raises(ckptfmt.StorageError):
            writer.write(0, data.data)
        writer.abort()
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs here")
@pytest.mark.parametrize("refused", [False, True])
def test_a_store_on_tmpfs_works_directly_or_through_the_cache(
    monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Kernels before 6.6 refuse direct I/O there."""
    if refused:
        real = os.open

        def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            if flags & getattr(os, "O_DIRECT", 0):
                raise OSError(errno.EINVAL, "no")
            return real(path, flags, *rest, **more)

        monkeypatch.setattr(os, "open", refuse)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tree = {f"{i}": np.random.default_rng(i).random(400_000) for i in range(3)}
        ckptfmt.save(tree, folder, step=1)
        ckptfmt.save_async({**tree, "more": np.ones(300_000)}, folder, step=2).result(60)
        for step in (1, 2):
            for mode in ("read", "mmap"):
                loaded = ckptfmt.load(folder, step=step, mode=mode)
                assert all(np.array_equal(loaded[name], tree[name]) for name in tree)
        assert ckptfmt.Store(folder).verify().ok
