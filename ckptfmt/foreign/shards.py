"""A folder of shards: the index decides what is read, and nothing outside the folder ever is.

An index maps each tensor's name to a file. File names come from strangers: they are checked as
text, then their links are resolved without opening anything, and only what stays inside is opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckptfmt.errors import CorruptError, NotFoundError
from ckptfmt.foreign.base import open_regular
from ckptfmt.foreign.strict_json import JsonCursor

INDEX_NBYTES_MAX = 64 << 20
NAME_NBYTES_MAX = 64 << 10
FILE_NAME_NBYTES_MAX = 1024
INFO_NBYTES_MAX = 64 << 10
FILES_MAX = 1 << 14
"""Of a folder. Each name is looked at, and its links resolved: the largest models have some hundred."""
_LISTED_MAX = 20


def read_index(folder: str, index_name: str, reason: str) -> tuple[dict[str, str], object]:
    """(tensor -> file, the index's own metadata)."""
    path = check_inside(folder, index_name, where=folder)
    descriptor, nbytes = open_regular(path, index_name)
    with os.fdopen(descriptor, "rb") as file:
        if nbytes > INDEX_NBYTES_MAX:
            raise CorruptError(
                "the index is too long",
                reason=f"{reason}-limit",
                where=index_name,
                expected=f"at most {INDEX_NBYTES_MAX} bytes",
                found=nbytes,
            )
        data = file.read(INDEX_NBYTES_MAX + 1)
    cursor = JsonCursor(data, 0, len(data), where=index_name, reason=reason)
    weight_map: dict[str, str] | None = None
    info: object = None
    for key in cursor.keys(NAME_NBYTES_MAX, "key"):
        if key == "weight_map":
            weight_map = {
                name: cursor.string(FILE_NAME_NBYTES_MAX, "a file name")
                for name in cursor.keys(NAME_NBYTES_MAX, "name")
            }
        else:
            value = cursor.small_value(INFO_NBYTES_MAX, f"the entry {ascii(key)[:80]}")
            info = value if key == "metadata" else info
    cursor.end()
    if weight_map is None:
        raise CorruptError("no weight_map", reason=f"{reason}-index", where=index_name)
    return weight_map, info


def check_name(name: str, where: str) -> None:
    """Refuse a file name that is not a plain relative path, whatever system reads it."""
    parts = name.split("/")
    problem = ""
    if "\0" in name:
        problem = "a NUL"
    elif "\\" in name:
        problem = "a backslash"
    elif name.startswith("/") or (len(parts[0]) > 1 and parts[0][1] == ":"):
        problem = "an absolute path"
    elif ".." in parts:
        problem = "a step up (..)"
    elif any(part in ("", ".") for part in parts):
        problem = "an empty part"
    if problem:
        raise _escapes(name, where, f"{problem} in a file name")


def _escapes(name: str, where: str, what: str) -> CorruptError:
    return CorruptError(
        what,
        reason="foreign-path",
        where=f"{where}, entry {ascii(name)[:200]}",
        expected="a file inside the folder",
        do="do not trust this folder",
    )


def check_inside(folder: str, name: str, *, where: str) -> str:
    """The path of a file named by an index, its links resolved. Nothing is opened.

    Links may stay inside the folder. One layout that leads out is known and allowed: a hub cache
    keeps `snapshots/<revision>/<file>` as links to `blobs/<hash>` two levels up.

    Raises:
        CorruptError: kind `corrupt-foreign-path`: it is, or leads, outside.
    """
    check_name(name, where)
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, *name.split("/")))
    if _is_inside(path, root) or _is_inside(path, _blobs_of(root)):
        return path
    raise _escapes(name, where, "a link leads out of the folder")


def _is_inside(path: str, root: str | None) -> bool:
    return root is not None and os.path.commonpath([path, root]) == root and path != root


def _blobs_of(root: str) -> str | None:
    """The cache's blobs, for a folder `<cache>/snapshots/<revision>`, if that is no link itself."""
    snapshots, _ = os.path.split(root)
    cache, last = os.path.split(snapshots)
    blobs = os.path.join(cache, "blobs")
    if last != "snapshots" or os.path.realpath(blobs) != blobs or not os.path.isdir(blobs):
        return None
    return blobs


def resolve(folder: str, files: list[str], index_name: str) -> dict[str, str]:
    """File -> path. All names are checked before any is looked for; all missing ones are named."""
    if len(files) > FILES_MAX:
        raise CorruptError(
            "the index names too many files",
            reason="foreign-shards",
            where=index_name,
            expected=f"at most {FILES_MAX}",
            found=len(files),
            do="get the index again, or write the checkpoint in fewer shards",
        )
    paths = {file: check_inside(folder, file, where=index_name) for file in files}
    missing = [file for file, path in paths.items() if not os.path.exists(path)]
    if missing:
        raise NotFoundError(
            f"{len(missing)} of {len(files)} shards are missing",
            reason="shards",
            where=f"{folder}: {', '.join(missing)}",
            do="get the missing files",
        )
    return paths


def twice(name: str, files: tuple[str, str], index_name: str, reason: str) -> CorruptError:
    """A tensor stands in two shards."""
    return CorruptError(
        f"duplicate tensor {ascii(name)[:200]}",
        reason=f"{reason}-duplicate-name",
        where=index_name,
        expected="one shard",
        found=f"{files[0]} and {files[1]}",
    )


def check_homes(
    homes: Mapping[str, str], weight_map: Mapping[str, str], index_name: str, reason: str
) -> None:
    """Every tensor is in the shard that the index names."""
    wrong = [
        f"{ascii(name)[:200]} in {file}"
        for name, file in weight_map.items()
        if homes.get(name) != file
    ]
    if wrong:
        more = f" and {len(wrong) - _LISTED_MAX:,} more" if len(wrong) > _LISTED_MAX else ""
        raise CorruptError(
            "the index names tensors that their shards lack",
            reason=f"{reason}-absent-tensor",
            where=f"{index_name}: {', '.join(wrong[:_LISTED_MAX])}{more}",
            do="index and shards are not of one save: get them again",
        )


def join_metadata(joined: dict[str, object], metadata: dict[str, str], file: str) -> None:
    """What shards say alike is said once; where they differ, the file's name is in the key."""
    for key, value in metadata.items():
        if joined.setdefault(key, value) != value:
            joined[f"{file}:{key}"] = value


def ignored_files(folder: str, files: list[str], index_name: str, suffix: str) -> dict[str, str]:
    """Files beside the shards that the index does not name -> what they are."""
    used = set(files)
    names = sorted(name for name in os.listdir(folder) if name.endswith(suffix))
    return {name: f"file that {index_name} does not name" for name in names if name not in used}
