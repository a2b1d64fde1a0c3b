"""Setting checkpoints aside, taking them back, and giving them up. Spec: 02-store 2.9."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptfmt.engine.catalog import Head, Listed, list_checkpoints, list_indexes, read_head
from ckptfmt.engine.commit import delete_notes, still_used
from ckptfmt.engine.coordinate import check_store_marker
from ckptfmt.engine.notes import QUARANTINE, annotate
from ckptfmt.errors import ConflictError, FormatError, NotFoundError, warn
from ckptfmt.storage import Backend
from ckptfmt.types import Key


def set_aside(backend: Backend, generations: Sequence[Listed], reason: str) -> None:
    """Put each under `quarantine/` first, then delete it from `checkpoints/`; note the reason."""
    for listed in generations:
        name = listed.key.removeprefix("checkpoints/")
        aside = Listed(listed.name, listed.generation, Key(f"quarantine/{name}"), listed.nbytes)
        _move(backend, listed, aside)
        _note(backend, aside, reason)


def abandon(backend: Backend, name: str, generation: int, reason: str) -> None:
    """`set_aside` of a name up to a generation: what was saved under it since is another line's."""
    check_store_marker(backend)
    found = list_checkpoints(backend).get(name, ())
    set_aside(backend, [g for g in found if g.generation <= generation], reason)


def abandon_strangers(backend: Backend, name: str, source: Backend, reason: str) -> None:
    """`set_aside` of a name in a copy of a store, but for what the store itself has of it."""
    check_store_marker(backend)
    saves = {_txn(source, listed) for listed in list_checkpoints(source).get(name, ())}
    found = list_checkpoints(backend).get(name, ())
    set_aside(backend, [g for g in found if _txn(backend, g) not in saves - {None}], reason)


def take_back(backend: Backend, name: str) -> None:
    """Put a checkpoint that was set aside back. NotFoundError if there is none of that name."""
    found = _aside(backend, name)
    for listed in found:
        back = Listed(listed.name, listed.generation, _place(listed), listed.nbytes)
        _move(backend, listed, back)
        _note(backend, back, "")
    newest_there = max((g.generation for g in list_checkpoints(backend).get(name, [])), default=0)
    if newest_there > found[-1].generation:
        warn(
            f"{name} was saved again while it was set aside: generation {newest_there} "
            f"stays the checkpoint, and {found[-1].generation} goes when it is saved again"
        )


def give_up(backend: Backend, name: str) -> None:
    """Delete what was set aside under a name, unreadable or not. NotFoundError if there is none."""
    found = _aside(backend, name)
    heads = [_head(backend, listed) for listed in found]
    for listed in found:
        # Where setting aside was killed half-way it lies in both places, and what lies in
        # quarantine/ alone says that it is set aside: that one goes last.
        for key in (_place(listed), listed.key):
            backend.delete(key)
            backend.sync([Key(key.rpartition("/")[0] + "/")])
    for head in heads:
        if head is not None and not still_used(backend, head.about.txn):
            delete_notes(backend, head.about.txn)


def _aside(backend: Backend, name: str) -> list[Listed]:
    """What of a name is set aside, lowest generation first."""
    found: Mapping[str, list[Listed]] = list_indexes(backend, "quarantine/")
    if name not in found:
        raise NotFoundError(
            "no such quarantined checkpoint",
            reason="quarantined",
            where=backend.url,
            expected=repr(name),
            found=", ".join(sorted(found)[:8]) or "none that is set aside",
            do='give its name, as "ckptfmt ls --quarantined" lists it',
        )
    return found[name]


def _place(listed: Listed) -> Key:
    """Where it lies when it is not set aside."""
    return Key("checkpoints/" + listed.key.removeprefix("quarantine/"))


def _head(backend: Backend, listed: Listed) -> Head | None:
    try:
        return read_head(backend, listed.key, listed.nbytes)
    except (NotFoundError, FormatError):
        return None


def _txn(backend: Backend, listed: Listed) -> bytes | None:
    """Which save it is of; None where that cannot be read."""
    head = _head(backend, listed)
    return None if head is None else head.about.txn


def _note(backend: Backend, listed: Listed, reason: str) -> None:
    head = _head(backend, listed)
    if head is not None:
        annotate(backend, head.about, metrics={}, metadata={QUARANTINE: reason})


def _move(backend: Backend, old: Listed, new: Listed) -> None:
    data = backend.get(old.key, 0, old.nbytes)
    if not backend.put_if_absent(new.key, data, durable=True):
        there = backend.stat(new.key)
        if there is None or bytes(backend.get(new.key, 0, there.nbytes)) != bytes(data):
            raise ConflictError(
                "another document is there already",
                reason="move",
                where=new.key,
                do="look at both; nothing was deleted",
            )
    backend.delete(old.key)
    backend.sync([Key(old.key.rpartition("/")[0] + "/")])
