"""The values that each replica has of a variable that differs by replica.

They stand beside the value that TensorFlow reads, as one tensor (replicas, *shape) whose name ends in
`@replicas`: between workers every one holds its own rows. An equal number of replicas gets them bit
for bit; another number, and every other reader, takes the one value, as TensorFlow does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ckptfmt.engine import (
    ORDER_TENSOR,
    SPARE,
    Comparison,
    Part,
    Staged,
    StoredLeaf,
    TensorSource,
)
from ckptfmt.tensorflow.distributed import (
    differs_by_replica,
    has_replicas,
    is_sync_on_read,
    keep_replicas,
    replicas_of,
    workers_of,
)
from ckptfmt.tensorflow.strategy_group import is_meeting, rank_of
from ckptfmt.tensorflow.survey import Keys
from ckptfmt.tensorflow.tensors import dtype_name, host_array, make_tensor, raw_variable

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIX = "@replicas"


def beside(keys: Keys) -> Keys:
    """The path of the replicas' own values."""
    return (*keys[:-1], f"{keys[-1]}{SUFFIX}")


def _rows(variable: Any) -> tuple[int, int, tuple[int, ...]]:
    """This worker's first row, how many there are on all workers, and the shape of one."""
    count, workers = len(replicas_of(variable)), workers_of(variable)
    first = rank_of(variable.distribute_strategy) * count if workers > 1 else 0
    return first, count * workers, tuple(variable.shape)


def keeps_replicas(raw: Any) -> bool:
    """Whether the replicas' own values are saved too."""
    together = has_replicas(raw) and is_meeting(raw.distribute_strategy)
    return differs_by_replica(raw, together=together)


def source_of_replicas(variable: Any, name: str) -> TensorSource:
    """This worker's rows at save, as they are now."""
    first, total, shape = _rows(variable)
    values = np.stack([host_array(v.read_value()) for v in replicas_of(variable)])
    dtype = dtype_name(variable.dtype, name)
    own = TensorSource(dtype, values.shape, lambda: values, None, {SPARE: True}, variable)
    if len(values) == total:
        return own
    whole = TensorSource(dtype, (total, *shape), lambda: values, ("replicas", id(variable)))
    whole.attributes = own.attributes
    whole.parts = [Part((first, *(0 for _ in shape)), own)]
    whole.keep = variable
    return whole


def fill_replicas(variable: Any, rows: NDArray[Any], name: str) -> None:
    """Give a variable that came after the restore its replicas' own values, if it has as many."""
    raw = raw_variable(variable, name)
    if can_take_replicas(raw):
        first, total, shape = _rows(raw)
        if rows.shape == (total, *shape):
            with tf.init_scope():
                for replica, row in zip(replicas_of(raw), rows[first:], strict=False):
                    replica.assign(make_tensor(np.asarray(row), name))


def can_take_replicas(raw: Any) -> bool:
    """Whether a variable's replicas here may be given values of their own: of several workers they
    are read in a call of all of them only."""
    if is_sync_on_read(raw):
        return True
    return has_replicas(raw) and is_meeting(raw.distribute_strategy)


class ReplicasTarget:
    """The replicas of this worker, each given its own value back."""

    order = ORDER_TENSOR

    def __init__(self, variable: Any, name: str, source: str) -> None:
        self.name = name
        self.identities: dict[str, Hashable] = {}
        self._variable, self._source = variable, source
        self._put_back: Callable[[], None] | None = None

    def fits(self, stored: Mapping[str, StoredLeaf]) -> bool:
        """Whether it was as many replicas that were saved."""
        _, total, shape = _rows(self._variable)
        return stored[self._source].shape == (total, *shape)

    def compare(self, comparison: Comparison) -> None:
        first, total, shape = _rows(self._variable)
        count = len(replicas_of(self._variable))
        box = ((first, *(0 for _ in shape)), (count, *shape))
        comparison.tensor(
            self.name,
            dtype_name(self._variable.dtype, self.name),
            (total, *shape),
            source=self._source if self._source != self.name else None,
            boxes=None if count == total else [box],
        )

    def bind(self, staged: Staged) -> None:
        if self.name not in staged:
            return
        own = replicas_of(self._variable)
        _, total, _ = _rows(self._variable)
        rows = staged[self.name] if len(own) == total else staged.parts(self.name)[0]
        with tf.init_scope():
            self._put_back = keep_replicas(self._variable) if staged.undoable else None
            for replica, row in zip(own, rows, strict=True):
                replica.assign(make_tensor(np.asarray(row), self.name))

    def undo(self) -> None:
        if self._put_back is not None:
            with tf.init_scope():
                self._put_back()
            self._put_back = None
