"""Preemption: a signal that says the job will be killed soon. The handler sets a flag; the manager
acts on it in `observe` and `save`, at a step's end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any
from weakref import WeakSet

from ckptfmt.errors import UsageError, warn

Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Save once more when the scheduler says that the job must go.

    A process that is forked meanwhile (a data loader's worker) has the handlers from before.

    Args:
        signals: Names of the signals that say so.
        deadline_s: How long after the signal the process may still live, in seconds.
        exit_code: What `Manager.save` leaves the process with (SystemExit) once the last checkpoint
            is durable; None: it returns, and the loop ends by itself.
    """

    def __init__(
        self,
        *,
        signals: Sequence[str] = ("SIGTERM",),
        deadline_s: float = 60.0,
        exit_code: int | None = None,
    ) -> None:
        self._numbers = [_number(name) for name in signals]
        if not deadline_s > 0:
            raise _wrong("deadline_s above 0", repr(deadline_s))
        self.deadline_s, self.exit_code = deadline_s, exit_code
        self._requested_s: float | None = None
        self._before: dict[int, Handler] = {}
        self._users = 0

    @property
    def requested(self) -> bool:
        """Whether the signal, or a call of `request`, has come."""
        return self._requested_s is not None

    @property
    def left_s(self) -> float:
        """What is left of the deadline, in seconds."""
        if self._requested_s is None:
            return self.deadline_s
        return max(0.0, self._requested_s + self.deadline_s - time.monotonic())

    def request(self, left_s: float | None = None) -> None:
        """Say it without a signal: from another thread, or where a notice is polled.

        Args:
            left_s: How long the process may still live, in seconds; None: the whole deadline.
        """
        if self._requested_s is None:
            passed_s = 0.0 if left_s is None else self.deadline_s - left_s
            self._requested_s = time.monotonic() - passed_s

    def install(self) -> None:
        """Take the signals; the handlers before it are still called. Off the main thread, where
        Python takes none, a CkptWarning."""
        if threading.current_thread() is not threading.main_thread():
            warn("no signal can be taken off the main thread: call request() of the Preemption")
            return
        self._users += 1
        _installed.add(self)
        for number in self._numbers:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Put the handlers back, once nobody uses them any more, but for those over which somebody
        has put others meanwhile: these call on what was before."""
        if threading.current_thread() is not threading.main_thread() or not self._users:
            return
        self._users -= 1
        if not self._users:
            self._put_back()

    def _put_back(self) -> None:
        for number in [*self._before]:
            if signal.getsignal(number) == self._handle:
                before = _living(number, self._before.pop(number))
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._users:
            self.request()
        before = self._before.get(number)
        if callable(before):
            if not self._users or before is not signal.default_int_handler:
                before(number, frame)
        elif not self._users and before != signal.SIG_IGN:
            # Somebody whose handler lies over ours called it; the default is what we stand for.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _living(number: int, before: Handler) -> Handler:
    """The handler to go back to, without those of preemptions that are over."""
    while isinstance(owner := getattr(before, "__self__", None), Preemption):
        if owner._users or number not in owner._before:
            break
        before = owner._before.pop(number)
    return before


_installed: WeakSet[Preemption] = WeakSet()
_masks = threading.local()


def _hold_signals() -> None:
    """Until a forked process has its handlers: a signal that reaches it before would be lost."""
    numbers = {number for preemption in _installed for number in preemption._before}
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers) if numbers else None


def _let_signals() -> None:
    if _masks.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _put_back_in_child() -> None:
    """A forked process saves nothing: what ends its parent after a checkpoint is to end it at once."""
    mine = [*_installed]
    for preemption in mine:
        preemption._users, preemption._requested_s = 0, None
    with suppress(ValueError):  # not in a thread that Python takes for another than the main one
        for preemption in mine:
            preemption._put_back()
    _let_signals()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_let_signals, after_in_child=_put_back_in_child
    )


def _number(name: str) -> int:
    found = getattr(signal.Signals, name, None) if isinstance(name, str) else None
    if found is None:
        raise _wrong("names of signals", repr(name))
    if name in ("SIGKILL", "SIGSTOP"):
        raise _wrong("signals that a process can take", name)
    return int(found)


def _wrong(expected: str, found: str) -> UsageError:
    return UsageError(
        "no preemption can be told by this",
        reason="preemption",
        expected=expected,
        found=found,
        do='for example Preemption(signals=("SIGTERM", "SIGUSR1"), deadline_s=60)',
    )
