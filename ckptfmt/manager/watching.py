"""What a LossGuard finds, turned into notes at checkpoints, events and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptfmt.engine import Store, annotate_newest, check_metrics
from ckptfmt.errors import CheckpointError
from ckptfmt.manager.aftermath import log
from ckptfmt.manager.guard import BAD_RESUMES_MAX, LossGuard, LossWatch, Verdict
from ckptfmt.manager.healing import BAD_RESUMES, bad_resumes
from ckptfmt.types import CheckpointInfo

GUARD_MEAN = "ckptfmt.guard_mean"
"""Metadata of a save: the mean of the watched metric at that moment."""


class Watching:
    """The guard of one manager, if it has one.

    Args:
        mirror: Where a checkpoint may be that is not, or no more, in the store.
        noted: Told the name of a checkpoint of the store that has a new note.
    """

    def __init__(
        self,
        store: Store,
        guard: LossGuard | None,
        tell: Callable[..., None],
        *,
        mirror: Store | None = None,
        noted: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._guard, self._tell = store, guard, tell
        self._stores = [store] if mirror is None else [store, mirror]
        self._noted = noted
        self._watch = LossWatch(guard) if guard is not None else None
        self._from: CheckpointInfo | None = None

    def metadata(self) -> dict[str, object]:
        """What a save notes, so that a resume from it can be judged."""
        mean = self._watch.mean() if self._watch is not None else None
        return {} if mean is None else {GUARD_MEAN: mean}

    def resumed(self, info: CheckpointInfo) -> None:
        self._from = info
        if self._watch is not None:
            mean = info.metadata.get(GUARD_MEAN)
            self._watch.resumed(mean if isinstance(mean, float) else None)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Verdict:
        guard, watch = self._guard, self._watch
        if guard is None or watch is None or guard.metric not in metrics:
            return Verdict()
        value = check_metrics({guard.metric: metrics[guard.metric]})[guard.metric]
        found = watch.see(value)
        if found in ("bad resume", "good resume"):
            return self._judge_resume(step, bad=found == "bad resume")
        if not found:
            return Verdict()
        if found == "not finite after the resume":
            self._judge_resume(step, bad=True)
        target = self._last_before(step - (guard.recent if found == "spike" else 1))
        reason = f"{guard.metric} is {value:g} at step {step}: {found}"
        reason += (
            ", and no checkpoint is older" if target is None else f", go back to step {target}"
        )
        self._tell("guard", None, step, data={"reason": reason, "rollback_to": target})
        return Verdict(rollback_to=target, reason=reason)

    def _last_before(self, step: int) -> int | None:
        """The newest checkpoint of a step or one before it, from which not resume after resume went
        wrong."""
        found: dict[int, int] = {}
        for store in self._stores:
            try:
                for info in store.checkpoints():
                    if info.step is not None and info.step <= step:
                        found[info.step] = max(found.get(info.step, 0), bad_resumes(info))
            except CheckpointError as error:  # training is not to end because the guard cannot look
                log.warning("the guard cannot look into %s: %s", store.url, error)
        return max((at for at, bad in found.items() if bad < BAD_RESUMES_MAX), default=None)

    def _judge_resume(self, step: int, *, bad: bool) -> Verdict:
        info, self._from = self._from, None
        if info is None:
            return Verdict()
        before = bad_resumes(info)
        count = before + 1 if bad else 0
        if count != before:
            self._note(info.name, count)
        if not count:
            return Verdict()
        assert self._guard is not None
        reason = f"{self._guard.metric} after the resume from {info.name} is "
        reason += f"above {self._guard.ratio:g} times what it was, or not finite"
        if count >= BAD_RESUMES_MAX:
            reason += f": {count} times in a row, the next restore takes an older one"
        self._tell("guard", info.name, step, data={"reason": reason, "bad_resumes": count})
        return Verdict(reason=reason)

    def _note(self, name: str, count: int) -> None:
        note = {BAD_RESUMES: count}
        for store in self._stores:
            try:
                if annotate_newest(store.backend, name, metrics={}, metadata=note):
                    if store is self._store and self._noted is not None:
                        self._noted(name)
                    return  # the mirror gets the note as it gets all others
            except CheckpointError as error:
                log.warning("that %s led to a bad resume is not noted: %s", name, error)
