"""How much memory a call takes beside what was resident before it, where the system tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import rounds


def watch(call: Callable[[], object]) -> rounds.Numbers:
    """Run it; `peak_nbytes` is the most that was resident meanwhile less what was before."""
    before = reset_peak()
    call()
    return rounds.Numbers(peak_nbytes=status_nbytes("VmHWM") - before)


def reset_peak() -> int:
    """Let the high-water mark begin at what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        np.zeros(0)  # no such file: the mark then counts from the start of the process
    return status_nbytes("VmRSS")


def status_nbytes(key: str) -> int:
    """0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
