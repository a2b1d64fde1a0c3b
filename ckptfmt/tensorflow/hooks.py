"""To be told when an object is built, or is given something new to hold.

Both hooks sit on one object, never on a class, and are gone when nobody listens any more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Remove = Callable[[], None]
_LISTENERS, _UNWRAP = "_ckptfmt_listeners", "_ckptfmt_unwrap"


@dataclass(frozen=True, slots=True)
class Listener:
    """Called around every call of a method. What `before` raises keeps the call from being made."""

    before: Callable[[], None]
    after: Callable[[], None]


def listen(obj: Any, method: str, listener: Listener) -> Remove:
    """Be told of the calls of one object's method, through a wrapper in its own attributes.

    Returns:
        What takes the listener away, and with the last one the wrapper.
    """
    current = getattr(obj, method)
    listeners: list[Listener] | None = getattr(current, _LISTENERS, None)
    if listeners is None:
        own = vars(obj).get(method)
        told: list[Listener] = []
        listeners = told

        @functools.wraps(current)  # Keras reads the signature, and marks default implementations
        def hooked(*args: Any, **kwargs: Any) -> Any:
            for one in list(told):
                one.before()
            made = current(*args, **kwargs)
            for one in list(told):
                one.after()
            return made

        setattr(hooked, _LISTENERS, listeners)
        # Past Keras's own __setattr__: a layer that is built refuses new attributes of some kinds.
        object.__setattr__(obj, method, hooked)

        def unwrap() -> None:
            if vars(obj).get(method) is hooked:  # else somebody has wrapped it since
                object.__delattr__(obj, method)
                if own is not None:
                    object.__setattr__(obj, method, own)

        setattr(hooked, _UNWRAP, unwrap)
    held = getattr(obj, method)
    listeners.append(listener)

    def remove() -> None:
        if listener in listeners:
            listeners.remove(listener)
        if not listeners:
            getattr(held, _UNWRAP)()

    return remove


class _Position:
    """What TensorFlow takes for a restore that waited for an attribute."""

    restore_uid = -1  # after those of TensorFlow's own

    def __init__(self, name: str, listeners: list[Callable[[str, Any], None]]) -> None:
        self.checkpoint = self
        self._name = name
        self._listeners = listeners

    def restore(self, trackable: Any, *args: object, **kwargs: object) -> None:
        for listener in list(self._listeners):
            listener(self._name, trackable)


class _Arrivals(dict[str, Any]):
    """An object's deferred dependencies: in TensorFlow a dict from a child's name to what waits for
    it, from which the name is popped when the child comes. Here somebody waits for every name."""

    def __init__(self, waiting: dict[str, Any]) -> None:
        super().__init__(waiting)
        self.listeners: list[Callable[[str, Any], None]] = []

    def pop(self, name: str, default: Any = ()) -> Any:
        return [*super().pop(name, default), _Position(name, self.listeners)]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy of the object has no listeners


def listen_for_children(obj: Any, listener: Callable[[str, Any], None]) -> Remove:
    """Be told (name, child) of everything that a Trackable, a tracked list or dict is given."""
    waiting = obj._deferred_dependencies
    if not isinstance(waiting, _Arrivals):
        waiting = obj._self_unconditional_deferred_dependencies = _Arrivals(waiting)
    listeners = waiting.listeners
    listeners.append(listener)

    def remove() -> None:
        if listener in listeners:
            listeners.remove(listener)
        if not listeners and obj._deferred_dependencies is waiting:
            obj._self_unconditional_deferred_dependencies = dict(waiting)

    return remove
