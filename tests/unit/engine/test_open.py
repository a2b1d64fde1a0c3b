"""A checkpoint opened lazily: a mapping of names, and tensors that are read in parts. Spec: 07-index."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine.open import StoredTensor
from ckptfmt.format import PackedNames, digest, pack_index, pack_tree, parse_index
from ckptfmt.testing import difference

# -- names that are checked when they are used --------------------------------------------------------


def with_names(store: Any, names: list[str]) -> None:
    """Put other leaf names into the only index of a store, with digests that fit."""
    key = next(entry.key for entry in store.backend.list("checkpoints/"))
    index = parse_index(store.backend.get(key))
    tree = pack_tree(replace(index.tree, names=names))
    about = replace(index.about, tree_digest=digest(tree, index.header.algorithm))
    data = pack_index(about, index.files, index.placement, tree, index.header.commit_id)
    store.backend.delete(key)
    store.backend.put_if_absent(key, data, durable=False)


def test_an_opened_index_has_its_names_unpacked_by_whoever_asks_for_one(counted: Any) -> None:
    ckptfmt.save({"a": np.ones(3), "b": np.zeros(2)}, counted.store, step=1)
    checkpoint = ckptfmt.open(counted.store)
    packed = checkpoint.index.tree.names
    assert isinstance(packed, PackedNames)
    assert len(checkpoint) == 2
    assert checkpoint.info.tensors == 2
    assert "leaf_names" not in vars(checkpoint.index.tree)
    assert "a" in checkpoint
    assert vars(checkpoint.index.tree)["leaf_names"] == ["a", "b"]


@pytest.mark.parametrize(
    "use",
    [
        lambda checkpoint: list(checkpoint),
        lambda checkpoint: checkpoint["a"],
        lambda checkpoint: "a" in checkpoint,
        lambda checkpoint: checkpoint.names(),
        lambda checkpoint: checkpoint.tree(),
        lambda checkpoint: checkpoint.load(),
        lambda checkpoint: checkpoint.read({"a": ...}),
        lambda checkpoint: checkpoint.verify(),
        lambda checkpoint: ckptfmt.restore({"a": np.ones(3)}, checkpoint, strict=False),
        lambda checkpoint: StoredTensor(checkpoint, "a", 0).read(),
        lambda checkpoint: StoredTensor(checkpoint, "a", 0).mmap(),
    ],
)
def test_names_that_stand_twice_are_refused_before_any_data_file_is_opened(
    counted: Any, use: Any
) -> None:
    """M07-30."""
    ckptfmt.save({"a": np.ones(3), "b": np.zeros(2)}, counted.store, step=1)
    with_names(counted.store, ["a", "a"])
    checkpoint = ckptfmt.open(counted.store)
    assert len(checkpoint) == 2
    counted.backend.forget()
    with pytest.raises(ckptfmt.CorruptError) as caught:
        use(checkpoint)
    assert caught.value.kind == "corrupt-duplicate-name"
    assert counted.backend.data_reads() == []


def test_verify_of_a_store_names_an_index_whose_names_stand_twice(counted: Any) -> None:
    ckptfmt.save({"a": np.ones(3), "b": np.zeros(2)}, counted.store, step=1)
    with_names(counted.store, ["a", "a"])
    report = counted.store.verify()
    assert ["duplicate name" in problem.reason for problem in report.problems] == [True]


def test_a_save_beside_names_that_stand_twice_reuses_the_chunks_that_it_checked(
    counted: Any,
) -> None:
    state = {"a": np.ones(3), "b": np.zeros(2)}
    ckptfmt.save(state, counted.store, step=1)
    with_names(counted.store, ["a", "a"])
    info = ckptfmt.save(state, counted.store, step=2)
    assert info.written_nbytes == 0
    assert difference(ckptfmt.load(counted.store, step=2), state) == ""


# -- the mapping --------------------------------------------------------------------------------


def test_open_reads_the_index_and_no_data(counted: Any, tree: dict[str, Any]) -> None:
    ckptfmt.save(tree, counted.store, step=1)
    counted.backend.forget()
    checkpoint = ckptfmt.open(counted.store)
    checkpoint.tree()
    list(checkpoint.items())
    assert checkpoint["model/embed"].shape == (5, 12)
    assert counted.backend.data_reads() == []


def test_a_checkpoint_is_a_mapping_of_leaf_names(tmp_path: Path, tree: dict[str, Any]) -> None:
    ckptfmt.save(tree, tmp_path, step=1)
    with ckptfmt.open(tmp_path) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        names = list(checkpoint)
        assert names == checkpoint.names()
        assert names[:3] == ["model/embed", "model/head", "model/bias"]
        assert len(checkpoint) == len(names) == 11
        assert "step" in checkpoint
        assert "model" not in checkpoint
        assert checkpoint["step"] == 7
        assert checkpoint["pair"] == (1, [None, "x"])
        assert checkpoint["empty"] == {}
        assert checkpoint["layers/1/scale"] == np.float32(0.5)
        assert checkpoint.get("nothing", "default") == "default"
        assert [name for name, _ in checkpoint.items()] == names
        assert dict(checkpoint)["step"] == 7
        assert "11 leaves" in repr(checkpoint)


def test_a_name_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    ckptfmt.save({"model": {"encoder.0.weight": np.ones(2), "x": 1}}, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    with pytest.raises(ckptfmt.NotFoundError, match=r"'model/encoder\.0\.weight'"):
        checkpoint["model/encoder.1.weight"]
    with pytest.raises(KeyError, match=r"encoder\.0\.weight"):
        checkpoint["encoder.0.weight"]
    with pytest.raises(ckptfmt.NotFoundError, match="ckptfmt show"):
        checkpoint["qqqqqq"]


def test_what_it_returned_outlives_it(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(9)}, tmp_path)
    with ckptfmt.open(tmp_path) as checkpoint:
        mapped, stored = checkpoint["a"].mmap(), checkpoint["a"]
    assert mapped.tolist() == list(range(9))
    assert stored.read().tolist() == list(range(9))


def test_names_are_selected_and_may_match_nothing(tmp_path: Path, tree: dict[str, Any]) -> None:
    ckptfmt.save(tree, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    assert checkpoint.names("layers") == ["layers/0", "layers/1/scale"]
    assert checkpoint.names(["step", "model/*e*d"]) == ["model/embed", "model/head", "step"]
    assert checkpoint.names("nothing") == []
    assert checkpoint.names(lambda name: name.count("/") == 2) == ["layers/1/scale"]


def test_ties_are_named(tmp_path: Path) -> None:
    one, two = np.ones(3), np.ones(3)
    saved = {"a": one, "b": two, "c": one, "d": [two, one], "e": np.ones(3), "v": 1, "w": 1}
    ckptfmt.save(saved, tmp_path)
    assert ckptfmt.open(tmp_path).ties() == [["a", "c", "d/1"], ["b", "d/0"]]


def test_the_tree_has_stored_tensors_in_place_of_arrays(tmp_path: Path) -> None:
    saved = {"o": collections.OrderedDict(a=np.ones(2)), "l": (np.ones(1), 5), 3: "x"}
    ckptfmt.save(saved, tmp_path)
    tree = ckptfmt.open(tmp_path).tree()
    assert isinstance(tree["o"], collections.OrderedDict)
    assert tree["o"]["a"].shape == (2,)
    assert (tree["l"][1], tree[3]) == (5, "x")


def test_load_of_an_open_checkpoint_is_the_same(tmp_path: Path, tree: dict[str, Any]) -> None:
    ckptfmt.save(tree, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    assert not difference(checkpoint.load(), tree)
    assert list(checkpoint.load(names="step", mode="mmap")) == ["step"]
    like = {"layers": [np.zeros(3), {"scale": 0}]}
    loaded = checkpoint.load(names="layers", like=like)
    assert not difference(loaded, {"layers": tree["layers"]})


def test_an_open_checkpoint_stays_what_it_was(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(5)}, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    ckptfmt.save({"a": np.zeros(5, np.int64)}, tmp_path)
    assert checkpoint["a"].read().tolist() == [0, 1, 2, 3, 4]
    assert checkpoint.info.generation == 0
    ckptfmt.Store(tmp_path).gc(grace_s=0)
    with pytest.raises(ckptfmt.CorruptError, match="missing"):
        checkpoint["a"].read()


# -- a stored tensor ----------------------------------------------------------------------------


def test_a_stored_tensor_says_what_it_is(tmp_path: Path) -> None:
    saved = {
        "w": np.zeros((300, 100), np.float32),
        "h": np.ones((2, 3), ml_dtypes.bfloat16),
        "i": np.ones((3, 3), ml_dtypes.int4),
        "s": np.array(["a"], object),
        "z": np.zeros((0, 4)),
        "n": np.array(1.5),
    }
    ckptfmt.save(saved, tmp_path, codec="zstd")
    checkpoint = ckptfmt.open(tmp_path)
    w = checkpoint["w"]
    assert (w.name, w.shape, w.dtype, w.nbytes) == ("w", (300, 100), np.float32, 120_000)
    assert w.codec == "zstd"
    assert w.stored_nbytes < 1000
    assert len(w.digest) == 32
    assert w.ndim == 2
    assert checkpoint["h"].dtype == ml_dtypes.bfloat16
    assert (checkpoint["i"].nbytes, checkpoint["i"].dtype) == (5, ml_dtypes.int4)
    assert (checkpoint["z"].nbytes, checkpoint["z"].codec, checkpoint["z"].shape) == (
        0,
        "raw",
        (0, 4),
    )
    assert checkpoint["n"].shape == ()
    assert "'w' float32 [300, 100]" in repr(w)


def test_equal_content_cut_alike_has_an_equal_digest(tmp_path: Path) -> None:
    saved = {"a": np.arange(9), "b": np.arange(9), "c": np.arange(1, 10)}
    ckptfmt.save(saved, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    assert checkpoint["a"].digest == checkpoint["b"].digest != checkpoint["c"].digest


def test_numpy_takes_a_stored_tensor_for_an_array(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(6.0).reshape(2, 3)}, tmp_path)
    stored = ckptfmt.open(tmp_path)["a"]
    assert np.asarray(stored).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.asarray(stored, np.float32).dtype == np.float32
    assert float(np.sum(stored)) == 15
    with pytest.raises(ckptfmt.UsageError, match="without a copy"):
        np.asarray(stored, copy=False)


def test_out_is_filled_and_returned(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(12).reshape(3, 4)}, tmp_path)
    stored = ckptfmt.open(tmp_path)["a"]
    out = np.zeros((3, 4), np.int64)
    assert stored.read(out=out) is out
    assert out.tolist() == np.arange(12).reshape(3, 4).tolist()
    row = np.zeros((8,), np.int64)[::2]
    stored.read(1, out=row)
    assert row.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "out",
    [np.zeros((4, 3), np.int64), np.zeros((3, 4)), np.zeros(12, np.int64), np.zeros((3, 4), ">i8")],
)
def test_an_out_that_does_not_fit_is_refused_and_untouched(tmp_path: Path, out: Any) -> None:
    ckptfmt.save({"a": np.arange(1, 13).reshape(3, 4)}, tmp_path)
    stored = ckptfmt.open(tmp_path)["a"]
    with pytest.raises(ckptfmt.UsageError, match="out has another"):
        stored.read(out=out)
    assert not out.any()
    frozen = np.zeros((3, 4), np.int64)
    frozen.flags.writeable = False
    with pytest.raises(ckptfmt.UsageError, match="read-only"):
        stored.read(out=frozen)


def test_mmap_is_lazy_private_and_unchecked(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.zeros(50_000), "z": np.zeros((0, 2))}, tmp_path)
    [file] = (tmp_path / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.write_bytes(data)
    checkpoint = ckptfmt.open(tmp_path)
    mapped = checkpoint["a"].mmap()
    assert int(mapped.view(np.uint8).sum()) == 1
    mapped[:] = 3
    assert file.read_bytes() == bytes(data)
    assert checkpoint["z"].mmap().shape == (0, 2)
    with pytest.raises(ckptfmt.CorruptError):
        checkpoint["a"].read()
    assert int(checkpoint["a"].read(verify=False).view(np.uint8).sum()) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool"])
def test_tensorstore_reads_only_the_chunks_that_a_slice_touches(counted: Any, dtype: str) -> None:
    pytest.importorskip("tensorstore")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.arange(64 * 256).reshape(64, 256).astype(kind)
    ckptfmt.save({"a": array}, counted.store, chunk_nbytes=4096)
    view = ckptfmt.open(counted.store)["a"].tensorstore()
    assert (view.shape, view.dtype.numpy_dtype) == ((64, 256), kind)
    counted.backend.forget()
    part = view[3:5, 10:20].read().result()
    assert (part == array[3:5, 10:20]).all()
    if dtype == "float32":
        assert counted.backend.data_nbytes() <= 8192
    assert (view[::2, 7].read().result() == array[::2, 7]).all()


def test_what_tensorstore_does_not_have_is_unsupported(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    ckptfmt.save({"s": np.array(["a"], object), "t": np.array(["2020"], "M8[D]")}, tmp_path)
    for name in ("s", "t"):
        with pytest.raises(ckptfmt.UnsupportedError, match=f"'{name}'"):
            ckptfmt.open(tmp_path)[name].tensorstore()


# -- while another saves --------------------------------------------------------------------------


@pytest.mark.parametrize("look", ["load", "open", "latest", "checkpoints"])
def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_the_new_one(
    counted: Any, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """Between the listing and the reading of `main~0`, another process saves `main~1`."""
    store, other = counted.store, ckptfmt.Store(counted.store.url)
    for value in range(2):
        ckptfmt.save({"v": value}, other)
    real, left = counted.backend.get, [2, 3]

    def get(key: str, *args: Any) -> Any:
        if key.startswith("checkpoints/") and left:
            ckptfmt.save({"v": left.pop(0)}, other)
        return real(key, *args)

    monkeypatch.setattr(counted.backend, "get", get)
    if look == "load":
        assert ckptfmt.load(store) == {"v": 3}
    elif look == "open":
        assert ckptfmt.open(store, at="main")["v"] == 3
    elif look == "latest":
        assert store.latest().generation == 3
    else:
        assert [info.generation for info in store.checkpoints()] == [3]


def test_a_checkpoint_that_is_deleted_while_it_is_opened_is_not_found(
    counted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptfmt.save({"v": 1}, counted.store, step=1)
    ckptfmt.save({"v": 2}, counted.store, step=2)
    other, real = ckptfmt.Store(counted.store.url), counted.backend.get

    def get(key: str, *args: Any) -> Any:
        if "0002~" in key and 2 in other.steps():
            other.delete(2)
        return real(key, *args)

    monkeypatch.setattr(counted.backend, "get", get)
    assert ckptfmt.load(counted.store) == {"v": 1}
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.load(counted.store, step=2)


def test_what_is_wrong_with_a_checkpoint_that_was_asked_for_is_said_as_it_is(
    tmp_path: Path,
) -> None:
    ckptfmt.save({"v": 1}, tmp_path, step=1)
    index = tmp_path / "checkpoints" / "step-0000000000000001~0.index"
    data = bytearray(index.read_bytes())
    newer = bytes(data[:8]) + b"\2" + bytes(data[9:])
    index.write_bytes(newer)
    with pytest.raises(ckptfmt.UnsupportedError, match="another major version"):
        ckptfmt.open(tmp_path, step=1)
    data[300] ^= 1
    index.write_bytes(data)
    with pytest.raises(ckptfmt.CorruptError, match="section digest differs"):
        ckptfmt.open(tmp_path, at="step-0000000000000001")
