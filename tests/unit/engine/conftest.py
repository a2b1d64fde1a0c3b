"""Trees, and a store that counts what is read and written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.storage import Backend, Buffer, Capabilities, Entry, Writer
from ckptfmt.types import Key


class Counting(Backend):
    """Passes everything on, and remembers what was read and written, by key."""

    def __init__(self, inner: Backend) -> None:
        self.inner, self.url = inner, inner.url
        self.reads: list[tuple[str, int, int]] = []
        self.created: list[str] = []
        self.puts: list[str] = []
        self.calls: list[tuple[str, str]] = []

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def get(
        self, key: Key, start: int = 0, stop: int | None = None, out: memoryview | None = None
    ) -> memoryview:
        found = self.inner.get(key, start, stop, out)
        self.reads.append((key, start, start + len(found)))
        return found

    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        self.created.append(key)
        self.calls.append(("create", key))
        return self.inner.create(key, nbytes)

    def put_if_absent(self, key: Key, data: Buffer, *, durable: bool) -> bool:
        self.puts.append(key)
        self.calls.append(("put_if_absent", key))
        return self.inner.put_if_absent(key, data, durable=durable)

    def list(self, prefix: str, start_after: str = "") -> Iterator[Entry]:
        return self.inner.list(prefix, start_after)

    def stat(self, key: Key) -> Entry | None:
        return self.inner.stat(key)

    def delete(self, key: Key) -> None:
        self.calls.append(("delete", key))
        self.inner.delete(key)

    def map(self, key: Key) -> memoryview | None:
        return self.inner.map(key)

    def sync(self, keys: Iterable[Key]) -> None:
        keys = [*keys]
        self.calls += [("sync", key) for key in keys]
        self.inner.sync(keys)

    def data_reads(self) -> Sequence[tuple[str, int, int]]:
        return [read for read in self.reads if read[0].startswith("data/")]

    def data_nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.data_reads())

    def forget(self) -> None:
        for seen in (self.reads, self.created, self.puts, self.calls):
            seen.clear()


@dataclass
class Counted:
    """A store, and what goes through its backend."""

    store: ckptfmt.Store
    backend: Counting = field(init=False)

    def __post_init__(self) -> None:
        self.backend = Counting(self.store.backend)
        self.store.backend = self.backend


@pytest.fixture
def counted(tmp_path: Any) -> Counted:
    return Counted(ckptfmt.Store(tmp_path / "store"))


@pytest.fixture
def tree() -> dict[str, Any]:
    """A bit of everything: tied arrays, an empty one, strings, under 8 bits, plain values."""
    weight = np.arange(60, dtype=np.float32).reshape(5, 12)
    return {
        "model": {
            "embed": weight,
            "head": weight,
            "bias": np.arange(7, dtype=ml_dtypes.bfloat16),
            "none": np.zeros((0, 3), np.int64),
            "bits": np.array([1, -2, 3], ml_dtypes.int4),
        },
        "names": np.array(["a", "", "é"], np.dtypes.StringDType()),
        "layers": [np.ones(3), {"scale": np.float32(0.5)}],
        "step": 7,
        "pair": (1, [None, "x"]),
        "empty": {},
    }


@pytest.fixture
def stayed() -> Callable[[], list[threading.Thread]]:
    """stayed() -> threads that came since the test began and do not end. The thread of a save tells
    its outcome before it ends, so that whoever hears it may still meet the thread for a moment."""
    before = set(threading.enumerate())

    def look() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        for thread in new:
            thread.join(30)
        return [thread for thread in new if thread.is_alive()]

    return look
