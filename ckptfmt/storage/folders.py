"""The directories of a local store: made when needed, and synced up to one that existed.

A file that is synced is lost all the same if the name of a directory above it is. Spec: 02-store I1.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from ckptfmt.storage import syscalls

# A directory may be removed by a delete between its making and its use; more often than this, it
# is not a race.
_TRIES = 16

# Directories above a store that got a subdirectory from this process, by whatever backend, and were
# not synced since: a power cut loses that name, and everything below it.
_unsynced: set[str] = set()
_unsynced_lock = threading.Lock()
# Held while those are synced, so that nobody believes a name durable that another thread is about
# to make durable.
_syncing_lock = threading.Lock()


def _forget_in_child() -> None:
    """A thread that a forked process does not have may hold the locks."""
    global _unsynced_lock, _syncing_lock
    _unsynced_lock, _syncing_lock = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)

_T = TypeVar("_T")


class Folders:
    """The directories from `root`, the store, downwards, and those that lead to it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._parent_synced = False

    def with_parent(self, path: str, call: Callable[[], _T]) -> _T:
        """Do `call`; if the directory of `path` is missing, make it and do `call` again."""
        for _ in range(_TRIES):
            try:
                return call()
            except FileNotFoundError:
                self._make(os.path.dirname(path))
        return call()

    def _make(self, path: str) -> None:
        missing: list[str] = []
        while not os.path.isdir(path):
            missing.append(path)
            parent = os.path.dirname(path)
            if parent == path:
                break
            path = parent
        for folder in reversed(missing):
            with suppress(FileExistsError, FileNotFoundError):
                # Noted first: a name that is made and not noted would never be synced.
                parent = os.path.dirname(folder)
                if _is_inside(self._root, parent) and parent != self._root:
                    with _unsynced_lock:
                        _unsynced.add(parent)
                os.mkdir(folder)

    def remove_empty(self, folder: str) -> None:
        """Remove `folder` and those above it that are empty; `data/` and its like stay."""
        while os.path.dirname(folder).startswith(self._root + os.sep):
            try:
                os.rmdir(folder)
            except OSError:
                return
            folder = os.path.dirname(folder)

    def sync(self, folders: set[str]) -> None:
        """Sync directories, deepest first, up to the store, and parents this process added to."""
        wanted = {self._root}
        for folder in folders:
            while folder != self._root:
                wanted.add(folder)
                folder = os.path.dirname(folder)
        for path in sorted(wanted, key=len, reverse=True):
            with suppress(FileNotFoundError):  # removed since: nothing in it is lost
                syscalls.sync_directory(path)
        with _syncing_lock:
            for path in self._noted_above():
                with _unsynced_lock:
                    _unsynced.discard(path)  # before: what is made meanwhile notes it again
                try:
                    syscalls.sync_directory(path)
                except BaseException:
                    with _unsynced_lock:
                        _unsynced.add(path)
                    raise
        if not self._parent_synced:
            # An earlier process may have made the store and died before it synced its name.
            with suppress(OSError):
                syscalls.sync_directory(os.path.dirname(self._root))
            self._parent_synced = True

    def _noted_above(self) -> Sequence[str]:
        """Directories above the store in which this process made one that leads to it."""
        with _unsynced_lock:
            return [path for path in _unsynced if _is_inside(self._root, path)]


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
