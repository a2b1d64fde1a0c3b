"""What a restore leaves behind: checkpoints of a line that training does not go on with. The next save
sets them aside; looking alone moves nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptfmt.engine import Store, abandon, list_checkpoints, read_tags
from ckptfmt.errors import StorageError, warn
from ckptfmt.format import step_of
from ckptfmt.manager.aftermath import log
from ckptfmt.manager.healing import Healing
from ckptfmt.manager.mirror import Mirroring
from ckptfmt.types import CheckpointInfo


@dataclass(slots=True)
class Abandoned:
    """Of one manager.

    A name alone does not say which line: another trainer may set the same one aside and save its step
    anew before our next save. So each goes with the generation up to which it was seen; -1: it is in
    the mirror alone.
    """

    store: Store
    mirror: Store | None = None
    _known: dict[str, int] = field(default_factory=dict)
    _aside: dict[str, tuple[int, str]] = field(default_factory=dict)
    _looked: bool = False

    def look(self) -> None:
        """A restore begins: what others commit from now on is no line that we leave."""
        self._looked = True
        found = list_checkpoints(self.store.backend)
        self._known = dict.fromkeys(self._in_mirror(), -1)
        self._known |= {name: rows[-1].generation for name, rows in found.items()}

    def _in_mirror(self) -> list[str]:
        try:
            return self.mirror.names() if self.mirror is not None else []
        except StorageError as error:  # what is here may still be restored, and gone on with
            log.warning("the mirror cannot be looked at: %s", error)
            return []

    def leave(self, chosen: CheckpointInfo, healing: Healing) -> None:
        """Training goes on from `chosen`: newer ones and those that were passed over are left."""
        self._aside = {
            name: (generation, f"training went on from {chosen.name}")
            for name, generation in self._known.items()
            if chosen.step is not None and (step_of(name) or 0) > chosen.step
        }
        for bad in healing.rejected:
            name = bad.checkpoint
            generation = max(self._known.get(name, -1), healing.generations.get(name, -1))
            self._aside[name] = (generation, bad.reason)

    def set_aside(self, step: int, mirroring: Mirroring | None) -> None:
        """Going on: a save of this step begins."""
        if not self._looked:
            self._looked = True
            names = [*self.store.names(), *self._in_mirror()]
            newest = max((step_of(name) or 0 for name in names), default=-1)
            if newest > step:
                warn(
                    f"step {step} is saved below step {newest} of an earlier run, which stays the "
                    "latest: call restore before the first save, or save to another store"
                )
        found = read_tags(self.store.backend).values() if self._aside else ()
        tags = {tag.name: tag.tag for tag in found}
        while self._aside:
            name, (generation, reason) = next(iter(self._aside.items()))
            abandon(self.store.backend, name, generation, reason)
            if name in tags:
                warn(
                    f"{name}, which is tagged {tags[name]!r}, is set aside ({reason}): tag another, "
                    f"or take it back by Store.readmit({name!r})"
                )
            if mirroring is not None:
                mirroring.set_aside(name, reason)
            del self._aside[name]  # not before: where it failed, the next save tries again
