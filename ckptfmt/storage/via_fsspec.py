"""Any file system that fsspec knows as a store: S3, Google Cloud Storage, Azure, SFTP and others.

What a driver promises is found out by trying, not by its name (`put_if_absent`); what cannot be
found out is taken for absent. Remote speed is not this module's aim. Spec: 02-store.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptfmt.errors import CkptWarning, StorageError, UsageError
from ckptfmt.storage import failures, remote_failures
from ckptfmt.storage.base import Backend, Buffer, Capabilities, Entry, Writer
from ckptfmt.storage.fsspec_writer import RenamingWriter, UploadWriter
from ckptfmt.storage.keys import check_key, check_prefix, is_key
from ckptfmt.storage.registry import BACKENDS, missing_driver
from ckptfmt.types import Key

_log = logging.getLogger("ckptfmt.storage")

# Object stores: one put is atomic, what is visible is durable, and listings are not stale (S3 since
# 2020, Google Cloud Storage and Azure always).
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
# One process; pipe_file swaps the whole object in.
_IN_PROCESS = frozenset({"memory"})
_FRESH_LISTINGS = OBJECT_STORES | _IN_PROCESS | {"file", "local"}
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")


@dataclass(frozen=True, slots=True)
class _Findings:
    """What creating one key twice told."""

    put_if_absent: bool
    time: bool


_findings: dict[str, _Findings] = {}
_findings_lock = threading.Lock()
# One check-then-put at a time: within a process even a driver without conditions has one winner.
_put_lock = threading.Lock()


class FsspecBackend(Backend):
    """An fsspec URL. No rename: the key is fixed at `create`.

    Args:
        url: `s3://bucket/prefix` and so on; `fsspec+<scheme>://` forces this backend.
        storage_options: The driver's own: credentials, endpoint.
        read_only: Refuse every write, and probe nothing.
    Raises:
        MissingExtraError: The driver is not installed.
        UsageError: kind `usage-url`: fsspec does not know the scheme.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        read_only: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._target = url.removeprefix("fsspec+").rstrip("/")
        if self._target.endswith(":"):  # `memory://` itself
            self._target = url.removeprefix("fsspec+")
        self._options = dict(storage_options or {})
        self._read_only = read_only
        self._lock = threading.Lock()
        self._open: dict[bool, tuple[int, Any, str]] = {}
        self._denied: _Findings | None = None
        _check_driver(self._target, self.url)

    def __repr__(self) -> str:
        return f"FsspecBackend({self.url!r})"

    # The driver

    def _connect(self, *, retries: bool = True) -> tuple[Any, str]:
        """The driver's file system and the store's root in it; anew in a forked process."""
        with self._lock:
            pid, fs, root = self._open.get(retries, (0, None, ""))
            if pid != os.getpid():
                fs, root = _open_driver(self._target, self._options, retries=retries)
                self._open[retries] = (os.getpid(), fs, root)
        return fs, root

    def _locate(self, key: str) -> tuple[Any, str]:
        fs, root = self._connect()
        return fs, f"{root}/{check_key(key)}"

    @property
    def _protocols(self) -> frozenset[str]:
        protocol = self._connect()[0].protocol
        return frozenset((protocol,) if isinstance(protocol, str) else protocol)

    @property
    def capabilities(self) -> Capabilities:
        known = self._protocols
        findings = self._denied
        if findings is None:
            try:
                findings = self._probe()
            except StorageError as error:
                # No right to write, no bucket, no network: the first write will say it.
                findings = _Findings(False, bool(known & _FRESH_LISTINGS))
                if error.reason == "access-denied":
                    self._denied = findings  # asked once, not at every look
        return Capabilities(
            put_if_absent=findings.put_if_absent,
            late_key=False,
            durable=bool(known & OBJECT_STORES),
            map=False,
            time=findings.time,
            local=False,
            list_stale_s=0.0 if known & _FRESH_LISTINGS else None,
        )

    def _probe(self) -> _Findings:
        """Create one key under tmp/ twice: does the second attempt fail because of the first?

        Raises:
            StorageError: Nothing could be found out; nothing is remembered.
        """
        if self._read_only:
            return _Findings(False, bool(self._protocols & _FRESH_LISTINGS))
        root = self._connect()[1]
        token = f"{self._target.partition('://')[0]}|{root.partition('/')[0]}|{self._options!r}"
        with _findings_lock:
            if token in _findings:
                return _findings[token]
            findings = _findings[token] = self._create_twice()
        if not findings.put_if_absent:
            warnings.warn(
                f"{self.url}: this store cannot create an object only if it is absent; "
                "one process at a time may save here",
                CkptWarning,
                stacklevel=3,
            )
        return findings

    def _create_twice(self) -> _Findings:
        fs, root = self._connect(retries=False)
        key = Key(f"tmp/probe-{secrets.token_hex(16)}")
        path = f"{root}/{key}"
        with remote_failures.mapped(key, writing=True):
            self._make_parents(fs, path)
        try:
            exclusive = _has_own_create(fs)
            if exclusive:
                try:
                    fs.pipe_file(path, b"first", mode="create")
                except (TypeError, ValueError, NotImplementedError):
                    exclusive = False
                except Exception as error:
                    raise remote_failures.from_driver(error, key, writing=True) from error
            if exclusive:
                try:
                    fs.pipe_file(path, b"second", mode="create")
                    exclusive = False
                except Exception as error:
                    exclusive = remote_failures.says_taken(error)
            else:
                with remote_failures.mapped(key, writing=True):
                    fs.pipe_file(path, b"first")
            entry = self.stat(key)
            return _Findings(exclusive, time=entry is not None and entry.time_s is not None)
        finally:
            try:
                fs.rm_file(path)
            except Exception as error:
                _log.warning("a probe could not be removed: %s: %s", path, error)

    # Reading

    def get(
        self, key: Key, start: int = 0, stop: int | None = None, out: memoryview | None = None
    ) -> memoryview:
        failures.check_range(key, start, stop, out)
        fs, path = self._locate(key)
        if stop is not None and stop == start:
            self._check_length(key, start)  # drivers disagree about empty ranges
            return failures.check_out(key, 0, out)
        try:
            data = fs.cat_file(path, start=start or None, end=stop)
        except Exception as error:
            if remote_failures.says_beyond_end(error):
                self._check_length(key, start if stop is None else stop)
                if stop is None:
                    return failures.check_out(key, 0, out)
            raise remote_failures.from_driver(error, key) from error
        if stop is None:
            if not data and start:
                self._check_length(key, start)
        elif len(data) != stop - start:
            self._check_length(key, stop)
            raise failures.short_object(key, expected=stop, found=start + len(data))
        view = failures.check_out(key, len(data), out)
        view[:] = data
        return view

    def _check_length(self, key: Key, nbytes: int) -> None:
        """Raise unless the object is there and has at least `nbytes`."""
        entry = self.stat(key)
        if entry is None:
            raise failures.no_object(key)
        if entry.nbytes < nbytes:
            raise failures.short_object(key, expected=nbytes, found=entry.nbytes)

    def stat(self, key: Key) -> Entry | None:
        fs, path = self._locate(key)
        try:
            fs.invalidate_cache(path.rpartition("/")[0])
            details = fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            raise remote_failures.from_driver(error, key) from error
        if details.get("type") != "file":
            return None
        return Entry(key, int(details.get("size") or 0), _time_of(details))

    def list(self, prefix: str, start_after: str = "") -> Iterator[Entry]:
        folder, _, _ = check_prefix(prefix).rpartition("/")
        fs, root = self._connect()
        try:
            fs.invalidate_cache()
            found = fs.find(f"{root}/{folder}" if folder else root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            found = {}
        except Exception as error:
            raise remote_failures.from_driver(error, folder or self.url) from error
        head = f"{root.lstrip('/')}/"
        entries = []
        for path, details in found.items():
            key = path.lstrip("/").removeprefix(head)
            if details.get("type") != "file" or not path.lstrip("/").startswith(head):
                continue
            if key.startswith(prefix) and key > start_after and is_key(key):
                nbytes = int(details.get("size") or 0)
                entries.append(Entry(Key(key), nbytes, _time_of(details)))
        entries.sort(key=lambda entry: entry.key)
        return iter(entries)

    # Writing

    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        self._check_writable(key)
        fs, path = self._locate(key)
        if self._protocols & OBJECT_STORES:
            return UploadWriter(fs, path, key)
        if self._protocols & _IN_PROCESS:
            return UploadWriter(fs, path, key, one_put=True)
        return RenamingWriter(fs, path, key, self._connect()[1])

    def put_if_absent(self, key: Key, data: Buffer, *, durable: bool) -> bool:
        self._check_writable(key)
        check_key(key)
        if not self._probe().put_if_absent:
            return self._check_then_put(key, data)
        fs, root = self._connect(retries=False)
        if self._protocols & OBJECT_STORES:
            return self._create_only(fs, f"{root}/{key}", key, bytes(data))
        with _put_lock:  # such a driver looks and then puts
            return self._create_only(fs, f"{root}/{key}", key, bytes(data))

    def _create_only(self, fs: Any, path: str, key: Key, data: bytes) -> bool:
        try:
            # One request: a conditional upload in parts is not to be had everywhere.
            options = {"chunksize": max(len(data), 1)} if _takes_chunksize(fs) else {}
            fs.pipe_file(path, data, mode="create", **options)
        except Exception as error:
            if remote_failures.says_taken(error):
                if remote_failures.status_of(error) == 409 and self.stat(key) is None:
                    # S3: another conditional request was in flight, and nobody won yet.
                    raise remote_failures.from_driver(
                        error, key, writing=True, outcome_unknown=True
                    ) from error
                return False
            raise remote_failures.from_driver(
                error, key, writing=True, outcome_unknown=not remote_failures.says_refused(error)
            ) from error
        return True

    def _check_then_put(self, key: Key, data: Buffer) -> bool:
        with _put_lock:
            if self.stat(key) is not None:
                return False
            self.put(key, data)
        return True

    def delete(self, key: Key) -> None:
        self._check_writable(key)
        fs, path = self._locate(key)
        try:
            fs.rm_file(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        except Exception as error:
            raise remote_failures.from_driver(error, key, writing=True) from error

    def _make_parents(self, fs: Any, path: str) -> None:
        if not self._protocols & OBJECT_STORES:
            with suppress(FileExistsError):
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _check_writable(self, key: str) -> None:
        if self._read_only:
            raise failures.read_only(f"{self.url}: {key}")


def _check_driver(target: str, url: str) -> None:
    import fsspec
    from fsspec.utils import get_protocol

    scheme = get_protocol(target)
    try:
        for part in target.split("::"):
            fsspec.get_filesystem_class(get_protocol(part) if "://" in part else part)
    except ImportError as error:
        hint = BACKENDS.get(scheme, ("", ""))[1]
        raise missing_driver(scheme, hint, error) from error
    except ValueError as error:
        raise UsageError(
            "no backend for this URL",
            reason="url",
            where=url,
            found=str(error),
            do="use a path, file://, memory:// or a scheme that fsspec knows",
        ) from error


def _open_driver(target: str, options: Mapping[str, Any], *, retries: bool) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    chosen = dict(options)
    scheme = target.partition("://")[0]
    if "::" not in target:
        chosen.setdefault("use_listings_cache", False)
    if not retries and scheme in ("s3", "s3a"):
        # botocore's own retries; s3fs' are an attribute (below).
        config = dict(chosen.get("config_kwargs") or {})
        config["retries"] = {"max_attempts": 0}
        chosen["config_kwargs"] = config
    try:
        fs, root = url_to_fs(target, **chosen)
    except Exception as error:
        raise remote_failures.from_driver(error, target) from error
    if not retries and scheme in ("s3", "s3a"):
        fs.retries = 1
    return fs, root.rstrip("/")


def _has_own_create(fs: Any) -> bool:
    """False where `mode="create"` is fsspec's default: look, then write (two may win)."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    inner = getattr(fs, "fs", None)
    if isinstance(inner, AbstractFileSystem) and not _has_own_create(inner):
        return False
    kind = type(fs)
    if isinstance(fs, AsyncFileSystem):
        return kind._pipe_file is not AsyncFileSystem._pipe_file
    return kind.pipe_file is not AbstractFileSystem.pipe_file


def _takes_chunksize(fs: Any) -> bool:
    protocol = fs.protocol
    return bool({"s3", "s3a"} & set((protocol,) if isinstance(protocol, str) else protocol))


def _time_of(details: Mapping[str, Any]) -> float | None:
    """Seconds since the epoch of the last write, or None where the driver tells none."""
    from datetime import UTC, datetime

    for name in _TIMES:
        value = details.get(name)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
