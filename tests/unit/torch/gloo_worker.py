"""One rank of the tests with several: started by the fixture `ranks`, it does one job after another.

A line of JSON on stdin is a job: a file of functions, which of them, the world's size and a folder
where the ranks meet. The process group is made anew for each. The answer is a line on stdout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(rank: int, job: dict[str, Any], modules: dict[str, ModuleType]) -> dict[str, Any]:
    path = job["file"]
    try:
        if path not in modules:
            modules[path] = load(path)
        store = dist.FileStore(job["meet"], job["world"])
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=job["world"], timeout=timedelta(seconds=60)
        )
        function = getattr(modules[path], job["job"])
        return {"result": function(rank, job["world"], **job["arguments"])}
    except BaseException as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "notes": getattr(error, "__notes__", []),
            "trace": traceback.format_exc(),
        }
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    rank = int(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what torch prints is not an answer
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    modules: dict[str, ModuleType] = {}
    for line in sys.stdin:
        print(json.dumps(answer(rank, json.loads(line), modules)), file=out, flush=True)


if __name__ == "__main__":
    main()
