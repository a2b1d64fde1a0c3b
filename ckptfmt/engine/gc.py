"""collect: take back the space of data files that nobody refers to, in two phases (I3, I4).

One promise: no file is deleted that a commit needs, whatever the clocks and however long a collector
is stalled. Phase 1 lists what nobody refers to; phase 2, at least `grace_s` later, puts a list of its
own, looks again, deletes what still nobody refers to, and removes the lists, its own last. The grace
is for readers of deleted checkpoints; savers are safe by their two checks (`coordinate.unusable`).

Why a list of its own: two collectors may take up the same waiting list. If the faster one removed it,
a save could write one of its ids again, find nothing named, and commit; then the slower one, stalled
between its look and its deletion, would delete that file. So every collector deletes only on the
authority of a list that it put itself and that nobody else removes while it may still be at work.
Spec: 08-protocol.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptfmt.engine.coordinate import (
    ABANDONED_AFTER_S,
    GcList,
    check_store_marker,
    clean_abandoned,
    gc_lists,
    is_abandoned,
    is_file_id,
    new_txn,
    put_list,
    remove_parts,
)
from ckptfmt.engine.owner import Owner, activate, deactivate
from ckptfmt.engine.survey import (
    SLACK_S,
    Refer,
    References,
    Survey,
    age_of,
    index_of,
    is_acceptable,
    read_references,
    survey,
)
from ckptfmt.errors import (
    StorageError,
    UsageError,
    warn,
)
from ckptfmt.reports import GcReport
from ckptfmt.storage import Backend, Entry, is_abandoned_temporary
from ckptfmt.types import Key

WORK_S = ABANDONED_AFTER_S / 2
"""A collector stops deleting this long after it put its list: later, others may remove that list."""
TMP_AGE_S = 600.0
"""Local files not yet linked that belong to no known save are left alone for at least this long."""

_TMP_KEY = re.compile(
    r"tmp/(?:([0-9a-f]{32})(?:-\d+){1,2}|(?:put|probe)-[0-9a-f]{32}(?:-\d+-\d+-\d+-[0-9a-f]{16})?(?:-[abc])?)"
)
_PARTS_KEY = re.compile(r"parts/([0-9a-f]{32})/.+")
_NOTE_KEY = re.compile(r"notes/([0-9a-f]{32})~(?:0|[1-9][0-9]*)\.index")


@dataclass(slots=True)
class _Tally:
    listed: dict[str, int] = field(default_factory=dict)
    deleted: dict[str, int] = field(default_factory=dict)
    spared: set[str] = field(default_factory=set)
    abandoned: set[str] = field(default_factory=set)
    open_saves: int = 0


def collect(
    backend: Backend,
    *,
    grace_s: float = 600.0,
    wait: bool = False,
    dry_run: bool = False,
    refer: Refer = read_references,
    complete: Callable[[Backend, Entry], bool] = is_acceptable,
) -> GcReport:
    """Delete what was listed at least `grace_s` ago and is still garbage; list what is garbage now.

    Args:
        backend: The store.
        grace_s: How long a reader may still use the files of a deleted checkpoint. 0: lists, looks
            again and deletes in this call.
        wait: Sleep the grace and finish the list of this call too.
        dry_run: Change nothing; the report says what would be listed and deleted now.
        refer: Reads an index's references.
        complete: Whether an index is whole: only then do lower generations of its name go.

    Raises:
        FormatError: An index cannot be read: nothing was deleted. Or the store asks for more than
            this version knows.
        UsageError: A grace that this store's clock or listings do not allow.
    """
    marked = check_store_marker(backend)
    dry_run = _check_grace(backend, grace_s) or dry_run
    if not marked and not any(index_of(e.key) for e in backend.list("checkpoints/")):
        return GcReport(dry_run=dry_run)  # not a store: its data/ may be anybody's
    collector = _Collector(backend, (refer, complete), grace_s, dry_run)
    collector.run(list_new=True)
    if wait and collector.waiting and not dry_run:
        collector.run_when_due()
    tally = collector.tally
    return GcReport(
        listed=sorted(tally.listed),
        deleted=sorted(tally.deleted),
        spared=sorted(tally.spared),
        freed_nbytes=sum(tally.deleted.values()),
        listed_nbytes=sum(tally.listed.values()),
        open_saves=tally.open_saves,
        abandoned=sorted(tally.abandoned),
        dry_run=dry_run,
    )


def _check_grace(backend: Backend, grace_s: float) -> bool:
    """True if this store allows no deletion at all."""
    capabilities = backend.capabilities
    if not isinstance(grace_s, int | float) or not grace_s >= 0:
        raise UsageError(
            "grace_s is no duration",
            reason="grace",
            expected="0 or more seconds, as a number",
            found=repr(grace_s)[:80],
            do="pass seconds: 600",
        )
    if not capabilities.time and grace_s:
        raise UsageError(
            "this store tells no times, so the age of a list is not known",
            reason="grace",
            where=backend.url,
            expected="grace_s=0",
            found=grace_s,
            do="call gc(grace_s=0) while no save is in flight",
        )
    stale = capabilities.list_stale_s
    if stale is None:
        warn(f"{backend.url}: how stale a listing may be is not known here, so gc deletes nothing")
        return True
    if stale and grace_s <= stale:
        raise UsageError(
            "grace_s must exceed the age that a listing of this store may have",
            reason="grace",
            where=backend.url,
            expected=f"more than {stale:g} s",
            found=grace_s,
            do=f"call gc(grace_s={2 * stale:g}) or more",
        )
    return False


class _Collector:
    """One run of gc over one store."""

    def __init__(
        self,
        backend: Backend,
        read: tuple[Refer, Callable[[Backend, Entry], bool]],
        grace_s: float,
        dry: bool,
    ) -> None:
        self.backend = backend
        self.refer, self.complete = read
        self.grace_s = grace_s
        self.dry = dry
        self.tally = _Tally()
        self.waiting: list[Key] = []
        self.now: float | None = None
        self.put_at = 0.0

    def run_when_due(self) -> None:
        """Sleep until the waiting lists have their grace behind them, then finish them."""
        delay = self.grace_s + SLACK_S + 0.1
        for _ in range(10):
            time.sleep(delay)
            self.run(list_new=False)
            entries = [self.backend.stat(key) for key in self.waiting]
            times = [e.time_s for e in entries if e is not None and e.time_s is not None]
            if not times or self.now is None:
                return
            # The store's clock runs slower than ours, or is coarse: what is missing, again.
            delay = max(0.1, self.grace_s + SLACK_S + 0.1 - (self.now - max(times)))

    def run(self, *, list_new: bool) -> None:
        """Finish what is due; list what is new.

        An error before the first deletion takes our list back. After one whose outcome is not known
        the list stays, and this process owns it until it ends: the deletion may land late.
        """
        run = new_txn()
        activate(run)
        late = False
        try:
            self._run(run, list_new)
        except StorageError as error:
            late = error.outcome_unknown
            raise
        finally:
            if not late:
                try:
                    if not self.dry:
                        self.backend.delete(Key(f"gc/{run}"))
                finally:
                    deactivate(run)

    def _run(self, run: str, list_new: bool) -> None:
        lists = [found for found in gc_lists(self.backend) if self._may_take(found)]
        ids = frozenset[str]().union(*(found.ids for found in lists))
        self.now = self._put(run, ids)
        self._remove_lower_generations()
        if self.grace_s == 0 and list_new:
            found = self._look().garbage
            self.tally.listed.update(found)
            ids |= found.keys()
            self._put(run, ids)
            due = lists
        else:
            due = [found for found in lists if self._is_old(found.time_s)]
            ids = frozenset[str]().union(*(found.ids for found in due))
        due += self._lost_lists()
        stale = self.backend.capabilities.list_stale_s
        if ids and stale and not self.dry:
            # A saver whose listing of gc/ did not show our list yet, and whose index our listing
            # would not show yet, must not exist: two times the staleness, once for each.
            time.sleep(2 * stale)
        view = self._look()
        self._delete_data(view, ids)
        for old in due:
            self._delete(old.key)
        self._clean(view)
        if list_new and self.grace_s:
            self._list_new(view, taken=[found for found in lists if found not in due])

    # -- lists ---------------------------------------------------------------------------------

    def _put(self, run: str, ids: frozenset[str]) -> float | None:
        """Put our own list; gives the store's time now."""
        self.put_at = _clock()
        if self.dry:  # nothing is deleted on the strength of this clock
            return time.time() if self.backend.capabilities.time else None
        try:
            return put_list(self.backend, run, ids, Owner.here()).time_s
        except StorageError as error:
            if error.reason != "no-space":
                raise
            # A full disk must not be in the way of what empties it: what killed saves left under
            # tmp/ may go without a list.
            self.tally.abandoned |= set(clean_abandoned(self.backend))
            return put_list(self.backend, run, ids, Owner.here()).time_s

    def _may_take(self, found: GcList) -> bool:
        return found.readable and (found.owner is None or found.owner.is_dead(found.run))

    def _lost_lists(self) -> list[GcList]:
        """Lists whose collector cannot be asked and that nobody can read or has touched for long."""
        return [
            found
            for found in gc_lists(self.backend)
            if not self._may_take(found)
            and self.now is not None
            and found.time_s is not None
            and self.now - found.time_s > ABANDONED_AFTER_S + SLACK_S
        ]

    def _list_new(self, view: Survey, taken: Sequence[GcList]) -> None:
        self.waiting = [found.key for found in taken]
        waiting = frozenset[str]().union(*(found.ids for found in taken))
        new = {
            i: nbytes
            for i, nbytes in view.garbage.items()
            if i not in waiting and i not in self.tally.deleted
        }
        if not new:
            return
        self.tally.listed.update(new)
        if not self.dry:
            run = new_txn()
            put_list(self.backend, run, frozenset(new), None)
            self.waiting.append(Key(f"gc/{run}"))

    # -- looking -------------------------------------------------------------------------------

    def _look(self) -> Survey:
        found = survey(self.backend, self.refer, self.now)
        self.tally.open_saves = len(found.live)
        return found

    def _is_old(self, time_s: float | None, least_s: float = 0.0) -> bool:
        """Older than the grace (and than `least_s`), by the store's time."""
        limit = max(self.grace_s, least_s)
        age = age_of(time_s, self.now)
        return limit == 0 or (age is not None and age > limit + SLACK_S)

    # -- deleting ------------------------------------------------------------------------------

    def _delete(self, key: Key) -> None:
        if not self.dry:
            self.backend.delete(key)

    def _remove_lower_generations(self) -> None:
        """What a replacement that was killed left behind, lowest first."""
        names = [index_of(entry.key) for entry in self.backend.list("checkpoints/")]
        found = [parsed[0] for parsed in names if parsed is not None]
        if len(found) == len(set(found)):
            return
        view = self._look()
        damaged = {entry.key[8:] for entry in self.backend.list("damaged/")}
        for generations in view.generations().values():
            if len(generations) > 1 and self._is_settled(view, generations[-1], damaged):
                for key in generations[:-1]:
                    self._delete(key)

    def _is_settled(self, view: Survey, key: Key, damaged: set[str]) -> bool:
        """The highest generation is whole, its data too, nobody has set it aside, and its save is
        over: a save in flight may still withdraw it."""
        refs, entry = view.indexes[key], self.backend.stat(key)
        in_flight = {save.txn for save in view.live} | {
            save.txn for save in view.dead if not is_abandoned(save, age_of(save.time_s, self.now))
        }
        return (
            entry is not None
            and refs.txn not in in_flight
            and Key(key.replace("checkpoints/", "quarantine/", 1)) not in view.indexes
            and damaged.isdisjoint(refs.files)
            and all(i in view.data and view.data[i].nbytes == n for i, n in refs.files.items())
            and self.complete(self.backend, entry)
        )

    def _delete_data(self, view: Survey, ids: frozenset[str]) -> None:
        garbage = [i for i in sorted(ids) if i in view.garbage]
        self.tally.spared |= {i for i in ids if i in view.data and i not in view.garbage}
        if not garbage:
            return
        if not self.dry:
            # I1: no power cut may bring an index back whose data is gone.
            self.backend.sync([Key("checkpoints/"), Key("quarantine/")])
        for i in garbage:
            if _clock() - self.put_at > WORK_S:
                self.tally.spared.add(i)
                continue
            self._delete(Key(f"data/{i}"))
            self.tally.deleted[i] = view.garbage[i]

    def _clean(self, view: Survey) -> None:
        """Remains of saves that are over, notes without a checkpoint, marks of deleted files."""
        # A save that replaces may still withdraw its index while a lower generation stands: that
        # it is in flight must stay known until it says itself that it is over, or dies.
        replacing = {
            view.indexes[keys[-1]].txn for keys in view.generations().values() if len(keys) > 1
        }
        over = {save.txn for save in view.dead}
        for save in view.dead:
            if save.txn in replacing and not is_abandoned(save, age_of(save.time_s, self.now)):
                continue
            self.tally.abandoned.add(save.txn)
            if not self.dry:
                remove_parts(self.backend, save.txn)
        at_work = {save.txn for save in view.live}
        for entry in list(self.backend.list("parts/")):
            match = _PARTS_KEY.fullmatch(entry.key)
            if match and match.group(1) not in at_work | over and self._is_litter(entry, view):
                self._delete(entry.key)
        for entry in list(self.backend.list("tmp/")):
            match = _TMP_KEY.fullmatch(entry.key)
            if match is None or match.group(1) in at_work:
                continue
            dead = match.group(1) in over or is_abandoned_temporary(entry.key)
            if dead or self._is_litter(entry, view):
                self._delete(entry.key)
        txns = view.txns
        for entry in view.notes:
            match = _NOTE_KEY.fullmatch(entry.key)
            if match and match.group(1) not in txns and view.is_older(entry):
                self._delete(entry.key)
        for entry in list(self.backend.list("damaged/")):
            i = entry.key[8:]
            if (
                is_file_id(i)
                and i not in view.referred
                and self.backend.stat(Key(f"data/{i}")) is None
            ):
                self._delete(entry.key)

    def _is_litter(self, entry: Entry, view: Survey) -> bool:
        return view.is_older(entry) and self._is_old(entry.time_s, TMP_AGE_S)


def _clock() -> float:
    """Seconds that also pass while the machine sleeps, where the system can say."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


__all__ = ["References", "collect", "is_acceptable", "read_references"]
