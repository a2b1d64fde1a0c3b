"""Copies between stores: only what is missing, checked on the way, the index last."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError, ExistsError, NotFoundError, Store, UsageError
from ckptfmt.engine import coordinate
from ckptfmt.engine.coordinate import put_list
from ckptfmt.engine.copy import CopyRequest, copy_checkpoints
from ckptfmt.engine.owner import Owner
from ckptfmt.storage import Backend, open_backend

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot create an object only if it is absent")


def tree(step: int) -> dict[str, Any]:
    frozen = np.arange(300_000, dtype=np.float32)
    return {"frozen": frozen, "w": np.full(50_000, step, np.float32), "note": "é", "step": step}


@pytest.fixture
def source(tmp_path: Path) -> Store:
    store = Store(tmp_path / "source")
    for step in range(1, 4):
        ckptfmt.save(tree(step), store, step=step, metrics={"loss": float(step)}, metadata={"a": 1})
    return store


@pytest.fixture(params=["local", "memory", "fsspec"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = {
        "local": str(tmp_path / "target"),
        "memory": f"memory://copy-{tmp_path.name}",
        "fsspec": f"local://{tmp_path}/remote",
    }[request.param]
    with Store(url) as store:
        yield store


def same(store: Store, step: int) -> None:
    loaded = ckptfmt.load(store, step=step)
    for name, value in tree(step).items():
        np.testing.assert_array_equal(loaded[name], value)


def test_a_push_brings_the_latest_and_only_what_it_refers_to(source: Store, target: Store) -> None:
    report = source.push(target)
    assert report.copied == ["step-0000000000000003"]
    assert target.steps() == [3]
    same(target, 3)
    assert target.verify().ok
    mine, theirs = source.open(3).info, target.open(3).info
    assert (theirs.digest, theirs.metadata, theirs.metrics, theirs.parent, theirs.created) == (
        mine.digest, mine.metadata, mine.metrics, mine.parent, mine.created,
    )  # fmt: skip


def test_a_second_push_writes_nothing_and_a_third_only_what_is_new(
    source: Store, target: Store
) -> None:
    first = source.push(target, [1, 2])
    again = source.push(target, [1, 2])
    assert (again.copied, again.kept, again.files) == ([], first.copied, 0)
    rest = source.push(target, 3)
    assert rest.nbytes < first.nbytes / 4  # the frozen tensor is there
    assert rest.reused_nbytes > 0
    for step in (1, 2, 3):
        same(target, step)


def test_notes_follow_and_are_not_repeated(source: Store, target: Store) -> None:
    source.annotate(2, metrics={"val": 0.5})
    source.push(target, 2)
    source.annotate(2, metrics={"val": 0.25})
    source.push(target, 2)
    source.push(target, 2)
    assert target.open(2).info.metrics == {"loss": 2.0, "val": 0.25}
    assert len(list(target.backend.list("notes/"))) == 2


def test_a_pull_is_a_push_from_the_other_side(source: Store, target: Store) -> None:
    assert target.pull(source, [1, "step-0000000000000003"]).copied == [
        "step-0000000000000001",
        "step-0000000000000003",
    ]
    same(target, 1)
    same(target, 3)


def test_another_tree_of_the_same_name_is_refused_and_main_is_replaced(
    source: Store, target: Store
) -> None:
    ckptfmt.save(tree(9), target, step=3)
    with pytest.raises(ExistsError, match="found another tree"):
        source.push(target, 3)
    same_again = ckptfmt.load(target, step=3)
    assert same_again["step"] == 9
    for number in (1, 2):
        with pytest.warns(ckptfmt.CkptWarning, match="beside steps"):
            ckptfmt.save(tree(number), source, name="main")
        source.push(target, "main")
        assert ckptfmt.load(target, at="main")["step"] == number
    assert len(list(target.backend.list("checkpoints/main~"))) == 1


def test_a_tag_of_that_name_is_refused(source: Store, target: Store) -> None:
    ckptfmt.save(tree(1), source, name="best")
    ckptfmt.save(tree(5), target, step=5)
    target.tag("best", 5)
    with pytest.raises(ExistsError, match="a tag of this name"):
        source.push(target, "best")


@pytest.mark.damaged_store
def test_damage_does_not_spread(source: Store, target: Store, tmp_path: Path) -> None:
    file = max((tmp_path / "source/data").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="is damaged, so it is not copied"):
        source.push(target, 1)
    assert target.steps() == []
    assert list(target.backend.list("data/")) == list(target.backend.list("tmp/")) == []
    assert list(target.backend.list("parts/")) == []
    file.unlink()
    with pytest.raises(NotFoundError, match="data file is missing"):
        source.push(target, 1)


@pytest.mark.damaged_store
def test_a_copy_heals_what_is_missing_or_marked_in_the_other_store(
    source: Store, target: Store
) -> None:
    source.push(target, 3)
    (victim, *_) = target.open(3).index.files.ids
    target.backend.delete(ckptfmt.types.Key(f"data/{victim}"))
    report = source.push(target, 3)
    assert (report.copied, report.files) == (["step-0000000000000003"], 1)
    target.backend.put(ckptfmt.types.Key(f"damaged/{victim}"), b"")
    assert source.push(target, 3).files == 1
    assert list(target.backend.list("damaged/")) == []
    same(target, 3)
    assert target.verify().ok


def test_what_a_collector_has_named_goes_under_another_id(source: Store, target: Store) -> None:
    source.push(target, 1)
    target.delete(1)
    named = frozenset(entry.key[5:] for entry in target.backend.list("data/"))
    put_list(target.backend, "0" * 32, named, None)
    source.push(target, 1)
    assert not named & set(target.open(1).index.files.ids)
    same(target, 1)
    assert target.verify().ok
    # The copy is as good a source as the original.
    target.backend.delete(ckptfmt.types.Key(f"gc/{'0' * 32}"))


def test_a_collector_that_strikes_after_the_commit_makes_the_copy_withdraw(
    source: Store, target: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = coordinate.unusable

    def late(backend: Backend, files: Any) -> set[str]:
        put_list(target.backend, "1" * 32, frozenset(files), Owner.here())
        return real(backend, files)

    monkeypatch.setattr("ckptfmt.engine.commit.unusable", late)
    with pytest.raises(ckptfmt.ConflictError, match="a collector took files"):
        source.push(target, 2)
    assert target.steps() == []


def test_files_may_be_copied_by_workers_and_progress_is_told(source: Store, target: Store) -> None:
    events: list[ckptfmt.Event] = []
    with ThreadPoolExecutor(3) as executor:
        report = source.push(target, [1, 2, 3], executor=executor, progress=events.append)
    assert report.files == 3
    assert events[-1].kind == "copy"
    assert events[-1].nbytes == events[-1].total_nbytes == report.nbytes
    assert target.verify().ok


def test_an_unknown_key_of_the_index_survives(source: Store, target: Store) -> None:
    """What a later version writes goes over byte for byte."""
    from ckptfmt.format import TREE, parse_header

    source.push(target, 2)
    documents = [
        bytes(
            store.backend.get(
                next(iter(store.backend.list("checkpoints/step-0000000000000002"))).key
            )
        )
        for store in (source, target)
    ]
    rows = [parse_header(data).sections[TREE] for data in documents]
    one, two = (d[r.offset : r.offset + r.stored_nbytes] for d, r in zip(documents, rows))
    assert one == two
    assert parse_header(documents[0]).commit_id != parse_header(documents[1]).commit_id


def test_two_pushes_at_once_leave_one_good_copy(source: Store, tmp_path: Path) -> None:
    target = Store(tmp_path / "both")
    errors: list[BaseException] = []

    def push() -> None:
        try:
            source.push(target, [1, 2, 3])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=push) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert target.steps() == [1, 2, 3]
    assert target.verify().ok


def test_a_selector_of_the_other_store_is_refused(source: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="between whole stores"):
        source.push(f"{tmp_path}/x@3")


def test_a_limit_of_speed_is_kept(
    source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    backend = open_backend(str(tmp_path / "slow"))
    listed = source._find(1)
    copy_checkpoints(source.backend, backend, listed, CopyRequest(bytes_per_s=1e6))
    assert sum(slept) == pytest.approx(source.open(1).info.stored_nbytes / 1e6, rel=0.2)


def test_a_killed_copy_leaves_litter_that_the_next_one_takes_away(
    source: Store, tmp_path: Path
) -> None:
    """The names under tmp/ are those that every collector knows."""
    script = f"""
import os
import ckptfmt.engine.copy as copy
from ckptfmt import Store
real = copy.finish_file
class Writer:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
    def finish(self, **rest): os.kill(os.getpid(), 9)
target = Store({str(tmp_path / "target")!r})
create = target.backend.create
target.backend.create = lambda key, nbytes=None: Writer(create(key, nbytes)) if key.startswith("tmp/") else create(key, nbytes)
Store({source.url!r}).push(target)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    target = Store(tmp_path / "target")
    assert len(list(target.backend.list("tmp/"))) == 1
    source.push(target)
    assert list(target.backend.list("tmp/")) == []
    assert [e.key for e in target.backend.list("parts/")] == []
    same(target, 3)
