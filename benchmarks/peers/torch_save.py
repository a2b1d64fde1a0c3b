"""torch.save and torch.load(weights_only=True), with and without a map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers.durable import sync_below

PACKAGE = "torch"
FILE = "model.pt"


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in flat.items()}


def save(own: dict[str, Any], folder: Path) -> None:
    import torch

    folder.mkdir(exist_ok=True)
    torch.save(own, folder / FILE)
    sync_below(folder)


def begin(own: dict[str, Any], folder: Path) -> Callable[[], object]:
    """What people write by hand: clone, and save the clones in a thread."""
    import threading

    copies = {name: tensor.clone() for name, tensor in own.items()}
    thread = threading.Thread(target=save, args=(copies, folder))
    thread.start()
    return thread.join


def load(folder: Path) -> Mapping[str, Any]:
    import torch

    return {n: t.numpy() for n, t in torch.load(folder / FILE, weights_only=True).items()}


def map(folder: Path) -> Mapping[str, Any]:
    import torch

    found = torch.load(folder / FILE, weights_only=True, mmap=True)
    return {name: tensor.numpy() for name, tensor in found.items()}


def restore(own: dict[str, Any], folder: Path) -> None:
    import torch

    found = torch.load(folder / FILE, weights_only=True, mmap=True)
    for name, tensor in own.items():
        tensor.copy_(found[name])


def part(folder: Path, name: str) -> Any:
    import torch

    return torch.load(folder / FILE, weights_only=True, mmap=True)[name].numpy().copy()
