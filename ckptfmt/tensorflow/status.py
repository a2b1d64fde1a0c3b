"""The answer to a restore, with the questions that users of tf.train.Checkpoint ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from ckptfmt.errors import MismatchError
from ckptfmt.reports import RestoreReport


class RestoreStatus:
    """What a restore did.

    Every value that matched has been assigned when `restore` returns: nothing waits for variables
    that do not exist yet, so `pending` is empty.
    """

    def __init__(self, report: RestoreReport) -> None:
        self.report = report

    @property
    def step(self) -> int:
        """Step of the checkpoint; 0 where it has none."""
        return self.report.step

    def __bool__(self) -> bool:
        return bool(self.report)

    @property
    def pending(self) -> Sequence[str]:
        """Stored names that wait for their variables."""
        return self.report.pending

    def assert_consumed(self) -> RestoreStatus:
        """Check that both sides agreed in everything.

        Raises:
            MismatchError: Something stored was not used, or something in the objects not filled.
        """
        self.assert_existing_objects_matched()
        left = [*self.report.unexpected, *self.report.pending]
        if left:
            self._fail("stored values were not used", "unexpected", left)
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Check that every variable that exists was filled.

        Raises:
            MismatchError: Some were not.
        """
        if self.report.missing:
            self._fail("variables were not restored", "missing", self.report.missing)
        return self

    def assert_nontrivial_match(self) -> RestoreStatus:
        """Check that anything was restored.

        Raises:
            MismatchError: Nothing was.
        """
        if not self.report.matched:
            self._fail("nothing was restored", "no-match", ())
        return self

    def expect_partial(self) -> RestoreStatus:
        """Accept that what is pending stays so."""
        return self

    def close(self) -> None:
        """Let go of pending values."""

    def _fail(self, what: str, reason: str, names: Sequence[str]) -> NoReturn:
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        raise MismatchError(
            what,
            reason=reason,
            where=", ".join(names[:10]) + more,
            do="see .report for all of it",
            report=self.report,
        )

    def __repr__(self) -> str:
        return f"RestoreStatus({str(self.report)!r})"
