"""Cases 1 to 4: what is saved is the value, in every layout, size and dtype."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.testing import difference

SizeOf = Callable[[Path], int]
EXTENSION = [
    name
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type) and name not in ("finfo", "iinfo")
]


@pytest.fixture(scope="module")
def base() -> Any:
    return np.random.default_rng(0).random(1_000_000, np.float32)


@pytest.mark.parametrize(
    "view",
    [np.s_[:1000], np.s_[::1000], np.s_[300_000:400_000], np.s_[::-997], np.s_[5:6]],
    ids=["slice", "strided", "chunk", "negative", "one"],
)
def test_a_view_costs_its_own_bytes(tmp_path: Path, size_of: SizeOf, base: Any, view: Any) -> None:
    """Case 1: not the storage it is a view of."""
    small = base[view]
    ckptfmt.save({"v": small}, tmp_path)
    assert size_of(tmp_path) <= small.nbytes + (64 << 10)
    loaded = ckptfmt.load(tmp_path, mode="read")["v"]
    assert not difference(loaded, small.copy())
    owner = loaded
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    assert owner.nbytes <= small.nbytes + 4096 + 4096


def test_a_whole_and_its_parts_cost_at_most_twice_the_whole(
    tmp_path: Path, size_of: SizeOf, base: Any
) -> None:
    """Case 1: ten chunks beside the whole, all right and all independent."""
    tree = {"base": base} | {f"c{i}": part for i, part in enumerate(np.split(base, 10))}
    info = ckptfmt.save(tree, tmp_path)
    assert info.stored_nbytes <= 2 * base.nbytes + (64 << 10)
    assert size_of(tmp_path) <= 2 * base.nbytes + (128 << 10)
    loaded = ckptfmt.load(tmp_path)
    assert not difference(loaded, {name: array.copy() for name, array in tree.items()})
    loaded["base"][:] = 0
    assert loaded["c3"].any()


def test_torch_views_cost_their_own_bytes_too(tmp_path: Path, size_of: SizeOf) -> None:
    """Case 1, torch: slice, strided view, chunk; the loaded storage is the view's."""
    torch = pytest.importorskip("torch")
    import ckptfmt.torch as ckt

    whole = torch.arange(1_000_000, dtype=torch.float32)
    for name, view in {
        "slice": whole[:1000],
        "strided": whole[::1000],
        "chunk": whole.chunk(10)[3],
        "expanded": torch.ones(1).expand(1000),
    }.items():
        ckt.save({"v": view}, tmp_path / name)
        assert size_of(tmp_path / name) <= view.numel() * 4 + (64 << 10)
        loaded = ckt.load(tmp_path / name)["v"]
        assert torch.equal(loaded, view)
        assert loaded.untyped_storage().nbytes() <= view.numel() * 4 + 8192


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "fortran": np.asfortranarray,
    "transposed": lambda a: a.T,
    "every second row": lambda a: a[::2],
    "every second column": lambda a: a[:, ::2],
    "reversed": lambda a: a[::-1],
    "reversed both": lambda a: a[::-1, ::-1],
    "broadcast": lambda a: np.broadcast_to(a, (2, *a.shape)),
    "broadcast row": lambda a: np.broadcast_to(a[0], (5, a.shape[1])),
    "diagonal": lambda a: np.lib.stride_tricks.as_strided(a, (3,), (a.strides[0] + a.strides[1],)),
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")) if a.dtype.kind != "V" else a,
    "unaligned": lambda a: (
        np.frombuffer(b"\0" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape)
    ),
    "overlapping windows": lambda a: np.lib.stride_tricks.sliding_window_view(a, (2, 2)),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.int64, np.float32, ml_dtypes.bfloat16])
def test_every_layout_is_saved_by_its_values(tmp_path: Path, layout: str, dtype: Any) -> None:
    """Case 2: element by element equal, and one blob with its contiguous copy."""
    array = LAYOUTS[layout](np.arange(12).reshape(3, 4).astype(dtype))
    copy = np.array(array, np.dtype(dtype), order="C")
    ckptfmt.save({"a": array, "b": copy}, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    assert checkpoint["a"].digest == checkpoint["b"].digest
    assert len(np.unique(checkpoint.index.placement.offsets)) == 1
    for mode in ("auto", "read", "mmap"):
        loaded = ckptfmt.load(tmp_path, mode=mode)
        assert not difference(loaded, {"a": copy, "b": copy})


def test_torch_memory_formats_keep_values_and_format(tmp_path: Path) -> None:
    """Case 2, torch: channels_last and permuted tensors; the memory format is kept, and NumPy
    sees the logical values."""
    torch = pytest.importorskip("torch")
    import ckptfmt.torch as ckt

    image = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    tree = {
        "last": image.to(memory_format=torch.channels_last),
        "permuted": image[0].permute(2, 0, 1),
        "t": image[0, 0].t(),
        "flipped": image.flip(0)[1:],
    }
    ckt.save(tree, tmp_path)
    loaded = ckt.load(tmp_path)
    for name, tensor in tree.items():
        assert torch.equal(loaded[name], tensor), name
    assert loaded["last"].is_contiguous(memory_format=torch.channels_last)
    assert loaded["permuted"].is_contiguous()
    assert (ckptfmt.load(tmp_path)["last"] == image.numpy()).all()


EMPTIES: dict[str, Any] = {
    "none": np.zeros((0,), np.float32),
    "rows": np.zeros((0, 3), np.int64),
    "columns": np.zeros((2, 0)),
    "middle": np.zeros((2, 0, 4), np.bool_),
    "bf16": np.zeros((0, 7), ml_dtypes.bfloat16),
    "int4": np.zeros((3, 0), ml_dtypes.int4),
    "text": np.zeros((0,), "U5"),
    "objects": np.zeros((0, 2), np.dtypes.StringDType()),
}
SCALARS: dict[str, Any] = {
    "float": np.array(1.5, np.float32),
    "bool": np.array(True),
    "int4": np.array(-3, ml_dtypes.int4),
    "f8": np.array(0.5, ml_dtypes.float8_e4m3fn),
    "text": np.array("é"),
    "one": np.array([1.5]),
    "one by one": np.array([[7]]),
}


@pytest.mark.parametrize("mode", ["auto", "read", "mmap"])
@pytest.mark.parametrize("order", ["first", "last", "only", "all"])
def test_empty_and_0d_arrays_keep_shape_and_dtype_wherever_they_stand(
    tmp_path: Path, order: str, mode: Any
) -> None:
    """Case 3."""
    full = {"w": np.arange(5), "v": np.ones((2, 2))}
    tree = {
        "first": EMPTIES | SCALARS | full,
        "last": full | SCALARS | EMPTIES,
        "only": EMPTIES,
        "all": {"a": EMPTIES, "b": [EMPTIES["rows"], *SCALARS.values()], "c": full},
    }[order]
    ckptfmt.save(tree, tmp_path)
    assert not difference(ckptfmt.load(tmp_path, mode=mode), tree)
    assert ckptfmt.Store(tmp_path).verify().ok


def test_empty_arrays_are_never_tied(tmp_path: Path) -> None:
    """Case 3: they share no memory, for they have none; the same object twice may be one."""
    ckptfmt.save({"a": np.zeros((0, 3)), "b": np.zeros((0, 3)), "c": np.ones(0)}, tmp_path)
    assert ckptfmt.open(tmp_path).ties() == []
    loaded = ckptfmt.load(tmp_path)
    assert loaded["a"] is not loaded["b"]


def test_empty_and_0d_tensors_of_torch(tmp_path: Path) -> None:
    """Case 3, torch."""
    torch = pytest.importorskip("torch")
    import ckptfmt.torch as ckt

    tree = {
        "none": torch.tensor([]),
        "rows": torch.zeros(0, 3, dtype=torch.int64),
        "again": torch.zeros(0, 3, dtype=torch.int64),
        "zero": torch.tensor(1.5),
        "flag": torch.tensor(True),
        "one": torch.ones(1),
    }
    ckt.save(tree, tmp_path)
    loaded = ckt.load(tmp_path)
    for name, tensor in tree.items():
        assert loaded[name].shape == tensor.shape
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert ckptfmt.open(tmp_path).ties() == []


def test_empty_variables_of_tensorflow(tmp_path: Path) -> None:
    """Case 3, TensorFlow: a variable of shape [0, 3]."""
    tf = pytest.importorskip("tensorflow")
    import ckptfmt.tensorflow as ckf

    tree = {"v": tf.Variable(tf.zeros([0, 3])), "s": tf.Variable(2.5), "b": tf.constant(True)}
    ckf.save(tree, tmp_path)
    target = {"v": tf.Variable(tf.zeros([0, 3])), "s": tf.Variable(0.0), "b": tf.constant(False)}
    ckf.restore(target, tmp_path)
    assert target["v"].shape == (0, 3)
    assert float(target["s"]) == 2.5
    assert bool(target["b"])


def every_pattern(dtype: Any) -> Any:
    """All bit patterns of a dtype of up to 16 bits; random ones of a wider one."""
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return np.array([False, True])
    if kind.itemsize == 1:
        bits = 8
        for info in (ml_dtypes.iinfo, ml_dtypes.finfo):
            try:
                bits = info(kind).bits
            except (ValueError, KeyError, TypeError):
                continue
        return np.arange(1 << bits, dtype=np.uint8).view(kind)
    if kind.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(kind)
    raw = np.random.default_rng(0).integers(0, 256, 1000 * kind.itemsize, np.uint8)
    return raw.view(kind)


@pytest.mark.parametrize(
    "name",
    [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *EXTENSION,
    ],
)
def test_every_bit_pattern_of_every_dtype_survives_at_its_own_size(
    tmp_path: Path, name: str
) -> None:
    """Case 4: no detour over another dtype; on disk count x bits."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = every_pattern(dtype)
    info = ckptfmt.save({"a": array}, tmp_path)
    bits = {"bool": 8}.get(name)
    index = ckptfmt.open(tmp_path).index
    bits = bits or index.tree.dtypes[0].bits
    assert info.nbytes == (array.size * bits + 7) // 8
    if bits >= 8:
        assert bits == 8 * dtype.itemsize
    for mode in ("auto", "mmap"):
        loaded = ckptfmt.load(tmp_path, mode=mode)["a"]
        assert loaded.dtype == dtype
        assert loaded.tobytes() == array.tobytes()
    assert not difference(np.asarray(ckptfmt.open(tmp_path)["a"]), array)


def patterns_of_torch(torch: Any, dtype: Any) -> Any:
    """All patterns of a dtype of up to 16 bits, 256 elements of a wider one; None if this build can
    make no tensor of it."""
    try:
        size = torch.empty(1, dtype=dtype).element_size()
        count = 1 << 16 if size == 2 else 256
        raw = torch.arange(count * size, dtype=torch.int64).to(torch.uint8)
        if size == 2:
            raw = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
        narrow = re.fullmatch(r"torch\.u?int([1-7])", str(dtype))
        if dtype == torch.bool or narrow:
            raw = raw % (1 << int(narrow[1]) if narrow else 2)
        return raw.view(dtype)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_every_dtype_of_torch_survives_with_every_pattern_or_is_refused(tmp_path: Path) -> None:
    """Case 4, torch: every dtype this build has; what cannot come back is refused by name."""
    torch = pytest.importorskip("torch")
    import ckptfmt.torch as ckt

    dtypes = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    survived = set()
    for name, dtype in dtypes.items():
        tensor = patterns_of_torch(torch, dtype)
        if tensor is None:
            continue
        path = tmp_path / name
        try:
            info = ckt.save({"layer": {"x": tensor}}, path)
        except ckptfmt.UsageError as error:
            assert "layer/x" in str(error)  # noqa: PT017
            assert ckptfmt.Store(path).names() == []
            continue
        # Types under 8 bits that ml_dtypes has too are packed; all others take their own size.
        nbytes, own = info.nbytes, tensor.numel() * tensor.element_size()
        assert nbytes == own or (nbytes < own and re.search(r"int[124]$", name))
        loaded = ckt.load(path)["layer"]["x"]
        assert loaded.dtype == dtype
        assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8)), name
        survived.add(name.removeprefix("torch."))
    assert survived >= {
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }


def test_bfloat16_goes_from_torch_to_tensorflow_and_back_bit_for_bit(tmp_path: Path) -> None:
    """Case 4: one checkpoint, three readers, the same 65,536 patterns."""
    torch = pytest.importorskip("torch")
    tf = pytest.importorskip("tensorflow")
    import ckptfmt.tensorflow as ckf
    import ckptfmt.torch as ckt

    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    ckt.save({"h": bits.view(torch.bfloat16)}, tmp_path / "torch")
    plain = ckptfmt.load(tmp_path / "torch")["h"]
    assert plain.dtype == ml_dtypes.bfloat16
    assert plain.tobytes() == bits.numpy().tobytes()
    there = ckf.load(tmp_path / "torch")["h"]
    assert there.dtype == tf.bfloat16
    first = ckptfmt.open(tmp_path / "torch").info.digest
    assert ckf.save({"h": there}, tmp_path / "tf").digest == first
    back = ckt.load(tmp_path / "tf")["h"]
    assert back.dtype == torch.bfloat16
    assert torch.equal(back.view(torch.int16), bits)


def test_a_dtype_that_numpy_lacks_is_named_not_replaced(tmp_path: Path) -> None:
    """Case 4: a reader that does not know a dtype gets its bytes under its name, nothing else."""
    stored = np.dtype("V3", metadata={"ckptfmt.dtype": "custom24"})
    opaque = np.frombuffer(os.urandom(30), np.uint8).view("V3").astype(stored)
    ckptfmt.save({"x": opaque}, tmp_path)
    loaded = ckptfmt.load(tmp_path)["x"]
    assert loaded.tobytes() == opaque.tobytes()
    assert loaded.dtype.itemsize == 3
    assert ckptfmt.open(tmp_path)["x"].dtype_name == "custom24"
