"""How fast does a file of another framework become a checkpoint, beside a save of the same bytes?

    python benchmarks/bench_convert.py [--small] [--rounds 5] [--gb 2] [--dir /on/the/disk] [--json FILE]

`save` is a durable save of the arrays, which are in memory. `convert pt` and `convert bundle` carry
a file of torch.save and a TensorFlow checkpoint with the same values into a store: durably, every
checksum of the file compared, and the digests compared with the file once more. `of_save_rate` is the
rate of a conversion over that of the save of the same round; the order changes from round to round.
`convert transposed` turns every tensor on the way; `export ...` writes the saved store as such a file,
durably, and compares what it wrote. The files and the store are in the page cache, but for `cold ...`.
`cold copy` is the machine's limit for those: the `.pt` read and written by direct I/O, nothing hashed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import bench_bundle
import numpy as np
import report
import rounds
from peers import machine_limit

Rules = list[dict[str, Any]]


def values(nbytes: int) -> dict[str, Any]:
    """What bench_bundle writes for TensorFlow, as matrices."""
    rng, count = np.random.default_rng(0), bench_bundle.TENSORS
    made = [rng.random(nbytes // 4 // count, np.float32) for _ in range(count)]
    return {f"tensor_{n}": array for n, array in enumerate(made)}


def write_pt(path: str, nbytes: int) -> None:
    """Runs in a process of its own: ours shall not have torch in it."""
    import torch

    rows = 1000
    torch.save({k: torch.from_numpy(v[: len(v) // rows * rows]).reshape(rows, -1)
                for k, v in values(nbytes).items()}, path)  # fmt: skip


class Ours:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self.nbytes: int = options["nbytes"]
        self.save_s = 0.0
        self.tree: dict[str, Any] = {}

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        pt, bundle = folder.parent / "kept.pt", folder.parent / "kept-bundle"
        turn: Rules = [{"transpose": "."}]
        timed = [
            ("convert pt", partial(self.convert, pt, folder / "pt", [])),
            ("convert bundle", partial(self.convert, bundle, folder / "bundle", [])),
            ("convert transposed", partial(self.convert, pt, folder / "turned", turn)),
            ("cold convert pt", partial(self.convert, pt, folder / "cold-pt", [])),
            ("cold convert bundle", partial(self.convert, bundle, folder / "cold-bundle", [])),
            ("cold copy", partial(self.copy, pt, folder / "copied")),
            ("export pt", partial(self.export, folder, "exported.pt")),
            ("export bundle", partial(self.export, folder, "exported.index")),
            ("cold export pt", partial(self.export, folder, "cold.pt")),
            ("cold export bundle", partial(self.export, folder, "cold.index")),
        ]
        first = int(folder.name.rpartition("-")[2]) % len(timed)
        ordered: list[tuple[str, Callable[[], object]]] = []
        for name, operation in timed[first:] + timed[:first]:
            # What was saved or evicted before it left nothing in the page cache.
            if name.startswith("export"):
                ordered.append((f"prepare {name}", partial(self.read, folder / "saved" / "data")))
            elif name.startswith("convert"):
                ordered.append((f"prepare {name}", partial(self.read, folder.parent)))
            ordered.append((name, operation))
        return {
            "prepare": partial(self.prepare, pt, bundle),
            "prepare save": self.load,
            "save": partial(self.save, folder / "saved"),
            **dict(ordered),
        }

    def prepare(self, pt: Path, bundle: Path) -> None:
        if not pt.exists():
            own = [sys.executable, __file__, "--write", str(pt), str(self.nbytes)]
            subprocess.run(own, check=True)
            other = [sys.executable, bench_bundle.__file__, "--write", "values", str(bundle)]
            subprocess.run([*other, str(self.nbytes)], check=True)

    def read(self, folder: Path) -> None:
        for path in folder.iterdir():
            if path.is_file():
                with path.open("rb") as file:
                    while file.read(8 << 20):
                        pass

    def load(self) -> None:
        self.tree = values(self.nbytes)

    def save(self, store: Path) -> None:
        import ckptfmt

        begin = time.perf_counter()
        ckptfmt.save(self.tree, store)
        self.save_s = time.perf_counter() - begin
        self.tree = {}

    def convert(self, source: Path, store: Path, rules: Rules) -> rounds.Numbers:
        import ckptfmt

        begin = time.perf_counter()
        ckptfmt.convert(source, store, rules=rules)
        seconds = time.perf_counter() - begin
        return rounds.Numbers(of_save_rate=self.save_s / seconds)

    def copy(self, source: Path, target: Path) -> rounds.Numbers:
        begin = time.perf_counter()
        machine_limit.copy_file(source, target)
        seconds = time.perf_counter() - begin
        target.unlink()
        return rounds.Numbers(of_save_rate=self.save_s / seconds)

    def export(self, folder: Path, name: str) -> rounds.Numbers:
        import ckptfmt

        begin = time.perf_counter()
        ckptfmt.export(folder / "saved", folder / name)
        seconds = time.perf_counter() - begin
        return rounds.Numbers(of_save_rate=self.save_s / seconds)

    def check(self, result: object) -> None:
        return


PEERS: dict[str, type[Any]] = {report.US: Ours}


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    if sys.argv[1:2] == ["--write"]:
        write_pt(sys.argv[2], int(sys.argv[3]))
        return
    arguments, nbytes = report.arguments("How fast is a conversion?", gb=2.0)
    options = {"nbytes": nbytes}
    with report.workplace(arguments.dir) as folder:
        warm = not arguments.small
        made = rounds.measure(__file__, PEERS, folder, options, arguments.rounds, warm=warm)
    report.finish("conversions", made, nbytes, arguments, options)


if __name__ == "__main__":
    main()
