"""A directory of this machine as a store: nothing is visible that is not whole.

An object is written under `tmp/`, given its bytes, and renamed to its key (I2). `tmp/` also holds
what a killed process left: names it was given (`tmp/<txn>-…`) and, for objects whose key was known
at `create`, `tmp/put-<process>-<random>`, by which the next save finds it. Spec: 02-store.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat as stat_bits
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckptfmt.errors import CheckpointError, CorruptError, UsageError
from ckptfmt.storage import direct, exclusive, failures, syscalls
from ckptfmt.storage.base import Backend, Buffer, Capabilities, Entry, Writer
from ckptfmt.storage.folders import Folders
from ckptfmt.storage.keys import check_key, check_prefix, is_key
from ckptfmt.storage.local_writer import LocalWriter
from ckptfmt.storage.process import temporary_name
from ckptfmt.types import Key, StrPath

# Reserving space for small objects costs a call and helps nobody.
_PREALLOCATE_NBYTES_MIN = 1 << 20


class LocalBackend(Backend):
    """A directory. It need not exist; the first write makes it.

    Args:
        url: A path, or a `file://` URL. A relative path is made absolute at once.
        storage_options: None exist.
        read_only: Refuse every write, and probe nothing.
    """

    def __init__(
        self,
        url: StrPath,
        *,
        storage_options: Mapping[str, Any] | None = None,
        read_only: bool = False,
    ) -> None:
        if storage_options:
            raise UsageError(
                "a local store has no storage options",
                reason="storage-options",
                where=str(url),
                found=", ".join(sorted(storage_options)),
                do="leave storage_options out",
            )
        self._root = os.path.abspath(_path_of(url))
        self._read_only = read_only
        self._folders = Folders(self._root)
        self._network: tuple[bool, float | None] | None = None
        self.url = self._root

    def __repr__(self) -> str:
        return f"LocalBackend({self._root!r})"

    @property
    def capabilities(self) -> Capabilities:
        network, stale_s = self._network_facts()
        return Capabilities(
            put_if_absent=not self._read_only and self._probe() != "check",
            late_key=True,
            durable=True,
            map=True,
            time=True,
            local=True,
            network_fs=network,
            list_stale_s=stale_s,
        )

    def _network_facts(self) -> tuple[bool, float | None]:
        if self._network is None:
            self._network = syscalls.network_facts(syscalls.file_system_of(self._root))
        return self._network

    def _probe(self) -> exclusive.Method:
        """How names are taken here; asked of the disk only where the store exists already."""
        with suppress(OSError):
            known = exclusive.known_method(os.stat(self._root).st_dev)
            if known is not None:
                return known
            folder = os.path.join(self._root, "tmp")
            made = False
            with suppress(FileExistsError):
                os.mkdir(folder)
                made = True
            try:
                return exclusive.probe_method(folder) or "link"
            finally:
                if made:  # looking leaves no trace
                    with suppress(OSError):
                        os.rmdir(folder)
        return "link"

    # Reading

    def get(
        self, key: Key, start: int = 0, stop: int | None = None, out: memoryview | None = None
    ) -> memoryview:
        failures.check_range(key, start, stop, out)
        fd, nbytes = self._open(key)
        try:
            end = nbytes if stop is None else stop
            if nbytes < max(start, end):
                raise failures.short_object(key, expected=max(start, end), found=nbytes)
            view = failures.check_out(key, end - start, out)
            count = self._read(fd, view, start, key)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise failures.from_os_error(error, key) from error
        finally:
            os.close(fd)
        if count < view.nbytes:  # cut short since it was opened
            raise failures.short_object(key, expected=end, found=start + count)
        return view

    def _read(self, fd: int, out: memoryview, offset: int, key: Key) -> int:
        """From the page cache as far as it has the range, else directly from the disk."""
        if not (direct.is_wanted() and direct.is_aligned(out, offset)):
            return syscalls.pread_all(fd, out, offset)
        done = direct.read_resident(fd, out, offset)
        done -= done % direct.BLOCK_NBYTES
        device = os.fstat(fd).st_dev
        if done == out.nbytes:
            return done
        second = direct.open_direct(self._path(key), syscalls.READ_FLAGS, device)
        if second < 0:
            return done + syscalls.pread_all(fd, out[done:], offset + done)
        try:
            if not os.path.samestat(os.fstat(second), os.fstat(fd)):
                # Replaced by the same bytes meanwhile (a healed file): ours is still whole.
                return done + syscalls.pread_all(fd, out[done:], offset + done)
            return done + syscalls.pread_all(second, out[done:], offset + done)
        except OSError as error:
            if not direct.is_refusal(error):
                raise
            direct.refuse(device)
            return done + syscalls.pread_all(fd, out[done:], offset + done)
        finally:
            os.close(second)

    def map(self, key: Key) -> memoryview | None:
        fd, nbytes = self._open(key)
        try:
            if nbytes == 0:  # an empty file cannot be mapped
                return memoryview(bytearray())
            if sys.version_info >= (3, 13):
                # Else every map holds a descriptor of its own as long as it lives.
                view = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY, trackfd=False)
            else:
                view = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):  # shorter than a moment ago
                raise failures.short_object(key, expected=nbytes, found=0) from error
            raise failures.from_os_error(error, key) from error
        finally:
            os.close(fd)
        return memoryview(view)

    def is_resident(self, key: Key, start: int, stop: int) -> bool:
        fd, nbytes = self._open(key)
        try:
            return stop <= nbytes and direct.is_resident(fd, start, stop)
        finally:
            os.close(fd)

    def _open(self, key: Key) -> tuple[int, int]:
        """A descriptor of a regular file, and its size."""
        path = self._path(key)
        try:
            fd = os.open(path, syscalls.READ_FLAGS)
        except OSError as error:
            raise failures.from_os_error(error, key) from error
        try:
            status = os.fstat(fd)
            if not stat_bits.S_ISREG(status.st_mode):
                raise CorruptError(
                    "object is not a file",
                    reason="not-a-file",
                    where=key,
                    expected="a regular file",
                    found=_kind(status.st_mode),
                    do="remove it from the store",
                )
        except BaseException:
            os.close(fd)
            raise
        return fd, status.st_size

    def stat(self, key: Key) -> Entry | None:
        try:
            status = os.lstat(self._path(key))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise failures.from_os_error(error, key) from error
        if not stat_bits.S_ISREG(status.st_mode):
            return None
        return Entry(key, status.st_size, status.st_mtime)

    def list(self, prefix: str, start_after: str = "") -> Iterator[Entry]:
        folder, _, _ = check_prefix(prefix).rpartition("/")
        return self._walk(folder, prefix, start_after)

    def _walk(self, folder: str, prefix: str, start_after: str) -> Iterator[Entry]:
        """Files below `folder`, in the order of their keys; only directories that can matter."""
        path = os.path.join(self._root, *folder.split("/")) if folder else self._root
        head = f"{folder}/" if folder else ""
        names: list[tuple[str, os.DirEntry[str]]] = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    # A link to a directory may stand at the top of a store (data on another
                    # disk); further down it could lead back up for ever.
                    if entry.is_dir(follow_symlinks=not folder):
                        # With its slash a directory sorts where the keys in it do: after `a-b`.
                        names.append((f"{head}{entry.name}/", entry))
                    elif entry.is_file(follow_symlinks=False):
                        names.append((f"{head}{entry.name}", entry))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise failures.from_os_error(error, folder or self._root) from error
        names.sort(key=lambda pair: pair[0])
        for name, entry in names:
            if name.endswith("/"):
                related = name.startswith(prefix) or prefix.startswith(name)
                ahead = name > start_after or start_after.startswith(name)
                if related and ahead and is_key(name[:-1]):
                    yield from self._walk(name[:-1], prefix, start_after)
            elif name.startswith(prefix) and name > start_after and is_key(name):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise failures.from_os_error(error, name) from error
                yield Entry(Key(name), status.st_size, status.st_mtime)

    # Writing

    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        self._check_writable(key)
        path = self._path(key)
        if not key.startswith("tmp/"):
            path = self._path(Key(f"tmp/{temporary_name('put')}"))
        try:
            fd = self._create_file(path)
        except OSError as error:
            raise failures.from_write_error(error, key) from error
        writer = LocalWriter(self._folders, key, (path, self._path), fd)
        if nbytes is not None and nbytes >= _PREALLOCATE_NBYTES_MIN:
            try:
                # glibc emulates it on NFS by writing into every block.
                if not self._network_facts()[0]:
                    syscalls.preallocate(fd, nbytes)
            except BaseException as error:
                writer.abort()
                if isinstance(error, OSError):
                    raise failures.from_write_error(error, key) from error
                raise
        return writer

    def put_if_absent(self, key: Key, data: Buffer, *, durable: bool) -> bool:
        self._check_writable(key)
        target = self._path(key)
        temporary = self._path(Key(f"tmp/{temporary_name('put')}"))
        try:
            fd = self._create_file(temporary)
            try:
                try:
                    syscalls.pwrite_all(fd, failures.as_bytes(data), 0)
                    if durable:
                        syscalls.sync_fd(fd)
                finally:
                    os.close(fd)
                method = exclusive.probe_method(os.path.dirname(temporary)) or "link"
                won = self._folders.with_parent(
                    target, lambda: exclusive.place(method, temporary, target)
                )
            finally:
                with suppress(OSError):
                    os.unlink(temporary)
        except OSError as error:
            raise self._commit_error(error, key, target) from error
        if won and durable:
            try:
                self._folders.sync({os.path.dirname(target)})
            except OSError as error:
                # Read back, it would look like success; but a power cut may take it.
                gone = False
                with suppress(OSError):
                    os.unlink(target)
                    gone = True
                raise failures.from_write_error(error, key, outcome_unknown=not gone) from error
        return won

    def _commit_error(self, error: OSError, key: str, target: str) -> CheckpointError:
        """A failed put is certain to have failed unless something stands at the key now."""
        try:
            unknown = os.path.lexists(target)
        except OSError:
            unknown = True
        return failures.from_write_error(error, key, outcome_unknown=unknown)

    def delete(self, key: Key) -> None:
        self._check_writable(key)
        path = self._path(key)
        try:
            os.unlink(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return
            if os.path.isdir(path) and not os.path.islink(path):
                return  # a directory is no object
            raise failures.from_os_error(error, key) from error
        # parts/<txn>/ goes with its last object.
        self._folders.remove_empty(os.path.dirname(path))

    def sync(self, keys: Iterable[Key]) -> None:
        folders: set[str] = set()
        for key in keys:
            if key.endswith("/"):
                folders.add(self._path(Key(key[:-1])))
                continue
            fd, _ = self._open(key)
            try:
                syscalls.sync_fd(fd)
            except OSError as error:
                raise failures.from_os_error(error, key) from error
            finally:
                os.close(fd)
            folders.add(os.path.dirname(self._path(key)))
        try:
            self._folders.sync(folders)
        except OSError as error:
            raise failures.from_os_error(error, self._root) from error

    # Paths

    def _path(self, key: Key) -> str:
        return os.path.join(self._root, *check_key(key).split("/"))

    def _check_writable(self, key: str) -> None:
        if self._read_only:
            raise failures.read_only(f"{self.url}: {key}")

    def _create_file(self, path: str) -> int:
        def attempt() -> int:
            with suppress(FileExistsError):
                return os.open(path, syscalls.CREATE_FLAGS, 0o666)
            # Left by somebody who died, under a name that the caller has chosen: a file in tmp/ is
            # nobody's promise. Never truncated in place: it may be linked.
            os.unlink(path)
            return os.open(path, syscalls.CREATE_FLAGS, 0o666)

        return self._folders.with_parent(path, attempt)


def _path_of(url: StrPath) -> str:
    """The path of a path or of a `file:` URL (RFC 8089)."""
    text = os.fsdecode(os.fspath(url))
    if not text:
        raise UsageError("no store given", reason="url", do="give a directory or a URL")
    if "\0" in text:
        raise UsageError("not a path", reason="url", where=ascii(text), found="a NUL")
    if not isinstance(url, str) or not text.startswith("file:"):
        return text
    # Imported here: it brings an HTTP client along, which a plain path does without.
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            "not a local file",
            reason="url",
            where=text,
            found=f"host {parts.netloc}",
            do="a path after file: begins with three slashes, file:///runs/a",
        )
    # A `?` or `#` is part of a name here: nobody queries a directory.
    rest = text[len("file:") :]
    if rest.startswith("//"):
        rest = rest[2 + len(parts.netloc) :]
    return url2pathname(rest)


def _kind(mode: int) -> str:
    if stat_bits.S_ISDIR(mode):
        return "a directory"
    if stat_bits.S_ISFIFO(mode):
        return "a pipe"
    if stat_bits.S_ISSOCK(mode):
        return "a socket"
    return "a device"
