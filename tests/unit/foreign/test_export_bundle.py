"""What is exported as a TensorBundle is what TensorFlow itself reads and restores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt import UnsupportedError
from ckptfmt.foreign.bundle.types import QUANTIZED, TYPES
from ckptfmt.foreign.exporters import tree as tree_module
from ckptfmt.foreign.sstable import pack_table, parse_table

tf = pytest.importorskip("tensorflow")

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def random(name: str, *shape: int) -> Any:
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    # Elements below 8 bits take a byte each; which patterns are legal is the dtype's business.
    high = 2 if dtype.itemsize == 1 and name in ("bool", "int2", "uint2", "int4", "uint4") else 256
    high = 8 if name.startswith("float4") else high
    raw = np.random.default_rng(5).integers(0, high, (int(np.prod(shape)), dtype.itemsize))
    return raw.astype(np.uint8).reshape(-1).view(dtype).reshape(shape)


def exported(tree: Any, path: Path, **options: Any) -> Any:
    ckptfmt.save(tree, path.parent / "s", durable=False, if_exists="replace")
    return ckptfmt.export(path.parent / "s", path, target_format="tensorbundle", **options)


def test_every_dtype_is_read_bit_for_bit_by_tensorflow(tmp_path: Path) -> None:
    names = [
        k.dtype for n, k in TYPES.items() if k.dtype not in ("", "bytes") and n not in QUANTIZED
    ]
    tree = {name: random(name, 3, 4) for name in names}
    tree |= {"scalar": np.array(3.0), "empty": np.zeros((0, 3), np.int16)}
    tree["bytes"] = np.array([[b"", b"\0\xff"], [b"x" * 300, b"y"]], object)
    exported(tree, tmp_path / "ck")
    reader = tf.train.load_checkpoint(str(tmp_path / "ck"))
    for name, array in tree.items():
        found = reader.get_tensor(name + VALUE)
        assert found.shape == array.shape
        if name == "bytes":
            assert found.tolist() == array.tolist()
        else:
            assert (found.dtype.name, found.tobytes()) == (array.dtype.name, array.tobytes())
    again = ckptfmt.open_foreign(tmp_path / "ck").load()
    for name, array in tree.items():
        assert again[name].tolist() == array.tolist() or again[name].tobytes() == array.tobytes()
        assert again[name].dtype == array.dtype


def test_objects_are_restored_by_tensorflow(tmp_path: Path) -> None:
    class Model(tf.Module):  # type: ignore[name-defined]
        def __init__(self, value: float) -> None:
            super().__init__()
            self.w = tf.Variable(tf.fill([2, 3], value))
            self.parts = [tf.Variable(value), {"a.b/c": tf.Variable(value)}]

    tree = {
        "model": {
            "w": np.full((2, 3), 5, np.float32),
            "parts": [np.float32(5), {"a.b/c": np.array(7, np.float32)}],
        },
        "step": 3,
        "note": "hällo",
        "rate": 0.5,
        "done": True,
    }
    report = exported(tree, tmp_path / "out/ckpt-3")
    assert report.transformed["step"] == "a tensor of int64"
    model, step = Model(0.0), tf.Variable(0, dtype=tf.int64)
    status = tf.train.Checkpoint(model=model, step=step).read(str(tmp_path / "out/ckpt-3"))
    status.assert_existing_objects_matched()
    assert model.w.numpy().tolist() == tree["model"]["w"].tolist()  # type: ignore[index]
    assert [model.parts[0].numpy(), model.parts[1]["a.b/c"].numpy(), step.numpy()] == [5, 7, 3]
    reader = tf.train.load_checkpoint(str(tmp_path / "out"))
    assert reader.get_tensor("note" + VALUE).decode() == "hällo"
    assert reader.get_tensor("rate" + VALUE) == 0.5
    assert reader.get_tensor("done" + VALUE)


def test_what_tensorflow_wrote_goes_through_a_store_and_back_to_tensorflow(tmp_path: Path) -> None:
    keras = tf.keras
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2, name="head")])
    model.build((None, 3))
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    for number, variable in enumerate(optimizer.variables[2:]):
        variable.assign(tf.fill(variable.shape, float(number)))
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / "theirs"))
    before = [v.numpy() for v in (*model.variables, *optimizer.variables)]
    ckptfmt.convert(tmp_path / "theirs", tmp_path / "s", durable=False)
    ckptfmt.export(tmp_path / "s", tmp_path / "ours.index")
    for variable in (*model.variables, *optimizer.variables):
        variable.assign(tf.zeros_like(variable))
    objects = tf.train.Checkpoint(model=model, optimizer=optimizer)
    status = objects.read(str(tmp_path / "ours"))
    status.assert_existing_objects_matched().assert_consumed()
    after = [v.numpy() for v in (*model.variables, *optimizer.variables)]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after))
    theirs, ours = (ckptfmt.open_foreign(tmp_path / name) for name in ("theirs", "ours"))
    assert set(theirs) == set(ours)
    for name in theirs:
        assert theirs[name].read().tobytes() == ours[name].read().tobytes()


def test_ties_are_one_variable_with_two_paths(tmp_path: Path) -> None:
    w = np.arange(3.0)
    report = exported({"a": {"w": w}, "b": w}, tmp_path / "ck")
    assert report.transformed == {"b": "another path to a/w"}
    assert [n for n, _ in tf.train.list_variables(str(tmp_path / "ck"))] == [
        "_CHECKPOINTABLE_OBJECT_GRAPH",
        f"a/w{VALUE}",
    ]
    a, b = tf.Variable(np.zeros(3)), tf.Variable(np.zeros(3))
    tf.train.Checkpoint(b=b).read(str(tmp_path / "ck")).assert_existing_objects_matched()
    holder = tf.Module()
    holder.w = a
    tf.train.Checkpoint(a=holder).read(str(tmp_path / "ck")).assert_existing_objects_matched()
    assert a.numpy().tolist() == b.numpy().tolist() == [0, 1, 2]


def test_quantized_dtypes_are_those_they_were(tmp_path: Path) -> None:
    values = {"qint8": [-5, 7], "quint8": [5, 200], "qint32": [-(2**20), 3], "qint16": [-300, 3]}
    names = list(values)
    data = [
        tf.bitcast(tf.constant(v, getattr(tf, n.removeprefix("q"))), getattr(tf, n))
        for n, v in values.items()
    ]
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "theirs"), tensor_names=names, shape_and_slices=[""] * 4, tensors=data
    )
    ckptfmt.export(tmp_path / "theirs", tmp_path / "ck", target_format="tensorbundle")
    found = ckptfmt.open_foreign(tmp_path / "ck")
    for name in names:
        assert found[name].foreign.attributes["tf.dtype"] == name
        assert found[name].read().tolist() == values[name]
    types = tf.train.load_checkpoint(str(tmp_path / "ck")).get_variable_to_dtype_map()
    assert {types[name + VALUE].name for name in names} == set(names)


def test_the_state_file_names_the_latest_and_those_before(tmp_path: Path) -> None:
    tree = {"w": np.zeros(2)}
    for name in ("ckpt-1", 'ck"pt 2', "ckpt-1"):
        exported(tree, tmp_path / "out" / name, if_exists="replace")
    assert tf.train.latest_checkpoint(str(tmp_path / "out")) == str(tmp_path / "out/ckpt-1")
    state = tf.train.get_checkpoint_state(str(tmp_path / "out"))
    assert [os.path.basename(p) for p in state.all_model_checkpoint_paths] == ['ck"pt 2', "ckpt-1"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/checkpoint").write_text("my notes")
    exported(tree, tmp_path / "other/ck")
    assert (tmp_path / "other/checkpoint").read_text() == "my notes"
    with pytest.raises(ckptfmt.ExistsError, match="ck"):
        exported(tree, tmp_path / "other/ck")


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (np.zeros(2), "must have a name"),
        ({"": np.zeros(2)}, "must have a name"),
        ({"\0a": np.zeros(2)}, "must have a name"),
        ({"a": {1: np.zeros(2), "1": np.zeros(2)}}, "two leaves would have one name"),
        (
            {"w": np.zeros(2), "t": np.zeros(2, "M8[s]")},
            r"t: TensorFlow has no dtype datetime64\[s\]",
        ),
    ],
)
def test_what_tensorflow_cannot_hold_is_named(tmp_path: Path, tree: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        exported(tree, tmp_path / "ck")
    assert os.listdir(tmp_path) == ["s"]


def test_values_that_tensorflow_cannot_hold_are_notes_that_it_does_not_see(tmp_path: Path) -> None:
    values = {"list": [1, 2], "long": 1 << 63, "time": np.datetime64(1, "s"), "str": np.str_("x")}
    report = exported({"w": np.zeros(2), "v": values, "n": 3}, tmp_path / "ck")
    assert set(report.transformed) == {*(f"v/{name}" for name in values), "n"}
    assert [n for n, _ in tf.train.list_variables(str(tmp_path / "ck"))] == [
        "_CHECKPOINTABLE_OBJECT_GRAPH",
        f"n{VALUE}",
        f"w{VALUE}",
    ]
    assert ckptfmt.open_foreign(tmp_path / "ck").load()["v"] == values
    w = tf.Variable(np.ones(2))
    status = tf.train.Checkpoint(w=w, n=tf.Variable(0, dtype=tf.int64)).read(str(tmp_path / "ck"))
    status.assert_consumed()
    assert w.numpy().tolist() == [0, 0]


def test_checksums_are_those_of_the_whole_where_a_tensor_comes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_module, "PIECE_NBYTES", 37)
    tree = {"w": np.random.default_rng(1).random((7, 3, 5))}
    exported(tree, tmp_path / "ck")
    found = tf.train.load_checkpoint(str(tmp_path / "ck")).get_tensor("w" + VALUE)
    assert found.tobytes() == tree["w"].tobytes()


def test_a_table_of_many_blocks_is_read_by_tensorflow(tmp_path: Path) -> None:
    tree = {f"layer_{n:05}": {"kernel": np.array(n)} for n in range(3000)}
    exported(tree, tmp_path / "ck")
    reader = tf.train.load_checkpoint(str(tmp_path / "ck"))
    assert len(reader.get_variable_to_shape_map()) == 3001
    assert reader.get_tensor(f"layer_02999/kernel{VALUE}") == 2999


@pytest.mark.parametrize("count", [0, 1, 16, 17, 5000])
def test_a_table_is_parsed_as_it_was_packed(count: int) -> None:
    items = [(f"key/{n:06}".encode(), bytes(n % 300)) for n in range(count)]
    assert list(parse_table(pack_table(items), "x")) == items
