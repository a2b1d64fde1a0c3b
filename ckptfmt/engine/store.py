"""`Store`: what users open: checkpoints over time in one place. Spec: 02-store, 08-protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptfmt.engine.catalog import (
    Head,
    Listed,
    Tag,
    find,
    info_of,
    latest_order,
    list_checkpoints,
    list_indexes,
    list_notes,
    newest,
    nothing_there,
    pack_tag,
    read_head,
    read_notes,
    read_tags,
    warn_skipped,
)
from ckptfmt.errors import ConflictError, FormatError, NotFoundError, UsageError
from ckptfmt.format import check_tag, step_name, step_of
from ckptfmt.storage import Backend, Capabilities, open_backend
from ckptfmt.types import At, CheckpointInfo, Key, Plain, StrPath

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptfmt.engine.open import Checkpoint
    from ckptfmt.engine.where import Where
    from ckptfmt.events import Progress
    from ckptfmt.reports import CopyReport, GcReport, VerifyReport

_NOTHING: Mapping[str, Any] = {}


def _read_head(backend: Backend, listed: Listed) -> Head:
    return read_head(backend, listed.key, listed.nbytes)


class Store:
    """The directory or URL that holds checkpoints and the data files they share.

    Making one touches nothing. `url` is where it is.
    """

    url: str

    def __init__(
        self,
        url: StrPath,
        *,
        storage_options: Mapping[str, Any] = _NOTHING,
        read_only: bool = False,
    ) -> None:
        self.backend: Backend = open_backend(
            url, storage_options=storage_options, read_only=read_only
        )
        self.url = self.backend.url
        self.read_only = read_only

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    @property
    def capabilities(self) -> Capabilities:
        """What the medium promises; probed at first use."""
        return self.backend.capabilities

    # -- looking --------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of the checkpoints, sorted; [] where there is no store."""
        return sorted(list_checkpoints(self.backend))

    def steps(self) -> list[int]:
        """Steps of the checkpoints that have one in their name, ascending."""
        return sorted(step for name in self.names() if (step := step_of(name)) is not None)

    def tags(self) -> dict[str, str]:
        """Tag -> checkpoint name, of the tags that hold."""
        heads = {name: head for name, (_, head) in self._heads().items()}
        return {
            tag: found.name
            for tag, found in read_tags(self.backend).items()
            if found.name in heads and heads[found.name].about.tree_digest.hex() == found.digest
        }

    def checkpoints(self, *, quarantined: bool = False) -> list[CheckpointInfo]:
        """All checkpoints, by step, then name; a damaged one is left out with a CkptWarning.

        Args:
            quarantined: Those that are set aside instead.
        """
        if quarantined:
            found = list_indexes(self.backend, "quarantine/")
            rows = [listed for generations in found.values() for listed in generations]
            heads = [(listed, head) for listed in rows if (head := self._head(listed)) is not None]
        else:
            heads = list(self._heads().values())
        notes = list_notes(self.backend)
        infos = [
            info_of(
                self.backend,
                listed,
                head.about,
                head.files,
                read_notes(self.backend, notes.get(head.about.txn.hex(), [])),
            )
            for listed, head in heads
        ]
        return sorted(infos, key=lambda i: (i.step is None, i.step or 0, i.name, i.generation))

    def _heads(self) -> dict[str, tuple[Listed, Head]]:
        """Name -> its highest readable generation, from the small ranges alone."""
        made = {}
        for name, generations in list_checkpoints(self.backend).items():
            found = newest(self.backend, generations, _read_head)
            if found is not None:
                made[name] = found
        return made

    def _head(self, listed: Listed) -> Head | None:
        try:
            return _read_head(self.backend, listed)
        except NotFoundError:
            return None
        except FormatError as error:
            warn_skipped(listed.key, error)
            return None

    def latest(self) -> CheckpointInfo | None:
        """The highest readable step, else `main`, else None. No clock takes part."""
        found = list_checkpoints(self.backend)
        for name in latest_order(found):
            chosen = newest(self.backend, found[name], _read_head)
            if chosen is not None:
                return self._info(*chosen)
        return None

    def _info(self, listed: Listed, head: Head) -> CheckpointInfo:
        notes = list_notes(self.backend).get(head.about.txn.hex(), [])
        return info_of(
            self.backend, listed, head.about, head.files, read_notes(self.backend, notes)
        )

    def last_committed(self) -> CheckpointInfo | None:
        """The one whose index was created last, by its writer's clock; nothing relies on it."""
        infos = self.checkpoints()
        return max(infos, key=lambda info: info.created, default=None)

    def open(self, at: At | None = None) -> Checkpoint:
        """Read a checkpoint's index; see `ckptfmt.open`."""
        from ckptfmt.engine.open import open_checkpoint

        return open_checkpoint(self.backend, at)

    def _find(self, at: At) -> list[Listed]:
        if at == "latest":
            info = self.latest()
            if info is None and not self.names():
                raise nothing_there(self.backend)
            if info is None:
                raise NotFoundError(
                    "no checkpoint is the latest",
                    reason="latest",
                    where=self.url,
                    do="name one; ckptfmt ls lists them",
                )
            at = info.name
        return find(self.backend, list_checkpoints(self.backend), at)

    # -- changing: what only that needs is imported there, for `ckptfmt ls` does without --------

    def _check_marker(self) -> None:
        from ckptfmt.engine.coordinate import check_store_marker

        check_store_marker(self.backend)

    def quarantine(self, at: At, reason: str) -> None:
        """Set a checkpoint aside: it is not latest any more, its data stays, `readmit` undoes it.

        Each generation is put under `quarantine/` first, then deleted from `checkpoints/`.
        """
        if not isinstance(reason, str) or not reason:
            raise UsageError(
                "no reason is given",
                reason="quarantine",
                expected="a text that says why",
                found=repr(reason)[:80],
                do="say it: whoever finds the checkpoint set aside will ask",
            )
        from ckptfmt.engine.aside import set_aside

        self._check_marker()
        set_aside(self.backend, self._find(at), reason)

    def readmit(self, name: str) -> None:
        """Put a quarantined checkpoint back. NotFoundError if there is none of that name.

        A newer generation, saved meanwhile, stays the checkpoint of that name: a CkptWarning.
        """
        from ckptfmt.engine.aside import take_back

        self._check_marker()
        take_back(self.backend, name)

    def tag(self, tag: str, at: At) -> None:
        """Give a checkpoint a tag; a tag that exists moves. It holds while the content stays."""
        self._check_marker()
        check_tag(tag)
        found = list_checkpoints(self.backend)
        if tag in found:
            raise UsageError(
                "a checkpoint has this name",
                reason="tag-is-name",
                where=repr(tag),
                do="choose another tag",
            )
        listed = self._readable(self._find(at))
        head = read_head(self.backend, listed.key, listed.nbytes)
        document = pack_tag(Tag(tag, listed.name, head.about.tree_digest.hex()))
        self.backend.put(Key(f"tags/{tag}"), document, durable=True)
        self.backend.sync([Key(f"tags/{tag}")])
        if self.backend.stat(listed.key) is None:
            # Deleted between our look and the put: the data may go any moment, say so.
            self.backend.delete(Key(f"tags/{tag}"))
            raise ConflictError(
                "the checkpoint was deleted while it was tagged",
                reason="tag",
                where=listed.key,
                do="tag another checkpoint",
            )

    def _readable(self, generations: list[Listed]) -> Listed:
        for listed in reversed(generations):
            if self._head(listed) is not None:
                return listed
        return generations[-1]

    def untag(self, tag: str) -> None:
        """Remove a tag. NotFoundError if there is none."""
        self._check_marker()
        if tag != "main":  # which nobody can tag any more: one that is there may go
            check_tag(tag)
        if self.backend.stat(Key(f"tags/{tag}")) is None:
            raise NotFoundError(
                "no such tag",
                reason="tag",
                where=self.url,
                expected=repr(tag),
                found=", ".join(sorted(self.tags())) or "no tag",
                do='list them with "ckptfmt ls"',
            )
        self.backend.delete(Key(f"tags/{tag}"))
        self.backend.sync([Key("tags/")])

    def annotate(
        self,
        at: At,
        *,
        metrics: Mapping[str, float] = _NOTHING,
        metadata: Mapping[str, Plain] = _NOTHING,
    ) -> None:
        """Add metrics and metadata after the commit: a note; the index does not change."""
        from ckptfmt.engine.notes import annotate, check_metadata, check_metrics

        self._check_marker()
        numbers, values = check_metrics(metrics or {}), check_metadata(metadata or {})
        listed = self._readable(self._find(at))
        about = read_head(self.backend, listed.key, listed.nbytes).about
        annotate(self.backend, about, metrics=numbers, metadata=values)

    def delete(self, at: At, *, force: bool = False, quarantined: bool = False) -> None:
        """Delete a checkpoint; its data files are taken back by `gc`.

        Args:
            quarantined: What is set aside under the name `at`, unreadable or not; one of that name
                that is not set aside stays.
        Raises:
            NotFoundError: There is none.
            UsageError: It is tagged; `force=True` deletes it and its tags.
        """
        from ckptfmt.engine.commit import delete_notes, still_used, withdraw

        self._check_marker()
        if quarantined:
            from ckptfmt.engine.aside import give_up

            give_up(self.backend, str(step_name(at)) if isinstance(at, int) else at)
            return
        generations = self._find(at)
        name = generations[-1].name
        heads = [(listed, self._head(listed)) for listed in generations]
        tags = self._tags_of(name, heads)
        if tags and not force:
            raise UsageError(
                "checkpoint is tagged",
                reason="tagged",
                where=repr(name),
                found=", ".join(map(repr, tags)),
                do="untag it first, or pass force=True",
            )
        if isinstance(at, str) and at in tags:
            # Asked for by its tag: still the whole checkpoint of that name.
            generations = list_checkpoints(self.backend).get(name, generations)
        documents = {g.key: bytes(self.backend.get(g.key, 0, g.nbytes)) for g in generations}
        for listed in generations:
            withdraw(self.backend, listed)
        appeared = set(self._tags_of(name, heads)) - set(tags)
        if appeared and not force:
            for key, data in documents.items():
                self.backend.put_if_absent(Key(key), data, durable=True)
            raise ConflictError(
                "checkpoint was tagged while it was deleted: it is back",
                reason="tagged",
                where=repr(name),
                found=", ".join(map(repr, sorted(appeared))),
                do="untag it first",
            )
        for tag in tags:
            self.backend.delete(Key(f"tags/{tag}"))
        for _, head in heads:
            if head is not None and not still_used(self.backend, head.about.txn):
                delete_notes(self.backend, head.about.txn)

    def _tags_of(self, name: str, heads: list[tuple[Listed, Head | None]]) -> list[str]:
        digests = {head.about.tree_digest.hex() for _, head in heads if head is not None}
        return [
            tag
            for tag, found in read_tags(self.backend).items()
            if found.name == name and found.digest in digests
        ]

    def gc(self, *, grace_s: float = 600.0, wait: bool = False, dry_run: bool = False) -> GcReport:
        """Collect data files that nothing refers to, in two phases.

        Args:
            grace_s: How long a reader may still use files of a deleted checkpoint. 0 returns the
                space at once: it may cost a reader elsewhere an error, never a save a byte.
            wait: Sleep the grace and do both phases.
            dry_run: Change nothing.
        """
        from ckptfmt.engine.gc import collect

        return collect(self.backend, grace_s=grace_s, wait=wait, dry_run=dry_run)

    def verify(
        self,
        at: At | None = None,
        *,
        executor: Executor | None = None,
        progress: Progress = False,
    ) -> VerifyReport:
        """Read and check every byte, padding and tables included, of one checkpoint or of all.

        Returns the damages, never raises them; damaged files are marked, so that no save reuses
        them.

        Raises:
            NotFoundError: There is no such checkpoint, or no store at all.
        """
        listed = None if at is None else self._readable(self._find(at))
        from ckptfmt.engine.verify import verify_store

        return verify_store(self.backend, listed, executor=executor, progress=progress)

    def push(
        self,
        url: Where,
        at: At | Sequence[At] | None = None,
        *,
        executor: Executor | None = None,
        progress: Progress = False,
    ) -> CopyReport:
        """Copy checkpoints into another store: only the data files that are missing there, each
        byte checked on the way, the index last.

        Args:
            url: The other store.
            at: A step, a name or a tag, or several; None: the latest.
            executor: Files are copied by its workers; None: one after another.
        Raises:
            CorruptError: Data of this store is damaged; that checkpoint does not appear there.
            ExistsError: The other store has another tree of this name (`main` is replaced).
        """
        from ckptfmt.engine.copy import CopyRequest, copy_checkpoints
        from ckptfmt.engine.progress import check_progress

        target = _whole(url)
        chosen = [self._readable(self._find(which)) for which in _several(at)]
        request = CopyRequest(executor=executor, progress=check_progress(progress))
        return copy_checkpoints(self.backend, target.backend, chosen, request)

    def pull(
        self,
        url: Where,
        at: At | Sequence[At] | None = None,
        *,
        executor: Executor | None = None,
        progress: Progress = False,
    ) -> CopyReport:
        """Copy checkpoints from another store into this one, as `push` does."""
        return _whole(url).push(self, at, executor=executor, progress=progress)

    def close(self) -> None:
        """Give back connections and descriptors."""
        self.backend.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _whole(url: Where) -> Store:
    """The other store of a copy."""
    from ckptfmt.engine.where import parse_where

    store, at = parse_where(url)
    if at is not None:
        raise UsageError(
            "a copy is between whole stores",
            reason="selector",
            found=f"@{at}",
            do="leave out the @, and choose with at=",
        )
    return store


def _several(at: At | Sequence[At] | None) -> list[At]:
    if at is None:
        return ["latest"]
    return [at] if isinstance(at, int | str) else list(at)
