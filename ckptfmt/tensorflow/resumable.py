"""A data set that goes on where it stood by skipping what was given out: for pipelines whose position
TensorFlow cannot write down, for distributed ones, and where a shuffle buffer is too large to save.

What is saved is two numbers. What comes after a resume is what would have come, if every epoch can
be made anew in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import tensorflow as tf

from ckptfmt.errors import MismatchError, UsageError
from ckptfmt.tensorflow.iterators import describe


class Resumable:
    """Elements of a data set, epoch by epoch; a plain part of a tree: it is saved and restored.

    Each `for` over it takes the rest of an epoch, and the next one the next epoch.

    Attributes:
        epoch: How many epochs are over.
        position: How many elements of this epoch were given out.
    """

    def __init__(
        self, make: Callable[[int], tf.data.Dataset], wrap: Callable[[Any], Iterable[Any]] | None
    ) -> None:
        self.epoch, self.position = 0, 0
        self._make, self._wrap = make, wrap
        self._elements: Iterator[Any] | None = None

    def __iter__(self) -> Resumable:
        return self

    def __next__(self) -> Any:
        if self._elements is None:
            dataset = self._make(self.epoch)
            if not isinstance(dataset, tf.data.Dataset):
                _refuse_type(dataset)
            _check_seeds(dataset)
            self._check_length(dataset)
            left = dataset.skip(self.position) if self.position else dataset
            self._elements = iter(left if self._wrap is None else self._wrap(left))
        try:
            element = next(self._elements)
        except StopIteration:
            self.epoch, self.position, self._elements = self.epoch + 1, 0, None
            raise
        self.position += 1
        return element

    def _check_length(self, dataset: Any) -> None:
        """A known length (unknown and infinite ones are negative) must reach the position."""
        length = int(dataset.cardinality())
        if 0 <= length < self.position:
            raise MismatchError(
                "the data end before the position that was saved",
                reason="resumable",
                expected=f"{self.position} elements or more in epoch {self.epoch}",
                found=str(length),
                do="make the data set as it was when it was saved, batch size included",
            )

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a `state_dict` was taken.

        Raises:
            MismatchError: It is not the state of such a data set.
        """
        numbers = [state.get(key) for key in ("epoch", "position")] if _is_state(state) else []
        if not numbers or not all(type(n) is int and n >= 0 for n in numbers):
            raise MismatchError(
                "not the position of a resumable data set",
                reason="resumable",
                expected="epoch and position, from 0",
                found=repr(state)[:200],
                do="restore the checkpoint that was saved with one in this place",
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._elements = None


def resumable(
    make: tf.data.Dataset | Callable[[int], tf.data.Dataset],
    *,
    wrap: Callable[[Any], Iterable[Any]] | None = None,
) -> Resumable:
    """Count the elements of a data set, and skip them after a restore.

    Args:
        make: Makes the data set of an epoch, counted from 0: `lambda epoch: files.shuffle(10_000,
            seed=epoch).batch(32)`. A data set itself is the same in every epoch.
        wrap: Makes what the elements come from of the data set after the skip:
            `strategy.experimental_distribute_dataset`. One element of it is one of the data set.
    Raises:
        UsageError: kind `usage-resumable`: a shuffle that gives another order after a restart, or
            something that is no data set. What a function makes is looked at when the epoch begins.
    """
    if not isinstance(make, tf.data.Dataset):
        if not callable(make):
            _refuse_type(make)
        return Resumable(make, wrap)
    dataset = make
    _check_seeds(dataset)
    for _, part in describe(dataset):
        if getattr(part, "_reshuffle_each_iteration", False):
            _refuse("a shuffle that gives every epoch of a process another order")
    return Resumable(lambda epoch: dataset, wrap)


def _is_state(state: object) -> bool:
    return isinstance(state, Mapping) and set(state) == {"epoch", "position"}


def _check_seeds(dataset: Any) -> None:
    for text, _ in describe(dataset):
        if text.startswith("Shuffle(") and "seed=0, seed2=0" in text:
            _refuse("a shuffle without a seed")


def _refuse_type(found: object) -> NoReturn:
    raise UsageError(
        "not a data set of tf.data",
        reason="resumable",
        expected="a tf.data.Dataset, or a function of the epoch that makes one",
        found=type(found).__name__,
        do="tf.data.Dataset.from_generator makes one of a generator",
    )


def _refuse(found: str) -> None:
    raise UsageError(
        "the order of this data set cannot be made again",
        reason="resumable",
        found=found,
        do="pass a function of the epoch: lambda epoch: dataset.shuffle(n, seed=epoch)",
    )
