"""safetensors: one file; NumPy arrays are read, torch tensors mapped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.durable import sync_below

PACKAGE = "safetensors"
FILE = "model.safetensors"


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    return dict(flat)


def save(own: dict[str, Any], folder: Path) -> None:
    import safetensors.numpy

    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(own, folder / FILE)
    sync_below(folder)


def load(folder: Path) -> Mapping[str, Any]:
    """Of its ways the one that was fastest: torch tensors, whose memory is a map of the file."""
    return map(folder)


def map(folder: Path) -> Mapping[str, Any]:
    import safetensors.torch

    return {n: t.numpy() for n, t in safetensors.torch.load_file(folder / FILE).items()}


def restore(own: dict[str, Any], folder: Path) -> None:
    import safetensors

    with safetensors.safe_open(folder / FILE, "torch") as file:
        for name, array in own.items():
            array[...] = file.get_tensor(name).numpy()


def count(folder: Path) -> int:
    import safetensors

    with safetensors.safe_open(folder / FILE, "numpy") as file:
        return len(file.keys())


def part(folder: Path, name: str) -> Any:
    import safetensors

    with safetensors.safe_open(folder / FILE, "numpy") as file:
        return file.get_tensor(name)
