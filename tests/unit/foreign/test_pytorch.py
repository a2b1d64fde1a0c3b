"""Files of torch.save are the tree that torch.load gives: names, kinds, ties and every bit."""

from __future__ import annotations

import argparse
import collections
import json
import pickle
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError, NotFoundError, UnsupportedError
from ckptfmt.engine import FlatTree, flatten
from ckptfmt.foreign import detect_format
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
NOT_IN_LEGACY = ("uint16", "uint32", "uint64", "complex32", "float8", "float4")
"""torch writes them in its old format, and does not read them back."""


def random(dtype: str, *shape: int) -> Any:
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * kind.itemsize
    rng = np.random.default_rng(len(dtype))
    raw = rng.integers(0, 2 if dtype == "bool" else 256, count, np.uint8)
    return torch.from_numpy(raw).view(kind).reshape(shape)


def columns(flat: FlatTree) -> dict[str, Any]:
    """Everything that a save would write of a tree."""
    tensors = [(s.dtype, tuple(s.shape)) for s in flat.tensors]
    return {
        "names": flat.names,
        "kinds": flat.kinds,
        "rows": flat.rows,
        "values": flat.values,
        "containers": flat.containers,
        "attributes": flat.attributes,
        "container_attributes": flat.container_attributes,
        "tensors": tensors,
        "bytes": [bytes(pack_array(s.fetch())) for s in flat.tensors],
    }


def assert_equal_to_torch(path: Path) -> None:
    expected = columns(flatten(torch.load(path, weights_only=False)))
    found = columns(ckptfmt.open_foreign(path).flat)
    for part in expected:
        assert found[part] == expected[part], part


Save = Callable[..., Path]


@pytest.fixture(params=["zip", "zip, protocol 4", "legacy"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Save:
    """save(obj) -> path, in each format that torch still writes."""
    every: dict[str, dict[str, Any]] = {
        "zip": {},
        "zip, protocol 4": {"pickle_protocol": 4},
        "legacy": {"_use_new_zipfile_serialization": False},
    }
    options = every[request.param]

    def save(obj: Any, name: str = "x.pt") -> Path:
        torch.save(obj, tmp_path / name, **options)
        return tmp_path / name

    save.is_legacy = request.param == "legacy"  # type: ignore[attr-defined]
    return save


def test_every_dtype_and_layout(save: Save) -> None:
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        if save.is_legacy and dtype.startswith(NOT_IN_LEGACY):  # type: ignore[attr-defined]
            continue
        tensor = random(dtype, 4, 6)
        state |= {
            f"{dtype}.whole": tensor,
            f"{dtype}.transposed": tensor.t(),
            f"{dtype}.columns": tensor[:, 1:4],
            f"{dtype}.steps": tensor[::2, ::3],
            f"{dtype}.empty": tensor[:0],
            f"{dtype}.expanded": tensor[:1].expand(3, 6),
            f"{dtype}.one": tensor[1, 2:3],
        }
    assert_equal_to_torch(save(state))


def test_views_ties_and_memory_formats(save: Save) -> None:
    image = torch.arange(48.0).reshape(2, 3, 2, 4)
    state = {
        "a": image,
        "tie": image,
        "part": image[1],
        "channels": image.to(memory_format=torch.channels_last),
        "channels 3d": torch.rand(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        "0-d": torch.tensor(-0.0),
        "nan": torch.tensor([0x7FC12345, 0x7F812345]).to(torch.int32).view(torch.float32),
        "wants": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    path = save(state)
    assert_equal_to_torch(path)
    foreign = ckptfmt.open_foreign(path)
    assert foreign.ties() == [["a", "tie"]]
    assert not foreign["a"].mmap().flags.owndata, "a view of the mapped file"


def test_conjugates_and_negatives_are_written_out(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, complex(0.0, float("nan")), -0.0 + 0j])
    wide = values.to(torch.complex128)
    state = {"c": values.conj(), "n": values.clone().conj().imag, "d": wide.conj()}
    torch.save(state, tmp_path / "x.pt")
    assert_equal_to_torch(tmp_path / "x.pt")


def test_training_state_and_plain_values(save: Save) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "rng": torch.get_rng_state(),
        "values": [1, "a", (2, 3.5), None, True, b"b", {1, 2}, 2**70, complex(1, 2), range(3)],
        "torch": [torch.float32, torch.Size([2, 3]), torch.device("cuda:1"), torch.bfloat16],
        "kinds": collections.OrderedDict(a=1, b=torch.ones(1)),
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2], 5),
        "default": collections.defaultdict(list, {1: [torch.ones(1)]}),
        "keys": {-1: 1, "": 2, "a/b~": 3, (1, "a"): 4, None: 5, True: 6, 1.5: 7, b"x": 8},
        "numpy": {
            "c": np.arange(6.0).reshape(2, 3),
            "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "big": np.arange(3, dtype=">i4"),
            "scalar": np.float32(3),
            "text": np.array(["a", "bcd"]),
            "dtype": np.dtype("float32"),
            "times": np.array(["2020-01-01"], "M8[D]"),
            "time": np.datetime64("2020-01-01T00:00:00", "s"),
        },
    }
    assert_equal_to_torch(save(state))


def test_a_file_of_nothing_holds_nothing(save: Save, tmp_path: Path) -> None:
    path = save(None)
    assert ckptfmt.open_foreign(path).load() is None
    ckptfmt.convert(path, tmp_path / "s", durable=False)
    assert ckptfmt.load(tmp_path / "s") is None


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_composite_tensors(save: Save) -> None:
    square = torch.tensor([[0, 1.0, 0, 2], [3, 0, 0, 0], [0, 0, 0, 4], [5, 6, 0, 0]])
    state = {
        "coo": square.to_sparse(),
        "hybrid": torch.rand(3, 2, 4).to_sparse(2),
        "uncoalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 3)),
        "csr": square.to_sparse_csr(),
        "csc": square.to_sparse_csc(),
        "bsr": square.to_sparse_bsr((2, 2)),
        "bsc": square.to_sparse_bsc((2, 2)),
        "batch": torch.stack([square, square]).to_sparse_csr(),
        "q": torch.quantize_per_tensor(square, 0.1, 3, torch.quint8),
        "q32": torch.quantize_per_tensor(square, 0.1, 3, torch.qint32),
        "qc": torch.quantize_per_channel(
            square, torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64), 0, torch.qint8
        ),
    }
    if not save.is_legacy:  # type: ignore[attr-defined]
        state["nested"] = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    assert_equal_to_torch(save(state))


def test_a_converted_file_loads_into_torch(save: Save, tmp_path: Path) -> None:
    ckt = pytest.importorskip("ckptfmt.torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    path = save({"model": model.state_dict(), "sparse": torch.eye(3).to_sparse()})
    report = ckptfmt.convert(path, tmp_path / "s", step=1, durable=False)
    assert report.format == "pytorch"
    assert not report.skipped
    assert not report.opaque
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    ckt.restore({"model": other}, tmp_path / "s", names="model")
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    third = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    ckt.restore({"model": third}, ckptfmt.open_foreign(path), names="model")
    assert torch.equal(third[0].weight, model[0].weight)
    assert torch.equal(ckt.load(tmp_path / "s")["sparse"].to_dense(), torch.eye(3))


class Config:
    def __init__(self) -> None:
        self.width, self.weight = 3, torch.ones(2)


def test_objects_of_unknown_classes_become_plain_data(save: Save) -> None:
    foreign = ckptfmt.open_foreign(save({"config": Config(), "module": torch.nn.Linear(2, 1)}))
    name = f"{Config.__module__}.Config"
    assert foreign.foreign.opaque == {"config": name, "module": "torch.nn.modules.linear.Linear"}
    assert foreign["config/class"] == name
    assert foreign["config/state/width"] == 3
    assert foreign["config/state/weight"].read().tolist() == [1, 1]
    assert foreign["module/state/_parameters/weight"].shape == (1, 2)


def test_a_tensor_without_data_must_be_allowed_for(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "m": torch.empty(3, device="meta")}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedError, match="m: a meta tensor, which has no data"):
        ckptfmt.convert(tmp_path / "x.pt", tmp_path / "s", durable=False)
    ckptfmt.convert(tmp_path / "x.pt", tmp_path / "s", durable=False, allow_partial=True)
    assert list(ckptfmt.load(tmp_path / "s")) == ["a"]


def test_attributes_of_tensors_are_told_of(tmp_path: Path) -> None:
    tensor = torch.ones(1)
    tensor.note = "n"
    torch.save({"a": tensor}, tmp_path / "x.pt")
    foreign = ckptfmt.open_foreign(tmp_path / "x.pt")
    assert foreign["a"].read().tolist() == [1]
    assert foreign.foreign.ignored == {"a": "attributes of the tensor"}


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    torch.save(torch.nn.BatchNorm1d(2).state_dict(), tmp_path / "x.pt")
    ckptfmt.convert(tmp_path / "x.pt", tmp_path / "s", durable=False)
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        assert set(checkpoint.index.tree.container_attributes) == {"torch.module_versions"}


def repacked(path: Path, change: Callable[[str, bytes], bytes | None], **options: Any) -> Path:
    """The same archive, written by Python's zipfile, its entries changed or left out."""
    made = path.with_name("repacked.pt")
    with (
        zipfile.ZipFile(path) as source,
        zipfile.ZipFile(made, "w", options.get("method", zipfile.ZIP_STORED)) as target,
    ):
        for name in source.namelist():
            data = change(name.partition("/")[2], source.read(name))
            if data is not None:
                target.writestr(name, data)
    return made


def test_big_endian_storages_are_turned(tmp_path: Path) -> None:
    state = {n: random(n, 3, 2) for n in DTYPES if n != "float4_e2m1fn_x2"}
    torch.save(state, tmp_path / "x.pt")
    widths = [torch.empty(0, dtype=getattr(torch, n)).element_size() for n in state]
    halves = [w // 2 if n.startswith("complex") else w for n, w in zip(state, widths)]

    def turn(name: str, data: bytes) -> bytes:
        if name == "byteorder":
            return b"big"
        if name.startswith("data/"):
            return np.frombuffer(data, f"u{halves[int(name[5:])]}").byteswap().tobytes()
        return data

    path = repacked(tmp_path / "x.pt", turn)
    expected = ckptfmt.open_foreign(tmp_path / "x.pt").load()
    for name, array in ckptfmt.open_foreign(path).load().items():
        assert array.tobytes() == expected[name].tobytes(), name
    theirs = torch.load(path)
    for name in ("float32", "bfloat16", "int16", "int64", "complex64", "bool"):
        assert theirs[name].view(torch.uint8).numpy().tobytes() == expected[name].tobytes(), name


def test_entries_at_odd_offsets_and_deflated_ones_are_read(tmp_path: Path) -> None:
    torch.save({n: random(n, 3, 2) for n in DTYPES}, tmp_path / "x.pt")
    expected = columns(ckptfmt.open_foreign(tmp_path / "x.pt").flat)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = repacked(tmp_path / "x.pt", lambda name, data: data, method=method)
        assert columns(ckptfmt.open_foreign(path).flat) == expected
        ckptfmt.convert(path, tmp_path / "s", durable=False, name=f"m{method}")


def test_the_legacy_format_keeps_views_of_storages(tmp_path: Path) -> None:
    """Releases of long ago wrote a storage as a part of another."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(6.0)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    pickled = _pickles(data)[3]
    # The last of a storage's reference is None; put (key, offset, length) there.
    view = b"X\x01\0\0\x007K\x02K\x04\x87"
    at = pickled.rfind(b"Ntq")
    changed = pickled[:at] + view + pickled[at + 1 :].replace(b"K\x06\x85", b"K\x04\x85")
    path.write_bytes(data.replace(pickled, changed))
    assert_equal_to_torch(path)
    assert ckptfmt.open_foreign(path)["a"].read().tolist() == [2, 3, 4, 5]


def _pickles(data: bytes) -> list[bytes]:
    """The five pickles of a legacy file."""
    import pickletools

    stream, found = BytesIO(data), []
    for _ in range(5):
        start = stream.tell()
        for _ in pickletools.genops(stream):
            pass
        found.append(data[start : stream.tell()])
    return found


def write_tar(path: Path) -> dict[str, Any]:
    """A file of the format before 0.1.10, as torch's reader wants it, and its tensors."""
    floats, ints = np.arange(6, dtype="<f4"), np.arange(4, dtype="<i8")
    kinds = {"torch.FloatStorage": torch.FloatStorage, "torch.LongStorage": torch.LongStorage}
    storages = pickle.dumps(2, 2)
    for key, array, kind in ((11, floats, "FloatStorage"), (12, ints, "LongStorage")):
        storages += pickle.dumps((key, "cpu", kinds[f"torch.{kind}"]), 2)
        storages += struct.pack("<q", len(array)) + array.tobytes()
    storages += pickle.dumps([(13, 11, 2, 4)], 2)
    tensors = pickle.dumps(3, 2)
    geometry = {21: (11, (2, 3), (3, 1), 0), 22: (12, (2,), (2,), 1), 23: (13, (2, 2), (1, 2), 0)}
    for number, (storage, size, stride, offset) in geometry.items():
        tensors += pickle.dumps((number, storage, torch.Tensor), 2)
        tensors += struct.pack("<ii", len(size), 0)
        tensors += struct.pack(f"<{2 * len(size)}q", *size, *stride) + struct.pack("<q", offset)

    class Reference:
        def __init__(self, number: int) -> None:
            self.number = number

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return str(obj.number) if isinstance(obj, Reference) else None

    stream = BytesIO()
    state = collections.OrderedDict((f"t{n}", Reference(n)) for n in geometry)
    Pickler(stream, 2).dump({"state": state, "epoch": 3})
    parts = {"sys_info": pickle.dumps({"little_endian": True}, 2), "pickle": stream.getvalue()}
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in {**parts, "tensors": tensors, "storages": storages}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, BytesIO(data))
    return {"t21": floats.reshape(2, 3), "t22": ints[1::2], "t23": floats[2:].reshape(2, 2).T}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_the_tar_format_is_read(tmp_path: Path) -> None:
    expected = write_tar(tmp_path / "x.pt")
    assert detect_format(str(tmp_path / "x.pt")) == "pytorch"
    foreign = ckptfmt.open_foreign(tmp_path / "x.pt")
    assert foreign["epoch"] == 3
    for name, array in expected.items():
        assert np.array_equal(foreign[f"state/{name}"].read(), array)
    assert_equal_to_torch(tmp_path / "x.pt")


class Program(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.weight = torch.nn.Parameter(torch.rand(4, 2))
        self.register_buffer("count", torch.tensor(3))
        self.other = torch.rand(2)
        self.sizes = [1, 2]

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.inner(x) @ self.weight + self.other.sum() + self.sizes[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_program_gives_its_parameters_and_buffers(tmp_path: Path) -> None:
    program = torch.jit.script(Program())
    program.save(tmp_path / "x.pt")
    foreign = ckptfmt.open_foreign(tmp_path / "x.pt")
    expected = program.state_dict()
    assert set(foreign) == set(expected)
    for name, tensor in expected.items():
        assert np.array_equal(foreign[name].read(), tensor.numpy())
    assert foreign.foreign.skipped == {"other": "a tensor that is neither parameter nor buffer"}
    assert list(foreign.foreign.ignored) == ["code/"]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for shard in (1, 2):
        file = f"pytorch_model-0000{shard}-of-00002.bin"
        state = {f"layer.{shard}.{n}": torch.full((2, 2), float(shard)) for n in "ab"}
        torch.save(collections.OrderedDict(state), folder / file)
        weight_map |= dict.fromkeys(state, file)
    index = {"metadata": {"total_size": 64}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def test_a_folder_of_shards_is_one_tree(sharded: Path, tmp_path: Path) -> None:
    torch.save({}, sharded / "training_args.bin")
    for path in (sharded, sharded / "pytorch_model.bin.index.json"):
        foreign = ckptfmt.open_foreign(path)
        assert list(foreign) == ["layer.1.a", "layer.1.b", "layer.2.a", "layer.2.b"]
        assert (foreign["layer.2.b"].read() == 2).all()
    report = ckptfmt.convert(sharded, tmp_path / "s", durable=False)
    assert list(report.skipped) == ["training_args.bin"]


def test_shards_that_are_missing_or_lie_elsewhere_are_refused(sharded: Path) -> None:
    (sharded / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(NotFoundError, match="1 of 2 shards are missing"):
        ckptfmt.open_foreign(sharded)
    torch.save({"x": torch.ones(1)}, sharded.parent / "outside.bin")
    index = {"weight_map": {"x": "../outside.bin"}}
    (sharded / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptError, match="step up"):
        ckptfmt.open_foreign(sharded)
    (sharded / "pytorch_model.bin.index.json").unlink()
    torch.save({"x": torch.ones(1)}, sharded / "pytorch_model.bin")
    assert list(ckptfmt.open_foreign(sharded)) == ["x"]


def test_a_conversion_never_holds_the_file_in_memory(save: Save, tmp_path: Path) -> None:
    path = save({str(n): torch.full((8 << 20,), n, dtype=torch.uint8) for n in range(12)})
    tracemalloc.start()
    ckptfmt.convert(path, tmp_path / "s", durable=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20


def test_other_files_are_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"a": 1}))
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("x/y", b"")
    np.savez(tmp_path / "x.npz", a=np.ones(1))
    for name, taken in (("pickle.pt", None), ("other.pt", None), ("x.npz", "numpy")):
        assert detect_format(str(tmp_path / name)) == taken


def test_it_is_read_without_torch(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "x.pt")
    code = (
        "import sys, ckptfmt; x = ckptfmt.open_foreign(sys.argv[1]).load(); "
        "assert x['a'].tolist() == [1, 1]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.pt")], check=True)


def test_the_commands_take_such_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckptfmt.cli.entry import main

    state = {"w": torch.ones(2), "epoch": 3, "long": list(range(5000)), "nan": float("nan")}
    torch.save(state, tmp_path / "x.pt")
    torch.save({**state, "epoch": 4}, tmp_path / "y.pt")
    store, x, y = (str(tmp_path / name) for name in ("s", "x.pt", "y.pt"))
    assert main(["convert", x, store]) == 0
    assert main(["show", x]) == 0
    assert main(["cat", x, "epoch"]) == 0
    assert "epoch" in capsys.readouterr().out
    assert main(["diff", store, x, "--read"]) == 0
    assert main(["diff", store, y, "--read"]) == 1
