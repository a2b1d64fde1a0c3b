"""Made the folders beside with torch, by two processes; run again only for a new folder.

    python generate.py

`expected.json` says what `dcp_to_torch_save` and `torch.load` make of them: dtype, shape, bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

HERE = Path(__file__).parent
RELEASE = "2.13.0"
DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float64")


def state(mesh: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 4, generator=generator)
    made: dict[str, Any] = {
        "model": {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole.to(torch.bfloat16), mesh, [Shard(1)]),
            "bias": torch.arange(3.0),
        },
        "optim": {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": [{"lr": 0.1}]},
        "list": [torch.ones(2), 5, "text"],
        "every": {n: torch.arange(6).reshape(2, 3).to(getattr(torch, n)) for n in DTYPES},
        "empty": torch.zeros(0, 3),
        "complex": torch.tensor([1 + 2j]),
        "step": 7,
    }
    return made


def save(rank: int, folder: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    writer = dcp.FileSystemWriter(folder, thread_count=3)
    dcp.save(state(init_device_mesh("cpu", (2,))), storage_writer=writer)
    dist.destroy_process_group()


def expected(folder: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}

    def walk(node: Any, name: str) -> None:
        if isinstance(node, dict):
            for key, item in node.items():
                walk(item, f"{name}/{key}" if name else str(key))
        elif isinstance(node, list) and any(isinstance(item, torch.Tensor) for item in node):
            for at, item in enumerate(node):
                walk(item, f"{name}/{at}")
        elif isinstance(node, torch.Tensor):
            raw = node.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            tensors[name] = {
                "dtype": str(node.dtype).removeprefix("torch."),
                "shape": list(node.shape),
                "hex": raw.hex(),
            }
        else:
            values[name] = node

    with tempfile.TemporaryDirectory() as temporary:
        file = f"{temporary}/x.pt"
        dcp_to_torch_save(str(folder), file)
        walk(torch.load(file, weights_only=False), "")
    return {"tensors": tensors, "values": values}


def main() -> None:
    assert torch.__version__.startswith(RELEASE)
    folder = HERE / "two-ranks"
    shutil.rmtree(folder, ignore_errors=True)
    multiprocessing.spawn(save, (str(folder), 29571), nprocs=2)
    (HERE / "expected.json").write_text(json.dumps(expected(folder), indent=1) + "\n")


if __name__ == "__main__":
    main()
