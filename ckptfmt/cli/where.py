"""From `STORE[@NAME]` on the command line to a store and what is chosen in it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptfmt.engine import Store, parse_where
from ckptfmt.errors import UsageError
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


def open_whole_store(args: argparse.Namespace, *, read_only: bool) -> Store:
    """The store, where a checkpoint must not be named."""
    store, at = open_store(args, read_only=read_only)
    if at is not None:
        raise UsageError(
            "this command takes a whole store",
            reason="selector",
            where=args.store,
            do="leave out @NAME",
        )
    return store


def store_is_there(store: Store) -> bool:
    return store.backend.stat(Key("ckptfmt.json")) is not None


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
