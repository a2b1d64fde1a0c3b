"""load(like=): a new tree of another one's structure and classes, compared as in a restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ckptfmt.engine.adapter import StoredLeaf, TensorSource
from ckptfmt.engine.bind import Staged
from ckptfmt.engine.dispatch import adapter_of, object_kind, tensor_source
from ckptfmt.engine.lineage import remember
from ckptfmt.engine.load import check_limit
from ckptfmt.engine.open import Checkpoint
from ckptfmt.engine.own_tensors import maker_of
from ckptfmt.engine.report import make_report, mismatch_error
from ckptfmt.engine.restore import RestoreRequest, source_of, stored_side
from ckptfmt.engine.source import CheckpointSource
from ckptfmt.format import dtype_of, escape_key, join_name
from ckptfmt.types import Mode


def load_like(
    like: Any,
    source: Checkpoint | Mapping[str, Any],
    request: RestoreRequest,
    *,
    mode: Mode = "auto",
) -> Any:
    """The structure of `like` with its own classes and the stored values, compared as in restore."""
    stored = source_of(source)
    comparison, renamed = stored_side(stored, request)
    composite: dict[str, Any] = {}
    for name, obj in _leaves_of(like, ""):
        if not isinstance(obj, np.ndarray) and object_kind(obj) == "composite":
            composite[name] = adapter_of(obj).target(obj, name, [])  # type: ignore[union-attr]
            composite[name].compare(comparison)
            continue
        spec = _spec_of(obj, name)
        if spec is None:
            comparison.value(name)
        else:
            comparison.tensor(name, spec.dtype, spec.shape)
    report = make_report(comparison, stored, renamed)
    error = mismatch_error(report, request, [*comparison.strangers.values()])
    if error is not None:
        raise error
    rows = list(comparison.tensor_rows())
    check_limit(stored.nbytes(rows), request.max_nbytes)
    arrays = stored.tensors(rows, mode=mode, verify=request.verify, progress=request.progress)
    staged = Staged(comparison, arrays)
    staged.cast_all()

    def made(name: str, obj: Any) -> Any:
        if name in composite:
            return composite[name].make(staged)
        if name not in staged:
            return obj
        return staged[name] if _spec_of(obj, name) is None else maker_of(obj)(staged[name])

    if isinstance(stored, CheckpointSource):
        checkpoint = stored.checkpoint
        remember(checkpoint.backend, checkpoint.info.name, checkpoint.index.about.tree_digest)
    return _rebuild(like, "", made)


def _spec_of(obj: Any, name: str) -> TensorSource | StoredLeaf | None:
    """dtype and shape of a tensor, or of anything that has both; None for a plain value."""
    if isinstance(obj, np.generic):
        return None
    if isinstance(obj, np.ndarray) or object_kind(obj) == "tensor":
        return tensor_source(obj, name)
    if hasattr(obj, "shape") and hasattr(obj, "dtype"):
        return StoredLeaf(name, dtype_of(np.dtype(obj.dtype)).name, tuple(map(int, obj.shape)))
    return None


def _children(obj: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container that `like` may have; None for a leaf."""
    if isinstance(obj, Mapping) and obj:
        return [(escape_key(key), item) for key, item in obj.items()]
    if isinstance(obj, list | tuple) and any(_deep(item) for item in obj):
        return [(str(position), item) for position, item in enumerate(obj)]
    return None


def _deep(obj: Any) -> bool:
    """Whether a tensor lies at or below: a sequence without one is one value."""
    if isinstance(obj, Mapping):
        return any(map(_deep, obj.values()))
    if isinstance(obj, list | tuple):
        return any(map(_deep, obj))
    return not isinstance(obj, np.generic) and hasattr(obj, "shape") and hasattr(obj, "dtype")


def _leaves_of(obj: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = _children(obj)
    if children is None:
        yield name, obj
        return
    for part, item in children:
        yield from _leaves_of(item, join_name(name, part))


def _rebuild(obj: Any, name: str, made: Callable[[str, Any], Any]) -> Any:
    children = _children(obj)
    if children is None:
        return made(name, obj)
    items = [_rebuild(item, join_name(name, part), made) for part, item in children]
    if isinstance(obj, Mapping):
        pairs = dict(zip(obj, items))
        if isinstance(obj, dict):
            new = obj.copy()
            new.update(pairs)
            return new
        return type(obj)(pairs)  # type: ignore[call-arg]
    if hasattr(obj, "_fields"):
        return type(obj)(*items)
    return type(obj)(items)
