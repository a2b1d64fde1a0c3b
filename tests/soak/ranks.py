"""Three ranks of one job, killed at random and started again alone, and what must hold all the same.

    python tests/soak/ranks.py --kills 6 [--dir FOLDER] [--seed 0]

The ranks meet through files and save at every third step; they wait for each other for up to half an
hour. One after another is killed, or raises an error of its own; the others must hear of it in time to
come to the end. It ends with code 0 if

- every resume began with exactly the state that its checkpoint's step has, on all ranks alike,
- what the others raised was always a ConflictError that names the rank, never one that was late,
- all ranks came to the end, the store verifies, and no file of a meeting is left.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ckptfmt import ConflictError, FileGroup, Manager, Preemption, Sharded, Store

RANKS = 3
STEPS_MIN = 30
"""Before which the run does not end."""
STEP_S = 0.03
UNHEARD = re.compile("0-[1-9]")
"""A first message, of another rank than 0."""
AGE_S = 3600.0
"""After which a collector takes what belongs to nothing."""
ERRORS = 0.01
"""How often a step fails by an error of its own."""


def beginning(rank: int) -> dict[str, Any]:
    part = np.zeros(4)
    return {"w": Sharded((4 * RANKS,), [((4 * rank,), part)]), "same": np.zeros(3), "step": 0}


def set_to(state: dict[str, Any], rank: int, step: int) -> None:
    state["w"].parts[0][1][:] = step * (rank + 1)
    state["same"][:] = state["step"] = step


def is_exact(state: dict[str, Any], rank: int, step: int) -> bool:
    part, same = state["w"].parts[0][1], state["same"]
    return state["step"] == step and bool(
        (part == step * (rank + 1)).all() and (same == step).all()
    )


def train(folder: Path, rank: int) -> None:
    """Until the file `end` is there; who hears of an error restores, and goes on."""
    draw, asynchronous = random.Random(f"{folder} {rank} {os.getpid()}"), rank % 2 == 0
    while True:
        state, notice = beginning(rank), Preemption()
        try:
            with Manager(
                folder / "store", keep=2, save_when=3, group=FileGroup(rank, RANKS),
                preemption=notice, asynchronous=asynchronous,
            ) as manager:  # fmt: skip
                step = manager.restore(state).step
                if not is_exact(state, rank, step):
                    sys.exit(f"rank {rank} began at step {step} with {state}")
                while True:
                    time.sleep(STEP_S)
                    step += 1
                    set_to(state, rank, step)
                    if draw.random() < ERRORS and not (folder / "end").exists():
                        raise ZeroDivisionError("a bad batch")
                    stop = manager.observe(step).stop
                    manager.save(state, step=step, force=stop)
                    if stop:
                        return
                    if rank == 0 and step > STEPS_MIN and (folder / "end").exists():
                        notice.request(60.0)  # which ends all of them at one step
        except ZeroDivisionError:
            continue
        except ConflictError as error:
            if error.reason != "rank-gone":
                sys.exit(f"rank {rank}: {error}")


def disturb(folder: Path, kills: int, seed: int) -> list[str]:
    """Run the ranks and kill them one after another; what went wrong."""
    draw = random.Random(seed)

    def start(rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, __file__, "--dir", str(folder), "--rank", str(rank)]
        )

    running = [start(rank) for rank in range(RANKS)]
    until = time.monotonic() + 60 * (kills + 2)
    try:
        for _ in range(kills):
            time.sleep(draw.uniform(2, 6))
            victim = draw.randrange(RANKS)
            running[victim].kill()
            running[victim].wait()
            time.sleep(draw.uniform(0, 2))
            running[victim] = start(victim)
        (folder / "end").touch()
        while any(process.poll() is None for process in running):
            if time.monotonic() > until:
                return [f"still running: {[r for r in range(RANKS) if running[r].poll() is None]}"]
            time.sleep(0.1)
        codes = [process.returncode for process in running]
        return [f"ranks ended with {codes}"] if any(codes) else []
    finally:
        for process in running:
            process.kill()
            process.wait()


def left_in(folder: Path) -> list[Path]:
    return [path for path in (folder / "store" / "parts").rglob("*") if path.is_file()]


def judge(folder: Path) -> list[str]:
    store = Store(folder / "store")
    wrong = [] if store.verify().ok else ["the store does not verify"]
    last = store.steps()[-1]
    for rank in range(RANKS):
        state = beginning(rank)
        loaded = store.open(last).load()
        state["w"].parts[0][1][:] = loaded["w"][4 * rank : 4 * rank + 4]
        state["same"], state["step"] = loaded["same"], loaded["step"]
        if not is_exact(state, rank, last):
            wrong.append(f"at the end not exact: rank {rank}, step {last}")
    left = left_in(folder)
    # What a killed rank said in a meeting that rank 0 never began has no owner: it goes by its age.
    unheard = {path.parent for path in left}
    unheard -= {path.parent for path in left if not UNHEARD.fullmatch(path.name)}
    for path in left:
        if path.parent in unheard:
            os.utime(path, (time.time() - AGE_S,) * 2)
    store.gc(grace_s=0)
    left = [path for path in left if path.parent not in unheard or path.exists()]
    print(f"{len(store.steps())} checkpoints, the last of step {last}")
    return [*wrong, *(f"left behind: {path}" for path in left)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Three ranks of one job, killed one by one.")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--dir", type=Path, help="an empty folder on the disk to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        train(asked.dir, asked.rank)
        return 0
    with tempfile.TemporaryDirectory(dir=asked.dir, prefix="soak-") as name:
        wrong = disturb(Path(name), asked.kills, asked.seed) or judge(Path(name))
    print("\n".join(wrong) or "all held")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
