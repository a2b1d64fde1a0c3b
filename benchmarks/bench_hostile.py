"""How long do damaged and hostile files occupy an importer, and with how much memory?

    python benchmarks/bench_hostile.py [--small] [--rounds 1] [--count 200] [--dir .] [--json FILE]

Each operation is a kind of file. `files` are mutations of good ones: bits flipped, bytes cut, repeated,
zeroed, set, at random. All that gives a tree is loaded. `refused` counts typed errors; anything else
that is raised, or a process that dies, ends the benchmark: each kind has a process of its own.
`slowest_cpu_s` and `peak_nbytes` are of the worst file (VmHWM, less what was resident before it).
`dense ...` are a megabyte or two of the smallest items of a format, legal ones: what they take
grows with the size of the file, and says what an item costs.
"""

from __future__ import annotations

import collections
import io
import json
import lzma
import multiprocessing
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import report
import resident
import rounds

from ckptfmt.foreign.registry import get_importer

FILES = Path(__file__).resolve().parents[1] / "tests/compat/import"
KINDS = {
    "pt": "pytorch",
    "pt pickle": "pytorch",
    "pt legacy": "pytorch",
    "pt tar": "pytorch",
    "pt folder": "pytorch",
    "torchscript": "pytorch",
    "dcp": "dcp",
    "bundle": "tensorbundle",
    "saved model": "tensorbundle",
    "keras": "keras",
    "weights.h5": "keras",
    "h5": "keras",
    "safetensors": "safetensors",
    "safetensors folder": "safetensors",
    "npy": "numpy",
    "npz": "numpy",
    "npz deflated": "numpy",
    "orbax": "orbax",
    "orbax zarr": "orbax",
    "gguf": "gguf",
    "flax": "flax",
}
DENSE = {"dense pickle": "pytorch", "dense safetensors": "safetensors", "dense npz": "numpy"}


def write_with_torch(folder: Path) -> None:
    """Runs in a process of its own: ours has neither torch nor tensorstore, which forbids forks."""
    import torch

    state = {
        "a": torch.arange(6.0).reshape(2, 3).t(),
        "opt": {0: {"step": torch.tensor(1), "betas": (0.9, 0.99)}},
        "sparse": torch.eye(3).to_sparse(),
        "b": torch.tensor([True, False]),
        "text": "x" * 50,
    }
    torch.save(state, folder / "pt")
    torch.save(state, folder / "pt legacy", _use_new_zipfile_serialization=False)
    torch.jit.script(torch.nn.Linear(3, 2)).save(str(folder / "torchscript"))
    (folder / "pt folder").mkdir()
    weights = {}
    for number in range(2):
        torch.save({f"w{number}": torch.arange(5.0)}, folder / "pt folder" / f"{number}.bin")
        weights[f"w{number}"] = f"{number}.bin"
    index = {"metadata": {"total_size": 40}, "weight_map": weights}
    (folder / "pt folder" / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def write_tar(path: Path) -> None:
    """A file of torch before 0.1.10, without torch."""
    reference = object()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return "21" if obj is reference else None

    floats = np.arange(6, dtype="<f4")
    storage = b"\x80\x02(K\x0bX\x03\0\0\0cpuctorch\nFloatStorage\nt."
    storages = pickle.dumps(1, 2) + storage + struct.pack("<q", 6) + floats.tobytes()
    storages += pickle.dumps([], 2)
    tensors = pickle.dumps(1, 2) + b"\x80\x02(K\x15K\x0bctorch\nTensor\nt."
    tensors += struct.pack("<ii4qq", 2, 0, 2, 3, 3, 1, 0)
    stream = io.BytesIO()
    Pickler(stream, 2).dump({"state": collections.OrderedDict(t=reference), "epoch": 3})
    parts = {"sys_info": pickle.dumps({"little_endian": True}, 2), "pickle": stream.getvalue()}
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in {**parts, "tensors": tensors, "storages": storages}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def write_ours(folder: Path) -> None:
    """What ckptfmt exports, and what the tests have of other libraries."""
    import ckptfmt

    tree = {"model": {"w": np.arange(6.0).reshape(2, 3), "b": np.array([True])}, "n": np.ones(3)}
    ckptfmt.save(tree, folder / "store", durable=False)
    for name, made in (("safetensors", "x.safetensors"), ("npz", "x.npz")):
        ckptfmt.export(folder / "store", folder / made)
        (folder / made).rename(folder / name)
    for name in ("bundle", "saved model/variables"):
        (folder / name).mkdir(parents=True)
        ckptfmt.export(folder / "store", folder / name / "variables.index")
    (folder / "saved model" / "saved_model.pb").write_bytes(b"\x08\x01")
    ckptfmt.export(folder / "store", folder / "dcp", target_format="dcp")
    ckptfmt.export(folder / "store", folder / "orbax", target_format="orbax")
    np.save(folder / "x.npy", np.arange(6.0))
    (folder / "x.npy").rename(folder / "npy")
    np.savez_compressed(folder / "npz deflated", w=np.arange(100), b=np.zeros((3, 4)))
    (folder / "npz deflated.npz").rename(folder / "npz deflated")
    for name in ("keras", "weights.h5", "h5"):
        packed = (FILES / "keras" / f"model.{name}.xz").read_bytes()
        (folder / name).write_bytes(lzma.decompress(packed))
    for name, source in (("gguf", "gguf/every-type.gguf"), ("flax", "flax/every-dtype.msgpack")):
        shutil.copy(FILES / source, folder / name)
    shutil.copytree(FILES / "safetensors/sharded", folder / "safetensors folder")
    shutil.copytree(FILES / "orbax/zarr", folder / "orbax zarr")
    write_tar(folder / "pt tar")


def write_dense(folder: Path, count: int) -> None:
    with zipfile.ZipFile(folder / "dense pickle", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps([{} for _ in range(count)], 2))
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({str(number): empty for number in range(count // 8)}).encode()
    (folder / "dense safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    one = io.BytesIO()
    np.save(one, np.zeros(1, np.uint8))
    with zipfile.ZipFile(folder / "dense npz", "w") as archive:
        for number in range(count // 20):
            archive.writestr(f"{number}.npy", one.getvalue())


def mutated(good: bytes, rng: random.Random, number: int) -> bytes:
    made, at = bytearray(good), rng.randrange(len(good))
    kind = number % 6
    if kind == 0:
        made[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del made[at:]
    elif kind == 2:
        made[at : at + 8] = rng.randbytes(8)
    elif kind == 3:
        made[at:at] = made[max(0, at - 20) : at]
    elif kind == 4:
        made[at : at + 16] = bytes(len(made[at : at + 16]))
    else:
        made[at : at + 8] = rng.choice([b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\xff" * 4])
    return bytes(made)


def load(path: Path, source_format: str) -> None:
    from ckptfmt.foreign import ForeignCheckpoint, read_foreign

    tree = read_foreign(path, source_format=source_format)
    ForeignCheckpoint(str(path), tree).load()


def attacks(kind: str, path: Path, count: int, seed: int) -> Any:
    """Put one hostile file after another where the good one is."""
    rng = random.Random(f"{kind} {seed}")
    if kind == "pt pickle":
        with zipfile.ZipFile(path.parent / "pt") as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        for number in range(count):
            with zipfile.ZipFile(path, "w") as made:
                for name, data in entries.items():
                    spoiled = mutated(data, rng, number) if name.endswith("data.pkl") else data
                    made.writestr(name, spoiled)
            yield
        return
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    good = {file: file.read_bytes() for file in files if file.stat().st_size}
    for number in range(count):
        file = list(good)[number % len(good)]
        file.write_bytes(mutated(good[file], rng, number // len(good)))
        yield
        file.write_bytes(good[file])


def measured(path: Path, source_format: str) -> tuple[bool, float, int]:
    """(refused, CPU seconds, bytes)."""
    from ckptfmt.errors import CheckpointError

    before, begin, is_refused = resident.reset_peak(), time.process_time(), False
    try:
        load(path, source_format)
    except CheckpointError:
        is_refused = True
    cpu_s = time.process_time() - begin
    return is_refused, cpu_s, resident.status_nbytes("VmHWM") - before


def attack(kind: str, path: Path, count: int, seed: int, answer: Connection) -> None:
    """Runs in a process of its own, which native code may end."""
    warnings.simplefilter("ignore")
    source_format = {**KINDS, **DENSE}[kind]
    made = rounds.Numbers(files=0, refused=0, slowest_cpu_s=0, peak_nbytes=0)
    if kind == "pt pickle":
        shutil.copy(path.parent / "pt", path)
    if kind in KINDS:
        load(path, source_format)  # what is imported late is imported now
    for _ in attacks(kind, path, count, seed) if kind in KINDS else [None]:
        is_refused, cpu_s, nbytes = measured(path, source_format)
        if cpu_s > 0.1:
            # A value of torch that a mutation makes has torch imported, which is not the file's.
            _, again_s, again_nbytes = measured(path, source_format)
            cpu_s, nbytes = min(cpu_s, again_s), min(nbytes, again_nbytes)
        made["files"] += 1
        made["refused"] += is_refused
        made["slowest_cpu_s"] = max(made["slowest_cpu_s"], cpu_s)
        made["peak_nbytes"] = max(made["peak_nbytes"], nbytes)
    answer.send(made)


class Ours:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        load(FILES / "numpy/every-dtype.npz", "numpy")
        for name in set(KINDS.values()):
            get_importer(name)  # once, not in each process

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        seed = int(folder.name.rpartition("-")[2])
        made: dict[str, Callable[[], object]] = {"prepare": partial(self.prepare, folder)}
        for kind in (*KINDS, *DENSE):
            made[kind] = partial(self.run, kind, folder / kind, seed)
        return made

    def prepare(self, folder: Path) -> None:
        own = [sys.executable, __file__, "--write", str(folder), str(self.options["dense"])]
        subprocess.run(own, check=True)

    def run(self, kind: str, path: Path, seed: int) -> rounds.Numbers:
        context: Any = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
        receive, send = context.Pipe(duplex=False)
        process = context.Process(
            target=attack, args=(kind, path, self.options["count"], seed, send)
        )
        process.start()
        send.close()
        try:
            made: rounds.Numbers = receive.recv()
        except EOFError:
            process.join()
            raise SystemExit(f"{kind}: the process ended with {process.exitcode}") from None
        process.join()
        return made

    def check(self, result: object) -> None:
        return


PEERS: dict[str, type[Any]] = {report.US: Ours}


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    if sys.argv[1:2] == ["--write"]:
        write_with_torch(Path(sys.argv[2]))
        write_ours(Path(sys.argv[2]))
        write_dense(Path(sys.argv[2]), int(sys.argv[3]))
        return
    made = report.parser("What do hostile files take?")
    made.set_defaults(rounds=1)
    made.add_argument("--count", type=int, default=200, help="mutations of each kind")
    made.add_argument("--peers", help="there are none")
    arguments = made.parse_args()
    small = arguments.small
    options = {"count": 6 if small else arguments.count, "dense": 2_000 if small else 200_000}
    with report.workplace(arguments.dir) as folder:
        found = rounds.measure(__file__, PEERS, folder, options, arguments.rounds, warm=False)
    report.finish("hostile files", found, 1, arguments, options)


if __name__ == "__main__":
    main()
