"""What do 100,000 small tensors cost to save, open and load, beside safetensors?

    python benchmarks/bench_many_tensors.py [--small] [--rounds 5] [--dir /on/the/disk] [--json FILE]

Saves are durable: ckptfmt's own way, `save_file` with an fsync of file and folder. `open` reads what
says where everything is, and counts the names. Loads find the bytes in the page cache; both give
arrays that may be written to; ckptfmt has checked every byte of them, which the other cannot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import report
import rounds


class Ckptfmt:
    """Of this repository."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import ckptfmt

        self.package = ckptfmt
        self.tree = models.many_tensors(options["count"])

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        path, package = folder / "store", self.package
        return {
            "save": lambda: package.save({"model": self.tree}, path, step=1),
            "open": lambda: len(package.open(path)),
            "load": lambda: package.load(path),
        }

    def check(self, result: object) -> None:
        assert isinstance(result, dict)
        models.assert_same(result["model"], self.tree)


class Safetensors:
    """`save_file`, `safe_open`, `load_file` of safetensors.numpy."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import safetensors
        import safetensors.numpy

        self.package = safetensors
        self.tree = models.many_tensors(options["count"])

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        path = folder / "x.safetensors"

        def save() -> None:
            self.package.numpy.save_file(self.tree, path)
            rounds.sync(path, folder)

        def open_file() -> int:
            with self.package.safe_open(path, "numpy") as file:
                return len(file.keys())

        return {
            "save": save,
            "open": open_file,
            "load": lambda: self.package.numpy.load_file(path),
        }

    def check(self, result: object) -> None:
        models.assert_same(result, self.tree)


PEERS: dict[str, type[Any]] = {"ckptfmt": Ckptfmt, "safetensors": Safetensors}


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    parser = report.parser("What do many small tensors cost to save, open and load?")
    parser.add_argument("--count", type=int, default=100_000, help="tensors of 1 KB")
    arguments = parser.parse_args()
    count = 500 if arguments.small else arguments.count
    number = min(arguments.rounds, 2) if arguments.small else arguments.rounds
    with report.workplace(arguments.dir) as folder:
        made = rounds.measure(__file__, PEERS, folder, {"count": count}, number)
    report.finish(f"{count} tensors of 1 KB", made, count * 1024, arguments, {"tensors": count})


if __name__ == "__main__":
    main()
