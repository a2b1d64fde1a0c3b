"""Where an export is written: a hidden folder beside its destination, renamed when all is there.

Nothing half-done ever has the name that was asked for. A process that is killed leaves the hidden
folder; the next export to that place removes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ckptfmt.engine import FileStream
from ckptfmt.errors import CheckpointError, ExistsError, UsageError
from ckptfmt.storage import (
    Backend,
    check_key,
    from_write_error,
    is_abandoned_temporary,
    open_backend,
    sync_directory,
    temporary_name,
)
from ckptfmt.types import Key

_PREFIX = ".ckptfmt-"
_KIND = "put"


class Staging:
    """A folder in the making. A context manager: leaving it removes what was not published.

    Attributes:
        folder: Its path; exporters that bring a writer of their own write there.
    """

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self.folder = os.path.join(parent, _PREFIX + temporary_name(_KIND))

    def __enter__(self) -> Staging:
        if os.path.lexists(self.parent) and not os.path.isdir(self.parent):
            raise UsageError(
                "the destination's folder is no folder", reason="export", where=self.parent
            )
        with writing(self.parent):
            os.makedirs(self.parent, exist_ok=True)
            _remove_abandoned(self.parent)
            os.mkdir(self.folder)
        self._backend: Backend = open_backend(self.folder)
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def stream(self, name: str, nbytes: int | None = None) -> FileStream:
        """A new file in the folder, durable when it is left."""
        return FileStream(self._backend, name, nbytes)

    def put(self, name: str, data: bytes) -> None:
        """A small file, durable."""
        with self.stream(name) as stream:
            stream.put(data)

    def sync(self) -> None:
        """Make durable what others wrote into the folder."""
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
            replace: Files of these names may be there. The last one goes first then, so that no
                old one ever stands beside new ones.
        Raises:
            ExistsError: A name is taken; none of them was given.
        """
        given: list[str] = []
        with writing(self.parent):
            if replace and len(names) > 1:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.parent, names[-1][1]))
                    sync_directory(self.parent)
            try:
                for staged, final in names:
                    target = os.path.join(self.parent, final)
                    _give_name(self.path(staged), target, replace=replace)
                    given.append(target)
            except BaseException:
                if not replace:
                    for target in given:
                        os.unlink(target)
                raise
            sync_directory(self.parent)

    def publish_folder(self, final: str, *, replace: bool) -> None:
        """Give the folder its final name."""
        target = os.path.join(self.parent, final)
        with suppress(OSError):
            os.rmdir(self.path("tmp"))
        with writing(target):
            if replace and os.path.lexists(target):
                # A name that no export removes: if this process dies now, it is all that is left.
                old = os.path.join(self.parent, f"{_PREFIX}replaced-{os.urandom(8).hex()}")
                os.rename(target, old)
                try:
                    os.rename(self.folder, target)
                except BaseException:
                    os.rename(old, target)
                    raise
                sync_directory(self.parent)
                _remove(old)
                return
            try:
                os.rename(self.folder, target)
            except OSError as error:
                if os.path.lexists(target):
                    raise taken(target) from error
                raise
            sync_directory(self.parent)


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


class ReadAhead:
    """Has the system read files of a folder, one after another, before they are used.

    What was written directly is not in the page cache, and a map is read page by page at a third of
    the disk's rate.
    """

    def __init__(self, staging: Staging) -> None:
        self._files: list[tuple[str, int]] = []
        self._done = 0
        for folder, _, names in os.walk(staging.folder):
            paths = [os.path.join(folder, name) for name in sorted(names)]
            self._files += [(path, os.path.getsize(path)) for path in paths]

    def more(self, nbytes: int) -> None:
        """Read so many bytes more."""
        while self._files and nbytes > 0 and hasattr(os, "posix_fadvise"):
            path, size = self._files[0]
            count = min(nbytes, size - self._done)
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), self._done, count, os.POSIX_FADV_WILLNEED)
            nbytes, self._done = nbytes - count, self._done + count
            if self._done == size:
                self._files.pop(0)
                self._done = 0


def replace_file(path: str, data: bytes) -> None:
    """A small file anew, all at once, whether it is there or not."""
    with Staging(os.path.dirname(path)) as staging:
        staging.put("file", data)
        staging.publish_files([("file", os.path.basename(path))], replace=True)


def taken(path: str) -> ExistsError:
    return ExistsError(
        "there is something of this name already",
        reason="export",
        where=path,
        do="choose another name, or if_exists='replace' (--if-exists replace)",
    )


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Errors of the operating system as this package's."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise from_write_error(error, where) from error


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
