"""tensorizer: one file, read in the order in which it was written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.durable import sync_below

PACKAGE = "tensorizer"
FILE = "model.tensors"


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in flat.items()}


def save(own: dict[str, Any], folder: Path) -> None:
    import tensorizer

    folder.mkdir(exist_ok=True)
    serializer = tensorizer.TensorSerializer(str(folder / FILE))
    serializer.write_state_dict(own)
    serializer.close()
    sync_below(folder)


def load(folder: Path) -> Mapping[str, Any]:
    import tensorizer

    with tensorizer.TensorDeserializer(str(folder / FILE), device="cpu", num_readers=4) as file:
        return {name: tensor.detach().numpy() for name, tensor in file.items()}
