"""How much memory beside the state do a save and a restore take?

    python benchmarks/bench_memory.py [--small] [--gb 2] [--rounds 5] [--dir /on/the/disk] [--json FILE]

`peak_nbytes` is the most resident memory during the call less what was resident before it (VmHWM,
after clear_refs); file pages that are mapped count, although the system can take them back. Saves are
durable; restores go into arrays that exist. Ours: `restore` in one pass (`atomic=False`), `restore
checked`, which verifies everything before it reads again (no more than 64 MiB may be staged), and
`restore spare`, which holds all new values before the first is bound. The others restore in place as
they can, and none of them is atomic. Files were evicted from the page cache before a restore. Each
call has a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import peers
import report
import resident
import rounds
import stored

CHECKED_NBYTES, SPARE_NBYTES = 64 << 20, 1 << 46
OPERATIONS = ("save", "cold restore", "cold restore checked", "cold restore spare")


class Memory:
    """One peer, one operation."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.peer, self.nbytes = name, stored.peer(name), options["nbytes"]
        self.operation = options["operation"]
        stored.warm_up(self.peer)
        self.own: Any = None

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        kept = stored.kept(folder)
        made: dict[str, Callable[[], object]] = {
            "prepare data": lambda: stored.save_once(self.peer, kept, self.nbytes)
        }
        if self.operation == "save":
            made["prepare state"] = lambda: self.fill(models.transformer(self.nbytes))
            made["save"] = lambda: resident.watch(lambda: self.peer.save(self.own, folder / "x"))
            return made
        made["prepare state"] = lambda: self.fill(models.zeros(self.nbytes))
        made["prepare pages"] = lambda: stored.ready_pages(2 * self.nbytes)
        made[self.operation] = lambda: resident.watch(lambda: self.restore(kept))
        if self.name == report.US:
            made["prepare proof"] = lambda: self.prove(kept)
        return made

    def fill(self, tree: models.Flat) -> None:
        self.own = self.peer.convert(tree)

    def restore(self, kept: Path) -> None:
        if self.name != report.US:
            self.peer.restore(self.own, kept)
            return
        import ckptfmt

        mode = self.operation.removeprefix("cold restore").strip()
        staging = SPARE_NBYTES if mode == "spare" else CHECKED_NBYTES
        with ckptfmt.configure(staging_nbytes=staging):
            ckptfmt.restore(self.own, kept, at="bench", atomic=bool(mode))

    def prove(self, kept: Path) -> None:
        assert stored.checksum(self.own) == stored.expected(kept)

    def check(self, result: object) -> None:
        return


PEERS = stored.factories(Memory, peers.installed("save", "restore"))


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    arguments, nbytes = report.arguments("How much memory do a save and a restore take?", gb=2.0)
    made: list[rounds.Round] = []
    with report.workplace(arguments.dir) as folder:
        for operation in OPERATIONS:
            ours_alone = operation in OPERATIONS[2:]
            able = report.chosen(PEERS, arguments)
            chosen = {n: p for n, p in able.items() if n == report.US or not ours_alone}
            options = {"nbytes": nbytes, "operation": operation}
            found = rounds.measure(
                __file__,
                chosen,
                folder,
                options,
                arguments.rounds,
                fresh=True,
                warm=not arguments.small,
            )
            made = made or [{} for _ in found]
            for whole, part in zip(made, found):
                for name, timings in part.items():
                    whole.setdefault(name, {}).update(timings)
    real = models.transformer_nbytes(nbytes)
    report.finish("memory beside the state", made, real, arguments, {})


if __name__ == "__main__":
    main()
