"""Three trainers on one store while everything goes wrong, and what must hold all the same.

    python tests/soak/soak.py --seconds 600 [--dir FOLDER] [--seed 0]

The trainers compute the same deterministic run and save different steps of it. They are killed at a
random operation of the store or at a random moment, their disk is slow or full (a quota), and the
newest checkpoint is damaged now and then. It ends with code 0 if

- every resume began with exactly the state that a run without trouble has at that step,
- no resume began before the newest checkpoint that was committed and not damaged,
- the disk never held more than the quota and one save of each trainer,
- the event file tells of commits, deletions and resumes, of saves that failed or
  made room where the disk was full,
  and of rejected checkpoints where one was damaged.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ckptfmt
from ckptfmt import CkptWarning, Manager, StorageError, Store, hooks
from ckptfmt.storage import open_backend
from ckptfmt.testing import FaultyBackend, Operation

TRAINERS = 3
KEPT = 3
STATE_NBYTES = 1_000_000
QUOTA_NBYTES = 10 * STATE_NBYTES
STEP_S = 0.15
SETTLED_S = 0.25
"""So long after its event a checkpoint may be damaged: the event comes just after the commit."""
COMMITS_BETWEEN = 6
"""From one damage to the next: on a slow machine too the run is to get on."""


def beginning() -> dict[str, Any]:
    return {"w": np.zeros(STATE_NBYTES // 8), "rng": np.random.default_rng(7), "step": 0}


def advance(state: dict[str, Any]) -> None:
    """One step: what follows depends on every bit of what was before."""
    rng: np.random.Generator = state["rng"]
    state["w"] *= 0.9
    state["w"] += rng.standard_normal(state["w"].shape)
    state["step"] += 1


def digest(state: dict[str, Any]) -> str:
    text = json.dumps([state["step"], state["rng"].bit_generator.state], sort_keys=True)
    return hashlib.sha256(state["w"].tobytes() + text.encode()).hexdigest()


def used_nbytes(folder: Path) -> int:
    """Of a store, less what is set aside: that stays until a person has looked at it."""
    total = -STATE_NBYTES * sum(1 for _ in folder.glob("quarantine/*.index"))
    for where, _, files in os.walk(folder):  # which passes over folders that go meanwhile
        for name in files:
            try:
                total += os.stat(os.path.join(where, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


# -- a trainer --------------------------------------------------------------------------------------


def train(folder: Path, number: int, life: int) -> None:
    """Until it is killed. What goes wrong in this life is drawn from its number."""
    rng = random.Random(f"{folder.name}/{number}/{life}")
    fault = rng.choice(["none", "none", "kill", "kill", "slow"])
    backend = FaultyBackend(
        FaultyBackend(
            open_backend(folder / "store"),
            fail_at=0,
            mode="from",
            error=full,
            only=lambda operation: is_full(folder / "store", operation),
        ),
        fail_at=rng.randrange(20, 400) if fault == "kill" else None,
        mode="kill",
        when=rng.choice(["before", "after"]),
        delay_s=0.02 if fault == "slow" else 0.0,
    )
    state, resumes = beginning(), folder / f"resumes-{number}.jsonl"
    told = hooks.jsonl(folder / "events.jsonl")
    store: Any = Store(backend)  # type: ignore[arg-type]
    with Manager(store, keep=KEPT, hooks=[told], on_error="continue") as manager:
        began_s = time.time()
        step = manager.restore(state).step
        with resumes.open("a") as file:
            line = {"began_s": began_s, "step": step, "digest": digest(state), "fault": fault}
            file.write(json.dumps(line) + "\n")
        while True:
            advance(state)
            time.sleep(STEP_S)
            if state["step"] % TRAINERS == number:
                manager.save(state, step=state["step"])


def is_full(store: Path, operation: Operation) -> bool:
    """Whether the quota refuses an operation: a disk with no room for data has some for documents."""
    if operation.kind not in ("create", "write", "put_if_absent"):
        return False
    spare = 0 if operation.key.startswith(("data/", "tmp/")) else STATE_NBYTES
    return used_nbytes(store) > QUOTA_NBYTES + spare


def full(operation: Operation) -> BaseException:
    return StorageError(
        "the disk is full",
        reason="no-space",
        where=operation.key,
        errno=errno.ENOSPC,
        do="make room",
    )


# -- what kills and damages -------------------------------------------------------------------------


def damage(path: Path) -> bool:
    try:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        return True
    except FileNotFoundError:
        return False


def damage_newest(folder: Path, damaged: dict[int, list[float]]) -> int | None:
    """Flip a bit of the newest checkpoint, if it was committed a while ago and an older one is there."""
    store, committed = Store(folder / "store"), commits(folder)
    steps = store.steps()
    told_s = committed.get(steps[-1], time.time()) if steps else time.time()
    last_s = max((when_s for times in damaged.values() for when_s in times), default=0.0)
    since = sum(when_s > last_s for when_s in committed.values())
    if (
        len(steps) < 2
        or since < COMMITS_BETWEEN
        or told_s < last_s
        or told_s > time.time() - SETTLED_S
    ):
        return None
    try:
        with store.open(steps[-1]) as checkpoint:
            file = checkpoint.index.files.ids[0]
    except ckptfmt.CheckpointError:
        return None  # deleted or replaced meanwhile
    return steps[-1] if damage(folder / "store" / "data" / file) else None


def commits(folder: Path) -> dict[int, float]:
    """Step -> when its last commit was told."""
    path = folder / "events.jsonl"
    events = hooks.read_jsonl(path) if path.exists() else []
    return {e["step"]: e["time_s"] for e in events if e["kind"] == "save.commit"}


def disturb(folder: Path, seconds: float, seed: int) -> tuple[dict[int, list[float]], int]:
    """Run the trainers, kill and damage; gives step -> when it was damaged, and the most bytes held."""
    rng, until = random.Random(seed), time.monotonic() + seconds
    lives = [0] * TRAINERS
    running: list[subprocess.Popen[bytes] | None] = [None] * TRAINERS
    damaged: dict[int, list[float]] = {}
    most = 0
    kill_at = damage_at = time.monotonic() + 3
    try:
        while time.monotonic() < until:
            for number, process in enumerate(running):
                if process is None or process.poll() is not None:
                    if process is not None and process.returncode != -9:
                        raise SystemExit(f"trainer {number} ended with {process.returncode}")
                    arguments = ["--dir", str(folder), "--trainer", str(number)]
                    running[number] = subprocess.Popen(
                        [sys.executable, __file__, *arguments, "--life", str(lives[number])]
                    )
                    lives[number] += 1
            now_s = time.monotonic()
            if now_s > kill_at:
                victim = running[rng.randrange(TRAINERS)]
                assert victim is not None
                victim.kill()
                kill_at = now_s + rng.uniform(2, 8)
            if now_s > damage_at:
                step = damage_newest(folder, damaged)
                if step is not None:
                    damaged.setdefault(step, []).append(time.time())
                    damage_at = now_s + rng.uniform(2, 6)
                    for process in running:  # so that the next restore finds it
                        if process is not None:
                            process.kill()
            most = max(most, used_nbytes(folder / "store"))
            time.sleep(0.1)
    finally:
        for process in running:
            if process is not None:
                process.kill()
                process.wait()
    return damaged, most


# -- what must hold ---------------------------------------------------------------------------------


def references(most: int) -> Iterator[tuple[int, str]]:
    state = beginning()
    yield 0, digest(state)
    for step in range(1, most + 1):
        advance(state)
        yield step, digest(state)


def judge(folder: Path, damaged: dict[int, list[float]], most: int) -> list[str]:
    """What went wrong, as sentences."""
    resumes = [
        json.loads(line)
        for path in sorted(folder.glob("resumes-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    events = hooks.read_jsonl(folder / "events.jsonl")
    state = beginning()
    newest = Manager(folder / "store").restore(state).step
    exact = dict(references(max(newest, *(resume["step"] for resume in resumes))))
    wrong = [f"not exact: {r}" for r in resumes if exact[r["step"]] != r["digest"]]
    told = [(e["step"], e["time_s"]) for e in events if e["kind"] == "save.commit"]
    for resume in resumes:
        good = [
            step
            for step, when_s in told
            if when_s < resume["began_s"] and not any(d > when_s for d in damaged.get(step, ()))
        ]
        if resume["step"] < max(good, default=0):
            wrong.append(f"lost: step {max(good)} was good, and this began before: {resume}")
    if most > QUOTA_NBYTES + TRAINERS * 2 * STATE_NBYTES:
        wrong.append(f"the disk held {most:,} bytes, over a quota of {QUOTA_NBYTES:,}")
    kinds = [event["kind"] for event in events]
    expected = ["save.commit", "delete", "restore.done"]
    if sum(map(len, damaged.values())) > 1:  # the last one may have met no restore
        expected.append("restore.rejected")
    full_alarms = [e for e in events if e.get("data", {}).get("alarm") == "full"]
    if most > QUOTA_NBYTES and not full_alarms:
        expected.append("save.error")
    wrong += [f"no event tells of {kind}" for kind in expected if kind not in kinds]
    if exact[newest] != digest(state):
        wrong.append(f"at the end not exact: {newest}")
    print(
        f"{len(resumes)} resumes, {kinds.count('save.commit')} commits, "
        f"{sum(map(len, damaged.values()))} damaged, {kinds.count('restore.rejected')} rejected, "
        f"{kinds.count('save.error')} failed saves, {len(full_alarms)} that made room, {kinds.count('delete')} deleted, "
        f"at most {most:,} bytes, newest step {newest}"
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Three trainers on one store, and much trouble.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--dir", type=Path, help="an empty folder on the disk to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--life", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.trainer is not None:
        train(asked.dir, asked.trainer, asked.life)
    with tempfile.TemporaryDirectory(dir=asked.dir, prefix="soak-") as name:
        folder = Path(name)
        damaged, most = disturb(folder, asked.seconds, asked.seed)
        wrong = judge(folder, damaged, most)
    print("\n".join(wrong) or "all held")
    return 1 if wrong else 0


if __name__ == "__main__":
    # The event file tells of all of it.
    warnings.simplefilter("ignore", CkptWarning)
    logging.disable(logging.CRITICAL)
    sys.exit(main())
