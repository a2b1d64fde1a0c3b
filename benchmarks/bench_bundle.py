"""How long does it take to list, read and convert a checkpoint of TensorFlow?

    python benchmarks/bench_bundle.py [--small] [--rounds 5] [--gb 2] [--dir /on/the/disk] [--json FILE]

`list`: names and shapes of 50,000 tensors, as `tf.train.list_variables` gives them; `list objects`:
5,000 of an object-based one, whose graph we also walk (TensorFlow takes minutes to write more).
`warm read`: every tensor into memory of its own, its checksum compared. `convert` carries the same
file into a store, durably and compared with its source afterwards; `save` is what a durable save of
the same arrays takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import report
import rounds

TENSORS = 64
TF = "TF"

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def write(kind: str, prefix: str, number: int) -> None:
    """Runs in a process of its own: ours shall not have TensorFlow in it."""
    import tensorflow as tf

    if kind == "objects":
        root = tf.Module()
        root.blocks = [tf.Module() for _ in range(max(1, number // 50))]
        for block in root.blocks:
            block.layers = [tf.Variable([[0.0, 1.0]]) for _ in range(min(number, 50))]
        tf.train.Checkpoint(model=root).write(prefix)
        return
    if kind == "names":
        values = [np.zeros((2, 3), np.float32)] * number
        names = [f"model/block_{n // 50}/layer_{n % 50}/kernel" for n in range(number)]
    else:
        rng = np.random.default_rng(0)
        values = [rng.random(number // 4 // TENSORS, np.float32) for _ in range(TENSORS)]
        names = [f"tensor_{n}" for n in range(TENSORS)]
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=values
    )


class Bundle(ABC):
    """One reader, and the checkpoints that it reads."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.numbers = {
            "names": options["count"], "objects": options["count"] // 10, "values": options["nbytes"]
        }  # fmt: skip

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        at = {kind: str(folder.parent / f"kept-{kind}") for kind in self.numbers}
        made: dict[str, Callable[[], object]] = {
            f"prepare {kind}": partial(self.prepare, kind, at[kind]) for kind in at
        }
        made["list"] = partial(self.count, at["names"], self.numbers["names"])
        made["list objects"] = partial(self.count, at["objects"], self.numbers["objects"])
        made["warm read"] = partial(self.read, at["values"])
        return made

    def prepare(self, kind: str, prefix: str) -> None:
        if not Path(f"{prefix}.index").exists():
            command = [sys.executable, __file__, "--write", kind, prefix, str(self.numbers[kind])]
            subprocess.run(command, check=True)

    def count(self, prefix: str, count: int) -> None:
        found = self.names_and_shapes(prefix)
        assert len(found) >= count, f"{len(found)} tensors, not {count}"

    @abstractmethod
    def names_and_shapes(self, prefix: str) -> list[tuple[str, Any]]: ...

    @abstractmethod
    def read(self, prefix: str) -> object: ...

    def check(self, result: object) -> None:
        return


class Ours(Bundle):
    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        prefix = str(folder.parent / "kept-values")
        return {
            **super().operations(folder),
            "convert": partial(self.convert, prefix, folder / "converted"),
            "prepare save": partial(self.load, prefix),
            "save": partial(self.save, folder / "saved"),
        }

    def names_and_shapes(self, prefix: str) -> list[tuple[str, Any]]:
        from ckptfmt.foreign import read_foreign

        tensors = read_foreign(prefix).tensors
        return [(name, tensor.shape) for name, tensor in tensors.items()]

    def read(self, prefix: str) -> object:
        import ckptfmt

        return ckptfmt.open_foreign(prefix).load()

    def convert(self, prefix: str, store: Path) -> None:
        import ckptfmt

        ckptfmt.convert(prefix, store)

    def load(self, prefix: str) -> None:
        self.tree = self.read(prefix)

    def save(self, store: Path) -> None:
        import ckptfmt

        ckptfmt.save(self.tree, store)
        del self.tree


class TensorFlow(Bundle):
    def names_and_shapes(self, prefix: str) -> list[tuple[str, Any]]:
        import tensorflow as tf

        found: list[tuple[str, Any]] = tf.train.list_variables(prefix)
        return found

    def read(self, prefix: str) -> object:
        import tensorflow as tf

        reader = tf.train.load_checkpoint(prefix)
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


PEERS: dict[str, type[Bundle]] = {report.US: Ours, TF: TensorFlow}


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    if sys.argv[1:2] == ["--write"]:
        write(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    arguments, nbytes = report.arguments("How fast is a checkpoint of TensorFlow read?", gb=2.0)
    options = {"count": 500 if arguments.small else 50_000, "nbytes": nbytes}
    chosen = report.chosen(PEERS, arguments)
    with report.workplace(arguments.dir) as folder:
        warm = not arguments.small
        made = rounds.measure(__file__, chosen, folder, options, arguments.rounds, warm=warm)
    report.finish("checkpoints of TensorFlow", made, nbytes, arguments, options)


if __name__ == "__main__":
    main()
