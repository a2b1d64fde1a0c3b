"""Which store, which checkpoint: paths, URLs, `@` selectors. Spec: 02-store."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfmt.errors import UsageError, warn
from ckptfmt.format import step_name
from ckptfmt.types import At, StrPath

if TYPE_CHECKING:
    from ckptfmt.engine.store import Store

Where: TypeAlias = "StrPath | Store"
"""A directory, a URL or a Store; a str may end in `@WHICH`."""

_SCHEMES_WITH_AT = ("hf://", "github://", "git://")
_FILE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".npz", ".h5", ".keras")


def parse_where(path: StrPath | Store) -> tuple[Store, At | None]:
    """A store and, from a text `STORE@WHICH`, what it selects.

    The text is split at the last `@` of its last segment; never a Path, a path that exists as it
    stands, or a URL of a scheme that uses `@` itself. Digits are a step, `latest` is the latest.
    """
    from ckptfmt.engine.store import Store

    if isinstance(path, Store):
        return path, None
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            "not a path, a URL or a Store",
            reason="where",
            found=type(path).__name__,
            do="pass where the checkpoint lives as the second argument of save, the first of load",
        )
    text = os.fspath(path)
    if text.rstrip("/").endswith(".ckptz"):
        raise UsageError(
            "one-file stores are not part of this version",
            reason="one-file",
            where=repr(text),
            do="choose a folder's name",
        )
    at: At | None = None
    if isinstance(path, str):
        head, found, which = text.rpartition("@")
        split = found and "/" not in which and not text.startswith(_SCHEMES_WITH_AT)
        if split and not os.path.exists(text):
            text, at = head, _parse_which(which, path)
    return Store(text if isinstance(path, str) else path), at


def _parse_which(which: str, path: str) -> At:
    if not which:
        raise UsageError(
            "nothing is selected after the @",
            reason="selector",
            where=repr(path),
            expected="a step, a name, a tag or latest",
            do="write it, or pass a pathlib.Path if the @ belongs to the path",
        )
    return int(which) if which.isascii() and which.isdigit() else which


def whole_number(step: int | None, argument: str = "step") -> int | None:
    """A step as an int: integers of NumPy and of frameworks are taken for what they are.

    Raises:
        UsageError: It is no integer, or below 0, or from 2^53.
    """
    if step is None:
        return None
    try:
        made = None if isinstance(step, bool) else operator.index(step)
    except TypeError:
        made = None
    if made is None:
        raise UsageError(
            f"{argument} is not an integer",
            reason="step",
            expected="how many steps are finished, 0 or more"
            + ("" if argument == "step" else "; or a name"),
            found=f"{type(step).__name__} {step!r}"[:80],
            do="pass an int",
        )
    step_name(made)
    return made


def choose_at(selected: At | None, step: int | None, at: At | None) -> At | None:
    """The one of `@WHICH`, `step=` and `at=` that is given.

    Raises:
        UsageError: More than one is.
    """
    number = whole_number(step)
    given = {
        key: value
        for key, value in (("@", selected), ("step=", number), ("at=", at))
        if value is not None
    }
    if len(given) > 1:
        raise UsageError(
            "a checkpoint is chosen twice",
            reason="selector",
            found=" and ".join(f"{key}{value}" for key, value in given.items()),
            do="choose it once",
        )
    chosen = next(iter(given.values()), None)
    return chosen if isinstance(chosen, str) else whole_number(chosen, "at")


def looks_like_a_file(url: str) -> bool:
    return url.rstrip("/").endswith(_FILE_SUFFIXES)


def check_folder(path: Where, store: Store) -> None:
    """A store is a folder, also where its name looks like a file's. Who made a `Store` knows.

    Raises:
        UsageError: A file is there.
    """
    if os.path.isfile(store.url):
        raise UsageError(
            "a store is a folder, and a file is there",
            reason="where",
            where=store.url,
            do="choose another name, or move the file away",
        )
    if path is not store and looks_like_a_file(store.url):
        warn(f"{store.url} becomes a folder, although its name looks like a file's")


def refuse_swapped(tree: Any, path: object, call: str = "save(tree, path)") -> None:
    """`save(path, tree)` instead of `save(tree, path)`; the same for `restore(target, source)`."""
    from ckptfmt.engine.store import Store

    first, second = call.partition("(")[2].rstrip(")").split(", ")
    if isinstance(tree, str | os.PathLike) and not isinstance(path, str | os.PathLike | Store):
        raise UsageError(
            f"{call}: arguments look swapped",
            reason="swapped",
            found=f"{type(tree).__name__} as {first}, {type(path).__name__} as {second}",
            do=f"pass the {first} first",
        )
