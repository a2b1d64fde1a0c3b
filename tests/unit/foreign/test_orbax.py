"""Orbax's layouts without Orbax: every dtype as it restores them, and nothing outside the folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import tensorstore

import ckptfmt
from ckptfmt import CheckpointError, CorruptError
from ckptfmt.foreign import detect_format, read_foreign, streaming
from ckptfmt.foreign.orbax import arrays

FILES = Path(__file__).parents[2] / "compat/import/orbax"
Mutations = Callable[[bytes, int, int], list[bytes]]


@pytest.mark.parametrize("stem", ["ocdbt", "ocdbt-zarr3", "zarr", "zarr3"])
def test_every_leaf_is_read_as_orbax_restores_it(stem: str, same_as_expected: Any) -> None:
    assert detect_format(str(FILES / stem)) == "orbax"
    same_as_expected(FILES / stem, FILES / f"expected-{stem}.json")


def test_a_managers_folder_is_its_latest_step(tmp_path: Path) -> None:
    want = {"notes": {"step": 10}, "state": {"w": [10.0, 10.0]}}
    for path in (FILES / "manager", FILES / "manager/10"):
        loaded = ckptfmt.open_foreign(path).load()
        assert {**loaded, "state": {"w": loaded["state"]["w"].tolist()}} == want
    state = ckptfmt.open_foreign(FILES / "manager/2/state").load()
    assert state["w"].tolist() == [2, 2]


def test_arrays_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = ckptfmt.open_foreign(FILES / "ocdbt").load()
    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1)
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 8)
    ckptfmt.convert(FILES / "ocdbt", tmp_path / "s", durable=False)
    found = ckptfmt.load(tmp_path / "s")
    for name, array in want["every"].items():
        assert found["every"][name].tobytes() == array.tobytes(), name


def write_zarr(path: Path, values: Any, *, driver: str = "zarr") -> None:
    array = np.asarray(values)
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/"}}
    store = tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result()
    store.write(array).result()


def test_the_layout_of_older_releases_is_read(tmp_path: Path) -> None:
    """A folder an array; the tree in Flax's msgpack, with references to them."""
    write_zarr(tmp_path / "x/params.w", np.arange(6.0).reshape(2, 3))
    write_zarr(tmp_path / "x/zeros", np.zeros(3))  # of which no chunk is stored
    tree = {
        "params": {"w": "PLACEHOLDER://params.w"},
        "zeros": "PLACEHOLDER://zeros",
        "step": 3,
    }
    (tmp_path / "x/checkpoint").write_bytes(msgpack.packb(tree))
    loaded = ckptfmt.open_foreign(tmp_path / "x").load()
    assert loaded["params"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["zeros"].tolist() == [0, 0, 0]
    assert loaded["step"] == 3


def test_arrays_alone_are_a_tree_of_their_names(tmp_path: Path) -> None:
    write_zarr(tmp_path / "x/a.b", np.arange(3))
    write_zarr(tmp_path / "x/c", np.ones(2), driver="zarr3")
    loaded = read_foreign(tmp_path / "x", source_format="orbax")
    assert sorted(loaded.tensors) == ["a/b", "c"]
    assert loaded.tensors["c"].fetch().tolist() == [1, 1]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(FILES / "zarr", tmp_path / "c")
    return tmp_path / "c"


def test_a_folder_that_leads_out_is_refused(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    chunk = copied / "numpy/0"
    chunk.unlink()
    chunk.symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptError, match="a link in a checkpoint"):
        ckptfmt.open_foreign(copied)
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(CorruptError, match="not a regular file"):
        ckptfmt.open_foreign(copied)


def change(folder: Path, edit: Callable[[Any], None], name: str = "_METADATA") -> Path:
    path = folder / name
    found = json.loads(path.read_text())
    edit(found)
    path.write_text(json.dumps(found))
    return folder


def row(found: Any) -> Any:
    return found["tree_metadata"]["('numpy',)"]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda m: row(m)["key_metadata"][0].update(key="../../x"), "leads elsewhere"),
        (lambda m: row(m)["key_metadata"][0].update(key="gone"), "tensorstore refuses"),
        (lambda m: row(m)["key_metadata"][0].update(key="step"), "two leaves of one path"),
        (lambda m: row(m)["key_metadata"][0].update(key_type=9), "no known type"),
        (lambda m: row(m)["key_metadata"][0].update(key_type=1), "position that is no number"),
        (lambda m: row(m)["value_metadata"].update(value_type=3), "of no type"),
        (lambda m: row(m).update(key_metadata=[{"key": "x", "key_type": 2}] * 99), "no known form"),
        (lambda m: m.update(tree_metadata=[]), "no table of leaves"),
        (lambda m: row(m)["value_metadata"].update(value_type="string"), "a text that is not"),
    ],
)
def test_metadata_that_does_not_hold_is_refused(
    edit: Callable[[Any], None], text: str, copied: Path
) -> None:
    with pytest.raises(CorruptError, match=text):
        ckptfmt.open_foreign(change(copied, edit))


def test_sizes_that_cannot_be_are_refused(copied: Path) -> None:
    def edit(found: Any) -> None:
        found.update(shape=[1 << 50], chunks=[1 << 50])

    with pytest.raises(CorruptError, match=r"impossible size|refuses"):
        ckptfmt.open_foreign(change(copied, edit, "numpy/.zarray"))


def test_a_chunk_that_is_missing_or_damaged_is_found(copied: Path, tmp_path: Path) -> None:
    chunk = copied / "numpy/0"
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 255
    chunk.write_bytes(data[:-3])
    with pytest.raises(CorruptError, match="tensorstore refuses"):
        ckptfmt.open_foreign(copied)["numpy"].read()
    chunk.unlink()
    with pytest.raises(CorruptError, match="tensorstore refuses"):
        ckptfmt.convert(copied, tmp_path / "s", durable=False)
    assert not ckptfmt.Store(tmp_path / "s").names()


def spoil(folder: Path, source: Path, mutations: Mutations, seed: int, count: int) -> int:
    """How many mutations of the files of a checkpoint are refused."""
    errors = 0
    shutil.copytree(source, folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".txt")
    for number, path in enumerate(files):
        good = path.read_bytes()
        if not good:
            continue
        for data in mutations(good, seed + number, -(-count // len(files))):
            path.write_bytes(data)
            try:
                ckptfmt.open_foreign(folder).load()
            except CheckpointError:
                errors += 1
        path.write_bytes(good)
    return errors


def test_mutated_checkpoints_give_values_or_a_typed_error(
    tmp_path: Path, mutations: Mutations, seed: int
) -> None:
    source = FILES / "manager/10/state"
    assert spoil(tmp_path / "a", source, mutations, seed, 50) > 8
    assert spoil(tmp_path / "c", FILES / "zarr", mutations, seed, 50) > 8


@pytest.mark.slow
def test_many_mutated_checkpoints_give_values_or_a_typed_error(
    tmp_path: Path, mutations: Mutations, seed: int
) -> None:
    for stem in ("ocdbt", "ocdbt-zarr3", "zarr", "zarr3"):
        assert spoil(tmp_path / stem, FILES / stem, mutations, seed, 300) > 50


def test_arrays_that_are_not_there_end_it_at_the_first(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table may claim hundreds of thousands of them."""

    def claim(found: Any) -> None:
        for number in range(5000):
            keys = [{"key": f"x{number}", "key_type": 2}]
            found["tree_metadata"][str(number)] = {**row(found), "key_metadata": keys}

    begun: list[str] = []
    begin = arrays.Arrays.begin

    def counted(self: arrays.Arrays, name: str, *, is_zarr3: bool) -> Any:
        begun.append(name)
        return begin(self, name, is_zarr3=is_zarr3)

    monkeypatch.setattr(arrays.Arrays, "begin", counted)
    with pytest.raises(CorruptError, match="tensorstore refuses the array"):
        ckptfmt.open_foreign(change(copied, claim))
    assert len(begun) < 300
