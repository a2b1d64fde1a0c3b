"""DCP directories without torch: shards put together, and a metadata pickle that is data."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import ckptfmt
from ckptfmt import CheckpointError, CorruptError, NotFoundError, UnsupportedError
from ckptfmt.foreign import detect_format, read_foreign, streaming

FILES = Path(__file__).parents[2] / "compat/import/dcp"
PATH = FILES / "two-ranks"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_shards_of_two_ranks_are_read_as_torch_reads_them(same_as_expected: Any) -> None:
    assert detect_format(str(PATH)) == "dcp"
    tree = same_as_expected(PATH, FILES / "expected.json")
    assert tree.tensors["model/rows"].box is not None
    assert not tree.tensors["model/bias"].fetch().flags.owndata
    assert read_foreign(PATH / ".metadata").tensors.keys() == tree.tensors.keys()


def test_shards_stream_to_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = ckptfmt.open_foreign(PATH).load()
    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1)
    monkeypatch.setattr("ckptfmt.foreign.pytorch.dcp.STREAMED_NBYTES_MIN", 1)
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 16)
    ckptfmt.convert(PATH, tmp_path / "s", durable=False)
    found = ckptfmt.load(tmp_path / "s")
    for name in ("rows", "columns", "bias"):
        assert found["model"][name].tobytes() == want["model"][name].tobytes()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory of one process."""
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": {"c": torch.ones(2)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def changed(folder: Path, change: Callable[[Metadata], None]) -> Path:
    """The same directory with other metadata, written as torch writes it."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


def info(metadata: Metadata, name: str) -> Any:
    assert metadata.storage_data is not None
    return next(v for k, v in metadata.storage_data.items() if k.fqn == name)


def move(metadata: Metadata, **fields: Any) -> None:
    for field, value in fields.items():
        object.__setattr__(info(metadata, "a"), field, value)


def box(metadata: Metadata, **fields: Any) -> None:
    item: Any = metadata.state_dict_metadata["a"]
    for field, value in fields.items():
        if field == "size":
            item.size = value
        else:
            setattr(item.chunks[0], field, value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: move(m, length=1 << 40), "truncated"),
        (lambda m: move(m, offset=-4), "a place that is none"),
        (lambda m: move(m, relative_path="../secret"), "file name|outside|leads"),
        (lambda m: move(m, relative_path="/etc/passwd"), "file name|outside|leads"),
        (lambda m: move(m, offset=1), "torch.save did not write"),
        (lambda m: move(m, transform_descriptors=["zstd"]), "extension has transformed"),
        (lambda m: box(m, sizes=torch.Size([1, 3])), "no slice holds"),
        (lambda m: box(m, sizes=torch.Size([3, 3])), "outside of its tensor"),
        (lambda m: box(m, size=torch.Size([2, 3, 1])), "outside of its tensor"),
        (lambda m: box(m, size=torch.Size([1 << 61, 3])), "not a shape"),
        (lambda m: m.storage_data.clear(), "nowhere"),
        (lambda m: setattr(m, "storage_data", None), "no table of places"),
        (lambda m: setattr(m, "state_dict_metadata", [1]), "no table of items"),
        (lambda m: m.planner_data.update(a=("b",)), "below another|two items"),
        (lambda m: m.planner_data.update(a=(1.5,)), "keys and positions"),
        (lambda m: m.planner_data.update(a=tuple("x" * 200)), "too deep"),
    ],
)
def test_metadata_that_does_not_hold_is_refused(
    change: Callable[[Metadata], None], text: str, saved: Path
) -> None:
    with pytest.raises((CorruptError, UnsupportedError), match=text):
        ckptfmt.open_foreign(changed(saved, change))


def test_a_chunk_of_another_shape_or_dtype_is_refused(saved: Path, tmp_path: Path) -> None:
    def shrink(metadata: Metadata) -> None:
        box(metadata, size=torch.Size([1, 3]), sizes=torch.Size([1, 3]))

    foreign = ckptfmt.open_foreign(changed(saved, shrink))
    with pytest.raises(CorruptError, match="another dtype or shape"):
        foreign["a"].read()
    with pytest.raises(CorruptError):
        ckptfmt.convert(saved, tmp_path / "s", durable=False)
    assert not ckptfmt.Store(tmp_path / "s").names()


def test_two_items_over_the_same_bytes_are_refused(saved: Path) -> None:
    def double(metadata: Metadata) -> None:
        first, second = info(metadata, "a"), info(metadata, "b.c")
        object.__setattr__(second, "offset", first.offset)

    with pytest.raises(CorruptError, match="overlap"):
        ckptfmt.open_foreign(changed(saved, double))


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def test_nothing_runs_when_it_is_read(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def plant(metadata: Metadata) -> None:
        metadata.planner_data = Bomb()

    assert ckptfmt.open_foreign(changed(saved, plant)).load()["a"].shape == (2, 3)
    (saved / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CorruptError, match="no Metadata"):
        ckptfmt.open_foreign(saved)
    assert not (tmp_path / "pwned").exists()


def test_a_file_that_is_missing_is_named(saved: Path) -> None:
    (saved / "__0_0.distcp").unlink()
    with pytest.raises(NotFoundError, match="__0_0"):
        ckptfmt.open_foreign(saved)


def test_mutated_directories_give_values_or_a_typed_error(
    tmp_path: Path, mutations: Callable[[bytes, int, int], list[bytes]], seed: int
) -> None:
    folder = tmp_path / "d"
    shutil.copytree(PATH, folder)
    errors = 0
    for name, count in ((".metadata", 160), ("__1_0.distcp", 60)):
        good = (folder / name).read_bytes()
        for data in mutations(good, seed, count):
            (folder / name).write_bytes(data)
            try:
                ckptfmt.open_foreign(folder).load()
            except CheckpointError:
                errors += 1
        (folder / name).write_bytes(good)
    assert errors > 60


def test_an_archive_within_a_file_is_read_by_its_own_offsets(saved: Path) -> None:
    """Items begin anywhere in a file; a ZIP archive counts from its own begin."""
    data = (saved / "__0_0.distcp").read_bytes()
    (saved / "__0_0.distcp").write_bytes(b"x" * 123 + data)

    def shift(metadata: Metadata) -> None:
        assert metadata.storage_data is not None
        for value in metadata.storage_data.values():
            object.__setattr__(value, "offset", value.offset + 123)

    loaded = ckptfmt.open_foreign(changed(saved, shift)).load()
    assert np.array_equal(loaded["a"], np.arange(6.0).reshape(2, 3))
    assert loaded["step"] == 3
