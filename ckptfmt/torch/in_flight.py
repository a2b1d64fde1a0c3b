"""Saves to one store each, in the background, and removals that wait for them.

What the checkpoint plugins of trainers share: a removal is done once every save that began before
it is durable, so that there is a whole checkpoint at every moment. Spec: 08-protocol.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

from ckptfmt.engine import SaveFuture, Store, api
from ckptfmt.errors import warn
from ckptfmt.types import CheckpointInfo

_ASIDE = ".before"
"""Added to the name of a file that a store replaces, until the store is durable."""

OnCommit = Callable[[str, CheckpointInfo], None]


@dataclass(frozen=True, slots=True)
class _Save:
    path: str
    step: int | None
    store: Store
    future: SaveFuture


@dataclass(frozen=True, slots=True)
class _Removal:
    path: str


class InFlight:
    """Saves and removals of one run.

    Args:
        background: Return from a save once the tree is staged. Saves of one training step run side
            by side; the next step's wait for them. An error is raised by the next call.
        on_commit: Called with the path and the info of each checkpoint once it is durable: in the
            background thread, if `background`. It must not call this object.
        options: For `save`: codec, digest, durable.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        on_commit: OnCommit | None = None,
        options: Mapping[str, Any],
    ) -> None:
        self.background = background
        self.on_commit = on_commit
        self._options = options
        self._changed = threading.Condition()
        self._queue: deque[_Save | _Removal] = deque()
        self._busy = False
        self._safe = True
        """False from a save that failed until one that succeeds: removals are held back."""
        self._held: list[_Removal] = []
        self._errors: list[BaseException] = []

    def save(
        self, tree: object, path: str, step: int | None, *, storage_options: Any = None
    ) -> None:
        """Save a tree as `main` of the store at a path; what was there goes after the commit."""
        self._settle(path, step)
        if os.path.islink(path):  # of an earlier run: its target is not this one's
            os.unlink(path)
        if os.path.isfile(path):  # the trainer's own, of a run that is taken over
            os.replace(path, path + _ASIDE)
        store = Store(path, storage_options=storage_options or {})
        if not self.background:
            info = api.save(tree, store, name="main", step=step, **self._options)
            self._committed(path, store, info)
            return
        future = api.save_async(tree, store, name="main", step=step, **self._options)
        with self._changed:
            self._queue.append(_Save(path, step, store, future))
        future.add_done_callback(lambda _: self._advance())

    def remove(self, path: str) -> None:
        """Remove a store, once all saves that began before are durable."""
        if not self.background:
            _remove(path)
            return
        with self._changed:
            self._queue.append(_Removal(path))
        self._advance()

    def _settle(self, path: str, step: int | None) -> None:
        """Wait for saves of earlier steps, and for one to the same path."""
        with self._changed:
            saves = [item for item in self._queue if isinstance(item, _Save)]
            free = not self._busy and all(s.step == step and s.path != path for s in saves)
        if not free:
            self.finish()
        self._raise()

    def drain(self) -> None:
        """Wait until all that was begun is done, and raise nothing: another error is on its way."""
        with self._changed:
            futures = [item.future for item in self._queue if isinstance(item, _Save)]
        wait(futures)
        self._advance()
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and not self._queue)

    def finish(self) -> None:
        """Wait until all that was begun is done, and raise what went wrong."""
        self.drain()
        self._raise()

    def _raise(self) -> None:
        with self._changed:
            errors, self._errors = self._errors, []
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and: {other}")
            raise errors[0]

    def _advance(self) -> None:
        """Do what is due at the head of the queue: called by whoever ends a save or adds to it."""
        while (item := self._take()) is not None:
            try:
                self._due(item)
            except Exception as error:  # told by the next call: here nobody would hear it
                with self._changed:
                    self._errors.append(error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _take(self) -> _Save | _Removal | None:
        """The head of the queue, if it is due and nobody is at work on another."""
        with self._changed:
            if self._busy or not self._queue:
                return None
            head = self._queue[0]
            if isinstance(head, _Save) and not head.future.done():
                return None
            self._busy = True
            return self._queue.popleft()

    def _due(self, item: _Save | _Removal) -> None:
        if isinstance(item, _Removal):
            if self._safe:
                _remove(item.path)
            else:
                self._held.append(item)
            return
        self._safe = False
        info = item.future.result()
        self._safe = True
        held, self._held = self._held, []
        for removal in held:
            _remove(removal.path)
        self._committed(item.path, item.store, info)

    def _committed(self, path: str, store: Store, info: CheckpointInfo) -> None:
        if os.path.isfile(path + _ASIDE):
            os.unlink(path + _ASIDE)
        if info.generation > 0:
            store.gc(grace_s=0)  # the run owns this path: what it replaced would pile up
        if self.on_commit is not None:
            self.on_commit(path, info)


def _remove(path: str) -> None:
    """Index first, data after: a kill in between leaves no checkpoint over a hole."""
    from fsspec.core import url_to_fs

    if os.path.islink(path):
        os.unlink(path)
        return
    filesystem, where = url_to_fs(path)
    if not filesystem.isfile(where):  # a file is one of Lightning's own
        with Store(path) as store:
            if not _withdrawn(store, path):
                return
    if filesystem.exists(where):
        filesystem.rm(where, recursive=True)


def _withdrawn(store: Store, path: str) -> bool:
    tags: Iterable[str] = store.tags()
    if tags:
        warn(f"{path} is kept: it has the tags {', '.join(sorted(tags))}")
        return False
    for name in store.names():
        store.delete(name)
    return True
