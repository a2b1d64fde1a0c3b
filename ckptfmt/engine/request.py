"""What a save is asked for: shared by all that take part in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptfmt import __version__
from ckptfmt.engine.group import Ranks
from ckptfmt.engine.plan import SaveOptions
from ckptfmt.errors import StorageError
from ckptfmt.events import Progress
from ckptfmt.format import TreeSection
from ckptfmt.types import At, IfExists, Select


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a save is asked for, names and defaults settled."""

    name: str
    step: int | None
    metadata: Mapping[str, object]
    metrics: Mapping[str, float]
    if_exists: IfExists
    options: SaveOptions
    bases: Sequence[At] | None = None
    unchanged: Select | None = None
    """Leaves that the caller vouches for: taken from the base."""
    timeout_s: float = 1800.0
    progress: Progress = False
    writer: str = f"ckptfmt {__version__}"
    ranks: Ranks | None = None
    """Who saves it together; None: this process alone."""
    before_commit: Callable[[], None] = lambda: None
    """Called when all data is written, before the index is put: the last chance to raise."""
    when_unknown: Callable[[StorageError], None] = lambda error: None
    """Called once if it stays unknown whether the index was put; what it raises is not caught."""
    check: Callable[[TreeSection], None] = lambda _: None
    """Called before that with the tree and its digests, as they will be put; raises if they are not
    what they should be. For a save by one process alone."""
    make_room: Callable[[], bool] | None = None
    """Called where the disk is full; True: something was deleted, and the save tries once more. For a
    save by one process alone."""
