"""Small types that every layer shares: what calls return, and distinct names for strings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NewType, TypeAlias

Key = NewType("Key", str)
"""A key of a backend: `data/3f9a…`; parts joined by `/`, relative to the store."""
Name = NewType("Name", str)
"""A leaf's name: `model/encoder.0.weight` (spec 03)."""
Digest = NewType("Digest", bytes)
"""Digest of some bytes: 16 bytes for xxh3-128, 32 for sha256 (spec 06)."""

StrPath: TypeAlias = "str | os.PathLike[str]"
At: TypeAlias = int | str
Select: TypeAlias = "str | Iterable[str] | Callable[[str], bool]"
Plain: TypeAlias = Any
"""None, bool, int, float, complex, str, bytes, NumPy scalars; lists, tuples and dicts of these."""
Group: TypeAlias = Any
"""None: this process alone. Else `"world"`, a ProcessGroup of torch, or FileGroup(rank, size)."""
Index: TypeAlias = Any
"""What NumPy takes between brackets: `np.s_[0:8, ..., 3]`."""
Mode = Literal["auto", "mmap", "read"]
IfExists = Literal["error", "replace", "keep"]
Rules: TypeAlias = "Sequence[Mapping[str, Any]]"
"""Rules of a conversion, in order; docs/convert.md lists their kinds."""
Unknown = Literal["opaque", "refuse"]
"""Objects of a foreign file whose class is code: carried as plain data, or refused."""
DigestName = Literal["xxh3-128", "sha256"]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One committed checkpoint.

    Attributes:
        name: Its name: `step-0000000000000007`, `main`, `best`.
        step: Finished steps, or None.
        generation: Which generation of the name this is.
        created: When, by the writer's clock (UTC); nothing depends on it.
        url: Where its store is.
        nbytes: Logical bytes of all tensors, each tied tensor once.
        stored_nbytes: Bytes of the data files that it refers to.
        written_nbytes: Bytes of data files that this save wrote; 0 where unknown (opened later).
        tensors: Number of tensors, ties counted once.
        digest: Hex digest of the `tree` section: equal digest, equal content.
        metadata: The user's.
        metrics: Numbers for retention and reports.
        parent: (name, tree digest in hex) of the checkpoint this one was made from, or None.
        writer: Which program wrote it.
        seconds: How long the save took; 0.0 where unknown (opened later).
    """

    name: str
    step: int | None
    generation: int
    created: datetime
    url: str
    nbytes: int
    stored_nbytes: int
    written_nbytes: int
    tensors: int
    digest: str
    metadata: Mapping[str, object]
    metrics: Mapping[str, float]
    parent: tuple[str, str] | None
    writer: str
    seconds: float
