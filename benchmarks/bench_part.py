"""How much is read for one tensor out of a large checkpoint?

    python benchmarks/bench_part.py [--small] [--gb 4] [--rounds 5] [--dir /on/the/disk] [--json FILE]

The files are not in the page cache. `disk_nbytes` is what the system had read from the disk for this
process, its read-ahead too; `asked_nbytes` (ours alone) is what the engine asked its store for: the
index and the chunks. The tensor is the one whose size is nearest 4 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import numpy as np
import peers
import report
import rounds
import stored

TENSOR_NBYTES = 4_000_000


class Part:
    """One peer, and what it stored in the first round."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.peer, self.nbytes = name, stored.peer(name), options["nbytes"]
        stored.warm_up(self.peer)

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        kept = stored.kept(folder)
        return {
            "prepare data": lambda: self.store(kept),
            "cold part": lambda: self.read(kept),
            "prepare proof": lambda: self.prove(kept),
        }

    def store(self, kept: Path) -> None:
        if not kept.exists():
            self.peer.save(self.peer.convert(tree_of(self.nbytes)), kept)

    def read(self, kept: Path) -> rounds.Numbers:
        before, numbers = stored.disk_nbytes(), rounds.Numbers()
        if self.name == report.US:
            numbers["asked_nbytes"] = asked_nbytes(kept)
        else:
            stored.touch_pages({"x": self.peer.part(kept, "part")})
        numbers["disk_nbytes"] = stored.disk_nbytes() - before
        return numbers

    def prove(self, kept: Path) -> None:
        assert np.array_equal(self.peer.part(kept, "part"), part())

    def check(self, result: object) -> None:
        return


def part() -> Any:
    return np.random.default_rng(1).standard_normal((TENSOR_NBYTES // 4000, 1000), np.float32)


def tree_of(nbytes: int) -> models.Flat:
    tree = models.transformer(nbytes)
    items = list(tree.items())
    half = len(items) // 2
    return dict([*items[:half], ("part", part()), *items[half:]])


def asked_nbytes(kept: Path) -> int:
    """Read the tensor through a backend that counts what it is asked for."""
    import ckptfmt
    from ckptfmt.storage import open_backend

    store = ckptfmt.Store(kept)
    inner = open_backend(str(kept))
    counted: list[int] = []
    get = inner.get

    def counting(
        key: Any, start: int = 0, stop: int | None = None, out: memoryview | None = None
    ) -> memoryview:
        found = get(key, start, stop, out)
        counted.append(found.nbytes)
        return found

    inner.get = counting  # type: ignore[method-assign]
    store.backend = inner
    store.open("bench")["part"].read()
    return sum(counted)


PEERS = stored.factories(Part, peers.installed("save", "part"))


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    arguments, nbytes = report.arguments("How much is read for one tensor of many?", gb=4.0)
    options = {"nbytes": nbytes}
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
    report.finish("one tensor of 4 MB out of many", made, TENSOR_NBYTES, arguments, options)


if __name__ == "__main__":
    main()
