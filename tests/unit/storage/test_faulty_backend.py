"""The faulty backend: faults where they were asked for, and what they leave."""

# A memoryview equals bytes with the same content; mypy does not know.
# mypy: disable-error-code="comparison-overlap"

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfmt.errors import NotFoundError, StorageError, UsageError
from ckptfmt.storage import Backend
from ckptfmt.storage.local import LocalBackend
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.testing import BackendSuite, FaultyBackend, Operation
from ckptfmt.types import Key

A, B = Key("data/a"), Key("data/b")
INDEX = Key("checkpoints/main~0.index")


class TestFaultyWithoutFaults(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return FaultyBackend(MemoryBackend())


class TestFaultyWithPower(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return FaultyBackend(LocalBackend(tmp_path / "store"), power=True)

    def test_nothing_that_was_synced_is_lost(self, backend: Backend) -> None:
        assert isinstance(backend, FaultyBackend)
        for number in range(5):
            backend.put(Key(f"data/{number}"), b"%d" % number)
        backend.delete(Key("data/3"))
        keys = [Key(f"data/{number}") for number in (0, 1, 2, 4)]
        backend.sync(keys)
        for seed in (None, *range(20)):
            medium = backend.power_cut(seed)
            assert [entry.key for entry in medium.list("")] == keys
            assert medium.get(Key("data/2")) == b"2"


def use_everything(backend: Backend) -> None:
    writer = backend.create(A)
    writer.write(0, b"abc")
    writer.write(3, b"def")
    writer.finish(durable=True)
    backend.sync([A])
    backend.put_if_absent(INDEX, b"x", durable=True)
    backend.get(A)
    backend.map(A)
    backend.stat(A)
    next(backend.list("data/"))
    backend.delete(A)


KINDS = ["create", "write", "write", "finish", "sync", "put_if_absent", "get", "map", "stat"]
KINDS += ["list", "delete"]


def test_each_call_is_one_operation() -> None:
    backend = FaultyBackend(MemoryBackend())
    use_everything(backend)
    assert [operation.kind for operation in backend.log] == KINDS
    assert [operation.number for operation in backend.log] == [*range(len(KINDS))]
    assert backend.log[5] == Operation(5, "put_if_absent", INDEX)
    assert backend.operations == len(KINDS)
    assert not backend.fired
    backend.put(B, b"x")
    assert [operation.kind for operation in backend.log[-3:]] == ["create", "write", "finish"]


def test_the_chosen_operation_fails_and_had_no_effect() -> None:
    for k in itertools.count():
        with FaultyBackend(MemoryBackend(), fail_at=k) as backend:
            if k == len(KINDS):
                use_everything(backend)
                assert not backend.fired
                break
            with pytest.raises(StorageError, match=rf"operation {k} \({KINDS[k]}\)") as caught:
                use_everything(backend)
            assert caught.value.errno == errno.EIO
            assert backend.fired
            assert backend.operations == k + 1
            if KINDS[k] == "put_if_absent":
                assert backend.inner.stat(INDEX) is None
            if KINDS[k] == "delete":
                assert backend.inner.stat(A) is not None


def test_once_is_once_and_from_is_for_ever() -> None:
    once = FaultyBackend(MemoryBackend(), fail_at=1, mode="once")
    assert once.stat(A) is None
    with pytest.raises(StorageError):
        once.stat(A)
    assert once.stat(A) is None
    gone = FaultyBackend(MemoryBackend(), fail_at=1, mode="from")
    assert gone.stat(A) is None
    for _ in range(3):
        with pytest.raises(StorageError):
            gone.stat(A)


def test_a_failure_after_the_effect_leaves_the_outcome_unknown() -> None:
    backend = FaultyBackend(MemoryBackend(), fail_at=0, when="after")
    with pytest.raises(StorageError) as caught:
        backend.put_if_absent(INDEX, b"x", durable=True)
    assert caught.value.outcome_unknown
    assert backend.get(INDEX) == b"x"


def test_half_a_write_is_written() -> None:
    inner = MemoryBackend()
    backend = FaultyBackend(inner, fail_at=1, when="half")
    writer = backend.create(A)
    with pytest.raises(StorageError):
        writer.write(0, b"abcdef")
    writer.write(3, b"DEF")
    writer.finish(durable=False)
    assert inner.get(A) == b"abcDEF"


def test_only_counts_what_it_is_told_to() -> None:
    backend = FaultyBackend(
        MemoryBackend(), fail_at=1, only=lambda operation: operation.key.startswith("checkpoints/")
    )
    backend.put(A, b"x")
    backend.put(B, b"x")
    assert backend.put_if_absent(INDEX, b"x", durable=False)
    with pytest.raises(StorageError):
        backend.get(INDEX)
    assert backend.get(A) == b"x"
    assert [operation.key for operation in backend.log] == [INDEX, INDEX]


def test_the_error_can_be_chosen() -> None:
    def full(operation: Operation) -> StorageError:
        return StorageError("no space left", reason="no-space", where=operation.key)

    backend = FaultyBackend(MemoryBackend(), fail_at=0, error=full)
    with pytest.raises(StorageError) as caught:
        backend.put(A, b"x")
    assert caught.value.kind == "storage-no-space"
    interrupted = FaultyBackend(MemoryBackend(), fail_at=2, error=lambda _: KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        interrupted.put(A, b"x")
    assert [*interrupted.inner.list("")] == []


def test_operations_can_be_delayed() -> None:
    backend = FaultyBackend(
        MemoryBackend(), delay_s=lambda operation: 0.05 if operation.kind == "get" else 0.0
    )
    backend.put(A, b"x")
    start = time.perf_counter()
    backend.get(A)
    assert time.perf_counter() - start >= 0.05


@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_ends_the_process_there(tmp_path: Path, when: str) -> None:
    store = tmp_path / "store"
    pid = os.fork()
    if pid == 0:
        try:
            backend = FaultyBackend(
                LocalBackend(store),
                fail_at=3,
                mode="kill",
                when="after" if when == "after" else "before",
            )
            backend.put(A, b"x")
            backend.put_if_absent(INDEX, b"x", durable=True)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    left = LocalBackend(store)
    assert left.get(A) == b"x"
    assert (left.stat(INDEX) is not None) == (when == "after")


# Reordering


def test_a_reordering_store_shows_its_own_process_what_nobody_else_sees() -> None:
    inner = MemoryBackend()
    inner.put(B, b"old")
    backend = FaultyBackend(inner, reorder=True)
    backend.put(A, b"1", durable=True)
    backend.put(A, b"22", durable=True)
    backend.delete(B)
    backend.sync([A, Key("data/")])
    assert backend.put_if_absent(INDEX, b"x", durable=True)
    assert backend.get(A) == b"22"
    assert backend.stat(B) is None
    with pytest.raises(NotFoundError):
        backend.get(B)
    assert [entry.key for entry in backend.list("")] == [INDEX, A]
    assert [entry.key for entry in inner.list("")] == [INDEX, B], "the commit went first"
    backend.settle()
    assert [entry.key for entry in inner.list("")] == [INDEX, A]
    assert inner.get(A) == b"22"
    assert backend.get(A) == b"22"


# Power


def test_without_sync_a_power_cut_takes_names_and_content() -> None:
    backend = FaultyBackend(MemoryBackend(), power=True)
    assert backend.capabilities.durable
    backend.put(A, b"content", durable=False)
    assert [*backend.power_cut().list("")] == []
    seen = set()
    for seed in range(200):
        entry = backend.power_cut(seed).stat(A)
        seen.add(None if entry is None else entry.nbytes)
    assert {None, 0, 7} <= seen
    assert backend.get(A) == b"content", "the running machine sees nothing of it"


def test_content_without_its_name_and_a_name_without_its_content() -> None:
    backend = FaultyBackend(MemoryBackend(), power=True)
    backend.put(A, b"content", durable=True)
    assert [*backend.power_cut().list("")] == [], "the name was not synced"
    backend.put(B, b"content", durable=False)
    backend.sync([Key("data/")])
    medium = backend.power_cut()
    assert medium.get(A) == b"content"
    assert medium.get(B) == b"", "the content was not synced"
    torn = {bytes(backend.power_cut(seed).get(B)) for seed in range(200)}
    assert b"content" in torn
    assert any(0 < len(content.rstrip(b"\0")) < 7 for content in torn)
    backend.sync([B])
    assert backend.power_cut().get(B) == b"content"


def test_a_name_in_a_folder_whose_own_name_is_lost_is_lost() -> None:
    backend = FaultyBackend(MemoryBackend(), power=True)
    backend.put(Key("parts/t/open"), b"x", durable=True)
    assert backend._power is not None
    backend._power._folders("parts/t/open")[-1].sync()  # an fsync of parts/t alone
    assert [*backend.power_cut().list("")] == []
    backend.sync([Key("parts/t/")])
    assert [entry.key for entry in backend.power_cut().list("")] == ["parts/t/open"]


def test_what_was_deleted_or_replaced_without_sync_may_be_back() -> None:
    backend = FaultyBackend(MemoryBackend(), power=True)
    for key in (A, B):
        backend.put(key, b"old", durable=True)
    backend.sync([A, B])
    backend.delete(A)
    backend.put(B, b"new", durable=True)
    assert backend.power_cut().get(A) == b"old"
    assert backend.power_cut().get(B) == b"old"
    seen = {
        (medium.stat(A) is not None, bytes(medium.get(B)))
        for medium in (backend.power_cut(seed) for seed in range(100))
    }
    assert seen == {(True, b"old"), (True, b"new"), (False, b"old"), (False, b"new")}
    backend.sync([Key("data/")])
    assert [(entry.key, entry.nbytes) for entry in backend.power_cut().list("")] == [(B, 3)]


def test_a_durable_put_if_absent_survives_with_its_folder() -> None:
    backend = FaultyBackend(MemoryBackend(), power=True)
    assert backend.put_if_absent(INDEX, b"x", durable=True)
    assert not backend.put_if_absent(INDEX, b"y", durable=True)
    assert backend.power_cut().get(INDEX) == b"x"
    backend.put_if_absent(Key("gc/0"), b"x", durable=False)
    assert [entry.key for entry in backend.power_cut().list("")] == [INDEX]


def test_what_the_store_held_before_is_durable() -> None:
    inner = MemoryBackend()
    inner.put(A, b"old")
    assert FaultyBackend(inner, power=True).power_cut().get(A) == b"old"


def test_a_power_cut_needs_the_record() -> None:
    with pytest.raises(UsageError):
        FaultyBackend(MemoryBackend()).power_cut()


# The pattern of a crash suite, with a commit in miniature


def commit(backend: Backend, content: bytes) -> None:
    """Data, then the index that refers to it: as I1 wants it."""
    backend.put(Key(f"data/{content.hex()}"), content, durable=True)
    backend.sync([Key(f"data/{content.hex()}")])
    backend.put_if_absent(Key(f"checkpoints/{content.hex()}"), content.hex().encode(), durable=True)


def commit_without_sync(backend: Backend, content: bytes) -> None:
    backend.put(Key(f"data/{content.hex()}"), content, durable=True)
    backend.put_if_absent(Key(f"checkpoints/{content.hex()}"), content.hex().encode(), durable=True)


def commit_index_first(backend: Backend, content: bytes) -> None:
    backend.put_if_absent(Key(f"checkpoints/{content.hex()}"), content.hex().encode(), durable=True)
    backend.put(Key(f"data/{content.hex()}"), content, durable=True)
    backend.sync([Key(f"data/{content.hex()}")])


def is_whole(store: Backend) -> bool:
    for entry in store.list("checkpoints/"):
        data = Key(f"data/{bytes(store.get(entry.key)).decode()}")
        if store.stat(data) is None or bytes(store.get(data)).hex() != data[5:]:
            return False
    return True


def crash_everywhere(save: Callable[[Backend, bytes], None], *, reorder: bool = False) -> bool:
    """True if no crash at any operation, and no power cut, leaves a commit with a hole."""
    for k in itertools.count():
        inner = MemoryBackend()
        commit(inner, b"before")
        with FaultyBackend(
            inner, fail_at=k, mode="from", power=not reorder, reorder=reorder
        ) as backend:
            try:
                save(backend, b"after")
            except StorageError:
                pass
            media: list[Backend] = [inner]
            if not reorder:
                media += [backend.power_cut(seed) for seed in (None, *range(30))]
            if not all(is_whole(medium) for medium in media):
                return False
            assert all(medium.stat(Key("data/6265666f7265")) for medium in media)
            if not backend.fired:
                return True
    raise AssertionError("not reached")


def test_the_right_order_survives_every_crash() -> None:
    assert crash_everywhere(commit)


@pytest.mark.parametrize("wrong", [commit_without_sync, commit_index_first])
def test_a_wrong_order_is_caught(wrong: Callable[[Backend, bytes], None]) -> None:
    assert not crash_everywhere(wrong)


def test_a_store_that_reorders_is_caught() -> None:
    assert not crash_everywhere(commit, reorder=True)
