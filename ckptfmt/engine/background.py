"""Saves in the background: one in flight per store, no error lost, nothing half-visible.

The caller gets a `SaveFuture` once its tensors are staged; a thread then encodes, writes and
commits. An interpreter that ends waits for it. Spec: 08-protocol.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

from ckptfmt import config
from ckptfmt.engine.arena import Arena, touch
from ckptfmt.engine.fingerprint import compare
from ckptfmt.engine.group_save import PreparedPart, prepare_in_group
from ckptfmt.engine.request import SaveRequest
from ckptfmt.engine.save import Prepared, prepare_save
from ckptfmt.engine.stage import Staged, devices_of, plan_layout, stage_all
from ckptfmt.errors import ConflictError
from ckptfmt.events import Event
from ckptfmt.format import BLOCK_NBYTES
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
_in_flight: dict[str, list[SaveFuture]] = {}
"""Store -> saves that are not finished, or whose error nobody has asked for yet."""
_lock = threading.RLock()  # a signal handler that saves may interrupt its holder
_repeating: WeakSet[Repeating] = WeakSet()


def _forget_in_child() -> None:
    """A forked process has none of the threads: it waits for no save of its parent's."""
    global _arena, _lock
    _arena, _lock = Arena(), threading.RLock()
    _in_flight.clear()
    for repeating in _repeating:
        repeating._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def settle(backend: Backend, when_busy: WhenBusy = "wait") -> None:
    """Before another save to a store: wait for the one in flight, raise an error that nobody saw.

    Raises:
        ConflictError: kind `conflict-busy`: one is in flight and the caller does not wait.
    """
    for future in _of_store(backend):
        if not future.done() and when_busy == "raise":
            raise ConflictError(
                "a save to this store is in flight",
                reason="busy",
                where=future.name,
                do='wait for its result(), or pass when_busy="wait"',
            )
        concurrent.futures.wait([future])
        _remove(backend.url, future)
        error = future._unasked()
        if error is not None:
            raise error


def _of_store(backend: Backend) -> list[SaveFuture]:
    with _lock:
        return list(_in_flight.get(backend.url, ()))


def await_saves(backend: Backend) -> None:
    """Wait for the saves to a store that are in flight; their errors stay with their futures."""
    concurrent.futures.wait(_of_store(backend))


def _add(url: str, future: SaveFuture) -> None:
    with _lock:
        _in_flight.setdefault(url, []).append(future)


def _remove(url: str, future: SaveFuture) -> None:
    with _lock:
        left = [other for other in _in_flight.pop(url, ()) if other is not future]
        if left:
            _in_flight[url] = left


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
    prepare = prepare_save if request.ranks is None else prepare_in_group
    prepared: Prepared | PreparedPart | CheckpointInfo = prepare(tree, backend, request)
    if isinstance(prepared, CheckpointInfo):
        future.staged = True
        future.set_result(prepared)
        return future
    layout = plan_layout(prepared.plan)
    if layout.nbytes > config.current().staging_nbytes:
        return _run_here(future, prepared)
    arena = _arena
    memory = None
    try:
        memory = arena.take(layout.nbytes, devices_of(prepared.plan))
        staged = stage_all(prepared.plan, memory, layout)
    except BaseException as error:
        if memory is not None:
            arena.back(memory)
        prepared.abandon(error)
        raise
    arena.staged(memory)
    back = partial(arena.back, memory)
    plan = replace(prepared.plan, payloads=staged.payloads, staged=staged.memory)
    prepared = replace(prepared, plan=plan)
    thread = threading.Thread(
        target=_run, args=(future, prepared, staged, back), name=f"ckptfmt-save-{request.name}"
    )
    future._control.thread = thread
    future.staged = True
    _add(backend.url, future)
    try:
        thread.start()
    except RuntimeError:  # the system gives no more threads
        future._control.thread = None
        _run(future, prepared, staged, back)
    return future


def ready_staging(nbytes: int, tensors: int) -> None:
    """Have the system give the arena's pages meanwhile, for a state whose save is to be expected:
    the first stall is then one copy into memory that is there.

    Args:
        nbytes: Of the state; one over the staging budget will not be staged.
        tensors: How many it has, for the padding between them.
    """
    nbytes += tensors * BLOCK_NBYTES
    if _arena.nbytes < nbytes <= config.current().staging_nbytes:
        # No interpreter waits for it.
        threading.Thread(target=_ready, args=(_arena, nbytes), daemon=True).start()


def _ready(arena: Arena, nbytes: int) -> None:
    with suppress(MemoryError):  # the save that needs it says so
        memory = arena.take(nbytes)
        try:
            touch(memory.data)
        finally:
            arena.back(memory)


def _run_here(future: SaveFuture, prepared: Prepared | PreparedPart) -> SaveFuture:
    """The whole save while the caller waits; an interrupt is the caller's, an error the future's."""
    _run(future, prepared, None, lambda: None)
    future.staged = True
    error = None if future.cancelled() else concurrent.futures.Future.exception(future)
    if error is not None and not isinstance(error, Exception):
        raise error
    _add(prepared.backend.url, future)
    return future


def _with_progress(request: SaveRequest, future: SaveFuture) -> Callable[[Event], None]:
    call = request.progress if callable(request.progress) else None

    def note(event: Event) -> None:
        future._control.note(event)
        if call is not None:
            call(event)

    return note


def _run(
    future: SaveFuture,
    prepared: Prepared | PreparedPart,
    staged: Staged | None,
    back: Callable[[], None],
) -> None:
    try:
        info = _finish(prepared, staged, back)
    except concurrent.futures.CancelledError:
        future._control.give_up()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(info)


def _finish(
    prepared: Prepared | PreparedPart, staged: Staged | None, back: Callable[[], None]
) -> CheckpointInfo:
    """Encode, write, commit; then give the memory back, before anybody hears of the outcome: what
    the future calls may be the next save."""
    try:
        if staged is not None:
            compare(prepared.plan, staged.payloads, staged.fingerprint)
        return prepared.finish()
    finally:
        back()


class Repeating:
    """Runs a task in a thread of its own: when it is woken, and again when the task asks for it.

    A forked process has no such thread until somebody there wakes it.

    Args:
        task: Gives the seconds after which it wants to be run again, or None: when woken. It
            handles its own errors.
        name: Of the thread.
    """

    def __init__(self, task: Callable[[], float | None], name: str) -> None:
        self._task, self._name = task, name
        self._closed = False
        self._begin()
        _repeating.add(self)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._woken = False
        self._again_s: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def closing(self) -> bool:
        """Whether nobody waits for more than what is under way."""
        return self._closed

    @property
    def running(self) -> bool:
        """Whether there is a thread that will run the task again."""
        return self._thread is not None

    def wake(self) -> None:
        """Run the task soon; once more if it is running already."""
        with self._changed:
            self._woken = True
            if self._thread is None and not self._closed:
                # No interpreter waits for it: whoever needs its work to be done calls `close`.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._woken or self._closed):
                    if not self._changed.wait(self._again_s) and self._again_s is not None:
                        break
                if self._closed and not self._woken:
                    return
                self._woken = False
            again_s = self._task()
            with self._changed:
                self._again_s = again_s

    def close(self, timeout_s: float | None = None) -> bool:
        """Let what is under way, and what it was woken for, come to its end; False if it has not
        after `timeout_s`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True


def follow(
    url: str,
    name: str,
    task: concurrent.futures.Future[Any],
    outcome: Callable[[], CheckpointInfo],
) -> SaveFuture:
    """A save that somebody else's thread carries out, as a future of ours; it cannot be cancelled.

    Args:
        outcome: What was committed, or the error; called when `task` is done.
    """
    future = SaveFuture(name)
    future._control.before_commit()
    future.staged = True

    def done(_: object) -> None:
        try:
            info = outcome()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(info)

    _add(url, future)
    task.add_done_callback(done)
    return future


def _report_at_exit() -> None:
    """Errors that nobody asked for: an exit has no other way to tell them."""
    with _lock:
        futures = [future for mine in _in_flight.values() for future in mine]
    for future in futures:
        error = future._unasked()
        if error is not None:
            print(f"ckptfmt: the save of {future.name} failed: {error}", file=sys.stderr)


atexit.register(_report_at_exit)
