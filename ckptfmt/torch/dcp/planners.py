"""The planners that `ckptfmt.torch.dcp.save` and `load` take where the caller names none.

They are torch's default planners, but that a save keeps what torch's drops of the tree (keys that are
no text, the kinds of mappings, empty ones), and that a load says all that does not fit at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from ckptfmt.errors import MismatchError
from ckptfmt.torch.dcp.layout import Path
from ckptfmt.torch.dcp.skeleton import Layout, skeleton_of

_LINES_MAX = 40


class TreeSavePlanner(DefaultSavePlanner):  # type: ignore[misc]
    """torch's planner; its mapping from fqn to path also knows the tree."""

    mappings: dict[str, Path]

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.mappings = Layout(self.mappings, skeleton_of(state_dict))


class StrictLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """torch's planner, but that everything which does not fit is told at once."""

    def create_local_plan(self) -> LoadPlan:
        stored = self.metadata.state_dict_metadata
        lines: list[str] = []
        for fqn, held in self.state_dict.items():
            entry = stored.get(fqn)
            expected, found = _described(entry), _found(held)
            if entry is None:
                lines.append(f"  missing in the checkpoint: {fqn}")
            elif expected != found:
                lines.append(f"  {fqn}: stored {expected}, target {found}")
        if lines:
            if len(lines) > _LINES_MAX:
                lines = [*lines[:_LINES_MAX], f"  … and {len(lines) - _LINES_MAX} more"]
            raise MismatchError(
                "the state dict and the checkpoint disagree:\n" + "\n".join(lines) + "\n",
                reason="tree",
                do="nothing was changed; give the state dict what is stored, or pass "
                "planner=DefaultLoadPlanner(allow_partial_load=True) for what is missing",
            )
        return super().create_local_plan()


def _described(entry: object) -> str:
    if not isinstance(entry, TensorStorageMetadata):
        return "a value"
    return f"{_short(entry.properties.dtype)} {list(entry.size)}"


def _found(held: Any) -> str:
    if not (isinstance(held, torch.Tensor) or hasattr(held, "local_shards")):
        return "a value"
    return f"{_short(held.dtype)} {list(held.size())}"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
