"""Rounds of a benchmark: each peer lives in a process of its own, all see the same rounds, in an
order that is shuffled anew for each, so that what else the machine does hits none of them alone.

A peer is a class: `Peer(options)` makes its data, `operations(folder)` gives what is timed, in order. A benchmark's `main` calls `measure`; in a child process the same file is started with
`--peer` and ends in `serve`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

Timing = dict[str, float]
"""`seconds` by the clock, `cpu_s` of all threads of the process."""
Round = dict[str, dict[str, Timing]]
"""Peer -> operation -> timing."""


class Numbers(dict[str, float]):
    """What an operation that is timed has counted besides: bytes written, a speed."""


class Peer(Protocol):
    """What is compared."""

    def __init__(self, options: Mapping[str, Any]) -> None: ...
    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        """Name -> what is timed; run in this order, in an empty folder, once a round.

        What `prepare ...` does is not timed. Before `cold ...` all files below `folder.parent`
        leave the page cache: they stay from round to round if they are not in `folder`.
        """
        ...

    def check(self, result: object) -> None:
        """Raise unless this, of the last operation, is the data."""
        ...


def evict(folder: Path) -> None:
    """Take a folder's files out of the page cache: the next read comes from the disk."""
    gc.collect()  # what is still mapped would stay
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def sync(*paths: Path) -> None:
    """fsync files and folders, for peers that do not do it themselves."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure(
    script: str,
    peers: Mapping[str, type[Any]],
    folder: Path,
    options: Mapping[str, Any],
    rounds: int,
    *,
    fresh: bool = False,
    warm: bool = True,
) -> list[Round]:
    """Start a process for each peer and run the rounds; one more before them is not counted.

    Args:
        warm: Whether there is that one.
        fresh: A new process for each peer and round: nothing is warm, one peer is in memory.
    """
    order, made = random.Random(0), list[Round]()
    start = partial(_start, script, folder=folder, options=options)
    children = {} if fresh else {name: start(name) for name in peers}
    try:
        for number in range(0 if warm else 1, rounds + 1):
            names = list(peers)
            order.shuffle(names)
            timings: dict[str, dict[str, Timing]] = {}
            for name in names:
                child = children[name] if name in children else start(name)
                try:
                    timings[name] = _ask(child, number)
                finally:
                    if fresh:
                        _end(child)
            if number:
                made.append(timings)
            print(f"round {number} of {rounds}" if number else "warm", file=sys.stderr)
    finally:
        for child in children.values():
            _end(child)
    return made


def _end(child: subprocess.Popen[str]) -> None:
    with child:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(timeout=600)


def _start(
    script: str, name: str, *, folder: Path, options: Mapping[str, Any]
) -> subprocess.Popen[str]:
    command = [sys.executable, script, "--peer", name, str(folder / name), json.dumps(options)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def _ask(child: subprocess.Popen[str], number: int) -> dict[str, Timing]:
    assert child.stdin is not None
    assert child.stdout is not None
    print(number, file=child.stdin, flush=True)
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"a peer ended early: {' '.join(map(str, child.args))}")  # type: ignore[arg-type]
    answer: dict[str, Timing] = json.loads(line)
    return answer


def serve(peers: Mapping[str, type[Any]], arguments: list[str]) -> None:
    """A peer's process: a round for each line that comes in."""
    name, folder = arguments[0], Path(arguments[1])
    peer = peers[name](json.loads(arguments[2]))
    for line in sys.stdin:
        place = folder / f"round-{int(line)}"
        place.mkdir(parents=True)
        timings: dict[str, Timing] = {}
        result: object = None
        for operation, run in peer.operations(place).items():
            result = None
            if operation.startswith("prepare"):
                run()
                continue
            if operation.startswith("cold"):
                evict(folder)
            cpu, begin = time.process_time(), time.perf_counter()
            result = run()
            timings[operation] = {
                "seconds": time.perf_counter() - begin,
                "cpu_s": time.process_time() - cpu,
            }
            if isinstance(result, Numbers):
                timings[operation] |= result
        peer.check(result)
        del result
        shutil.rmtree(place)
        print(json.dumps(timings), flush=True)
