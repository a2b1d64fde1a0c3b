"""One checkpoint, one store: saving, loading, restoring, verifying, collecting.

A *store* is what a user opens; a *checkpoint* is one committed tree in it; a *plan* says which bytes
go where; a *target* is an object that a restore fills. Start reading at `save.py` and `restore.py`.
"""

from __future__ import annotations

from ckptfmt.engine.adapter import (
    ORDER_OPTIMIZER,
    ORDER_RNG,
    ORDER_TENSOR,
    ORDER_USER_CODE,
    Adapter,
    Captured,
    Comparison,
    ObjectKind,
    Staged,
    StoredLeaf,
    Target,
    TensorSource,
)
from ckptfmt.engine.api import load, load_as, open, plan, restore, save, save_async
from ckptfmt.engine.background import SaveFuture
from ckptfmt.engine.open import Checkpoint, StoredTensor
from ckptfmt.engine.registered import register_type
from ckptfmt.engine.select import Matcher, nearest, select_positions
from ckptfmt.engine.store import Store
from ckptfmt.engine.tree import flatten, unflatten
from ckptfmt.engine.where import parse_where

__all__ = [
    "ORDER_OPTIMIZER",
    "ORDER_RNG",
    "ORDER_TENSOR",
    "ORDER_USER_CODE",
    "Adapter",
    "Captured",
    "Checkpoint",
    "Comparison",
    "Matcher",
    "ObjectKind",
    "SaveFuture",
    "Staged",
    "Store",
    "StoredLeaf",
    "StoredTensor",
    "Target",
    "TensorSource",
    "flatten",
    "load",
    "load_as",
    "nearest",
    "open",
    "parse_where",
    "plan",
    "register_type",
    "restore",
    "save",
    "save_async",
    "select_positions",
    "unflatten",
]
