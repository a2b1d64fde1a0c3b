"""Data files: what is written is what the spec says, whatever the sizes. Spec: 05-data-files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.format import parse_footer, parse_head, parse_table
from ckptfmt.storage import Backend, Buffer, Writer, open_backend
from ckptfmt.testing import difference
from ckptfmt.types import Key


def table_of(file: Path) -> Any:
    data = file.read_bytes()
    footer = parse_footer(data[-64:], len(data))
    assert parse_head(data) == footer.algorithm
    return parse_table(
        data[footer.table_offset : footer.table_offset + footer.table_nbytes], footer
    )


def test_a_file_found_alone_tells_its_tensors(tmp_path: Path) -> None:
    tree: Any = {"m": {"w": np.arange(12, dtype=np.int16).reshape(3, 4)}, "b": np.ones(2)}
    ckptfmt.save(tree, tmp_path)
    [file] = (tmp_path / "data").iterdir()
    table = table_of(file)
    assert table.region_names == ["m/w", "b"]
    assert [d.name for d in table.dtypes] == ["int16", "float64"]
    assert table.region_shapes.tolist() == [3, 4, 2]
    assert table.salt == 0
    data = file.read_bytes()
    offset = int(table.chunk_offsets[0])
    assert data[offset : offset + 24] == tree["m"]["w"].tobytes()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("late_key", [True, False])
def test_sizes_around_every_boundary_come_back(late_key: bool, codec: str) -> None:
    sizes = [0, 1, 63, 64, 65, 4095, 4096, 4097, 65_535, 65_536, 65_537, (1 << 20) - 1, 1 << 20]
    sizes += [(4 << 20) - 64, 4 << 20, (4 << 20) + 1, (8 << 20) + 17]
    rng = np.random.default_rng(0)
    tree = {f"{n}": rng.integers(0, 3, n, np.uint8) for n in sizes}
    store = ckptfmt.Store("memory://", storage_options={"late_key": late_key})
    ckptfmt.save(tree, store, codec=codec)
    assert not difference(ckptfmt.load(store), tree)
    assert store.verify().ok


class Choosy(Backend):
    """A backend that looks at every write: none overlaps another, and none is missing."""

    def __init__(self, inner: Backend) -> None:
        self.inner, self.url = inner, inner.url
        self.written: dict[str, list[tuple[int, int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    capabilities = property(lambda self: self.inner.capabilities)
    get = lambda self, *a, **k: self.inner.get(*a, **k)  # noqa: E731
    put_if_absent = lambda self, *a, **k: self.inner.put_if_absent(*a, **k)  # noqa: E731
    list = lambda self, *a, **k: self.inner.list(*a, **k)  # noqa: E731
    stat = lambda self, *a, **k: self.inner.stat(*a, **k)  # noqa: E731
    delete = lambda self, *a, **k: self.inner.delete(*a, **k)  # noqa: E731

    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        return _Noting(self.inner.create(key, nbytes), self.written.setdefault(key, []))


class _Noting(Writer):
    def __init__(self, inner: Writer, written: list[tuple[int, int]]) -> None:
        self.inner, self.written = inner, written

    def write(self, offset: int, buffer: Buffer) -> None:
        self.written.append((offset, offset + len(buffer)))
        self.inner.write(offset, buffer)

    def finish(self, *, durable: bool, key: Key | None = None) -> None:
        self.inner.finish(durable=durable, key=key)

    def abort(self) -> None:
        self.inner.abort()


@pytest.mark.parametrize("late_key", [True, False])
def test_every_byte_is_written_once_and_in_pieces_of_megabytes(late_key: bool) -> None:
    rng = np.random.default_rng(0)
    tree = {
        f"{i}": rng.integers(0, 255, n, np.uint8) for i, n in enumerate([9 << 20, 100, 3 << 20])
    }
    tree |= {f"s{i}": np.full(50, i) for i in range(3000)}
    store = ckptfmt.Store("memory://", storage_options={"late_key": late_key})
    choosy = Choosy(store.backend)
    store.backend = choosy
    ckptfmt.save(tree, store)
    data = {k: v for k, v in choosy.written.items() if k.startswith(("data/", "tmp/"))}
    [spans] = data.values()
    spans.sort()
    assert spans[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(spans)), "gaps or overlaps"
    assert len(spans) <= 20
    [entry] = store.backend.list("data/")
    assert spans[-1][1] == entry.nbytes


def test_a_condemned_id_gets_a_salt(tmp_path: Path) -> None:
    tree = {"a": np.arange(5000)}
    store = ckptfmt.Store(tmp_path)
    seen = set()
    for round_ in range(3):
        ckptfmt.save(tree, store, step=1)
        [file] = ckptfmt.open(store).index.files.ids
        assert file not in seen
        seen.add(file)
        assert table_of(tmp_path / "data" / file).salt == round_
        store.delete(1)
        store.gc(grace_s=600)


@pytest.mark.parametrize("kind", ["create", "write", "finish"])
def test_a_failed_write_leaves_no_file_and_no_open_save(tmp_path: Path, kind: Any) -> None:
    from ckptfmt.testing import FaultyBackend

    ckptfmt.save({"a": np.zeros(9)}, tmp_path, step=1)
    before = {f for f in tmp_path.rglob("*") if f.is_file()}

    for number in range(6):
        store = ckptfmt.Store(tmp_path)
        faulty = FaultyBackend(
            open_backend(tmp_path), fail_at=number, only=lambda operation: operation.kind == kind
        )
        store.backend = faulty
        try:
            ckptfmt.save({"a": np.full(100_000, number)}, store, step=2)
        except ckptfmt.StorageError:
            left = {f for f in tmp_path.rglob("*") if f.is_file()} - before
            assert {f.parent.name for f in left} <= {"data"}, number
            assert ckptfmt.Store(tmp_path).steps() == [1]
        else:
            assert not faulty.fired
            break
    else:
        pytest.fail("a save writes less than that")
