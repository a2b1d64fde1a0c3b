"""Trees that other formats lost, saved and loaded whole: NumPy's part of each known failure."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt import UsageError


def same(a: Any, b: Any) -> bool:
    """Equal in type, order, shape, dtype and bits."""
    if isinstance(a, np.ndarray):
        if a.dtype.kind in "OT":
            return a.dtype == b.dtype and a.shape == b.shape and bool(a.tolist() == b.tolist())
        return a.dtype == b.dtype and a.shape == b.shape and bool(a.tobytes() == b.tobytes())
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def test_every_layout_is_stored_as_its_values(tmp_path: Path) -> None:
    """Fortran, transposed, strided, reversed and broadcast arrays came back scrambled."""
    base = np.arange(12, dtype="f4").reshape(3, 4)
    layouts = {
        "fortran": np.asfortranarray(base),
        "transpose": base.T,
        "strided": base[::2],
        "reversed": base[::-1],
        "broadcast": np.broadcast_to(base[0], (5, 4)),
        "swapped": base.astype(">f4"),
    }
    ckptfmt.save(layouts, tmp_path / "s")
    loaded = ckptfmt.load(tmp_path / "s")
    for name, array in layouts.items():
        assert loaded[name].dtype == np.dtype("f4")
        assert loaded[name].tolist() == array.tolist()
        assert loaded[name].flags.c_contiguous
    # An array and its C-ordered copy are the same bytes: one blob, equal digests.
    copies = {name: np.array(array, "f4", order="C") for name, array in layouts.items()}
    ckptfmt.save(copies, tmp_path / "c")
    with ckptfmt.open(tmp_path / "s") as one, ckptfmt.open(tmp_path / "c") as two:
        for name in layouts:
            assert one[name].digest == two[name].digest


EMPTY = [np.zeros((0,)), np.zeros((2, 0), "f4"), np.zeros((0, 3), "i8"), np.zeros((0,), "U3")]
SCALAR = [np.array(1.5), np.array(True), np.array(7, "u1"), np.array(b"x")]


@pytest.mark.parametrize("mode", ["auto", "mmap", "read"])
@pytest.mark.parametrize(
    "arrays",
    [EMPTY, SCALAR, [EMPTY[0], np.ones(9), EMPTY[1]], [np.ones(9), *EMPTY], [*EMPTY, np.ones(9)]],
)
def test_zero_size_and_0d_arrays_keep_shape_and_dtype(
    tmp_path: Path, arrays: list[Any], mode: Any
) -> None:
    """Empties were taken for shared memory, 0-d became (1,), shapes collapsed."""
    ckptfmt.save({"a": arrays, "again": arrays[0]}, tmp_path / "s")
    loaded = ckptfmt.load(tmp_path / "s", mode=mode)
    assert same(loaded, {"a": arrays, "again": arrays[0]})
    assert ckptfmt.Store(tmp_path / "s").verify().ok
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        assert checkpoint.ties() == ([] if arrays[0].size == 0 else [["a/0", "again"]])


def test_every_pattern_of_every_small_dtype_is_kept_at_its_own_size(tmp_path: Path) -> None:
    """bfloat16 and float8 were widened or came back as integers."""
    tree: dict[str, Any] = {}
    for name in dir(ml_dtypes):
        kind = getattr(ml_dtypes, name)
        if isinstance(kind, type) and name not in ("finfo", "iinfo"):
            size = np.dtype(kind).itemsize
            raw = np.arange(256 if size == 1 else 1 << 16, dtype="u1" if size == 1 else "<u2")
            bits = {"int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4}.get(name)
            bits = bits or (
                4 if name.startswith("float4") else 6 if name.startswith("float6") else 8
            )
            tree[name] = (raw & ((1 << bits) - 1) if size == 1 else raw).view(kind)
    ckptfmt.save(tree, tmp_path / "s")
    assert same(ckptfmt.load(tmp_path / "s"), tree)
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        assert checkpoint["bfloat16"].nbytes == 2 << 16
        assert checkpoint["float8_e4m3fn"].nbytes == 256
        assert checkpoint["int4"].nbytes == 128
        assert checkpoint["float6_e2m3fn"].nbytes == 192


def test_tied_arrays_are_stored_once_and_overlapping_ones_come_back_apart(tmp_path: Path) -> None:
    """A tie was dropped, or an overlap was taken for a tie."""
    base = np.arange(100_000.0)
    number = np.arange(50_000.0) + 1j
    tree = {
        "embed": base,
        "head": base,
        "low": base[:60_000],
        "high": base[40_000:],
        "bits": base.view("i8"),
        "z": number,
        "re": number.real,
        "im": number.imag,
    }
    info = ckptfmt.save(tree, tmp_path / "s")
    loaded = ckptfmt.load(tmp_path / "s")
    assert same(loaded, tree)
    assert loaded["embed"] is loaded["head"]
    expected = sum(a.nbytes for name, a in tree.items() if name != "head")
    assert info.nbytes == expected
    loaded["low"][50_000] = -1
    assert loaded["high"][10_000] == 50_000
    assert base[50_000] == 50_000
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        assert checkpoint.ties() == [["embed", "head"]]


def test_keys_keep_their_type_over_many_cycles(tmp_path: Path) -> None:
    """Integer keys became strings, then appeared twice."""
    w = np.ones(3)
    tree: dict[Any, Any] = {
        "state": {25: {"m": w}, "25": {"m": w * 2}, True: 0, None: 1, 2.5: 2, (1, "a"): 3},
        "milestones": collections.Counter({25: 1, 50: 2}),
        "ordered": collections.OrderedDict([("b", w), ("a", 1)]),
        "default": collections.defaultdict(list, {7: [1]}),
        "ints": {3: "c", 1: "a"},
    }
    digests = set()
    for cycle in range(3):
        info = ckptfmt.save(tree, tmp_path / f"s{cycle}")
        digests.add(info.digest)
        tree = ckptfmt.load(tmp_path / f"s{cycle}")
        assert list(tree["state"]) == [25, "25", True, None, 2.5, (1, "a")]
        assert type(list(tree["state"])[2]) is bool
        assert list(tree["ints"]) == [3, 1]
        assert type(tree["milestones"]) is collections.Counter
        assert type(tree["ordered"]) is collections.OrderedDict
        assert tree["default"].default_factory is list
    assert len(digests) == 1


def test_numpy_scalars_come_back_with_their_exact_type(tmp_path: Path) -> None:
    """A scalar saved fine, and the safe loader refused it days later."""
    scalars = [
        *(
            np.float64(0.1),
            np.float32(0.1),
            np.int64(-5),
            np.bool_(True),
            np.str_("a"),
            np.uint8(3),
        ),
        *(np.datetime64("2020-01-01", "ns"), np.float16(math.inf), np.complex64(1j)),
    ]
    tree = {
        "a": {"b": {"c": scalars, "d": np.array(3.5)}},
        "rng": np.random.RandomState(3).get_state(),
    }
    ckptfmt.save(tree, tmp_path / "s")
    assert same(ckptfmt.load(tmp_path / "s"), tree)


def test_an_object_array_is_refused_with_its_path_and_nothing_is_saved(tmp_path: Path) -> None:
    ckptfmt.save({"sched": {"best": 1.0}}, tmp_path / "s", step=1)
    with pytest.raises(UsageError, match="sched/best"):
        ckptfmt.save({"sched": {"best": np.array([1, None], object)}}, tmp_path / "s", step=2)
    assert ckptfmt.Store(tmp_path / "s").steps() == [1]


def test_lists_empties_and_none_are_all_kept(tmp_path: Path) -> None:
    """They were flattened away, and a list's length became part of the names."""
    tree: dict[str, Any] = {
        "list": [],
        "dict": {},
        "tuple": (),
        "none": None,
        "nested": [[]],
        "dicts": [{"a": 1}, {"b": 2}],
        "between": {"x": np.ones(1), "e": {}, "y": [np.ones(1), [], {}, None]},
    }
    ckptfmt.save(tree, tmp_path / "s")
    assert same(ckptfmt.load(tmp_path / "s"), tree)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_list_of_values_is_restored_whole_whatever_its_length(
    tmp_path: Path, length: int
) -> None:
    ckptfmt.save({"history": [1, {"loss": 0.5}]}, tmp_path / "s")
    target: dict[str, Any] = {"history": [0] * length}
    assert ckptfmt.restore(target, tmp_path / "s")
    assert target == {"history": [1, {"loss": 0.5}]}


def test_a_list_of_tensors_of_another_length_is_one_mismatch(tmp_path: Path) -> None:
    ckptfmt.save({"w": [np.ones(2), np.ones(2)]}, tmp_path / "s")
    target = {"w": [np.zeros(2), np.zeros(2), np.zeros(2)]}
    with pytest.raises(ckptfmt.MismatchError, match="w/2"):
        ckptfmt.restore(target, tmp_path / "s")
    assert all((array == 0).all() for array in target["w"])


def test_values_of_every_kind_come_back(tmp_path: Path) -> None:
    tree = {
        "ints": [2**64, -(2**200), 0],
        "floats": [math.nan, -0.0, math.inf],
        "complex": 1 - 2j,
        "text": "é\0",
        "bytes": b"\0\xff",
        "set": {1, "a"},
        "long": list(range(10_000)),
        "strings": np.array(["a", "é" * 100, ""], np.dtypes.StringDType()),
        "objects": np.array([["a"], ["b"]], object),
        "blobs": np.array([b"a\0", b""], object),
        "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
        "void": np.array([b"abc"], "V3"),
        "hollow": np.ndarray((2,), "S0", b""),
    }
    ckptfmt.save(tree, tmp_path / "s")
    assert same(ckptfmt.load(tmp_path / "s"), tree)
