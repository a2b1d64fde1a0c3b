"""Every exception of ckptfmt. Classes differ by what the catcher does; `kind` is a stable code.

    CheckpointError
    |- NotFoundError (KeyError, FileNotFoundError)   choose another step or name
    |- ExistsError (FileExistsError)       choose another step
    |- ConflictError                       another writer won: reopen, retry
    |- StorageError (OSError)              has .retryable
    |- PartialRestoreError                 what changed is named: restore another checkpoint, or stop
    |- MismatchError (ValueError)          tree and checkpoint disagree: names, shapes, dtypes
    |- FormatError (ValueError)            do not trust these bytes
    |  |- CorruptError                     restore another step, verify
    |  '- UnsupportedError                 upgrade, or install a codec
    |- UsageError (ValueError)             fix the call
    |  '- MissingExtraError (ImportError)  install it
    '- InternalError                       our bug: report it

A message says what, where, expected and found, and what to do. `kind` is `<class>-<reason>` in
kebab case; the codes that a reader of foreign bytes must produce are a table in spec 09.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, Required, TypedDict, Unpack


class Parts(TypedDict, total=False):
    """What the constructor of every class here takes, by keyword; see `CheckpointError`."""

    reason: Required[str]
    where: str
    expected: object
    found: object
    do: str


class CheckpointError(Exception):
    """Base of all errors that ckptfmt raises.

    Args:
        what: What went wrong, in lower case: `chunk digest differs`.
        reason: Kebab-case code; `kind` is the class's prefix, a dash and this.
        where: The file and byte range, the leaf name, or a path like `$.tensors.dims[3]`.
        expected: What should have been there.
        found: What was there.
        do: What the reader of the message can do about it.
    """

    prefix = "checkpoint"
    ag_pass_through = True
    """For AutoGraph of TensorFlow, which makes another class of what a tf.function raises."""

    def __init__(
        self,
        what: str,
        *,
        reason: str,
        where: str = "",
        expected: object = None,
        found: object = None,
        do: str = "",
    ) -> None:
        self.what = what
        self.reason = reason
        self.where = where
        self.expected = expected
        self.found = found
        self.do = do
        self.args = (self._message(),)

    @property
    def kind(self) -> str:
        return f"{self.prefix}-{self.reason}"

    def _message(self) -> str:
        text = self.what
        if self.where:
            text += f": {self.where}"
        parts = []
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        if parts:
            text += ": " + ", ".join(parts)
        if self.do:
            text += f"; {self.do}"
        return text

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        if isinstance(self, OSError):
            state["errno"] = self.errno  # in a slot of its own
        return (_rebuild, (type(self), state, self.args))


def _rebuild(
    cls: type[CheckpointError], state: dict[str, Any], args: tuple[Any, ...]
) -> CheckpointError:
    # Of several builtin bases, only the one that lays out the object can make it.
    base = next(b for b in (OSError, ImportError, Exception) if issubclass(cls, b))
    error: CheckpointError = base.__new__(cls)
    for key, value in state.items():
        setattr(error, key, value)
    error.args = args
    return error


class NotFoundError(CheckpointError, KeyError, FileNotFoundError):
    """No such store, checkpoint, tag or leaf: choose another step or name."""

    prefix = "not-found"


class ExistsError(CheckpointError, FileExistsError):
    """The name holds another tree already: choose another step."""

    prefix = "exists"


class ConflictError(CheckpointError):
    """Another writer or a collector won; nothing of this call is visible: reopen and retry."""

    prefix = "conflict"


class StorageError(CheckpointError, OSError):
    """The store's medium failed. `retryable` says whether the same call may succeed later.

    `outcome_unknown` is true where a put may or may not have happened (a timeout, a lost reply).
    """

    prefix = "storage"

    def __init__(
        self,
        what: str,
        *,
        retryable: bool = False,
        outcome_unknown: bool = False,
        errno: int | None = None,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(what, **parts)
        self.retryable = retryable
        self.outcome_unknown = outcome_unknown
        self.errno = errno


class PartialRestoreError(CheckpointError):
    """A restore could neither finish nor be undone; `changed` names the leaves that changed."""

    prefix = "partial-restore"

    def __init__(
        self,
        what: str,
        *,
        changed: tuple[str, ...] = (),
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(what, **parts)
        self.changed = changed


class MismatchError(CheckpointError, ValueError):
    """The tree and the checkpoint disagree; nothing was touched. `report` lists everything."""

    prefix = "mismatch"

    def __init__(
        self,
        what: str,
        *,
        report: object = None,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(what, **parts)
        self.report = report


class FormatError(CheckpointError, ValueError):
    """These bytes are not what the format says: do not trust them."""

    prefix = "format"


class CorruptError(FormatError):
    """Bytes are damaged or hostile: restore another step, run verify."""

    prefix = "corrupt"


class UnsupportedError(FormatError):
    """Legal, but not for this version or this machine: upgrade, or install a codec."""

    prefix = "unsupported"


class UsageError(CheckpointError, ValueError):
    """The call is wrong: fix the call."""

    prefix = "usage"


class MissingExtraError(UsageError, ImportError):
    """An optional dependency is missing: install it."""

    prefix = "missing-extra"


class InternalError(CheckpointError):
    """A bug of ckptfmt: please report it."""

    prefix = "internal"


class CkptWarning(UserWarning):
    """Legal, and probably not meant."""


def warn(message: str) -> None:
    """Give a CkptWarning that points at the line outside this package that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, CkptWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]
