"""How long does a training step wait for a background save, and how much does it slow what follows?

    python benchmarks/bench_stall.py [--small] [--gb 1] [--rounds 5] [--dir /on/the/disk] [--json FILE]

`first stall`: the call that starts the first save of a process; `stall`: the second, which finds
buffers of the first. The limit is a memcpy of the same bytes by two threads (into new memory, then
into warm memory); torch.save is a clone of every tensor, saved in a thread; DCP has a
stager that keeps its memory, DCP default the one that `async_save` takes if none is named. `matmul` is one thread of
matrix products from the start of a third save until it is durable: `speed` compares it with the same
loop alone, just before and after, `durable_s` is how long the save took. Each round has new processes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import numpy as np
import peers
import report
import rounds
import stored

SIZE = 512
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Of the matrix products; what saves has threads of other kinds."""
ALONE_S = 1.0


class Stall:
    """One peer with a state in host memory."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.peer, self.alone_s = name, stored.peer(name), options["alone_s"]
        self.nbytes = options["nbytes"]
        stored.warm_up(self.peer)
        self.own = self.peer.convert(models.transformer(options["nbytes"]))
        self.wait: Callable[[], object] = lambda: None
        self.matrix = np.random.default_rng(0).standard_normal((SIZE, SIZE), dtype=np.float32)
        self.out = np.empty_like(self.matrix)

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        made: dict[str, Callable[[], object]] = {
            "prepare pages": lambda: stored.ready_pages(self.nbytes),
            "first stall": lambda: self.begin(folder / "first"),
            "prepare first": lambda: self.wait(),
            "stall": lambda: self.begin(folder / "second"),
            "prepare second": lambda: self.wait(),
        }
        if self.name != "limit":
            made["matmul"] = lambda: self.compete(folder / "third")
        return made

    def begin(self, folder: Path) -> None:
        self.wait = self.peer.begin(self.own, folder)

    def products(self, until: Callable[[], bool]) -> float:
        """Products a second until that is true."""
        count, begin = 0, time.perf_counter()
        while not until():
            np.matmul(self.matrix, self.matrix, out=self.out)
            count += 1
        return count / (time.perf_counter() - begin)

    def alone(self) -> float:
        end = time.perf_counter() + self.alone_s
        return self.products(lambda: time.perf_counter() > end)

    def compete(self, folder: Path) -> rounds.Numbers:
        before = self.alone()
        begin = time.perf_counter()
        waiter = threading.Thread(target=self.peer.begin(self.own, folder))
        waiter.start()
        during = self.products(lambda: not waiter.is_alive())
        waiter.join()
        durable_s = time.perf_counter() - begin
        speed = 2 * during / (before + self.alone())
        return rounds.Numbers(speed=speed, durable_s=durable_s)

    def check(self, result: object) -> None:
        assert isinstance(result, rounds.Numbers) or self.name == "limit"


PEERS = stored.factories(Stall, peers.installed("save", "begin"))


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    arguments, nbytes = report.arguments("How long does a step wait for a background save?", gb=1.0)
    os.environ.update(ONE_THREAD)  # children read it when they import NumPy
    options = {"nbytes": nbytes, "alone_s": 0.05 if arguments.small else ALONE_S}
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
    report.finish("saving host tensors in the background", made, real, arguments, {})


if __name__ == "__main__":
    main()
