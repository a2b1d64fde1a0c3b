"""A store over time: what it lists, tags, notes, sets aside and deletes. Spec: 02-store, 08-protocol."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.testing import difference


def files(path: Path, folder: str) -> list[str]:
    where = path / folder
    return sorted(os.listdir(where)) if where.is_dir() else []


def everything(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> ckptfmt.Store:
    """Steps 1 to 3, main and best."""
    path = tmp_path / "s"
    for step in (2, 1, 3):
        ckptfmt.save({"w": np.full(100, step), "v": step}, path, step=step, durable=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckptfmt.CkptWarning)
        ckptfmt.save({"v": "main"}, path, durable=False)
    ckptfmt.save({"v": "best"}, path, name="best", step=2, durable=False)
    return ckptfmt.Store(path)


def root(store: ckptfmt.Store) -> Path:
    return Path(store.url)


# -- looking ------------------------------------------------------------------------------------


def test_making_a_store_touches_nothing(tmp_path: Path) -> None:
    store = ckptfmt.Store(tmp_path / "none")
    assert (store.names(), store.steps(), store.tags(), store.checkpoints()) == ([], [], {}, [])
    assert store.latest() is None
    assert store.last_committed() is None
    with pytest.raises(ckptfmt.NotFoundError, match="found nothing"):
        store.verify()
    with pytest.raises(ckptfmt.NotFoundError):
        store.open()
    assert not (tmp_path / "none").exists()
    assert "none" in repr(store)


def test_what_a_store_lists(store: ckptfmt.Store) -> None:
    steps = [f"step-{step:016d}" for step in (1, 2, 3)]
    assert store.names() == ["best", "main", *steps]
    assert store.steps() == [1, 2, 3]
    infos = store.checkpoints()
    assert [info.name for info in infos] == [steps[0], "best", steps[1], steps[2], "main"]
    assert [info.step for info in infos] == [1, 2, 2, 3, None]
    latest, last = store.latest(), store.last_committed()
    assert latest is not None
    assert last is not None
    assert latest.step == 3
    assert last.name == "best"
    assert store.open().info == latest
    assert store.open("best")["v"] == "best"
    assert store.open(1)["v"] == 1


def test_listing_reads_small_ranges_and_no_data(counted: Any) -> None:
    for step in range(3):
        tree = {f"{i}": np.full(9, i + step) for i in range(3000)}
        ckptfmt.save(tree, counted.store, step=step)
    counted.backend.forget()
    assert len(counted.store.checkpoints()) == 3
    assert counted.store.latest().step == 2
    assert counted.backend.data_reads() == []
    assert max(stop - start for _, start, stop in counted.backend.reads) <= 64 << 10


def test_latest_is_by_number_and_no_stray_is_a_candidate(tmp_path: Path) -> None:
    for step in (999, 1000, 9000, 10_000, 900_000, 100_000):
        ckptfmt.save({"v": step}, tmp_path, step=step, durable=False)
    folder = tmp_path / "checkpoints"
    strays = [
        *("handpicked", "step-0000000009000000~0.index.tmp", "step-9000000~0.index"),
        *("step-0000000009000000~00.index", "step-0000000009000000~x.index", ".hidden", "latest"),
        *("step-0000000009000000.index", "Best~0.index", "main~0.INDEX"),
    ]
    for stray in strays:
        (folder / stray).write_bytes(b"stray")
    (folder / "sub").mkdir()
    good = (folder / "step-0000000000000999~0.index").read_bytes()
    (folder / "sub" / "step-0000000000000999~7.index").write_bytes(good)
    store = ckptfmt.Store(tmp_path)
    assert store.steps() == [999, 1000, 9000, 10_000, 100_000, 900_000]
    latest = store.latest()
    assert latest is not None
    assert latest.step == 900_000
    ckptfmt.save({"v": 5}, tmp_path, step=5)
    last = store.last_committed()
    assert last is not None
    assert last.step == 5
    store.delete(900_000)
    store.gc(grace_s=0)
    assert store.verify().ok
    assert set(files(tmp_path, "checkpoints")) >= {*strays, "sub"}
    assert store.open().info.step == 100_000


def test_a_damaged_checkpoint_is_left_out_of_the_list_with_a_warning(store: ckptfmt.Store) -> None:
    index = root(store) / "checkpoints" / f"step-{3:016d}~0.index"
    data = bytearray(index.read_bytes())
    data[300] ^= 1
    index.write_bytes(data)
    with pytest.warns(ckptfmt.CkptWarning, match="0003~0.index"):
        assert [info.step for info in store.checkpoints()] == [1, 2, 2, None]
    with pytest.warns(ckptfmt.CkptWarning):
        latest = store.latest()
    assert latest is not None
    assert latest.step == 2
    assert store.steps() == [1, 2, 3], "names are by listing alone"


def test_last_committed_goes_by_the_index_not_the_folder(store: ckptfmt.Store) -> None:
    os.utime(root(store) / "checkpoints" / f"step-{1:016d}~0.index")
    last = store.last_committed()
    assert last is not None
    assert last.name == "best"


def test_a_copied_or_moved_store_is_the_same(store: ckptfmt.Store, tmp_path: Path) -> None:
    digests = [info.digest for info in store.checkpoints()]
    shutil.copytree(root(store), tmp_path / "copy", copy_function=shutil.copyfile)
    root(store).rename(tmp_path / "moved")
    for where in ("copy", "moved"):
        there = ckptfmt.Store(tmp_path / where)
        assert [info.digest for info in there.checkpoints()] == digests
        assert not difference(ckptfmt.load(there), {"w": np.full(100, 3), "v": 3})
        assert there.verify().ok
        ckptfmt.save({"w": np.full(100, 3), "v": 4}, there, step=4)
        there.gc(grace_s=0)
        assert there.steps() == [1, 2, 3, 4]
        assert there.verify().ok


# -- tags ---------------------------------------------------------------------------------------


def test_a_tag_names_a_checkpoint_and_moves(store: ckptfmt.Store) -> None:
    store.tag("production", 1)
    store.tag("first", "latest")
    assert store.tags() == {"production": f"step-{1:016d}", "first": f"step-{3:016d}"}
    assert ckptfmt.load(store, at="production")["v"] == 1
    assert ckptfmt.load(f"{store.url}@production")["v"] == 1
    store.tag("production", 2)
    assert ckptfmt.load(store, at="production")["v"] == 2
    store.tag("again", "production")
    assert store.tags()["again"] == f"step-{2:016d}"
    store.untag("production")
    assert "production" not in store.tags()
    with pytest.raises(ckptfmt.NotFoundError, match="again"):
        store.untag("production")
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.load(store, at="production")


@pytest.mark.parametrize("tag", ["best", "main", "latest", "7", "step-1", "A", "", "a/b", "../x"])
def test_an_illegal_tag_or_one_that_is_a_name_is_refused(store: ckptfmt.Store, tag: str) -> None:
    before = everything(root(store))
    with pytest.raises(ckptfmt.UsageError):
        store.tag(tag, 1)
    assert everything(root(store)) == before


def test_a_tag_of_nothing_is_not_found(store: ckptfmt.Store) -> None:
    with pytest.raises(ckptfmt.NotFoundError):
        store.tag("good", 9)
    assert store.tags() == {}


def test_a_tag_protects_from_deletion(store: ckptfmt.Store) -> None:
    store.tag("good", 2)
    with pytest.raises(ckptfmt.UsageError, match="'good'"):
        store.delete(2)
    assert store.open(2)["v"] == 2
    store.delete(2, force=True)
    assert store.steps() == [1, 3]
    assert store.tags() == {}
    assert files(root(store), "tags") == []


def test_a_tag_holds_only_while_the_content_does(store: ckptfmt.Store) -> None:
    store.tag("good", 2)
    key = root(store) / "checkpoints" / f"step-{2:016d}~0.index"
    key.unlink()
    ckptfmt.save({"v": "other"}, store, step=2)
    assert store.tags() == {}
    with pytest.raises(ckptfmt.NotFoundError, match="what this tag named is gone"):
        ckptfmt.load(store, at="good")
    store.delete(2)
    assert store.steps() == [1, 3]


def test_a_damaged_tag_is_left_out_with_a_warning_and_corrupt_when_asked_for(
    store: ckptfmt.Store,
) -> None:
    store.tag("good", 1)
    store.tag("bad", 1)
    for junk in (b"", b"{", b"[]", b'{"name": 1, "digest": "x"}', b"\xff", b"[" * 100_000):
        (root(store) / "tags" / "bad").write_bytes(junk)
        with pytest.warns(ckptfmt.CkptWarning, match="tags/bad"):
            assert store.tags() == {"good": f"step-{1:016d}"}
        with pytest.raises(ckptfmt.CorruptError, match="tags/bad"):
            ckptfmt.load(store, at="bad")
        assert [p.file for p in store.verify().problems] == ["tags/bad"]
    store.tag("bad", 3)
    assert store.tags()["bad"] == f"step-{3:016d}"


# -- notes --------------------------------------------------------------------------------------


def test_annotations_are_laid_over_what_was_saved_last_one_on_top(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1, metrics={"x": 1.0}, metadata={"m": 1, "n": [1]})
    store = ckptfmt.Store(tmp_path)
    index = everything(tmp_path / "checkpoints")
    digest = store.checkpoints()[0].digest
    store.annotate(1, metrics={"x": 2.0, "y": 3.0})
    store.annotate("latest", metadata={"m": {"deep": (1, 2)}})
    store.annotate(1, metrics={"y": float(np.float32(4))})
    info = store.checkpoints()[0]
    assert info.metrics == {"x": 2.0, "y": 4.0}
    assert info.metadata == {"m": {"deep": (1, 2)}, "n": [1]}
    assert info == store.latest() == store.open().info
    assert info.digest == digest
    assert everything(tmp_path / "checkpoints") == index
    assert len(files(tmp_path, "notes")) == 3


@pytest.mark.parametrize(
    "wrong", [{"metrics": {"x": "high"}}, {"metadata": {"f": print}}, {"metadata": {1: 2}}]
)
def test_an_illegal_annotation_is_refused_before_anything_is_written(
    store: ckptfmt.Store, wrong: dict[str, Any]
) -> None:
    before = everything(root(store))
    with pytest.raises(ckptfmt.UsageError):
        store.annotate(1, **wrong)
    assert everything(root(store)) == before
    with pytest.raises(ckptfmt.NotFoundError):
        store.annotate(77, metrics={"x": 1.0})


def test_annotations_go_with_their_checkpoint(store: ckptfmt.Store) -> None:
    store.annotate(1, metrics={"x": 1.0})
    store.annotate(2, metrics={"x": 2.0})
    store.delete(1)
    assert len(files(root(store), "notes")) == 1
    ckptfmt.save({"v": 1}, store, step=1)
    assert store.open(1).info.metrics == {}


def test_two_annotations_at_once_are_both_kept(store: ckptfmt.Store) -> None:
    import threading

    threads = [
        threading.Thread(target=store.annotate, args=(1,), kwargs={"metrics": {f"m{i}": float(i)}})
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.open(1).info.metrics) == 8


# -- quarantine ---------------------------------------------------------------------------------


def test_a_quarantined_checkpoint_is_set_aside_and_comes_back(store: ckptfmt.Store) -> None:
    store.quarantine(3, "loss is nan")
    assert store.steps() == [1, 2]
    latest = store.latest()
    assert latest is not None
    assert latest.step == 2
    [aside] = store.checkpoints(quarantined=True)
    assert (aside.step, aside.metadata) == (3, {"ckptfmt.quarantine": "loss is nan"})
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.load(store, step=3)
    store.gc(grace_s=0)
    assert store.verify().ok
    store.readmit(f"step-{3:016d}")
    assert store.steps() == [1, 2, 3]
    assert not difference(ckptfmt.load(store), {"w": np.full(100, 3), "v": 3})
    assert store.checkpoints(quarantined=True) == []
    with pytest.raises(ckptfmt.NotFoundError):
        store.readmit(f"step-{3:016d}")


def test_found_in_both_places_is_quarantined(store: ckptfmt.Store) -> None:
    key = f"step-{3:016d}~0.index"
    data = (root(store) / "checkpoints" / key).read_bytes()
    store.quarantine(3, "x")
    (root(store) / "checkpoints" / key).write_bytes(data)
    assert store.steps() == [1, 2]
    assert ckptfmt.load(store)["v"] == 2
    store.readmit(f"step-{3:016d}")
    assert ckptfmt.load(store)["v"] == 3


def test_readmitting_over_a_newer_generation_keeps_the_newer(store: ckptfmt.Store) -> None:
    store.quarantine(3, "x")
    ckptfmt.save({"v": "new"}, store, step=3)
    with pytest.warns(ckptfmt.CkptWarning, match="generation 1 stays"):
        store.readmit(f"step-{3:016d}")
    assert ckptfmt.load(store, step=3) == {"v": "new"}


def test_what_is_set_aside_says_why_until_it_is_taken_back(store: ckptfmt.Store) -> None:
    for nothing in ("", None):
        with pytest.raises(ckptfmt.UsageError, match="no reason"):
            store.quarantine(3, nothing)  # type: ignore[arg-type]
    store.quarantine(3, "loss is nan")
    for ask in (lambda: ckptfmt.load(store, step=3), lambda: store.quarantine(3, "again")):
        with pytest.raises(
            ckptfmt.NotFoundError, match=r"set aside \(loss is nan\); to take it back"
        ):
            ask()
    with pytest.raises(ckptfmt.NotFoundError, match="found step-0000000000000003"):
        store.readmit("3")
    store.readmit(f"step-{3:016d}")
    assert store.open(3).info.metadata == {"ckptfmt.quarantine": ""}


def test_metadata_of_the_format_is_not_the_users_to_give(store: ckptfmt.Store) -> None:
    mine = {"ckptfmt.quarantine": "not me"}
    with pytest.raises(ckptfmt.UsageError, match="the format's own"):
        store.annotate(3, metadata=mine)
    with pytest.raises(ckptfmt.UsageError, match="the format's own"):
        ckptfmt.save({"w": 1}, store, step=9, metadata=mine)
    assert store.steps() == [1, 2, 3]


# -- deletion -----------------------------------------------------------------------------------


def test_deleting_takes_the_index_and_gc_the_space(store: ckptfmt.Store) -> None:
    before = files(root(store), "data")
    store.delete(3)
    assert store.steps() == [1, 2]
    assert files(root(store), "data") == before
    report = store.gc(grace_s=0)
    assert len(report.deleted) == 1
    assert len(files(root(store), "data")) == len(before) - 1
    assert store.verify().ok
    with pytest.raises(ckptfmt.NotFoundError):
        store.delete(3)


def test_deleting_takes_every_generation_lowest_first(tmp_path: Path) -> None:
    ckptfmt.save({"v": 1}, tmp_path)
    old = (tmp_path / "checkpoints" / "main~0.index").read_bytes()
    ckptfmt.save({"v": 2}, tmp_path)
    (tmp_path / "checkpoints" / "main~0.index").write_bytes(old)
    ckptfmt.Store(tmp_path).delete("main")
    assert files(tmp_path, "checkpoints") == []


def test_a_damaged_checkpoint_can_be_deleted(store: ckptfmt.Store) -> None:
    (root(store) / "checkpoints" / f"step-{3:016d}~0.index").write_bytes(b"x")
    with pytest.warns(ckptfmt.CkptWarning):
        store.delete(3)
    assert store.steps() == [1, 2]


def test_what_another_checkpoint_shares_survives(tmp_path: Path) -> None:
    base = np.arange(50_000)
    ckptfmt.save({"a": base, "b": np.ones(9)}, tmp_path, step=1)
    ckptfmt.save({"a": base, "b": np.zeros(9)}, tmp_path, step=2)
    store = ckptfmt.Store(tmp_path)
    store.delete(1)
    store.gc(grace_s=0)
    assert not difference(ckptfmt.load(store), {"a": base, "b": np.zeros(9)})
    assert store.verify().ok


# -- rights -------------------------------------------------------------------------------------


def test_a_read_only_store_reads_and_refuses_every_change(store: ckptfmt.Store) -> None:
    before = everything(root(store))
    frozen = ckptfmt.Store(store.url, read_only=True)
    assert frozen.steps() == [1, 2, 3]
    assert not difference(ckptfmt.load(frozen), {"w": np.full(100, 3), "v": 3})
    changes: list[Callable[[], object]] = [
        lambda: ckptfmt.save({"a": np.ones(3)}, frozen, step=9),
        lambda: frozen.delete(1),
        lambda: frozen.tag("x", 1),
        lambda: frozen.quarantine(1, "x"),
        lambda: frozen.annotate(1, metrics={"x": 1.0}),
        lambda: frozen.gc(grace_s=0),
    ]
    for change in changes:
        with pytest.raises(ckptfmt.CheckpointError):
            change()
    assert everything(root(store)) == before


def test_a_newer_store_is_read_but_not_changed(store: ckptfmt.Store) -> None:
    text = '{"format": "ckptfmt", "version": [1, 0], "requires_to_write": ["leases"]}'
    (root(store) / "ckptfmt.json").write_text(text)
    before = everything(root(store))
    assert ckptfmt.load(store)["v"] == 3
    changes: list[Callable[[], object]] = [
        lambda: store.delete(1),
        lambda: store.tag("x", 1),
        lambda: store.untag("x"),
        lambda: store.quarantine(1, "x"),
        lambda: store.readmit("main"),
        lambda: store.annotate(1, metrics={"x": 1.0}),
        lambda: store.gc(grace_s=0),
    ]
    for change in changes:
        with pytest.raises(ckptfmt.UnsupportedError, match="leases"):
            change()
    assert everything(root(store)) == before


def test_a_store_is_a_context_manager(tmp_path: Path) -> None:
    with ckptfmt.Store(tmp_path) as store:
        ckptfmt.save({"a": 1}, store)
    assert ckptfmt.load(store) == {"a": 1}


@pytest.mark.parametrize("grace", [-1, float("nan"), "10m", None])
def test_a_grace_that_is_no_duration_is_refused(store: ckptfmt.Store, grace: Any) -> None:
    with pytest.raises(ckptfmt.UsageError, match="grace_s is no duration"):
        store.gc(grace_s=grace)


# -- giving up what is set aside ------------------------------------------------------------------


def test_what_is_set_aside_is_deleted_by_name_and_nothing_else(store: ckptfmt.Store) -> None:
    store.quarantine(3, "a test")
    ckptfmt.save({"w": np.full(100, 30), "v": 30}, store, step=3, durable=False)
    store.quarantine(2, "a test")
    with pytest.raises(ckptfmt.NotFoundError, match="no such quarantined checkpoint"):
        store.delete(1, quarantined=True)
    store.delete(3, quarantined=True)
    assert ckptfmt.load(store, step=3)["v"] == 30
    assert files(root(store), "quarantine") == ["step-0000000000000002~0.index"]
    assert len(files(root(store), "notes")) == 1  # that of the other one
    store.delete("step-0000000000000002", quarantined=True)
    assert files(root(store), "quarantine") == files(root(store), "notes") == []
    assert store.verify().ok


def test_what_lies_in_both_places_stays_set_aside_until_it_is_gone(
    store: ckptfmt.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "step-0000000000000003~0.index"
    data = (root(store) / "checkpoints" / name).read_bytes()
    store.quarantine(3, "a test")
    (root(store) / "checkpoints" / name).write_bytes(data)  # killed between the put and the delete
    assert store.steps() == [1, 2]
    real, seen = store.backend.delete, []

    def delete(key: Any) -> None:
        real(key)
        seen.append((str(key), store.steps()))

    monkeypatch.setattr(store.backend, "delete", delete)
    store.delete(3, quarantined=True)
    assert [(key, steps) for key, steps in seen if "step" in key] == [
        (f"checkpoints/{name}", [1, 2]),
        (f"quarantine/{name}", [1, 2]),
    ]


@pytest.mark.damaged_store
def test_an_unreadable_one_stops_gc_until_it_is_given_up(store: ckptfmt.Store) -> None:
    path = root(store) / "checkpoints" / "step-0000000000000003~0.index"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    store.quarantine("step-0000000000000003", "a test")
    with pytest.raises(ckptfmt.CorruptError, match=r"delete\(.*quarantined=True"):
        store.gc(grace_s=0)
    store.delete(3, quarantined=True)
    assert store.gc(grace_s=0).deleted
    assert store.verify().ok
