"""Any fsspec URL: what its driver promises is tried, what it raises is ours."""

# A memoryview equals bytes with the same content; mypy does not know.
# mypy: disable-error-code="comparison-overlap"

from __future__ import annotations

import errno
import os
import secrets
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from ckptfmt.errors import (
    CheckpointError,
    CkptWarning,
    CorruptError,
    MissingExtraError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckptfmt.storage import Backend, fsspec_writer, open_backend, remote_failures, via_fsspec
from ckptfmt.storage.via_fsspec import FsspecBackend
from ckptfmt.testing import BackendSuite, S3Server
from ckptfmt.types import Key

A, B = Key("data/a"), Key("data/b")
SINGLE_WRITER = "ignore:.*one process at a time:ckptfmt.errors.CkptWarning"


class TestFsspecMemory(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return open_backend(f"fsspec+memory://{secrets.token_hex(8)}/store")

    def test_its_conditional_put_is_believed(self, backend: Backend) -> None:
        assert backend.capabilities.put_if_absent
        assert backend.capabilities.late_key is False


@pytest.mark.filterwarnings(SINGLE_WRITER)
class TestFsspecFile(BackendSuite):
    """A driver of a file system: no conditional put, a rename."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return open_backend(f"fsspec+file://{tmp_path}/not/there")

    def test_it_is_for_a_single_writer(self, backend: Backend) -> None:
        assert backend.capabilities.put_if_absent is False


@pytest.mark.filterwarnings(SINGLE_WRITER)
class TestFoil(BackendSuite):
    @pytest.fixture
    def backend(self, foil: str) -> Backend:
        return open_backend(f"{foil}://{secrets.token_hex(8)}/store")


@pytest.mark.integration
class TestS3(BackendSuite):
    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> None:
        self.server = s3_server

    @pytest.fixture
    def backend(self, s3_server: S3Server) -> Backend:
        url = s3_server.url(f"runs/{secrets.token_hex(8)}")
        return open_backend(url, storage_options=s3_server.storage_options)

    def reopen(self, backend: Backend, *, read_only: bool = False) -> Backend:
        options = self.server.storage_options
        return open_backend(backend.url, storage_options=options, read_only=read_only)

    def test_it_promises_what_s3_promises(self, backend: Backend) -> None:
        found = backend.capabilities
        assert found.put_if_absent
        assert found.durable
        assert found.time
        assert found.list_stale_s == 0.0
        assert not found.late_key

    def test_a_big_object_is_uploaded_in_parts_and_appears_at_once(
        self, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fsspec_writer, "_PART_NBYTES", 5 << 20)
        content = secrets.token_bytes(1 << 20) * 12
        writer = backend.create(A, len(content))
        for start in range(0, len(content), 1 << 20):
            writer.write(start, content[start : start + (1 << 20)])
        assert backend.stat(A) is None
        writer.finish(durable=True)
        assert backend.get(A) == content
        assert backend.get(A, (5 << 20) - 3, (5 << 20) + 3) == content[(5 << 20) - 3 :][:6]

    def test_an_upload_given_up_leaves_no_parts(
        self, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fsspec_writer, "_PART_NBYTES", 5 << 20)
        writer = backend.create(A)
        for number in range(12):
            writer.write(number << 20, bytes(1 << 20))
        fs = backend._connect()[0]  # type: ignore[attr-defined]
        assert len(fs.call_s3("list_multipart_uploads", Bucket=self.server.bucket)["Uploads"]) == 1
        writer.abort()
        assert "Uploads" not in fs.call_s3("list_multipart_uploads", Bucket=self.server.bucket)
        assert [*backend.list("")] == []

    def test_a_bucket_that_does_not_exist_is_an_empty_store_that_cannot_be_written(self) -> None:
        backend = open_backend(
            "s3://no-such-bucket/run", storage_options=self.server.storage_options
        )
        assert [*backend.list("")] == []
        assert backend.stat(A) is None
        with pytest.raises(NotFoundError):
            backend.get(A)
        assert backend.capabilities.put_if_absent is False
        with pytest.raises(StorageError, match="bucket") as caught:
            backend.put(A, b"x")
        assert not caught.value.outcome_unknown
        with pytest.raises(StorageError, match="bucket") as caught:
            backend.put_if_absent(A, b"x", durable=True)
        assert not caught.value.outcome_unknown

    def test_the_conditional_put_is_sent_once(self, backend: Backend) -> None:
        """No retry of s3fs or botocore: the caller reads back what became of it (I2)."""
        backend.put_if_absent(A, b"x", durable=True)
        fs = backend._connect(retries=False)[0]  # type: ignore[attr-defined]
        assert fs.retries == 1
        assert fs.s3.meta.config.retries["total_max_attempts"] == 1
        assert backend._connect()[0].retries > 1  # type: ignore[attr-defined]

    def test_a_forked_child_opens_connections_of_its_own(self, backend: Backend) -> None:
        backend.put(A, b"x")
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork with threads
            pid = os.fork()
        if pid == 0:
            try:
                os.write(writing, bytes(backend.get(A)))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(writing)
        try:
            assert os.read(reading, 10) == b"x"
        finally:
            os.close(reading)


@pytest.mark.integration
def test_a_dead_server_is_retryable_and_leaves_no_doubt_before_the_put(
    s3_server: S3Server,
) -> None:
    options = {**s3_server.storage_options, "endpoint_url": "http://127.0.0.1:9"}
    options["config_kwargs"] = {"retries": {"max_attempts": 0}}
    backend = open_backend("s3://bucket/run", storage_options=options)
    backend._connect()[0].retries = 1  # type: ignore[attr-defined]
    for call in (lambda: backend.get(A), lambda: [*backend.list("")]):
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.retryable
    with pytest.raises(StorageError) as caught:
        backend.put_if_absent(A, b"x", durable=True)
    assert caught.value.retryable
    assert not caught.value.outcome_unknown, "the probe failed: nothing was put"


def test_a_store_without_conditions_says_so_once(
    foil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(via_fsspec, "_findings", {})
    url = f"{foil}://{secrets.token_hex(8)}/store"
    backend = open_backend(url)
    with pytest.warns(CkptWarning, match="one process at a time"):
        assert backend.put_if_absent(A, b"first", durable=False) is True
    assert backend.put_if_absent(A, b"second", durable=False) is False
    assert open_backend(url).capabilities.put_if_absent is False
    assert backend.get(A) == b"first"
    assert [entry.key for entry in backend.list("")] == ["data/a"]


def test_a_driver_that_looks_before_it_writes_is_not_believed(
    looker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creating twice one after the other looks right; sixteen at once would all win."""
    monkeypatch.setattr(via_fsspec, "_findings", {})
    backend = open_backend(f"{looker}://{secrets.token_hex(8)}/store")
    with pytest.warns(CkptWarning, match="one process at a time"):
        assert backend.capabilities.put_if_absent is False


def test_a_reader_probes_nothing(foil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(via_fsspec, "_findings", {})
    backend = open_backend(f"{foil}://{secrets.token_hex(8)}/store", read_only=True)
    assert backend.capabilities.put_if_absent is False  # and no CkptWarning


def test_who_may_not_write_may_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(via_fsspec, "_findings", {})
    backend = FsspecBackend(f"fsspec+memory://{secrets.token_hex(8)}/store")
    asked: list[str] = []

    def deny(self: object, path: str, *_: object, **__: object) -> None:
        asked.append(path)
        raise PermissionError("Forbidden")

    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", deny)
    for _ in range(3):
        assert backend.capabilities.put_if_absent is False
    assert len(asked) == 1
    with pytest.raises(StorageError) as caught:
        backend.put_if_absent(A, b"x", durable=False)
    assert caught.value.kind == "storage-access-denied"
    with pytest.raises(StorageError):
        backend.put(A, b"x")


class _Reply(Exception):
    """What a driver raises inside: a reply of the service."""

    def __init__(self, status: int) -> None:
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def _raised(outer: Exception, status: int) -> Exception:
    outer.__cause__ = _Reply(status)
    return outer


@pytest.mark.parametrize(
    ("error", "won", "unknown"),
    [
        (FileExistsError("taken"), False, None),
        (_raised(OSError(errno.EINVAL, "PreconditionFailed"), 412), False, None),
        (_raised(OSError(errno.EBUSY, "BlobAlreadyExists"), 409), False, None),
        (_raised(OSError(errno.EIO, "InternalError"), 500), None, True),
        (_raised(OSError(errno.EBUSY, "SlowDown"), 503), None, True),
        (TimeoutError("no reply"), None, True),
        (ConnectionResetError("gone"), None, True),
        (_raised(PermissionError("Forbidden"), 403), None, False),
        (_raised(OSError(errno.EIO, "EntityTooLarge"), 400), None, False),
    ],
)
def test_what_became_of_a_conditional_put(
    monkeypatch: pytest.MonkeyPatch, error: Exception, won: bool | None, unknown: bool | None
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    backend = open_backend(f"fsspec+memory://{secrets.token_hex(8)}/store")
    assert backend.put_if_absent(A, b"theirs", durable=True)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
    if won is not None:
        assert backend.put_if_absent(A, b"mine", durable=True) is won
        return
    with pytest.raises(StorageError) as caught:
        backend.put_if_absent(A, b"mine", durable=True)
    assert caught.value.outcome_unknown is unknown


def test_a_conflict_that_nobody_won_is_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 replies 409 while another conditional request is in flight; that one may fail too."""
    from fsspec.implementations.memory import MemoryFileSystem

    backend = open_backend(f"fsspec+memory://{secrets.token_hex(8)}/store")
    assert backend.capabilities.put_if_absent

    def fail(*_: object, **__: object) -> None:
        raise _raised(OSError(errno.EBUSY, "ConditionalRequestConflict"), 409)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
    with pytest.raises(StorageError) as caught:
        backend.put_if_absent(A, b"mine", durable=True)
    assert caught.value.outcome_unknown
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (FileNotFoundError("x"), "not-found-object", None),
        (_raised(OSError(errno.EIO, "NoSuchKey"), 404), "not-found-object", None),
        (PermissionError("no"), "storage-access-denied", False),
        (_raised(OSError(errno.EIO, "ExpiredToken"), 401), "storage-access-denied", False),
        (OSError(errno.EACCES, "no"), "storage-access-denied", False),
        (OSError(errno.ENOSPC, "full"), "storage-no-space", False),
        (_raised(OSError(errno.EIO, "full"), 507), "storage-no-space", False),
        (_raised(OSError(errno.EBUSY, "SlowDown"), 503), "storage-io", True),
        (_raised(OSError(errno.EIO, "TooMany"), 429), "storage-io", True),
        (TimeoutError(), "storage-io", True),
        (RuntimeError("anything"), "storage-io", False),
    ],
)
def test_what_drivers_raise_is_ours(error: Exception, kind: str, retryable: bool | None) -> None:
    found = remote_failures.from_driver(error, "data/a")
    assert found.kind == kind
    if isinstance(found, StorageError):
        assert found.retryable is retryable
    again: CheckpointError = remote_failures.from_driver(found, "elsewhere")
    assert again is found


def test_a_short_reply_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    backend = open_backend(f"fsspec+memory://{secrets.token_hex(8)}/store")
    backend.put(A, b"0123456789")
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: b"01")
    with pytest.raises(CorruptError) as caught:
        backend.get(A, 0, 5)
    assert caught.value.kind == "corrupt-short-file"


def test_writes_in_order_are_sent_on_and_not_held(
    foil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_writer, "_PART_NBYTES", 100)
    sent: list[bytes] = []

    class Upload:
        closed = False

        def write(self, data: bytes) -> None:
            sent.append(bytes(data))

        def close(self) -> None:
            sent.append(b"closed")

        def commit(self) -> None:
            sent.append(b"committed")

    class Driver:
        def open(self, path: str, mode: str, **options: Any) -> Upload:
            assert options["autocommit"] is False
            return Upload()

    writer = fsspec_writer.UploadWriter(Driver(), "bucket/data/a", A)
    writer.write(60, b"b" * 60)
    assert sent == []
    writer.write(0, b"a" * 60)
    assert b"".join(sent) == b"a" * 60 + b"b" * 60
    writer.write(120, b"c")
    assert sent[-1] == b"c"
    writer.finish(durable=True)
    assert sent[-2:] == [b"closed", b"committed"]


def test_bytes_written_twice_are_refused() -> None:
    backend = open_backend(f"fsspec+memory://{secrets.token_hex(8)}/store")
    writer = backend.create(A)
    writer.write(0, b"abc")
    with pytest.raises(UsageError) as caught:
        writer.write(1, b"x")
    assert caught.value.kind == "usage-gap"
    with pytest.raises(StorageError):
        writer.finish(durable=False)


@pytest.mark.filterwarnings(SINGLE_WRITER)
def test_a_driver_of_files_writes_under_tmp_and_renames(tmp_path: Path) -> None:
    backend = open_backend(f"fsspec+file://{tmp_path}")
    writer = backend.create(A)
    writer.write(0, b"abc")
    assert [path.parent.name for path in tmp_path.rglob("*") if path.is_file()] == ["tmp"]
    writer.finish(durable=False)
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == ["data/a"]


def test_a_missing_driver_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(MissingExtraError) as caught:
        open_backend("s3://bucket/run")
    assert 'pip install "ckptfmt[s3]"' in str(caught.value)
    assert "s3fs" in str(caught.value)


@pytest.mark.parametrize("url", ["nosuchscheme://x/y", "fsspec+nosuchscheme://x"])
def test_an_unknown_scheme_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_backend(url)
    assert caught.value.kind == "usage-url"


def test_opening_asks_the_driver_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(via_fsspec, "_open_driver", fail)
    open_backend("fsspec+memory://x/store")


def test_one_driver_is_made_even_if_many_threads_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FsspecBackend(f"fsspec+memory://{secrets.token_hex(8)}/store")
    made: list[int] = []
    real = via_fsspec._open_driver

    def note(*args: Any, **options: Any) -> tuple[Any, str]:
        made.append(1)
        return real(*args, **options)

    monkeypatch.setattr(via_fsspec, "_open_driver", note)
    threads = [threading.Thread(target=lambda: backend.stat(A)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ({"mtime": 12.5}, 12.5),
        ({"LastModified": "1970-01-01T00:01:00Z"}, 60.0),
        ({"updated": "1970-01-01T00:01:00.500+00:00"}, 60.5),
        ({"mtime": "yesterday"}, None),
        ({}, None),
        ({"created": None}, None),
        ({"mtime": True}, None),
    ],
)
def test_times_in_every_spelling_are_seconds(
    details: dict[str, object], expected: float | None
) -> None:
    assert via_fsspec._time_of(details) == expected
