"""The local disk: whole files only, real syncs, no links, no leaks."""

# A memoryview equals bytes with the same content; mypy does not know.
# mypy: disable-error-code="comparison-overlap"

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptfmt.errors import (
    CheckpointError,
    CkptWarning,
    CorruptError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckptfmt.storage import Backend, exclusive, local, open_backend, syscalls
from ckptfmt.storage.local import LocalBackend
from ckptfmt.testing import BackendSuite
from ckptfmt.types import Key

A, B = Key("data/a"), Key("data/b")
INDEX = Key("checkpoints/main~0.index")


class TestLocal(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return LocalBackend(tmp_path / "not" / "yet" / "there")


class _Unlinked(BackendSuite):
    """A file system that lacks one or both ways to take a name."""

    missing: tuple[str, ...] = ()

    @pytest.fixture
    def backend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, "not on this file system")

        monkeypatch.setattr(exclusive, "_methods", {})
        for name in self.missing:
            module = os if name == "link" else syscalls
            monkeypatch.setattr(module, name, refuse)
        return LocalBackend(tmp_path / "store")


class TestLocalWithoutHardLinks(_Unlinked):
    missing = ("link",)

    def test_it_says_rename(self, backend: Backend) -> None:
        backend.put_if_absent(A, b"", durable=False)
        assert set(exclusive._methods.values()) == {"rename"}
        assert backend.capabilities.put_if_absent


@pytest.mark.filterwarnings("ignore:.*one process at a time:ckptfmt.errors.CkptWarning")
class TestLocalForASingleWriter(_Unlinked):
    missing = ("link", "rename_noreplace")

    def test_it_says_so(self, backend: Backend) -> None:
        with pytest.warns(CkptWarning, match="one process at a time"):
            backend.put_if_absent(A, b"", durable=False)
        assert not backend.capabilities.put_if_absent

    def test_capabilities_are_a_record_that_does_not_change(self, backend: Backend) -> None:
        backend.put_if_absent(A, b"", durable=False)
        backend.delete(A)
        super().test_capabilities_are_a_record_that_does_not_change(backend)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(store: Path) -> LocalBackend:
    return LocalBackend(store)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(what, path) of every fsync, link, rename and unlink."""
    seen: list[tuple[str, str]] = []
    fsync, link, replace, unlink = os.fsync, os.link, os.replace, os.unlink

    def note_fsync(fd: int) -> None:
        seen.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def note_link(source: str, target: str) -> None:
        link(source, target)
        seen.append(("link", target))

    def note_replace(source: str, target: str) -> None:
        replace(source, target)
        seen.append(("rename", target))

    def note_unlink(path: str) -> None:
        seen.append(("unlink", path))
        unlink(path)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "link", note_link)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "unlink", note_unlink)
    return seen


# Order of what makes it durable


def test_a_durable_file_is_synced_before_it_has_its_name(
    backend: LocalBackend, store: Path, calls: list[tuple[str, str]]
) -> None:
    backend.put(A, b"x", durable=True)
    assert [what for what, _ in calls] == ["fsync", "rename"]
    assert calls[0][1].startswith(f"{store}/tmp/put-")
    assert calls[1] == ("rename", f"{store}/data/a")


def test_a_file_that_need_not_last_is_not_synced(
    backend: LocalBackend, calls: list[tuple[str, str]]
) -> None:
    backend.put(A, b"x", durable=False)
    backend.put_if_absent(INDEX, b"x", durable=False)
    assert "fsync" not in [what for what, _ in calls]


def test_put_if_absent_syncs_links_unlinks_and_syncs_every_folder_up_to_one_that_existed(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    store = tmp_path / "new" / "store"
    backend = LocalBackend(store)
    backend.put_if_absent(Key("gc/0"), b"", durable=False)  # probes, makes the folders
    calls.clear()
    assert backend.put_if_absent(INDEX, b"x", durable=True)
    assert [what for what, _ in calls[:3]] == ["fsync", "link", "unlink"]
    assert calls[1] == ("link", f"{store}/{INDEX}")
    folders = [path for _, path in calls[3:]]
    assert folders[:2] == [f"{store}/checkpoints", str(store)]
    assert {*folders[2:]} == {str(tmp_path / "new"), str(tmp_path)}
    calls.clear()
    backend.put_if_absent(Key("checkpoints/main~1.index"), b"x", durable=True)
    assert [path for what, path in calls if what == "fsync"][1:] == [
        f"{store}/checkpoints",
        str(store),
    ]


def test_sync_syncs_each_file_and_each_folder_once(
    backend: LocalBackend, store: Path, calls: list[tuple[str, str]]
) -> None:
    for key in (A, B, Key("parts/t/open")):
        backend.put(key, b"x")
    backend.sync([A])
    calls.clear()
    backend.sync([A, B, Key("parts/t/open")])
    paths = [path for _, path in calls]
    assert paths[:3] == [f"{store}/data/a", f"{store}/data/b", f"{store}/parts/t/open"]
    assert sorted(paths[3:]) == [str(store), f"{store}/data", f"{store}/parts", f"{store}/parts/t"]
    assert paths[-1] == str(store), "a folder is synced before the one above it"
    assert {what for what, _ in calls} == {"fsync"}


def test_a_file_whose_fsync_failed_is_abandoned(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def fail(fd: int) -> None:
        tried.append(fd)
        raise OSError(errno.EIO, "broken disk")

    backend.put(A, b"old")
    monkeypatch.setattr(os, "fsync", fail)
    writer = backend.create(A)
    writer.write(0, b"new")
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            writer.finish(durable=True)
    assert caught.value.kind == "storage-writer-done"
    assert len(tried) == 1
    writer.abort()
    assert backend.get(A) == b"old"
    assert [*backend.list("tmp/")] == []


@pytest.mark.parametrize("stuck", [False, True])
def test_a_commit_whose_folder_cannot_be_synced_is_taken_back_or_of_unknown_outcome(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    """Reading it back would look like success, and a power cut would still take it."""
    backend.put_if_absent(Key("gc/0"), b"", durable=False)

    def fail(path: str) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(syscalls, "sync_directory", fail)
    if stuck:
        monkeypatch.setattr(os, "unlink", fail)
    with pytest.raises(StorageError) as caught:
        backend.put_if_absent(INDEX, b"x", durable=True)
    assert caught.value.outcome_unknown is stuck
    assert (backend.stat(INDEX) is not None) is stuck
    assert caught.value.errno == errno.EIO


def test_a_link_whose_reply_was_lost_is_won(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats the request and then finds the name taken: by itself."""
    backend.put_if_absent(Key("gc/0"), b"", durable=False)
    link = os.link

    def link_twice(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "taken", target)

    monkeypatch.setattr(os, "link", link_twice)
    assert backend.put_if_absent(INDEX, b"mine", durable=True) is True
    assert backend.get(INDEX) == b"mine"


# Short writes, full disks


@pytest.mark.parametrize("most", [1, 7, 2**31 - 4096])
def test_short_writes_and_reads_are_continued(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:most], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:most]], at))
    content = bytes(range(256)) * 10
    writer = backend.create(A)
    writer.write(1000, content[1000:])
    writer.write(0, content[:1000])
    writer.finish(durable=False)
    assert backend.get(A) == content
    assert backend.get(A, 5, 1005) == content[5:1005]
    assert backend.put_if_absent(B, content, durable=False)
    assert backend.get(B) == content


def test_more_than_a_call_can_write_is_written_in_pieces(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    pwrite = os.pwrite

    def note(fd: int, data: memoryview, at: int) -> int:
        sizes.append(len(data))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", note)
    monkeypatch.setattr(syscalls, "PIECE_NBYTES_MAX", 1000)
    backend.put(A, bytes(2500))
    assert sizes == [1000, 1000, 500]


def test_a_write_without_progress_fails_instead_of_turning_for_ever(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(StorageError) as caught:
        backend.put(A, b"x")
    assert caught.value.errno == errno.EIO
    assert [*backend.list("")] == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate", "fsync", "replace"])
def test_a_full_disk_is_no_space_and_leaves_nothing(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    backend.put(A, b"old")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError) as caught:
        backend.put(A, bytes(2 << 20), durable=True)
    assert caught.value.kind == "storage-no-space"
    assert caught.value.errno == code
    assert [entry.key for entry in backend.list("")] == ["data/a"]
    assert backend.get(A) == b"old"


def test_a_real_full_disk_is_no_space_and_leaves_nothing(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount")
    try:
        backend = LocalBackend(mount / "store")
        backend.put(A, b"old", durable=True)
        with pytest.raises(StorageError) as caught:
            backend.create(B, 2 << 20)  # found out when reserving
        assert caught.value.kind == "storage-no-space"
        writer = backend.create(B)
        with pytest.raises(StorageError) as caught:
            writer.write(0, bytes(2 << 20))
        assert caught.value.kind == "storage-no-space"
        writer.abort()
        assert [entry.key for entry in backend.list("")] == ["data/a"]
        with pytest.raises(StorageError):
            backend.put_if_absent(INDEX, bytes(2 << 20), durable=True)
        assert [entry.key for entry in backend.list("")] == ["data/a"]
        backend.put(B, bytes(1 << 18), durable=True)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_file_that_grows_over_the_limit_is_an_error_that_keeps_its_number(store: Path) -> None:
    """A real refusal by the kernel, with the signal that comes with it."""
    program = f"""
import resource, signal
from ckptfmt.errors import StorageError
from ckptfmt.storage import open_backend
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
backend = open_backend({str(store)!r})
try:
    backend.put("data/a", bytes(200_000))
except StorageError as error:
    print(error.errno, [*backend.list("")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(errno.EFBIG), "[]"]


# What is not an object


def test_a_symbolic_link_is_not_followed(backend: LocalBackend, store: Path) -> None:
    secret = store.parent / "secret"
    secret.write_bytes(b"secret")
    backend.put(A, b"x")
    (store / "data" / "link").symlink_to(secret)
    link = Key("data/link")
    for call in (backend.get, backend.map, lambda key: backend.sync([key])):
        with pytest.raises(CorruptError) as caught:
            call(link)
        assert caught.value.kind == "corrupt-symlink"
    assert backend.stat(link) is None
    assert [entry.key for entry in backend.list("data/")] == ["data/a"]
    assert backend.put_if_absent(link, b"y", durable=False) is False
    backend.put(link, b"healed")
    assert secret.read_bytes() == b"secret"
    assert backend.get(link) == b"healed"


def test_what_is_not_a_file_is_not_an_object_and_does_not_hang(
    backend: LocalBackend, store: Path
) -> None:
    backend.put(A, b"x")
    os.mkfifo(store / "data" / "pipe")
    (store / "data" / "folder").mkdir()
    for key in (Key("data/pipe"), Key("data/folder")):
        for call in (backend.get, backend.map):
            with pytest.raises(CorruptError) as caught:
                call(key)
            assert caught.value.kind == "corrupt-not-a-file"
        assert backend.stat(key) is None
    assert [entry.key for entry in backend.list("data/")] == ["data/a"]


def test_a_folder_linked_at_the_top_is_part_of_the_store_and_no_loop_is_followed(
    backend: LocalBackend, store: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "big-disk"
    elsewhere.mkdir()
    store.mkdir()
    (store / "data").symlink_to(elsewhere)
    backend.put(A, b"x")
    (elsewhere / "up").symlink_to(store)
    assert [entry.key for entry in backend.list("")] == ["data/a"]
    assert (elsewhere / "a").read_bytes() == b"x"


def test_names_that_are_no_keys_are_left_out(backend: LocalBackend, store: Path) -> None:
    backend.put(A, b"x")
    for name in (b"a\\b", b"bad\xff"):
        (store / "data" / os.fsdecode(name)).write_bytes(b"")
        os.mkdir(os.fsencode(store) + b"/" + name)
    assert [entry.key for entry in backend.list("")] == ["data/a"]


def test_files_that_vanish_during_a_listing_are_left_out(
    backend: LocalBackend, store: Path
) -> None:
    for number in range(5):
        backend.put(Key(f"data/{number}"), b"x")
    backend.put(Key("parts/t/open"), b"x")
    listing = backend.list("")
    assert next(listing).key == "data/0"
    for key in ("data/1", "data/3", "parts/t/open"):
        backend.delete(Key(key))
    assert [entry.key for entry in listing] == ["data/2", "data/4"]


def test_a_listing_opens_only_the_folders_it_needs(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("data/a", "checkpoints/x", "parts/a/open", "parts/b/open"):
        backend.put(Key(key), b"")
    opened: list[str] = []
    scandir = os.scandir

    def note(path: str) -> Iterator[os.DirEntry[str]]:
        opened.append(os.path.basename(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", note)
    assert len([*backend.list("parts/b/")]) == 1
    assert opened == ["b"]
    opened.clear()
    assert len([*backend.list("checkpoints/x")]) == 1
    assert opened == ["checkpoints"]
    opened.clear()
    assert len([*backend.list("parts/", "parts/a/open")]) == 1
    assert len([*backend.list("", "parts/b")]) == 1
    assert "data" not in opened
    assert "checkpoints" not in opened


def test_a_file_cut_short_while_it_is_read_is_corrupt(
    backend: LocalBackend, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.put(A, bytes(10_000))
    preadv = os.preadv

    def cut(fd: int, views: list[memoryview], at: int) -> int:
        os.truncate(store / "data" / "a", 4000)
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(CorruptError) as caught:
        backend.get(A, 1000, 9000)
    assert caught.value.kind == "corrupt-short-file"
    assert caught.value.found == "4000 bytes"


# Errors


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, "storage-access-denied"),
        (errno.EPERM, "storage-access-denied"),
        (errno.EROFS, "storage-access-denied"),
        (errno.EIO, "storage-io"),
        (errno.ESTALE, "storage-io"),
        (errno.ELOOP, "corrupt-symlink"),
        (errno.ENOENT, "not-found-object"),
        (errno.ENOTDIR, "not-found-object"),
    ],
)
def test_errors_of_the_system_are_ours_and_keep_their_number(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, code: int, kind: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(CheckpointError) as caught:
        backend.get(A)
    assert caught.value.kind == kind
    if isinstance(caught.value, StorageError):
        assert caught.value.errno == code
        assert caught.value.retryable == (code == errno.ESTALE)


def test_a_store_below_a_file_is_empty_and_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    backend = LocalBackend(tmp_path / "file" / "store")
    assert [*backend.list("")] == []
    with pytest.raises(NotFoundError):
        backend.get(A)
    for call in (
        lambda: backend.put(A, b""),
        lambda: backend.put_if_absent(A, b"", durable=True),
    ):
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.kind == "storage-io"


def test_a_temporary_file_that_a_cleaner_took_is_a_storage_error(
    backend: LocalBackend, store: Path
) -> None:
    writer = backend.create(Key("tmp/t-0"))
    writer.write(0, b"x")
    os.unlink(store / "tmp" / "t-0")
    with pytest.raises(StorageError) as caught:
        writer.finish(durable=False, key=A)
    assert caught.value.kind == "storage-io"
    assert backend.stat(A) is None


# Opening


def test_opening_and_looking_touch_nothing(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store")
    assert backend.capabilities.put_if_absent
    assert [*backend.list("")] == []
    assert not (tmp_path / "store").exists()
    (tmp_path / "store").mkdir()
    before = os.stat(tmp_path / "store").st_ino
    assert backend.capabilities.put_if_absent
    assert [*(tmp_path / "store").iterdir()] == []
    assert os.stat(tmp_path / "store").st_ino == before


def test_a_reader_probes_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.mkdir()
    monkeypatch.setattr(exclusive, "_methods", {})

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "mkdir", fail)
    monkeypatch.setattr(os, "link", fail)
    assert LocalBackend(store, read_only=True).capabilities.put_if_absent is False
    assert exclusive._methods == {}


def test_a_full_or_read_only_disk_does_not_keep_anyone_from_looking(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.mkdir()
    monkeypatch.setattr(exclusive, "_methods", {})
    for code in (errno.ENOSPC, errno.EROFS):

        def fail(*_: object, code: int = code) -> int:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail)
            assert LocalBackend(store).capabilities.local
    assert exclusive._methods == {}


def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    backend = open_backend("runs/a")
    monkeypatch.chdir(tmp_path / "elsewhere")
    backend.put(A, b"x")
    assert (tmp_path / "runs" / "a" / "data" / "a").read_bytes() == b"x"
    assert backend.url == str(tmp_path / "runs" / "a")


def test_a_network_file_system_says_so_and_how_stale_it_is(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert syscalls.file_system_of("/proc/self") == "proc"
    monkeypatch.setattr(syscalls, "file_system_of", lambda path: "nfs4")
    found = backend.capabilities
    assert (found.network_fs, found.list_stale_s) == (True, 120.0)
    assert syscalls.network_facts("ext4") == (False, 0.0)
    assert syscalls.network_facts("fuse.sshfs") == (True, None)
    assert syscalls.network_facts("fuseblk") == (False, 0.0)


# Descriptors, threads, processes


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_is_left_open(backend: LocalBackend, store: Path) -> None:
    backend.put(A, b"x" * 100)
    (store / "data" / "folder").mkdir()
    before = _descriptors()

    def fails(call: Callable[[], object]) -> None:
        with pytest.raises(CheckpointError):
            call()

    for _ in range(3):
        backend.get(A)
        fails(lambda: backend.get(A, 0, 1000))
        fails(lambda: backend.get(Key("data/folder")))
        fails(lambda: backend.get(Key("data/none")))
        fails(lambda: backend.get(A, 0, 5, memoryview(bytearray(3))))
        backend.put(B, b"y", durable=True)
        backend.put_if_absent(B, b"y", durable=True)
        backend.create(B).abort()
        backend.create(B)  # dropped
        next(backend.list(""))
        backend.sync([A, B])
        view = backend.map(A)
        del view
    assert _descriptors() == before


def test_folders_that_come_and_go_harm_no_writer(backend: LocalBackend) -> None:
    errors: list[BaseException] = []

    def turn(name: str) -> None:
        key = Key(f"parts/t/{name}")
        try:
            for _ in range(200):
                backend.put(key, b"x")
                assert backend.get(key) == b"x"
                backend.delete(key)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=turn, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [*backend.list("")] == []


def test_files_get_the_mode_that_the_umask_gives(backend: LocalBackend, store: Path) -> None:
    mask = os.umask(0o027)
    try:
        backend.put(A, b"x")
        backend.put_if_absent(INDEX, b"x", durable=False)
    finally:
        os.umask(mask)
    for key in (A, INDEX):
        assert stat.S_IMODE(os.stat(store / key).st_mode) == 0o640


def test_a_killed_writer_leaves_only_what_is_under_tmp(store: Path) -> None:
    program = f"""
import os, signal
from ckptfmt.storage import open_backend
backend = open_backend({str(store)!r})
backend.put("data/a", b"old")
first = backend.create("data/a"); first.write(0, b"newer")
second = backend.create("tmp/t-0", 4 << 20); second.write(0, b"newer")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    backend = LocalBackend(store)
    assert backend.get(A) == b"old"
    keys = [entry.key for entry in backend.list("")]
    assert keys[0] == "data/a"
    assert len(keys) == 3
    assert all(key.startswith(("tmp/t-0", "tmp/put-")) for key in keys[1:])


def test_a_forked_child_does_not_take_the_parents_file_along(backend: LocalBackend) -> None:
    writer = backend.create(A)
    writer.write(0, b"abc")
    pid = os.fork()
    if pid == 0:  # what a worker's exit does to objects it inherited
        try:
            writer.__del__()  # type: ignore[attr-defined]
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    writer.finish(durable=True)
    assert backend.get(A) == b"abc"


def test_several_processes_race_and_one_wins(store: Path) -> None:
    program = f"""
import sys
from ckptfmt.storage import open_backend
backend = open_backend({str(store)!r})
sys.stdin.readline()
won = sum(
    backend.put_if_absent(f"checkpoints/r~{{n}}.index", sys.argv[1].encode(), durable=False)
    for n in range(100)
)
print(won)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        outputs.append(int(process.communicate()[0]))
    assert sum(outputs) == 100
    assert len([*LocalBackend(store).list("checkpoints/")]) == 100


# URLs


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///runs/a", "/runs/a"),
        ("file:/runs/a", "/runs/a"),
        ("file://localhost/runs/a", "/runs/a"),
        ("file:///runs/a%20b", "/runs/a b"),
        ("file:///runs/a?b#c", "/runs/a?b#c"),
        ("/runs/a%20b", "/runs/a%20b"),
        ("/runs/../runs/./a/", "/runs/a"),
        (Path("/runs/s3:/x"), "/runs/s3:/x"),
    ],
)
def test_a_path_or_a_file_url_is_local(url: str | Path, path: str) -> None:
    backend = open_backend(url)
    assert isinstance(backend, LocalBackend)
    assert backend.url == path


@pytest.mark.parametrize("url", ["", "file://host/runs/a", "a\0b"])
def test_what_is_no_local_path_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_backend(url)
    assert caught.value.kind == "usage-url"


def test_a_local_store_has_no_options(store: Path) -> None:
    with pytest.raises(UsageError, match="auto_mkdir"):
        open_backend(str(store), storage_options={"auto_mkdir": True})


def test_big_objects_are_reserved_and_small_ones_are_not(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, nbytes: reserved.append(nbytes))
    backend.put(A, bytes(local._PREALLOCATE_NBYTES_MIN))
    backend.put(B, b"x")
    assert reserved == [local._PREALLOCATE_NBYTES_MIN]


def test_a_file_system_that_cannot_reserve_is_written_all_the_same(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    backend.put(A, bytes(2 << 20))
    entry = backend.stat(A)
    assert entry is not None
    assert entry.nbytes == 2 << 20


def test_a_store_below_a_file_says_which_path_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    backend = open_backend(str(tmp_path / "file"))
    with pytest.raises(StorageError, match=re.escape(str(tmp_path / "file"))):
        backend.put(Key("ckptfmt.json"), b"{}", durable=False)


def test_every_thread_of_a_writer_hears_why_it_failed(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    writer = backend.create(A)
    monkeypatch.setattr("ckptfmt.storage.syscalls.pwrite_all", full)
    for offset in (0, 4):  # the second one comes from a thread that did not see the disk full
        with pytest.raises(StorageError) as caught:
            writer.write(offset, b"data")
        assert caught.value.reason == "no-space"
    writer.abort()
