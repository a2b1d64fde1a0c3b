"""torch.distributed.checkpoint on one rank: four threads write and sync their own files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers.durable import sync_below

PACKAGE = "torch"
THREADS = 4

_stagers: list[Any] = []


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in flat.items()}


def _writer(folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp

    return dcp.FileSystemWriter(
        folder, single_file_per_rank=False, sync_files=True, thread_count=THREADS
    )


def save(own: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(own, storage_writer=_writer(folder), no_dist=True)
    sync_below(folder)


def begin(own: dict[str, Any], folder: Path, *, warm: bool = True) -> Callable[[], object]:
    """`async_save`; `warm`: with a stager that keeps its memory for the next save."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    if not _stagers:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # Pinned memory and asynchronous copies are for accelerators; this has none.
        _stagers.append(DefaultStager(StagingOptions(False, False, False, False)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        future: Any = dcp.async_save(
            own, storage_writer=_writer(folder), async_stager=_stagers[0] if warm else None
        )

    def wait() -> None:
        future.result()
        sync_below(folder)

    return wait


def load(folder: Path) -> Mapping[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    fresh = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in known.items()}
    restore(fresh, folder)
    return {name: tensor.numpy() for name, tensor in fresh.items()}


def restore(own: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(own, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
