"""The arguments of a save, checked before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ckptfmt.engine.background import WhenBusy, settle
from ckptfmt.engine.group import ranks_of
from ckptfmt.engine.group_save import fail_in_group
from ckptfmt.engine.notes import check_metadata, check_metrics
from ckptfmt.engine.plan import SaveOptions
from ckptfmt.engine.progress import check_progress
from ckptfmt.engine.request import SaveRequest
from ckptfmt.engine.where import Where, check_folder, parse_where, refuse_swapped, whole_number
from ckptfmt.errors import UsageError
from ckptfmt.events import Progress
from ckptfmt.format import check_checkpoint_name, step_name
from ckptfmt.storage import Backend
from ckptfmt.types import At, Group, IfExists, Plain, Select


def settle_together(
    tree: object,
    path: Where,
    step: int | None,
    name: str | None,
    *,
    group: Group,
    timeout_s: float,
    when_busy: WhenBusy = "wait",
    **o: Any,
) -> tuple[Backend, SaveRequest]:
    """Settle the call. In a group, an error of one rank is heard by all."""
    if group is None:
        backend, request = settle_call(tree, path, step, name, timeout_s=timeout_s, **o)
        settle(backend, when_busy)
        return backend, request
    refuse_swapped(tree, path)
    ranks, backend = ranks_of(group), parse_where(path)[0].backend
    try:
        _, request = settle_call(tree, path, step, name, timeout_s=timeout_s, **o)
        _refuse_vouching(request)
        settle(backend, when_busy)
    except BaseException as error:
        fail_in_group(ranks, backend, error, timeout_s)
        raise
    return backend, replace(request, ranks=ranks)


def settle_call(
    tree: object,
    path: Where,
    step: int | None,
    name: str | None,
    *,
    metadata: Mapping[str, Plain],
    metrics: Mapping[str, float],
    if_exists: IfExists | None,
    options: SaveOptions,
    bases: Sequence[At] | None,
    timeout_s: float,
    progress: Progress,
    unchanged: Select | None = None,
) -> tuple[Backend, SaveRequest]:
    """Which store and name, and every argument checked, before anything is touched."""
    refuse_swapped(tree, path)
    store, at = parse_where(path)
    if at is not None:
        name, step = _name_of_selector(at, name, step)
    step = whole_number(step)
    if name is not None:
        check_checkpoint_name(name, chosen=True)
    final = name if name is not None else step_name(step) if step is not None else "main"
    check_folder(path, store)
    request = SaveRequest(
        name=final,
        step=step,
        metadata=check_metadata(metadata),
        metrics=check_metrics(metrics),
        if_exists=_check_if_exists(if_exists, final),
        options=options,
        bases=bases,
        unchanged=unchanged,
        timeout_s=timeout_s,
        progress=check_progress(progress),
    )
    return store.backend, request


def _refuse_vouching(request: SaveRequest) -> None:
    if request.unchanged is not None:
        raise UsageError(
            "unchanged= is for a save by one process alone",
            reason="unchanged",
            do="leave it out: what is unchanged costs one hash on each rank",
        )


def _name_of_selector(at: At, name: str | None, step: int | None) -> tuple[str | None, int | None]:
    """`save(tree, "runs/a@7")` is `step=7`, `"runs/a@best"` is `name="best"`."""
    if name is not None or step is not None:
        raise UsageError(
            "a checkpoint is named twice",
            reason="selector",
            found=f"@{at} and {'name=' if name is not None else 'step='}",
            do="name it once",
        )
    return (None, at) if isinstance(at, int) else (at, None)


def _check_if_exists(choice: IfExists | None, name: str) -> Literal["error", "replace", "keep"]:
    if choice is None:
        return "replace" if name == "main" else "error"
    if choice not in ("error", "replace", "keep"):
        raise UsageError(
            "unknown if_exists",
            reason="if-exists",
            expected="error, replace or keep",
            found=repr(choice),
            do="choose one of these",
        )
    return choice
