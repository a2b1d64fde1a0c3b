"""The reference reader reads what the package writes, identically: a stranger could."""

from __future__ import annotations

import collections
import datetime
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.format import dtype_of, pack_value

ROOT = Path(__file__).parents[2]
Reads = Callable[[Any], dict[str, dict[str, Any]]]


class Pair(NamedTuple):
    left: object
    right: object


def raw_of(array: np.ndarray[Any, Any]) -> bytes:
    """C order, little-endian, one byte an element under 8 bits."""
    bits = dtype_of(array).bits
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.byteorder == ">":
        flat = flat.astype(flat.dtype.newbyteorder("<"))
    raw = flat.view(np.uint8)
    return (raw & ((1 << bits) - 1) if bits < 8 else raw).tobytes()


def assert_same_tensor(found: Any, array: np.ndarray[Any, Any]) -> None:
    dtype = dtype_of(array)
    assert (found.dtype, found.bits, found.shape) == (dtype.name, dtype.bits, array.shape)
    if dtype.bits == 0:
        assert found.items == array.ravel().tolist()
    else:
        assert found.data == raw_of(array)


def all_dtypes() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    made: dict[str, np.ndarray[Any, Any]] = {}
    plain = ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
    for name in [*plain, ">i4", ">f8", ">c16", "M8[ns]", "m8[25s]", "V5"]:
        dtype = np.dtype(name)
        raw = rng.integers(0, 2 if name == "bool" else 256, 7 * dtype.itemsize, np.uint8)
        made[name] = raw.view(dtype)
    for name in dir(ml_dtypes):
        kind = getattr(ml_dtypes, name)
        if isinstance(kind, type) and name not in ("finfo", "iinfo"):
            array: np.ndarray[Any, Any] = np.zeros(7, kind)
            bits = dtype_of(array).bits
            raw = rng.integers(0, 1 << min(bits, 8), array.nbytes, np.uint8)
            made[name] = raw.view(array.dtype)
    made["text"] = np.array(["a", "caf\u00e9", "", "\U0001f600" * 3])
    made["raw"] = np.array([b"a", b"\xff\0\1", b""])
    made["strings"] = np.array(["x", "", "\u4e2d" * 100], np.dtypes.StringDType())
    made["objects"] = np.array([b"abc", b"", b"\0\0"], object)
    return made


def test_every_dtype_is_read_bit_for_bit(tmp_path: Path, assert_reference_reads: Reads) -> None:
    arrays = all_dtypes()
    ckptfmt.save(arrays, tmp_path)
    leaves = assert_reference_reads(tmp_path)["main"]
    assert len(leaves) == len(arrays) > 40
    for name, array in arrays.items():
        assert_same_tensor(leaves[name], array)


def test_every_layout_and_shape_is_read(tmp_path: Path, assert_reference_reads: Reads) -> None:
    grid = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    arrays = {
        "0d": np.array(2.5),
        "empty": np.zeros((0, 3), np.int16),
        "fortran": np.asfortranarray(grid),
        "strided": grid[:, ::2, ::-1],
        "broadcast": np.broadcast_to(np.float32(7), (3, 2)),
        "ones": np.ones((1,) * 32, np.uint8),
        "int4": np.arange(-7, 8).astype(ml_dtypes.int4).reshape(3, 5)[:, ::2],
        "large": np.arange(50_000, dtype=np.int64),
    }
    ckptfmt.save(arrays, tmp_path, chunk_nbytes=4096)
    leaves = assert_reference_reads(tmp_path)["main"]
    for name, array in arrays.items():
        assert_same_tensor(leaves[name], np.asarray(array))


VALUES: dict[str, Any] = {
    "none": None,
    "flags": [True, False],
    "ints": [0, -1, 2**63, -(2**63), 2**64, -(2**200)],
    "floats": [0.0, -0.0, float("inf"), float("nan"), 1e-320],
    "complex": complex(-0.0, 2),
    "text": "caf\u00e9 \U0001f600",
    "bytes": b"\0\xff",
    "nested": {"a": [1, (2, {"b": ()})], "": {}},
    "set": {3, "a", (1, 2)},
    "frozen": frozenset([1]),
    "odict": collections.OrderedDict([("z", 1), ("a", 2)]),
    "default": collections.defaultdict(list, {"k": [1]}),
    "counter": collections.Counter("aab"),
    "pair": Pair(1, "two"),
    "keys": {1: "a", False: "b", None: 0, (1, "x"): 2, b"y": 3, 1.5: 4},
    "scalar": [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("abc")],
    "dtype": np.dtype("float32"),
    "path": pathlib.PurePosixPath("a/b"),
    "when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
    "long": ["x" * 10_000, list(range(2000))],
}


def test_every_value_is_read(
    tmp_path: Path, assert_reference_reads: Reads, reference: ModuleType
) -> None:
    tree = {**VALUES, "w": np.zeros(2)}
    ckptfmt.save(tree, tmp_path)
    leaves = assert_reference_reads(tmp_path)["main"]
    whole = reference.Store(tmp_path).latest().tree()
    for name, value in VALUES.items():
        expected = reference.plain(reference.parse_value(pack_value(value)))
        assert reference.plain(whole[name]) == expected, name
    for name in ("none", "flags", "ints", "text", "bytes", "set", "frozen", "complex"):
        assert leaves[name] == VALUES[name]
        assert type(leaves[name]) is type(VALUES[name])


def test_containers_keys_and_order_are_read(
    tmp_path: Path, assert_reference_reads: Reads, reference: ModuleType
) -> None:
    one = [np.full(2, i, np.int8) for i in range(12)]
    tree: dict[Any, Any] = {
        "z": [one[0], {"q": 1}, (one[1], None)],
        "a": Pair(one[2], collections.OrderedDict(y=one[3], x=1)),
        1: one[4],
        "1": one[5],
        (True, "k/~"): {"": one[6], None: one[7]},
        "many": [one[8], *range(1, 12)],
        "d": collections.defaultdict(dict, {"m": one[9]}),
        "empty": {},
        "a/b~c": one[10],
    }
    ckptfmt.save(tree, tmp_path)
    assert_reference_reads(tmp_path)
    made = reference.Store(tmp_path).latest().tree()
    assert list(made) == list(tree)
    assert [type(item) for item in made["z"]] == [reference.Tensor, dict, tuple]
    assert type(made["a"]).__name__ == "Pair"
    assert made["a"]._fields == ("left", "right")
    assert type(made["a"].right) is collections.OrderedDict
    assert list(made["a"].right) == ["y", "x"]
    assert made["d"].default_factory is dict
    assert made["many"][1:] == list(range(1, 12))
    for found, array in (
        (made["z"][0], one[0]), (made["z"][2][0], one[1]), (made["a"].left, one[2]),
        (made[1], one[4]), (made["1"], one[5]), (made[(True, "k/~")][""], one[6]),
        (made[(True, "k/~")][None], one[7]), (made["a/b~c"], one[10]),
    ):  # fmt: skip
        assert_same_tensor(found, array)


@pytest.mark.parametrize("tree", [np.arange(3), 7, [], {}, [np.arange(3)], (np.arange(2), {})])
def test_the_root_may_be_anything(
    tree: Any, tmp_path: Path, assert_reference_reads: Reads, reference: ModuleType
) -> None:
    ckptfmt.save(tree, tmp_path)
    assert_reference_reads(tmp_path)
    made = reference.Store(tmp_path).latest().tree()
    if isinstance(tree, np.ndarray):
        assert_same_tensor(made, tree)
    else:
        assert type(made) is type(tree)
        assert len(made) == len(tree) if hasattr(tree, "__len__") else made == tree


def test_ties_are_one_tensor_and_equal_content_is_not(
    tmp_path: Path, assert_reference_reads: Reads
) -> None:
    w = np.arange(5000, dtype=np.float32)
    ckptfmt.save({"a": w, "b": w, "c": w.copy()}, tmp_path)
    leaves = assert_reference_reads(tmp_path)["main"]
    assert leaves["a"] is leaves["b"]
    assert leaves["a"] is not leaves["c"]
    assert leaves["a"].data == leaves["c"].data == w.tobytes()


@pytest.mark.parametrize("digest", ["xxh3-128", "sha256"])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_codec_and_digest_is_read(
    codec: str, digest: Any, tmp_path: Path, assert_reference_reads: Reads
) -> None:
    rng = np.random.default_rng(2)
    tree = {
        "zeros": np.zeros(100_000, np.float32),
        "noise": rng.integers(0, 256, 100_000, np.uint8),
        "text": np.array(["abc" * 1000] * 5, np.dtypes.StringDType()),
    }
    ckptfmt.save(tree, tmp_path, codec=codec, digest=digest, chunk_nbytes=8192)
    leaves = assert_reference_reads(tmp_path)["main"]
    for name, array in tree.items():
        assert_same_tensor(leaves[name], array)


def test_a_section_that_the_package_compressed_is_read(
    tmp_path: Path, assert_reference_reads: Reads, reference: ModuleType
) -> None:
    tree = {f"layers/{i}/weight": np.float32(i) + np.zeros(1, np.float32) for i in range(4000)}
    ckptfmt.save(tree, tmp_path)
    document = (tmp_path / "checkpoints" / "main~0.index").read_bytes()
    assert reference.parse_header(document)[3][2][0] == 1
    leaves = assert_reference_reads(tmp_path)["main"]
    assert_same_tensor(leaves["layers~17~1weight"], np.full(1, 7, np.float32))


def test_chunks_of_an_earlier_save_are_read(tmp_path: Path, assert_reference_reads: Reads) -> None:
    table = np.arange(100_000, dtype=np.int32)
    ckptfmt.save({"t": table, "n": 1}, tmp_path, step=1, chunk_nbytes=4096)
    later = table.copy()
    later[50_000] = -1
    ckptfmt.save({"t": later, "n": 2}, tmp_path, step=2, chunk_nbytes=4096)
    made = assert_reference_reads(tmp_path)
    assert_same_tensor(made["step-0000000000000001"]["t"], table)
    assert_same_tensor(made["step-0000000000000002"]["t"], later)
    assert made["step-0000000000000002"]["n"] == 2


KEYS = st.text(max_size=4) | st.integers(-3, 3) | st.booleans() | st.none() | st.binary(max_size=2)
LEAVES = (
    st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.none()
    | st.builds(lambda n: np.arange(n, dtype=np.int16), st.integers(0, 5))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@given(tree=TREES)
def test_any_tree_is_read(
    tree: Any, tmp_path_factory: pytest.TempPathFactory, reference: ModuleType
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    ckptfmt.save(tree, folder, durable=False)
    reference.assert_reference_reads(folder)
    same(reference.Store(folder).latest().tree(), tree)


def same(found: Any, tree: Any) -> None:
    if isinstance(tree, np.ndarray):
        assert_same_tensor(found, tree)
        return
    assert type(found) is type(tree)
    if isinstance(tree, dict):
        assert list(found) == list(tree)
        assert [type(key) for key in found] == [type(key) for key in tree]
        for key, item in tree.items():
            same(found[key], item)
    elif isinstance(tree, list | tuple):
        assert len(found) == len(tree)
        for a, b in zip(found, tree):
            same(a, b)
    else:
        assert found == tree
        assert repr(found) == repr(tree)


# -- damage -------------------------------------------------------------------------------------------


def test_any_flipped_byte_of_a_small_store_is_refused_or_skipped(
    tmp_path: Path, reference: ModuleType
) -> None:
    ckptfmt.save({"w": np.arange(10), "s": "text"}, tmp_path)
    files = [p for folder in ("checkpoints", "data") for p in (tmp_path / folder).iterdir()]
    assert len(files) == 2
    for path in files:
        good = path.read_bytes()
        for position in range(0, len(good), 1 if len(good) < 3000 else 7):
            bad = bytearray(good)
            bad[position] ^= 0x20
            path.write_bytes(bad)
            with pytest.raises(reference.Refused):
                reference.assert_reference_reads(tmp_path)
        path.write_bytes(good)
    reference.assert_reference_reads(tmp_path)


def test_a_data_file_that_is_missing_short_or_a_link_is_refused(
    tmp_path: Path, reference: ModuleType
) -> None:
    ckptfmt.save({"w": np.arange(10_000)}, tmp_path)
    (path,) = (tmp_path / "data").iterdir()
    good = path.read_bytes()

    def kind() -> str:
        with pytest.raises(reference.Refused) as caught:
            reference.Store(tmp_path).latest().tree()
        found: str = caught.value.kind
        return found

    path.write_bytes(good[:4096])
    assert kind() == "corrupt-short-file"
    path.unlink()
    assert kind() == "corrupt-missing-file"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(good)
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic"):
        reference.Store(tmp_path).latest().tree()


# -- command line -------------------------------------------------------------------------------------


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    script = ROOT / "spec" / "reference_reader.py"
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_lists_prints_and_dumps(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ckptfmt.save({"w": np.arange(3, dtype=np.int16), "n": 7}, store, step=1)
    ckptfmt.save({"w": np.arange(4, dtype=np.int16), "n": 8}, store, step=2)
    listed = run(store)
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [
        "step-0000000000000001",
        "step-0000000000000002",
    ]
    shown = json.loads(run(f"{store}@1", "--json").stdout)
    tensor = {"dtype": "int16", "shape": [3], "data": "000001000200"}
    assert shown == {"dict": [["w", {"tensor": tensor}], ["n", 7]]}
    assert run(f"{store}@latest", "--dump", tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "0.bin").read_bytes() == np.arange(4, dtype=np.int16).tobytes()
    assert json.loads((tmp_path / "out" / "leaves.json").read_text())[1]["value"] == 8
    assert run(f"{store}@9").returncode == 10
    (data, *_) = sorted((store / "checkpoints").iterdir())
    data.write_bytes(b"")
    assert run(f"{store}@1").returncode == 4


def test_the_reference_reader_imports_nothing_of_the_package() -> None:
    code = (
        "import sys; sys.path.insert(0, 'spec'); import reference_reader; "
        "print([m for m in sys.modules if m.split('.')[0] in ('ckptfmt', 'numpy', 'ml_dtypes')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
