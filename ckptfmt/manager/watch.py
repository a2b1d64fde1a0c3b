"""Watcher: a serving process takes new weights while the old ones stay valid."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from ckptfmt.engine import Checkpoint, Repeating, Store, parse_where, peek
from ckptfmt.errors import UsageError
from ckptfmt.types import At, StrPath

T = TypeVar("T")
_log = logging.getLogger("ckptfmt.watcher")


class Watcher(Generic[T]):
    """Follows a tag (or a name, or the latest) and swaps a whole value when it moves.

    A context manager, in a process that is forked too. `value` is what `load` made of the checkpoint; whoever took it may go on with
    it for as long as he likes: what a newer one replaces goes away when nobody holds it any more. A
    load that fails keeps the old value, and is tried again.

    Args:
        store: A directory, a URL or a Store.
        at: A tag, a name, a step; "latest" for the newest.
        load: Makes the value of an open Checkpoint; arrays that it maps outlive the checkpoint.
        poll_s: How often to look, in seconds.
    Raises:
        NotFoundError: There is no such checkpoint yet; else what `load` raises at the first time.
    """

    def __init__(
        self,
        store: StrPath | Store,
        *,
        at: At = "production",
        load: Callable[[Checkpoint], T],
        poll_s: float = 5.0,
    ) -> None:
        self._store, selected = parse_where(store)
        if selected is not None:
            raise UsageError(
                "a watcher takes a whole store",
                reason="selector",
                found=f"@{selected}",
                do="leave out the @, and choose with at=",
            )
        if not poll_s > 0:
            raise UsageError(
                "poll_s is not above 0", reason="watcher", found=repr(poll_s), do="say how often"
            )
        self._at, self._load, self._poll_s = at, load, poll_s
        self._loaded: tuple[str, str, T] = self._fetch(None)
        self._repeating = Repeating(self._look, "ckptfmt-watcher")
        self._repeating.wake()

    @property
    def value(self) -> T:
        """The newest value; always whole."""
        if not self._repeating.running:  # forked since: a server's worker follows the tag itself
            self._repeating.wake()
        return self._loaded[2]

    @property
    def name(self) -> str:
        """Which checkpoint `value` was made of."""
        return self._loaded[0]

    def _fetch(self, old: tuple[str, str, T] | None) -> tuple[str, str, T]:
        if old is not None and peek(self._store.backend, self._at) == old[:2]:
            return old
        with self._store.open(self._at) as checkpoint:
            name, digest = checkpoint.info.name, checkpoint.info.digest
            return name, digest, self._load(checkpoint)

    def _look(self) -> float | None:
        try:
            self._loaded = self._fetch(self._loaded)  # one assignment: nobody sees half of it
        except Exception:
            _log.exception(
                "%s@%s could not be taken; %s stays", self._store.url, self._at, self.name
            )
        return self._poll_s

    def close(self) -> None:
        """Stop looking; the value stays."""
        self._repeating.close()

    def __enter__(self) -> Watcher[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
