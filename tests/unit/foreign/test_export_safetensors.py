"""What is exported as safetensors is what the format's own library reads, and imports as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError, UnsupportedError
from ckptfmt.foreign.safetensors_header import DTYPES
from ckptfmt.foreign.tree_record import RECORD_KEY as TREE_KEY

safetensors = pytest.importorskip("safetensors")


def random(name: str, *shape: int) -> Any:
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    high = {"bool": 2, "float4_e2m1fn": 16}.get(name, 256)
    raw = np.random.default_rng(5).integers(0, high, (int(np.prod(shape)), dtype.itemsize))
    return raw.astype(np.uint8).reshape(-1).view(dtype).reshape(shape)


def exported(tree: Any, path: Path, **options: Any) -> Any:
    ckptfmt.save(tree, path.parent / "s", durable=False, if_exists="replace", metadata={"k": "v"})
    return ckptfmt.export(path.parent / "s", path, **options)


def header(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_every_dtype_is_read_bit_for_bit_by_the_library(tmp_path: Path) -> None:
    tree = {ours: random(ours, 3, 4) for ours, bits in DTYPES.values() if bits != 6}
    tree |= {"scalar": np.array(3.0), "empty": np.zeros((0, 3), np.int16)}
    exported(tree, tmp_path / "x.safetensors")
    found = dict(safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()))
    assert found.keys() == tree.keys()
    for name, array in tree.items():
        raw = array.tobytes()
        if name == "float4_e2m1fn":
            halves = np.frombuffer(raw, np.uint8)
            raw = (halves[::2] | halves[1::2] << 4).tobytes()
        assert bytes(found[name]["data"]) == raw
        assert found[name]["shape"] == list(array.shape)
    again = ckptfmt.open_foreign(tmp_path / "x.safetensors")
    assert {name: again[name].read().tobytes() for name in again} == {
        name: array.tobytes() for name, array in tree.items()
    }
    assert TREE_KEY not in header(tmp_path / "x.safetensors")["__metadata__"]


def test_a_nested_tree_with_values_ties_and_lists_imports_as_it_was(tmp_path: Path) -> None:
    w = np.arange(4.0)
    tree = {
        "model": {"embed.weight": w, "head.weight": w, "a/b~c": np.zeros(2)},
        "optimizer": {"state": {0: {"m": np.ones(3)}}, "lr": [0.1, {"k": (1, 2)}]},
        "list": [np.zeros(1), (np.ones(1), "x")],
        "none": None,
    }
    report = exported(tree, tmp_path / "x.safetensors")
    assert report.transformed == {"model/head.weight": "a note that it is model.embed.weight"}
    ckptfmt.convert(tmp_path / "x.safetensors", tmp_path / "t", durable=False)
    with ckptfmt.open(tmp_path / "s") as one, ckptfmt.open(tmp_path / "t") as other:
        assert one.info.digest == other.info.digest
        assert other.info.metadata == {"k": "v", "format": "pt", "model.head.weight": (
            "model.embed.weight"
        )}  # fmt: skip
    assert (
        list(safetensors.safe_open(tmp_path / "x.safetensors", "np").keys()).count(
            "model.embed.weight"
        )
        == 1
    )


def test_names_that_would_be_one_stay_apart(tmp_path: Path) -> None:
    tree = {"a": {"b": np.zeros(1)}, "a.b": np.ones(1), "c": {1: np.zeros(1), "1": np.ones(1)}}
    report = exported(tree, tmp_path / "x.safetensors")
    assert report.renamed.get("a/b", "a/b") != "a.b"
    found = ckptfmt.open_foreign(tmp_path / "x.safetensors").load()
    assert found["a"]["b"][0] == 0
    assert found["a.b"][0] == 1
    assert found["c"][1][0] == 0
    assert found["c"]["1"][0] == 1


def test_names_that_the_format_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    # Both by their keys and by their own names.
    tree = {"a/b": np.zeros(1), "a": {"b": np.zeros(1)}, "a~1b": np.zeros(1)}
    exported(tree, tmp_path / "x.safetensors")
    assert len(ckptfmt.open_foreign(tmp_path / "x.safetensors")) == 3


def test_a_folder_is_cut_into_shards_that_the_library_reads(tmp_path: Path) -> None:
    tree: dict[str, Any] = {f"layer.{n}": np.full(100, n, np.float64) for n in range(5)}
    tree["epoch"] = 4
    exported(tree, tmp_path / "m", target_format="safetensors", shard_nbytes=1700)
    names = sorted(p.name for p in (tmp_path / "m").iterdir())
    assert names == [
        *(f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4000
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "m" / file, "np") as shard:
            assert shard.get_tensor(name).tobytes() == tree[name].tobytes()
    found = ckptfmt.open_foreign(tmp_path / "m").load()
    assert found["epoch"] == 4
    assert found["layer.3"].tobytes() == tree["layer.3"].tobytes()
    exported(tree, tmp_path / "m", target_format="safetensors", if_exists="replace")
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "s"]


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(2, np.complex128), "no dtype complex128"),
        (np.zeros(2, "M8[s]"), "no dtype datetime64"),
        (np.array(["x"], np.dtypes.StringDType()), "no dtype string"),
        (np.zeros(2, ml_dtypes.int4), "no dtype int4"),
        (np.zeros(3, ml_dtypes.float4_e2m1fn), "odd number of elements"),
    ],
)
def test_what_the_format_has_no_dtype_for_is_named(tmp_path: Path, array: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"t: .*{reason}"):
        exported({"t": array}, tmp_path / "x.safetensors")


def tampered(path: Path, change: Any) -> Path:
    """The file with another record of its tree."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    record = json.loads(head["__metadata__"][TREE_KEY])
    record = change(record) or record
    head["__metadata__"][TREE_KEY] = record if isinstance(record, str) else json.dumps(record)
    text = json.dumps(head).encode()
    made = path.with_name("bad.safetensors")
    made.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda r: "[",
        lambda r: "[" * 100_000,
        lambda r: r["leaves"].clear(),
        lambda r: r["leaves"].append(["z", "absent", ""]),
        lambda r: r["leaves"].append(["a", "a.w", ""]),
        lambda r: r["leaves"].append(["", "a.w", ""]),
        lambda r: r["leaves"].append(["a//b", "a.w", ""]),
        lambda r: r["leaves"].append([3, "a.w", ""]),
        lambda r: r["leaves"].append(["z", None, "!!"]),
        lambda r: r["leaves"].append(["z", None, "xx=="]),
        lambda r: r["leaves"].append(["z", None, None]),
        lambda r: r["leaves"].append(["z", ["a.w"], ""]),
        lambda r: r.setdefault("containers", []).append(["absent", "list", "wA=="]),
        lambda r: r.setdefault("containers", []).append(["a", "list", "wA==", ""]),
        lambda r: r.setdefault("containers", []).append(["a", "os.system", "wA==", ""]),
        lambda r: r.setdefault("containers", []).append(["a", "type", "wA==", ""]),
        lambda r: r.setdefault("containers", []).append(["a", "odict", "wA==", "wA=="]),
    ],
)
def test_a_record_that_is_no_tree_of_the_file_is_refused(tmp_path: Path, change: Any) -> None:
    exported({"a": {"w": np.zeros(2)}, "v": 1}, tmp_path / "x.safetensors")
    with pytest.raises(CorruptError):
        len(ckptfmt.open_foreign(tampered(tmp_path / "x.safetensors", change)))


def test_a_tensor_of_the_name_that_the_metadata_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="__metadata__: a name that the header keeps"):
        exported({"__metadata__": np.zeros(1), "w": np.zeros(1)}, tmp_path / "x.safetensors")
