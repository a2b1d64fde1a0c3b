"""What a checkpoint is called that a rank saves for itself, without collectives."""

from __future__ import annotations

from ckptfmt.format import step_name
from ckptfmt.types import At


def rank_name(rank: int, step: int | None, name: At | None) -> str:
    """`rank00003.step-0000000000000007`: beside the steps, and never the latest."""
    if isinstance(name, int):
        step, name = name, None
    return f"rank{rank:05d}.{name or (step_name(step) if step is not None else 'main')}"
