"""Calls that are made once for each time they are reached: never while a graph is traced.

TensorFlow runs a `tf.function` in Python once, to trace it, and the graph afterwards: a save in it would
be made at the first step and at none of the others, without a word.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ckptfmt.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def not_traced(function: F) -> F:
    """A function that raises UsageError, kind `usage-graph`, where a tf.function (or the function of a
    tf.data pipeline) is traced.

    AutoGraph takes the wrapper for a function that it has converted itself, and so calls it as it is:
    it would rewrite all of the engine below, some of which it breaks.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _is_tracing():
            raise UsageError(
                "a tf.function is traced: this call would be made once, not each time it runs",
                reason="graph",
                found=f"a call of {function.__qualname__}",
                do="call it outside of tf.function; in it only through tf.py_function, with control "
                "dependencies on what it is to save",
            )
        return function(*args, **kwargs)

    called.autograph_info__ = {}  # type: ignore[attr-defined]
    return cast("F", called)


def _is_tracing() -> bool:
    """Graphs of TensorFlow 1 are not meant: their values are arrays, from a session, at each call."""
    tensorflow: Any = sys.modules.get("tensorflow")
    eagerly = getattr(tensorflow, "executing_eagerly", None)  # None while it is being imported
    if eagerly is None or eagerly():
        return False
    return bool(tensorflow.compat.v1.get_default_graph().building_function)
