"""A backend that goes wrong on purpose, at an operation that a test chooses.

    for k in itertools.count():
        with FaultyBackend(inner, fail_at=k, mode="once") as faulty:
            try:
                save(faulty)
            except CheckpointError:
                pass
        check(inner)                     # the old or the new checkpoint, whole
        if not faulty.fired:
            break                        # the save has fewer than k operations

One operation each: `create`, every `write`, `finish`, `put_if_absent`, `get`, `map`, `list` (the
call, however many entries are taken), `stat`, `delete`, `sync`; `put` is three (create, write,
finish). `abort`, `close` and `capabilities` are not counted and never fail: cleaning up after a
failure must not hide it. Numbers start at 0; with several threads writing, which write is number k
may change from run to run, the number of operations does not.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ckptfmt.errors import StorageError, UsageError
from ckptfmt.storage import Backend, Buffer, Capabilities, Entry, Writer, open_backend
from ckptfmt.testing.power import PowerModel
from ckptfmt.types import Key

Kind = Literal[
    "create", "write", "finish", "put_if_absent", "get", "map", "list", "stat", "delete", "sync"
]
Mode = Literal["once", "from", "kill"]
When = Literal["before", "half", "after"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One counted operation; `key` is what it was called with (of `sync`: the first key)."""

    number: int
    kind: Kind
    key: str


class FaultyBackend(Backend):
    """Passes everything on to `inner`, but for the faults asked for.

    Args:
        inner: The backend that does the work. It is not closed by this one.
        fail_at: Number of the operation that fails; None: none does.
        mode: "once": that one raises. "from": that one and all after it (the store is gone).
            "kill": the process dies there by SIGKILL, with nothing cleaned up.
        when: "before" it takes effect; "half": after the first half of a write's bytes (else as
            before); "after" it took effect, so that the caller is told a failure that was none
            (a `put_if_absent` then has `outcome_unknown`).
        error: Makes the error that is raised; by default an input/output error.
        only: Which operations count; the others pass freely.
        delay_s: Seconds before each operation, or a function of it.
        reorder: The store tells this process that what it finished and deleted is done, but does it
            only at `settle`; `put_if_absent` alone goes through at once. What a crash leaves is in
            `inner`. Whoever survives this does not look at what it wrote: a crash suite must fail.
        power: Keep the model of a disk's cache that `power_cut` needs. What `inner` holds already
            counts as durable. Claims the capability `durable`.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        fail_at: int | None = None,
        mode: Mode = "once",
        when: When = "before",
        error: Callable[[Operation], BaseException] | None = None,
        only: Callable[[Operation], bool] | None = None,
        delay_s: float | Callable[[Operation], float] = 0.0,
        reorder: bool = False,
        power: bool = False,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.log: list[Operation] = []
        self.fired = False
        self._fail_at, self._mode, self._when = fail_at, mode, when
        self._error, self._only, self._delay_s = error, only, delay_s
        self._lock = threading.RLock()
        self._late: _Late | None = _Late(inner) if reorder else None
        self._power: PowerModel | None = None
        if power:
            self._power = PowerModel()
            for entry in inner.list(""):
                self._power.put(entry.key, bytes(inner.get(entry.key)), synced=True)
                self._power.sync(entry.key)

    def __repr__(self) -> str:
        return f"FaultyBackend({self.inner!r}, fail_at={self._fail_at}, mode={self._mode!r})"

    def __enter__(self) -> FaultyBackend:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def operations(self) -> int:
        """How many were counted so far."""
        return len(self.log)

    @property
    def capabilities(self) -> Capabilities:
        found = self.inner.capabilities
        return replace(found, durable=True) if self._power is not None else found

    # Faults

    def _begin(self, kind: Kind, key: str) -> _Fault:
        with self._lock:
            operation = Operation(len(self.log), kind, key)
            if self._only is not None and not self._only(operation):
                return _Fault(None, operation, self)
            self.log.append(operation)
            hit = self._fail_at is not None and (
                operation.number >= self._fail_at
                if self._mode == "from"
                else operation.number == self._fail_at
            )
            self.fired = self.fired or hit
        delay_s = self._delay_s(operation) if callable(self._delay_s) else self._delay_s
        if delay_s:
            time.sleep(delay_s)
        return _Fault(self._when if hit else None, operation, self)

    def _fail(self, operation: Operation, *, outcome_unknown: bool) -> None:
        if self._mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal is on its way
        if self._error is not None:
            raise self._error(operation)
        raise StorageError(
            "fault injected",
            reason="io",
            where=operation.key,
            found=f"operation {operation.number} ({operation.kind})",
            errno=errno.EIO,
            outcome_unknown=outcome_unknown,
        )

    def settle(self) -> None:
        """With `reorder`: do now what was put off, the last first."""
        if self._late is not None:
            self._late.settle()

    def power_cut(self, seed: int | None = None) -> Backend:
        """What is on the medium if the power fails now, as a new store in memory.

        This backend goes on unchanged.

        Args:
            seed: None: all that was not synced is lost (its files are empty where only the name
                was synced). A number: each unsynced change of a name is kept or lost by lot, and
                unsynced content is lost, torn or kept.
        Raises:
            UsageError: kind `usage-power`: made without `power=True`.
        """
        if self._power is None:
            raise UsageError("no record of what was synced", reason="power", do="pass power=True")
        rng = None if seed is None else random.Random(seed)
        with self._lock:
            survivors = self._power.survivors(rng)
        options = {"late_key": self.inner.capabilities.late_key}
        medium = open_backend("memory://", storage_options=options)
        for key, content in survivors.items():
            medium.put(Key(key), content)
        return medium

    # The contract

    def get(
        self, key: Key, start: int = 0, stop: int | None = None, out: memoryview | None = None
    ) -> memoryview:
        with self._begin("get", key):
            source = self._late if self._late is not None and key in self._late else self.inner
            return source.get(key, start, stop, out)

    def map(self, key: Key) -> memoryview | None:
        with self._begin("map", key):
            if self._late is not None and key in self._late:
                return self._late.get(key) if self.inner.capabilities.map else None
            return self.inner.map(key)

    def stat(self, key: Key) -> Entry | None:
        with self._begin("stat", key):
            if self._late is not None and self._late.knows(key):
                return self._late.stat(key)
            return self.inner.stat(key)

    def list(self, prefix: str, start_after: str = "") -> Iterator[Entry]:
        with self._begin("list", prefix):
            if self._late is not None:
                return self._late.list(prefix, start_after)
            return self.inner.list(prefix, start_after)

    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        with self._begin("create", key):
            source = self.inner if self._late is None else self._late
            return _FaultyWriter(self, key, source.create(key, nbytes))

    def put_if_absent(self, key: Key, data: Buffer, *, durable: bool) -> bool:
        with self._begin("put_if_absent", key), self._lock:
            won = self.inner.put_if_absent(key, data, durable=durable)
            if won and self._power is not None:
                self._power.put(key, bytes(data), synced=durable)
                if durable:
                    self._power.sync(key)
            return won

    def delete(self, key: Key) -> None:
        with self._begin("delete", key), self._lock:
            if self._late is not None:
                self._late.delete(key)
            else:
                self.inner.delete(key)
            if self._power is not None:
                self._power.delete(key)

    def sync(self, keys: Iterable[Key]) -> None:
        wanted = [*keys]
        with self._begin("sync", wanted[0] if wanted else ""), self._lock:
            if self._late is not None:
                return  # says that it did
            self.inner.sync(wanted)
            if self._power is not None:
                for key in wanted:
                    self._power.sync(key)

    def _finished(self, key: Key, writer: Writer, *, durable: bool, late: bool) -> None:
        """What `_FaultyWriter.finish` does, so that the model and the store change as one."""
        with self._lock:
            if self._late is not None:
                self._late.finish(key, writer, late=late)
                return
            writer.finish(durable=durable, key=key if late else None)
            if self._power is not None:
                self._power.put(key, bytes(self.inner.get(key)), synced=durable)


class _Fault:
    """The moment of one operation: raises or kills before or after its body."""

    def __init__(self, when: When | None, operation: Operation, backend: FaultyBackend) -> None:
        self.when, self._operation, self._backend = when, operation, backend

    def __enter__(self) -> _Fault:
        if self.when in ("before", "half") and not (
            self.when == "half" and self._operation.kind == "write"
        ):
            self.fail()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.when == "after" and error is None:
            self.fail()

    def fail(self) -> None:
        unknown = self.when == "after" and self._operation.kind in ("put_if_absent", "finish")
        self._backend._fail(self._operation, outcome_unknown=unknown)


class _FaultyWriter(Writer):
    def __init__(self, backend: FaultyBackend, key: Key, inner: Writer) -> None:
        self._backend, self._key, self._inner = backend, key, inner
        self._handed_over = False

    def write(self, offset: int, buffer: Buffer) -> None:
        with self._backend._begin("write", self._key) as fault:
            view = memoryview(buffer).cast("B")
            if fault.when == "half":
                self._inner.write(offset, view[: len(view) // 2])
                fault.fail()
            self._inner.write(offset, view)

    def finish(self, *, durable: bool, key: Key | None = None) -> None:
        final = self._key if key is None else key
        with self._backend._begin("finish", final):
            self._backend._finished(final, self._inner, durable=durable, late=final != self._key)
            self._handed_over = True

    def abort(self) -> None:
        if not self._handed_over:
            self._inner.abort()


class _Late:
    """What a reordering store has promised and not done: this process sees it, nobody else does."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._shadow = open_backend("memory://")
        self._deleted: set[str] = set()
        self._pending: deque[tuple[str, Callable[[], None]]] = deque()

    def __contains__(self, key: str) -> bool:
        return self._shadow.stat(Key(key)) is not None or key in self._deleted

    knows = __contains__

    def get(
        self, key: Key, start: int = 0, stop: int | None = None, out: memoryview | None = None
    ) -> memoryview:
        return self._shadow.get(key, start, stop, out)

    def stat(self, key: Key) -> Entry | None:
        return self._shadow.stat(key)

    def list(self, prefix: str, start_after: str) -> Iterator[Entry]:
        found = {entry.key: entry for entry in self._inner.list(prefix, start_after)}
        found |= {entry.key: entry for entry in self._shadow.list(prefix, start_after)}
        return iter([found[key] for key in sorted(found) if key not in self._deleted])

    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        return self._shadow.create(key, nbytes)

    def finish(self, key: Key, writer: Writer, *, late: bool) -> None:
        writer.finish(durable=False, key=key if late else None)
        content = bytes(self._shadow.get(key))
        self._deleted.discard(key)
        self._pending.append((key, lambda: self._inner.put(key, content)))

    def delete(self, key: Key) -> None:
        self._shadow.delete(key)
        self._deleted.add(key)
        self._pending.append((key, lambda: self._inner.delete(key)))

    def settle(self) -> None:
        done: set[str] = set()
        while self._pending:
            key, call = self._pending.pop()
            if key not in done:  # the last word about a key counts
                done.add(key)
                call()
        for entry in [*self._shadow.list("")]:
            self._shadow.delete(entry.key)
        self._deleted.clear()
