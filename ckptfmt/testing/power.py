"""A model of a disk's cache: what a power cut leaves of what was written.

Content and names become durable apart: content by fsync of the file, a name (made, replaced or
removed) by fsync of its directory. Directories are names too. Until then any of it may be on the
medium or not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _File:
    content: bytes
    synced: bool


@dataclass(slots=True)
class _Folder:
    """A directory's names: what the medium surely has, and what happened since, in order."""

    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    current: dict[str, _File | _Folder] = field(default_factory=dict)
    changes: list[tuple[str, _File | _Folder | None]] = field(default_factory=list)

    def set(self, name: str, node: _File | _Folder | None) -> None:
        if node is None:
            self.current.pop(name, None)
        else:
            self.current[name] = node
        self.changes.append((name, node))

    def sync(self) -> None:
        self.durable = dict(self.current)
        self.changes.clear()


class PowerModel:
    """The store's tree as the kernel sees it (`current`) and as the medium has it (`durable`)."""

    def __init__(self) -> None:
        self._root = _Folder()

    def put(self, key: str, content: bytes, *, synced: bool) -> None:
        """The name `key` stands for new content; `synced`: the content was fsynced before."""
        folder = self._folders(key, make=True)[-1]
        folder.set(key.rpartition("/")[2], _File(content, synced))

    def delete(self, key: str) -> None:
        folders = self._folders(key)
        if folders and key.rpartition("/")[2] in folders[-1].current:
            folders[-1].set(key.rpartition("/")[2], None)

    def sync(self, key: str) -> None:
        """fsync the file, its directory and those above; a key that ends in `/` is a directory."""
        folders = self._folders(key)
        node = folders[-1].current.get(key.rpartition("/")[2]) if folders else None
        if isinstance(node, _File):
            node.synced = True
        for folder in reversed(folders):
            folder.sync()

    def _folders(self, key: str, *, make: bool = False) -> list[_Folder]:
        """The directories on the way to `key`, the store first; [] if one is missing."""
        found = [self._root]
        for part in key.split("/")[:-1]:
            node = found[-1].current.get(part)
            if not isinstance(node, _Folder):
                if not make:
                    return []
                node = _Folder()
                found[-1].set(part, node)
            found.append(node)
        return found

    def survivors(self, rng: random.Random | None) -> dict[str, bytes]:
        """Key -> content after the cut. Without `rng` all that was not synced is lost."""
        return dict(_survivors(self._root, "", rng))


def _survivors(
    folder: _Folder, prefix: str, rng: random.Random | None
) -> Iterator[tuple[str, bytes]]:
    names = dict(folder.durable)
    if rng is not None:
        # Each name on its own: a medium may keep a later change and lose an earlier one elsewhere.
        for name in sorted({name for name, _ in folder.changes}):
            history = [folder.durable.get(name)]
            history += [node for changed, node in folder.changes if changed == name]
            kept = rng.choice(history)
            if kept is None:
                names.pop(name, None)
            else:
                names[name] = kept
    for name in sorted(names):
        node = names[name]
        if isinstance(node, _Folder):
            yield from _survivors(node, f"{prefix}{name}/", rng)
        else:
            yield f"{prefix}{name}", _content(node, rng)


def _content(file: _File, rng: random.Random | None) -> bytes:
    """Content without fsync: nothing of it, a part of it with zeros for the rest, or all."""
    if file.synced:
        return file.content
    if rng is None:
        return b""
    kept = rng.choice([0, rng.randint(0, len(file.content)), len(file.content)])
    size = rng.choice([kept, len(file.content)])
    return file.content[:kept] + bytes(size - kept)
