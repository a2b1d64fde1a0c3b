"""What saves cost, and the checkpoints' metrics, as scalars for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ckptfmt.events import Event
from ckptfmt.manager.hooks.plain import need, numbers


def tensorboard(writer: Any) -> Callable[[Event], None]:
    """Scalars under `ckptfmt/`: stall_s, durable_s, written_nbytes, state_nbytes, and each metric.

    Args:
        writer: Anything that has `add_scalar(tag, value, step)`: a `SummaryWriter` of torch or
            tensorboardX, a `tensorboard.summary.Writer`; or a folder, for which one is made.
    Raises:
        MissingExtraError: A folder is given, and `tensorboard` is not installed.
    """
    if isinstance(writer, str | os.PathLike):
        writer = need("tensorboard.summary", "tensorboard").Writer(os.fspath(writer))

    def hook(event: Event) -> None:
        step = event.step or 0
        if event.kind == "save.staged" and event.seconds is not None:
            writer.add_scalar("ckptfmt/stall_s", event.seconds, step)
        elif event.kind == "save.commit":
            writer.add_scalar("ckptfmt/durable_s", event.seconds or 0.0, step)
            writer.add_scalar("ckptfmt/written_nbytes", float(event.nbytes), step)
            writer.add_scalar("ckptfmt/state_nbytes", float(event.total_nbytes), step)
            for name, value in numbers(event).items():
                if name not in ("stall_s", "stage_s"):
                    writer.add_scalar(f"ckptfmt/metrics/{name}", value, step)
            writer.flush()  # a checkpoint is rare, and what comes next may be a kill

    return hook
