"""From `STORE[@NAME]` on the command line to a store and what is chosen in it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptfmt.engine import Store, parse_where, what_is_there
from ckptfmt.errors import NotFoundError, UnsupportedError, UsageError
from ckptfmt.types import Key

if TYPE_CHECKING:
    from ckptfmt.types import At


def parse_store(
    text: str, options: Mapping[str, object], *, read_only: bool
) -> tuple[Store, At | None]:
    """The store, with these options, and the selector."""
    store, at = parse_where(text)
    return Store(store.url, storage_options=options, read_only=read_only), at


def open_store(args: argparse.Namespace, *, read_only: bool = True) -> tuple[Store, At | None]:
    """The store and the checkpoint of `STORE[@NAME]`; None where no checkpoint is named."""
    return parse_store(args.store, args.storage_options, read_only=read_only)


def open_whole_store(
    args: argparse.Namespace, *, read_only: bool, must_exist: bool = True
) -> Store:
    """The store, where a checkpoint must not be named.

    Raises:
        NotFoundError: kind `not-found-store`: there is none, and `must_exist`.
    """
    store, at = open_store(args, read_only=read_only)
    if at is not None:
        raise UsageError(
            "this command takes a whole store",
            reason="selector",
            where=args.store,
            do="leave out @NAME",
        )
    if must_exist:
        check_store(store, args.store)
    return store


def check_store(store: Store, text: str) -> None:
    """A mistyped path is an error: what there is not, is neither listed, cleaned nor shown.

    Raises:
        NotFoundError: kind `not-found-store`: no marker, and no checkpoint, which a reader needs alone.
    """
    backend = store.backend
    if backend.stat(Key("ckptfmt.json")) is not None:
        return
    # A copy that left the marker behind can still be read.
    if store.names() or any(backend.list("quarantine/")):
        return
    raise NotFoundError(
        "there is no store",
        reason="store",
        where=store.url,
        found=what_is_there(backend) or None,
        do=_instead(text) or "check the path; a store is made by the first save",
    )


def _instead(text: str) -> str:
    """What to do with what is there, if it is a file of another format."""
    from ckptfmt.cli.sources import foreign_format

    try:
        found = foreign_format(text)
    except UnsupportedError:
        return ""
    return f'it is of the format {found}: see "ckptfmt show {text}"' if found else ""


def store_for_writing(
    text: str, options: Mapping[str, object], *, step: int | None, name: str | None
) -> tuple[Store, dict[str, Any]]:
    """The store, and `step=` or `name=` for a save, which `STORE@NAME` may give too."""
    store, at = parse_store(text, options, read_only=False)
    if at is not None:
        if step is not None or name is not None:
            raise UsageError(
                "the checkpoint is named twice",
                reason="selector",
                where=text,
                do="give @NAME, --name or --step, not two of them",
            )
        step, name = (at, None) if isinstance(at, int) else (None, at)
    return store, {"step": step, "name": name}
