"""How fast is a checkpoint in memory, from the disk and from the page cache?

    python benchmarks/bench_load.py [--small] [--gb 1.5] [--rounds 5] [--dir /on/the/disk] [--json FILE]

`cold load`: arrays in fresh memory, every page touched, the files not in the page cache; beside a loop
of 4 MiB direct reads by four threads into warm memory. safetensors has its fastest way: a map.
`cold map`: mapped, every page touched. `warm load`, `warm map`: the files are in the page cache, and
every byte is summed. ckptfmt verifies every byte; only in `warm map unchecked` it does not, as the
others never do when they map. Each round has new processes.
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


class Load:
    """One peer, and what it stored in the first round."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.peer, self.nbytes = name, stored.peer(name), options["nbytes"]
        stored.warm_up(self.peer)

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        kept, peer = stored.kept(folder), self.peer
        made: dict[str, Callable[[], object]] = {
            "prepare data": lambda: stored.save_once(peer, kept, self.nbytes)
        }
        if hasattr(peer, "prepare_load"):
            made["prepare memory"] = lambda: peer.prepare_load(kept)
        made["prepare pages"] = lambda: stored.ready_pages(self.nbytes)
        made["cold load"] = lambda: stored.touch_pages(peer.load(kept))
        if hasattr(peer, "map"):
            made["prepare pages again"] = made["prepare pages"]
            made["cold map"] = lambda: stored.touch_pages(peer.map(kept))
        made["prepare cache"] = lambda: stored.read_all(kept)
        if self.name == "limit":
            made["prepare proof"] = lambda: self.prove(kept, peer.load)
            return made
        made["warm load"] = lambda: stored.checksum(peer.load(kept))
        if hasattr(peer, "map"):
            unchecked = partial(peer.map, verify=False) if self.name == report.US else peer.map
            made["warm map"] = lambda: stored.checksum(peer.map(kept))
            made["warm map unchecked"] = lambda: stored.checksum(unchecked(kept))
        if not (kept.parent / "proved").exists():
            made["prepare proof"] = lambda: self.prove(kept, peer.load)
        return made

    def prove(self, kept: Path, load: Callable[[Path], Mapping[str, Any]]) -> None:
        assert stored.checksum(load(kept)) == stored.expected(kept)
        (kept.parent / "proved").touch()

    def check(self, result: object) -> None:
        return


PEERS = stored.factories(Load, peers.installed("save", "load"))


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    arguments, nbytes = report.arguments("How fast is a checkpoint in memory?", gb=1.5)
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
    real = models.transformer_nbytes(nbytes)
    report.finish("loading host tensors", made, real, arguments, {})


if __name__ == "__main__":
    main()
