"""The collector over stores in memory, with a clock of their own and indexes that are plain JSON."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptfmt.engine import gc
from ckptfmt.engine.coordinate import (
    ABANDONED_AFTER_S,
    MARKER,
    MARKER_TEXT,
    begin,
    condemned,
    end,
    gc_lists,
    new_txn,
    put_list,
)
from ckptfmt.engine.gc import TMP_AGE_S, collect
from ckptfmt.engine.owner import Owner, activate, deactivate
from ckptfmt.engine.survey import SLACK_S, References
from ckptfmt.errors import (
    CkptWarning,
    CorruptError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckptfmt.reports import GcReport
from ckptfmt.storage import Backend, Capabilities, Entry, open_backend
from ckptfmt.storage.memory import MemoryBackend, _Space
from ckptfmt.testing import FaultyBackend
from ckptfmt.types import Key

A, B, C, D = (letter * 32 for letter in "abcd")
ELSEWHERE = Owner("elsewhere", "boot", "pid:[1]", 7, 7)


class Clock(_Space):
    """Objects that are timed by `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0

    def put(self, key: str, data: bytes | bytearray) -> None:
        super().put(key, data)
        self.objects[key] = (self.objects[key][0], self.now)


class Store(MemoryBackend):
    """A store with a clock that only a test moves, and other capabilities if asked."""

    def __init__(self, **capabilities: object) -> None:
        super().__init__()
        self.clock = self._space = Clock()
        self._changes = capabilities
        self.put(MARKER, MARKER_TEXT)

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, **self._changes)  # type: ignore[arg-type]

    def stat(self, key: Key) -> Entry | None:
        entry = super().stat(key)
        if entry is None or self.capabilities.time:
            return entry
        return replace(entry, time_s=None)

    def later(self, seconds: float) -> None:
        self.clock.now += seconds

    def data(self, *ids: str) -> None:
        for i in ids:
            self.put(Key(f"data/{i}"), i.encode() * 4)

    def index(self, name: str, *ids: str, txn: str = "", folder: str = "checkpoints") -> str:
        txn = txn or new_txn()
        files = dict.fromkeys(ids, 128)
        self.put(Key(f"{folder}/{name}.index"), json.dumps([txn, files]).encode())
        return txn

    def has(self, *ids: str) -> list[bool]:
        return [self.stat(Key(f"data/{i}")) is not None for i in ids]

    def names(self, prefix: str = "") -> list[str]:
        return [entry.key for entry in self.list(prefix)]


def refer(backend: Backend, entry: Entry) -> References:
    data = bytes(backend.get(entry.key))
    if data == b"newer":
        raise UnsupportedError("index of another major version", reason="major", where=entry.key)
    if data == b"rotten":
        raise CorruptError("header digest differs", reason="header-digest", where=entry.key)
    txn, files = json.loads(data)
    return References(txn, files)


def run(
    backend: Backend,
    *,
    grace_s: float = 600.0,
    wait: bool = False,
    dry_run: bool = False,
    whole: bool = True,
) -> GcReport:
    return collect(
        backend,
        grace_s=grace_s,
        wait=wait,
        dry_run=dry_run,
        refer=refer,
        complete=lambda backend, entry: whole,
    )


def is_idle(report: GcReport) -> bool:
    return not (report.listed or report.deleted or report.spared or report.abandoned)


@pytest.fixture
def store() -> Store:
    return Store()


# -- two phases


def test_the_first_run_lists_and_a_run_after_the_grace_deletes(store: Store) -> None:
    store.data(A, B)
    store.index("main~0", A)
    first = run(store)
    assert (first.listed, first.deleted, first.listed_nbytes) == ([B], [], 128)
    assert store.has(A, B) == [True, True]
    assert condemned(store) == {B}
    store.later(300)
    assert is_idle(run(store)), "the grace is not over: nothing is listed twice"
    store.later(400)
    last = run(store)
    assert (last.listed, last.deleted, last.freed_nbytes) == ([], [B], 128)
    assert store.has(A, B) == [True, False]
    assert store.names("gc/") == []
    assert is_idle(run(store))


@pytest.mark.parametrize("age", [599.0, 600.0, 600.0 + SLACK_S])
def test_a_list_is_due_only_when_it_is_older_than_the_grace_and_the_slack(
    store: Store, age: float
) -> None:
    store.data(A)
    run(store)
    store.later(age)
    assert run(store).deleted == []
    store.later(600.0 + SLACK_S - age + 0.01)
    assert run(store).deleted == [A]


def test_without_a_grace_one_call_does_both(store: Store) -> None:
    store.data(A, B)
    store.index("main~0", A)
    report = run(store, grace_s=0)
    assert (report.listed, report.deleted, report.freed_nbytes) == ([B], [B], 128)
    assert store.names() == ["checkpoints/main~0.index", "ckptfmt.json", f"data/{A}"]


def test_without_a_grace_earlier_lists_are_finished_too(store: Store) -> None:
    store.data(A)
    run(store)
    store.data(B)
    assert sorted(run(store, grace_s=0).deleted) == [A, B]
    assert store.names("gc/") == []


def test_waiting_sleeps_the_grace_and_deletes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        store.later(seconds / 2)  # the store's clock is slow

    monkeypatch.setattr(time, "sleep", sleep)
    store.data(A)
    report = run(store, grace_s=60, wait=True)
    assert (report.listed, report.deleted) == ([A], [A])
    assert sum(slept) >= 120
    assert store.names("gc/") == []


def test_waiting_with_nothing_to_delete_does_not_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("slept"))
    store.data(A)
    store.index("main~0", A)
    assert is_idle(run(store, wait=True))


def test_what_is_referred_to_again_is_spared(store: Store) -> None:
    store.data(A, B)
    run(store)
    store.index("main~0", A)
    store.later(700)
    report = run(store)
    assert (report.deleted, report.spared) == ([B], [A])
    assert store.has(A, B) == [True, False]
    assert store.names("gc/") == []


def test_a_quarantined_checkpoint_keeps_its_files(store: Store) -> None:
    store.data(A)
    store.index("step-0000000000000001~0", A, folder="quarantine")
    assert run(store, grace_s=0).deleted == []


@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("folders", [("checkpoints", "quarantine"), ("quarantine", "checkpoints")])
def test_an_index_that_moves_during_the_look_is_seen(
    store: Store, folders: tuple[str, str], after: int
) -> None:
    here, there = (Key(f"{folder}/main~0.index") for folder in folders)
    store.data(A)
    store.index("main~0", A, folder=folders[0])

    class Moving(FaultyBackend):
        def list(self, prefix: str, start_after: str = "") -> Iterator[Entry]:
            found = list(super().list(prefix, start_after))
            listings = [op for op in self.log if op.key in ("checkpoints/", "quarantine/")]
            if len(listings) > after and store.stat(here):
                store.put(there, store.get(here))
                store.delete(here)
            return iter(found)

    assert run(Moving(store), grace_s=0).deleted == []
    assert store.has(A) == [True]
    assert store.stat(there) is not None or after > 6


def test_a_dry_run_changes_nothing_and_says_what_would_be_done(store: Store) -> None:
    store.data(A)
    run(store)
    store.clock.now = time.time()
    store.data(B, C)
    store.index("main~0", C)
    store.index("main~1", C)
    store.put(Key(f"notes/{new_txn()}~0.index"), b"x")
    store.put(Key(f"damaged/{D}"), b"")
    before = {key: bytes(store.get(Key(key))) for key in store.names()}
    report = run(store, dry_run=True)
    assert (report.listed, report.deleted, report.dry_run) == ([B], [A], True)
    assert sorted(run(store, grace_s=0, dry_run=True).deleted) == [A, B]
    assert {key: bytes(store.get(Key(key))) for key in store.names()} == before
    faulty = FaultyBackend(store)
    run(faulty, dry_run=True)
    assert {op.kind for op in faulty.log} <= {"list", "get", "stat"}


# -- saves in flight


def test_data_younger_than_a_save_in_flight_is_its_own(store: Store) -> None:
    store.data(A)
    store.later(SLACK_S)
    txn = new_txn()
    begin(store, txn, step=None, name="main", bases=[])
    store.data(B)
    store.later(100)
    store.data(C)
    report = run(store, grace_s=0)
    assert (report.deleted, report.open_saves) == ([], 1), "2 s are no difference"
    store.delete(Key(f"parts/{txn}/open"))
    store.later(1)
    begin(store, txn, step=None, name="main", bases=[])
    store.data(C)
    report = run(store, grace_s=0)
    assert (report.deleted, report.open_saves) == ([A, B], 1)
    end(store, txn)
    assert run(store, grace_s=0).deleted == [C]


def test_files_listed_before_a_save_wrote_them_again_are_spared_while_it_is_open(
    store: Store,
) -> None:
    store.data(A)
    run(store)
    store.later(700)
    txn = new_txn()
    begin(store, txn, step=None, name="main", bases=[])
    store.data(A)
    report = run(store)
    assert (report.deleted, report.spared) == ([], [A])
    end(store, txn)


def test_while_a_base_of_an_open_save_is_gone_nothing_is_listed(store: Store) -> None:
    store.data(A, B)
    store.index("main~0", A)
    store.later(60)
    txn = new_txn()
    begin(store, txn, step=None, name="main", bases=[("main", 0)])
    store.later(60)
    assert run(store).listed == [B]
    store.delete(Key("checkpoints/main~0.index"))
    store.later(700)
    assert run(store, grace_s=0).deleted == [], "what the base referred to, nobody can say"
    store.index("main~0", A, folder="quarantine")
    assert run(store, grace_s=0).deleted == [B], "set aside, it still says it"
    end(store, txn)
    assert store.has(A, B) == [True, False]


def test_an_open_file_that_is_not_understood_is_honoured_for_a_day(store: Store) -> None:
    store.data(A)
    store.later(60)
    txn = new_txn()
    store.put(Key(f"parts/{txn}/open"), b"?")
    store.put(Key(f"parts/{txn}/0"), b"fragment")
    store.later(ABANDONED_AFTER_S)
    report = run(store, grace_s=0)
    assert (report.deleted, report.abandoned, report.open_saves) == ([], [], 1)
    store.later(1)
    report = run(store, grace_s=0)
    assert (report.deleted, report.abandoned, report.open_saves) == ([A], [txn], 0)
    assert store.names("parts/") == []


def test_what_dead_and_committed_saves_left_is_removed_and_what_others_need_is_not(
    store: Store,
) -> None:
    dead, committed, live, unknown = (new_txn() for _ in range(4))
    for txn in (dead, committed, live):
        begin(store, txn, step=None, name="main", bases=[])
    for txn in (dead, committed, live, unknown):
        store.put(Key(f"tmp/{txn}-0"), b"x")
        store.put(Key(f"tmp/{txn}-3-0"), b"x")  # of rank 3
        store.put(Key(f"parts/{txn}/0"), b"x")
    foreign = ["tmp/notes.txt", "tmp/0123-0", "parts/readme", f"data/{A}.txt", "data/x", "gc/x"]
    for key in foreign:
        store.put(Key(key), b"x")
    store.put(Key("tmp/put-" + "0" * 32), b"x")
    store.put(Key("tmp/probe-" + "0" * 32 + "-a"), b"x")
    store.index("main~0", A, txn=committed)
    deactivate(dead)
    faulty = FaultyBackend(store)
    report = run(faulty, grace_s=0)
    assert sorted(report.abandoned) == sorted([dead, committed])
    for txn in (dead, committed):
        order = [op.key for op in faulty.log if op.kind == "delete" and txn in op.key]
        tmp = [f"tmp/{txn}-0", f"tmp/{txn}-3-0"]
        assert order == [f"parts/{txn}/0", f"parts/{txn}/open", *tmp]
    assert sum(key.startswith("tmp/") for key in store.names()) == 4 + 4
    store.later(TMP_AGE_S + SLACK_S + 1)
    run(store, grace_s=0)
    assert store.stat(Key(f"tmp/{unknown}-0")), "a save older than it is in flight"
    end(store, live)
    deactivate(committed)
    run(store, grace_s=0)
    assert store.names("tmp/") == ["tmp/0123-0", "tmp/notes.txt"]
    assert store.names("parts/") == ["parts/readme"]
    assert all(store.stat(Key(key)) for key in foreign)


# -- what must stop it


@pytest.mark.parametrize("folder", ["checkpoints", "quarantine"])
@pytest.mark.parametrize(
    ("data", "error"), [(b"rotten", CorruptError), (b"newer", UnsupportedError)]
)
@pytest.mark.parametrize("grace_s", [0.0, 600.0])
def test_an_index_that_cannot_be_read_stops_gc(
    store: Store, folder: str, data: bytes, error: type[Exception], grace_s: float
) -> None:
    store.data(A, B)
    run(store)
    store.later(700)
    key = f"{folder}/step-0000000000000001~0.index"
    store.put(Key(key), data)
    before = store.names()
    cure = "delete this file" if folder == "checkpoints" else "quarantined=True"
    with pytest.raises(error, match=f"deleted nothing.*{key}.*{cure}") as caught:
        run(store, grace_s=grace_s)
    assert getattr(caught.value, "kind").endswith("-unreadable-index")  # noqa: B009
    assert store.names() == before, "our list is taken back too"
    store.delete(Key(key))
    assert run(store).deleted == [A, B]


def test_files_that_are_no_indexes_are_not_read_nor_deleted(store: Store) -> None:
    for key in ("checkpoints/a.sig", "checkpoints/Main~0.index", "checkpoints/x/main~0.index"):
        store.put(Key(key), b"rotten")
    before = store.names()
    assert is_idle(run(store, grace_s=0))
    assert store.names() == before


@pytest.mark.parametrize(
    "marker",
    [
        {"format": "ckptfmt", "version": [2, 0], "requires_to_write": []},
        {"format": "ckptfmt", "version": [1, 0], "requires_to_write": ["delta-bases"]},
    ],
)
def test_gc_refuses_a_store_that_asks_for_more_than_it_knows(
    store: Store, marker: dict[str, object]
) -> None:
    store.data(A)
    store.put(MARKER, json.dumps(marker).encode())
    with pytest.raises(UnsupportedError, match="upgrade"):
        run(store, grace_s=0)
    assert store.has(A) == [True]


def test_a_folder_that_is_no_store_is_left_alone(store: Store) -> None:
    store.delete(MARKER)
    store.data(A)
    assert is_idle(run(store, grace_s=0))
    assert store.has(A) == [True]
    store.index("main~0", B)
    assert run(store, grace_s=0).deleted == [A], "a store that lost its mark"


def test_an_empty_place_has_nothing_to_collect(tmp_path: Path) -> None:
    assert is_idle(collect(open_backend(str(tmp_path / "none"))))
    assert not (tmp_path / "none").exists()


def test_a_store_without_times_allows_no_grace_and_no_save_in_flight() -> None:
    store = Store(time=False)
    store.data(A)
    with pytest.raises(UsageError, match=r"no times.*gc\(grace_s=0\)"):
        run(store)
    txn = new_txn()
    begin(store, txn, step=None, name="main", bases=[])
    with pytest.raises(UsageError, match=f"in flight.*parts/{txn}/open"):
        run(store, grace_s=0)
    assert store.has(A) == [True]
    assert store.names("gc/") == []
    end(store, txn)
    assert run(store, grace_s=0).deleted == [A]


def test_grace_must_exceed_the_age_of_a_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    store = Store(list_stale_s=120.0)
    store.data(A)
    for grace_s in (0.0, 120.0):
        with pytest.raises(UsageError, match="exceed"):
            run(store, grace_s=grace_s)
    run(store, grace_s=121)
    store.later(500)
    assert slept == []
    assert run(store, grace_s=121).deleted == [A]
    assert slept == [240.0], "between its list and its look"


def test_where_nobody_knows_how_stale_a_listing_is_nothing_is_deleted() -> None:
    store = Store(list_stale_s=None)
    store.data(A)
    with pytest.warns(CkptWarning, match="deletes nothing"):
        report = run(store, grace_s=0)
    assert report.dry_run
    assert store.has(A) == [True]


@pytest.mark.parametrize("grace_s", [-1.0, float("nan")])
def test_a_negative_grace_is_refused(store: Store, grace_s: float) -> None:
    with pytest.raises(UsageError, match="grace_s"):
        run(store, grace_s=grace_s)


# -- other collectors


def test_the_list_of_a_collector_at_work_is_left_alone_and_that_of_a_dead_one_finished(
    store: Store,
) -> None:
    store.data(A, B)
    mine, elsewhere = new_txn(), new_txn()
    activate(mine)
    put_list(store, mine, frozenset({A}), Owner.here())
    put_list(store, elsewhere, frozenset({B}), ELSEWHERE)
    store.index("main~0", A, B)
    store.later(700)
    run(store)
    assert {found.run for found in gc_lists(store)} == {mine, elsewhere}
    deactivate(mine)
    run(store)
    assert {found.run for found in gc_lists(store)} == {elsewhere}
    store.later(ABANDONED_AFTER_S)
    run(store)
    assert store.names("gc/") == []
    assert store.has(A, B) == [True, True]


def test_a_list_that_cannot_be_read_is_removed_after_a_day(store: Store) -> None:
    store.put(Key(f"gc/{new_txn()}"), b"?")
    store.later(ABANDONED_AFTER_S)
    run(store, grace_s=0)
    assert len(store.names("gc/")) == 1
    store.later(10)
    run(store, grace_s=0)
    assert store.names("gc/") == []


def test_our_own_list_stands_before_the_look_and_until_all_is_deleted(store: Store) -> None:
    store.data(A, B)
    run(store)
    store.later(700)
    (waiting,) = store.names("gc/")
    faulty = FaultyBackend(store)
    run(faulty)
    log = [(op.kind, op.key) for op in faulty.log]
    (own,) = {key for kind, key in log if kind == "create"}
    put, gone = log.index(("finish", own)), log.index(("delete", own))
    looks = [log.index(("list", f"{part}/")) for part in ("data", "parts", "checkpoints")]
    synced = log.index(("sync", "checkpoints/"))
    deleted = [log.index(("delete", f"data/{i}")) for i in (A, B)]
    taken = log.index(("delete", waiting))
    assert put < looks[0] < looks[1]
    last_look = max(i for i, call in enumerate(log) if call == ("list", "checkpoints/"))
    assert last_look < synced < deleted[0] < deleted[1] < taken < gone
    assert gone == len(log) - 1


def test_a_deletion_that_may_land_late_keeps_our_list(store: Store) -> None:
    def fail(operation: object) -> BaseException:
        return StorageError("timed out", reason="timeout", outcome_unknown=True)

    store.data(A, B)
    first = FaultyBackend(store, only=lambda op: op.key == f"data/{B}", fail_at=0, error=fail)
    with pytest.raises(StorageError, match="timed out"):
        run(first, grace_s=0)
    assert condemned(store) == {A, B}, "a save must write B under another id"
    assert run(store, grace_s=0).deleted == [B]
    assert condemned(store) == {A, B}, "only this process's end, or a day, gives it up"
    (left,) = gc_lists(store)
    deactivate(left.run)
    run(store, grace_s=0)
    assert store.names("gc/") == []


def test_a_deletion_that_failed_for_good_gives_the_list_back(store: Store) -> None:
    store.data(A, B)
    faulty = FaultyBackend(store, only=lambda op: op.key == f"data/{B}", fail_at=0)
    with pytest.raises(StorageError):
        run(faulty, grace_s=0)
    assert store.has(A, B) == [False, True]
    assert store.names("gc/") == []
    assert run(store, grace_s=0).deleted == [B]


@pytest.mark.parametrize(
    ("at", "left"), [("gc/", [A, B, C]), ("checkpoints/", [A, B, C]), (f"data/{A}", [B, C])]
)
def test_a_collector_that_was_stalled_stops_deleting(
    store: Store, monkeypatch: pytest.MonkeyPatch, at: str, left: list[str]
) -> None:
    """Its list may be gone by then, and a save may have written what it named."""
    monkeypatch.setattr(gc, "_clock", lambda: store.clock.now)
    store.data(A, B, C)
    put_list(store, new_txn(), frozenset({A, B, C}), None)
    store.later(700)
    stalled = FaultyBackend(
        store,
        delay_s=lambda op: (
            store.later(gc.WORK_S + 1) or 0.0  # type: ignore[func-returns-value]
            if op.key.startswith(at) and any(op.kind == "finish" for op in stalled.log)
            else 0.0
        ),
    )
    report = run(stalled)
    assert [i for i in (A, B, C) if store.has(i) == [True]] == left
    assert list(report.spared) == left
    assert run(store, grace_s=0).deleted == left


# -- generations, notes, marks


def test_a_replacement_that_was_killed_is_finished(store: Store) -> None:
    store.data(A, B)
    store.index("main~9", A)
    store.index("main~10", B)
    store.index("best~9", A)
    report = run(store, grace_s=0)
    assert store.names("checkpoints/") == ["checkpoints/best~9.index", "checkpoints/main~10.index"]
    assert report.deleted == []
    store.index("best~10", B)
    assert run(store, grace_s=0).deleted == [A]


def spoil_missing(store: Store) -> None:
    store.delete(Key(f"data/{B}"))


def spoil_short(store: Store) -> None:
    store.put(Key(f"data/{B}"), b"short")


def spoil_damaged(store: Store) -> None:
    store.put(Key(f"damaged/{B}"), b"")


def spoil_quarantined(store: Store) -> None:
    store.put(Key("quarantine/main~1.index"), store.get(Key("checkpoints/main~1.index")))


@pytest.mark.parametrize(
    "spoil", [spoil_missing, spoil_short, spoil_damaged, spoil_quarantined, None]
)
def test_a_lower_generation_stays_while_the_higher_is_not_whole(
    store: Store, spoil: Callable[[Store], None] | None
) -> None:
    store.data(A, B)
    store.index("main~0", A)
    store.index("main~1", B)
    if spoil is not None:
        spoil(store)
    run(store, grace_s=0, whole=spoil is not None)
    assert store.has(A) == [True]
    assert store.stat(Key("checkpoints/main~0.index")) is not None


def test_a_lower_generation_stays_while_the_save_of_the_higher_may_withdraw_it(
    store: Store,
) -> None:
    store.data(A, B)
    store.index("main~0", A)
    txn = new_txn()
    begin(store, txn, step=None, name="main", bases=[("main", 0)])
    store.index("main~1", B, txn=txn)
    for _ in range(2):
        run(store, grace_s=0)
        assert store.names("parts/") == [f"parts/{txn}/open"]
        assert len(store.names("checkpoints/")) == 2
    deactivate(txn)
    run(store, grace_s=0)
    assert store.names("parts/") == []
    assert store.names("checkpoints/") == ["checkpoints/main~1.index"]


def test_notes_go_with_the_last_index_of_their_save(store: Store) -> None:
    kept, aside, gone = (new_txn() for _ in range(3))
    store.index("main~0", txn=kept)
    store.index("best~0", txn=aside, folder="quarantine")
    for txn in (kept, aside, gone):
        for n in (0, 10):
            store.put(Key(f"notes/{txn}~{n}.index"), b"note")
    store.put(Key(f"notes/{gone}~01.index"), b"not ours")
    live = new_txn()
    begin(store, live, step=None, name="x", bases=[])
    run(store, grace_s=0)
    assert len(store.names("notes/")) == 7, "not older than the save in flight"
    end(store, live)
    run(store, grace_s=0)
    assert store.names("notes/") == sorted(
        [f"notes/{t}~{n}.index" for t in (kept, aside) for n in (0, 10)]
        + [f"notes/{gone}~01.index"]
    )


def test_a_note_of_a_checkpoint_committed_during_the_look_stays(store: Store) -> None:
    txn = new_txn()

    class Late(FaultyBackend):
        def delete(self, key: Key) -> None:
            super().delete(key)
            if not store.names("notes/"):  # after the look, before notes are cleaned
                store.index("main~0", txn=txn)
                store.put(Key(f"notes/{txn}~0.index"), b"note")

    store.data(A)
    run(Late(store), grace_s=0)
    assert store.names("notes/") == [f"notes/{txn}~0.index"]


def test_marks_of_deleted_files_go_and_those_of_files_that_are_there_or_missed_stay(
    store: Store,
) -> None:
    store.data(A, B)
    store.index("main~0", A, C)
    for i in (A, B, C, D, "notes"):
        store.put(Key(f"damaged/{i}"), b"")
    run(store, grace_s=0)
    assert store.names("damaged/") == [f"damaged/{A}", f"damaged/{C}", "damaged/notes"]


# -- crashes


def scene() -> tuple[Store, str]:
    """Garbage on a due list and not, a replacement left half done, a dead save."""
    store = Store()
    store.data(A, B, C, D)
    store.index("main~0", A)
    store.index("main~1", B)
    put_list(store, new_txn(), frozenset({C}), None)
    dead = new_txn()
    store.put(Key(f"parts/{dead}/open"), b"")
    store.put(Key(f"parts/{dead}/0"), b"x")
    store.put(Key(f"tmp/{dead}-0"), b"x")
    store.later(700)
    return store, dead


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", ["once", "from"])
@pytest.mark.parametrize("grace_s", [0.0, 600.0])
def test_a_run_that_fails_at_any_operation_loses_nothing_and_the_next_finishes(
    grace_s: float, mode: str, when: str
) -> None:
    for k in range(1000):
        store, _ = scene()
        faulty = FaultyBackend(store, fail_at=k, mode=mode, when=when)  # type: ignore[arg-type]
        try:
            run(faulty, grace_s=grace_s)
        except StorageError:
            assert faulty.fired
        indexes = [json.loads(bytes(store.get(Key(key)))) for key in store.names("checkpoints/")]
        assert any(B in files for _, files in indexes)
        assert all(store.has(*files) == [True] for _, files in indexes)
        store.later(ABANDONED_AFTER_S + 10)  # whatever list was left behind
        run(store, grace_s=0)
        assert store.names() == ["checkpoints/main~1.index", "ckptfmt.json", f"data/{B}"]
        if not faulty.fired:
            assert k > 15
            return
    pytest.fail("never finished")


def test_the_default_grace_is_ten_minutes_and_no_warning_is_given(store: Store) -> None:
    store.data(A)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect(store)
        store.later(599)
        collect(store)
        assert store.has(A) == [True]
        store.later(4)
        assert collect(store).deleted == [A]


def test_an_index_deleted_between_listing_and_reading_is_no_reference(store: Store) -> None:
    store.data(A)
    store.index("main~0", A)

    def vanish(backend: Backend, entry: Entry) -> References:
        raise NotFoundError("no such object", reason="object", where=entry.key)

    report = collect(store, grace_s=0, refer=vanish, complete=lambda backend, entry: True)
    assert report.deleted == [A]
