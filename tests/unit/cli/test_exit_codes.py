"""Every error has the exit code that scripts rely on."""

from __future__ import annotations

import errno

import pytest

from ckptfmt import errors
from ckptfmt.cli.exit_codes import exit_code

CODES = {
    errors.NotFoundError: 10,
    errors.ExistsError: 11,
    errors.ConflictError: 11,
    errors.StorageError: 14,
    errors.PartialRestoreError: 3,
    errors.MismatchError: 1,
    errors.FormatError: 4,
    errors.CorruptError: 4,
    errors.UnsupportedError: 12,
    errors.UsageError: 2,
    errors.MissingExtraError: 2,
    errors.InternalError: 70,
}


@pytest.mark.parametrize("cls", CODES, ids=lambda cls: cls.__name__)
def test_each_class_of_error_has_its_code(cls: type[errors.CheckpointError]) -> None:
    assert exit_code(cls("x", reason="y")) == CODES[cls]


def test_no_class_of_error_is_forgotten() -> None:
    known = {cls for cls in vars(errors).values() if isinstance(cls, type)}
    assert {cls for cls in known if issubclass(cls, errors.CheckpointError)} - {
        errors.CheckpointError
    } == set(CODES)


def test_storage_errors_tell_access_and_space_apart() -> None:
    def storage(reason: str = "io", number: int | None = None) -> int:
        return exit_code(errors.StorageError("x", reason=reason, errno=number))

    assert storage() == 14
    assert storage(number=errno.EACCES) == 13
    assert storage("access") == 13
    assert storage(number=errno.ENOSPC) == 15
    assert storage("no-space") == 15
    caused = errors.StorageError("x", reason="io")
    caused.__cause__ = OSError(errno.ENOSPC, "full")
    assert exit_code(caused) == 15


def test_what_nobody_foresaw_is_our_bug_and_an_interrupt_is_none() -> None:
    assert exit_code(RuntimeError()) == 70
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(PermissionError(errno.EACCES, "no")) == 13
    assert exit_code(OSError(errno.EIO, "io")) == 14
