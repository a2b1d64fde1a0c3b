"""What goes wrong while an export is written, told by the name that the caller gave."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckptfmt.errors import CheckpointError, StorageError
from ckptfmt.storage import from_write_error

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TOLD = (*_NO_SPACE, errno.EACCES, errno.EROFS, errno.EFBIG, errno.EIO)
"""Errors of the system that a library tells in its text."""


@contextmanager
def writing(where: str, *, storage: bool = False) -> Iterator[None]:
    """Errors of the operating system as this package's.

    Args:
        storage: Also those of a backend, which names the file in the making.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) and storage:
            raise _of_storage(error, where) from error
        if isinstance(error, CheckpointError):
            raise
        raise _of_system(error, where) from error


@contextmanager
def library_writing(library: str, folder: str, where: str) -> Iterator[None]:
    """Whatever a library raises that writes into `folder` as this package's errors about `where`.
    Errors of ours, about the source, pass."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        text = str(error).replace(folder, where)
        number = getattr(error, "errno", None)
        code = next((n for n in _TOLD if n == number or os.strerror(n) in text), None)
        if code is not None:
            raise _of_system(OSError(code, os.strerror(code)), where) from error
        raise StorageError(
            f"{library} could not write", reason="export", where=where, found=text[:500]
        ) from error


def _of_system(error: OSError, where: str) -> CheckpointError:
    made = from_write_error(error, where)
    return _of_storage(made, where) if isinstance(made, StorageError) else made


def _of_storage(error: StorageError, where: str) -> StorageError:
    """The same about the destination, which is no store: there is nothing that `gc` would free."""
    full = "free space there, or export to another disk; nothing of this export is left"
    return StorageError(
        error.what,
        reason=error.reason,
        where=where,
        found=error.found,
        do=full if error.reason == "no-space" else error.do,
        errno=error.errno,
        retryable=error.retryable,
    )
