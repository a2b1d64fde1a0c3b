"""Stores in memory, shared by name within the process: for tests, notebooks and short hand-overs.

`memory://NAME` is the same store wherever it is opened; without a name it is private. A store that
was named lives as long as the process, or until `MemoryBackend.forget`. Spec: 02-store.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptfmt.errors import UsageError
from ckptfmt.storage import failures
from ckptfmt.storage.base import Backend, Buffer, Capabilities, Entry, Writer
from ckptfmt.storage.keys import check_key, check_prefix
from ckptfmt.types import Key

_OPTIONS = {"late_key"}


class _Space:
    """The objects of one store. Values are never changed once they are in `objects`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes | bytearray, float]] = {}
        self._keys: list[str] = []  # sorted; kept beside the dict so that a listing is a search
        self._time_s = 0.0

    def put(self, key: str, data: bytes | bytearray) -> None:
        # The store's clock never goes back, whatever the machine's does.
        self._time_s = max(self._time_s, time.time())
        if key not in self.objects:
            bisect.insort(self._keys, key)
        self.objects[key] = (data, self._time_s)

    def delete(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            del self._keys[bisect.bisect_left(self._keys, key)]

    def keys_after(self, prefix: str, start_after: str) -> list[str]:
        first = bisect.bisect_left(self._keys, prefix)
        if start_after >= prefix:
            first = max(first, bisect.bisect_right(self._keys, start_after))
        last = first
        while last < len(self._keys) and self._keys[last].startswith(prefix):
            last += 1
        return self._keys[first:last]


_named: dict[str, _Space] = {}
_private: weakref.WeakValueDictionary[str, _Space] = weakref.WeakValueDictionary()
_spaces_lock = threading.Lock()


class MemoryBackend(Backend):
    """A dictionary that behaves like a disk.

    Args:
        url: `memory://NAME`; None or no name: a store of its own.
        storage_options: `{"late_key": False}` makes it behave like an object store: keys are fixed
            at `create`, nothing can be mapped.
        read_only: Refuse every write.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        read_only: bool = False,
    ) -> None:
        options = dict(storage_options or {})
        if not _OPTIONS.issuperset(options):
            raise UsageError(
                "unknown storage option",
                reason="storage-options",
                where=str(url),
                found=", ".join(sorted(set(options) - _OPTIONS)),
                expected=", ".join(sorted(_OPTIONS)),
            )
        self._late_key = bool(options.get("late_key", True))
        self._read_only = read_only
        name = (url or "").removeprefix("memory://").strip("/")
        with _spaces_lock:
            if name:
                space = _private.get(name) or _named.setdefault(name, _Space())
            else:
                name = f"private-{os.urandom(8).hex()}"
                space = _private[name] = _Space()
        self._space = space
        self.url = f"memory://{name}"

    def __repr__(self) -> str:
        return f"MemoryBackend({self.url!r})"

    @staticmethod
    def forget(url: str) -> None:
        """Give back the memory of a named store, once every backend on it is gone."""
        with _spaces_lock:
            _named.pop(url.removeprefix("memory://").strip("/"), None)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            put_if_absent=not self._read_only,
            late_key=self._late_key,
            durable=False,
            map=self._late_key,
            time=True,
            local=self._late_key,
        )

    def get(
        self, key: Key, start: int = 0, stop: int | None = None, out: memoryview | None = None
    ) -> memoryview:
        failures.check_range(key, start, stop, out)
        data = self._data(key)
        end = len(data) if stop is None else stop
        if len(data) < max(start, end):
            raise failures.short_object(key, expected=max(start, end), found=len(data))
        view = failures.check_out(key, end - start, out)
        view[:] = memoryview(data)[start:end]
        return view

    def map(self, key: Key) -> memoryview | None:
        # A copy: the caller may write into it, and a memory map is private.
        return self.get(key) if self._late_key else None

    def _data(self, key: Key) -> bytes | bytearray:
        found = self._space.objects.get(check_key(key))
        if found is None:
            raise failures.no_object(key)
        return found[0]

    def stat(self, key: Key) -> Entry | None:
        found = self._space.objects.get(check_key(key))
        return None if found is None else Entry(key, len(found[0]), found[1])

    def list(self, prefix: str, start_after: str = "") -> Iterator[Entry]:
        check_prefix(prefix)
        with self._space.lock:
            keys = self._space.keys_after(prefix, start_after)
        return self._entries(keys)

    def _entries(self, keys: Sequence[str]) -> Iterator[Entry]:
        for key in keys:
            entry = self.stat(Key(key))
            if entry is not None:  # deleted since the listing began
                yield entry

    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        self._check_writable(key)
        return _MemoryWriter(self, check_key(key), nbytes or 0)

    def put_if_absent(self, key: Key, data: Buffer, *, durable: bool) -> bool:
        self._check_writable(key)
        check_key(key)
        copy = bytes(data)
        with self._space.lock:
            if key in self._space.objects:
                return False
            self._space.put(key, copy)
        return True

    def delete(self, key: Key) -> None:
        self._check_writable(key)
        check_key(key)
        with self._space.lock:
            self._space.delete(key)

    def _check_writable(self, key: str) -> None:
        if self._read_only:
            raise failures.read_only(f"{self.url}: {key}")


class _MemoryWriter(Writer):
    def __init__(self, backend: MemoryBackend, key: Key, nbytes: int) -> None:
        self._backend, self._key = backend, key
        self._lock = threading.Lock()
        self._data = bytearray(nbytes)
        self._state = "open"
        self._written = 0
        self._end = 0

    def write(self, offset: int, buffer: Buffer) -> None:
        view = failures.as_bytes(buffer)
        end = offset + view.nbytes
        with self._lock:
            if self._state != "open":
                raise failures.writer_is_done(self._key, self._state)
            if end > len(self._data):
                self._data.extend(bytes(end - len(self._data)))
            self._data[offset:end] = view
            self._written += view.nbytes
            self._end = max(self._end, end)

    def finish(self, *, durable: bool, key: Key | None = None) -> None:
        final = self._key if key is None else check_key(key)
        if final != self._key and not self._backend.capabilities.late_key:
            raise failures.no_late_key(final)
        with self._lock:
            if self._state != "open":
                raise failures.writer_is_done(self._key, self._state)
            if self._written != self._end:
                self._state = "failed"
                raise failures.gap(self._key, expected=self._end, found=self._written)
            del self._data[self._end :]  # more was asked for than was needed
            self._state = "finished"
            with self._backend._space.lock:
                self._backend._space.put(final, self._data)

    def abort(self) -> None:
        with self._lock:
            if self._state != "finished":
                self._state = "aborted"
                self._data = bytearray()
