"""When a person should look: pure, from events to reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptfmt.errors import UsageError
from ckptfmt.events import Event


@dataclass(frozen=True, slots=True)
class Alarm:
    """Limits whose crossing is an event `alarm`, with `data["alarm"]` as its name.

    - `stall`: one save held the training loop longer than `stall_s`.
    - `slow`: `in_a_row` saves in a row took longer than `durable_s` to become durable.
    - `failing`: `in_a_row` saves in a row failed or were skipped. Said again after as many more.

    Attributes:
        stall_s: In seconds; None: no limit.
        durable_s: In seconds, from the call until the checkpoint is durable; None: no limit.
        in_a_row: How many saves make one alarm.
    """

    stall_s: float | None = 5.0
    durable_s: float | None = None
    in_a_row: int = 3

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.stall_s, self.durable_s) if limit is not None]
        legal = all(isinstance(s, int | float) and s > 0 for s in limits)
        if type(self.in_a_row) is not int or self.in_a_row < 1 or not legal:
            raise UsageError(
                "this alarm makes no sense",
                reason="alarm",
                expected="limits above 0 and in_a_row of 1 or more",
                found=repr(self),
                do="for example Alarm(stall_s=5, durable_s=120, in_a_row=3)",
            )


@dataclass(slots=True)
class AlarmWatch:
    """What the saves so far have shown."""

    limits: Alarm
    _slow: int = 0
    _failed: int = 0
    _last_error: str = field(default="")

    def see(self, event: Event) -> dict[str, object] | None:
        """The `data` of the alarm that this event raises, or None."""
        limits, seconds = self.limits, event.seconds or 0.0
        if event.kind == "save.staged":
            if limits.stall_s is not None and seconds > limits.stall_s:
                reason = f"a save held the loop for {seconds:.3g} s"
                return {"alarm": "stall", "reason": reason, "limit_s": limits.stall_s}
        elif event.kind in ("save.error", "save.skipped"):
            self._failed += 1
            self._last_error = str(event.error) if event.error is not None else self._last_error
            if self._failed % limits.in_a_row == 0:
                reason = f"{self._failed} saves in a row failed or were skipped"
                return {"alarm": "failing", "reason": reason, "last_error": self._last_error}
        elif event.kind == "save.commit":
            self._failed, self._last_error = 0, ""
            over = limits.durable_s is not None and seconds > limits.durable_s
            self._slow = self._slow + 1 if over else 0
            if over and self._slow % limits.in_a_row == 0:
                reason = f"{self._slow} saves in a row took longer than {limits.durable_s:g} s"
                return {"alarm": "slow", "reason": reason, "seconds": seconds}
        return None
