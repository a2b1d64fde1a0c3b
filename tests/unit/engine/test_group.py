"""Ranks that save together, through files in the store; here each is a thread."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import ConflictError, FileGroup, MismatchError, Sharded, UsageError
from ckptfmt.engine import file_group, per_rank
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.file_group import place_of
from ckptfmt.engine.group import Meeting, pack_error, ranks_of, unpack_error

TIMEOUT_S = 30.0


def together(call: Callable[[int], Any], size: int) -> list[Any]:
    """What each rank returns or raises."""

    def one(rank: int) -> Any:
        try:
            return call(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def tree(rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    whole = np.random.default_rng(seed).standard_normal((10, 3))
    start, stop = (len(whole) * r // size for r in (rank, rank + 1))
    return {
        "w": Sharded(whole.shape, [((start, 0), whole[start:stop])]),
        "same": np.arange(100),
        "step": seed,
    }


def check(path: Path, seed: int = 0) -> None:
    loaded = ckptfmt.load(path)
    np.testing.assert_array_equal(loaded["w"], np.random.default_rng(seed).standard_normal((10, 3)))
    assert loaded["step"] == seed


@pytest.fixture(autouse=True)
def _processes_end() -> Iterator[None]:
    yield
    end_of_processes()


def end_of_processes() -> None:
    """As if the processes of all ranks here had ended in order."""
    for member in file_group._members.values():
        member.presence.end()
    file_group._members.clear()


def left(path: Path) -> list[Path]:
    return sorted(p for p in (path / "parts").rglob("*") if p.is_file())


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_saves_one_checkpoint(tmp_path: Path, size: int) -> None:
    def save(rank: int) -> Any:
        group = FileGroup(rank, size)
        return [
            ckptfmt.save(tree(rank, size, s), tmp_path, step=s, group=group, timeout_s=TIMEOUT_S)
            for s in (1, 2)
        ]

    infos = together(save, size)
    assert all(info == infos[0] for info in infos), infos
    assert [info.step for info in infos[0]] == [1, 2]
    check(tmp_path, 2)
    assert left(tmp_path) == []
    assert ckptfmt.Store(tmp_path).verify().ok


def background(path: Path, rank: int, size: int) -> Any:
    mine = tree(rank, size, 5)
    group = FileGroup(rank, size)
    future = ckptfmt.save_async(mine, path, step=5, group=group, timeout_s=TIMEOUT_S)
    mine["same"][:] = 7
    for _, array in mine["w"].parts:
        array[:] = 0
    return future.result()


def test_a_group_saves_in_the_background(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(background, tmp_path, rank, 2) for rank in range(2)]
        infos = [future.result(60) for future in futures]
    assert infos[0] == infos[1]
    assert infos[0].name == "step-0000000000000005"
    check(tmp_path, 5)
    np.testing.assert_array_equal(ckptfmt.load(tmp_path)["same"], np.arange(100))
    assert left(tmp_path) == []


def test_a_kept_name_is_given_to_all(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1)
    infos = together(
        lambda rank: ckptfmt.save(
            tree(rank, 2), tmp_path, step=1, if_exists="keep", group=FileGroup(rank, 2)
        ),
        2,
    )
    assert infos[0] == infos[1] == ckptfmt.Store(tmp_path).latest()


def failures(found: Sequence[Any], kind: type[Exception], text: str) -> None:
    for error in found:
        assert isinstance(error, kind), found
        assert text in str(error), found


def test_a_rank_that_does_not_come_is_named_and_nothing_is_committed(tmp_path: Path) -> None:
    found = together(
        lambda rank: ckptfmt.save(
            tree(rank, 4), tmp_path, step=1, group=FileGroup(rank, 4), timeout_s=1.0
        ),
        2,
    )
    assert "ranks 2, 3" in str(found[0])
    assert found[0].kind == "conflict-rank-late"
    failures(found, ConflictError, "did not answer in time")
    assert ckptfmt.Store(tmp_path).names() == []
    assert [p.parent.name for p in left(tmp_path) if p.name == "open"] == []
    end_of_processes()
    assert left(tmp_path) == []


def test_a_rank_that_hangs_while_its_process_lives_is_told_early_with_its_last_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process lives, so it is not gone: the others would wait for the whole timeout, and not know
    for whom."""
    monkeypatch.setattr("ckptfmt.engine.group.LOOK_S", 0.05)
    monkeypatch.setattr("ckptfmt.engine.group.TELL_S", 0.2)
    caplog.set_level("WARNING", "ckptfmt.engine")

    def run(rank: int) -> Any:
        group = FileGroup(rank, 3)
        ckptfmt.save(tree(rank, 3), tmp_path, step=119, group=group)
        if rank == 2:
            return None  # it hangs in its own code from here on
        return ckptfmt.save(tree(rank, 3), tmp_path, step=120, group=group, timeout_s=2.0)

    found = together(run, 3)
    who = f"rank 2 ({socket.gethostname()}, process {os.getpid()}): its last call was the save of "
    who += "step-0000000000000119, "
    told = [text for text in caplog.messages if who in text]
    assert told, caplog.messages
    assert "s in the save of step-0000000000000120 for rank " in told[0]
    assert "its process is alive" in told[0]
    for error in found[:2]:
        assert error.kind == "conflict-rank-late"
        assert who in str(error)  # another may be late as well, on a busy machine
        assert "its process is alive" in str(error)
    end_of_processes()


def test_rank_0_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match=r"in time: rank 0"):
        ckptfmt.save({}, tmp_path, step=1, group=FileGroup(1, 2), timeout_s=0.3)
    assert left(tmp_path) == []


def test_a_rank_that_fails_makes_all_fail_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(rank: int) -> Any:
        mine = tree(rank, 3)
        if rank == 2:
            mine["bad"] = object()
        return ckptfmt.save(mine, tmp_path, step=1, group=FileGroup(rank, 3), timeout_s=TIMEOUT_S)

    found = together(save, 3)
    failures(found, UsageError, "bad")
    assert "rank 2: " in str(found[0])
    assert "rank 2: " not in str(found[2])  # its own
    module = __import__("importlib").import_module("ckptfmt.engine.group_save")
    real = module.write_part

    def full(backend: Any, part: Any, shares: Any) -> bytes:
        if part.rank == 1:
            raise ckptfmt.StorageError("disk full", reason="no-space")
        return bytes(real(backend, part, shares))

    monkeypatch.setattr(module, "write_part", full)
    again = together(
        lambda rank: ckptfmt.save(
            tree(rank, 3), tmp_path, step=1, group=FileGroup(rank, 3), timeout_s=TIMEOUT_S
        ),
        3,
    )
    failures(again, ckptfmt.StorageError, "disk full")
    assert ckptfmt.Store(tmp_path).names() == []
    assert left(tmp_path) == []


def test_replicas_that_differ_make_all_raise(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        mine = tree(rank, 2)
        mine["same"][5] = rank
        return ckptfmt.save(mine, tmp_path, step=1, group=FileGroup(rank, 2), timeout_s=TIMEOUT_S)

    failures(together(save, 2), MismatchError, "'same': expected equal bytes, found ranks 0, 1")
    assert ckptfmt.Store(tmp_path).names() == []


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    found = together(
        lambda rank: ckptfmt.save(
            tree(rank, 2), tmp_path, step=rank, group=FileGroup(rank, 2), timeout_s=TIMEOUT_S
        ),
        2,
    )
    failures(found, UsageError, "ranks do not save the same checkpoint: rank 1")


def test_a_call_that_is_wrong_on_one_rank_is_heard_by_all(tmp_path: Path) -> None:
    found = together(
        lambda rank: ckptfmt.save(
            tree(rank, 2),
            tmp_path,
            step=1 - 2 * rank,
            group=FileGroup(rank, 2),
            timeout_s=TIMEOUT_S,
        ),
        2,
    )
    failures(found, UsageError, "step")


def test_files_of_an_earlier_attempt_lead_nowhere(tmp_path: Path) -> None:
    """Hellos and an answer of processes that are gone, and the fragments of their save."""
    together(
        lambda rank: ckptfmt.save(
            tree(rank, 3), tmp_path, step=1, group=FileGroup(rank, 3), timeout_s=0.5
        ),
        2,
    )
    file_group._members.clear()  # as if killed
    folder = tmp_path / "parts" / place_of(3, 0)
    life = "0" * 32
    for rank in (1, 2):  # of another machine: nobody knows whether they live
        hello = {"life": life, "host": "elsewhere", "lost_after_s": 0.001}
        (folder / f"hello-{rank}-{life}").write_text(json.dumps(hello))
        (folder / f"left-{rank}-{life}").write_text("{}")
    answer = {"host": {"life": life}, "ranks": {"1": [life, None], "2": [life, {"": 7}]}}
    (folder / "answer").write_text(json.dumps(answer))

    def save(rank: int) -> Any:
        if rank:
            threading.Event().wait(0.2 * rank)  # rank 0 has answered the old ones by now
        return ckptfmt.save(
            tree(rank, 3, 4), tmp_path, step=4, group=FileGroup(rank, 3), timeout_s=TIMEOUT_S
        )

    infos = together(save, 3)
    assert [info.step for info in infos] == [4, 4, 4], infos
    check(tmp_path, 4)
    end_of_processes()
    ckptfmt.save({}, tmp_path, step=5)  # which cleans up behind dead processes
    sessions = {p.parent.name for p in left(tmp_path)}
    assert all(not (tmp_path / "parts" / name / "open").exists() for name in sessions)


def test_two_attempts_that_are_alive_do_not_meet(tmp_path: Path) -> None:
    found = together(
        lambda rank: ckptfmt.save(
            tree(rank, 2), tmp_path, step=1, group=FileGroup(rank, 2, attempt=rank), timeout_s=0.5
        ),
        2,
    )
    failures(found, ConflictError, "did not answer in time")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_are_restored_at_any_number_of_ranks(tmp_path: Path, size: int) -> None:
    together(
        lambda rank: ckptfmt.save(
            tree(rank, 3, 6), tmp_path, step=6, group=FileGroup(rank, 3), timeout_s=TIMEOUT_S
        ),
        3,
    )
    targets = [tree(rank, size, 7) for rank in range(size)]

    def restore(rank: int) -> Any:
        return bool(ckptfmt.restore(targets[rank], tmp_path, group=FileGroup(rank, size)))

    assert together(restore, size) == [True] * size
    for rank, found in enumerate(targets):
        expected = tree(rank, size, 6)
        for (at, one), (where, other) in zip(found["w"].parts, expected["w"].parts, strict=True):
            assert at == where
            np.testing.assert_array_equal(one, other)
        assert found["step"] == 6
    assert left(tmp_path) == []


def test_an_error_of_one_rank_while_it_binds_takes_all_of_them_back(tmp_path: Path) -> None:
    class Picky:
        def __init__(self, rank: int) -> None:
            self.rank, self.value = rank, 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.rank == 1 and state["value"] == 5:
                raise ZeroDivisionError("not this one")
            self.value = state["value"]

    saved = Picky(0)
    saved.value = 5
    ckptfmt.save({"a": saved, "w": np.ones(3)}, tmp_path, step=1)
    targets = [{"a": Picky(rank), "w": np.zeros(3)} for rank in range(2)]
    found = together(
        lambda rank: ckptfmt.restore(targets[rank], tmp_path, group=FileGroup(rank, 2)), 2
    )
    assert "rank 1: found ZeroDivisionError: not this one" in str(found[0])
    assert isinstance(found[1], ZeroDivisionError)
    for target in targets:
        assert target["a"].value == 0  # type: ignore[attr-defined]
        np.testing.assert_array_equal(target["w"], 0.0)


def test_per_rank_values_come_back_to_their_rank_and_need_as_many(tmp_path: Path) -> None:
    together(
        lambda rank: ckptfmt.save(
            {"own": per_rank({"r": rank})}, tmp_path, step=1, group=FileGroup(rank, 2)
        ),
        2,
    )
    targets = [{"own": per_rank({"r": -1})} for _ in range(3)]
    together(lambda r: ckptfmt.restore(targets[r], tmp_path, group=FileGroup(r, 2)), 2)
    assert [t["own"].value for t in targets] == [{"r": 0}, {"r": 1}, {"r": -1}]
    found = together(lambda r: ckptfmt.restore(targets[r], tmp_path, group=FileGroup(r, 3)), 3)
    failures(found, MismatchError, "a value for each of 2 ranks")


# -- rounds and errors


def test_an_error_crosses_ranks_as_plain_data() -> None:
    error = ckptfmt.CorruptError("torn", reason="magic", where="x", expected=1, found=b"\0", do="y")
    made = unpack_error(pack_error(error, 3))
    assert (type(made), made.kind, made.where) == (ckptfmt.CorruptError, "corrupt-magic", "x")
    assert str(made) == r"rank 3: torn: x: expected 1, found b'\x00'; y"
    other = unpack_error(pack_error(ZeroDivisionError("1 / 0"), 2))
    assert other.kind == "conflict-rank-failed"
    assert "rank 2: found ZeroDivisionError: 1 / 0" in str(other)


def test_whoever_hears_the_alarm_finds_the_error_at_once() -> None:
    """Rank 1 is stopped after each thing that it says, until rank 0 has looked around."""
    said: dict[str, bytes] = {}
    looked, gone = threading.Event(), threading.Event()

    class Slow:
        size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def meet(self, backend: Any, timeout_s: float) -> Slow:
            return self

        def put(self, key: str, data: bytes) -> None:
            said[key] = data
            if self.rank == 1:
                looked.clear()
                while not (looked.wait(0.01) or gone.is_set()):
                    pass

        def get(self, key: str) -> bytes | None:
            return said.get(key)

        def has(self, keys: Sequence[str]) -> bool:
            return all(key in said for key in keys)

        def tend(self) -> None:
            looked.set()

        def gone(self, ranks: Sequence[int]) -> list[Any]:
            return []

        def came(self, rank: int, to: str) -> None: ...
        def describe(self, rank: int) -> str:
            return f"rank {rank}"

        def close(self) -> None:
            gone.set()

    def fail(rank: int) -> bytes:
        if rank == 1:
            raise ZeroDivisionError("not this one")
        return b""

    def talk(rank: int) -> Any:
        with Meeting(Slow(rank), None, 5.0) as meeting:  # type: ignore[arg-type]
            return meeting.round(lambda: fail(rank))

    found = together(talk, 2)
    assert "rank 1: found ZeroDivisionError: not this one" in str(found[0])
    assert isinstance(found[1], ZeroDivisionError)


def test_a_rank_that_comes_again_does_not_get_into_the_meeting_that_it_left(
    tmp_path: Path,
) -> None:
    """It failed, and its next call says hello while rank 0 still waits for a third one."""
    backend = ckptfmt.Store(tmp_path).backend
    host = FileGroup(0, 3).meet(backend, TIMEOUT_S)
    came: list[Any] = []

    def come() -> None:
        guest = FileGroup(1, 3).meet(backend, TIMEOUT_S)
        guest.put("0-1", b"all is lost")
        guest.close()
        came.append(FileGroup(1, 3).meet(backend, 1.0))

    thread = threading.Thread(target=come)
    thread.start()
    while thread.is_alive():
        host.tend()
        time.sleep(0.01)
    assert host.get("0-1") == b"all is lost"
    assert came[0].get("0-1") is None
    came[0].put("0-1", b"and on we go")
    assert host.get("0-1") == b"all is lost"
    host.close()
    host = FileGroup(0, 3).meet(backend, TIMEOUT_S)
    assert host.get("0-1") == b"and on we go"
    host.close()
    end_of_processes()
    assert left(tmp_path) == []


def test_a_rank_that_is_late_hears_of_its_own_meeting_and_spoils_no_other(tmp_path: Path) -> None:
    """However late: it comes to its first save when the others wait for it in their third."""
    third = threading.Event()

    def run(rank: int) -> list[str]:
        found = []
        for step in (1, 2, 3):
            if rank == 2 and step == 1:
                third.wait(60)
            if rank == 0 and step == 3:
                third.set()
            try:
                ckptfmt.save(
                    tree(rank, 3, step), tmp_path, step=step, group=FileGroup(rank, 3),
                    timeout_s=1.0 if step < 3 else TIMEOUT_S,
                )  # fmt: skip
                found.append("saved")
            except ConflictError as error:
                found.append(error.kind)
        return found

    assert together(run, 3) == [["conflict-rank-late", "conflict-rank-late", "saved"]] * 3
    assert ckptfmt.Store(tmp_path).steps() == [3]
    check(tmp_path, 3)
    assert left(tmp_path) == []


def save(path: Path, rank: int, size: int, step: int) -> Any:
    """With a timeout that no test waits for."""
    group = FileGroup(rank, size)
    return ckptfmt.save(tree(rank, size, step), path, step=step, group=group, timeout_s=600.0)


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_leaves_says_why_and_may_come_back(tmp_path: Path, leaver: int) -> None:
    def run(rank: int) -> Any:
        save(tmp_path, rank, 3, 1)
        if rank == leaver:
            backend = ckptfmt.Store(tmp_path).backend
            FileGroup(rank, 3).leave(backend, ZeroDivisionError("no data"))
            found = ""
        else:
            with pytest.raises(ConflictError, match="is gone") as caught:
                save(tmp_path, rank, 3, 2)
            assert caught.value.kind == "conflict-rank-gone"
            found = str(caught.value)
        return found, save(tmp_path, rank, 3, 3).step

    made = together(run, 3)
    assert [row[1] for row in made] == [3] * 3, made
    for rank, (found, _) in enumerate(made):
        if rank != leaver:
            assert f"rank {leaver} (" in found
            assert f"process {os.getpid()}" in found
            assert "ZeroDivisionError: no data" in found
    assert ckptfmt.Store(tmp_path).steps() == [1, 3]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_was_started_again_meets_nobody_who_has_not_heard_of_it(
    tmp_path: Path, leaver: int
) -> None:
    """The thread of a save hears that it is gone; the loop would take it for the one of before."""
    backend = ckptfmt.Store(tmp_path).backend

    def talk(rank: int, line: str, what: bytes) -> bytes:
        with Meeting(FileGroup(rank, 2).beside(line), backend, 600.0) as meeting:
            return meeting.round(lambda: what, b" ".join)

    def run(rank: int) -> Any:
        for line in ("save", "loop"):
            talk(rank, line, b"first")
        if rank == leaver:
            FileGroup(rank, 2).leave(backend, ZeroDivisionError("no data"))
        else:
            for line, what in (("save", b"shares"), ("loop", b"step 7")):
                with pytest.raises(ConflictError, match="is gone"):
                    talk(rank, line, what)
        return talk(rank, "loop", b"restore")

    assert together(run, 2) == [b"restore restore"] * 2


VICTIM = """
import importlib, os, signal, sys
import numpy as np
import ckptfmt
from ckptfmt.storage import process

path, rank, size, how, host, lost_after_s = sys.argv[1:]
rank, size = int(rank), int(size)
facts = process._facts
process._facts = lambda pid: (host or facts(pid)[0], *facts(pid)[1:])
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def state():
    whole = np.arange(60.0).reshape(20, 3)
    start, stop = (20 * r // size for r in (rank, rank + 1))
    return {"w": ckptfmt.Sharded(whole.shape, [((start, 0), whole[start:stop])])}
group = ckptfmt.FileGroup(rank, size, lost_after_s=float(lost_after_s))
for step in (1, 2, 3):
    if step == 2 and how == "in a save":
        importlib.import_module("ckptfmt.engine.group_save").write_part = die
    elif step == 2 and how == "in training":
        die()
    elif step == 2:
        1 / 0
    ckptfmt.save(state(), path, step=step, group=group, timeout_s=600.0)
"""


@pytest.mark.parametrize(
    ("victim", "how", "host"),
    [
        (2, "in a save", ""),
        (0, "in training", ""),
        (0, "in a save", ""),
        (2, "in training", "elsewhere"),
        (2, "by an error", "elsewhere"),
    ],
)
def test_a_rank_whose_process_ends_is_named_long_before_the_time_is_up(
    tmp_path: Path, victim: int, how: str, host: str
) -> None:
    """One of three is a process of its own; on another machine, where it says so."""
    lost_after_s = 2.0 if how == "in training" else 600.0
    args = [sys.executable, "-c", VICTIM, str(tmp_path), str(victim), "3", how, host]
    process = subprocess.Popen([*args, str(lost_after_s)], stderr=subprocess.PIPE)

    def part(rank: int) -> dict[str, Any]:
        whole = np.arange(60.0).reshape(20, 3)
        start, stop = (20 * r // 3 for r in (rank, rank + 1))
        return {"w": Sharded(whole.shape, [((start, 0), whole[start:stop])])}

    def run(rank: int) -> Any:
        if rank == victim:
            return process.communicate()[1].decode()
        group = FileGroup(rank, 3, lost_after_s=lost_after_s)
        for step in (1, 2):
            ckptfmt.save(part(rank), tmp_path, step=step, group=group, timeout_s=600.0)
        return None

    found = together(run, 3)
    said = {
        "in a save": "its process has ended",
        "in training": "no sign of life for" if host else "its process has ended",
        "by an error": "ZeroDivisionError",
    }[how]
    for error in found[:victim] + found[victim + 1 :]:
        assert isinstance(error, ConflictError), found
        assert error.kind == "conflict-rank-gone"
        assert f"rank {victim} ({host}" in str(error)
        assert f"process {process.pid}" in str(error)
        assert said in str(error)
    store = ckptfmt.Store(tmp_path)
    assert store.steps() == [1]
    # The living ones, or the next job, go on.
    infos = together(lambda rank: save(tmp_path, rank, 2, 4), 2)
    assert [info.step for info in infos] == [4, 4], infos
    end_of_processes()
    assert victim == 0 or left(tmp_path) == []
    check(tmp_path, 4)
    assert store.verify().ok


def test_every_rank_gets_the_answer_of_each_round(tmp_path: Path) -> None:
    backend = ckptfmt.Store(tmp_path).backend

    def talk(rank: int) -> Any:
        with Meeting(FileGroup(rank, 3), backend, TIMEOUT_S) as meeting:
            first = meeting.round(lambda: bytes([rank]), b"".join)
            second = meeting.round(lambda: first + bytes([rank]), lambda all_: all_[2])
            return first, second

    assert together(talk, 3) == [(b"\0\1\2", b"\0\1\2\2")] * 3


@pytest.mark.parametrize("group", ["worlds", 7, object()])
def test_what_is_no_group_is_refused(tmp_path: Path, group: Any) -> None:
    with pytest.raises(UsageError, match="no group of ranks"):
        ckptfmt.save({}, tmp_path, group=group)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), ("0", 1)])
def test_a_rank_outside_its_group_is_refused(rank: Any, size: Any) -> None:
    with pytest.raises(UsageError, match="no such rank"):
        FileGroup(rank, size)


def test_world_needs_torch_distributed() -> None:
    pytest.importorskip("torch")
    with pytest.raises(UsageError, match="not initialized"):
        ranks_of("world")


def test_a_rank_without_memory_for_its_copy_tells_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, take = threading.local(), Arena.take

    def scarce(self: Arena, nbytes: int, *args: Any) -> Any:
        if here.rank == 1:
            raise MemoryError("no room")
        return take(self, nbytes, *args)

    def save(rank: int) -> Any:
        here.rank = rank
        group = FileGroup(rank, 2)
        future = ckptfmt.save_async(
            tree(rank, 2), tmp_path, step=1, group=group, timeout_s=TIMEOUT_S
        )
        return future.result()

    monkeypatch.setattr(Arena, "take", scarce)
    found = together(save, 2)
    assert "rank 1" in str(found[0]), found
    assert "no room" in str(found[0])
    assert isinstance(found[1], MemoryError)
    assert ckptfmt.Store(tmp_path).latest() is None


def restore_during_a_save(path: Path, rank: int, size: int) -> Any:
    group = FileGroup(rank, size)
    old, new = ({"w": np.full(3, x)} for x in (1.0, 2.0))
    ckptfmt.save(old, path, step=1, group=group, timeout_s=TIMEOUT_S)
    future = ckptfmt.save_async(
        new, path, step=2, group=group, timeout_s=TIMEOUT_S, progress=lambda _: time.sleep(0.2)
    )
    target = {"w": np.zeros(3)}
    ckptfmt.restore(target, path, step=1, group=group)
    return target["w"].tolist(), future.result().step


def test_a_group_restores_while_its_save_is_in_flight(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(restore_during_a_save, tmp_path, rank, 2) for rank in range(2)]
        assert [future.result(60) for future in futures] == [([1.0] * 3, 2)] * 2
    assert ckptfmt.load(tmp_path)["w"].tolist() == [2.0] * 3
