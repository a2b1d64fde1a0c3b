"""Events to somebody who may be slow or away: queued where they happen, delivered in a thread."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from ckptfmt.engine import Repeating
from ckptfmt.errors import UsageError
from ckptfmt.events import Event
from ckptfmt.manager.hooks.plain import as_json

QUEUE_MAX = 1000
"""Events that wait for somebody who does not answer; then the oldest are dropped."""
TRIES_MAX = 5
"""Of one event: then it is given up, for others wait behind it."""
PAUSE_MAX_S = 30.0
CLOSE_TIMEOUT_S = 10.0

_log = logging.getLogger("ckptfmt.manager")


class Delivery:
    """A hook that hands events to `deliver` in a thread of its own, in their order.

    Calling it only queues. What fails is tried again, later and later, then given up; an
    interpreter that ends waits at most 10 s for what is queued.

    Args:
        deliver: Takes one event; raises if it did not get there.
        name: For the log.
        kinds: Those alone; None: all.
    """

    def __init__(
        self, deliver: Callable[[Event], None], name: str, kinds: Collection[str] | None = None
    ) -> None:
        if isinstance(kinds, str):
            raise UsageError(
                "kinds of events are a collection",
                reason="hook",
                found=repr(kinds),
                do=f"kinds=[{kinds!r}]",
            )
        self._deliver, self._name, self._kinds = deliver, name, kinds
        self._queue: deque[Event] = deque()
        self._tries = 0
        self._pid = os.getpid()
        self.dropped = 0
        self._repeating = Repeating(self._work, "ckptfmt-hook")
        atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        if self._kinds is not None and event.kind not in self._kinds:
            return
        self._leave_parent()
        if len(self._queue) >= QUEUE_MAX:
            self._queue.popleft()
            self.dropped += 1
        self._queue.append(event)
        self._repeating.wake()

    def _leave_parent(self) -> None:
        """In a process that was forked: what is queued is delivered by its parent."""
        if self._pid != os.getpid():
            self._queue.clear()
            self._pid = os.getpid()

    def _work(self) -> float | None:
        while self._queue:
            event = self._queue.popleft()
            try:
                self._deliver(event)
                self._tries = 0
            except Exception as error:
                self._tries += 1
                given_up = self._tries >= TRIES_MAX or self._repeating.closing
                _log.warning(
                    "%s did not take %s%s: %s",
                    self._name,
                    event.kind,
                    ", given up" if given_up else "",
                    error,
                )
                if given_up:
                    self.dropped += 1
                    self._tries = 0
                    continue
                self._queue.appendleft(event)
                return float(min(PAUSE_MAX_S, 2.0 ** (self._tries - 1)))
        return None

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Deliver what is queued; False if that took longer than `timeout_s`."""
        atexit.unregister(self.close)
        self._leave_parent()
        if self._queue:
            self._repeating.wake()
        return self._repeating.close(timeout_s)


def webhook(
    url: str,
    *,
    kinds: Collection[str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
) -> Delivery:
    """POST each event to a URL as JSON, in the background.

    Args:
        url: `http://` or `https://`.
        kinds: Those events alone, for example `["save.error", "alarm"]`; None: all.
        headers: Sent besides, for example an authorization.
        timeout_s: For one request, in seconds.
    Raises:
        UsageError: The URL is of another scheme.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(
            "a webhook is an HTTP address",
            reason="hook",
            expected="http://... or https://...",
            found=repr(url),
            do="give the address that takes the POST",
        )

    def post(event: Event) -> None:
        from urllib.request import Request, urlopen

        sent = {"Content-Type": "application/json", **(headers or {})}
        body = as_json(event).encode()
        with urlopen(Request(url, body, sent, method="POST"), timeout=timeout_s) as answer:
            answer.read()

    return Delivery(post, url.split("?")[0], kinds)


def command(
    argv: Sequence[str], *, kinds: Collection[str] | None = None, timeout_s: float = 60.0
) -> Delivery:
    """Run a command for each event, in the background; it reads the event as JSON from stdin.

    Args:
        argv: The program and its arguments; no shell takes part.
        kinds: As in `webhook`.
        timeout_s: After which it is killed, in seconds.
    Raises:
        UsageError: `argv` is a text or empty.
    """
    if isinstance(argv, str) or not argv:
        raise UsageError(
            "a command is a list of arguments",
            reason="hook",
            found=repr(argv),
            do='for example command(["notify", "--urgent"])',
        )
    arguments = [str(argument) for argument in argv]

    def call(event: Event) -> None:
        # Its output is the job's: where it would be lost, nobody could see why it fails.
        text = as_json(event) + "\n"
        subprocess.run(arguments, input=text.encode(), timeout=timeout_s, check=True)

    return Delivery(call, arguments[0], kinds)
