"""Iterators over tf.data pipelines: their serialized state, as bytes.

TensorFlow writes down where every transformation stands: shuffle buffers, positions in files, seeds.
What it cannot write down, a Python generator say, is refused by name; `resumable` serves there.
(TensorFlow itself refuses a generator only once it has begun.) A
state is taken by an iterator over the same pipeline only, so the pipeline's transformations are kept
beside it and compared before TensorFlow is asked: it breaks an iterator that it gives another's state.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ckptfmt.engine import ORDER_USER_CODE, Captured, Comparison, Staged, TensorSource
from ckptfmt.errors import MismatchError, UsageError, warn
from ckptfmt.format import join_name

PIPELINE = "tf.pipeline"
ELEMENT = "tf.element_spec"
_SKIP = "count the batches and skip them on resume: ckptfmt.tensorflow.resumable"

_KINDS = (tf.data.Iterator, tf.data.NumpyIterator, tf.distribute.DistributedIterator)
# How fast it runs, not what it gives.
_HARMLESS = re.compile(r"_(name|num_parallel_calls|.*parallelism.*|deterministic|.*prefetch.*)")
_IGNORE, _FAIL = 1, 2  # ExternalStatePolicy of TensorFlow
_GENERATOR = "GeneratorDataset"
_GENERATED: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Data set -> whether it draws from a generator: its functions are looked at once."""


class _Iterators:
    def holds(self, obj: object) -> bool:
        return isinstance(obj, _KINDS)

    def capture(self, obj: Any, name: str) -> Captured:
        iterator = _owned(obj, name)
        state = position_of(iterator, name)
        source = TensorSource(
            "uint8",
            state.shape,
            lambda: state,
            ("tensorflow.iterator", id(iterator)),
            {
                PIPELINE: [text for text, _ in describe(iterator._dataset)],
                ELEMENT: str(iterator.element_spec),
            },
            iterator,
        )
        return Captured({"state": source})

    def target(self, obj: Any, name: str) -> IteratorTarget:
        return IteratorTarget(_owned(obj, name), name)


ITERATORS = _Iterators()


def _owned(obj: Any, name: str) -> Any:
    """The iterator that TensorFlow can serialize."""
    if isinstance(obj, tf.data.NumpyIterator):
        return obj._iterator
    if isinstance(obj, tf.distribute.DistributedIterator):
        raise UsageError(
            "the position of a distributed iterator cannot be saved",
            reason="iterator",
            where=name,
            found="a DistributedIterator, which prefetches to its devices",
            do=_SKIP,
        )
    return obj


def position_of(iterator: Any, name: str, *, stateful: bool = False) -> Any:
    """Its state, as bytes in an array.

    Args:
        stateful: What its functions keep elsewhere does not matter: no warning.

    Raises:
        UsageError: kind `usage-iterator`: a transformation of the pipeline has no such state.
    """
    if not tf.executing_eagerly():
        raise UsageError(
            "an iterator has no state while a tf.function is traced",
            reason="graph",
            where=name,
            do="save outside of tf.function",
        )
    if is_generated(iterator._dataset):
        raise _refusal(iterator, name, f"{_GENERATOR} does not support checkpointing.")
    try:
        state = _serialized(iterator, _IGNORE)
    except tf.errors.OpError as error:
        raise _refusal(iterator, name, _reason(error)) from error
    if stateful:
        return state
    try:
        _serialized(iterator, _FAIL)
    except tf.errors.OpError as error:
        warn(
            f"{name or 'the iterator'}: its position is saved; what its functions keep elsewhere "
            f"is not ({_reason(error)})"
        )
    return state


def _serialized(iterator: Any, policy: int) -> Any:
    variants = tf.raw_ops.SerializeIterator(
        resource_handle=iterator._iterator_resource, external_state_policy=policy
    )
    return np.frombuffer(tf.io.serialize_tensor(variants).numpy(), np.uint8)


def is_generated(dataset: Any) -> bool:
    """Whether a Python generator gives any of its elements. TensorFlow writes such a pipeline down
    until it has asked the generator for the first one, and never after that."""
    if dataset not in _GENERATED:
        graphs = [
            function.function.graph
            for _, part in describe(dataset)
            for function in part._functions()
        ]
        # One that a function makes within another stands in the library of the outer one.
        _GENERATED[dataset] = any(
            node.op == _GENERATOR
            for graph in (graph.as_graph_def() for graph in graphs)
            for body in (graph.node, *(one.node_def for one in graph.library.function))
            for node in body
        )
    return _GENERATED[dataset]


def _refusal(iterator: Any, name: str, reason: str) -> UsageError:
    found = re.search(r"\w+Dataset\w*", reason)
    transformation = found.group() if found else type(iterator._dataset).__name__
    if transformation.startswith(_GENERATOR):  # what both of these are made of
        transformation = f"from_generator or prefetch_to_device ({_GENERATOR})"
    return UsageError(
        "the position of an input pipeline cannot be saved",
        reason="iterator",
        where=name,
        found=f"{transformation}: {reason}",
        do=_SKIP,
    )


def _reason(error: tf.errors.OpError) -> str:
    """TensorFlow's message without the op that it names."""
    text = re.sub(r"^\{\{.*?\}\} ?", "", str(error.message))
    return re.sub(r" ?\[Op:\w+\].*$", "", text, flags=re.DOTALL)[:300]


def describe(dataset: Any) -> list[tuple[str, Any]]:
    """(text, data set) of a pipeline's transformations, from the last one to its sources: the kind
    of each with the numbers that it was made with."""
    return list(_below(dataset, set()))


def _below(dataset: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(dataset) in seen:  # one that is used in many places is told of once
        return
    seen.add(id(dataset))
    kind = type(dataset).__name__.removeprefix("_").removesuffix("Dataset")
    if kind != "Options":
        numbers = ", ".join(f"{k}={v}" for k, v in _numbers(kind, vars(dataset)).items())
        yield f"{kind}({numbers})", dataset
    for source in dataset._inputs():
        yield from _below(source, seen)


def _numbers(kind: str, attributes: Mapping[str, Any]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in attributes.items():
        if _HARMLESS.fullmatch(key) or (kind == "Prefetch" and key == "_buffer_size"):
            continue
        if isinstance(value, tf.Tensor) and hasattr(value, "numpy") and value.shape.rank == 0:
            value = value.numpy().item() if value.dtype.is_integer else None
        if isinstance(value, (bool, int)):
            made[key.removeprefix("_")] = value
    return made


class IteratorTarget:
    """An iterator, moved to another position. `undo` moves it back."""

    order = ORDER_USER_CODE

    def __init__(self, iterator: Any, name: str) -> None:
        self.name = name
        self._state = join_name(name, "state")
        self._iterator = iterator
        self.identities: dict[str, Hashable] = {self._state: ("tensorflow.iterator", id(iterator))}
        self._old: Any = None
        self._note = ""

    def compare(self, comparison: Comparison) -> None:
        leaf = comparison.stored(self.name).get(self._state)
        self._note = ""
        if not comparison.tensor(
            self._state, "uint8", leaf.shape[:1] if leaf is not None else (0,)
        ):
            return
        assert leaf is not None
        own = [text for text, _ in describe(self._iterator._dataset)]
        spec, found = str(self._iterator.element_spec), leaf.attributes.get(PIPELINE)
        if leaf.attributes.get(ELEMENT, spec) != spec:
            comparison.mismatch(
                self._state, f"elements {spec}", f"elements {leaf.attributes[ELEMENT]}"
            )
        elif isinstance(found, list) and kinds(own) != kinds(found):
            comparison.mismatch(self._state, in_words(own), in_words(found))
        elif isinstance(found, list) and own != found:
            self._note = f"saved of {in_words(found)}, restored into {in_words(own)}"

    def bind(self, staged: Staged) -> None:
        if self._state not in staged:
            return
        if self._note:
            warn(f"{self._state}: the input pipeline was changed: {self._note}")
        with tf.init_scope():
            self._old = _variants(self._iterator)
            if self._old is None:
                raise MismatchError(
                    "an iterator whose position cannot be written down could not be moved back",
                    reason="iterator",
                    where=self._state,
                    do="build the pipeline as it was when it was saved",
                )
            set_position(self._iterator, staged[self._state], self._state)

    def undo(self) -> None:
        if self._old is not None:
            with tf.init_scope():
                _set(self._iterator, self._old)
            self._old = None


def set_position(iterator: Any, state: Any, name: str) -> None:
    """Move an iterator to where `position_of` found it.

    Raises:
        MismatchError: TensorFlow says that it is of another pipeline; the iterator is broken then.
    """
    try:
        _set(iterator, tf.io.parse_tensor(state.tobytes(), tf.variant))
    except tf.errors.OpError as error:
        raise MismatchError(
            "an iterator did not take the stored position",
            reason="iterator",
            where=name,
            found=_reason(error),
            do="build the pipeline as it was when it was saved",
        ) from error


def _set(iterator: Any, state: Any) -> None:
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)


def _variants(iterator: Any) -> Any:
    """Its position, for a way back; None where it has none to write down."""
    try:
        return tf.raw_ops.SerializeIterator(
            resource_handle=iterator._iterator_resource, external_state_policy=_IGNORE
        )
    except tf.errors.OpError:
        return None


def kinds(texts: list[str]) -> list[str]:
    """The transformations without their numbers, which may change from run to run."""
    return [str(text).partition("(")[0] for text in texts if not str(text).startswith("Prefetch")]


def in_words(texts: list[str]) -> str:
    """In the order in which the user wrote them."""
    return " > ".join(str(text) for text in reversed(texts))[:500]
