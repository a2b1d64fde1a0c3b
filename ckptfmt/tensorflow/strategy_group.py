"""The workers of a `tf.distribute` strategy as ranks: `group=strategy`.

They meet through files in the store, which all of them see anyway: a worker that is late or gone is
named within the timeout, where a collective of TensorFlow's would wait. Of every strategy but
MultiWorkerMirroredStrategy one process alone holds all values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from ckptfmt.engine import FileGroup, Mailbox, error_in, late_error, wait_for
from ckptfmt.errors import ConflictError, UsageError
from ckptfmt.storage import Backend

T = TypeVar("T")

_meetings: weakref.WeakKeyDictionary[Any, list[_Together]] = weakref.WeakKeyDictionary()
"""Strategy (its `extended`) -> the calls of it with `group=` that are under way."""


def _workers(strategy: Any) -> tuple[int, int]:
    """(rank, how many) of the processes that train together."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 0, 1
    resolver = strategy.cluster_resolver
    tasks = {job: len(hosts) for job, hosts in resolver.cluster_spec().as_dict().items()}
    chiefs = tasks.get("chief", 0)
    size = chiefs + tasks.get("worker", 0)
    if size <= 1:
        return 0, 1
    if resolver.task_type not in ("chief", "worker"):
        raise UsageError(
            "this process does not train with the others",
            reason="group",
            found=f"a task of type {resolver.task_type}",
            do="call without group= here",
        )
    return int(resolver.task_id) + (chiefs if resolver.task_type == "worker" else 0), size


def rank_of(strategy: Any) -> int:
    return _workers(strategy)[0]


def size_of(strategy: Any) -> int:
    """How many processes train together."""
    return _workers(strategy)[1]


def is_meeting(strategy: Any) -> bool:
    """Whether all workers of a strategy are in one call: they may read what only all of them can."""
    return _workers(strategy)[1] == 1 or bool(_meetings.get(strategy.extended))


def read_together(strategy: Any, read: Callable[[], T]) -> T:
    """A read in which all workers take part: begun only when all of them are there.

    TensorFlow's collective would wait for a worker that has failed until its process ends.

    Raises:
        ConflictError: Some worker failed, and with what; or it did not come, or left while the others
            read.
    """
    if _workers(strategy)[1] == 1:
        return read()
    _meetings[strategy.extended][-1].wait_for_all()
    try:
        return read()
    except tf.errors.OpError as error:
        raise ConflictError(
            "the workers could not read a value together",
            reason="rank-failed",
            found=str(error.message)[:300],
            do="nothing was committed; look whether all of them live",
        ) from error


def ranks_of(strategy: Any) -> StrategyRanks:
    """The workers of a strategy, in the order of the cluster: the chief is rank 0.

    Raises:
        UsageError: kind `usage-group`: it is no strategy, or this process is no worker of it.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise UsageError(
            "this is no group of ranks",
            reason="group",
            expected="a tf.distribute.Strategy",
            found=repr(strategy),
            do="pass the strategy under whose scope the variables were made",
        )
    return StrategyRanks(strategy)


class StrategyRanks:
    """The workers of one strategy, as seen by one of them."""

    def __init__(self, strategy: Any) -> None:
        self.rank, self.size = _workers(strategy)
        self.strategy = strategy

    def beside(self, line: str) -> FileGroup:
        """The same workers; no value of theirs is read in these meetings."""
        return FileGroup(self.rank, self.size).beside(line)

    def leave(self, backend: Backend, error: BaseException) -> None:
        """This worker comes to no further meeting."""
        FileGroup(self.rank, self.size).leave(backend, error)

    def meet(self, backend: Backend, timeout_s: float) -> Mailbox:
        """The next meeting; while it lasts, values may be read of all workers together."""
        mailbox = FileGroup(self.rank, self.size).meet(backend, timeout_s)
        return _Together(mailbox, self, timeout_s)


class _Together:
    """A mailbox that says, as long as it is open, that all workers are in one call, and in which
    they can wait for each other within a round."""

    def __init__(self, mailbox: Mailbox, ranks: StrategyRanks, timeout_s: float) -> None:
        self.get, self.has, self.tend = mailbox.get, mailbox.has, mailbox.tend
        self.gone, self.came, self.describe = mailbox.gone, mailbox.came, mailbox.describe
        self._mailbox, self._ranks, self._timeout_s = mailbox, ranks, timeout_s
        self._points = 0
        _meetings.setdefault(ranks.strategy.extended, []).append(self)

    def put(self, key: str, data: bytes) -> None:
        self._mailbox.put(key, data)
        if error_in(data) is not None:  # those who wait within the round hear of it too
            self._mailbox.put(f"left-{self._ranks.rank}", data)

    def wait_for_all(self) -> None:
        """Until all workers have come to the same point.

        Raises:
            ConflictError: Another worker failed, and with what; or it does not come, or is gone.
        """
        point, self._points = self._points, self._points + 1
        everyone = range(self._ranks.size)
        here = {rank: f"point-{point}-{rank}" for rank in everyone}
        left = [f"left-{rank}" for rank in everyone]
        self._mailbox.put(here[self._ranks.rank], b"")
        if wait_for(
            self, here, self._timeout_s, or_when=lambda: any(self.has([key]) for key in left)
        ) and self.has([*here.values()]):
            return
        for key in left:
            error = error_in(self.get(key) or b"")
            if error is not None:
                raise ConflictError(
                    "another worker failed",
                    reason="rank-failed",
                    found=str(error),
                    do="nothing was committed",
                )
        raise late_error([r for r in everyone if not self.has([here[r]])], self._timeout_s)

    def close(self) -> None:
        _meetings[self._ranks.strategy.extended].remove(self)
        self._mailbox.close()
