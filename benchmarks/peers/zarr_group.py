"""zarr: a group of arrays in a folder, in chunks of several MiB, not compressed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.durable import sync_below

PACKAGE = "zarr"
CHUNK_NBYTES = 4 << 20


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    return dict(flat)


def save(own: dict[str, Any], folder: Path) -> None:
    import zarr

    group = zarr.open_group(str(folder), mode="w")
    for name, array in own.items():
        rows = max(1, CHUNK_NBYTES // max(1, array.nbytes // len(array)))
        made = group.create_array(
            name,
            shape=array.shape,
            dtype=array.dtype,
            chunks=(min(rows, len(array)), *array.shape[1:]),
            compressors=None,
        )
        made[...] = array
    sync_below(folder)


def load(folder: Path) -> Mapping[str, Any]:
    import zarr

    group = zarr.open_group(str(folder), mode="r")
    return {
        name: array[...] for name, array in group.members(None) if isinstance(array, zarr.Array)
    }


def part(folder: Path, name: str) -> Any:
    import zarr

    return zarr.open_group(str(folder), mode="r")[name][...]
