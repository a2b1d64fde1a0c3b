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
    "ABSENT": "tree",
    "FRAMEWORK": "tree",
    "LOST_AFTER_S": "presence",
    "ORDER_OPTIMIZER": "adapter",
    "ORDER_RNG": "adapter",
    "ORDER_TENSOR": "adapter",
    "ORDER_USER_CODE": "adapter",
    "Adapter": "adapter",
    "Box": "adapter",
    "Captured": "adapter",
    "Checkpoint": "open",
    "CheckpointSource": "source",
    "Comparison": "adapter",
    "CopyRequest": "copy",
    "FileGroup": "file_group",
    "FileStream": "stream",
    "Fill": "fill",
    "FlatTree": "tree",
    "Gone": "group",
    "LiveModel": "live_layers",
    "Mailbox": "group",
    "MatchBy": "adapter",
    "Matcher": "select",
    "Meeting": "group",
    "Memory": "adapter",
    "ObjectKind": "adapter",
    "Part": "adapter",
    "PartsTicket": "parts",
    "PerRank": "ranks",
    "Pipeline": "pipeline",
    "Presence": "presence",
    "Ranks": "group",
    "Repeating": "background",
    "Reporter": "progress",
    "RestoreRequest": "restore",
    "SPARE": "adapter",
    "SaveFuture": "background",
    "SaveOptions": "plan",
    "SaveRequest": "request",
    "Sharded": "sharded",
    "Staged": "adapter",
    "Store": "store",
    "StoredLeaf": "adapter",
    "StoredTensor": "open",
    "Target": "adapter",
    "TensorSource": "adapter",
    "TreeSource": "source",
    "Watch": "presence",
    "abandon": "aside",
    "abandon_strangers": "aside",
    "abort_parts": "parts",
    "aligned_buffer": "arena",
    "annotate": "notes",
    "annotate_newest": "notes",
    "begin_parts": "parts",
    "build_tree": "leaves",
    "cast_array": "cast",
    "check_metadata": "notes",
    "check_metrics": "notes",
    "commit_parts": "parts",
    "container_row": "tree",
    "copy_arrays": "stage",
    "copy_checkpoints": "copy",
    "copy_state": "own_tensors",
    "error_in": "group",
    "fail_in_group": "group_save",
    "fill_boxes": "fill",
    "flatten": "tree",
    "follow": "background",
    "keep_generators": "dispatch",
    "late_error": "group",
    "list_checkpoints": "catalog",
    "list_indexes": "catalog",
    "live_groups": "live_layers",
    "live_models": "live_layers",
    "load_like": "like",
    "load_tree": "load",
    "named_leaves": "walk",
    "nearest": "select",
    "newest_readable": "catalog",
    "not_traced": "tracing",
    "parse_leaf_value": "leaves",
    "parse_where": "where",
    "peek": "catalog",
    "per_rank": "ranks",
    "plan_part": "parts",
    "ranks_of": "group",
    "read_tags": "catalog",
    "ready_staging": "background",
    "register_type": "registered",
    "remember": "lineage",
    "restore_in_group": "group_restore",
    "restore_tree": "restore",
    "save_in_background": "background",
    "save_in_group": "group_save",
    "save_tree": "save",
    "select_positions": "select",
    "settle": "background",
    "settle_call": "call",
    "source_of": "restore",
    "wait_for": "group",
    "wait_until": "group",
    "what_is_there": "catalog",
    "whole_number": "where",
    "write_part": "parts",
}

__all__ = [
    "ABSENT",
    "FRAMEWORK",
    "LOST_AFTER_S",
    "ORDER_OPTIMIZER",
    "ORDER_RNG",
    "ORDER_TENSOR",
    "ORDER_USER_CODE",
    "SPARE",
    "Adapter",
    "Box",
    "Captured",
    "Checkpoint",
    "CheckpointSource",
    "Comparison",
    "CopyRequest",
    "FileGroup",
    "FileStream",
    "Fill",
    "FlatTree",
    "Gone",
    "LiveModel",
    "Mailbox",
    "MatchBy",
    "Matcher",
    "Meeting",
    "Memory",
    "ObjectKind",
    "Part",
    "PartsTicket",
    "PerRank",
    "Pipeline",
    "Presence",
    "Ranks",
    "Repeating",
    "Reporter",
    "RestoreRequest",
    "SaveFuture",
    "SaveOptions",
    "SaveRequest",
    "Sharded",
    "Staged",
    "Store",
    "StoredLeaf",
    "StoredTensor",
    "Target",
    "TensorSource",
    "TreeSource",
    "Watch",
    "abandon",
    "abandon_strangers",
    "abort_parts",
    "aligned_buffer",
    "annotate",
    "annotate_newest",
    "api",
    "begin_parts",
    "build_tree",
    "cast_array",
    "check_metadata",
    "check_metrics",
    "commit_parts",
    "container_row",
    "copy_arrays",
    "copy_checkpoints",
    "copy_state",
    "error_in",
    "fail_in_group",
    "fill_boxes",
    "flatten",
    "follow",
    "keep_generators",
    "late_error",
    "list_checkpoints",
    "list_indexes",
    "live_groups",
    "live_models",
    "load_like",
    "load_tree",
    "named_leaves",
    "nearest",
    "newest_readable",
    "not_traced",
    "parse_leaf_value",
    "parse_where",
    "peek",
    "per_rank",
    "plan_part",
    "ranks_of",
    "read_tags",
    "ready_staging",
    "register_type",
    "remember",
    "restore_in_group",
    "restore_tree",
    "save_in_background",
    "save_in_group",
    "save_tree",
    "select_positions",
    "settle",
    "settle_call",
    "source_of",
    "wait_for",
    "wait_until",
    "what_is_there",
    "whole_number",
    "write_part",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptfmt.engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ckptfmt.engine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from ckptfmt.engine import api as api
    from ckptfmt.engine.adapter import ORDER_OPTIMIZER as ORDER_OPTIMIZER
    from ckptfmt.engine.adapter import ORDER_RNG as ORDER_RNG
    from ckptfmt.engine.adapter import ORDER_TENSOR as ORDER_TENSOR
    from ckptfmt.engine.adapter import ORDER_USER_CODE as ORDER_USER_CODE
    from ckptfmt.engine.adapter import SPARE as SPARE
    from ckptfmt.engine.adapter import Adapter as Adapter
    from ckptfmt.engine.adapter import Box as Box
    from ckptfmt.engine.adapter import Captured as Captured
    from ckptfmt.engine.adapter import Comparison as Comparison
    from ckptfmt.engine.adapter import MatchBy as MatchBy
    from ckptfmt.engine.adapter import Memory as Memory
    from ckptfmt.engine.adapter import ObjectKind as ObjectKind
    from ckptfmt.engine.adapter import Part as Part
    from ckptfmt.engine.adapter import Staged as Staged
    from ckptfmt.engine.adapter import StoredLeaf as StoredLeaf
    from ckptfmt.engine.adapter import Target as Target
    from ckptfmt.engine.adapter import TensorSource as TensorSource
    from ckptfmt.engine.arena import aligned_buffer as aligned_buffer
    from ckptfmt.engine.aside import abandon as abandon
    from ckptfmt.engine.aside import abandon_strangers as abandon_strangers
    from ckptfmt.engine.background import Repeating as Repeating
    from ckptfmt.engine.background import SaveFuture as SaveFuture
    from ckptfmt.engine.background import follow as follow
    from ckptfmt.engine.background import ready_staging as ready_staging
    from ckptfmt.engine.background import save_in_background as save_in_background
    from ckptfmt.engine.background import settle as settle
    from ckptfmt.engine.call import settle_call as settle_call
    from ckptfmt.engine.cast import cast_array as cast_array
    from ckptfmt.engine.catalog import list_checkpoints as list_checkpoints
    from ckptfmt.engine.catalog import list_indexes as list_indexes
    from ckptfmt.engine.catalog import newest_readable as newest_readable
    from ckptfmt.engine.catalog import peek as peek
    from ckptfmt.engine.catalog import read_tags as read_tags
    from ckptfmt.engine.catalog import what_is_there as what_is_there
    from ckptfmt.engine.copy import CopyRequest as CopyRequest
    from ckptfmt.engine.copy import copy_checkpoints as copy_checkpoints
    from ckptfmt.engine.dispatch import keep_generators as keep_generators
    from ckptfmt.engine.file_group import FileGroup as FileGroup
    from ckptfmt.engine.fill import Fill as Fill
    from ckptfmt.engine.fill import fill_boxes as fill_boxes
    from ckptfmt.engine.group import Gone as Gone
    from ckptfmt.engine.group import Mailbox as Mailbox
    from ckptfmt.engine.group import Meeting as Meeting
    from ckptfmt.engine.group import Ranks as Ranks
    from ckptfmt.engine.group import error_in as error_in
    from ckptfmt.engine.group import late_error as late_error
    from ckptfmt.engine.group import ranks_of as ranks_of
    from ckptfmt.engine.group import wait_for as wait_for
    from ckptfmt.engine.group import wait_until as wait_until
    from ckptfmt.engine.group_restore import restore_in_group as restore_in_group
    from ckptfmt.engine.group_save import fail_in_group as fail_in_group
    from ckptfmt.engine.group_save import save_in_group as save_in_group
    from ckptfmt.engine.leaves import build_tree as build_tree
    from ckptfmt.engine.leaves import parse_leaf_value as parse_leaf_value
    from ckptfmt.engine.like import load_like as load_like
    from ckptfmt.engine.lineage import remember as remember
    from ckptfmt.engine.live_layers import LiveModel as LiveModel
    from ckptfmt.engine.live_layers import live_groups as live_groups
    from ckptfmt.engine.live_layers import live_models as live_models
    from ckptfmt.engine.load import load_tree as load_tree
    from ckptfmt.engine.notes import annotate as annotate
    from ckptfmt.engine.notes import annotate_newest as annotate_newest
    from ckptfmt.engine.notes import check_metadata as check_metadata
    from ckptfmt.engine.notes import check_metrics as check_metrics
    from ckptfmt.engine.open import Checkpoint as Checkpoint
    from ckptfmt.engine.open import StoredTensor as StoredTensor
    from ckptfmt.engine.own_tensors import copy_state as copy_state
    from ckptfmt.engine.parts import PartsTicket as PartsTicket
    from ckptfmt.engine.parts import abort_parts as abort_parts
    from ckptfmt.engine.parts import begin_parts as begin_parts
    from ckptfmt.engine.parts import commit_parts as commit_parts
    from ckptfmt.engine.parts import plan_part as plan_part
    from ckptfmt.engine.parts import write_part as write_part
    from ckptfmt.engine.pipeline import Pipeline as Pipeline
    from ckptfmt.engine.plan import SaveOptions as SaveOptions
    from ckptfmt.engine.presence import LOST_AFTER_S as LOST_AFTER_S
    from ckptfmt.engine.presence import Presence as Presence
    from ckptfmt.engine.presence import Watch as Watch
    from ckptfmt.engine.progress import Reporter as Reporter
    from ckptfmt.engine.ranks import PerRank as PerRank
    from ckptfmt.engine.ranks import per_rank as per_rank
    from ckptfmt.engine.registered import register_type as register_type
    from ckptfmt.engine.request import SaveRequest as SaveRequest
    from ckptfmt.engine.restore import RestoreRequest as RestoreRequest
    from ckptfmt.engine.restore import restore_tree as restore_tree
    from ckptfmt.engine.restore import source_of as source_of
    from ckptfmt.engine.save import save_tree as save_tree
    from ckptfmt.engine.select import Matcher as Matcher
    from ckptfmt.engine.select import nearest as nearest
    from ckptfmt.engine.select import select_positions as select_positions
    from ckptfmt.engine.sharded import Sharded as Sharded
    from ckptfmt.engine.source import CheckpointSource as CheckpointSource
    from ckptfmt.engine.source import TreeSource as TreeSource
    from ckptfmt.engine.stage import copy_arrays as copy_arrays
    from ckptfmt.engine.store import Store as Store
    from ckptfmt.engine.stream import FileStream as FileStream
    from ckptfmt.engine.tracing import not_traced as not_traced
    from ckptfmt.engine.tree import ABSENT as ABSENT
    from ckptfmt.engine.tree import FRAMEWORK as FRAMEWORK
    from ckptfmt.engine.tree import FlatTree as FlatTree
    from ckptfmt.engine.tree import container_row as container_row
    from ckptfmt.engine.tree import flatten as flatten
    from ckptfmt.engine.walk import named_leaves as named_leaves
    from ckptfmt.engine.where import parse_where as parse_where
    from ckptfmt.engine.where import whole_number as whole_number
