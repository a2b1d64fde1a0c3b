"""The many ways to name a TensorBundle: prefix, one of its files, a folder, the `checkpoint` file.

A state file says which checkpoint of its folder is the latest. Only names within the folder are
followed: a folder that was moved or copied keeps working, and none leads elsewhere. Names are never
patterns. Files that TensorFlow writes before it renames them (`*.tempstate*`, `*_temp`) have other
endings and are no candidates.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ckptfmt.errors import CorruptError, FormatError, NotFoundError, UsageError, warn
from ckptfmt.foreign.base import open_regular
from ckptfmt.foreign.bundle.index import parse_header
from ckptfmt.foreign.sstable import FOOTER_NBYTES, REASON, corrupt, is_table

INDEX_SUFFIX = ".index"
STATE_FILE = "checkpoint"
INDEX_NBYTES_MAX = 1 << 30
STATE_NBYTES_MAX = 16 << 20
_DATA = re.compile(r"\.data-[0-9]{5,6}-of-[0-9]{5,6}\Z")
_STATE_LINE = re.compile(r'\s*(model_checkpoint_path|all_model_checkpoint_paths)\s*:\s*"(.*)"\s*\Z')
_NUMBER = re.compile(r"[0-9]+\Z")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "'": "'", "\\": "\\"}
_VARIABLES = ("variables", "variables")
_LISTED_MAX = 20


@dataclass(frozen=True, slots=True)
class State:
    """What a `checkpoint` file says, as it stands there: the latest, and all that are kept."""

    latest: str
    every: tuple[str, ...]


def find_prefix(path: str) -> str | None:
    """The prefix that a path names, if it looks like a bundle; opens nothing but small ends."""
    if _DATA.search(path) and os.path.isfile(path):
        return _if_table(_DATA.sub("", path))
    if os.path.isdir(path):
        return _in_folder(path)
    if os.path.basename(path) == STATE_FILE and os.path.isfile(path) and _is_state(path):
        return path
    if path.endswith(INDEX_SUFFIX) and os.path.isfile(path):
        return _if_table(path[: -len(INDEX_SUFFIX)])
    return _if_table(path)


def _in_folder(path: str) -> str | None:
    state = os.path.join(path, STATE_FILE)
    if os.path.isfile(state) and _is_state(state):
        return state
    for inner in (os.path.join(*_VARIABLES), _VARIABLES[0]):
        if _if_table(os.path.join(path, inner)) is not None:
            return os.path.join(path, inner)
    prefixes = _prefixes(path)
    return os.path.join(path, prefixes[0]) if prefixes else None


def _if_table(prefix: str) -> str | None:
    """The prefix, if its index ends as a table does."""
    try:
        if not os.path.isfile(prefix + INDEX_SUFFIX):
            return None
        with open(prefix + INDEX_SUFFIX, "rb") as file:
            nbytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, nbytes - FOOTER_NBYTES))
            return prefix if is_table(file.read(FOOTER_NBYTES)) else None
    except (OSError, ValueError):
        return None


def _is_state(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    # An empty one is a state file whose writer died; where bundles are beside it, it was one.
    return b"model_checkpoint_path" in head or bool(_prefixes(os.path.dirname(path) or "."))


def _prefixes(folder: str) -> list[str]:
    """Names of all bundles in a folder, by their indexes."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    stems = [name[: -len(INDEX_SUFFIX)] for name in names if name.endswith(INDEX_SUFFIX)]
    return [stem for stem in stems if stem and _if_table(os.path.join(folder, stem)) is not None]


def resolve_prefix(path: str) -> str:
    """The prefix of the one bundle that a path names.

    Raises:
        NotFoundError: There is none; the message has the prefix tried.
        UsageError: A folder holds several and does not say which is the latest.
    """
    if os.path.isdir(path):
        state = os.path.join(path, STATE_FILE)
        if not os.path.isfile(state):
            return _only_prefix(path)
        path = state
    if os.path.basename(path) == STATE_FILE and os.path.isfile(path):
        return _latest(path)
    prefix = _DATA.sub("", path)
    if prefix == path and path.endswith(INDEX_SUFFIX):
        prefix = path[: -len(INDEX_SUFFIX)]
    if not os.path.exists(prefix + INDEX_SUFFIX):
        raise NotFoundError(
            "no such checkpoint: it has no index",
            reason="file",
            where=prefix,
            expected=os.path.basename(prefix) + INDEX_SUFFIX,
            do="give the prefix, one of its files, or the folder",
        )
    return prefix


def _only_prefix(folder: str) -> str:
    for inner in (os.path.join(*_VARIABLES), _VARIABLES[0]):
        if _if_table(os.path.join(folder, inner)) is not None:
            return os.path.join(folder, inner)
    prefixes = _prefixes(folder)
    if not prefixes:
        raise NotFoundError("no checkpoint in the folder", reason="file", where=folder)
    if len(prefixes) > 1:
        raise UsageError(
            "the folder has several checkpoints and no state file",
            reason=f"{REASON}-folder",
            where=folder,
            found=", ".join(prefixes[:_LISTED_MAX]),
            do="give the prefix of one",
        )
    return os.path.join(folder, prefixes[0])


def _latest(path: str) -> str:
    """The checkpoint that a state file calls the latest; a broken one falls back, with a warning."""
    folder = os.path.dirname(path) or "."
    state: State | None = None
    problem = ""
    try:
        state = read_state(path)
    except CorruptError as error:
        problem = str(error)
    if state is not None:
        name = os.path.basename(state.latest)
        if is_complete(os.path.join(folder, name)):
            return os.path.join(folder, name)
        problem = f"{path} names {state.latest!r}, which is not there or not complete"
    kept = [os.path.basename(name) for name in reversed(state.every)] if state is not None else []
    others = sorted(_prefixes(folder), key=_step_of, reverse=True)
    for name in [*kept, *others]:
        if name and is_complete(os.path.join(folder, name)):
            warn(f"{problem}; {name} is read instead")
            return os.path.join(folder, name)
    raise NotFoundError(
        "no complete checkpoint in the folder", reason="file", where=folder, found=problem
    )


def _step_of(name: str) -> tuple[int, str]:
    """`ckpt-12` before `ckpt-9` by the number that writers put last; no clock takes part."""
    number = _NUMBER.search(name)
    return (int(number[0]) if number and len(number[0]) < 20 else -1, name)


def is_complete(prefix: str) -> bool:
    """Whether a bundle's index can be read and all its data files are there."""
    if _if_table(prefix) is None:
        return False
    try:
        shards = parse_header(read_index_bytes(prefix), os.path.basename(prefix))
    except (FormatError, NotFoundError):
        return False
    return not missing_shards(prefix, shards)


def shard_path(prefix: str, shard: int, shards: int) -> str:
    return f"{prefix}.data-{shard:05d}-of-{shards:05d}"


def missing_shards(prefix: str, shards: int) -> list[str]:
    """Names of data files that are not there."""
    paths = (shard_path(prefix, shard, shards) for shard in range(shards))
    return [os.path.basename(path) for path in paths if not os.path.exists(path)]


def read_index_bytes(prefix: str) -> bytes:
    """All bytes of a bundle's index."""
    path = os.path.realpath(prefix + INDEX_SUFFIX)
    name = os.path.basename(prefix) + INDEX_SUFFIX
    descriptor, nbytes = open_regular(path, name)
    with os.fdopen(descriptor, "rb") as file:
        if nbytes > INDEX_NBYTES_MAX:
            raise corrupt("the index is too long", "limit", name, INDEX_NBYTES_MAX, nbytes)
        return file.read(nbytes)


def data_path(prefix: str, shard: int, shards: int) -> str:
    """A data file's path without links. It lies where the index lies.

    Raises:
        CorruptError: A link leads elsewhere than the index's own.
    """
    named = shard_path(prefix, shard, shards)
    path = os.path.realpath(named)
    index = os.path.realpath(prefix + INDEX_SUFFIX)
    if os.path.dirname(path) not in (os.path.dirname(index), os.path.realpath(_folder(prefix))):
        raise CorruptError(
            "a link leads out of the folder",
            reason="foreign-path",
            where=os.path.basename(named),
            expected="a file beside the index",
            do="do not trust this folder",
        )
    return path


def _folder(prefix: str) -> str:
    return os.path.dirname(prefix) or "."


def read_state(path: str) -> State:
    """A `checkpoint` file.

    Raises:
        CorruptError: It is too long, no text, or names nothing.
    """
    where = os.path.basename(path)
    descriptor, nbytes = open_regular(os.path.realpath(path), where)
    with os.fdopen(descriptor, "rb") as file:
        if nbytes > STATE_NBYTES_MAX:
            raise corrupt("the state file is too long", "state", where, STATE_NBYTES_MAX, nbytes)
        data = file.read(nbytes)
    latest, every = "", []
    for line in data.decode("utf-8", "replace").splitlines():
        match = _STATE_LINE.match(line)
        if match is None:
            continue
        name = _unquoted(match[2])
        if match[1] == "model_checkpoint_path":
            latest = name
        else:
            every.append(name)
    if not latest:
        raise corrupt("the state file names no checkpoint", "state", where)
    return State(latest, tuple(every))


def _unquoted(text: str) -> str:
    """A string of a text proto: C escapes, octal ones being bytes of UTF-8."""
    made = bytearray()
    for match in re.finditer(r"\\([0-7]{1,3})|\\(.)|([^\\]+)", text):
        if match[1]:
            made.append(int(match[1], 8) & 0xFF)
        elif match[2]:
            made += _ESCAPES.get(match[2], match[2]).encode()
        else:
            made += match[3].encode("utf-8", "replace")
    return made.decode("utf-8", "replace")
