"""Preemption: a signal that says the job will be killed soon. The handler sets a flag; the manager
acts on it in `observe` and `save`, at a step's end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ckptfmt.errors import UsageError, warn


class Preemption:
    """Save once more when the scheduler says that the job must go.

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
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

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
        for number in self._numbers:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Put the handlers back, unless somebody has put others meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request()
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


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
