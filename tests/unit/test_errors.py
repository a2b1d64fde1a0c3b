"""Errors say what, where, expected and found, and what to do; they travel between processes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from ckptfmt import errors
from ckptfmt.errors import CheckpointError

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, CheckpointError)
]


def test_a_message_has_its_parts_in_order() -> None:
    error = errors.CorruptError(
        "chunk digest differs",
        reason="chunk-digest",
        where="data/3f[4096:8192)",
        expected="3f",
        found="77",
        do='run "ckptfmt verify"',
    )
    assert str(error) == (
        'chunk digest differs: data/3f[4096:8192): expected 3f, found 77; run "ckptfmt verify"'
    )
    assert error.kind == "corrupt-chunk-digest"


def test_parts_that_are_not_given_leave_no_trace() -> None:
    assert str(errors.UsageError("fix the call", reason="x")) == "fix the call"
    assert str(errors.UsageError("fix", reason="x", found=0)) == "fix: found 0"


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_is_the_same_after_pickling(cls: type[CheckpointError]) -> None:
    error = cls("what", reason="why", where="here", expected=1, found=[2], do="this")
    error.add_note("a note")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert (str(back), back.kind, back.found) == (str(error), error.kind, [2])
    assert back.__notes__ == ["a note"]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_kind_is_the_class_and_the_reason(cls: type[CheckpointError]) -> None:
    assert cls("what", reason="why").kind == f"{cls.prefix}-why"


def test_extra_facts_are_kept() -> None:
    storage = errors.StorageError("full", reason="no-space", errno=28, retryable=True)
    assert (storage.errno, storage.retryable, storage.outcome_unknown) == (28, True, False)
    back = pickle.loads(pickle.dumps(storage))
    assert (back.errno, back.retryable) == (28, True)
    partial = errors.PartialRestoreError("half", reason="x", changed=("a", "b"))
    assert partial.changed == ("a", "b")
    assert errors.MismatchError("no", reason="tree", report=3).report == 3


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.NotFoundError, KeyError),
        (errors.NotFoundError, FileNotFoundError),
        (errors.ExistsError, FileExistsError),
        (errors.StorageError, OSError),
        (errors.MismatchError, ValueError),
        (errors.FormatError, ValueError),
        (errors.UsageError, ValueError),
        (errors.MissingExtraError, ImportError),
    ],
)
def test_code_that_catches_the_builtin_goes_on_working(
    cls: type[CheckpointError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match=r"^the message$"):
        raise cls("the message", reason="x")
