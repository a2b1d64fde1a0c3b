"""How far from the disk's own speed are a durable save and a load of large host tensors?

    python benchmarks/bench_save.py [--small] [--mb 512] [--rounds 5] [--dir /on/the/disk] [--json FILE]

Beside safetensors and torch.save, both with an fsync of file and folder, and beside the ceiling: the
same bytes written and read by a loop of 8 MiB direct writes and reads, which neither hashes nor
knows names. `load` finds the files in the page cache, `cold load` does not; both end when a byte of
every page has been read, so that a lazy map is no load. ckptfmt has checked every byte it returns.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import numpy as np
import report
import rounds

PIECE_NBYTES = 8 << 20


class Ckptfmt:
    """Of this repository."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import ckptfmt

        self.package = ckptfmt
        self.tree = models.transformer(options["nbytes"])

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        path = folder / "store"

        def save() -> object:
            return self.package.save({"model": self.tree}, path, step=1)

        def load() -> object:
            loaded = self.package.load(path)
            models.touch(loaded["model"])
            return loaded

        return {"save": save, "load": load, "cold load": load}

    def check(self, result: object) -> None:
        assert isinstance(result, dict)
        models.assert_same(result["model"], self.tree)


class Safetensors:
    """`save_file` and `load_file` of safetensors.numpy."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import safetensors.numpy

        self.package = safetensors.numpy
        self.tree = models.transformer(options["nbytes"])

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        path = folder / "x.safetensors"

        def save() -> None:
            self.package.save_file(self.tree, path)
            rounds.sync(path, folder)

        def load() -> object:
            loaded = self.package.load_file(path)
            models.touch(loaded)
            return loaded

        return {"save": save, "load": load, "cold load": load}

    def check(self, result: object) -> None:
        models.assert_same(result, self.tree)


class Torch:
    """`torch.save` and `torch.load(weights_only=True)`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import torch

        self.package = torch
        self.tree = models.transformer(options["nbytes"])
        self.tensors = {name: torch.from_numpy(array) for name, array in self.tree.items()}

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        path = folder / "x.pt"

        def save() -> None:
            self.package.save(self.tensors, path)
            rounds.sync(path, folder)

        def load() -> object:
            loaded = self.package.load(path, weights_only=True)
            models.touch(loaded)
            return loaded

        return {"save": save, "load": load, "cold load": load}

    def check(self, result: object) -> None:
        models.assert_same(result, self.tree)


class Direct:
    """The ceiling: as many bytes in one file, past the page cache where the disk allows that."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        tree = models.transformer(options["nbytes"])
        nbytes = -(-models.nbytes_of(tree) // 4096) * 4096
        self.source, self.target = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
        for array in tree.values():
            self.source.write(array.data.cast("B"))
        self.target[:] = bytes(nbytes)  # pages are there before the clock runs

    def save(self, path: Path, flags: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, len(self.source))
            view = memoryview(self.source)
            for at in range(0, len(view), PIECE_NBYTES):
                piece = view[at : at + PIECE_NBYTES]
                assert os.pwrite(descriptor, piece, at) == len(piece)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        rounds.sync(path.parent)

    def load(self, path: Path, flags: int) -> mmap.mmap:
        descriptor = os.open(path, os.O_RDONLY | flags)
        try:
            view = memoryview(self.target)
            for at in range(0, len(view), PIECE_NBYTES):
                piece = view[at : at + PIECE_NBYTES]
                assert os.preadv(descriptor, [piece], at) == len(piece)
        finally:
            os.close(descriptor)
        return self.target

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        path, flags = folder / "x.bin", direct_flag(folder)
        return {"save": lambda: self.save(path, flags), "cold load": lambda: self.load(path, flags)}

    def check(self, result: object) -> None:
        assert isinstance(result, mmap.mmap)
        assert np.array_equal(np.frombuffer(result, np.uint8), np.frombuffer(self.source, np.uint8))


def direct_flag(folder: Path) -> int:
    """O_DIRECT, or nothing where this disk has no such thing."""
    flag: int = getattr(os, "O_DIRECT", 0)
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | flag))
    except OSError:
        flag = 0
    probe.unlink(missing_ok=True)
    return flag


PEERS: dict[str, type[Any]] = {
    "ckptfmt": Ckptfmt, "safetensors": Safetensors, "torch.save": Torch, "direct loop": Direct,
}  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    parser = report.parser("How far from the disk's speed are a durable save and a load?")
    parser.add_argument("--mb", type=int, default=512, help="of tensors (default 512)")
    arguments = parser.parse_args()
    nbytes = 4_000_000 if arguments.small else arguments.mb * 1_000_000
    number = min(arguments.rounds, 2) if arguments.small else arguments.rounds
    real = models.nbytes_of(models.transformer(nbytes))
    with report.workplace(arguments.dir) as folder:
        made = rounds.measure(__file__, PEERS, folder, {"nbytes": nbytes}, number)
    report.finish("host tensors of a transformer", made, real, arguments, {})


if __name__ == "__main__":
    main()
