"""Open saves, the collector's lists and the store's marker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptfmt.engine import coordinate
from ckptfmt.engine.coordinate import (
    ABANDONED_AFTER_S,
    MARKER,
    begin,
    check_store_marker,
    condemned,
    end,
    ensure_store_marker,
    is_abandoned,
    new_txn,
    open_saves,
    parse_open,
    put_list,
    unusable,
)
from ckptfmt.engine.owner import Owner, activate, deactivate
from ckptfmt.errors import CorruptError, StorageError, UnsupportedError
from ckptfmt.storage import Backend, open_backend
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.testing import FaultyBackend
from ckptfmt.types import Key

TXN = "0123456789abcdef" * 2
A, B, C = "a" * 32, "b" * 32, "c" * 64


@pytest.fixture(params=["memory", "local"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    made = MemoryBackend() if request.param == "memory" else open_backend(str(tmp_path / "store"))
    yield made
    made.close()


def keys(backend: Backend) -> list[str]:
    return [entry.key for entry in backend.list("")]


# -- open saves


def test_a_transaction_is_32_new_hex_digits() -> None:
    drawn = {new_txn() for _ in range(100)}
    assert len(drawn) == 100
    assert all(re.fullmatch("[0-9a-f]{32}", txn) for txn in drawn)


def test_an_open_save_says_what_it_will_commit_from_what_and_who_it_is(backend: Backend) -> None:
    begin(backend, TXN, step=7, name="step-0000000000000007", bases=[("main", 3), ("best", 0)])
    (save,) = open_saves(backend)
    assert (save.txn, save.step, save.name) == (TXN, 7, "step-0000000000000007")
    assert save.bases == (("main", 3), ("best", 0))
    assert save.owner == Owner.here()
    assert save.owner.pid == os.getpid()
    assert save.time_s is not None
    end(backend, TXN)
    assert open_saves(backend) == []
    assert keys(backend) == []


def test_a_save_ends_with_its_open_file(backend: Backend) -> None:
    faulty = FaultyBackend(backend)
    begin(faulty, TXN, step=None, name="main", bases=[])
    for fragment in ("zz", "0", "open.d/x"):
        backend.put(Key(f"parts/{TXN}/{fragment}"), b"x")
    backend.put(Key("parts/other"), b"x")
    end(faulty, TXN)
    deleted = [op.key for op in faulty.log if op.kind == "delete"]
    assert len(deleted) == 4
    assert deleted[-1] == f"parts/{TXN}/open"
    assert keys(backend) == ["parts/other"]


def test_a_save_in_flight_in_this_process_is_not_abandoned(backend: Backend) -> None:
    begin(backend, TXN, step=None, name="main", bases=[])
    (save,) = open_saves(backend)
    assert not is_abandoned(save, 0.0)
    assert not is_abandoned(save, ABANDONED_AFTER_S)
    assert is_abandoned(save, ABANDONED_AFTER_S + 1)
    end(backend, TXN)
    assert is_abandoned(save, 0.0)


def test_a_save_that_could_not_clean_up_is_abandoned_though_its_process_lives(
    backend: Backend,
) -> None:
    begin(backend, TXN, step=None, name="main", bases=[])
    with pytest.raises(StorageError):
        end(FaultyBackend(backend, fail_at=0, mode="from"), TXN)
    (save,) = open_saves(backend)
    assert is_abandoned(save, None)


def test_a_save_that_could_not_announce_itself_is_not_in_flight() -> None:
    backend = MemoryBackend()
    with pytest.raises(StorageError):
        begin(FaultyBackend(backend, fail_at=0), TXN, step=None, name="main", bases=[])
    begin(backend, TXN, step=None, name="main", bases=[])
    (save,) = open_saves(backend)
    deactivate(TXN)
    assert is_abandoned(save, None)


CHILD = """
import sys
from ckptfmt.engine.coordinate import begin
from ckptfmt.storage import open_backend
begin(open_backend(sys.argv[1]), sys.argv[2], step=None, name="main", bases=[])
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_save_whose_process_was_killed_is_abandoned_at_once(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), TXN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        (save,) = open_saves(open_backend(str(tmp_path)))
        assert not is_abandoned(save, 3600.0)
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_abandoned(save, 0.0), "killed, and its parent has not waited for it yet"
    assert is_abandoned(save, 0.0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("field", ["host", "boot_id", "pid_namespace"])
def test_nothing_is_known_of_a_process_elsewhere(field: str) -> None:
    dead = replace(Owner.here(), pid=2**22 + 12345, start_time=1)
    assert dead.is_dead(TXN)
    for fact in ("another", None):
        assert not Owner.of_json({**dead.to_json(), field: fact}).is_dead(TXN)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_with_a_reused_pid_is_another_process() -> None:
    here = Owner.here()
    assert here.start_time is not None
    activate(TXN)
    try:
        assert not here.is_dead(TXN)
        assert replace(here, start_time=here.start_time - 1).is_dead(TXN)
        assert not replace(here, start_time=None).is_dead(TXN)
        assert not replace(here, pid=None).is_dead(TXN)
        init = Owner.here()
        assert not replace(init, pid=1, start_time=coordinate_start(1)).is_dead(TXN)
    finally:
        deactivate(TXN)


def coordinate_start(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


GARBAGE = [
    b"{]",
    b"null",
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"bases": [[1, 2]]}',
    b'{"bases": {"main": 0}}',
    b'{"bases": [["main"]]}',
    b'{"bases": [["main", true]]}',
    b'{"pid": -1, "start_time": 0}',
    b'{"pid": ' + b"9" * 5000 + b"}",
    b'{"pid": 1e999, "host": [], "step": NaN}',
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_an_open_file_that_is_not_understood_counts_as_open_and_reuses_anything(
    backend: Backend, data: bytes
) -> None:
    backend.put(coordinate.open_key(TXN), data)
    (save,) = open_saves(backend)
    assert save.bases is None
    assert not is_abandoned(save, ABANDONED_AFTER_S)
    assert is_abandoned(save, ABANDONED_AFTER_S + 1)
    assert not is_abandoned(save, None)


def test_a_huge_open_file_is_not_read(backend: Backend) -> None:
    backend.put(coordinate.open_key(TXN), b" " * (1 << 20) + b"{}")
    faulty = FaultyBackend(backend)
    (save,) = open_saves(faulty)
    assert save.bases is None
    assert [op.kind for op in faulty.log] == ["list"]


def test_facts_that_make_no_sense_are_no_facts() -> None:
    here = Owner.here()
    document = {"step": None, "name": "main", "bases": [], **here.to_json()}
    for pid in (0, -1, True, "1", 2**70, None):
        save = parse_open(TXN, json.dumps({**document, "pid": pid}).encode())
        assert save.owner.pid is None
        assert not is_abandoned(save, 0.0)


def test_an_open_file_without_all_its_bytes_is_of_a_machine_that_crashed(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path))
    whole = b'{"step": null, "name": "main"'
    for data in (b"", b"\0" * 200, whole, whole[:4], whole[:1] + b"\0" * 99):
        backend.put(coordinate.open_key(TXN), data)
        (save,) = open_saves(backend)
        assert is_abandoned(save, 0.0)
    remote = MemoryBackend(storage_options={"late_key": False})
    remote.put(coordinate.open_key(TXN), b"")
    (save,) = open_saves(remote)
    assert not is_abandoned(save, 0.0), "another machine's save may be alive"
    begin(backend, TXN, step=None, name="main", bases=[])
    (save,) = open_saves(backend)
    assert not save.torn
    end(backend, TXN)


def test_files_of_other_patterns_are_no_open_saves(backend: Backend) -> None:
    for key in ("parts/abc/open", f"parts/{TXN.upper()}/open", f"parts/{TXN}/x/open", "parts/open"):
        backend.put(Key(key), b"{}")
    assert open_saves(backend) == []


# -- lists


def test_ids_in_any_list_are_condemned(backend: Backend) -> None:
    assert condemned(backend) == set()
    put_list(backend, new_txn(), frozenset({A, B}), None)
    put_list(backend, new_txn(), frozenset({C}), Owner.here())
    backend.put(Key("gc/README"), b"not ours")
    assert condemned(backend) == {A, B, C}


@pytest.mark.parametrize("data", [b"", b"{}", b'{"ids": [1]}', b'{"ids": "a"}', b"\xff"])
def test_a_list_that_cannot_be_read_stops_a_save_and_names_the_file(
    backend: Backend, data: bytes
) -> None:
    backend.put(Key(f"gc/{TXN}"), data)
    with pytest.raises(CorruptError, match=f"gc/{TXN}.*delete this file") as caught:
        condemned(backend)
    assert caught.value.kind == "corrupt-gc-list"


def test_files_that_are_named_missing_or_of_another_size_are_unusable(backend: Backend) -> None:
    backend.put(Key(f"data/{A}"), b"12345")
    backend.put(Key(f"data/{B}"), b"12345")
    put_list(backend, new_txn(), frozenset({B}), None)
    assert unusable(backend, {}) == set()
    assert unusable(backend, {A: 5}) == set()
    assert unusable(backend, {A: 4}) == {A}
    assert unusable(backend, {A: 5, B: 5, C: 5}) == {B, C}


@pytest.mark.parametrize("count", [3, 500])
def test_the_lists_are_read_before_any_size(count: int) -> None:
    inner = MemoryBackend()
    put_list(inner, new_txn(), frozenset({A}), None)
    files = {f"{i:032x}": 3 for i in range(count)}
    for i in files:
        inner.put(Key(f"data/{i}"), b"abc")
    backend = FaultyBackend(inner)
    assert unusable(backend, files) == set()
    calls = [(op.kind, op.key.partition("/")[0]) for op in backend.log]
    last_list = max(i for i, call in enumerate(calls) if call[1] == "gc")
    first_size = min(i for i, call in enumerate(calls) if call[1] == "data")
    assert last_list < first_size
    assert len(calls) < 10, "many files are sized by one listing"


def test_a_listing_that_may_be_stale_sizes_nothing() -> None:
    class Stale(MemoryBackend):
        @property
        def capabilities(self):  # type: ignore[no-untyped-def]
            return replace(super().capabilities, list_stale_s=60.0)

    inner = Stale()
    files = {f"{i:032x}": 3 for i in range(200)}
    for i in files:
        inner.put(Key(f"data/{i}"), b"abc")
    backend = FaultyBackend(inner)
    assert unusable(backend, files) == set()
    assert [op.key for op in backend.log if op.kind == "list"] == ["gc/"]


# -- marker


def test_the_first_save_marks_the_store_and_later_ones_leave_the_mark(backend: Backend) -> None:
    assert check_store_marker(backend) is False
    ensure_store_marker(backend)
    text = bytes(backend.get(MARKER))
    assert json.loads(text) == {"format": "ckptfmt", "version": [1, 0], "requires_to_write": []}
    newer = {"format": "ckptfmt", "version": [1, 9], "requires_to_write": [], "unknown": 1}
    backend.put(MARKER, json.dumps(newer).encode())
    ensure_store_marker(backend)
    assert json.loads(bytes(backend.get(MARKER))) == newer
    assert check_store_marker(backend) is True


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"version": [2, 0]}, "unsupported-version"),
        ({"requires_to_write": ["delta-bases"]}, "unsupported-requires-to-write"),
        ({"requires_to_write": [{}]}, "unsupported-requires-to-write"),
    ],
)
def test_a_writer_refuses_a_store_that_asks_for_more(
    backend: Backend, change: dict[str, object], kind: str
) -> None:
    marker = {"format": "ckptfmt", "version": [1, 0], "requires_to_write": [], **change}
    backend.put(MARKER, json.dumps(marker).encode())
    for check in (check_store_marker, ensure_store_marker):
        with pytest.raises(UnsupportedError, match="upgrade ckptfmt") as caught:
            check(backend)
        assert caught.value.kind == kind
    assert check_store_marker(backend, for_write=False)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"format": "other", "version": [1, 0], "requires_to_write": []}',
        b'{"format": "ckptfmt", "version": 1, "requires_to_write": []}',
        b'{"format": "ckptfmt", "version": [1, 0]}',
        b'{"format": "ckptfmt", "version": [true, 0], "requires_to_write": []}',
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_marker_is_not_believed(backend: Backend, data: bytes) -> None:
    backend.put(MARKER, data)
    with pytest.raises(CorruptError, match=r"ckptfmt\.json"):
        check_store_marker(backend)
