"""How long does a command of the program take on a small store, beside the import of NumPy?

    python benchmarks/bench_start.py [--small] [--rounds 15] [--dir /on/the/disk] [--json FILE]

Each command is a process of its own, as is `python -c "import numpy"`, which runs just before it:
`over_numpy_s` is the difference, `over_numpy_cpu_s` that of their CPU, which says more on a busy machine. Byte code is read from files, as an installed package has it.
`--help` and `--version` do without NumPy.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import models
import report
import rounds

NUMPY = "import numpy"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def commands(store: Path) -> dict[str, list[str]]:
    return {
        "--help": ["--help"],
        "--version": ["--version"],
        "ls": ["ls", str(store)],
        "show": ["show", str(store)],
        "cat": ["cat", str(store), "layers.0.norm.bias"],
        "diff": ["diff", f"{store}@1", f"{store}@1"],
        "verify": ["verify", str(store)],
        "tag": ["tag", f"{store}@1", "best"],
        "rm": ["rm", "--force", f"{store}@1"],
    }


class Start:
    """Commands of the program, or as many imports of NumPy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.before = (0.0, 0.0)

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        made: dict[str, Callable[[], object]] = {"prepare store": lambda: store(folder / "store")}
        for title, arguments in commands(folder / "store").items():
            if self.name == report.US:
                made[f"prepare {title}"] = self.numpy
            made[title] = partial(self.run, arguments)
        return made

    def numpy(self) -> None:
        self.before = spawn(["-c", NUMPY])

    def run(self, arguments: list[str]) -> rounds.Numbers:
        if self.name == NUMPY:
            spawn(["-c", NUMPY])
            return rounds.Numbers()
        seconds, cpu_s = spawn(["-m", "ckptfmt", *arguments])
        return rounds.Numbers(
            over_numpy_s=seconds - self.before[0], over_numpy_cpu_s=cpu_s - self.before[1]
        )

    def check(self, result: object) -> None:
        return


def store(folder: Path) -> None:
    import ckptfmt

    ckptfmt.save(models.transformer(100_000), folder, step=1, durable=False)


def spawn(arguments: list[str]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU, of one process."""
    begin, cpu_s = time.perf_counter(), children_cpu_s()
    subprocess.run(
        [sys.executable, *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=True,
    )
    return time.perf_counter() - begin, children_cpu_s() - cpu_s


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Ours(Start):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(report.US)


class Numpy(Start):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(NUMPY)


PEERS: dict[str, type[Start]] = {report.US: Ours, NUMPY: Numpy}


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    arguments, _ = report.arguments("How long does a command take to start?", gb=None)
    with report.workplace(arguments.dir) as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        chosen = report.chosen(PEERS, arguments)
        warm = not arguments.small
        made = rounds.measure(__file__, chosen, folder, {}, arguments.rounds, warm=warm)
    report.finish("commands on a small store", made, 100_000, arguments, {})


if __name__ == "__main__":
    main()
