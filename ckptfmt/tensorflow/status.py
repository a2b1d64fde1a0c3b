"""The answer to a restore, with the questions that users of tf.train.Checkpoint ask of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from ckptfmt.errors import MismatchError
from ckptfmt.reports import RestoreReport
from ckptfmt.tensorflow.deferred import Deferred


class RestoreStatus:
    """What a restore did, and what it still waits for.

    What matched has been assigned when `restore` returns. Values that are stored for variables which
    do not exist yet are held in host memory, also if the checkpoint is deleted meanwhile, until the
    variables come or `close` is called; a variable that comes and does not fit raises there.
    """

    def __init__(
        self, report: RestoreReport, deferred: Deferred, trivial: Callable[[str], bool]
    ) -> None:
        self.report = report
        self._deferred = deferred
        self._trivial = trivial

    @property
    def step(self) -> int:
        """Step of the checkpoint; 0 where it has none."""
        return self.report.step

    def __bool__(self) -> bool:
        return bool(self.report) or any(one.arrived for one in self._deferred.waiting)

    @property
    def pending(self) -> Sequence[str]:
        """Stored names that wait for their variables, as of now."""
        return self._deferred.names

    def assert_consumed(self) -> RestoreStatus:
        """Check that both sides agree in everything: nothing stored is left over, nothing waits, and
        every variable that exists by now was filled.

        Raises:
            MismatchError: Something stored was not used, or something in the objects not filled.
        """
        self.assert_existing_objects_matched()
        left = self._not_spare(self.report.unexpected)
        left += [] if self._deferred.partial else self.pending
        if left:
            self._fail("stored values were not used", "unexpected", left)
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Check that every variable that exists by now was filled.

        Raises:
            MismatchError: Some were not.
        """
        late = [name for target in self._deferred.targets for name in target.unfilled()]
        missing = [*self._not_spare(self.report.missing), *late]
        if missing:
            self._fail("variables were not restored", "missing", missing)
        return self

    def assert_nontrivial_match(self) -> RestoreStatus:
        """Check that more was restored than counters and plain values, if there is more on either
        side.

        Raises:
            MismatchError: Nothing was, or only those.
        """
        arrived = [name for one in self._deferred.waiting for name in one.arrived]
        matched = [*self.report.matched, *arrived]
        rest = [*self.report.missing, *self.report.unexpected, *self.pending]
        if not matched or (rest and all(map(self._trivial, matched))):
            self._fail("nothing but counters was restored", "no-match", matched)
        return self

    def expect_partial(self) -> RestoreStatus:
        """Accept that what is pending stays so, and that what comes has no value or another shape:
        it keeps its initial one then. What else a strict restore refuses it has refused already."""
        self._deferred.expect_partial()
        return self

    def close(self) -> None:
        """Let go of the values that wait: what comes from now on keeps its initial values."""
        self._deferred.close()

    def _not_spare(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.report.spare]

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
        waits = f", {len(self.pending)} pending" if self.pending else ""
        return f"RestoreStatus({str(self.report)!r}{waits})"
