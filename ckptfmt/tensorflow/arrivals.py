"""Variables of a module or model that come after the restore: they are given what waits for them.

A layer that is not built says so when it is built; a module, a list or a dict of TensorFlow's says so
when it is given something. What has come is named and matched as in a restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.variables import AutocastScope

from ckptfmt.engine import StoredLeaf
from ckptfmt.errors import MismatchError, UsageError
from ckptfmt.format import join_name
from ckptfmt.tensorflow.deferred import Waiting, convert, current
from ckptfmt.tensorflow.distributed import assign_as_one
from ckptfmt.tensorflow.hooks import Listener, listen, listen_for_children
from ckptfmt.tensorflow.keras_objects import given_name, trust_full_name
from ckptfmt.tensorflow.matching import absolute, match, stored_aliases, unique_full_names
from ckptfmt.tensorflow.objects import children, cleared_by_reset, empty_nodes, late_method
from ckptfmt.tensorflow.own_state import fill_late
from ckptfmt.tensorflow.replicas import SUFFIX, fill_replicas
from ckptfmt.tensorflow.survey import Edge, Found, Survey, take_survey
from ckptfmt.tensorflow.tensors import ALIASES, dtype_name, make_tensor, raw_variable, tensor_of
from ckptfmt.tensorflow.trackables import expand, is_keras
from ckptfmt.tensorflow.vocabularies import settle

_SAVE_COUNTER = "save_counter"


def waits_below(made: Survey, left: Sequence[str], where: str) -> list[str]:
    """Those of the stored names left that belong to what has no variables yet."""
    empty = {absolute(where, name) for name in empty_nodes(made)}
    counters = {absolute(where, join_name(name, _SAVE_COUNTER)) for name in _without_counter(made)}
    return [
        stored
        for stored in left
        if stored in counters or any(above in empty for above in _and_above(stored))
    ]


def _and_above(name: str) -> Iterator[str]:
    """A name, and every container that it lies in, the root with the empty name last."""
    yield name
    while name:
        name = name.rpartition("/")[0]
        yield name


def counters_of(made: Survey) -> list[str]:
    """The counters in which each tf.train.Checkpoint counts its own saves, as far as there are any."""
    names = {
        join_name(name, _SAVE_COUNTER) if name else _SAVE_COUNTER
        for name, obj in made.nodes
        if isinstance(obj, tf.train.Checkpoint)
    }
    return [one.name for one in made.found if one.name in names]


def _without_counter(made: Survey) -> dict[str, Any]:
    """Each tf.train.Checkpoint that has not counted a save yet: it makes its counter when it does."""
    has = {one.name for one in made.found}
    return {
        name: obj
        for name, obj in made.nodes
        if isinstance(obj, tf.train.Checkpoint) and join_name(name, _SAVE_COUNTER) not in has
    }


class ObjectWaiting(Waiting):
    """What a module, layer, model or metric waits for.

    Args:
        obj: The object.
        name: Its name in the tree.
        values: Stored name -> value.
        stored: Everything that is stored at and below `name`.
        missing: Of a variable and its name: it was not there, and takes part in the restore.
    """

    def __init__(
        self,
        obj: Any,
        name: str,
        values: dict[str, Any],
        stored: Mapping[str, StoredLeaf],
        missing: Callable[[Any, str], bool],
    ) -> None:
        super().__init__(obj, name, current(), values)
        self._missing = missing
        unique = set(unique_full_names(stored).values())
        self._leaves = {n: stored[n] if n in unique else _nameless(stored[n]) for n in values}
        self._aliases = stored_aliases(self._leaves, name)
        self._full_names = unique_full_names(self._leaves)
        self._watched: dict[int, Any] = {}
        self._cleared: set[str] = set()

    def start(self) -> None:
        made = take_survey(self.obj, self.name, children, trust_full_name, _given(self.obj))
        self._watch("", made)
        for name, checkpoint in _without_counter(made).items():
            if absolute(self.name, join_name(name, _SAVE_COUNTER)) in self.values:
                _ = checkpoint.save_counter  # made by being asked for

    def more_may_come(self) -> bool:
        return has_unbuilt(self._watched.values())

    def _watch(self, prefix: str, made: Survey) -> None:
        """Listen to everything that may be given variables."""
        watched = empty_nodes(made) | _without_counter(made)
        for name, obj in watched.items():
            if id(obj) in self._watched:
                continue
            self._watched[id(obj)] = obj
            full = join_name(prefix, name) if name else prefix
            if isinstance(obj, keras.layers.Layer):
                again, built = partial(self.raise_again, obj), partial(self._built, full, obj)
                self.hooked(listen(obj, "build", Listener(again, built)))
            elif is_keras(obj):
                if method := late_method(obj):
                    grown = partial(self._built, full, obj)
                    self.hooked(listen(obj, method, Listener(lambda: None, grown)))
            elif hasattr(obj, "_deferred_dependencies"):
                self.hooked(listen_for_children(obj, partial(self._given_child, full, obj)))
            if (part := cleared_by_reset(obj)) is not None:
                cleared = absolute(self.name, join_name(full, part) if full else part)
                reset = partial(self._cleared.add, cleared)
                self.hooked(listen(obj, "reset_state", Listener(lambda: None, reset)))

    def _built(self, name: str, obj: Any) -> None:
        """A layer or metric has made its variables."""
        where = absolute(self.name, name)
        made = take_survey(obj, where, children, trust_full_name, _given(obj))
        found = _prefixed(made.found, name)
        try:
            filled = self._fill(found)
            self._fill_holders(_prefixed(made.holders, name))
            with tf.init_scope(), AutocastScope(None):  # it may be built in a narrow layer's call
                settle(obj)
            if self.deferred.strict:
                self._check_complete(made, found, filled, where)
        except MismatchError as error:
            self.refuse(obj, error)
            raise
        self._watch(name, made)
        self.settle()

    def _given_child(self, name: str, owner: Any, key: str, child: Any) -> None:
        """A module, list or dict has been given something."""
        where = absolute(self.name, name)

        def below(obj: Any, at: str) -> list[Edge]:
            return list(expand((key,), child, at)) if obj is owner else children(obj, at)

        try:
            made = take_survey(owner, where, below, trust_full_name)
        except UsageError:
            return  # nothing that could be saved could be waited for
        self._fill(_prefixed(made.found, name))
        self._fill_holders(_prefixed(made.holders, name))
        made.nodes[:] = [(n, o) for n, o in made.nodes if n]
        self._watch(name, made)
        if isinstance(child, tf.__internal__.tracking.Trackable) and not is_keras(child):
            self._watch(join_name(name, key), Survey([], [("", child)]))
        self.settle()

    def _fill(self, found: Sequence[Found]) -> list[Found]:
        """Give variables the values that wait for them: all of those that came, or none."""
        rules = self.deferred.rules
        waiting = self._waiting_for(found)
        ready: list[tuple[Found, str, Any]] = []
        for one, (stored, _) in zip(found, match(found, waiting, self.name)):
            if stored:
                name = absolute(self.name, one.name)
                ready.append((one, stored, fitting(one.variable, self.values[stored], rules, name)))
        for one, stored, value in ready:
            name = absolute(self.name, one.name)
            keep = not self._cleared.isdisjoint(_and_above(name))  # reset before it was there
            if not keep:
                put(one.variable, value, stored)
            self.take(stored, name, one.variable)
            beside = f"{stored}{SUFFIX}"
            if beside in self.values:
                if not keep:
                    fill_replicas(one.variable, self.values[beside], beside)
                self.take(beside, beside)
        return [one for one, _, _ in ready]

    def _waiting_for(self, found: Sequence[Found]) -> dict[str, StoredLeaf]:
        """What may be stored of variables: of thousands that wait, few are looked at for a layer."""
        names = [absolute(self.name, n) for one in found for n in (one.name, *one.aliases)]
        maybe = [*names, *(self._aliases.get(name, "") for name in names)]
        maybe += [self._full_names.get(one.full_name, "") for one in found]
        return {n: self._leaves[n] for n in maybe if n in self._leaves and n in self.values}

    def _fill_holders(self, holders: Sequence[Found]) -> None:
        """Objects whose state is in no variable, such as tables that are made by `build`."""
        for one in holders:
            for stored in fill_late(one.variable, absolute(self.name, one.name), self.values):
                self.take(stored, stored)

    def _check_complete(
        self, made: Survey, found: Sequence[Found], filled: Sequence[Found], where: str
    ) -> None:
        """What was built has all that is stored for it, and nothing else."""
        rules, given = self.deferred.rules, {id(one.variable) for one in filled}
        missing = [
            name
            for one in found
            if id(one.variable) not in given
            and id(one.variable) not in self.came
            and (name := absolute(self.name, one.name))
            and self._missing(one.variable, name)
            and rules.missing(name)
        ]
        below = [n for n in self.values if not where or n == where or n.startswith(f"{where}/")]
        later = waits_below(made, below, where)
        left = [name for name in below if name not in later and rules.unexpected(name)]
        if missing or left:
            lines = [f"  missing in the checkpoint: {name}" for name in missing[:20]]
            lines += [f"  not in the target: {name}" for name in left[:20]]
            raise MismatchError(
                "a layer that was built after the restore disagrees with the checkpoint:\n"
                + "\n".join(lines),
                reason="tree",
                where=where,
                do="allow_missing= and allow_unexpected= of the restore, or expect_partial() of its "
                "status, make exceptions",
            )


def has_unbuilt(objects: Iterable[Any]) -> bool:
    return any(isinstance(obj, keras.layers.Layer) and not obj.built for obj in objects)


def _given(obj: Any) -> str:
    return given_name(obj) if is_keras(obj) else ""


def _nameless(leaf: StoredLeaf) -> StoredLeaf:
    """Without the full name, which others have too."""
    return replace(leaf, attributes={k: v for k, v in leaf.attributes.items() if k == ALIASES})


def _prefixed(found: Sequence[Found], prefix: str) -> list[Found]:
    """As named from the outermost object; keys are not."""
    if not prefix:
        return list(found)
    return [
        replace(
            one,
            name=join_name(prefix, one.name) if one.name else prefix,
            aliases=[join_name(prefix, alias) for alias in one.aliases],
        )
        for one in found
    ]


def fitting(variable: Any, value: Any, rules: Any, name: str) -> Any:
    """A value that waited, checked against the variable that has come.

    Raises:
        MismatchError: Wrong shape or dtype, or a plain value.
    """
    # In the call of a layer in mixed precision `dtype` is what it computes in, not what is stored.
    own = variable._dtype if isinstance(variable, keras.Variable) else variable.dtype
    shape, dtype = tf.TensorShape(variable.shape), tf.as_dtype(own)
    if not hasattr(value, "dtype") or not shape.is_compatible_with(value.shape):
        raise MismatchError(
            "a variable that came later does not fit what is stored for it",
            reason="tree",
            where=name,
            expected=f"{dtype.name} {'?' if shape.rank is None else shape.as_list()}",
            found=f"{value.dtype.name} {list(value.shape)}"
            if hasattr(value, "dtype")
            else "a plain value",
            do="give it the stored shape, or leave it out of names=",
        )
    wanted = dtype_name(dtype, name)
    have = "bytes" if value.dtype.kind in "OT" else value.dtype.name
    return value if have == wanted else convert(value, wanted, rules, name)


def put(variable: Any, value: Any, name: str) -> None:
    """Give a new variable its value, wherever it was made: eagerly, while a graph is traced, or in a
    stateless scope of Keras, which makes the variable later."""
    if isinstance(variable, keras.Variable) and getattr(variable, "_value", None) is None:
        variable._initializer = lambda shape, dtype=None: make_tensor(value, name)
        return
    with tf.init_scope():
        raw = raw_variable(variable, name)
        assign_as_one(raw, tensor_of(raw.dtype, value, name))
