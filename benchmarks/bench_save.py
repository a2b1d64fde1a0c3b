"""How far from the disk's own speed is a durable save of large host tensors?

    python benchmarks/bench_save.py [--small] [--gb 1.5] [--rounds 5] [--dir /on/the/disk] [--json FILE]

Each save goes into an empty folder and ends when every file and its name are on the disk: those that
do not sync get an fsync of each file and folder. The limit is the same bytes by 4 MiB direct writes
from four threads, and an fsync. ckptfmt hashes every byte; torch.save, np.savez and TF take a CRC.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import peers
import report
import rounds
import stored


class Save:
    """One peer with a state in host memory."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.peer, self.nbytes = stored.peer(name), options["nbytes"]
        stored.warm_up(self.peer)
        self.tree = models.transformer(self.nbytes)
        self.own = self.peer.convert(self.tree)

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        return {
            "save": lambda: self.peer.save(self.own, folder / "x"),
            "prepare proof": lambda: self.prove(folder / "x"),
        }

    def prove(self, folder: Path) -> None:
        if hasattr(self.peer, "load"):
            assert stored.checksum(self.peer.load(folder)) == stored.checksum(self.tree)

    def check(self, result: object) -> None:
        return


PEERS = stored.factories(Save, peers.installed("save", without=("DCP default", "ckptfmt resumed")))


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    arguments, nbytes = report.arguments("How far from the disk's speed is a save?", gb=1.5)
    chosen = report.chosen(PEERS, arguments)
    options, warm = {"nbytes": nbytes}, not arguments.small
    with report.workplace(arguments.dir) as folder:
        made = rounds.measure(
            __file__, chosen, folder, options, arguments.rounds, fresh=True, warm=warm
        )
    real = models.transformer_nbytes(nbytes)
    report.finish("saving host tensors, durably", made, real, arguments, {})


if __name__ == "__main__":
    main()
