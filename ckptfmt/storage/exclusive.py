"""Giving a finished file a name that must be free: of several writers exactly one wins.

Hard links do it on every local file system and on NFS; RENAME_NOREPLACE (Windows: rename) where
there are none. Where neither works the store is for a single writer and says so. Spec: 02-store I2.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
from contextlib import suppress
from typing import Literal

from ckptfmt.errors import CkptWarning
from ckptfmt.storage import syscalls
from ckptfmt.storage.process import temporary_name

Method = Literal["link", "rename", "check"]

# Errors that mean "this file system has no such call", not "this call failed".
_UNSUPPORTED = {
    errno.EPERM,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EMLINK,
    errno.EINVAL,
}
_methods: dict[int, Method] = {}
_lock = threading.Lock()


def _forget_in_child() -> None:
    """A thread that a forked process does not have may hold the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def known_method(device: int) -> Method | None:
    """What was found out about a device (`st_dev`) in this process."""
    return _methods.get(device)


def probe_method(folder: str) -> Method | None:
    """Find out, by two empty files in `folder`, how names can be taken on its device.

    Returns:
        None where nothing could be found out (a full or read-only disk): the next write tells.
    """
    device = os.stat(folder).st_dev
    with _lock:
        if device not in _methods:
            try:
                method = _try_methods(folder)
            except OSError:
                return None
            _methods[device] = method
            if method == "check":
                warnings.warn(
                    f"{folder}: this file system has neither hard links nor an exclusive rename; "
                    "one process at a time may save here",
                    CkptWarning,
                    stacklevel=2,
                )
        return _methods[device]


def _try_methods(folder: str) -> Method:
    stem = os.path.join(folder, temporary_name("probe"))
    names = [f"{stem}-{letter}" for letter in "abc"]
    try:
        for name in names[:2]:
            os.close(os.open(name, syscalls.CREATE_FLAGS, 0o666))
        if _refuses_taken(_link, names):
            return "link"
        if _refuses_taken(syscalls.rename_noreplace, names):
            return "rename"
        return "check"
    finally:
        for name in names:
            with suppress(OSError):
                os.unlink(name)


def _refuses_taken(call, names: list[str]) -> bool:  # type: ignore[no-untyped-def]
    """True if `call(a, b)` fails because b exists, and `call(a, c)` makes c."""
    first, taken, free = names
    try:
        call(first, taken)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    else:
        return False  # replaced what was there: not exclusive
    try:
        call(first, free)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return os.path.exists(free)


def _link(source: str, target: str) -> None:
    os.link(source, target)


def place(method: Method, source: str, target: str) -> bool:
    """Give `source` the name `target` if that is free; `source` itself may stay or go.

    Returns:
        False if `target` exists.
    """
    if method == "link":
        try:
            _link(source, target)
        except OSError as error:
            # NFS repeats a request whose reply was lost and then finds its own link: two names
            # for our file mean that it was this call that took the name.
            with suppress(OSError):
                if os.lstat(source).st_nlink == 2:
                    return True
            if isinstance(error, FileExistsError):
                return False
            raise
        return True
    if method == "rename":
        try:
            syscalls.rename_noreplace(source, target)
        except FileExistsError:
            return False
        return True
    with _lock:
        if os.path.lexists(target):
            return False
        os.replace(source, target)
    return True
