"""np.savez, not compressed; members of a zip file cannot be mapped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from peers.durable import sync_below

PACKAGE = "numpy"
FILE = "model.npz"


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    return dict(flat)


def save(own: dict[str, Any], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    np.savez(folder / FILE, **own)
    sync_below(folder)


def load(folder: Path) -> Mapping[str, Any]:
    with np.load(folder / FILE, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def part(folder: Path, name: str) -> Any:
    with np.load(folder / FILE, allow_pickle=False) as file:
        return file[name]
