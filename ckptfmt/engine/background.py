"""Saves in the background: one in flight per store, no error lost, nothing half-visible.

The caller gets a `SaveFuture` once its tensors are staged; a thread then encodes, writes and
commits. An interpreter that ends waits for it. Spec: 08-protocol.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from ckptfmt import config
from ckptfmt.engine.save import Prepared, SaveRequest, finish_save, prepare_save
from ckptfmt.engine.stage import Arena, Staged, compare, layout, stage_all
from ckptfmt.errors import ConflictError
from ckptfmt.events import Event
from ckptfmt.storage import Backend
from ckptfmt.types import CheckpointInfo

WhenBusy = Literal["wait", "raise"]


class SaveFuture(concurrent.futures.Future[CheckpointInfo]):
    """A save in flight.

    Attributes:
        name: The checkpoint's name.
        staged: True once the tree may change; it is when `save_async` returns.
        progress: The last event, or None.
    """

    name: str
    staged: bool
    progress: Event | None

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.staged = False
        self.progress = None
        self._asked = False
        self._control = _Control(self)

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """What was committed, or the error."""
        self._asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, or None."""
        self._asked = True
        return super().exception(timeout)

    def cancel(self) -> bool:
        """Stop the save. True: nothing became visible; False: it is (or may be) committed.

        Waits until one of the two is certain.
        """
        return self._control.stop()

    def _unasked(self) -> BaseException | None:
        """The error that nobody has asked for, once."""
        if not self.done() or self._asked or self.cancelled():
            return None
        return self.exception()


class _Control:
    """The thread's side of a future: whether it may go on, and the moment from which it must."""

    def __init__(self, future: SaveFuture) -> None:
        self._future = future
        self._gate = threading.Lock()
        self._stop = False
        self._committing = False
        self.thread: threading.Thread | None = None

    def stop(self) -> bool:
        with self._gate:
            if self._committing or self._future.done():
                return self._future.cancelled()
            self._stop = True
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
        return self._future.cancelled()

    def note(self, event: Event) -> None:
        self._future.progress = event
        if self._stop:
            raise concurrent.futures.CancelledError

    def before_commit(self) -> None:
        """The last moment at which a cancellation counts."""
        with self._gate:
            if self._stop:
                raise concurrent.futures.CancelledError
            self._committing = True

    def give_up(self) -> None:
        concurrent.futures.Future.cancel(self._future)
        self._future.set_running_or_notify_cancel()


_arena = Arena()
_in_flight: dict[str, SaveFuture] = {}
_lock = threading.Lock()


def settle(backend: Backend, when_busy: WhenBusy = "wait") -> None:
    """Before another save to a store: wait for the one in flight, raise an error that nobody saw.

    Raises:
        ConflictError: kind `conflict-busy`: one is in flight and the caller does not wait.
    """
    with _lock:
        future = _in_flight.get(backend.url)
    if future is None:
        return
    if not future.done() and when_busy == "raise":
        raise ConflictError(
            "a save to this store is in flight",
            reason="busy",
            where=future.name,
            do='wait for its result(), or pass when_busy="wait"',
        )
    concurrent.futures.wait([future])
    with _lock:
        if _in_flight.get(backend.url) is future:
            del _in_flight[backend.url]
    error = future._unasked()
    if error is not None:
        raise error


def save_in_background(tree: object, backend: Backend, request: SaveRequest) -> SaveFuture:
    """Stage a tree and save it in a thread; returns once staged.

    A state over the staging budget is saved while the caller waits: memory is never over-committed.
    """
    future = SaveFuture(request.name)
    request = replace(
        request,
        progress=_with_progress(request, future),
        before_commit=future._control.before_commit,
    )
    prepared = prepare_save(tree, backend, request)
    if isinstance(prepared, CheckpointInfo):
        future.staged = True
        future.set_result(prepared)
        return future
    offsets, nbytes = layout(prepared.plan)
    if nbytes > config.current().staging_nbytes:
        _run(future, prepared, None)
        future.staged = True
        return future
    memory = _arena.take(nbytes)
    try:
        staged = stage_all(prepared.plan, memory, offsets)
    except BaseException:
        _arena.back()
        raise
    prepared = replace(prepared, plan=replace(prepared.plan, payloads=staged.payloads))
    thread = threading.Thread(
        target=_run, args=(future, prepared, staged), name=f"ckptfmt-save-{request.name}"
    )
    future._control.thread = thread
    future.staged = True
    with _lock:
        _in_flight[backend.url] = future
    thread.start()
    return future


def _with_progress(request: SaveRequest, future: SaveFuture) -> Callable[[Event], None]:
    call = request.progress if callable(request.progress) else None

    def note(event: Event) -> None:
        future._control.note(event)
        if call is not None:
            call(event)

    return note


def _run(future: SaveFuture, prepared: Prepared, staged: Staged | None) -> None:
    try:
        if staged is not None:
            compare(prepared.plan, staged)
        info = finish_save(prepared)
    except concurrent.futures.CancelledError:
        future._control.give_up()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(info)
    finally:
        if staged is not None:
            _arena.back()


def _report_at_exit() -> None:
    """Errors that nobody asked for: an exit has no other way to tell them."""
    with _lock:
        futures = list(_in_flight.values())
    for future in futures:
        error = future._unasked()
        if error is not None:
            print(f"ckptfmt: the save of {future.name} failed: {error}", file=sys.stderr)


atexit.register(_report_at_exit)
