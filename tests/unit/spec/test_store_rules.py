"""The rules of the store and of the protocol (spec 02, 05, 08), held by saves of the package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.format import Dtype, numpy_dtype, parse_header
from ckptfmt.testing import FaultyBackend
from ckptfmt.types import Key, Mode

VECTORS = Path(__file__).parents[3] / "spec" / "vectors" / "accept"
Tree = dict[str, Any]


def tree(seed: int = 0, size: int = 3000) -> Tree:
    return {"w": np.arange(seed, seed + size, dtype=np.int32), "n": seed}


def keys(folder: Path, part: str) -> list[str]:
    found = folder / part
    return sorted(p.name for p in found.iterdir()) if found.is_dir() else []


def watched(folder: Path) -> tuple[ckptfmt.Store, FaultyBackend]:
    """A store whose operations are recorded, in order."""
    store = ckptfmt.Store(folder)
    store.capabilities  # noqa: B018  probed now, so that the log begins after it
    backend = FaultyBackend(store.backend)
    store.backend = backend
    return store, backend


def first(backend: FaultyBackend, kind: str, prefix: str, after: int = -1) -> int:
    """Number of the first operation of a kind on a key."""
    for operation in backend.log[after + 1 :]:
        if operation.kind == kind and operation.key.startswith(prefix):
            return operation.number
    raise AssertionError(f"no {kind} of {prefix}: {backend.log}")


# -- 2. the store -----------------------------------------------------------------------------------


def test_m02_1_a_reader_needs_only_checkpoints_and_data(tmp_path: Path) -> None:
    """M02-1, M02-3, M02-14: moved, without anything else, beside a broken marker."""
    store = tmp_path / "store"
    ckptfmt.save(tree(1), store, step=1)
    moved = tmp_path / "elsewhere"
    for part in ("checkpoints", "data"):
        shutil.copytree(store / part, moved / part)
    assert ckptfmt.load(moved)["n"] == 1
    for text in (
        "{",
        json.dumps({"format": "ckptfmt", "version": [9, 0], "requires_to_write": ["x"]}),
    ):
        (moved / "ckptfmt.json").write_text(text)
        assert ckptfmt.load(moved)["n"] == 1


def test_m02_6_an_index_under_another_name_is_refused(tmp_path: Path) -> None:
    """M02-6: kind `corrupt-index-name`, and `corrupt-index` where no generation is better."""
    ckptfmt.save(tree(1), tmp_path, name="best")
    folder = tmp_path / "checkpoints"
    (folder / "best~0.index").rename(folder / "worst~0.index")
    with pytest.raises(ckptfmt.CorruptError, match="another name") as caught:
        ckptfmt.load(tmp_path, at="worst")
    assert caught.value.kind == "corrupt-index-name"
    (folder / "worst~1.index").write_bytes(b"junk")
    with pytest.raises(ckptfmt.CorruptError, match="another name") as caught:
        ckptfmt.load(tmp_path, at="worst")
    assert caught.value.kind == "corrupt-index"


def test_m02_7_saving_again_makes_the_next_generation(tmp_path: Path) -> None:
    """M02-7: one above the highest of `checkpoints/` and `quarantine/`; nothing is replaced."""
    ckptfmt.save(tree(1), tmp_path)
    document = (tmp_path / "checkpoints" / "main~0.index").read_bytes()
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / "main~6.index").write_bytes(document)
    ckptfmt.save(tree(2), tmp_path)
    assert keys(tmp_path, "checkpoints") == ["main~7.index"]
    assert ckptfmt.open(tmp_path).info.generation == 7


def test_m02_8_the_highest_generation_that_can_be_read_counts(tmp_path: Path) -> None:
    """M02-8: numerically highest; a damaged one is skipped and reported."""
    ckptfmt.save(tree(1), tmp_path)
    folder = tmp_path / "checkpoints"
    nine = (folder / "main~0.index").read_bytes()
    ckptfmt.save(tree(2), tmp_path)
    ten = (folder / "main~1.index").read_bytes()
    (folder / "main~1.index").unlink()
    (folder / "main~9.index").write_bytes(nine)
    (folder / "main~10.index").write_bytes(ten)
    assert ckptfmt.load(tmp_path)["n"] == 2
    (folder / "main~10.index").write_bytes(ten[:-1])
    with pytest.warns(ckptfmt.CkptWarning, match="main~10"):
        assert ckptfmt.load(tmp_path)["n"] == 1


def test_m02_9_latest_is_the_highest_step_else_main(tmp_path: Path) -> None:
    """M02-9, M02-10: by number, whatever was saved last; damaged ones are skipped and named."""
    ckptfmt.save(tree(7), tmp_path)
    ckptfmt.save(tree(8), tmp_path, name="zz-other")
    assert ckptfmt.load(tmp_path)["n"] == 7
    for step in (1000, 999, 9):
        ckptfmt.save(tree(step), tmp_path, step=step)
    (tmp_path / "checkpoints" / "step-99999.index").write_bytes(b"")
    (tmp_path / "checkpoints" / "step-9999999999999999~0.index").write_bytes(b"")
    assert ckptfmt.load(tmp_path)["n"] == 1000
    (tmp_path / "checkpoints" / "step-0000000000001000~0.index").write_bytes(b"rotten")
    with pytest.warns(ckptfmt.CkptWarning, match="1000~0"):
        assert ckptfmt.load(tmp_path)["n"] == 999


def test_m02_11_a_tag_holds_while_the_content_stays(tmp_path: Path) -> None:
    """M02-11, M02-12, M02-13, and kind `corrupt-tag`."""
    store = ckptfmt.Store(tmp_path)
    ckptfmt.save(tree(1), store, name="one")
    store.tag("best", "one")
    document = json.loads((tmp_path / "tags" / "best").read_text())
    assert document == {"name": "one", "digest": store.open("one").info.digest}
    assert ckptfmt.load(tmp_path, at="best")["n"] == 1
    with pytest.raises(ckptfmt.UsageError, match="untag"):
        ckptfmt.save(tree(2), store, name="one", if_exists="replace")
    assert ckptfmt.load(tmp_path, at="one")["n"] == 1
    (tmp_path / "tags" / "best").write_text(json.dumps({**document, "digest": "00" * 16}))
    with pytest.raises(ckptfmt.NotFoundError, match="tag"):
        ckptfmt.load(tmp_path, at="best")
    ckptfmt.save(tree(2), store, name="two")
    (tmp_path / "tags" / "two").write_text(json.dumps(document))
    assert ckptfmt.load(tmp_path, at="two")["n"] == 2
    (tmp_path / "tags" / "best").write_text("[]")
    with pytest.raises(ckptfmt.CorruptError) as caught:
        ckptfmt.load(tmp_path, at="best")
    assert caught.value.kind == "corrupt-tag"


def test_m02_16_notes_overlay_in_order_and_a_damaged_one_is_skipped(tmp_path: Path) -> None:
    """M02-15, M02-16."""
    store = ckptfmt.Store(tmp_path)
    ckptfmt.save(tree(1), store, step=1, metrics={"loss": 3.0}, metadata={"a": 1})
    store.annotate(1, metrics={"loss": 2.0, "acc": 0.5})
    store.annotate(1, metrics={"loss": 1.0}, metadata={"b": (1, 2)})
    info = store.checkpoints()[0]
    assert info.metrics == {"loss": 1.0, "acc": 0.5}
    assert info.metadata == {"a": 1, "b": (1, 2)}
    names = keys(tmp_path, "notes")
    assert [name.partition("~")[2] for name in names] == ["0.index", "1.index"]
    (tmp_path / "notes" / names[1]).write_bytes(b"rotten")
    with pytest.warns(ckptfmt.CkptWarning, match="~1.index"):
        assert store.checkpoints()[0].metrics == {"loss": 2.0, "acc": 0.5}
    with pytest.warns(ckptfmt.CkptWarning):
        assert ckptfmt.load(tmp_path)["n"] == 1


def test_m02_18_a_checkpoint_in_both_folders_is_set_aside(tmp_path: Path) -> None:
    """M02-18, M02-19: not latest, not offered by name, its data kept."""
    store = ckptfmt.Store(tmp_path)
    ckptfmt.save(tree(1), store, step=1)
    ckptfmt.save(tree(2), store, step=2)
    document = (tmp_path / "checkpoints" / "step-0000000000000002~0.index").read_bytes()
    store.quarantine(2, "loss went up")
    aside = tmp_path / "quarantine" / "step-0000000000000002~0.index"
    assert aside.read_bytes() == document
    (tmp_path / "checkpoints" / "step-0000000000000002~0.index").write_bytes(document)
    assert ckptfmt.load(tmp_path)["n"] == 1
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.load(tmp_path, at=2)
    assert not store.gc(grace_s=0).deleted
    store.readmit("step-0000000000000002")
    assert ckptfmt.load(tmp_path)["n"] == 2


def test_m02_20_a_damaged_file_is_not_reused(tmp_path: Path) -> None:
    """M02-20: the next save writes the content again, and heals the store."""
    ckptfmt.save(tree(1), tmp_path, step=1)
    (name,) = keys(tmp_path, "data")
    path = tmp_path / "data" / name
    good = path.read_bytes()
    path.write_bytes(good[:70] + b"\xff" + good[71:])
    assert not ckptfmt.Store(tmp_path).verify().ok
    assert keys(tmp_path, "damaged") == [name]
    ckptfmt.save({**tree(1), "n": 5}, tmp_path, step=2)
    assert ckptfmt.load(tmp_path)["w"].tolist() == tree(1)["w"].tolist()
    assert path.read_bytes() == good
    assert keys(tmp_path, "damaged") == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[]", "corrupt-store-marker"),
        ('{"format": "other", "version": [1, 0], "requires_to_write": []}', "corrupt-store-marker"),
        (
            '{"format": "ckptfmt", "version": [2, 0], "requires_to_write": []}',
            "unsupported-version",
        ),
        (
            '{"format": "ckptfmt", "version": [1, 9], "requires_to_write": ["later"]}',
            "unsupported-requires-to-write",
        ),
    ],
)
def test_m09_4_a_writer_heeds_the_marker_and_a_reader_does_not(
    text: str, kind: str, tmp_path: Path
) -> None:
    """M09-4, M02-14: for saving, deleting, tagging and collecting."""
    store = ckptfmt.Store(tmp_path)
    ckptfmt.save(tree(1), store, step=1)
    (tmp_path / "ckptfmt.json").write_text(text)
    for write in (
        lambda: ckptfmt.save(tree(2), store, step=2),
        lambda: store.delete(1),
        lambda: store.tag("best", 1),
        lambda: store.gc(grace_s=0),
    ):
        with pytest.raises(ckptfmt.FormatError) as caught:
            write()
        assert caught.value.kind == kind
    assert ckptfmt.load(tmp_path)["n"] == 1
    assert keys(tmp_path, "checkpoints") == ["step-0000000000000001~0.index"]


def test_m08_14_a_list_that_cannot_be_read_stops_a_save(tmp_path: Path) -> None:
    """M08-14: kind `corrupt-gc-list`."""
    ckptfmt.save(tree(1), tmp_path, step=1)
    (tmp_path / "gc").mkdir(exist_ok=True)
    (tmp_path / "gc" / ("a" * 32)).write_text("{")
    with pytest.raises(ckptfmt.CorruptError) as caught:
        ckptfmt.save(tree(2), tmp_path, step=2)
    assert caught.value.kind == "corrupt-gc-list"


# -- 5, 6, 7. documents -----------------------------------------------------------------------------


def test_m05_5_a_data_file_depends_on_nothing_but_its_content(tmp_path: Path) -> None:
    """M05-5: the same tree, elsewhere, later: the same id and bytes; M07-5: another commit id."""
    for name in ("a", "b"):
        ckptfmt.save(tree(3), tmp_path / name, step=3)
    assert keys(tmp_path / "a", "data") == keys(tmp_path / "b", "data")
    (data,) = keys(tmp_path / "a", "data")
    both = [(tmp_path / name / "data" / data).read_bytes() for name in ("a", "b")]
    assert both[0] == both[1]
    headers = [
        parse_header((tmp_path / n / "checkpoints" / "step-0000000000000003~0.index").read_bytes())
        for n in ("a", "b")
    ]
    assert headers[0].commit_id != headers[1].commit_id
    assert headers[0].sections[2] == headers[1].sections[2]


def test_m05_10_a_short_missing_or_linked_file_is_never_read(tmp_path: Path) -> None:
    """M05-10, M05-4: in every mode, before a byte is returned."""
    ckptfmt.save(tree(1, 100_000), tmp_path)
    (name,) = keys(tmp_path, "data")
    path = tmp_path / "data" / name
    good = path.read_bytes()
    modes: list[Mode] = ["auto", "read", "mmap"]
    for mode in modes:
        path.write_bytes(good[:8192])
        with pytest.raises(ckptfmt.CorruptError) as caught:
            ckptfmt.load(tmp_path, mode=mode)
        assert caught.value.kind == "corrupt-short-file"
        path.unlink()
        with pytest.raises(ckptfmt.CorruptError) as caught:
            ckptfmt.load(tmp_path, mode=mode)
        assert caught.value.kind == "corrupt-missing-file"
        (tmp_path / "secret").write_bytes(good)
        path.symlink_to(tmp_path / "secret")
        with pytest.raises(ckptfmt.CheckpointError):
            ckptfmt.load(tmp_path, mode=mode)
        path.unlink()


def test_m05_13_verification_finds_every_kind_of_damage_and_names_it(tmp_path: Path) -> None:
    """M05-13, M05-14. What the spec calls `corrupt-file-id`, `corrupt-algorithm` and
    `corrupt-table-mismatch` is a damage in the report."""
    ckptfmt.save({"first": np.arange(100, dtype=np.int64), "second": np.ones(100)}, tmp_path)
    (name,) = keys(tmp_path, "data")
    path = tmp_path / "data" / name
    good = path.read_bytes()
    store = ckptfmt.Store(tmp_path)
    assert store.verify().ok

    def damages(data: bytes) -> list[ckptfmt.Damage]:
        path.write_bytes(data)
        return list(store.verify().problems)

    def flip(position: int, mask: int = 1) -> bytes:
        return good[:position] + bytes([good[position] ^ mask]) + good[position + 1 :]

    table_at = int.from_bytes(good[-64:-56], "little")
    for position, tensor in ((64, "first"), (64 + 832 + 8, "second")):
        found = damages(flip(position))
        assert [d.tensor for d in found] == [tensor]
        assert found[0].start <= position < found[0].stop
        assert found[0].file == f"data/{name}"
        assert found[0].checkpoint == "main"
    for position in (
        0,
        12,
        40,
        64 + 800 + 5,
        table_at,
        table_at - 1,
        len(good) - 65,
        len(good) - 1,
    ):
        found = damages(flip(position, 3))
        assert found, position
        assert any(d.start <= position < d.stop for d in found), position
    other = tmp_path / "other"
    ckptfmt.save({"first": np.arange(100, dtype=np.int64), "second": np.zeros(100)}, other)
    (other_name,) = keys(other, "data")
    assert damages((other / "data" / other_name).read_bytes())


def test_m06_3_chunks_of_another_digest_are_not_reused(tmp_path: Path) -> None:
    """M06-3."""
    ckptfmt.save(tree(1), tmp_path, step=1)
    info = ckptfmt.save(tree(1), tmp_path, step=2, digest="sha256")
    assert info.written_nbytes > 0
    assert sorted(map(len, keys(tmp_path, "data"))) == [32, 64]


@pytest.mark.parametrize("name", ["posit24", "datetime64[0ns]", "datetime64[01s]", "float128"])
def test_a_dtype_that_nobody_knows_is_opaque(name: str) -> None:
    """M04-8: also what only looks like one of NumPy's names."""
    opaque = numpy_dtype(Dtype(name, 24))
    assert (opaque.kind, opaque.itemsize) == ("V", 3)


# -- 8. the protocol --------------------------------------------------------------------------------


def test_m08_1_the_index_is_put_last(tmp_path: Path) -> None:
    """M08-1, M08-2, M08-3, M08-13: `open` first, data, lists before sizes, the index, the lists
    again, `open` last."""
    ckptfmt.save(tree(1), tmp_path, step=1)
    store, backend = watched(tmp_path)
    later = tree(1)
    later["w"][0] = -1
    ckptfmt.save(later, store, step=2)
    opened = first(backend, "finish", "parts/")
    base = first(backend, "get", "checkpoints/", opened)
    data = first(backend, "finish", "data/", base)
    lists = first(backend, "list", "gc/", data)
    first(backend, "stat", "data/", lists)
    synced = first(backend, "sync", "data/", lists - 3)
    commit = first(backend, "put_if_absent", "checkpoints/", data)
    assert opened < data < lists < commit
    assert synced < commit
    again = first(backend, "list", "gc/", commit)
    sizes = first(backend, "stat", "data/", again)
    closed = first(backend, "delete", "parts/", sizes)
    assert commit < again < sizes < closed
    assert keys(tmp_path, "parts") == [] or not list((tmp_path / "parts").rglob("open"))


def test_m08_4_a_save_whose_file_is_condemned_after_the_commit_withdraws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M08-4, M08-14: condemned before, it is written under another id; after, it is withdrawn."""
    store = ckptfmt.Store(tmp_path)
    ckptfmt.save(tree(1), store, step=1)
    (name,) = keys(tmp_path, "data")
    listed = json.dumps({"ids": [name], "owner": None})
    store.delete(1)
    (tmp_path / "gc").mkdir(exist_ok=True)
    (tmp_path / "gc" / ("0" * 32)).write_text(listed)
    ckptfmt.save(tree(1), store, step=1)
    assert len(keys(tmp_path, "data")) == 2
    used = ckptfmt.open(tmp_path)["w"]
    assert used.read().tolist() == tree(1)["w"].tolist()

    backend = store.backend
    put = type(backend).put_if_absent

    def then_condemn(self: Any, key: Key, data: Any, *, durable: bool) -> bool:
        done: bool = put(self, key, data, durable=durable)
        if key.startswith("checkpoints/"):
            ids = keys(tmp_path, "data")
            (tmp_path / "gc" / ("1" * 32)).write_text(json.dumps({"ids": ids, "owner": None}))
        return done

    monkeypatch.setattr(type(backend), "put_if_absent", then_condemn)
    with pytest.raises(ckptfmt.ConflictError):
        ckptfmt.save(tree(2), store, step=2)
    assert keys(tmp_path, "checkpoints") == ["step-0000000000000001~0.index"]


def test_m08_9_the_same_tree_again_writes_no_data(tmp_path: Path) -> None:
    """M08-9."""
    ckptfmt.save(tree(1), tmp_path, step=1)
    before = keys(tmp_path, "data")
    store, backend = watched(tmp_path)
    info = ckptfmt.save(tree(1), store, step=1)
    assert info.generation == 0
    assert keys(tmp_path, "data") == before
    assert [o for o in backend.log if o.kind == "create" and o.key.startswith("data/")] == []
    assert ckptfmt.save(tree(1), tmp_path, step=2).written_nbytes == 0


def test_m08_10_a_reader_writes_nothing(tmp_path: Path) -> None:
    """M08-10: not a byte, not a folder, even where it looks for what is not there."""
    ckptfmt.save(tree(1), tmp_path, step=1)

    def state() -> dict[str, tuple[int, int]]:
        return {
            str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(tmp_path.rglob("*"))
        }

    before = state()
    ckptfmt.load(tmp_path)
    with ckptfmt.open(tmp_path) as checkpoint:
        checkpoint["w"].read(np.s_[3:5])
        checkpoint.tree()
    store = ckptfmt.Store(tmp_path, read_only=True)
    store.checkpoints(), store.tags(), store.latest()
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.load(tmp_path / "nowhere")
    assert state() == before


def test_m08_21_deleting_takes_the_index_durably_and_leaves_the_data(tmp_path: Path) -> None:
    """M08-21, M08-22: lowest generation first, each made durable; data goes by collection."""
    ckptfmt.save(tree(1), tmp_path)
    folder = tmp_path / "checkpoints"
    document = (folder / "main~0.index").read_bytes()
    for generation in (9, 10):
        (folder / f"main~{generation}.index").write_bytes(document)
    store, backend = watched(tmp_path)
    store.delete("main")
    deleted = [
        o.key for o in backend.log if o.kind == "delete" and o.key.startswith("checkpoints/")
    ]
    assert deleted == [f"checkpoints/main~{g}.index" for g in (0, 9, 10)]
    for number in (o.number for o in backend.log if o.kind == "delete"):
        first(backend, "sync", "checkpoints/", number)
    assert not [o for o in backend.log if o.kind == "delete" and o.key.startswith("data/")]
    assert len(keys(tmp_path, "data")) == 1
    assert store.gc(grace_s=0).freed_nbytes > 0
    assert keys(tmp_path, "data") == []


def test_m09_5_unknown_keys_survive_a_move(tmp_path: Path) -> None:
    """M09-5: what a later version added is still there after quarantine and back."""
    twin = json.loads((VECTORS / "index-unknown-keys.json").read_text())
    document = (VECTORS / "index-unknown-keys.bin").read_bytes()
    for part in ("checkpoints", "data"):
        (tmp_path / part).mkdir()
    (tmp_path / "checkpoints" / "main~0.index").write_bytes(document)
    for name in twin["data"]:
        target = json.loads((VECTORS / f"{name}.json").read_text())["id"]
        shutil.copy(VECTORS / f"{name}.bin", tmp_path / "data" / target)
    store = ckptfmt.Store(tmp_path)
    store.quarantine("main", "why not")
    store.readmit("main")
    assert (tmp_path / "checkpoints" / "main~0.index").read_bytes() == document
