"""The real save and the real collector, stepped through random orders of their store operations.

`test_gc_model.py` explores a model exhaustively; here the code itself runs, one thread at a time, and
a lot decides before each operation on the store who goes on, how far the store's clock moves (up to
days, so that open saves are overlooked), and whether somebody dies.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from ckptfmt.engine import commit, gc
from ckptfmt.engine.catalog import list_checkpoints, read_index
from ckptfmt.engine.commit import withdraw
from ckptfmt.engine.coordinate import gc_lists, new_txn, put_list
from ckptfmt.engine.gc import collect
from ckptfmt.engine.plan import SaveOptions
from ckptfmt.engine.request import SaveRequest
from ckptfmt.engine.save import save_tree
from ckptfmt.errors import ConflictError
from ckptfmt.storage import Backend, Buffer, Capabilities, Entry, Writer
from ckptfmt.storage.memory import MemoryBackend, _Space
from ckptfmt.types import Key

SCHEDULES = 250
TREE = {"w": np.arange(1000.0)}


class Killed(BaseException):
    """Whoever gets it is dead: every further operation of that thread raises it too."""


@dataclass
class Task:
    name: str
    call: Callable[[], object]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    killed: bool = False
    at_commit: bool = False
    over: bool = False
    outcome: object = None


class Clock(_Space):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1e6

    def put(self, key: str, data: bytes | bytearray) -> None:
        super().put(key, data)
        self.objects[key] = (self.objects[key][0], self.now)


class Stage:
    """Lets one task at a time do one operation on the store."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.inner = MemoryBackend()
        self.clock = self.inner._space = Clock()
        self.tasks: list[Task] = []
        self._back = threading.Semaphore(0)
        self._of_thread: dict[int, Task] = {}

    def add(self, name: str, call: Callable[[], object]) -> Task:
        task = Task(name, call)
        self.tasks.append(task)
        return task

    def step(self, *, commit: bool = False) -> None:
        """Called before an operation: waits for this task's turn."""
        task = self._of_thread.get(threading.get_ident())
        if task is None:
            return  # a thread that writes into an object nobody sees yet
        task.at_commit = commit
        if not task.killed:
            self._back.release()
            task.turn.acquire()
        if task.killed:
            raise Killed

    def run(self) -> None:
        for task in self.tasks:
            task.thread = threading.Thread(target=self._live, args=(task,))
            task.thread.start()
        # Half of the schedules are mixed evenly. In the others each runs as far as it can, the first
        # in the row first, and at a few moments the one that runs goes to the end of the row: holes
        # that need one wait at one place are found there far sooner.
        even, row = self.rng.random() < 0.5, self.rng.sample(self.tasks, len(self.tasks))
        moments = {self.rng.randrange(150) for _ in range(3)}
        for moment in itertools.count():
            alive = [task for task in row if not task.over]
            if not alive:
                break
            if alive[0].at_commit and self.rng.random() < 0.5:
                moments.add(moment)
            if moment in moments:
                row.append(row.pop(row.index(alive[0])))
                alive.append(alive.pop(0))
            task = self.rng.choice(alive) if even else alive[0]
            self.clock.now += self.rng.choice([0.0] * 10 + [1.0] * 10 + [700.0] * 2)
            day = self.rng.random() < (0.04 if even else 0.7 * (moment in moments))
            if day and not self.is_deleting():
                self.clock.now += 1e5
            task.killed = self.rng.random() < 0.003
            task.turn.release()
            self._back.acquire()
        for task in self.tasks:
            assert task.thread is not None
            task.thread.join()

    def is_deleting(self) -> bool:
        """Whether a living collector has its list up: that none is stalled for a day *inside one
        deletion* is the one thing that the protocol takes for granted."""
        return any(
            found.owner is not None and not found.owner.is_dead(found.run)
            for found in gc_lists(self.inner)
        )

    def _live(self, task: Task) -> None:
        self._of_thread[threading.get_ident()] = task
        try:
            task.turn.acquire()
            task.outcome = task.call()
        except (Killed, ConflictError) as error:
            task.outcome = error
        except BaseException as error:
            task.outcome = error
            raise
        finally:
            task.over = True
            self._back.release()


class Stepped(Backend):
    def __init__(self, stage: Stage) -> None:
        self.stage, self.inner, self.url = stage, stage.inner, stage.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def get(
        self, key: Key, start: int = 0, stop: int | None = None, out: memoryview | None = None
    ) -> memoryview:
        self.stage.step()
        return self.inner.get(key, start, stop, out)

    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        return SteppedWriter(self.stage, self.inner.create(key, nbytes))

    def put_if_absent(self, key: Key, data: Buffer, *, durable: bool) -> bool:
        self.stage.step(commit=True)
        return self.inner.put_if_absent(key, data, durable=durable)

    def list(self, prefix: str, start_after: str = "") -> Iterator[Entry]:
        self.stage.step()
        return iter(list(self.inner.list(prefix, start_after)))

    def stat(self, key: Key) -> Entry | None:
        self.stage.step()
        return self.inner.stat(key)

    def delete(self, key: Key) -> None:
        self.stage.step()
        self.inner.delete(key)

    def sync(self, keys: Iterable[Key]) -> None:
        self.stage.step()


class SteppedWriter(Writer):
    def __init__(self, stage: Stage, inner: Writer) -> None:
        self.stage, self.inner = stage, inner

    def write(self, offset: int, buffer: Buffer) -> None:
        self.inner.write(offset, buffer)

    def finish(self, *, durable: bool, key: Key | None = None) -> None:
        self.stage.step()
        self.inner.finish(durable=durable, key=key)

    def abort(self) -> None:
        self.inner.abort()


def save(backend: Backend, name: str, *, reuse: bool = True) -> object:
    request = SaveRequest(
        name=name,
        step=None,
        metadata={},
        metrics={},
        if_exists="error",
        options=SaveOptions(),
        bases=None if reuse else [],
    )
    return save_tree(TREE, backend, request)


def delete(backend: Backend, name: str) -> object:
    for listed in list_checkpoints(backend).get(name, []):
        withdraw(backend, listed)
    return None


def missing(backend: Backend, name: str) -> set[str]:
    """Data files that a checkpoint refers to and that are not there, whole."""
    bad: set[str] = set()
    for listed in list_checkpoints(backend).get(name, []):
        files = read_index(backend, listed).files
        for i, nbytes in zip(files.ids, files.nbytes.tolist()):
            entry = backend.stat(Key(f"data/{i}"))
            if entry is None or entry.nbytes != nbytes:
                bad.add(i)
    return bad


@pytest.fixture(autouse=True)
def _real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "_clock", gc._clock)  # put back after the schedules set theirs


@dataclass
class Seen:
    conflicts: int = 0
    killed: int = 0
    saved: int = 0
    salted: int = 0
    deleted: int = 0
    lost: int = 0


def play(seed: int, seen: Seen) -> None:
    """One schedule: two saves of the base's content, retention, two collectors."""
    stage = Stage(seed)
    gc._clock = lambda: stage.clock.now
    inner, backend, rng = stage.inner, Stepped(stage), stage.rng
    save(inner, "base")
    (first,) = [entry.key[5:] for entry in inner.list("data/")]
    if rng.random() < 0.5:  # it is garbage already, and on a list
        delete(inner, "base")
        put_list(inner, new_txn(), frozenset({first}), None)
    stage.clock.now += 1000
    savers = [
        stage.add("one", lambda: save(backend, "one")),
        stage.add("two", lambda: save(backend, "two", reuse=False)),
    ]
    stage.add("retention", lambda: delete(backend, "base"))
    doomed = rng.random() < 0.3
    if doomed:
        stage.add("more retention", lambda: delete(backend, "one"))
    for number in range(2):
        graces = [rng.choice([0.0, 600.0]) for _ in range(2)]

        def twice(graces: list[float] = graces) -> list[object]:
            return [collect(backend, grace_s=grace_s) for grace_s in graces]

        stage.add(f"gc {number}", twice)
    stage.run()
    for task in stage.tasks:
        seen.killed += isinstance(task.outcome, Killed)
        if isinstance(task.outcome, list):
            seen.deleted += sum(len(report.deleted) for report in task.outcome)
    for task in savers:
        if isinstance(task.outcome, Killed):
            continue
        if isinstance(task.outcome, ConflictError):
            seen.conflicts += 1
            assert task.name not in list_checkpoints(inner), f"seed {seed}: not withdrawn"
            continue
        assert getattr(task.outcome, "name", None) == task.name, f"seed {seed}: {task.outcome!r}"
        seen.saved += 1
        seen.lost += bool(missing(inner, task.name))
        assert doomed or task.name in list_checkpoints(inner), f"seed {seed}: not visible"
    seen.salted += any(entry.key[5:] != first for entry in inner.list("data/"))
    stage.clock.now += 1e6
    collect(inner, grace_s=0)
    referred: set[str] = set()
    for generations in list_checkpoints(inner).values():
        for listed in generations:
            referred |= set(read_index(inner, listed).files.ids)
    left = {entry.key[5:] for entry in inner.list("data/")}
    assert left <= referred, f"seed {seed}: space is not returned"
    for folder in ("gc/", "parts/", "tmp/"):
        assert list(inner.list(folder)) == [], f"seed {seed}: litter in {folder}"


def test_no_schedule_of_the_real_code_loses_a_file() -> None:
    seen = Seen()
    for seed in range(SCHEDULES):
        play(seed, seen)
        assert not seen.lost, f"seed {seed}: a save reported success and its file is gone"
    # The schedules are worth something: everything that can happen did.
    assert min(seen.conflicts, seen.killed, seen.saved, seen.salted, seen.deleted) > 5, seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_schedule_of_the_real_code_loses_a_file_however_many() -> None:
    seen = Seen()
    start = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {start}")
    for seed in range(start, start + 20 * SCHEDULES):
        play(seed, seen)
        assert not seen.lost, f"seed {seed}: a save reported success and its file is gone"


def test_a_save_that_does_not_check_after_its_commit_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commit, "unusable", lambda backend, files: set())
    seen = Seen()
    for seed in range(20 * SCHEDULES):
        play(seed, seen)
        if seen.lost:
            return
    pytest.fail("the schedules are too tame to find a hole")
