"""The contract of a backend, as tests. A backend that passes can hold checkpoints.

    class TestMyBackend(BackendSuite):
        @pytest.fixture
        def backend(self, tmp_path):
            return MyBackend(tmp_path / "store")

The fixture gives a store that does not exist yet, writable. Override `reopen` where a second
backend on the same store needs more than its URL. Spec: 02-store.
"""

# A memoryview equals bytes with the same content; mypy does not know.
# mypy: disable-error-code="comparison-overlap"

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest

from ckptfmt.errors import CorruptError, NotFoundError, StorageError, UsageError
from ckptfmt.storage import Backend, Capabilities, open_backend
from ckptfmt.types import Key

A, B = Key("data/a"), Key("data/b")


class BackendSuite:
    """Subclass it and give it a fixture `backend`.

    Attributes:
        many: How many objects the test of long listings writes; more than one page of a listing.
    """

    many = 1100

    @pytest.fixture
    def backend(self) -> Backend:
        pytest.fail("a subclass of BackendSuite gives it a fixture named backend")

    def reopen(self, backend: Backend, *, read_only: bool = False) -> Backend:
        """A second backend on the same store."""
        return open_backend(backend.url, read_only=read_only)

    # A store that is not there

    def test_a_store_that_does_not_exist_is_empty_and_stays_so(self, backend: Backend) -> None:
        assert [*backend.list("")] == []
        assert [*backend.list("checkpoints/")] == []
        assert backend.stat(A) is None
        with pytest.raises(NotFoundError) as caught:
            backend.get(A)
        assert caught.value.kind == "not-found-object"
        assert "data/a" in str(caught.value)
        assert [*self.reopen(backend).list("")] == []

    def test_capabilities_are_a_record_that_does_not_change(self, backend: Backend) -> None:
        first = backend.capabilities
        backend.put(A, b"x")
        assert isinstance(first, Capabilities)
        assert backend.capabilities == first
        assert [entry.key for entry in backend.list("")] == ["data/a"], "a probe left something"

    # get

    def test_what_was_put_is_what_is_got(self, backend: Backend) -> None:
        for content in (b"", b"x", bytes(range(256)) * 4099):
            backend.put(A, content)
            assert backend.get(A) == content
            entry = backend.stat(A)
            assert entry is not None
            assert (entry.key, entry.nbytes) == (A, len(content))

    def test_every_kind_of_buffer_can_be_put(self, backend: Backend) -> None:
        for buffer in (b"bytes", bytearray(b"bytearray"), memoryview(b"a view of it")[2:6]):
            backend.put(A, buffer, durable=True)
            assert backend.get(A) == buffer

    def test_a_range_is_start_to_stop(self, backend: Backend) -> None:
        backend.put(A, b"0123456789")
        assert backend.get(A, 2, 5) == b"234"
        assert backend.get(A, 7) == b"789"
        assert backend.get(A, 0, 10) == b"0123456789"
        assert backend.get(A, 0, 1) == b"0"
        assert backend.get(A, 9, 10) == b"9"
        for empty in ((0, 0), (4, 4), (10, 10), (10, None)):
            assert backend.get(A, *empty) == b""

    def test_get_fills_the_buffer_it_is_given(self, backend: Backend) -> None:
        backend.put(A, b"0123456789")
        out = bytearray(b"..........")
        got = backend.get(A, 2, 5, out=memoryview(out)[4:7])
        assert out == b"....234..."
        assert got == b"234"

    def test_a_buffer_of_another_length_is_refused(self, backend: Backend) -> None:
        backend.put(A, b"0123456789")
        for nbytes in (2, 4):
            with pytest.raises(UsageError):
                backend.get(A, 2, 5, out=memoryview(bytearray(nbytes)))
        with pytest.raises(UsageError):
            backend.get(A, 0, 3, out=memoryview(b"abc"))

    def test_an_impossible_range_is_refused(self, backend: Backend) -> None:
        backend.put(A, b"0123456789")
        for start, stop in ((-1, 3), (5, 4)):
            with pytest.raises(UsageError):
                backend.get(A, start, stop)

    def test_an_object_that_ends_before_stop_is_corrupt(self, backend: Backend) -> None:
        backend.put(A, b"0123456789")
        for start, stop in ((0, 11), (9, 11), (10, 11), (12, 15), (11, None), (11, 11)):
            with pytest.raises(CorruptError) as caught:
                backend.get(A, start, stop)
            assert caught.value.kind == "corrupt-short-file"
        backend.put(B, b"")
        with pytest.raises(CorruptError):
            backend.get(B, 0, 1)

    def test_an_empty_range_of_nothing_is_not_found(self, backend: Backend) -> None:
        with pytest.raises(NotFoundError):
            backend.get(A, 3, 3)

    def test_what_get_returns_is_writable_and_private(self, backend: Backend) -> None:
        backend.put(A, b"0123456789")
        got = backend.get(A)
        got[0:3] = b"xyz"
        assert backend.get(A) == b"0123456789"

    def test_what_get_returned_outlives_everything(self, backend: Backend) -> None:
        backend.put(A, b"old content")
        got = backend.get(A)
        backend.put(A, b"new")
        backend.delete(A)
        backend.close()
        assert got == b"old content"

    # create

    def test_an_object_is_invisible_until_it_is_finished(self, backend: Backend) -> None:
        other = self.reopen(backend)
        writer = backend.create(A, 6)
        writer.write(0, b"abc")
        for seen in (backend, other):
            assert seen.stat(A) is None
            assert [*seen.list("data/")] == []
            with pytest.raises(NotFoundError):
                seen.get(A)
        writer.write(3, b"def")
        writer.finish(durable=True)
        for seen in (backend, other):
            assert seen.get(A) == b"abcdef"
            assert [entry.key for entry in seen.list("data/")] == ["data/a"]

    def test_what_was_there_stays_until_the_new_is_finished(self, backend: Backend) -> None:
        backend.put(A, b"old")
        writer = backend.create(A)
        writer.write(0, b"newer")
        assert backend.get(A) == b"old"
        writer.finish(durable=False)
        assert backend.get(A) == b"newer"
        assert [(entry.key, entry.nbytes) for entry in backend.list("")] == [("data/a", 5)]

    def test_an_aborted_object_leaves_nothing(self, backend: Backend) -> None:
        backend.put(B, b"other")
        for nbytes in (None, 3 << 20):
            writer = backend.create(A, nbytes)
            writer.write(0, b"abc")
            writer.abort()
            writer.abort()
            assert [entry.key for entry in backend.list("")] == ["data/b"]
            with pytest.raises(StorageError):
                writer.finish(durable=False)
            with pytest.raises(StorageError):
                writer.write(3, b"d")
        backend.create(A).abort()
        assert [entry.key for entry in backend.list("")] == ["data/b"]

    def test_abort_after_finish_does_nothing(self, backend: Backend) -> None:
        writer = backend.create(A)
        writer.write(0, b"abc")
        writer.finish(durable=False)
        writer.abort()
        assert backend.get(A) == b"abc"

    def test_an_object_is_finished_once(self, backend: Backend) -> None:
        writer = backend.create(A)
        writer.write(0, b"abc")
        writer.finish(durable=False)
        with pytest.raises(StorageError):
            writer.finish(durable=False)
        with pytest.raises(StorageError):
            writer.write(3, b"d")
        assert backend.get(A) == b"abc"

    def test_writes_come_in_any_order_and_from_any_thread(self, backend: Backend) -> None:
        content = bytes(range(251)) * 4001
        pieces = [*range(0, len(content), 99_991)]
        writer = backend.create(A, len(content))

        def write(starts: list[int]) -> None:
            for start in starts:
                writer.write(start, content[start : start + 99_991])

        in_threads(write, [pieces[3::2][::-1], pieces[2::2], [99_991], [0]])
        writer.finish(durable=True)
        assert backend.get(A) == content

    def test_less_than_announced_is_what_was_written(self, backend: Backend) -> None:
        writer = backend.create(A, 5 << 20)
        writer.write(0, b"abc")
        writer.finish(durable=False)
        assert backend.get(A) == b"abc"
        empty = backend.create(B, 2 << 20)
        empty.finish(durable=False)
        assert backend.get(B) == b""

    def test_a_gap_is_refused(self, backend: Backend) -> None:
        writer = backend.create(A)
        writer.write(0, b"abc")
        writer.write(5, b"f")
        with pytest.raises(UsageError) as caught:
            writer.finish(durable=False)
        assert caught.value.kind == "usage-gap"
        writer.abort()
        assert [*backend.list("")] == []

    def test_a_late_key_names_the_object_or_is_refused(self, backend: Backend) -> None:
        writer = backend.create(Key("tmp/txn-0"))
        writer.write(0, b"abc")
        if not backend.capabilities.late_key:
            with pytest.raises(UsageError):
                writer.finish(durable=False, key=A)
            writer.abort()
            assert [*backend.list("")] == []
            return
        writer.finish(durable=True, key=A)
        assert [entry.key for entry in backend.list("")] == ["data/a"]
        assert backend.get(A) == b"abc"

    def test_a_temporary_name_can_be_taken_again(self, backend: Backend) -> None:
        for content in (b"first", b"second"):
            backend.put(Key("tmp/txn-0"), content)
            assert backend.get(Key("tmp/txn-0")) == content

    # put_if_absent

    def test_put_if_absent_takes_a_free_key_and_no_other(self, backend: Backend) -> None:
        for durable, key in ((True, Key("checkpoints/a~0.index")), (False, Key("gc/1"))):
            assert backend.put_if_absent(key, b"first", durable=durable) is True
            assert backend.put_if_absent(key, b"second", durable=durable) is False
            assert backend.get(key) == b"first"
            backend.delete(key)
            assert backend.put_if_absent(key, b"", durable=durable) is True
            assert backend.get(key) == b""
        keys = [entry.key for entry in backend.list("")]
        assert keys == ["checkpoints/a~0.index", "gc/1"], "something else was left"

    def test_put_if_absent_sees_what_was_finished(self, backend: Backend) -> None:
        backend.put(A, b"old")
        assert backend.put_if_absent(A, b"new", durable=False) is False
        assert backend.get(A) == b"old"

    def test_of_sixteen_creators_one_wins(self, backend: Backend) -> None:
        backends = [backend, *(self.reopen(backend) for _ in range(3))]
        for attempt in range(3):
            key = Key(f"checkpoints/race~{attempt}.index")
            won: list[int] = []
            barrier = threading.Barrier(16)

            def create(
                number: int,
                key: Key = key,
                won: list[int] = won,
                barrier: threading.Barrier = barrier,
            ) -> None:
                content = b"%d" % number * 1000
                barrier.wait(timeout=60)
                if backends[number % 4].put_if_absent(key, content, durable=True):
                    won.append(number)

            in_threads(create, range(16))
            assert len(won) == 1
            assert backend.get(key) == b"%d" % won[0] * 1000

    # list, stat, delete

    def test_a_listing_is_sorted_by_key(self, backend: Backend) -> None:
        keys = ["d/b", "d/a/c", "d/a-b", "d/a.b", "d/ab", "c", "d/a/b/z", "e/x", "d/a0", "d/A"]
        for key in keys:
            backend.put(Key(key), key.encode())
        assert [entry.key for entry in backend.list("")] == sorted(keys)
        assert [entry.nbytes for entry in backend.list("")] == [len(key) for key in sorted(keys)]

    def test_a_prefix_is_of_the_key_not_of_the_directory(self, backend: Backend) -> None:
        keys = ["dat", "data/ab", "data/abc", "data/abd/c", "data/b", "data2"]
        for key in keys:
            backend.put(Key(key), b"")
        for prefix in ("", "d", "data", "data/", "data/a", "data/ab", "data/abd/", "data/x", "x/"):
            found = [entry.key for entry in backend.list(prefix)]
            assert found == [key for key in keys if key.startswith(prefix)], prefix

    def test_start_after_leaves_out_what_is_not_after_it(self, backend: Backend) -> None:
        keys = ["a/1", "a/2/x", "a/3", "a-1", "b", "c/d/e", "c/d/f"]
        for key in keys:
            backend.put(Key(key), b"")
        for after in (*keys, "", "a", "a/", "a/2", "a/2/", "a/2/w", "a/25", "c/d/e0", "z"):
            for prefix in ("", "a", "a/", "c/d/"):
                found = [entry.key for entry in backend.list(prefix, after)]
                expected = sorted(k for k in keys if k.startswith(prefix) and k > after)
                assert found == expected, (prefix, after)

    def test_long_listings_are_complete(self, backend: Backend) -> None:
        keys = [Key(f"data/{number:06x}") for number in range(self.many)]

        def put(mine: list[Key]) -> None:
            for key in mine:
                backend.put(key, b"1")

        in_threads(put, [keys[start::4] for start in range(4)])
        assert [entry.key for entry in backend.list("data/")] == keys
        after = keys[self.many // 2]
        assert [entry.key for entry in backend.list("data/", after)] == keys[self.many // 2 + 1 :]

    def test_changes_are_seen_at_once_by_others(self, backend: Backend) -> None:
        other = self.reopen(backend)
        for number in range(4):
            assert [entry.nbytes for entry in other.list("data/a")] == [number] * bool(number)
            backend.put(A, b"x" * (number + 1))
            entry = other.stat(A)
            assert entry is not None
            assert entry.nbytes == number + 1
            assert other.get(A) == b"x" * (number + 1)
        backend.delete(A)
        assert other.stat(A) is None
        assert [*other.list("")] == []

    def test_delete_removes_and_asks_no_questions(self, backend: Backend) -> None:
        backend.delete(A)
        backend.put(A, b"a")
        backend.put(B, b"b")
        backend.delete(A)
        backend.delete(A)
        backend.delete(Key("data"))
        backend.delete(Key("data/b/under-a-file"))
        assert [entry.key for entry in backend.list("")] == ["data/b"]
        with pytest.raises(NotFoundError):
            backend.get(A)

    def test_a_folder_is_no_object(self, backend: Backend) -> None:
        backend.put(Key("parts/t/open"), b"x")
        assert backend.stat(Key("parts/t")) is None
        assert backend.stat(Key("parts/t/open/x")) is None
        assert [entry.key for entry in backend.list("parts")] == ["parts/t/open"]

    def test_a_folder_emptied_can_be_filled_again(self, backend: Backend) -> None:
        key = Key("parts/t/open")
        for _ in range(3):
            backend.put(key, b"x")
            backend.delete(key)
            assert [*backend.list("parts/")] == []

    def test_times_are_the_stores_and_never_go_back(self, backend: Backend) -> None:
        times: list[float] = []
        for number in range(5):
            key = Key(f"data/{number}")
            backend.put(key, b"x")
            entry = backend.stat(key)
            assert entry is not None
            if not backend.capabilities.time:
                assert entry.time_s is None
                return
            assert isinstance(entry.time_s, float)
            times.append(entry.time_s)
        assert times == sorted(times)
        assert [entry.time_s for entry in backend.list("data/")] == times

    # map

    def test_a_map_is_private_and_writable(self, backend: Backend) -> None:
        backend.put(A, b"0123456789" * 1000)
        mapped = backend.map(A)
        if not backend.capabilities.map:
            assert mapped is None
            return
        assert mapped == b"0123456789" * 1000
        mapped[0:4] = b"mine"
        assert backend.get(A, 0, 4) == b"0123"
        again = backend.map(A)
        assert again is not None
        assert again[:4] == b"0123"

    def test_a_map_outlives_its_object(self, backend: Backend) -> None:
        if not backend.capabilities.map:
            return
        for key in (A, B):
            backend.put(key, b"old content")
        first, second = backend.map(A), backend.map(B)
        backend.delete(A)
        backend.put(B, b"new")
        backend.close()
        assert first == b"old content"
        assert second == b"old content"

    def test_an_empty_object_can_be_mapped(self, backend: Backend) -> None:
        if backend.capabilities.map:
            backend.put(A, b"")
            assert backend.map(A) == b""
            with pytest.raises(NotFoundError):
                backend.map(B)

    # sync

    def test_sync_takes_objects_and_folders(self, backend: Backend) -> None:
        backend.put(A, b"a")
        backend.put(Key("parts/t/open"), b"b")
        backend.sync([A, Key("parts/t/open"), Key("data/"), Key("parts/t/")])
        backend.delete(A)
        backend.sync([Key("data/")])
        backend.sync([])
        backend.sync(key for key in [Key("parts/t/open")])

    # Refusals

    def test_what_is_no_key_is_refused_everywhere(self, backend: Backend) -> None:
        calls: list[Callable[[Key], object]] = [
            backend.get,
            backend.stat,
            backend.delete,
            backend.create,
            lambda key: backend.put(key, b""),
            lambda key: backend.put_if_absent(key, b"", durable=False),
        ]
        for bad in ("", "/etc/x", "../x", "a/../b", "a//b", "a/", "./a", "a\\b", "a\0b", "a/."):
            for call in calls:
                with pytest.raises(UsageError) as caught:
                    call(Key(bad))
                assert caught.value.kind == "usage-key"
        assert [*backend.list("")] == []

    def test_a_store_open_for_reading_refuses_to_write(self, backend: Backend) -> None:
        backend.put(A, b"a")
        before = [*backend.list("")]
        reader = self.reopen(backend, read_only=True)
        calls: list[Callable[[], object]] = [
            lambda: reader.put(B, b""),
            lambda: reader.create(B),
            lambda: reader.put_if_absent(B, b"", durable=False),
            lambda: reader.delete(A),
        ]
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            assert caught.value.kind == "usage-read-only"
        assert reader.capabilities.put_if_absent is False
        assert reader.get(A) == b"a"
        assert [*reader.list("")] == before

    def test_many_threads_read_at_once(self, backend: Backend) -> None:
        content = bytes(range(256)) * 1000
        backend.put(A, content)
        wrong: list[int] = []

        def read(number: int) -> None:
            for start in range(number, 250_000, 50_021):
                if backend.get(A, start, start + 1000) != content[start : start + 1000]:
                    wrong.append(start)

        in_threads(read, range(8))
        assert wrong == []


def in_threads(call: Callable[..., None], arguments: Iterable[object]) -> None:
    """Call with each argument in a thread of its own; the first error is raised."""
    errors: list[BaseException] = []

    def run(argument: object) -> None:
        try:
            call(argument)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
