"""How long until one knows what 100,000 or 1,000,000 tensors there are?

    python benchmarks/bench_open.py [--small] [--rounds 5] [--dir /on/the/disk] [--json FILE]

Each opens its file (ckptfmt: the index, its digest checked) in a new process and counts the tensors.
safetensors limits its header to 100 MB and takes no part in the million.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import models
import peers
import report
import rounds
import stored

COUNTS = (100_000, 1_000_000)
COUNTS_SMALL = (200, 1_000)
TENSOR_NBYTES = 16


class Open:
    """One peer and its stores of many tensors."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.peer = name, stored.peer(name)
        self.counts = options["counts"] if name == report.US else options["counts"][:1]
        stored.warm_up(self.peer)

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        made: dict[str, Callable[[], object]] = {}
        for count in self.counts:
            kept = stored.kept(folder).with_name(f"kept-{count}")
            made[f"prepare {count}"] = partial(self.store, kept, count)
            made[f"open {count}"] = partial(self.open, kept, count)
        return made

    def store(self, kept: Path, count: int) -> None:
        if not kept.exists():
            tree = models.many_tensors(count, TENSOR_NBYTES)
            self.peer.save(self.peer.convert(tree), kept)
        stored.read_all(kept)

    def open(self, kept: Path, count: int) -> None:
        found = self.peer.count(kept)
        assert found == count, f"{found} tensors, not {count}"

    def check(self, result: object) -> None:
        return


PEERS = stored.factories(Open, peers.installed("save", "count"))


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    arguments, _ = report.arguments("How long does it take to open many tensors?", gb=None)
    counts = COUNTS_SMALL if arguments.small else COUNTS
    options = {"counts": counts}
    chosen = report.chosen(PEERS, arguments)
    with report.workplace(arguments.dir) as folder:
        made = rounds.measure(
            __file__,
            chosen,
            folder,
            options,
            arguments.rounds,
            fresh=True,
            warm=not arguments.small,
        )
    nbytes = counts[0] * TENSOR_NBYTES
    report.finish(f"opening {counts[0]} and {counts[1]} tensors", made, nbytes, arguments, options)


if __name__ == "__main__":
    main()
