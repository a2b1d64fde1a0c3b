"""What is exported as Orbax is laid out as Orbax has it, and what Orbax restores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt import UnsupportedError
from ckptfmt.foreign.exporters import orbax
from ckptfmt.foreign.exporters import tree as tree_module

ts = pytest.importorskip("tensorstore")

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int4"),
]


def random(name: str, *shape: int) -> Any:
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    high = {"bool": 2, "int4": 8}.get(name, 256)
    raw = np.random.default_rng(5).integers(0, high, (int(np.prod(shape)), dtype.itemsize))
    return raw.astype(np.uint8).reshape(-1).view(dtype).reshape(shape)


def exported(tree: Any, folder: Path, **options: Any) -> Any:
    ckptfmt.save(tree, folder / "s", durable=False, if_exists="replace")
    return ckptfmt.export(folder / "s", folder / "o", target_format="orbax", **options)


def array_of(folder: Path, name: str) -> Any:
    base = {"driver": "file", "path": f"{folder}/o/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": kvstore}, open=True).result().read().result()


TREE: Any = {
    "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b.c": np.ones(3, np.int8)},
    "list": [np.zeros(2), {"x": 1}],
    "opt": {0: np.ones(2)},
    "values": [1, "a", None, {"k": True}, 0.5],
    "none": None,
    "empty": {},
    "text": "hällo",
    "scalar": np.float32(2),
}


def test_every_dtype_is_stored_bit_for_bit_also_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_module, "PIECE_NBYTES", 37)
    monkeypatch.setattr(orbax, "PIECE_NBYTES", 37)
    tree = {name: random(name, 5, 4) for name in DTYPES}
    tree |= {"scalar": np.array(3.0), "empty": np.zeros((0, 3), np.int16)}
    exported(tree, tmp_path)
    for name, array in tree.items():
        found = array_of(tmp_path, name)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()


def test_the_metadata_says_how_leaves_are_nested(tmp_path: Path) -> None:
    report = exported(TREE, tmp_path)
    assert report.renamed["list/1/x"] == "list.1.x"
    assert "values/3/k" in report.loaded
    metadata = json.loads((tmp_path / "o/_METADATA").read_text())
    rows = metadata["tree_metadata"]
    assert [k["key_type"] for k in rows["('list', '1', 'x')"]["key_metadata"]] == [2, 1, 2]
    assert rows["('params', 'w')"]["value_metadata"]["value_type"] == "np.ndarray"
    assert rows["('none',)"]["value_metadata"]["skip_deserialize"]
    assert json.loads((tmp_path / "o/_strings.json").read_text()) == {
        "values.1": "a",
        "text": "hällo",
    }
    exported({"w": np.zeros(1)}, tmp_path, if_exists="replace")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o", "s"]


def test_many_small_arrays_are_few_files(tmp_path: Path) -> None:
    exported({f"w{n}": np.full(40, n) for n in range(150)}, tmp_path)
    files = [path for path in (tmp_path / "o").rglob("*") if path.is_file()]
    assert len(files) < 20
    assert array_of(tmp_path, "w149").tolist() == [149] * 40


@pytest.mark.integration
@pytest.mark.peers
def test_orbax_restores_it(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    exported(TREE, tmp_path)
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "o")
    assert found["params"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["list"][1] == {"x": 1}
    assert found["values"] == [1, "a", None, {"k": True}, 0.5]
    assert (found["text"], found["none"], found["empty"]) == ("hällo", None, {})
    again = ocp.StandardCheckpointer().restore(tmp_path / "o")
    assert again["opt"]["0"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"t": np.zeros(2, "M8[s]")}, r"t: TensorStore has no dtype datetime64"),
        ({"t": np.array(["x"], np.dtypes.StringDType())}, "t: TensorStore has no dtype string"),
        ({"a.b": np.zeros(1), "a": {"b": np.zeros(1)}}, "cannot tell from another"),
        ({"a": {1: np.zeros(1), "1": np.zeros(1)}}, "cannot tell from another"),
        ({"../x": np.zeros(1)}, "leads elsewhere"),
        ({"a\0b": np.zeros(1)}, "leads elsewhere"),
    ],
)
def test_what_orbax_cannot_hold_is_named(tmp_path: Path, tree: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        exported({"w": np.zeros(1), **tree}, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
