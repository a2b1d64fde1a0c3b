"""Which exit code an error has. New codes may come; non-zero always means failure."""

from __future__ import annotations

import errno

from ckptfmt import errors

OK = 0
NO = 1
"""The answer is no: it differs, damage was found, the tree does not fit."""
USAGE = 2
PARTIAL = 3
CORRUPT = 4
NOT_FOUND = 10
CONFLICT = 11
UNSUPPORTED = 12
ACCESS_DENIED = 13
STORAGE = 14
NO_SPACE = 15
INTERNAL = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

_BY_CLASS: tuple[tuple[type[BaseException], int], ...] = (
    (errors.NotFoundError, NOT_FOUND),
    (errors.ExistsError, CONFLICT),
    (errors.ConflictError, CONFLICT),
    (errors.PartialRestoreError, PARTIAL),
    (errors.MismatchError, NO),
    (errors.UnsupportedError, UNSUPPORTED),
    (errors.FormatError, CORRUPT),
    (errors.UsageError, USAGE),
    (errors.StorageError, STORAGE),
    (errors.InternalError, INTERNAL),
)
_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def exit_code(error: BaseException) -> int:
    """The exit code of an error; of whatever is not foreseen, the code of our own bugs."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, errors.StorageError) or type(error).__module__ == "builtins":
        refined = _storage_code(error)
        if refined is not None:
            return refined
    for cls, code in _BY_CLASS:
        if isinstance(error, cls):
            return code
    return INTERNAL


def _storage_code(error: BaseException) -> int | None:
    kind = getattr(error, "kind", "")
    number = getattr(error, "errno", None)
    cause_number = getattr(error.__cause__, "errno", None)
    if number in _ACCESS or cause_number in _ACCESS or "access" in kind or "permission" in kind:
        return ACCESS_DENIED
    if number in _SPACE or cause_number in _SPACE or "no-space" in kind:
        return NO_SPACE
    return STORAGE if isinstance(error, OSError) else None
