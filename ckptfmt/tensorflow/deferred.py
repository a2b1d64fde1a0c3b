"""Values that wait in host memory for variables which do not exist yet.

A restore *defers* what is stored below an object that has no variables so far. Each target that has
such names makes a `Waiting`; all of one call belong to a `Deferred`, which the status object shows.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import keras

from ckptfmt.engine import Matcher, cast_array
from ckptfmt.errors import MismatchError, warn
from ckptfmt.tensorflow.hooks import Remove
from ckptfmt.types import Select


@dataclass(frozen=True, slots=True)
class Rules:
    """The words of the restore that go on to hold for what arrives later."""

    strict: bool = True
    allow_missing: Select = ()
    allow_unexpected: Select = ()
    allow_cast: bool | Select = False

    def missing(self, name: str) -> bool:
        """True if a variable without a stored value is an error."""
        return self.strict and not Matcher(self.allow_missing)(name)

    def unexpected(self, name: str) -> bool:
        """True if a stored value without a variable is an error."""
        return self.strict and not Matcher(self.allow_unexpected)(name)

    def casts(self, name: str) -> bool:
        if isinstance(self.allow_cast, bool):
            return self.allow_cast
        return Matcher(self.allow_cast)(name)


@dataclass(slots=True)
class _Record:
    """What is told when nobody holds the values any more."""

    names: dict[str, None] = field(default_factory=dict)
    settled: bool = False


class Waiting:
    """What one target waits for.

    Attributes:
        obj: What is to make the variables.
        name: The target's.
        values: Stored name -> array or plain value, on the host, in memory of its own.
        arrived: Names that came after the restore, and were filled.
        came: Their variables, by id: one may have another name when more of its paths are there.
    """

    def __init__(self, obj: Any, name: str, deferred: Deferred, values: dict[str, Any]) -> None:
        self.obj = obj
        self.name = name
        self.values = values
        self.arrived: dict[str, None] = {}
        self.came: dict[int, Any] = {}
        self.deferred = deferred
        self._removes: list[Remove] = []
        self._failures: dict[int, tuple[Any, MismatchError]] = {}
        deferred.add(self)
        _LIVE.add(self)

    def hooked(self, remove: Remove) -> None:
        self._removes.append(remove)

    def take(self, stored: str, name: str, variable: Any = None) -> None:
        """A value has found its variable."""
        del self.values[stored]
        self.came[id(variable)] = variable
        self.arrived[name] = None
        self.deferred.record.names.pop(stored, None)

    def settle(self) -> None:
        """Listen no longer if nothing is left to wait for."""
        if not (self.values or self._failures or (self.deferred.strict and self.more_may_come())):
            self._unhook()

    def more_may_come(self) -> bool:
        """True if variables may come that nothing is stored for: a strict restore refuses them."""
        return False

    def refuse(self, obj: Any, error: MismatchError) -> None:
        """What was built does not fit: building it raises until the status is closed.

        Keras swallows what a symbolic call of a layer raises and goes on eagerly, with the variables
        that are there. So the object counts as not built: the next call asks again, and gets the
        same answer.
        """
        error._keras_call_info_injected = True  # type: ignore[attr-defined]
        _forget_traces()
        self._failures[id(obj)] = (obj, error)
        obj.built = False

    def raise_again(self, obj: Any) -> None:
        """If it was refused before."""
        if id(obj) in self._failures:
            _forget_traces()
            raise self._failures[id(obj)][1]

    def forgive(self) -> None:
        """Take what was refused as it is: it keeps its initial values."""
        for obj, _ in self._failures.values():
            obj.built = True
        self._failures.clear()
        self.settle()

    def close(self) -> None:
        self.values.clear()
        self.forgive()
        self._unhook()

    def _unhook(self) -> None:
        while self._removes:
            self._removes.pop()()


def _forget_traces() -> None:
    """Let the models whose `fit`, `evaluate` or `predict` led here make their functions anew.

    They keep what they traced, and TensorFlow answers to a function whose first trace failed with
    errors of its own ever after, whatever became of the cause.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, keras.Model):
            for name in ("train_function", "test_function", "predict_function"):
                if getattr(model, name, None) is not None:
                    setattr(model, name, None)
        frame = frame.f_back


_LIVE: weakref.WeakSet[Waiting] = weakref.WeakSet()


def warn_of_waiting(obj: Any, name: str) -> None:
    """At a save: say that what waits for an object's variables is not in them, and is not saved."""
    count = sum(
        len(one.values) for one in list(_LIVE) if one.obj is obj and not one.deferred.partial
    )
    if count:
        warn(
            f"{name or 'the object'}: {count} restored values still wait for their variables and are "
            "not saved; build it first, or say expect_partial() to the status of the restore"
        )


class Deferred:
    """All that one restore left open."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.partial = False
        self.waiting: list[Waiting] = []
        self.counters: set[str] = set()
        """Names of single integers that were restored: they alone are no match."""
        self.targets: list[Any] = []
        """Targets that can say which of their variables exist and were never filled."""
        self.record = _Record()
        weakref.finalize(self, _tell, self.record)

    @property
    def names(self) -> list[str]:
        """Stored names that still wait."""
        return [name for one in self.waiting for name in one.values]

    @property
    def strict(self) -> bool:
        return self.rules.strict and not self.partial

    def add(self, waiting: Waiting) -> None:
        self.waiting.append(waiting)
        self.record.names |= dict.fromkeys(waiting.values)

    def drop(self, waiting: Waiting) -> None:
        """It never was: what it belongs to is rolled back."""
        for name in waiting.values:
            self.record.names.pop(name, None)
        waiting.close()
        self.waiting.remove(waiting)

    def expect_partial(self) -> None:
        self.partial = self.record.settled = True
        for one in self.waiting:
            one.forgive()

    def close(self) -> None:
        self.record.settled = True
        for one in self.waiting:
            one.close()


def _tell(record: _Record) -> None:
    if record.names and not record.settled:
        names = list(record.names)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        # On stderr, as a save's error that nobody asked for: no caller is left to be warned.
        sys.stderr.write(
            f"ckptfmt: {len(names)} restored values were never used, since their variables were never "
            f"made: {', '.join(names[:3])}{more}; ask the status of restore() to assert_consumed(), "
            "or tell it to expect_partial()\n"
        )


_CURRENT: ContextVar[Deferred | None] = ContextVar("ckptfmt_deferred", default=None)


@contextmanager
def collecting(rules: Rules) -> Iterator[Deferred]:
    """What is deferred by restores within, for the one who shows it."""
    made = Deferred(rules)
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)


def current() -> Deferred:
    """The collection of the restore under way; one of its own where nobody shows it."""
    return _CURRENT.get() or Deferred(Rules())


def is_collecting() -> bool:
    return _CURRENT.get() is not None


def note_counter(name: str, raw: Any) -> None:
    """Say of a restored variable that it is a single integer, if it is."""
    deferred = _CURRENT.get()
    if deferred is not None and raw.shape.rank == 0 and raw.dtype.is_integer:
        deferred.counters.add(name)


def note_target(target: Any) -> None:
    """A target that can be asked for `unfilled()` later."""
    deferred = _CURRENT.get()
    if deferred is not None:
        deferred.targets.append(target)


def convert(array: Any, wanted: str, rules: Rules, name: str) -> Any:
    """A value as the dtype that its variable has, where that may be.

    Raises:
        MismatchError: It may not, or does not fit.
    """
    if rules.casts(name):
        return cast_array(array, wanted, name)
    raise MismatchError(
        "a variable that came later has another dtype",
        reason="tree",
        where=name,
        expected=wanted,
        found=str(array.dtype),
        do="allow_cast= converts dtypes",
    )
