"""Files that lie, or that would run code in another reader: a typed error, and nothing has run."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptfmt
from ckptfmt import CorruptError, UnsupportedError
from ckptfmt.errors import CheckpointError

Write = Callable[..., Path]


def lit(obj: object) -> bytes:
    """The opcodes of plain data."""
    return pickle.dumps(obj, 2)[2:-1]


def name(text: str) -> bytes:
    module, _, last = text.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def call(function: str, *args: bytes) -> bytes:
    return name(function) + b"(" + b"".join(args) + b"tR"


def storage(numel: int, key: object = "0", kind: str = "torch.FloatStorage") -> bytes:
    return b"(" + lit("storage") + name(kind) + lit(key) + lit("cpu") + lit(numel) + b"tQ"


def tensor(
    size: object, stride: object, offset: object = 0, of: bytes = b"", hooks: bytes = b""
) -> bytes:
    geometry = (lit(offset), lit(size), lit(stride), lit(False))
    hooks = hooks or call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", of or storage(4), *geometry, hooks)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(opcodes of the object) -> a file of torch.save with storages 0 (16 bytes) and 1."""

    def write(body: bytes, *, byteorder: bytes = b"little", second: bytes = b"") -> Path:
        path = tmp_path / "x.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/data.pkl", b"\x80\x02" + body + b".")
            archive.writestr("x/byteorder", byteorder)
            archive.writestr("x/data/0", bytes(range(16)))
            archive.writestr("x/data/1", second)
        return path

    return write


def opened(path: Path) -> object:
    return ckptfmt.open_foreign(path).load()


def test_the_honest_file_is_read(write: Write) -> None:
    assert opened(write(lit({}) + lit("a") + tensor((2, 2), (2, 1)) + b"s"))["a"].shape == (2, 2)  # type: ignore[index]


MAX = (1 << 63) - 1
INT64 = "torch.LongStorage"


def long_tensor(size: object, stride: object) -> bytes:
    return tensor(size, stride, of=storage(2, kind=INT64))


def coo(indices: bytes, values: bytes, *rest: object) -> bytes:
    layout = call("torch.serialization._get_layout", lit("torch.sparse_coo"))
    data = b"(" + indices + values + b"".join(map(lit, rest)) + b"t"
    return call("torch._utils._rebuild_sparse_tensor", layout, data)


LIES: dict[str, bytes] = {
    "size beyond the storage": tensor((5,), (1,)),
    "offset beyond the storage": tensor((1,), (1,), 4),
    "stride beyond the storage": tensor((2,), (4,)),
    "negative offset": tensor((1,), (1,), -1),
    "negative stride": tensor((2,), (-1,), 1),
    "negative size": tensor((-1,), (1,)),
    "sizes whose product wraps": tensor((1 << 32, 1 << 32), (0, 0)),
    "offset that wraps": tensor((2,), (1,), MAX),
    "stride that wraps": tensor((3,), (MAX,)),
    "sizes beyond 64 bits": tensor((1 << 70,), (0,)),
    "too many dimensions": tensor((1,) * 65, (1,) * 65),
    "sizes and strides of different lengths": tensor((2,), (1, 1)),
    "sizes that are text": tensor("22", "21"),
    "sizes that are floats": tensor((2.0,), (1,)),
    "an empty tensor of endless size": tensor((0, 1 << 62), (1, 1)),
    "storage of another length": tensor((1,), (1,), of=storage(5)),
    "storage of negative length": tensor((1,), (1,), of=storage(-4)),
    "storage that is not there": tensor((1,), (1,), of=storage(4, "7")),
    "storage named by a path": tensor((1,), (1,), of=storage(4, "../data.pkl")),
    "storage of no class of torch": tensor((1,), (1,), of=storage(4, kind="os.FloatStorage")),
    "storage of an unknown type": tensor((1,), (1,), of=storage(4, kind="torch.OddStorage")),
    "no storage": tensor((1,), (1,), of=lit(None)),
    "a reference to something else": b"(" + lit("other") + lit(1) + b"tQ",
    "unknown dtype": call(
        "torch._utils._rebuild_tensor_v3", storage(16, kind="torch.storage.UntypedStorage"),
        lit(0), lit((1,)), lit((1,)), lit(False), lit({}), name("torch.float7"),
    ),
    "untyped without dtype": tensor(
        (1,), (1,), of=storage(16, kind="torch.storage.UntypedStorage")
    ),
    "dtype that does not fit the storage": call(
        "torch._utils._rebuild_tensor_v3", storage(16, kind="torch.storage.UntypedStorage"),
        lit(0), lit((2,)), lit((1,)), lit(False), lit({}), name("torch.complex128"),
    ),
    "conjugate of reals": call(
        "torch._utils._rebuild_tensor_v2", storage(4), lit(0), lit((1,)), lit((1,)), lit(False),
        lit({}), lit({"conj": True}),
    ),
    "too few arguments": call("torch._utils._rebuild_tensor_v2", storage(4)),
    "a parameter of no tensor": call("torch._utils._rebuild_parameter", lit(3), lit(True), lit({})),
    "sparse index out of bounds": coo(
        long_tensor((1, 2), (2, 1)), tensor((2,), (1,)), (3,), False
    ),
    "sparse values of another length": coo(
        long_tensor((1, 2), (2, 1)), tensor((3,), (1,)), (1 << 60,), False
    ),
    "sparse indices that are floats": coo(tensor((1, 2), (2, 1)), tensor((2,), (1,)), (9,), False),
    "sparse of no tensors": coo(lit(1), lit(2), (3,), False),
    "sparse of an unknown layout": call(
        "torch._utils._rebuild_sparse_tensor", lit("torch.odd"), lit((1, 2, 3))
    ),
    "quantized axis out of bounds": call(
        "torch._utils._rebuild_qtensor", storage(16, kind="torch.QInt8Storage"), lit(0),
        lit((2, 2)), lit((2, 1)),
        b"(" + name("torch.per_channel_affine") + tensor((2,), (1,)) + tensor((2,), (1,)) + lit(2)
        + b"t",
        lit(False), lit({}),
    ),
    "quantized scales of another length": call(
        "torch._utils._rebuild_qtensor", storage(16, kind="torch.QInt8Storage"), lit(0),
        lit((2, 2)), lit((2, 1)),
        b"(" + name("torch.per_channel_affine") + tensor((3,), (1,)) + tensor((2,), (1,)) + lit(0)
        + b"t",
        lit(False), lit({}),
    ),
    "nested sizes that do not add up": call(
        "torch._utils._rebuild_nested_tensor", tensor((4,), (1,)),
        long_tensor((2, 1), (1, 1)), long_tensor((2, 1), (1, 1)), long_tensor((2,), (1,)),
    ),
    "array of another length": call("numpy.core.multiarray._reconstruct", name("numpy.ndarray"),
        lit((0,)), lit(b"b")) + b"(" + lit(1) + lit((5,))
        + call("numpy.dtype", lit("f8"), lit(False), lit(True)) + lit(False) + lit("abc") + b"tb",
    "array of an odd dtype": call("numpy.dtype", lit("(99999999,)f8"), lit(False), lit(True)),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_corrupt(write: Write, lie: str) -> None:
    with pytest.raises(CorruptError, match=r"x\.pt"):
        opened(write(LIES[lie]))


def test_one_storage_of_two_lengths_is_corrupt(write: Write) -> None:
    first, second = tensor((1,), (1,)), tensor((1,), (1,), of=storage(2))
    with pytest.raises(CorruptError, match="has 16 bytes and 8"):
        opened(write(b"(" + first + second + b"t"))


def test_an_unknown_byte_order_is_corrupt(write: Write) -> None:
    with pytest.raises(CorruptError, match="unknown byte order"):
        opened(write(lit(1), byteorder=b"middle"))


def test_a_small_file_does_not_become_a_large_checkpoint(write: Write) -> None:
    with pytest.raises(CorruptError, match="expanded tensor of over 256 MiB"):
        opened(write(tensor((1 << 40,), (0,))))
    each = tensor((1 << 26,), (0,))
    with pytest.raises(CorruptError, match="far more bytes than the file"):
        ckptfmt.open_foreign(write(b"]" + (each + b"a") * 9))


def test_a_bool_that_is_neither_is_corrupt(write: Write) -> None:
    path = write(tensor((16,), (1,), of=storage(16, kind="torch.BoolStorage")))
    with pytest.raises(CorruptError, match="out of the range of bool"):
        ckptfmt.convert(path, path.parent / "s", durable=False)
    assert not (path.parent / "s").exists()


CODE = {
    "os.system": call("posix.system", lit("touch marked")),
    "eval": call("builtins.eval", lit("open('marked', 'w')")),
    "exec in a state": name("builtins.exec") + b")R" + lit({"a": 1}) + b"b",
    "subprocess by keywords": b"\x80\x04" + name("subprocess.Popen") + lit(("touch",))
    + lit({"shell": True}) + b"\x92",
    "import": call("importlib.import_module", lit("antigravity")),
    "getattr chain": call("builtins.getattr", name("os.path"), lit("os")) + lit(("x",)) + b"R",
    "inst": b"(" + lit("touch marked") + b"iposix\nsystem\n",
    "load bytes": call("torch.storage._load_from_bytes", lit(pickle.dumps(print))),
    "a hook": tensor((1,), (1,), hooks=call("builtins.print", lit("hooked"))),
    "an inner function": call(
        "torch._tensor._rebuild_from_type_v2", name("builtins.eval"), name("torch.Tensor"),
        lit(("1+1",)), lit({}),
    ),
    "a dtype": call("numpy.dtype", name("builtins.exec")),
    "a factory": call("collections.defaultdict", name("os.getcwd")),
    "a sort key": lit([1]) + call("operator.methodcaller", lit("clear")) + b"0",
}  # fmt: skip

WATCH = """
import sys, ckptfmt, ckptfmt.foreign
from ckptfmt.errors import CheckpointError
honest, *paths = sys.argv[1:]
def load(path):  # by name: to find the format out would list the plugins that are installed
    foreign = ckptfmt.foreign.read_foreign(path, source_format="pytorch")
    ckptfmt.foreign.ForeignCheckpoint(path, foreign).load()
load(honest)  # whatever is imported late is imported now
before, seen, allowed = set(sys.modules), [], set()
def watch(event, args):
    if event in ("open", "mmap.__new__", "os.listdir"):
        seen.append((event, str(args[0])))
    else:
        seen.append((event, repr(args)[:200]))
sys.addaudithook(watch)
for path in paths:
    try:
        load(path)
    except CheckpointError:
        pass
mine = [s for s in seen if s[0] not in ("open", "mmap.__new__", "builtins.id")]
mine += [s for s in seen if s[0] == "open" and s[1] not in paths]
assert not mine, mine
assert set(sys.modules) == before, set(sys.modules) - before
assert [s for s in seen if s[0] == "open"], "the hook saw nothing"
"""


def test_nothing_of_a_file_is_run_or_imported(write: Write, tmp_path: Path) -> None:
    """An audit hook sees no import, no exec, no process, and no file but the one that is read."""
    honest = write(lit({"a": (1, 2)}) + lit("t") + tensor((2,), (1,)) + b"s").rename(
        tmp_path / "honest.pt"
    )
    files = []
    for number, body in enumerate(CODE.values()):
        files.append(str(write(body).rename(tmp_path / f"{number}.pt")))
    command = [sys.executable, "-c", WATCH, str(honest), *files]
    subprocess.run(command, check=True, timeout=120, cwd=tmp_path)
    assert not (tmp_path / "marked").exists()


def test_what_would_have_been_called_is_shown_or_refused(write: Write) -> None:
    path = write(CODE["os.system"])
    foreign = ckptfmt.open_foreign(path)
    assert foreign.load() == {"class": "posix.system", "args": ["touch marked"]}
    with pytest.raises(UnsupportedError, match=r"the root: posix\.system"):
        ckptfmt.convert(path, path.parent / "s", durable=False, unknown="refuse")


def _bases(folder: Path) -> list[bytes]:
    """Small files of every kind."""
    torch = pytest.importorskip("torch")
    state = {
        "a": torch.arange(6.0).reshape(2, 3).t(),
        "opt": {0: {"step": torch.tensor(1), "betas": (0.9, 0.99)}},
        "sparse": torch.eye(3).to_sparse(),
        "b": torch.tensor([True, False]),
        "text": "x" * 50,
    }
    torch.save(state, folder / "zip")
    torch.save(state, folder / "legacy", _use_new_zipfile_serialization=False)
    return [(folder / kind).read_bytes() for kind in ("zip", "legacy")]


def _mutated(data: bytes, rng: random.Random) -> bytes:
    made = bytearray(data)
    kind = rng.randrange(5)
    at = rng.randrange(len(made))
    if kind == 0:
        del made[at:]
    elif kind == 1:
        for _ in range(rng.randrange(1, 8)):
            made[rng.randrange(len(made))] = rng.randrange(256)
    elif kind == 2:
        made[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f"])
    elif kind == 3:
        del made[at : at + rng.randrange(1, 64)]
    else:
        start = rng.randrange(len(made))
        made[at:at] = made[start : start + rng.randrange(1, 64)]
    return bytes(made)


def test_mutated_files_give_a_typed_error_or_a_tree(tmp_path: Path) -> None:
    bases = _bases(tmp_path)
    # The pickle of a ZIP archive is small beside its directory: it gets mutations of its own.
    with zipfile.ZipFile(tmp_path / "zip") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    path = tmp_path / "m.pt"
    outcomes = {"error": 0, "tree": 0}
    tracemalloc.start()
    for seed in range(600):
        rng = random.Random(seed)
        if seed % 3 < 2:
            path.write_bytes(_mutated(bases[seed % 3], rng))
        else:
            with zipfile.ZipFile(path, "w") as made:
                for entry, data in entries.items():
                    is_pickle = entry.endswith("data.pkl")
                    made.writestr(entry, _mutated(data, rng) if is_pickle else data)
        try:
            with ckptfmt.open_foreign(path) as foreign:
                foreign.load()
            outcomes["tree"] += 1
        except CheckpointError:
            outcomes["error"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    assert min(outcomes.values()) > 20, outcomes
