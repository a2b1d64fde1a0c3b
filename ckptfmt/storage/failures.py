"""What backends raise: the operating system's errors, and refusals that all of them share.

Spec: 09-versions (the kinds), style section 5.
"""

from __future__ import annotations

import errno
import os

from ckptfmt.errors import (
    CheckpointError,
    CorruptError,
    NotFoundError,
    StorageError,
    UsageError,
)

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_ABSENT = {errno.ENOENT, errno.ENOTDIR}
# The same call may succeed a little later: nothing is known to be broken.
_PASSING = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.EMFILE,
    errno.ENFILE,
}

_LARGE_NBYTES = 1 << 20


def from_os_error(error: OSError, where: str, *, outcome_unknown: bool = False) -> CheckpointError:
    """The error of ours that says what `error` says; `errno` is kept."""
    code = error.errno
    found = (os.strerror(code) if code else str(error)) or type(error).__name__
    if code in _ABSENT:
        return no_object(where)
    if code == errno.ELOOP:
        return CorruptError(
            "object is a symbolic link",
            reason="symlink",
            where=where,
            expected="a regular file",
            do="a store holds no links: restore the file itself",
        )
    if code in _NO_SPACE:
        return StorageError(
            "no space left",
            reason="no-space",
            where=where,
            found=found,
            do="free space (ckptfmt gc) and save again",
            errno=code,
            outcome_unknown=outcome_unknown,
        )
    if code in _DENIED:
        return StorageError(
            "access denied",
            reason="access-denied",
            where=where,
            found=found,
            do="check owner, mode and mount options",
            errno=code,
            outcome_unknown=outcome_unknown,
        )
    return StorageError(
        "input or output failed",
        reason="io",
        where=where,
        found=found,
        do="check the medium and the system log",
        errno=code,
        retryable=code in _PASSING,
        outcome_unknown=outcome_unknown,
    )


def from_write_error(
    error: OSError, where: str, *, outcome_unknown: bool = False
) -> CheckpointError:
    """As `from_os_error`; but a writer misses no object: what vanished is its own file or folder."""
    if error.errno in _ABSENT:
        return StorageError(
            "the way to the object is gone or blocked",
            reason="io",
            where=where,
            found=os.strerror(error.errno or 0)
            + (
                f": {os.fsdecode(error.filename)}"
                if isinstance(error.filename, str | bytes)
                else ""
            ),
            do="check the store's path, and that nothing else moves or cleans its folders",
            errno=error.errno,
            outcome_unknown=outcome_unknown,
        )
    return from_os_error(error, where, outcome_unknown=outcome_unknown)


def no_object(where: str) -> NotFoundError:
    return NotFoundError(
        "no such object", reason="object", where=where, do="check the store and the name"
    )


def short_object(where: str, *, expected: int, found: int) -> CorruptError:
    """The object ends before the range that was asked for."""
    return CorruptError(
        "object is too short",
        reason="short-file",
        where=where,
        expected=f"at least {expected} bytes",
        found=f"{found} bytes",
        do='restore another step or run "ckptfmt verify"',
    )


def check_range(where: str, start: int, stop: int | None, out: memoryview | None) -> None:
    """Refuse a range or a buffer that no object could satisfy.

    Raises:
        UsageError: kind `usage-range`.
    """
    if start < 0 or (stop is not None and stop < start):
        raise UsageError(
            "not a byte range",
            reason="range",
            where=where,
            found=f"[{start}:{'' if stop is None else stop})",
            do="start is at least 0 and not above stop",
        )
    if out is not None and out.readonly:
        raise UsageError(
            "buffer cannot be written",
            reason="range",
            where=where,
            do="give get a writable buffer as out",
        )


def check_out(where: str, nbytes: int, out: memoryview | None) -> memoryview:
    """`out` as bytes, or a new private buffer of `nbytes`.

    Raises:
        UsageError: kind `usage-range`: `out` has another length.
    """
    if out is None:
        if nbytes < _LARGE_NBYTES:
            return memoryview(bytearray(nbytes))
        # A bytearray's zeros are written first, in small pages: 66 ms for 100 MB, for 12 ms of this.
        import numpy as np

        return np.empty(nbytes, np.uint8).data
    if out.nbytes != nbytes:
        raise UsageError(
            "buffer has another length than the range",
            reason="range",
            where=where,
            expected=f"{nbytes} bytes",
            found=f"{out.nbytes} bytes",
            do="give get an out of the very length",
        )
    return out.cast("B")


def read_only(where: str) -> UsageError:
    return UsageError(
        "store is open for reading only",
        reason="read-only",
        where=where,
        do="open it without read_only=True to write",
    )


def no_late_key(where: str) -> UsageError:
    return UsageError(
        "this store cannot rename",
        reason="late-key",
        where=where,
        do="give the final key to create (capabilities.late_key is False)",
    )


def writer_is_done(where: str, state: str) -> StorageError:
    """A writer that failed, was finished or aborted is asked to go on (I1: never retried)."""
    return StorageError(
        f"writer {state} already",
        reason="writer-done",
        where=where,
        do="begin the object anew; a file whose write or fsync failed is never retried",
    )


def gap(where: str, *, expected: int, found: int) -> UsageError:
    """Not every byte up to the end of an object was written exactly once."""
    return UsageError(
        "object has bytes that were not written once",
        reason="gap",
        where=where,
        expected=f"{expected} bytes",
        found=f"{found} bytes written",
        do="write every byte before the last one, padding included, once",
    )


def as_bytes(buffer: bytes | bytearray | memoryview) -> memoryview:
    """A flat view of bytes. C-contiguous buffers only, as everywhere in the engine."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
