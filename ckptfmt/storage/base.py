"""What a backend is: bytes under keys, and nothing else (no index, dtype or codec).

A key is relative to the store: parts joined by `/`, each part non-empty, not `.` or `..`.
Spec: 02-store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ckptfmt.types import Key

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Entry:
    """One object. `time_s` is the store's own time of its last write, or None where it tells none."""

    key: Key
    nbytes: int
    time_s: float | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend promises; probed where it cannot be known (spec 02).

    Attributes:
        put_if_absent: Of several writers of one key exactly one wins. False: single writer.
        late_key: `Writer.finish(key=)` may name the final key (a rename); False: the key is
            fixed at `create`, so a data file's id must be known before its upload.
        durable: `finish(durable=True)`, `put_if_absent(durable=True)` and `sync` survive a power cut.
        map: `map` gives memory maps.
        time: Entries carry the store's time.
        local: A file system of this machine: pieces of 2 to 8 MiB; else ranges are coalesced.
        network_fs: A network file system: never mapped by default.
        list_stale_s: How stale a listing may be, in seconds; None where unknown.
    """

    put_if_absent: bool
    late_key: bool
    durable: bool
    map: bool
    time: bool
    local: bool
    network_fs: bool = False
    list_stale_s: float | None = 0.0


class Writer(ABC):
    """An object being written: invisible until `finish`, which replaces what was at the key."""

    @abstractmethod
    def write(self, offset: int, buffer: Buffer) -> None:
        """Write all of `buffer` at `offset` bytes; several threads may call at once.

        Raises:
            StorageError: kind `storage-no-space` where the medium is full. The writer is dead then:
                abort it, never retry a file whose write or fsync failed (I1).
        """

    @abstractmethod
    def finish(self, *, durable: bool, key: Key | None = None) -> None:
        """Make the object visible, whole, under the key of `create` (or `key`, with `late_key`).

        With `durable` its bytes are on the medium before it becomes visible; whether the *name*
        is durable is the business of `Backend.sync`.
        """

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing behind. Idempotent; a no-op after `finish`."""


class Backend(ABC):
    """Bytes under keys. Thread-safe. Opening one touches nothing."""

    url: str

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Probed at first use, remembered per process; a read-only backend never probes."""

    @abstractmethod
    def get(
        self, key: Key, start: int = 0, stop: int | None = None, out: memoryview | None = None
    ) -> memoryview:
        """Bytes [start, stop) of an object; into `out` (writable, of that very length) if given.

        Raises:
            NotFoundError: kind `not-found-object`: no such object.
            CorruptError: kind `corrupt-short-file`: the object ends before `stop`.
            StorageError: The medium failed.
        """

    @abstractmethod
    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        """Begin an object; `nbytes` preallocates. With `late_key`, `key` may be under `tmp/`."""

    @abstractmethod
    def put_if_absent(self, key: Key, data: Buffer, *, durable: bool) -> bool:
        """Write a whole object (under 1 GiB) only if the key is free. False: it was taken.

        Never retried here. After False or an error with `outcome_unknown` the caller reads back
        and compares its commit id (I2).
        """

    @abstractmethod
    def list(self, prefix: str, start_after: str = "") -> Iterator[Entry]:
        """All objects whose key begins with `prefix`, sorted by key, uncached, after `start_after`.

        Nothing there (not even the store): yields nothing.
        """

    @abstractmethod
    def stat(self, key: Key) -> Entry | None:
        """Size and time of one object, or None if there is none. Uncached."""

    @abstractmethod
    def delete(self, key: Key) -> None:
        """Delete an object; succeeds if there is none."""

    def map(self, key: Key) -> memoryview | None:
        """A private copy-on-write map of the whole object, writable, or None where it cannot."""
        return None

    def is_resident(self, key: Key, start: int, stop: int) -> bool:
        """Whether a range is in this machine's memory already, so that a map of it costs no disk;
        told by samples. False where it is not known."""
        return False

    def sync(self, keys: Iterable[Key]) -> None:
        """Make objects and their names durable: fsync of each file (free when clean) and of every
        directory above it up to the store, and of parents that this process created.

        A key that ends in `/` is a directory alone: `sync(["checkpoints/"])` makes deletions in it
        durable. Without `durable` capability, or where an object is durable once it is visible: a no-op.
        """
        return

    def put(self, key: Key, data: Buffer, *, durable: bool = False) -> None:
        """create + write + finish: replaces what was there."""
        writer = self.create(key, len(data))
        try:
            writer.write(0, data)
            writer.finish(durable=durable)
        except BaseException:
            writer.abort()
            raise

    def close(self) -> None:
        """Give back connections and descriptors. What `get` and `map` returned stays valid."""
        return
