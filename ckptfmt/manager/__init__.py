"""Many checkpoints over time: cadence, retention, healing, watching. Start at `manager.py`."""

from ckptfmt.manager import checks, hooks, keep, when
from ckptfmt.manager.alarm import Alarm
from ckptfmt.manager.guard import LossGuard, Verdict
from ckptfmt.manager.healing import Loaded
from ckptfmt.manager.keep import Decision, Keep
from ckptfmt.manager.manager import Manager
from ckptfmt.manager.mirror import Mirror
from ckptfmt.manager.preemption import Preemption
from ckptfmt.manager.watch import Watcher
from ckptfmt.manager.when import When

__all__ = [
    "Alarm",
    "Decision",
    "Keep",
    "Loaded",
    "LossGuard",
    "Manager",
    "Mirror",
    "Preemption",
    "Verdict",
    "Watcher",
    "When",
    "checks",
    "hooks",
    "keep",
    "when",
]
