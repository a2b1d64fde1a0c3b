"""What does a save cost when little has changed, or nothing?

    python benchmarks/bench_incremental.py [--small] [--gb 1] [--rounds 5] [--dir /on/the/disk] [--json FILE]

All saves are durable. `unchanged save` saves the same state as another step: the limit is XXH3-128 of
all bytes by two threads. `rows save` follows a change of 1 % of the rows of one embedding, which is an
eighth of the state. The others write everything each time. `written_nbytes` is what the folder grew
by, `scanned_gb_s` the state over the time, `of_full_save` the time over that of the full save.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import peers
import report
import rounds
import stored

EMBEDDING = "embed.weight"
SHARE = 0.01
PIECE_NBYTES, HASH_THREADS = 4 << 20, 2


class Incremental:
    """ckptfmt, whose saves look at what is stored."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        import ckptfmt

        self.package = ckptfmt
        self.tree = models.transformer(options["nbytes"])
        self.nbytes = models.nbytes_of(self.tree)
        self.full_s = 0.0

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        path = folder / "store"
        return {
            "full save": lambda: self.save(path, 1),
            "unchanged save": lambda: self.save(path, 2),
            "prepare rows": self.change,
            "rows save": lambda: self.save(path, 3),
            "prepare proof": lambda: self.prove(path),
        }

    def save(self, path: Path, step: int) -> rounds.Numbers:
        before, begin = stored.nbytes_below(path), time.perf_counter()
        self.package.save(self.tree, path, step=step)
        seconds = time.perf_counter() - begin
        self.full_s = seconds if step == 1 else self.full_s
        return rounds.Numbers(
            written_nbytes=stored.nbytes_below(path) - before,
            scanned_gb_s=self.nbytes / 1e9 / seconds,
            of_full_save=seconds / self.full_s,
        )

    def change(self) -> None:
        """Negate 1 % of the rows, in the middle."""
        rows = self.tree[EMBEDDING]
        count = max(1, round(len(rows) * SHARE))
        first = (len(rows) - count) // 2
        rows[first : first + count] *= -1

    def prove(self, path: Path) -> None:
        models.assert_same(self.package.load(path), self.tree)

    def check(self, result: object) -> None:
        return


class Whole:
    """A program that writes everything at each save."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.peer = name, stored.peer(name)
        stored.warm_up(self.peer)
        self.own = self.peer.convert(models.transformer(options["nbytes"]))

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        made: dict[str, Callable[[], object]] = {
            "full save": lambda: self.peer.save(self.own, folder / "a")
        }
        if self.name == "limit":
            made["unchanged save"] = self.hash
        else:
            made["unchanged save"] = lambda: self.peer.save(self.own, folder / "b")
        return made

    def hash(self) -> int:
        import xxhash

        view = memoryview(self.own["all"])
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            pieces = (view[a : a + PIECE_NBYTES] for a in range(0, len(view), PIECE_NBYTES))
            return len(set(pool.map(xxhash.xxh3_128_digest, pieces)))

    def check(self, result: object) -> None:
        return


BESIDE = [name for name in ("safetensors", "limit") if name in peers.installed("save")]
PEERS = stored.factories(Incremental, [report.US]) | stored.factories(Whole, BESIDE)


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    arguments, nbytes = report.arguments("What does a save cost when little changed?", gb=1.0)
    chosen = report.chosen(PEERS, arguments)
    with report.workplace(arguments.dir) as folder:
        made = rounds.measure(
            __file__, chosen, folder, {"nbytes": nbytes}, arguments.rounds, warm=not arguments.small
        )
    real = models.transformer_nbytes(nbytes)
    report.finish("saving what has hardly changed", made, real, arguments, {"share": SHARE})


if __name__ == "__main__":
    main()
