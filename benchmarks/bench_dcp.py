"""What does the writer cost under torch.distributed.checkpoint, beside torch's own FileSystemWriter?

    python benchmarks/bench_dcp.py [--small] [--gb 0.5] [--rounds 5] [--dir /on/the/disk] [--json FILE]

All save through torch's `DefaultSavePlanner`, one process without a group; ours in the foreground by
`ckptfmt.torch.dcp.save`. `save` is durable: torch's writer syncs its files, its folder is synced besides. `first stall` and `stall` are what the first and the second
`dcp.async_save` of a process let a step wait; DCP kept has a stager that keeps its memory, DCP the one
that `async_save` takes if none is named. `small save` is 5,000 tensors of 16 floats, also durable,
`nbytes` what is on the disk then.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import models
import report
import rounds
import stored
from peers.durable import sync_below

SMALL_NBYTES = 64


class Trial:
    """One writer with a state in host memory."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        warnings.simplefilter("ignore")
        self.name, self.dcp, self.nbytes = name, dcp, options["nbytes"]
        self.large = self.tree(models.transformer(options["nbytes"]))
        self.small = self.tree(models.many_tensors(options["count"], SMALL_NBYTES))
        self.wait: Callable[[], object] = lambda: None
        self.stager: Any = None
        if name == "DCP kept":
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            self.stager = DefaultStager(StagingOptions(False, False, False, False))

    def tree(self, flat: models.Flat) -> dict[str, Any]:
        import torch

        return {"model": {name: torch.from_numpy(array) for name, array in flat.items()}}

    def writer(self, folder: Path) -> Any:
        if self.name != report.US:
            return self.dcp.FileSystemWriter(folder)
        from ckptfmt.torch.dcp import CkptfmtWriter

        return CkptfmtWriter(folder, step=1)

    def operations(self, folder: Path) -> dict[str, Callable[[], object]]:
        made: dict[str, Callable[[], object]] = {
            "prepare imports": lambda: self.save(
                self.tree(models.many_tensors(2)), folder / "imports"
            ),
            "prepare pages": lambda: stored.ready_pages(self.nbytes),
            "first stall": lambda: self.begin(folder / "first"),
            "prepare first": lambda: self.wait(),
            "stall": lambda: self.begin(folder / "second"),
            "prepare second": lambda: self.wait(),
        }
        if self.name != "DCP kept":
            made["save"] = lambda: self.save(self.large, folder / "large")
            made["small save"] = partial(self.save_small, folder / "small")
        return made

    def save(self, tree: dict[str, Any], folder: Path) -> None:
        if self.name == report.US:
            from ckptfmt.torch import dcp as ours

            ours.save(tree, folder, step=1, planner=self.planner())
            return
        self.dcp.save(
            tree, storage_writer=self.writer(folder), planner=self.planner(), no_dist=True
        )
        sync_below(folder)

    def planner(self) -> Any:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        return DefaultSavePlanner()

    def save_small(self, folder: Path) -> rounds.Numbers:
        self.save(self.small, folder)
        return rounds.Numbers(nbytes=stored.nbytes_below(folder))

    def begin(self, folder: Path) -> None:
        future: Any = self.dcp.async_save(
            self.large,
            storage_writer=self.writer(folder),
            planner=self.planner(),
            async_stager=self.stager,
            no_dist=True,
        )
        self.wait = future.result

    def check(self, result: object) -> None:
        assert isinstance(result, rounds.Numbers) or self.name == "DCP kept"


PEERS: dict[str, Any] = stored.factories(Trial, [report.US, "DCP", "DCP kept"])


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        rounds.serve(PEERS, sys.argv[2:])
        return
    arguments, nbytes = report.arguments("What does the writer cost under DCP?", gb=0.5)
    count = 200 if arguments.small else 5000
    options = {"nbytes": nbytes, "count": count}
    chosen = report.chosen(PEERS, arguments)
    with report.workplace(arguments.dir) as folder:
        # Each round has processes of its own: one that is not counted would warm nothing.
        made = rounds.measure(
            __file__, chosen, folder, options, arguments.rounds, fresh=True, warm=False
        )
    real = models.transformer_nbytes(nbytes)
    report.finish("saving through DCP", made, real, arguments, {"small tensors": count})


if __name__ == "__main__":
    main()
