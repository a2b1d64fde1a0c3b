"""How long does a training step wait for a background save, and how much does it slow what follows?

    python benchmarks/bench_stall.py [--small] [--gb 1] [--rounds 5] [--dir /on/the/disk] [--json FILE]

`first stall`: the call that starts the first save of a process; `stall`: the second, which finds
buffers of the first. The limit is a memcpy of the same bytes by two threads (into new memory, then
into warm memory); torch.save is a clone of every tensor, saved in a thread; DCP has a
stager that keeps its memory, DCP default the one that `async_save` takes if none is named. "ckptfmt
resumed" has restored its state by a Manager before.

`durable` is a third save until it is durable, with nothing beside it: its CPU seconds are what a save
takes from the training loop. `matmul` is one thread of matrix products from the start of a fourth
until it is durable, `python` one of bytecode, which gives the GIL away only when it is asked to:
`speed` compares the loop with itself alone, just before and after, `durable_s` is how long the save
took, `of_durable` that over `durable`. Where Linux tells them, the shares of the loop's time say why:
`blocked` it waited for the GIL, `runqueue` for a core (also for what else the machine does), and
`cpu_speed` compares only the time that it ran. Each round has new processes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
PYTHON_STEPS = 20_000


@dataclass(frozen=True)
class Loop:
    """What a loop did: how often, in which time, and how much of that it ran or waited for a core."""

    count: int
    seconds: float
    ran_s: float
    queued_s: float

    @property
    def speed(self) -> float:
        return self.count / self.seconds

    @property
    def cpu_speed(self) -> float:
        return self.count / self.ran_s


class Stall:
    """One peer with a state in host memory."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.peer, self.alone_s = name, stored.peer(name), options["alone_s"]
        self.nbytes, self.durable_s = options["nbytes"], 1.0
        stored.warm_up(self.peer)
        self.own = self.peer.convert(models.transformer(options["nbytes"]))
        self.wait: Callable[[], object] = lambda: None
        self.matrix = np.random.default_rng(0).standard_normal((SIZE, SIZE), dtype=np.float32)
        self.out = np.empty_like(self.matrix)

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        made: dict[str, Callable[[], object]] = {
            "prepare pages": lambda: stored.ready_pages(self.nbytes),
            "prepare run": lambda: self.resume(folder / "before"),
            "first stall": lambda: self.begin(folder / "first"),
            "prepare first": lambda: self.wait(),
            "stall": lambda: self.begin(folder / "second"),
            "prepare second": lambda: self.wait(),
        }
        if self.name != "limit":
            made["durable"] = lambda: self.durable(folder / "third")
            made["matmul"] = lambda: self.compete(folder / "fourth", self.product)
            made["python"] = lambda: self.compete(folder / "fifth", _count)
        return made

    def resume(self, folder: Path) -> None:
        if hasattr(self.peer, "resume"):
            self.peer.resume(self.own, folder)

    def begin(self, folder: Path) -> None:
        self.wait = self.peer.begin(self.own, folder)

    def durable(self, folder: Path) -> None:
        begin = time.perf_counter()
        self.peer.begin(self.own, folder)()
        self.durable_s = time.perf_counter() - begin

    def product(self) -> None:
        np.matmul(self.matrix, self.matrix, out=self.out)

    def alone(self, work: Callable[[], object]) -> Loop:
        end = time.perf_counter() + self.alone_s
        return _loop(work, lambda: time.perf_counter() > end)

    def compete(self, folder: Path, work: Callable[[], object]) -> rounds.Numbers:
        before = self.alone(work)
        begin = time.perf_counter()
        waiter = threading.Thread(target=self.peer.begin(self.own, folder))
        waiter.start()
        during = _loop(work, lambda: not waiter.is_alive())
        waiter.join()
        durable_s = time.perf_counter() - begin
        after = self.alone(work)
        return rounds.Numbers(
            speed=2 * during.speed / (before.speed + after.speed),
            durable_s=durable_s,
            of_durable=durable_s / self.durable_s,
            cpu_speed=2 * during.cpu_speed / (before.cpu_speed + after.cpu_speed),
            runqueue=during.queued_s / during.seconds,
            blocked=1 - (during.ran_s + during.queued_s) / during.seconds,
        )

    def check(self, result: object) -> None:
        assert isinstance(result, rounds.Numbers) or self.name == "limit"


def _loop(work: Callable[[], object], until: Callable[[], bool]) -> Loop:
    """Do something again and again until that is true."""
    count, begin, (ran_s, queued_s) = 0, time.perf_counter(), _thread_times()
    while not until():
        work()
        count += 1
    now = _thread_times()
    return Loop(count, time.perf_counter() - begin, now[0] - ran_s, now[1] - queued_s)


def _thread_times() -> tuple[float, float]:
    """Seconds that this thread has run and has waited for a core, which only Linux tells."""
    try:
        text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    except OSError:
        return time.thread_time(), 0.0
    ran, queued, _ = text.split()
    return int(ran) / 1e9, int(queued) / 1e9


def _count() -> int:
    """A millisecond of bytecode."""
    number = 0
    for _ in range(PYTHON_STEPS):
        number += 1
    return number


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
