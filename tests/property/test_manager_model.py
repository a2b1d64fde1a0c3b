"""The whole manager against a model: random programs of a training loop on a store that fails.

A program saves, restores, tags, annotates, prunes, is preempted, killed and begun again, while storage
calls fail before or after they took effect, disks fill up, and the newest data rots. The oracle is what
was given to `save`, and an unharmed look at what the store holds. Invariants after each operation: the
newest good checkpoint of the living line stays; a tagged one stays, or is set aside; what is gone was
told by an event; a restore gives exactly what was saved at that step. At the end: the count is bounded,
the latest opens, no thread and no temporary file is left.

`CKPTFMT_PROGRAMS=20000 pytest -m slow` of this file runs so many; a failure names its seed.
"""

from __future__ import annotations

import errno
import math
import os
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Event, Manager, Mirror, Preemption, Store, keep, when
from ckptfmt.engine import owner
from ckptfmt.errors import CheckpointError, StorageError
from ckptfmt.manager import aftermath, manager, mirror, pruning
from ckptfmt.storage import Backend
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.testing import FaultyBackend

pytestmark = pytest.mark.usefixtures("expecting_failures")

FROZEN = np.arange(600, dtype=np.float32)
LONGEST = 25
"""Operations of a program."""


def state(value: int) -> dict[str, Any]:
    noise = np.random.default_rng(value).integers(0, 256, 700, np.uint8)
    return {"frozen": FROZEN, "w": noise, "value": value}


def store_over(backend: Backend) -> Store:
    store = Store("memory://")
    store.backend, store.url = backend, backend.url
    return store


def copy_of(backend: Backend) -> MemoryBackend:
    """The same objects, to be looked at without changing anything."""
    made = MemoryBackend("memory://")
    for entry in list(backend.list("")):
        made.put(entry.key, bytes(backend.get(entry.key)))
    return made


class Clock:
    """Of the manager's modules: time passes when a program says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return time.time()


@dataclass
class Program:
    """One run of random operations.

    Attributes:
        given: Step -> every value that was ever given to `save` under it.
        good: Step -> value, of those in `checkpoints/` that can be read whole.
        known: Every name in `checkpoints/` when it was last looked at.
        line: The newest good one of the living line: whatever comes, it or a newer one is there.
        reached: The step up to which that line was saved: a newer one is left, and may be set aside.
        told: Names that a `delete` event named since the last look.
        others: Threads that were there before.
    """

    rng: random.Random
    clock: Clock
    inner: MemoryBackend = field(default_factory=lambda: MemoryBackend("memory://"))
    second: MemoryBackend = field(default_factory=lambda: MemoryBackend("memory://"))
    given: dict[int, set[int]] = field(default_factory=dict)
    good: dict[int, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    tagged: dict[str, tuple[int, int]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    line: int | None = None
    step: int = 0
    reached: int = 0
    count: int = 0
    log: list[str] = field(default_factory=list)
    others: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))

    def begin(self) -> None:
        rng = self.rng
        self.store = store_over(self.inner)
        self.preemption = Preemption(signals=()) if rng.random() < 0.2 else None
        n, best = rng.randint(1, 3), rng.randint(1, 2)
        rules = [keep.last(n)]
        self.bound: float = n
        if rng.random() < 0.5:
            rules.append(keep.best("m", best, rng.choice(["min", "max"])))
            self.bound += best
        if rng.random() < 0.3:
            rules.append(keep.every(steps=7))
            self.bound = math.inf
        if rng.random() < 0.2:
            rules.append(keep.quarantined(1))
        self.policy = rules[0]
        for rule in rules[1:]:
            self.policy = self.policy | rule
        if rng.random() < 0.15:
            self.policy, self.bound = None, math.inf  # type: ignore[assignment]
        a, b = when.every(steps=rng.randint(1, 3)), when.every(minutes=rng.randint(1, 3))
        self.manager = Manager(
            self.store,
            keep=self.policy,
            save_when=rng.choice([None, a, b, a | b, a & b]),
            asynchronous=rng.random() < 0.5,
            when_busy=rng.choice(["wait", "skip"]),
            on_error=rng.choice(["raise", "continue"]),
            hooks=[self.hook],
            mirror=Mirror(store_over(self.second), keep=rng.choice([None, 2]))
            if self.mirrored
            else None,
            preemption=self.preemption,
        )

    @property
    def mirrored(self) -> bool:
        return bool(self.second_used)

    second_used: bool = False

    def hook(self, event: Event) -> None:
        if event.kind == "delete" and event.data.get("url") is None:
            self.told.add(str(event.checkpoint))
        if self.rng.random() < 0.02:
            raise RuntimeError("a hook that fails")

    # -- faults -----------------------------------------------------------------------------------

    def fault(self) -> None:
        """The store will fail once in a while, or from some call on."""
        rng = self.rng
        code, reason = rng.choice([(errno.EIO, "io"), (errno.ENOSPC, "no-space")])

        def error(operation: Any) -> BaseException:
            return StorageError(
                "a fault", reason=reason, where=operation.key, errno=code, retryable=False
            )

        self.store.backend = FaultyBackend(
            self.inner,
            fail_at=rng.randint(0, 60),
            mode=rng.choice(["once", "once", "from"]),
            when=rng.choice(["before", "half", "after"]),
            error=error,
        )

    def heal(self) -> None:
        self.store.backend = self.inner

    # -- the loop ---------------------------------------------------------------------------------

    def save(self) -> None:
        rng = self.rng
        self.step += rng.randint(1, 3)
        self.clock.now_s += rng.choice([0.0, 20.0, 90.0])
        self.count += 1
        value = 1000 * self.step + self.count
        force = rng.random() < 0.3
        due = self.manager.should_save(self.step)
        must = force or (self.preemption is not None and self.preemption.requested)
        self.given.setdefault(self.step, set()).add(value)
        metrics = rng.choice([{}, {"m": math.nan}, {"m": rng.random()}, {"m": math.inf}])
        tree = state(value)
        future = self.manager.save(tree, step=self.step, metrics=metrics, force=force)
        tree["w"][:] = 0  # the loop goes on
        if not (due or must):
            assert future is None, "saved, though not due"
        if future is not None:
            self.reached = self.step
        if rng.random() < 0.5:
            self.manager.wait()

    def restore(self) -> None:
        mine = state(0)
        before = mine["w"].copy()
        at = self.rng.choice([None, None, *sorted(self.good)])
        try:
            self.manager.wait()
        except CheckpointError:
            pass
        good = self.readable()
        try:
            report = self.manager.restore(mine, at=at)
        except CheckpointError:
            assert mine["value"] == 0, "a restore that failed changed the target"
            np.testing.assert_array_equal(mine["w"], before)
            raise
        if not report:
            assert not good, "a fresh start, though there is a good checkpoint"
            self.step = self.reached = 0
            return
        value = mine["value"]
        assert value in self.given[report.step], f"step {report.step} is not what was saved"
        np.testing.assert_array_equal(mine["w"], state(value)["w"])
        np.testing.assert_array_equal(mine["frozen"], FROZEN)
        if self.store.backend is self.inner and not self.mirrored:
            if at is not None:
                assert report.step == at
            else:
                assert report.step == max(good), "not the newest that is good"
        self.step = report.step
        self.line = self.reached = report.step

    def tag(self) -> None:
        if self.good:
            step = self.rng.choice(sorted(self.good))
            name = self.rng.choice(["best", "production"])
            try:
                self.store.tag(name, step)
            except CheckpointError:
                self.tagged.pop(name, None)  # old, new or none
                raise
            self.tagged[name] = (step, self.good[step])

    def annotate(self) -> None:
        step = self.rng.choice([*sorted(self.good), 999])
        self.manager.annotate(step, m=self.rng.choice([math.nan, 0.5, -math.inf, 2.0]))

    def prune(self) -> None:
        self.manager.prune(dry_run=self.rng.random() < 0.3)

    def collect(self) -> None:
        self.store.gc(grace_s=self.rng.choice([0.0, 600.0]))

    def preempt(self) -> None:
        if self.preemption is not None:
            self.preemption.request(30.0)

    def rot(self) -> None:
        """A bit of the newest goes: of its index, or of a data file that no other has."""
        with suppress(CheckpointError):
            self.manager.wait()
        found = [e for e in self.inner.list("checkpoints/") if e.key.endswith(".index")]
        if not found or len(self.readable()) < 2:
            return
        entry = found[-1]
        if self.rng.random() < 0.5:
            data = list(self.inner.list("data/"))
            texts = {e.key: bytes(self.inner.get(e.key)) for e in found}
            own = [
                d
                for d in data
                if [k for k, t in texts.items() if bytes.fromhex(d.key[5:]) in t] == [entry.key]
            ]
            entry = self.rng.choice(own) if own else entry
        content = bytearray(self.inner.get(entry.key))
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        self.inner.put(entry.key, content)
        self.good = self.readable()
        self.line = max((s for s in self.good if s <= (self.line or 0)), default=None)
        self.tagged = {t: row for t, row in self.tagged.items() if self.good.get(row[0]) == row[1]}

    def end(self, *, killed: bool) -> None:
        """Close it; or leave it lying there, as a kill does."""
        last = self.manager._flight.last
        if killed:
            if last is not None:
                last.after.exception()
                last.future.exception()
            if self.manager._mirroring is not None:
                self.manager._mirroring.close(5.0)
            self.heal()
            owner._active.clear()
        else:
            try:
                self.manager.close()
            except CheckpointError:
                pass
            with suppress(CheckpointError):
                self.manager.close()  # twice is as good as once
        if self.preemption is not None:
            self.preemption.uninstall()

    # -- what holds -------------------------------------------------------------------------------

    def readable(self, backend: Backend | None = None) -> dict[int, int]:
        """Step -> value, of what can be read whole, of the store or of its mirror."""
        there = store_over(copy_of(backend or self.inner))
        made = {}
        for step in there.steps():
            with suppress(CheckpointError):
                found = ckptfmt.load(there, step=step)
                made[step] = int(found["value"])
                np.testing.assert_array_equal(found["w"], state(made[step])["w"])
        return made

    def check(self) -> None:
        last = self.manager._flight.last
        if last is not None:
            last.after.exception()
        faulty = self.store.backend
        dead = isinstance(faulty, FaultyBackend) and faulty.fired and faulty._mode == "from"
        self.heal()
        now, names = self.readable(), set(store_over(self.inner).names())
        for step, value in now.items():
            assert value in self.given[step], f"step {step} holds what nobody saved"
        aside = {e.key.split("/")[1].split("~")[0] for e in self.inner.list("quarantine/")}
        unsaid = self.known - names - aside - self.told
        # Where the store does not answer any more, nobody can know what it did.
        assert not unsaid or dead, f"{unsaid} are gone, and no event says so"
        for step in self.good.keys() & now.keys():
            if f"step-{step:016d}" not in aside | self.told:
                assert now[step] == self.good[step], f"step {step} became another one"
        self.told -= names
        if self.line is not None and (self.line not in self.readable(self.second)):
            assert max(now, default=-1) >= self.line, f"the last good one, {self.line}, is lost"
        for tag, (step, _) in self.tagged.items():
            name = f"step-{step:016d}"
            assert name in names | aside, f"{name}, tagged {tag}, is gone"
        on = [step for step in now if (self.line or 0) <= step <= self.reached]
        self.line = max(on, default=self.line)
        self.good, self.known = now, names

    def run(self) -> None:
        rng = self.rng
        self.second_used = rng.random() < 0.2
        self.begin()
        actions = [self.save] * 10 + [self.restore] * 2 + [self.tag, self.annotate, self.prune]
        actions += [self.collect, self.preempt, self.rot]
        for _ in range(rng.randint(5, LONGEST)):
            do = rng.choice(actions)
            faulty = rng.random() < 0.25 and do != self.rot
            if faulty:
                self.fault()
            self.log.append(f"{do.__name__}{' with a fault' if faulty else ''}")
            try:
                do()
            except CheckpointError as error:
                self.log[-1] += f": {type(error).__name__} {error.kind}"
            self.log[-1] += f" at {self.step}"
            self.check()
            if rng.random() < 0.12:
                killed = rng.random() < 0.6
                self.log.append("killed" if killed else "closed")
                self.end(killed=killed)
                self.check()
                self.begin()
        self.end(killed=False)
        self.check()
        self.finish()

    def finish(self) -> None:
        """A run of good days: everything comes back to order."""
        self.second_used = False
        self.begin()
        self.preemption = None
        self.manager.close()
        last = Manager(self.store, keep=self.policy, hooks=[self.hook], asynchronous=False)
        mine = state(0)
        report = last.restore(mine)
        assert report.step in self.good or not self.good
        for step in range(report.step + 1, report.step + 4):
            self.count += 1
            value = 1000 * step + self.count
            self.given.setdefault(step, set()).add(value)
            last.save(state(value), step=step, force=True)
        last.close()
        self.manager = last
        self.check()
        newest = report.step + 3
        assert self.store.steps()[-1] == newest
        assert ckptfmt.load(self.store)["value"] in self.given[newest]
        if self.bound < math.inf:
            assert len(self.store.steps()) <= self.bound + len(self.tagged) + 2
        owner._active.clear()
        self.give_up()
        self.store.gc(grace_s=0)
        assert self.store.verify().ok
        left = [e.key for e in self.inner.list("") if e.key.startswith(("tmp/", "parts/", "gc/"))]
        assert not left, f"left: {left}"
        new = [t for t in threading.enumerate() if t not in self.others]
        for thread in new:
            thread.join(30)
        assert not any(thread.is_alive() for thread in new), f"left: {new}"

    def give_up(self) -> None:
        """What rotted, as a person would: a collector stops at an index that it cannot read."""
        there = store_over(copy_of(self.inner))
        for entry in list(self.inner.list("quarantine/")):
            with suppress(ckptfmt.NotFoundError):
                self.store.delete(entry.key.split("/")[1].split("~")[0], quarantined=True)
        for name in there.names():
            if not there.verify(name).ok:
                self.store.quarantine(name, "rotten")
                self.store.delete(name, quarantined=True)


def run_programs(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        clock = Clock()
        for module in (manager, pruning, aftermath):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(mirror, "BACKOFF_MAX_S", 0.001)
        program = Program(random.Random(seed), clock)
        try:
            program.run()
        except BaseException as error:
            error.add_note(f"seed {seed}: " + "; ".join(program.log))
            raise


def test_random_programs_lose_nothing_and_explain_what_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_programs(range(5), monkeypatch)


@pytest.mark.slow
def test_thousands_of_random_programs_do_too(monkeypatch: pytest.MonkeyPatch) -> None:
    first = int(os.environ.get("CKPTFMT_FIRST", "0"))
    run_programs(range(first, first + int(os.environ.get("CKPTFMT_PROGRAMS", "2000"))), monkeypatch)
