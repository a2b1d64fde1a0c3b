"""What do a save and a restore of TensorFlow variables cost, beside tf.train.Checkpoint?

    python benchmarks/bench_tensorflow.py [--small] [--gb 1] [--rounds 5] [--dir /on/the/disk] [--json FILE]

Both write the same float32 variables durably (TF's files and folder are synced after its `write`) and
read them back into variables of zeros that exist, their files not in the page cache. Ours verifies
every byte, TF a CRC-32C. `cold restore` is all or nothing, with the new values beside the old ones;
`cold restore 2 passes` is so too, without: every byte is checked first and then read again.
`cold restore one pass` is `atomic=False`, as TF's own is. `peak_nbytes` is the memory that a call took
beside what was resident before it. `limit` is the disk: the same bytes by direct writes and reads into
memory that is there, without names, digests or variables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import models
import report
import resident
import rounds
import stored
from peers import machine_limit, tf_checkpoint

TWO_PASSES, ONE_PASS = "cold restore 2 passes", "cold restore one pass"


class Limit:
    """What the machine allows."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.nbytes = options["nbytes"]

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        own = machine_limit.convert(models.transformer(self.nbytes))
        return {
            "save": lambda: machine_limit.save(own, folder),
            "prepare pages": lambda: machine_limit.prepare_load(folder),
            "cold restore": lambda: machine_limit.load(folder),
        }

    def check(self, result: object) -> None:
        return


class Trial:
    """One of the two, with a state in variables."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.ours, self.nbytes = name == report.US, options["nbytes"]
        self.own: dict[str, Any] = {}

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        place = folder / "large"
        made: dict[str, Callable[[], object]] = {
            "prepare imports": lambda: self.warm_up(folder / "small"),
            "prepare state": lambda: self.fill(models.transformer(self.nbytes)),
            "prepare pages": lambda: stored.ready_pages(self.nbytes),
            "save": lambda: resident.watch(lambda: self.save(place)),
        }
        for operation in ["cold restore", *([TWO_PASSES, ONE_PASS] if self.ours else [])]:
            made[f"prepare zeros {operation}"] = lambda: self.fill(models.zeros(self.nbytes))
            made[f"prepare pages {operation}"] = lambda: stored.ready_pages(2 * self.nbytes)
            made[operation] = partial(self.watch_restore, place, operation)
            made[f"prepare proof {operation}"] = self.prove
        return made

    def watch_restore(self, place: Path, operation: str) -> object:
        budget = 0 if operation == TWO_PASSES else None
        if not self.ours:
            return resident.watch(lambda: self.restore(place))
        import ckptfmt

        with ckptfmt.configure(staging_nbytes=budget):
            return resident.watch(lambda: self.restore(place, atomic=operation != ONE_PASS))

    def fill(self, flat: models.Flat) -> None:
        self.own = {}  # the old ones go first: two states are in memory at no time
        self.own = tf_checkpoint.convert(flat)

    def warm_up(self, folder: Path) -> None:
        self.fill(models.many_tensors(2))
        self.save(folder)
        self.restore(folder)

    def save(self, folder: Path) -> None:
        if not self.ours:
            tf_checkpoint.save(self.own, folder)
            return
        import ckptfmt.tensorflow as ckf

        ckf.save(self.own, folder, name="bench", bases=())

    def restore(self, folder: Path, *, atomic: bool = True) -> None:
        if not self.ours:
            tf_checkpoint.restore(self.own, folder)
            return
        import ckptfmt.tensorflow as ckf

        assert ckf.restore(self.own, folder, at="bench", atomic=atomic)

    def prove(self) -> None:
        values = {name: variable.numpy() for name, variable in self.own.items()}
        models.assert_same(values, models.transformer(self.nbytes))

    def check(self, result: object) -> None:
        return


PEERS: dict[str, Any] = {**stored.factories(Trial, [report.US, "TF"]), report.LIMIT: Limit}


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    arguments, nbytes = report.arguments("What does it cost beside tf.train.Checkpoint?", gb=1.0)
    chosen = report.chosen(PEERS, arguments)
    with report.workplace(arguments.dir) as folder:
        made = rounds.measure(
            __file__,
            chosen,
            folder,
            {"nbytes": nbytes},
            arguments.rounds,
            fresh=True,
            warm=not arguments.small,
        )
    real = models.transformer_nbytes(nbytes)
    report.finish("TensorFlow variables", made, real, arguments, {})


if __name__ == "__main__":
    main()
