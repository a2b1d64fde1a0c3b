"""What a LossGuard finds, turned into notes at checkpoints, events and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptfmt.engine import Store, annotate_newest, check_metrics
from ckptfmt.manager.guard import BAD_RESUMES_MAX, Finding, LossGuard, LossWatch, Verdict
from ckptfmt.manager.healing import BAD_RESUMES
from ckptfmt.types import CheckpointInfo

GUARD_MEAN = "ckptfmt.guard_mean"
"""Metadata of a save: the mean of the watched metric at that moment."""


class Watching:
    """The guard of one manager, if it has one."""

    def __init__(self, store: Store, guard: LossGuard | None, tell: Callable[..., None]) -> None:
        self._store, self._guard, self._tell = store, guard, tell
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
            return self._judge_resume(found, step)
        if not found:
            return Verdict()
        before = step - (guard.recent if found == "spike" else 1)
        good = [s for s in self._store.steps() if s <= before]
        target = good[-1] if good else None
        reason = f"{guard.metric} is {value:g} at step {step}: {found}"
        reason += f", go back to step {target}" if good else ", and no checkpoint is older"
        self._tell("guard", None, step, data={"reason": reason, "rollback_to": target})
        return Verdict(rollback_to=target, reason=reason)

    def _judge_resume(self, found: Finding, step: int) -> Verdict:
        info, self._from = self._from, None
        if info is None:
            return Verdict()
        before = info.metadata.get(BAD_RESUMES, 0)
        count = before + 1 if found == "bad resume" and isinstance(before, int) else 0
        if count != before:
            note = {BAD_RESUMES: count}
            annotate_newest(self._store.backend, info.name, metrics={}, metadata=note)
        if not count:
            return Verdict()
        assert self._guard is not None
        reason = f"{self._guard.metric} after the resume from {info.name} is above {self._guard.ratio:g} times what it was"
        if count >= BAD_RESUMES_MAX:
            reason += f": {count} times in a row, the next restore takes an older one"
        self._tell("guard", info.name, step, data={"reason": reason, "bad_resumes": count})
        return Verdict(reason=reason)
