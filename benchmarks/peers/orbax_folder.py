"""Orbax: PyTrees of NumPy arrays in OCDBT."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers.durable import sync_below

PACKAGE = "orbax"

_savers: list[Any] = []


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    return dict(flat)


def save(own: dict[str, Any], folder: Path) -> None:
    import orbax.checkpoint as ocp

    shutil.rmtree(folder, ignore_errors=True)
    ocp.PyTreeCheckpointer().save(folder.absolute(), own)
    sync_below(folder)


def begin(own: dict[str, Any], folder: Path) -> Callable[[], object]:
    import orbax.checkpoint as ocp

    shutil.rmtree(folder, ignore_errors=True)
    if not _savers:
        _savers.append(ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()))
    _savers[0].save(folder.absolute(), own)

    def wait() -> None:
        _savers[0].wait_until_finished()
        sync_below(folder)

    return wait


def load(folder: Path) -> Mapping[str, Any]:
    import orbax.checkpoint as ocp

    found: Mapping[str, Any] = ocp.PyTreeCheckpointer().restore(folder.absolute())
    return found
