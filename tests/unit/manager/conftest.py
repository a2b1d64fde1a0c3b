from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from ckptfmt import CheckpointInfo

MakeInfo = Callable[..., CheckpointInfo]


@pytest.fixture
def info() -> MakeInfo:
    """Makes a CheckpointInfo of a step, with metrics, made so many minutes after midnight."""

    def make(
        step: int | None,
        metrics: dict[str, float] | None = None,
        *,
        minutes: float = 0.0,
        writer: str = "ckptfmt 1 manager",
        name: str | None = None,
    ) -> CheckpointInfo:
        return CheckpointInfo(
            name=name or (f"step-{step:016d}" if step is not None else "main"),
            step=step,
            generation=0,
            created=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minutes),
            url="memory://x",
            nbytes=8,
            stored_nbytes=8,
            written_nbytes=0,
            tensors=1,
            digest=f"{step}",
            metadata={},
            metrics=metrics or {},
            parent=None,
            writer=writer,
            seconds=0.0,
        )

    return make
