"""Where a running `fit` stands in its data, and how another process gets there.

Keras gives callbacks no way to its data. So the running `fit` is found on the stack, and its *epoch
iterator* is told to take its tf.data iterators from here and to leave out the steps that are done.
Where TensorFlow can write an iterator's position down, that is what is saved. Where it cannot
(generators, `PyDataset`, distributed data), a resume sets Python's and NumPy's generators to what they
were when the iterator was made, and draws and drops as many batches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import dropwhile
from types import FrameType
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from ckptfmt.errors import MismatchError, UsageError, warn
from ckptfmt.tensorflow.iterators import (
    describe,
    in_words,
    is_generated,
    kinds,
    position_of,
    set_position,
)
from ckptfmt.tensorflow.rng import plain_generators, plain_setter

Step = tuple[int, int, Any]
"""First and last batch of an execution, counted from 0, and the iterator that gives them."""


def running_fit(model: Any) -> tuple[Any, Any]:
    """The epoch iterator and the callback list of the `fit` that led here.

    Raises:
        UsageError: No `fit` of this model did.
    """
    found = _fit_of(model)
    if found is not None:
        return found
    raise UsageError(
        "this callback works within model.fit",
        reason="no-fit",
        found=f"no fit of Keras {keras.__version__} above it",
        do="in a loop of your own use ckptfmt.Manager",
    )


def callbacks_beside(model: Any) -> Sequence[Any]:
    """The callbacks of the `fit` that led here; none where no `fit` did."""
    found = _fit_of(model)
    return () if found is None else found[1].callbacks


def _fit_of(model: Any) -> tuple[Any, Any] | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            epochs, callbacks = (
                frame.f_locals.get("epoch_iterator"),
                frame.f_locals.get("callbacks"),
            )
            if isinstance(epochs, EpochIterator) and callbacks is not None:
                return epochs, callbacks
        frame = frame.f_back
    return None


class FitData:
    """The data of one `fit`: hands its iterators to Keras, and knows what they have given."""

    def __init__(self, epochs: Any) -> None:
        self._epochs = epochs
        self._make, self._steps = epochs._get_iterator, epochs._enumerate_iterator
        self._made = 0
        self._current: Any = self._next_iterator()
        self._ready = True  # Keras has not asked for it yet
        self._learned = 0
        # Keras shuffles arrays by an operation that keeps a state. It has drawn an epoch's order
        # before the first batch, so that it says nothing that this state is not saved.
        self._is_array = isinstance(epochs.data_adapter, ArrayDataAdapter)
        self._distributed = isinstance(self._current, tf.distribute.DistributedIterator)
        self._refusal = ""
        if not isinstance(epochs.data_adapter, (ArrayDataAdapter, TFDatasetAdapter)):
            self._refusal = type(epochs.data_adapter).__name__.removesuffix("Adapter")
        elif self._distributed:
            self._refusal = "distributed data"
        self._dataset = _Dataset(epochs.data_adapter)
        self._before: dict[str, Any] = {}
        """What a resume needs from before the current iterator gave anything, where its position
        cannot be written down. That TensorFlow says only once it has given something."""
        self._noted = False
        self._resume: Mapping[str, Any] = {}
        self._drop = 0
        self._before_first: Callable[[], None] = lambda: None
        epochs._get_iterator = lambda: self
        epochs._enumerate_iterator = self._enumerate
        self._warn_if_lost()
        self._open()

    def is_last(self, batch: int) -> bool:
        """Whether the epoch is known to end with this batch, counted from 0."""
        known = self._epochs.steps_per_epoch or self._epochs.data_adapter.num_batches
        known = known or self._learned
        return bool(known) and batch + 1 >= known

    def done(self, batch: int) -> int:
        """How many batches of the epoch are done behind this one, counted from 0.

        Keras counts whole executions: the last one is short where the data end in it.
        """
        known = None if self._epochs.steps_per_epoch else self._epochs.data_adapter.num_batches
        return batch + 1 if known is None else min(batch + 1, known)

    @property
    def spec(self) -> Any:
        """Shapes and dtypes of a batch."""
        return tf.nest.map_structure(
            lambda one: None if isinstance(one, tf.OptionalSpec) else one,
            self._epochs._distributed_dataset.element_spec,
        )

    def _warn_if_lost(self) -> None:
        """Say what a resume cannot promise."""
        if self._refusal and not self._dataset.is_exact:
            warn(
                f"fit will resume by drawing and dropping the batches that are done, for the position "
                f"cannot be saved ({self._refusal}); that is exact only if {self._dataset.condition}"
            )

    # -- what Keras asks for ----------------------------------------------------------------------

    def __iter__(self) -> Any:
        """The next iterator over the data."""
        if not self._noted:
            self._note()
        self._noted = False
        if not self._ready:
            self._current = self._next_iterator()
            self._open()
        self._ready = False
        if "position" not in self._resume and self._resume.get("taken"):
            self._taken = self._resume["taken"]
            self._draw_and_drop(self._taken)
        return self._current

    def _next_iterator(self) -> Any:
        self._made += 1
        return iter(self._make())

    def _enumerate(self) -> Iterator[Step]:
        """The steps of an epoch, without those that were done before a resume."""
        resume, drop, before_first = self._resume, self._drop, self._before_first
        self._drop, self._before_first = 0, lambda: None
        if resume and "position" not in resume:
            self._dataset.restore(resume)
            if self._dataset.is_pipeline:
                while self._made < resume.get("iterators", 0):  # each draws a shuffle's next seeds
                    self._current = self._next_iterator()
            if resume["taken"]:
                plain_setter(resume["generators"], "fit/data")()
        if self._has_own_iterator():
            self._note()
        self._dataset.passes += 1
        steps = dropwhile(lambda step: step[1] < drop, self._steps())
        first = next(steps, None)
        if resume and self._epochs.steps_per_epoch:
            self._epochs._steps_seen += resume["seen"]
        self._resume = {}
        before_first()
        if first is not None:
            yield first
        yield from steps

    def _has_own_iterator(self) -> bool:
        """Whether the epoch that comes makes an iterator; else it goes on with the one before."""
        return not self._epochs.steps_per_epoch or self._epochs._current_iterator is None

    def _note(self) -> None:
        if self._refusal or not self._is_array:
            self._before = {"generators": plain_generators(), **self._dataset.state()}
        self._noted = True

    def _open(self) -> None:
        """A new iterator: nothing has been drawn from it."""
        self._taken, self._opening = 0, None
        if not self._refusal and not self._is_array:
            self._opening = self._position(self._current)

    def _position(self, iterator: Any, *, stateful: bool = True) -> Any:
        """Its position, or None if it has none that can be written down: there will be none again.

        Args:
            stateful: What the pipeline's functions keep elsewhere does not matter: no warning.
        """
        try:
            return position_of(iterator, "data", stateful=stateful)
        except UsageError as error:
            self._refusal = str(error.found or error)
            self._warn_if_lost()
            return None

    def _draw_and_drop(self, count: int) -> None:
        drawn = 0
        try:
            while drawn < count:
                next(self._current)
                drawn += 1
        except (StopIteration, tf.errors.OutOfRangeError):
            # A last execution that was short is counted whole where nobody knew how short.
            if count - drawn < self._epochs.steps_per_execution:
                return
            raise MismatchError(
                "the data end before the batch that was saved",
                reason="fit-data",
                expected=f"{count} batches",
                found=f"{drawn}",
                do="pass the data that the interrupted fit had",
            ) from None

    # -- saving and going on ----------------------------------------------------------------------

    def gave(self, count: int) -> None:
        """So many batches more are done."""
        self._taken += count

    def end_epoch(self, batch: int) -> None:
        """An epoch has had so many batches, as Keras counts them."""
        self._learned = batch

    def begin_next(self) -> None:
        """Make the iterator of the next epoch already: its seeds are drawn when it is made."""
        if self._has_own_iterator():
            self._current, self._ready = self._next_iterator(), True
            self._open()
            self._note()
            self._noted = False

    def state(self, batch: int) -> dict[str, Any]:
        """What is saved beside the iterator.

        Args:
            batch: How many batches of the epoch are done, as Keras counts them.
        """
        made: dict[str, Any] = {
            "taken": self._taken,
            "seen": max(0, self._epochs._steps_seen - batch) if self._epochs.steps_per_epoch else 0,
            "steps_per_epoch": self._epochs.steps_per_epoch or 0,
            "steps_per_execution": self._epochs.steps_per_execution,
            "batches": self._batches(),
            "learned": self._learned,
        }
        position = None
        if not self._refusal:
            unused = self._is_array or not self._taken
            position = self._position(self._current, stateful=unused)
        if position is None:
            made |= {"iterators": self._made, "refusal": self._refusal}
            return {**made, **self._before}
        made |= {"position": position, "pipeline": self._pipeline()}
        return made if self._opening is None else {**made, "opening": self._opening}

    def _pipeline(self) -> list[str]:
        return [text for text, _ in describe(self._current._dataset)]

    def _batches(self) -> list[int]:
        """How many batches a pass over the data has, and their size; 0 is not known."""
        adapter = self._epochs.data_adapter
        numbers = adapter.num_batches, adapter.batch_size
        return [int(n) if n is not None and 0 < n < math.inf else 0 for n in numbers]

    def _check_batches(self, state: Mapping[str, Any], batch: int) -> None:
        """The batches that are done must be as many of this fit's."""
        batches = state.get("batches", self._batches())
        if batch and batches != self._batches():
            raise MismatchError(
                "fit was interrupted in an epoch that is cut into other batches",
                reason="fit-batches",
                expected=_words(batches),
                found=_words(self._batches()),
                do="pass data of the same length and batch size; another batch size is possible "
                "from where an epoch begins",
            )

    def load(self, state: Mapping[str, Any], batch: int) -> None:
        """Go to where a state was taken: the iterator at once, if it has a position.

        Raises:
            MismatchError: This `fit` has other data, or cuts its epochs differently.
        """
        steps = self._epochs.steps_per_epoch or 0
        each = self._epochs.steps_per_execution
        if batch and (steps != state["steps_per_epoch"] or batch % each):
            raise MismatchError(
                "fit was interrupted in an epoch of another kind",
                reason="fit-steps",
                expected=f"steps_per_epoch={state['steps_per_epoch'] or None}, "
                f"steps_per_execution={state['steps_per_execution']}",
                found=f"steps_per_epoch={steps or None}, steps_per_execution={each}, "
                f"{batch} batches done",
                do="call compile and fit as before, or begin anew in another folder",
            )
        if "position" in state:
            own = [] if self._refusal else self._pipeline()
            if kinds(own) != kinds(state["pipeline"]):
                raise MismatchError(
                    "fit has other data than were saved",
                    reason="fit-data",
                    expected=in_words(state["pipeline"]),
                    found=self._refusal or in_words(own),
                    do="pass the data that the interrupted fit had",
                )
        self._check_batches(state, batch)
        if "position" in state:
            set_position(self._current, state["position"], "data")
            if "opening" in state and "Repeat" not in kinds(self._pipeline()):
                # A shuffle that has given all it had says no more which numbers its next pass takes,
                # and downstream of it there may still be batches. The start of this pass says it: the
                # data set, which counts, learns it from any iterator. (Where passes are repeated
                # in one iterator, that goes on counting, and has not given all.)
                set_position(iter(self._make()), state["opening"], "data")

    def resume(
        self, state: Mapping[str, Any], batch: int, before_first: Callable[[], None]
    ) -> None:
        """Let the next epoch begin behind the batches that are done.

        Args:
            before_first: Called before its first step, behind all `on_epoch_begin`.
        """
        self._resume, self._drop, self._before_first = state, batch, before_first
        # TensorFlow says it of an iterator that has given something: this one will have.
        self._refusal = self._refusal or state.get("refusal", "")
        self._taken = state["taken"] if "position" in state else 0
        self._learned, self._opening = state["learned"], state.get("opening")


def _words(batches: Sequence[int]) -> str:
    count, size = (str(n) if n else "unknown" for n in batches)
    return f"batches: {count}, of size: {size}"


class _Dataset:
    """A `PyDataset`, or what stands in its place: what it changes from epoch to epoch."""

    def __init__(self, adapter: Any) -> None:
        self._own = adapter.py_dataset if isinstance(adapter, PyDatasetAdapter) else None
        kind: Any = type(self._own)
        self._changes = self._own is not None and (
            kind.on_epoch_end is not keras.utils.PyDataset.on_epoch_end
            or kind.on_epoch_begin is not keras.utils.PyDataset.on_epoch_begin
        )
        names = [("get_state", "set_state"), ("state_dict", "load_state_dict")]
        self._methods = next(
            (n for n in names if all(callable(getattr(kind, one, None)) for one in n)), None
        )
        if self._own is None:
            self._methods = None
        self.passes = 0
        dataset = adapter.get_tf_dataset() if isinstance(adapter, TFDatasetAdapter) else None
        self.is_pipeline = isinstance(dataset, tf.data.Dataset) and not is_generated(dataset)
        """TensorFlow alone makes its elements: an iterator more changes nothing but shuffles' seeds."""

    @property
    def is_exact(self) -> bool:
        return self._own is not None and (self._methods is not None or not self._changes)

    @property
    def condition(self) -> str:
        if self._own is None:
            return "the data come again in the same order"
        return (
            f"{type(self._own).__name__} does the same in on_epoch_begin and on_epoch_end again: "
            "give it get_state and set_state"
        )

    def state(self) -> dict[str, Any]:
        made: dict[str, Any] = {"passes": self.passes}
        if self._methods is not None:
            made["dataset"] = getattr(self._own, self._methods[0])()
        return made

    def restore(self, state: Mapping[str, Any]) -> None:
        self.passes = state["passes"]
        if self._methods is not None and "dataset" in state:
            getattr(self._own, self._methods[1])(state["dataset"])
        elif self._own is not None and self._changes:
            put_back = plain_setter(plain_generators(), "")
            for _ in range(self.passes):
                self._own.on_epoch_begin()
                self._own.on_epoch_end()
            put_back()
