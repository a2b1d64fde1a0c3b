"""What is exported as `.npz` or `.npy` is what NumPy loads without pickles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt import UnsupportedError
from ckptfmt.foreign.exporters import tree as tree_module

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "U10", "S7", "V5"),
    *("M8[ns]", "m8[D]", "M8"),
]


def random(name: str, *shape: int) -> Any:
    dtype = np.dtype(name)
    if dtype.kind == "U":
        return np.full(shape, "hällo", dtype)
    raw = np.random.default_rng(5).integers(1, 256, (int(np.prod(shape)), dtype.itemsize))
    raw = raw % 2 if name == "bool" else raw
    return raw.astype(np.uint8).reshape(-1).view(dtype).reshape(shape)


def exported(tree: Any, path: Path, **options: Any) -> Any:
    ckptfmt.save(tree, path.parent / "s", durable=False, if_exists="replace")
    return ckptfmt.export(path.parent / "s", path, **options)


def test_every_dtype_is_loaded_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "PIECE_NBYTES", 37)
    tree = {f"in/{name}" if n % 2 else name: random(name, 3, 4) for n, name in enumerate(DTYPES)}
    tree["width 0"] = np.zeros(3, "U0")
    tree = {"a": tree, "empty": np.zeros((0, 3), np.int16), "scalar": np.array(3.5)}
    report = exported(tree, tmp_path / "x.npz")
    assert not report.skipped
    with np.load(tmp_path / "x.npz", allow_pickle=False) as found:
        assert found["empty"].shape == (0, 3)
        assert found["scalar"] == 3.5
        with ckptfmt.open(tmp_path / "s") as before:
            assert set(found.files) == set(before)
            for name in before:
                want, got = before[name].read(), found[name]
                assert (got.dtype, got.shape) == (want.dtype, want.shape)
                assert got.tobytes() == want.tobytes()


def test_ties_are_copies_and_values_are_arrays_without_axes(tmp_path: Path) -> None:
    w = np.arange(3)
    tree = {"a": w, "b": {0: w}, "n": 3, "x": 0.5, "t": "text", "raw": b"ab", "f": np.float32(2)}
    report = exported(tree, tmp_path / "x.npz")
    assert report.transformed["b/~3i0"] == "a copy of a"
    with np.load(tmp_path / "x.npz", allow_pickle=False) as found:
        assert found["b/~3i0"].tolist() == [0, 1, 2]
        assert [found["n"], found["x"], found["t"], found["raw"]] == [3, 0.5, "text", b"ab"]
        assert found["f"].dtype == np.float32


def test_one_array_is_an_npy(tmp_path: Path) -> None:
    exported(np.arange(6.0).reshape(2, 3), tmp_path / "x.npy")
    assert np.load(tmp_path / "x.npy").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ckptfmt.open_foreign(tmp_path / "x.npy")[""].read().shape == (2, 3)
    with pytest.raises(UnsupportedError, match="b: a second array"):
        exported({"a": np.zeros(1), "b": np.zeros(2)}, tmp_path / "y.npy")
    exported({"a": np.zeros(1), "b": np.ones(2)}, tmp_path / "y.npy", names="b")
    assert np.load(tmp_path / "y.npy").tolist() == [1, 1]


@pytest.mark.parametrize(  # NumPy calls the second a float, the others void
    "name", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"]
)
def test_what_numpy_has_no_dtype_for_is_raw_bytes_to_it(name: str, tmp_path: Path) -> None:
    kind = getattr(ml_dtypes, name)
    array = np.array([1, 2, 4, 8, 16, 32]).astype(kind).reshape(2, 3)
    report = exported({"t": array, "v": [1, None], "z": b"a\0"}, tmp_path / "x.npz")
    assert report.transformed["t"] == f"{name} as raw bytes, as NumPy has it"
    with np.load(tmp_path / "x.npz", allow_pickle=False) as found:
        assert found["t"].view(kind).tolist() == array.tolist()
        assert found.files == ["t"]
    again = ckptfmt.open_foreign(tmp_path / "x.npz").load()
    assert (again["t"].dtype, again["t"].tobytes()) == (array.dtype, array.tobytes())
    assert (again["v"], again["z"]) == ([1, None], b"a\0")
    for tree in ({"t": array}, [np.zeros(1), 5]):
        with pytest.raises(UnsupportedError, match=f"no dtype {name}|1: a second array"):
            exported(tree, tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"t": np.zeros(2, ml_dtypes.int4)}, "t: .*no dtype int4"),
        ({"t": np.array(["a"], np.dtypes.StringDType())}, "t: .*no dtype string"),
        ({"t": np.array([b"a"], object)}, "t: .*no dtype bytes"),
        ({"ckptfmt.tree": np.zeros(1)}, "a name that the archive keeps"),
        ({"..": {"..": {"etc": np.zeros(1)}}}, r"\.\./\.\./etc: a name"),
        ({"c:": {"x": np.zeros(1)}}, "c:/x: a name"),
        ({"a\\b": np.zeros(1)}, "a name"),
    ],
)
def test_what_numpy_cannot_hold_is_named(tmp_path: Path, tree: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        exported({"w": np.zeros(1), **tree}, tmp_path / "x.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
