"""The workers of a `tf.distribute` strategy as ranks: `group=strategy`.

They meet through files in the store, which all of them see anyway: a worker that is late or gone is
named within the timeout, where a collective of TensorFlow's would wait. Of every strategy but
MultiWorkerMirroredStrategy one process alone holds all values.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from ckptfmt.engine import FileGroup, Mailbox
from ckptfmt.errors import UsageError
from ckptfmt.storage import Backend

_meeting: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Strategy (its `extended`) -> how many calls of it with `group=` are under way."""


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


def is_meeting(strategy: Any) -> bool:
    """Whether all workers of a strategy are in one call: they may read what only all of them can."""
    return _workers(strategy)[1] == 1 or _meeting.get(strategy.extended, 0) > 0


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
        self._strategy = strategy

    def beside(self, line: str) -> FileGroup:
        """The same workers; no value of theirs is read in these meetings."""
        return FileGroup(self.rank, self.size).beside(line)

    def meet(self, backend: Backend, timeout_s: float) -> Mailbox:
        """The next meeting; while it lasts, values may be read of all workers together."""
        mailbox: Mailbox = FileGroup(self.rank, self.size).meet(backend, timeout_s)
        return _Together(mailbox, self._strategy.extended)


class _Together:
    """A mailbox that says, as long as it is open, that all workers are in one call."""

    def __init__(self, mailbox: Mailbox, extended: Any) -> None:
        self.put, self.get, self.has, self.tend = (
            mailbox.put, mailbox.get, mailbox.has, mailbox.tend,
        )  # fmt: skip
        self._mailbox, self._extended = mailbox, extended
        _meeting[extended] = _meeting.get(extended, 0) + 1

    def close(self) -> None:
        _meeting[self._extended] = max(0, _meeting.get(self._extended, 0) - 1)
        self._mailbox.close()
