"""One checkpoint, one store: saving, loading, restoring, verifying, collecting.

A *store* is what a user opens; a *checkpoint* is one committed tree in it; a *plan* says which bytes
go where; a *target* is an object that a restore fills. Start reading at `save.py` and `restore.py`.

Names are loaded on first use: a listing needs no writer. The functions of `api` are not repeated
here, because `save`, `open`, `plan` and `restore` are modules of this package too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "FRAMEWORK": "tree",
    "ORDER_OPTIMIZER": "adapter",
    "ORDER_RNG": "adapter",
    "ORDER_TENSOR": "adapter",
    "ORDER_USER_CODE": "adapter",
    "Adapter": "adapter",
    "Captured": "adapter",
    "Checkpoint": "open",
    "Comparison": "adapter",
    "Fill": "fill",
    "MatchBy": "adapter",
    "Matcher": "select",
    "Memory": "adapter",
    "ObjectKind": "adapter",
    "PerRank": "ranks",
    "SaveFuture": "background",
    "Staged": "adapter",
    "Store": "store",
    "StoredLeaf": "adapter",
    "StoredTensor": "open",
    "Target": "adapter",
    "TensorSource": "adapter",
    "fill_boxes": "fill",
    "flatten": "tree",
    "per_rank": "ranks",
    "nearest": "select",
    "parse_where": "where",
    "register_type": "registered",
    "remember": "lineage",
    "select_positions": "select",
    "unflatten": "tree",
}

__all__ = [
    "FRAMEWORK",
    "ORDER_OPTIMIZER",
    "ORDER_RNG",
    "ORDER_TENSOR",
    "ORDER_USER_CODE",
    "Adapter",
    "Captured",
    "Checkpoint",
    "Comparison",
    "Fill",
    "MatchBy",
    "Matcher",
    "Memory",
    "ObjectKind",
    "PerRank",
    "SaveFuture",
    "Staged",
    "Store",
    "StoredLeaf",
    "StoredTensor",
    "Target",
    "TensorSource",
    "api",
    "fill_boxes",
    "flatten",
    "nearest",
    "parse_where",
    "per_rank",
    "register_type",
    "remember",
    "select_positions",
    "unflatten",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptfmt.engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ckptfmt.engine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from ckptfmt.engine import api as api
    from ckptfmt.engine.adapter import (
        ORDER_OPTIMIZER as ORDER_OPTIMIZER,
    )
    from ckptfmt.engine.adapter import (
        ORDER_RNG as ORDER_RNG,
    )
    from ckptfmt.engine.adapter import (
        ORDER_TENSOR as ORDER_TENSOR,
    )
    from ckptfmt.engine.adapter import (
        ORDER_USER_CODE as ORDER_USER_CODE,
    )
    from ckptfmt.engine.adapter import (
        Adapter as Adapter,
    )
    from ckptfmt.engine.adapter import (
        Captured as Captured,
    )
    from ckptfmt.engine.adapter import (
        Comparison as Comparison,
    )
    from ckptfmt.engine.adapter import (
        MatchBy as MatchBy,
    )
    from ckptfmt.engine.adapter import (
        Memory as Memory,
    )
    from ckptfmt.engine.adapter import (
        ObjectKind as ObjectKind,
    )
    from ckptfmt.engine.adapter import (
        Staged as Staged,
    )
    from ckptfmt.engine.adapter import (
        StoredLeaf as StoredLeaf,
    )
    from ckptfmt.engine.adapter import (
        Target as Target,
    )
    from ckptfmt.engine.adapter import (
        TensorSource as TensorSource,
    )
    from ckptfmt.engine.background import SaveFuture as SaveFuture
    from ckptfmt.engine.fill import Fill as Fill
    from ckptfmt.engine.fill import fill_boxes as fill_boxes
    from ckptfmt.engine.lineage import remember as remember
    from ckptfmt.engine.open import Checkpoint as Checkpoint
    from ckptfmt.engine.open import StoredTensor as StoredTensor
    from ckptfmt.engine.ranks import PerRank as PerRank
    from ckptfmt.engine.ranks import per_rank as per_rank
    from ckptfmt.engine.registered import register_type as register_type
    from ckptfmt.engine.select import (
        Matcher as Matcher,
    )
    from ckptfmt.engine.select import (
        nearest as nearest,
    )
    from ckptfmt.engine.select import (
        select_positions as select_positions,
    )
    from ckptfmt.engine.store import Store as Store
    from ckptfmt.engine.tree import FRAMEWORK as FRAMEWORK
    from ckptfmt.engine.tree import flatten as flatten
    from ckptfmt.engine.tree import unflatten as unflatten
    from ckptfmt.engine.where import parse_where as parse_where
