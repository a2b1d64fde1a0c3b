"""What the Keras callbacks refuse before a `fit` begins: nothing has been saved or changed then."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ckptfmt.errors import UsageError
from ckptfmt.manager import Manager
from ckptfmt.tensorflow.fit_data import callbacks_beside
from ckptfmt.tensorflow.strategy_group import size_of

MARK = "keras.callback"
"""In a checkpoint's metadata: the name of the callback that saved it."""


def check_save_freq(save_freq: object) -> None:
    """Refuse what is neither "epoch" nor a number of batches.

    Raises:
        UsageError: It is something else.
    """
    if save_freq == "epoch" or (type(save_freq) is int and save_freq > 0):
        return
    raise UsageError(
        "not a frequency",
        reason="save-freq",
        where="save_freq",
        expected='"epoch", or a number of batches',
        found=repr(save_freq),
    )


def check_strategy(callback: object, strategy: Any) -> None:
    """Refuse strategies whose workers a `fit` does not serve.

    Keras 3.15 averages the first batch over the workers before any callback is asked, and raises
    there; past that, at the first step's logs.

    Raises:
        UsageError: kind `usage-workers`: there are several workers.
    """
    servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    workers = size_of(strategy)
    if not servers and workers == 1:
        return
    raise UsageError(
        f"Keras {keras.__version__} has no fit for several workers, so {type(callback).__name__} "
        "cannot serve one",
        reason="workers",
        expected="one process, under MirroredStrategy if it has several devices",
        found=type(strategy).__name__ + ("" if servers else f" with {workers} workers"),
        do="train in a loop of your own with strategy.run, and save with "
        "ckptfmt.Manager(..., group=strategy) on every worker: docs/examples/tensorflow_workers.py"
        if not servers
        else "train in a loop of your own, and save with ckptfmt.Manager in the coordinator",
    )


def check_store(callback: object, own: str, manager: Manager, model: Any) -> None:
    """Refuse a store that another callback uses: each would delete what the other keeps.

    Args:
        own: As the callback marks its checkpoints; it may be of a class derived from ours.
    Raises:
        UsageError: kind `usage-shared-store`: one of this `fit` does, or one of an earlier run did.
    """
    url = manager.store.url
    for other in callbacks_beside(model):
        theirs = getattr(other, "_manager", None)
        if other is not callback and isinstance(theirs, Manager) and theirs.store.url == url:
            raise _shared(url, f"{own} and {type(other).__name__}, both in this fit", own)
    latest = manager.latest()
    if latest is None or latest.step is None:
        return
    mark = latest.metadata.get(MARK)
    if mark != own and (mark is not None or own == "BackupAndRestore"):
        who = f"which {mark} saved" if mark else "which BackupAndRestore did not save"
        raise _shared(url, f"{latest.name}, {who}", own)


def _shared(url: str, found: str, own: str) -> UsageError:
    return UsageError(
        "one store serves one callback: each numbers its steps and deletes what is old by itself",
        reason="shared-store",
        where=url,
        expected=f"a store that {own} has for itself",
        found=found,
        do=f"give each its own folder; it may lie in the other's: {own}({_below(url, own)!r})",
    )


def _below(url: str, own: str) -> str:
    return f"{url.rstrip('/')}/{'backup' if own == 'BackupAndRestore' else 'models'}"
