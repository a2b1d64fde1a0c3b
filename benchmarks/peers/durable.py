"""fsync for programs that leave it out: a file is on the disk when its bytes and its name are."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_below(folder: Path) -> None:
    """Every file and folder there, and the folder that has it."""
    for path in sorted(folder.rglob("*")):
        sync_path(path)
    sync_path(folder)
    sync_path(folder.parent)
