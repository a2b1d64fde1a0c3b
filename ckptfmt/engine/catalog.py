"""What a store holds, by listing: checkpoints, generations, tags, notes, quarantine.

No clock and no pointer file take part. A damaged document is skipped with a CkptWarning where a
choice is made, and raised where it was asked for. Spec: 02-store.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from ckptfmt.engine.where import looks_like_a_file, whole_number
from ckptfmt.errors import (
    ConflictError,
    CorruptError,
    FormatError,
    NotFoundError,
    StorageError,
    warn,
)
from ckptfmt.format import (
    ABOUT,
    FILES,
    HEADER_NBYTES,
    SECTIONS_NBYTES_MAX,
    About,
    FilesSection,
    Header,
    index_key,
    parse_about,
    parse_files,
    parse_header,
    parse_index_key,
    parse_section,
    step_name,
    step_of,
)
from ckptfmt.storage import Backend, Entry
from ckptfmt.types import At, CheckpointInfo, Key

if TYPE_CHECKING:
    from ckptfmt.format import Index

HEAD_READ_NBYTES = 64 << 10
_NOTE = re.compile(r"notes/([0-9a-f]{32})~(0|[1-9][0-9]*)\.index\Z")
_TAG_NBYTES_MAX = 64 << 10
_RELISTS_MAX = 10
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """An index that a listing shows; nothing of it has been read."""

    name: str
    generation: int
    key: Key
    nbytes: int

    @property
    def step(self) -> int | None:
        return step_of(self.name)


@dataclass(frozen=True, slots=True)
class Head:
    """The small range of an index that listings and gc read."""

    header: Header
    about: About
    files: FilesSection


def list_indexes(backend: Backend, prefix: str = "checkpoints/") -> dict[str, list[Listed]]:
    """Name -> its generations, ascending, under `checkpoints/` or `quarantine/`."""
    made: dict[str, list[Listed]] = {}
    for entry in backend.list(prefix):
        parsed = parse_index_key(entry.key)
        if parsed is not None and entry.key.count("/") == 1:
            name, generation = parsed
            made.setdefault(name, []).append(Listed(name, generation, entry.key, entry.nbytes))
    for generations in made.values():
        generations.sort(key=lambda listed: listed.generation)
    return made


def list_checkpoints(backend: Backend) -> dict[str, list[Listed]]:
    """Name -> generations of the checkpoints that are not set aside; found in both = quarantined."""
    found = list_indexes(backend)
    aside = list_indexes(backend, "quarantine/")
    for name, generations in aside.items():
        if name in found:
            numbers = {listed.generation for listed in generations}
            left = [listed for listed in found[name] if listed.generation not in numbers]
            if left:
                found[name] = left
            else:
                del found[name]
    return found


def next_generation(backend: Backend, name: str) -> int:
    """One more than the highest generation of a name, in checkpoints/ and quarantine/."""
    highest = -1
    for prefix in ("checkpoints/", "quarantine/"):
        for entry in backend.list(f"{prefix}{name}~"):
            parsed = parse_index_key(entry.key)
            if parsed is not None and parsed[0] == name:
                highest = max(highest, parsed[1])
    if parse_index_key(index_key(name, highest + 1)) is None:
        raise ConflictError(
            "no generation of this name is left",
            reason="generation",
            where=index_key(name, highest),
            found=f"generation {highest}",
            do="save under another name; no save of ours has made so many",
        )
    return highest + 1


def read_head(backend: Backend, key: Key, nbytes: int) -> Head:
    """Header, `about` and `files` of an index, from one small range."""
    data = backend.get(key, 0, min(nbytes, HEAD_READ_NBYTES))
    header = parse_header(data, key)
    end = header.sections[FILES].offset + header.sections[FILES].stored_nbytes
    if end > nbytes:
        raise CorruptError(
            "index is cut off",
            reason="truncated",
            where=key,
            expected=f"{header.nbytes} bytes",
            found=nbytes,
            do='restore another step or run "ckptfmt verify"',
        )
    if end > len(data):
        data = backend.get(key, 0, end)

    def section(position: int) -> bytes | memoryview:
        row = header.sections[position]
        return parse_section(
            header, position, data[row.offset : row.offset + row.stored_nbytes], key
        )

    about = parse_about(section(ABOUT), header.algorithm)
    return Head(header, about, parse_files(section(FILES), header.algorithm))


def read_index(backend: Backend, listed: Listed) -> Index:
    """A whole index; its name must be its key's. Its leaf names are checked when they are used,
    which is before any data file is opened.
    """
    from ckptfmt.engine.arena import aligned_buffer  # here: a listing does without
    from ckptfmt.format import parse_index

    if not HEADER_NBYTES <= listed.nbytes <= SECTIONS_NBYTES_MAX + HEADER_NBYTES:
        raise CorruptError(
            "index has an impossible size",
            reason="truncated",
            where=listed.key,
            found=f"{listed.nbytes} bytes",
            do='restore another step or run "ckptfmt verify"',
        )
    # In huge pages where it is large: the first touch of small ones takes longer than the checks.
    data = aligned_buffer(listed.nbytes).data
    backend.get(listed.key, 0, listed.nbytes, data)
    index = parse_index(data, listed.key, lazy=True)
    if index.about.name != listed.name:
        raise CorruptError(
            "index has another name than its key",
            reason="index-name",
            where=listed.key,
            expected=repr(listed.name),
            found=repr(index.about.name),
            do="someone renamed this file: put its name back",
        )
    return index


def warn_skipped(key: str, error: Exception) -> None:
    """A damaged index was passed over."""
    warn(f"skipped {key}: {error}")


def newest_readable(backend: Backend, generations: Iterable[Listed]) -> tuple[Listed, Index] | None:
    """The highest generation that can be read; damaged ones are skipped with a CkptWarning."""
    return newest(backend, generations, read_index)


def newest(
    backend: Backend,
    generations: Iterable[Listed],
    read: Callable[[Backend, Listed], T],
    skipped: Callable[[str, FormatError], None] = warn_skipped,
    *,
    relist: bool = True,
) -> tuple[Listed, T] | None:
    """What `read` gives of the highest generation of a name that it can read.

    A generation that is gone since the listing was replaced or deleted: the next one is looked for
    by another listing, so that whoever reads while another saves finds the old or the new one.
    Not with `relist=False`: a tag's generation is that one or none.
    """
    left = sorted(generations, key=lambda g: -g.generation)
    for _ in range(_RELISTS_MAX):
        gone = False
        for listed in left:
            try:
                return listed, read(backend, listed)
            except NotFoundError:
                gone = True
            except FormatError as error:
                skipped(listed.key, error)
        if not gone or not relist:
            return None
        found = list_indexes(backend, f"checkpoints/{left[0].name}~")
        left = found.get(left[0].name, [])[::-1]
        if not left:
            return None
    return None


def latest_order(names: Iterable[str]) -> Iterator[str]:
    """Names in the order in which latest is looked for: steps downwards, then `main`."""
    names = set(names)
    steps = [name for name in names if step_of(name) is not None]
    yield from sorted(steps, reverse=True)
    if "main" in names:
        yield "main"


def find(backend: Backend, found: Mapping[str, Sequence[Listed]], at: At | None) -> list[Listed]:
    """The generations of the checkpoint that `at` chooses: a step, a name, a tag.

    Raises:
        NotFoundError: There is none; the message lists what there is.
    """
    at = at if at is None or isinstance(at, str) else whole_number(at)
    name = step_name(at) if isinstance(at, int) else at
    if name is not None and name in found:
        return list(found[name])
    if isinstance(at, str):
        tag = read_tag(backend, at)
        if tag is not None:
            return [_tagged(backend, found, tag)]
    cure = 'choose one of these, or list them with "ckptfmt ls"'
    if name is not None and (aside := _aside(backend, name)):
        cure = aside
    elif not found:
        cure = "check the path, or save one first"
    raise NotFoundError(
        "no such checkpoint",
        reason="checkpoint",
        where=backend.url,
        expected=f"step {at}" if isinstance(at, int) else repr(at),
        found=names_text(found) or "no checkpoint",
        do=cure,
    )


def nothing_there(backend: Backend) -> NotFoundError:
    """The error of a place without any checkpoint: more often a wrong path than an empty store."""
    cure = "check the path, or save one first"
    if looks_like_a_file(backend.url):
        cure = (
            'this looks like a file of another format: see ckptfmt.open_foreign, "ckptfmt convert"'
        )
    elif "@" in backend.url.rpartition("/")[2]:
        cure = "only a str is split at its @; a Path or a Store takes at= beside it"
    found = what_is_there(backend)
    if found.startswith(_STORES):
        cure = "choose one of these"
    return NotFoundError(
        "there is no checkpoint", reason="latest", where=backend.url, found=found or None, do=cure
    )


_STORES = "stores below it: "
_LOOK_MAX = 200


def what_is_there(backend: Backend) -> str:
    """For a message about a place without a checkpoint: stores below it, or what else it has."""
    if os.path.isfile(backend.url):
        return "a file"
    try:
        keys = [str(entry.key) for entry in islice(backend.list(""), _LOOK_MAX)]
    except StorageError:
        return ""
    stores = [key.rpartition("/")[0] for key in keys if key.endswith("/ckptfmt.json")]
    if stores:
        return _STORES + _some(stores)
    if "ckptfmt.json" in keys:
        return "a store without a checkpoint"
    tops = dict.fromkeys(key.partition("/")[0] + "/" * ("/" in key) for key in keys)
    return _some(list(tops)) if tops else "nothing"


def _some(names: Sequence[str]) -> str:
    return ", ".join(ascii(n)[1:-1] for n in names[:5]) + (" and more" if len(names) > 5 else "")


def _tagged(backend: Backend, found: Mapping[str, Sequence[Listed]], tag: Tag) -> Listed:
    for listed in reversed(found.get(tag.name, [])):
        try:
            about = read_head(backend, listed.key, listed.nbytes).about
        except (NotFoundError, FormatError):
            continue
        if about.tree_digest.hex() == tag.digest:
            return listed
    cure, aside = "tag another checkpoint, or untag it", _aside(backend, tag.name)
    if aside:
        cure = f"{aside}; or {cure}"
    raise NotFoundError(
        "what this tag named is gone",
        reason="tag",
        where=f"tags/{tag.tag}",
        expected=f"{tag.name} with digest {tag.digest[:16]}…",
        found=names_text(found) or "no checkpoint",
        do=cure,
    )


def _aside(backend: Backend, name: str) -> str:
    """Why a checkpoint is set aside, and how to get it back; "" if it is not."""
    from ckptfmt.engine.notes import QUARANTINE  # which needs this module

    found = list_indexes(backend, "quarantine/").get(name)
    if not found:
        return ""
    why = ""
    with suppress(NotFoundError, FormatError):
        txn = read_head(backend, found[-1].key, found[-1].nbytes).about.txn.hex()
        for note in read_notes(backend, list_notes(backend).get(txn, [])):
            why = f" ({note.metadata[QUARANTINE]})" if QUARANTINE in note.metadata else why
    return f"it is set aside{why}; to take it back: Store(...).readmit({name!r})"


# -- tags ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tag:
    """What a tag says: it holds while that name's checkpoint has that digest."""

    tag: str
    name: str
    digest: str


def pack_tag(tag: Tag) -> bytes:
    return json.dumps({"name": tag.name, "digest": tag.digest}).encode()


def parse_tag(tag: str, data: bytes | memoryview) -> Tag:
    """CorruptError if it is not what `pack_tag` gives."""
    document: Any = None
    cause: Exception | None = None
    try:
        document = json.loads(bytes(data).decode())
    except (ValueError, RecursionError) as error:
        cause = error
    fields = document if isinstance(document, dict) else {}
    name, tree_digest = fields.get("name"), fields.get("digest")
    if not isinstance(name, str) or not isinstance(tree_digest, str):
        raise CorruptError(
            "tag cannot be read",
            reason="tag",
            where=f"tags/{tag}",
            expected="a name and a digest",
            found=cause or type(document).__name__,
            do="set the tag again, or delete the file",
        ) from cause
    return Tag(tag, name, tree_digest)


def read_tag(backend: Backend, tag: str) -> Tag | None:
    """A tag, or None if there is none."""
    key = Key(f"tags/{tag}")
    try:
        entry = backend.stat(key)
        if entry is None:
            return None
        return parse_tag(tag, backend.get(key, 0, min(entry.nbytes, _TAG_NBYTES_MAX)))
    except NotFoundError:
        return None


def read_tags(backend: Backend) -> dict[str, Tag]:
    """All tags; one that cannot be read is left out with a CkptWarning."""
    made = {}
    for entry in backend.list("tags/"):
        tag = entry.key.removeprefix("tags/")
        try:
            found = read_tag(backend, tag)
        except CorruptError as error:
            warn_skipped(entry.key, error)
            continue
        if found is not None:
            made[tag] = found
    return made


# -- notes --------------------------------------------------------------------------------------


def list_notes(backend: Backend) -> dict[str, list[tuple[int, Entry]]]:
    """txn (hex) -> (n, entry) of its notes, ascending."""
    made: dict[str, list[tuple[int, Entry]]] = {}
    for entry in backend.list("notes/"):
        match = _NOTE.match(entry.key)
        if match:
            made.setdefault(match[1], []).append((int(match[2]), entry))
    for notes in made.values():
        notes.sort(key=lambda note: note[0])
    return made


def read_notes(backend: Backend, notes: Iterable[tuple[int, Entry]]) -> list[About]:
    """The `about` of each note, in order; an unreadable one is skipped with a CkptWarning."""
    made = []
    for _, entry in notes:
        from ckptfmt.format import parse_index  # here: most listings have none

        try:
            made.append(parse_index(backend.get(entry.key, 0, entry.nbytes), entry.key).about)
        except NotFoundError:
            continue
        except FormatError as error:
            warn_skipped(entry.key, error)
    return made


def info_of(
    backend: Backend,
    listed: Listed,
    about: About,
    files: FilesSection,
    notes: Iterable[About] = (),
) -> CheckpointInfo:
    """`about` overlaid by the save's notes, key by key, the last one on top."""
    metrics, metadata = dict(about.metrics), dict(about.metadata)
    for note in notes:
        metrics.update(note.metrics)
        metadata.update(note.metadata)
    return CheckpointInfo(
        name=listed.name,
        step=about.step,
        generation=listed.generation,
        created=parse_time(about.created),
        url=backend.url,
        nbytes=about.nbytes,
        stored_nbytes=int(files.nbytes.sum()) if len(files.ids) else 0,
        written_nbytes=0,
        tensors=about.tensors,
        digest=about.tree_digest.hex(),
        metadata=metadata,
        metrics=metrics,
        parent=None if about.parent is None else (about.parent[0], about.parent[1].hex()),
        writer=about.writer,
        seconds=0.0,
    )


def parse_time(text: str) -> datetime:
    """RFC 3339 UTC; nothing depends on it, so what cannot be read is the epoch."""
    try:
        made = datetime.fromisoformat(text)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return made.replace(tzinfo=UTC) if made.tzinfo is None else made.astimezone(UTC)


def peek(backend: Backend, at: At) -> tuple[str, str] | None:
    """Name and tree digest of the checkpoint that `at` chooses, from small ranges alone; None where
    that cannot be told without reading more."""
    found = list_checkpoints(backend)
    if at == "latest":
        at = next(latest_order(found), at)
    generations = find(backend, found, at)
    if len(generations) > 1:
        return None
    head = read_head(backend, generations[0].key, generations[0].nbytes)
    return head.about.name, head.about.tree_digest.hex()


def names_text(found: Mapping[str, object]) -> str:
    """Some names of a store, for a message: the last steps are those one looks for."""
    steps = sorted(step for name in found if (step := step_of(name)) is not None)
    names = sorted(name for name in found if step_of(name) is None)
    shown = [*names[:4], *map(str, steps[-8:])]
    rest = len(names) + len(steps) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
