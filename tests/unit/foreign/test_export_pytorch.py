"""What is exported as `.pt` is what torch itself loads, without running anything."""

from __future__ import annotations

import collections
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine import flatten
from ckptfmt.foreign.exporters.pickle_writer import Named, pack_pickle
from ckptfmt.format import pack_array

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(beta|prototype|quantized|TypedStorage|deprecated)"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]

DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16"),
    *("float32", "float64", "complex64", "complex128", "bfloat16", "complex32", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]


def random(dtype: str, *shape: int) -> Any:
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * kind.itemsize
    raw = np.random.default_rng(len(dtype)).integers(0, 256, count, np.uint8)
    raw = raw % 2 if dtype == "bool" else raw
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(raw).view(kind).reshape(shape)


def exported(tree: Any, folder: Path, **options: Any) -> Any:
    """What torch loads of an export of a tree."""
    import ckptfmt.torch as ckt

    ckt.save(tree, folder / "s", durable=False)
    ckptfmt.export(folder / "s", folder / "x.pt", **options)
    return torch.load(folder / "x.pt", weights_only=True)


def columns(tree: Any) -> dict[str, Any]:
    """Everything that a save would write of a tree."""
    flat = flatten(tree)
    return {
        "names": flat.names,
        "rows": flat.rows,
        "values": flat.values,
        "containers": flat.containers,
        "attributes": flat.attributes,
        "tensors": [(s.dtype, tuple(s.shape)) for s in flat.tensors],
        "bytes": [bytes(pack_array(s.fetch())) for s in flat.tensors],
    }


def test_every_dtype_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    tree = {name: random(name, 3, 4) for name in DTYPES}
    tree |= {f"{name} empty": random(name, 0, 4) for name in DTYPES}
    tree |= {f"{name} scalar": random(name, 1).reshape(()) for name in DTYPES[:-1]}
    loaded = exported(tree, tmp_path)
    assert columns(loaded) == columns(tree)
    for name, tensor in tree.items():
        assert loaded[name].dtype == tensor.dtype
    again = ckptfmt.open_foreign(tmp_path / "x.pt").load()
    assert columns(again) == columns(ckptfmt.load(tmp_path / "s"))


def test_trees_of_every_kind_of_plain_data_come_back(tmp_path: Path) -> None:
    tree = {
        "list": [torch.ones(2), 1, "x"],
        "tuple": (torch.zeros(1), None),
        "ordered": collections.OrderedDict([("b", torch.ones(1)), ("a", 2)]),
        3: {(1, "k"): torch.zeros(2), True: 0.5, None: b"\x00\xff", 1.5: 1 + 2j},
        "values": [1, -1, 255, 256, 65536, -(2**31), 2**31, 2**63, -(2**70), 0.1, float("inf")],
        "more": {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "set": {1, 2}},
        "device": torch.device("cuda:1"),
        "text": "ä\n€" * 100,
        "empty": [{}, [], (), ""],
        "long": list(range(3000)),
    }
    loaded = exported(tree, tmp_path)
    assert columns(loaded) == columns(tree)
    assert loaded["more"]["dtype"] is torch.bfloat16
    assert loaded["device"] == torch.device("cuda:1")


def test_ties_are_one_tensor_and_gradients_are_wanted_again(tmp_path: Path) -> None:
    w = torch.randn(3, requires_grad=True)
    loaded = exported({"a": w, "b": {"c": w}, "d": torch.randn(3)}, tmp_path)
    assert loaded["a"] is loaded["b"]["c"]
    assert loaded["a"].requires_grad
    assert not loaded["d"].requires_grad
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert len([n for n in archive.namelist() if n.startswith("x/data/")]) == 2


def test_memory_formats_and_module_versions_are_kept(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 2), torch.nn.BatchNorm2d(5))
    model = model.to(memory_format=torch.channels_last)
    loaded = exported({"model": model, "five": torch.randn(2, 3, 2, 2, 2)}, tmp_path)
    state = model.state_dict()
    assert loaded["model"]["0.weight"].stride() == state["0.weight"].stride()
    assert torch.equal(loaded["model"]["0.weight"], state["0.weight"])
    assert loaded["model"]._metadata == state._metadata
    fresh = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 2), torch.nn.BatchNorm2d(5))
    fresh.load_state_dict(loaded["model"])


def test_an_optimizer_goes_on_from_what_was_exported(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    loaded = exported({"optimizer": optimizer.state_dict()}, tmp_path)
    fresh = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    fresh.load_state_dict(loaded["optimizer"])
    assert columns(fresh.state_dict()) == columns(optimizer.state_dict())


def test_sparse_and_quantized_tensors_are_loaded_as_such(tmp_path: Path) -> None:
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    tree = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 2)),
        "q": torch.quantize_per_tensor(torch.rand(4, 3), 0.1, 3, torch.quint8),
        "c": torch.quantize_per_channel(
            torch.rand(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
        ),
    }
    loaded = exported(tree, tmp_path)
    for name in ("coo", "csr", "csc", "bsr"):
        assert loaded[name].layout == tree[name].layout
        assert torch.equal(loaded[name].to_dense(), dense)
    for name in ("q", "c"):
        assert loaded[name].dtype == tree[name].dtype
        assert torch.equal(loaded[name].int_repr(), tree[name].int_repr())
        assert torch.equal(loaded[name].dequantize(), tree[name].dequantize())


def test_nested_tensors_are_refused_with_their_names(tmp_path: Path) -> None:
    import ckptfmt.torch as ckt

    ckt.save({"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, tmp_path / "s")
    with pytest.raises(ckptfmt.UnsupportedError, match="n/sizes: part of a tensor of the kind"):
        ckptfmt.export(tmp_path / "s", tmp_path / "x.pt")


def test_values_that_are_code_for_torch_are_refused_and_kinds_are_reported(tmp_path: Path) -> None:
    Point = collections.namedtuple("Point", "x y")
    tree = {
        "path": Path("a/b"),
        "point": Point(1, 2),
        "scalar": np.float32(0.5),
        "default": collections.defaultdict(int, a=1),
        "points": Point(torch.ones(1), 2),
        "w": torch.ones(1),
    }
    ckptfmt.save(tree, tmp_path / "s", durable=False)
    with pytest.raises(ckptfmt.UnsupportedError, match=r"path: a value of the type .*Path"):
        ckptfmt.export(tmp_path / "s", tmp_path / "x.pt")
    report = ckptfmt.export(tmp_path / "s", tmp_path / "x.pt", allow_partial=True)
    assert set(report.skipped) == {"path"}
    assert report.transformed == {
        "point": "a tuple",
        "scalar": "a Python float",
        "default": "a dict",
        "points": "a tuple",
    }
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded["point"] == (1, 2)
    assert loaded["scalar"] == 0.5
    assert loaded["default"] == {"a": 1}
    assert type(loaded["points"]) is tuple


def test_the_archive_is_aligned_checked_and_the_same_each_time(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(3.0), "b": np.zeros(100)}, tmp_path / "s", durable=False)
    ckptfmt.export(tmp_path / "s", tmp_path / "x.pt")
    first = (tmp_path / "x.pt").read_bytes()
    ckptfmt.export(tmp_path / "s", tmp_path / "x.pt", if_exists="replace")
    assert (tmp_path / "x.pt").read_bytes() == first
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None  # true checksums
        for entry in archive.infolist():
            assert entry.date_time[0] == 1980
            name, extra = (
                first[entry.header_offset + 26 :][:4][:2],
                first[entry.header_offset + 28 :],
            )
            start = entry.header_offset + 30
            start += int.from_bytes(name, "little") + int.from_bytes(extra[:2], "little")
            assert start % 64 == 0
    mapped = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert mapped["a"].tolist() == [0.0, 1.0, 2.0]


def test_torch_computes_where_storages_are_as_in_its_own_files(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(3.0), "b": np.zeros(100)}, tmp_path / "s", durable=False)
    ckptfmt.export(tmp_path / "s", tmp_path / "x.pt")
    own = io.BytesIO()
    torch.save(torch.load(tmp_path / "x.pt", weights_only=True), own)
    own.seek(0)
    reader = torch._C.PyTorchFileReader(str(tmp_path / "x.pt"))
    assert reader.get_record("data/0") == np.arange(3.0).tobytes()
    assert reader.get_record("version") == b"3\n"
    with zipfile.ZipFile(own) as theirs, zipfile.ZipFile(tmp_path / "x.pt") as ours:
        records = [n.partition("/")[2] for n in ours.namelist()]
        assert [n.partition("/")[2] for n in theirs.namelist()][: len(records)] == records


def test_nothing_of_torch_is_loaded_by_an_export(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(3.0), "q": {"n": 1}}, tmp_path / "s", durable=False)
    code = (
        "import sys, json, ckptfmt; ckptfmt.export(sys.argv[1], sys.argv[2]);"
        "print(json.dumps([m for m in ('torch', 'tensorflow', 'h5py') if m in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s"), str(tmp_path / "x.pt")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(run.stdout) == []


@pytest.mark.parametrize("obj", [object(), np.float32(1), {"a": [Path("x")]}, 1 << 5000])
def test_the_pickle_writer_refuses_what_is_no_plain_data(obj: object) -> None:
    with pytest.raises(ckptfmt.UnsupportedError):
        pack_pickle(obj)


@pytest.mark.parametrize(
    ("tag", "payload"),
    [
        ("torch.dtype", "float32\nq\x00cos\nsystem\n"),
        ("torch.dtype", "hub"),
        ("torch.device", "cpu\ncos\nsystem\n"),
        ("torch.Size", [1, "x"]),
        ("os", "system"),
    ],
)
def test_values_of_strangers_write_no_opcodes(tmp_path: Path, tag: str, payload: object) -> None:
    from ckptfmt.foreign import ForeignValue
    from ckptfmt.foreign.exporters.torch_values import plain

    with pytest.raises(ckptfmt.UnsupportedError):
        plain([ForeignValue(tag, payload)])


@pytest.mark.parametrize("name", ["os\nsystem\n.x", "a", "", "a..b", "torch.x y"])
def test_names_that_would_end_early_are_refused(name: str) -> None:
    with pytest.raises(ckptfmt.UnsupportedError, match="not a name"):
        pack_pickle(Named(name))


@pytest.mark.parametrize(
    "attributes",
    [
        {"kind": "sparse_coo"},
        {"kind": "sparse_csr"},
        {"kind": "quantized", "dtype": "quint8", "scheme": "hub.load"},
        {"kind": "quantized"},
    ],
)
def test_parts_that_make_no_tensor_are_refused(tmp_path: Path, attributes: Any) -> None:
    from ckptfmt.foreign import ForeignContainer

    made = ForeignContainer({"x": np.zeros(2)}, {"torch.tensor": attributes})
    ckptfmt.save({"a": made}, tmp_path / "s", durable=False)
    with pytest.raises(ckptfmt.UnsupportedError, match="the parts make no tensor"):
        ckptfmt.export(tmp_path / "s", tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["int2", "int4"])
def test_negative_integers_of_less_than_a_byte_are_torchs(tmp_path: Path, name: str) -> None:
    array = np.array([-2, -1, 0, 1], getattr(ml_dtypes, name))
    ckptfmt.save({"w": array}, tmp_path / "s", durable=False)
    ckptfmt.export(tmp_path / "s", tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)["w"]
    assert found.dtype == getattr(torch, name)
    assert found.untyped_storage().tolist() == [254, 255, 0, 1]
    assert ckptfmt.open_foreign(tmp_path / "x.pt")["w"].read().astype(int).tolist() == [
        -2,
        -1,
        0,
        1,
    ]
