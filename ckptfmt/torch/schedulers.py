"""Learning-rate schedulers: their state, and the names of the functions that torch does not store.

A lambda has no state, and code is never stored: its name is kept and compared. An object that is
called for the rate has state, which torch takes from its `__dict__`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ckptfmt.engine import (
    ORDER_USER_CODE,
    Captured,
    Comparison,
    Staged,
    StoredLeaf,
    copy_state,
)
from ckptfmt.errors import warn
from ckptfmt.format import join_name, parse_key, split_name
from ckptfmt.torch.trees import map_tree, mark, to_torch

CLASS = "torch.scheduler"
FUNCTIONS = "torch.functions"

_FUNCTION = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)


def capture(scheduler: Any, name: str) -> Captured:
    """The scheduler's `state_dict()`; functions are None there, and stand by name beside it."""
    attributes: dict[str, dict[str, object]] = {}
    state = mark(_without_functions(scheduler.state_dict()), attributes)
    own = attributes.setdefault("", {})
    own[CLASS] = type(scheduler).__name__
    functions = functions_of(scheduler)
    if functions:
        own[FUNCTIONS] = functions
    return Captured(state, attributes)


def functions_of(scheduler: Any) -> dict[str, str]:
    """Name below the scheduler -> name of the function there, of those that it holds too."""
    made: dict[str, str] = {}

    def leaf(value: Any, at: str) -> Any:
        if isinstance(value, _FUNCTION):
            made[at] = _name_of(value)
        return value

    map_tree({k: v for k, v in vars(scheduler).items() if k != "optimizer"}, "", leaf)
    for position, child in enumerate(getattr(scheduler, "_schedulers", None) or ()):
        if isinstance(child, LRScheduler):
            below = join_name("_schedulers", str(position))
            made.update({join_name(below, at): n for at, n in functions_of(child).items()})
    return made


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"partial({_name_of(function.func)})"
    return str(getattr(function, "__name__", type(function).__name__))


def _without_functions(state: Any) -> Any:
    return map_tree(state, "", lambda value, at: None if isinstance(value, _FUNCTION) else value)


class SchedulerTarget:
    """A scheduler that takes its state itself, given a deep copy; its functions stay its own."""

    order = ORDER_USER_CODE

    def __init__(self, scheduler: Any, name: str) -> None:
        self.name = name
        self._scheduler = scheduler
        self._stored: Mapping[str, StoredLeaf] = {}
        self._others: list[str] = []
        self._old: tuple[Any, dict[str, Any]] | None = None

    def compare(self, comparison: Comparison) -> None:
        self._stored = comparison.stored(self.name)
        attributes = comparison.attributes(self.name)
        own = type(self._scheduler).__name__
        stored_class = attributes.get(CLASS, own)
        if stored_class != own:
            comparison.mismatch(self.name, f"the state of {own}", f"the state of {stored_class}")
        elif self._stored and not self._stored_keys() & self._scheduler.state_dict().keys():
            found = "what is no state of a scheduler: " + ", ".join(sorted(self._stored_keys())[:5])
            comparison.mismatch(self.name, f"the state of {own}", found)
        else:
            self._compare_groups(comparison)
        functions = attributes.get(FUNCTIONS)
        if comparison.subtree(self.name):
            self._compare_functions(functions if isinstance(functions, dict) else {}, comparison)

    def _stored_keys(self) -> set[str]:
        depth = len(split_name(self.name))
        return {str(parse_key(split_name(n)[depth])) for n in self._stored if n != self.name}

    def _compare_groups(self, comparison: Comparison) -> None:
        """A rate for each parameter group; torch would find out in some later step."""
        name = join_name(self.name, "base_lrs")
        rates = self._stored[name].value if name in self._stored else None
        groups = len(self._scheduler.optimizer.param_groups)
        if isinstance(rates, list) and len(rates) != groups:
            comparison.mismatch(name, f"{groups} parameter groups", f"rates for {len(rates)}")

    def _compare_functions(self, stored: Mapping[str, Any], comparison: Comparison) -> None:
        self._others = []
        for at, own in functions_of(self._scheduler).items():
            full = join_name(self.name, at)
            if stored.get(at) not in (own, None):
                self._others.append(f"{full}: stored was {stored[at]!r}, the target has {own!r}")
            comparison.matched_by[full] = f"the target's own function {own!r}: code is not stored"

    def bind(self, staged: Staged) -> None:
        if self.name not in staged:
            return
        scheduler = self._scheduler
        state = to_torch(staged.subtree(self.name), self.name, self._stored)
        before = scheduler.state_dict()
        self._old = copy_state(_without_functions(before)), dict(vars(scheduler))
        scheduler.load_state_dict(_with_functions(state, before))
        for text in self._others:
            warn(f"{text}; functions are not stored, the target's is used")

    def undo(self) -> None:
        if self._old is None:
            return
        old, attributes = self._old
        scheduler = self._scheduler
        scheduler.load_state_dict(_with_functions(old, scheduler.state_dict()))
        for key in vars(scheduler).keys() - attributes.keys():
            delattr(scheduler, key)
        self._old = None


def _with_functions(state: Any, own: Any) -> Any:
    """The state with the scheduler's own functions where it had some."""
    functions: dict[str, Any] = {}

    def find(value: Any, at: str) -> Any:
        if isinstance(value, _FUNCTION):
            functions[at] = value
        return value

    map_tree(own, "", find)
    return map_tree(state, "", lambda value, at: functions.get(at, value))
