"""Where an export is written: a hidden folder beside its destination, renamed when all is there.

Nothing half-done ever has the name that was asked for. A process that is killed leaves the hidden
folder; the next export to that place removes it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress

from ckptfmt.errors import ExistsError, UsageError
from ckptfmt.foreign.exporters.failures import writing
from ckptfmt.foreign.exporters.stream import ExportStream
from ckptfmt.storage import (
    Backend,
    check_key,
    exchange_names,
    is_abandoned_temporary,
    open_backend,
    sync_directory,
    temporary_name,
)
from ckptfmt.types import Key

_PREFIX = ".ckptfmt-"
_KIND = "put"
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


class Staging:
    """A folder in the making. A context manager: leaving it removes what was not published.

    Args:
        parent: The destination's folder.
        where: What messages call the destination.

    Attributes:
        folder: Its path; exporters that bring a writer of their own write there.
    """

    def __init__(self, parent: str, where: str) -> None:
        self.parent, self.where = parent, where
        self.folder = os.path.join(parent, _PREFIX + temporary_name(_KIND))
        self._digests: dict[str, dict[tuple[int, int], bytes]] = {}

    def __enter__(self) -> Staging:
        if os.path.lexists(self.parent) and not os.path.isdir(self.parent):
            raise UsageError(
                "the destination's folder is no folder", reason="export", where=self.parent
            )
        with writing(self.where):
            os.makedirs(self.parent, exist_ok=True)
            _remove_abandoned(self.parent)
            os.mkdir(self.folder)
        self._backend: Backend = open_backend(self.folder)
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def stream(self, name: str, nbytes: int | None = None) -> ExportStream:
        """A new file in the folder, durable when it is left."""
        made = ExportStream(self._backend, name, nbytes, self.where)
        self._digests[name] = made.digests
        return made

    def digest(self, path: str, offset: int, nbytes: int) -> bytes | None:
        """The digest of values as they were sent to a file of the folder; None if it is not known."""
        return self._digests.get(os.path.basename(path), {}).get((offset, nbytes))

    def put(self, name: str, data: bytes) -> None:
        """A small file, durable."""
        with self.stream(name) as stream:
            stream.put(data)

    def sync(self) -> None:
        """Make durable what libraries wrote into the folder."""
        with writing(self.where, storage=True):
            names = []
            for folder, _, files in os.walk(self.folder):
                below = os.path.relpath(folder, self.folder)
                inner = "" if below == "." else below.replace(os.sep, "/") + "/"
                names += [Key(inner + name) for name in files]
            self._backend.sync(names)

    def publish_files(self, names: Sequence[tuple[str, str]], *, replace: bool) -> None:
        """Give files their final names, in this order: the last one makes them a whole.

        Args:
            names: (name in the folder, final name beside it).
            replace: Files of these names may be there. Several go aside first, the last one ahead,
                so that no old one ever stands beside new ones; `recover` takes them back.
        Raises:
            ExistsError: A name is taken; none of them was given.
        """
        given: list[str] = []
        with writing(self.where):
            targets = [os.path.join(self.parent, final) for _, final in names]
            several = replace and len(names) > 1
            if several:
                _put_aside(targets)
            try:
                for (staged, _), target in zip(names, targets):
                    _give_name(self.path(staged), target, replace=replace)
                    given.append(target)
            except BaseException:
                if several or not replace:
                    for target in reversed(given):
                        os.unlink(target)
                recover(targets)
                raise
            sync_directory(self.parent)
            recover(targets)  # the new ones are whole: the old ones go

    def publish_folder(self, final: str, *, replace: bool) -> None:
        """Give the folder its final name; what had it is removed then."""
        target = os.path.join(self.parent, final)
        with suppress(OSError):
            os.rmdir(self.path("tmp"))
        with writing(self.where):
            if replace and os.path.lexists(target):
                _swap(self.folder, target)
                sync_directory(self.parent)
                return  # the old one has our hidden name now
            try:
                os.rename(self.folder, target)
            except OSError as error:
                if os.path.lexists(target):
                    raise taken(target) from error
                raise
            sync_directory(self.parent)


def _swap(folder: str, target: str) -> None:
    """Swap a folder with what has its final name; a file system that cannot do so at once has the
    old one aside for a moment, from where `recover` takes it back."""
    try:
        exchange_names(folder, target)
        return
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
    old = _aside(target)
    os.rename(target, old)
    try:
        os.rename(folder, target)
    except BaseException:
        os.rename(old, target)
        raise
    os.rename(old, folder)


def recover(targets: Sequence[str]) -> None:
    """Finish what an export began that was killed while it replaced these, of which the last one makes
    them a whole: take the old ones back, or away if the new ones are there."""
    last, old = targets[-1], _aside(targets[-1])
    if not os.path.lexists(old):
        return
    with writing(last):
        if os.path.lexists(last):
            _remove(old)
        elif len(targets) == 1:
            os.rename(old, last)
        else:
            for target in targets:
                with suppress(FileNotFoundError):
                    os.replace(os.path.join(old, os.path.basename(target)), target)
            os.rmdir(old)
        sync_directory(os.path.dirname(last))


def _put_aside(targets: Sequence[str]) -> None:
    """Files that are about to be replaced; the one that makes them a whole first."""
    old = _aside(targets[-1])
    os.mkdir(old)
    for target in reversed(targets):
        with suppress(FileNotFoundError):
            os.rename(target, os.path.join(old, os.path.basename(target)))
    sync_directory(old)
    sync_directory(os.path.dirname(old))


def _aside(target: str) -> str:
    """The name of what is replaced meanwhile; no longer than a name may be."""
    parent, name = os.path.split(target)
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return os.path.join(parent, f"{_PREFIX}replaced-{digest}")


def _give_name(staged: str, target: str, *, replace: bool) -> None:
    if replace:
        if os.path.isdir(target):
            raise taken(target)
        os.replace(staged, target)
        return
    try:
        os.link(staged, target)
    except FileExistsError as error:
        raise taken(target) from error
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise taken(target) from None
        os.rename(staged, target)


def replace_file(path: str, data: bytes) -> None:
    """A small file anew, all at once, whether it is there or not."""
    with Staging(os.path.dirname(path), path) as staging:
        staging.put("file", data)
        staging.publish_files([("file", os.path.basename(path))], replace=True)


def taken(path: str) -> ExistsError:
    return ExistsError(
        "there is something of this name already",
        reason="export",
        where=path,
        do="choose another name, or if_exists='replace' (--if-exists replace)",
    )


def _remove_abandoned(parent: str) -> None:
    """What exports left whose process is known to be dead."""
    for name in os.listdir(parent):
        rest = name.removeprefix(_PREFIX)
        if rest != name and is_abandoned_temporary(f"tmp/{rest}"):
            _remove(os.path.join(parent, name))


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        os.unlink(path)


def split_destination(dst: str) -> tuple[str, str]:
    """(folder, name) of a destination, absolute.

    Raises:
        UsageError: It is a URL, or no name of a file.
    """
    if "://" in dst:
        raise UsageError(
            "an export goes to this machine's file system",
            reason="export",
            where=dst,
            do="export to a local path, and copy it",
        )
    parent, name = os.path.split(os.path.abspath(dst))
    check_key(name)
    if name.startswith(_PREFIX):
        raise UsageError("the name is one of an export in the making", reason="export", where=dst)
    return parent, name
