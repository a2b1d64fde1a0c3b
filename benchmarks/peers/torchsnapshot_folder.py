"""torchsnapshot: a folder with a file for each tensor or batch of small ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers.durable import sync_below

PACKAGE = "torchsnapshot"


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in flat.items()}


def save(own: dict[str, Any], folder: Path) -> None:
    import torchsnapshot

    torchsnapshot.Snapshot.take(str(folder), {"model": torchsnapshot.StateDict(**own)})
    sync_below(folder)


def begin(own: dict[str, Any], folder: Path) -> Callable[[], object]:
    import torchsnapshot

    pending = torchsnapshot.Snapshot.async_take(
        str(folder), {"model": torchsnapshot.StateDict(**own)}
    )

    def wait() -> None:
        pending.wait()
        sync_below(folder)

    return wait


def restore(own: dict[str, Any], folder: Path) -> None:
    import torchsnapshot

    torchsnapshot.Snapshot(str(folder)).restore({"model": torchsnapshot.StateDict(**own)})
