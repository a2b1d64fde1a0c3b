"""Every damage is found and named, and no damaged byte is ever handed out. Spec: 05, 07, 08."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.events import Event
from ckptfmt.format import (
    Attribute,
    TreeSection,
    digest,
    pack_index,
    pack_tree,
    pack_value,
    parse_index,
)
from ckptfmt.reports import Damage, VerifyReport
from ckptfmt.testing import difference
from ckptfmt.types import Key


def small_tree(step: int) -> dict[str, Any]:
    """Every kind of leaf in a store of a few KiB."""
    return {
        "w": np.arange(step, step + 40, dtype=np.float32),
        "b": np.array([1, -2, 3], ml_dtypes.int4),
        "s": np.array(["a", "bc"], object),
        "v": (1, None, "x"),
        "e": np.zeros((0, 2)),
    }


@dataclasses.dataclass
class Small:
    """A store in memory with steps 1 and 2, pristine before each flip."""

    store: ckptfmt.Store
    trees: dict[int, dict[str, Any]]

    def keys(self, folder: str) -> list[Key]:
        return [entry.key for entry in self.store.backend.list(f"{folder}/")]

    def bytes_of(self, key: Key) -> bytes:
        return bytes(self.store.backend.get(key))

    def put(self, key: Key, data: bytes) -> None:
        """As a disk would change it, behind everyone's back; what was marked is forgotten."""
        for marked in self.keys("damaged"):
            self.store.backend.delete(marked)
        self.store.backend.put(key, data)

    def flipped(self, key: Key, masks: Sequence[int] = ()) -> Iterator[int]:
        """Flip each byte, one after another: its position.

        By default with a mask of one bit, another for each byte, and of a long run of zeros every
        16th alone.
        """
        data = self.bytes_of(key)
        for at, byte in enumerate(data):
            if not masks and at % 16 and not any(data[max(at - 32, 0) : at + 32]):
                continue
            for mask in masks or [1 << (at * 3 % 8)]:
                self.put(key, data[:at] + bytes([byte ^ mask]) + data[at + 1 :])
                yield at
        self.put(key, data)


@pytest.fixture(params=["raw", pytest.param("zstd", marks=pytest.mark.slow)])
def small(request: pytest.FixtureRequest) -> Small:
    store = ckptfmt.Store("memory://")
    trees = {step: small_tree(step) for step in (1, 2)}
    for step, tree in trees.items():
        ckptfmt.save(tree, store, step=step, codec=request.param, metrics={"m": 1.0})
    store.tag("best", 1)
    store.annotate(2, metrics={"late": 2.0})
    return Small(store, trees)


def never_other_values(small: Small, **options: Any) -> None:
    """A load gives step 2, or, with a warning, step 1, or an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loaded = ckptfmt.load(small.store, **options)
        except ckptfmt.CheckpointError:
            return
    if difference(loaded, small.trees[2]):
        assert not difference(loaded, small.trees[1])
        [warned] = [w for w in caught if issubclass(w.category, ckptfmt.CkptWarning)]
        assert "skipped" in str(warned.message)


def chunks_of(small: Small, step: int) -> Iterator[tuple[str, Key, int, int]]:
    """(leaf, file, start, stop) of each chunk."""
    index = small.store.open(step).index
    owners = np.repeat(index.tree.region_tensors, index.tree.region_nchunks)
    for row, tensor in enumerate(owners.tolist()):
        file = index.files.ids[int(index.placement.files[row])]
        start = int(index.placement.offsets[row])
        leaf = index.tree.leaf_names[int(index.tree.tensor_first_leaf[tensor])]
        yield leaf, Key(f"data/{file}"), start, start + int(index.placement.stored[row])


def test_a_good_store_is_good(small: Small) -> None:
    report = small.store.verify()
    assert report.ok
    assert bool(report)
    assert (report.checkpoints, report.files) == (2, len(small.keys("data")))
    assert report.nbytes == sum(len(small.bytes_of(key)) for key in small.keys("data"))
    assert small.keys("damaged") == []


def check_flips_of_data(small: Small, key: Key, masks: Sequence[int] = ()) -> None:
    uses = [
        (step, leaf, start, stop)
        for step in (1, 2)
        for leaf, file, start, stop in chunks_of(small, step)
        if file == key
    ]
    nbytes = len(small.bytes_of(key))
    for at in small.flipped(key, masks):
        problems = small.store.verify().problems
        assert problems, f"{key}[{at}]"
        assert {p.file for p in problems} == {key}
        assert any(p.start <= at < p.stop for p in problems), f"{key}[{at}]: {problems}"
        assert small.keys("damaged") == [key.replace("data/", "damaged/")]
        hits = {(p.checkpoint, p.tensor, p.start, p.stop) for p in problems if p.tensor}
        hit = [use for use in uses if use[2] <= at < use[3]]
        if hit:
            assert hits == {(f"step-{step:016d}", leaf, a, b) for step, leaf, a, b in hit}
            with pytest.raises(ckptfmt.CorruptError, match=r"data/[0-9a-f]+\[\d+:\d+\), tensor"):
                ckptfmt.load(small.store, step=hit[0][0])
        elif "table cannot be read" in problems[0].reason:
            assert len(hits) == len(uses)  # what the table is needed for cannot be told
        else:
            assert hits == set()
            assert at < 64 or problems[0].reason == "padding is not zero" or at >= nbytes - 64
        if at % 16 == 0 or hit:
            never_other_values(small)


def test_every_flipped_byte_of_a_data_file_is_found_named_and_never_returned(small: Small) -> None:
    """Head, chunks, zeros between them, table and footer."""
    check_flips_of_data(small, next(chunks_of(small, 1))[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("masks", [(1,), (128,)])
def test_every_flipped_byte_of_every_data_file_is_found(small: Small, masks: Sequence[int]) -> None:
    for key in small.keys("data"):
        check_flips_of_data(small, key, masks)


def check_flips_of_index(small: Small, step: int, masks: Sequence[int] = ()) -> None:
    [key] = [k for k in small.keys("checkpoints") if f"{step}~" in k]
    nbytes = len(small.bytes_of(key))
    for at in small.flipped(key, masks):
        [problem] = small.store.verify().problems
        found = (problem.file, problem.start, problem.stop, problem.checkpoint)
        assert found == (key, 0, nbytes, f"step-{step:016d}"), f"{key}[{at}]"
        assert small.keys("damaged") == []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = ckptfmt.load(small.store)
        assert not difference(loaded, small.trees[1 if step == 2 else 2])
        named = [str(w.message) for w in caught if w.category is ckptfmt.CkptWarning]
        assert [key in text for text in named] == [True] * (step == 2)
        if at % 8 == 0:
            warnings.simplefilter("ignore")
            with pytest.raises(ckptfmt.FormatError):
                ckptfmt.load(small.store, step=step)


def test_every_flipped_byte_of_an_index_is_found_and_costs_at_most_its_step(small: Small) -> None:
    with warnings.catch_warnings():
        check_flips_of_index(small, 2)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("masks", [(1,), (128,)])
def test_every_flipped_byte_of_every_index_is_found(
    small: Small, step: int, masks: Sequence[int]
) -> None:
    with warnings.catch_warnings():
        check_flips_of_index(small, step, masks)


def test_a_flipped_byte_of_a_note_is_found_and_the_note_skipped(small: Small) -> None:
    [note] = small.keys("notes")
    for at in small.flipped(note):
        assert [p.file for p in small.store.verify().problems] == [note], at
        if at % 8 == 0:
            with pytest.warns(ckptfmt.CkptWarning, match="skipped notes/"):
                assert small.store.open().info.metrics == {"m": 1.0}


def test_a_flipped_byte_of_a_tag_never_makes_it_another_checkpoint(small: Small) -> None:
    for at in small.flipped(Key("tags/best")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loaded = ckptfmt.load(small.store, at="best")
            except ckptfmt.CheckpointError:
                continue
        assert not difference(loaded, small.trees[1]), at


def test_a_flipped_byte_of_the_marker_stops_no_reader(small: Small) -> None:
    for at in small.flipped(Key("ckptfmt.json")):
        if at % 8 == 0:
            assert not difference(ckptfmt.load(small.store), small.trees[2])


def test_a_missing_short_or_long_file_is_found_and_named(small: Small) -> None:
    key = next(chunks_of(small, 1))[1]
    leaves = {leaf for leaf, file, _, _ in chunks_of(small, 1) if file == key}
    data = small.bytes_of(key)
    small.store.backend.delete(key)
    report = small.store.verify()
    assert {p.reason for p in report.problems} == {"data file is missing"}
    assert leaves == {p.tensor for p in report.problems}
    never_other_values(small)
    for cut in (0, 1, 63, 64, len(data) // 2, len(data) - 64, len(data) - 1):
        small.put(key, data[:cut])
        report = small.store.verify()
        assert not report.ok, cut
        assert leaves == {p.tensor for p in report.problems if p.tensor}, cut
        never_other_values(small)
    for junk in (b"x", b"\0" * 4096, data):
        small.put(key, data + junk)
        assert not small.store.verify().ok, len(junk)
        never_other_values(small)
    small.put(key, data)
    assert small.store.verify().ok


def test_another_good_file_in_its_place_is_found(small: Small) -> None:
    a, b = small.keys("data")
    small.put(a, small.bytes_of(b))
    report = small.store.verify()
    assert any("belongs to the id" in p.reason for p in report.problems)
    assert {p.file for p in report.problems} == {a}
    never_other_values(small)


def test_another_good_index_under_its_name_is_found(small: Small) -> None:
    one, two = small.keys("checkpoints")
    small.put(two, small.bytes_of(one))
    [problem] = small.store.verify().problems
    assert (problem.file, "another name" in problem.reason) == (two, True)
    with pytest.warns(ckptfmt.CkptWarning, match="another name"):
        assert not difference(ckptfmt.load(small.store), small.trees[1])


def test_one_checkpoint_alone_can_be_verified(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.zeros(9)}, tmp_path, step=1)
    ckptfmt.save({"b": np.ones(9)}, tmp_path, step=2)
    [file] = ckptfmt.open(tmp_path, step=1).index.files.ids
    damage(tmp_path / "data" / file, 70)
    store = ckptfmt.Store(tmp_path)
    assert store.verify(2).ok
    assert store.verify("latest").ok
    [problem] = store.verify(1).problems
    expected = Damage(f"data/{file}", 64, 136, "step-0000000000000001", "a", "chunk digest differs")
    assert dataclasses.replace(problem, reason="chunk digest differs") == expected
    with pytest.raises(ckptfmt.NotFoundError):
        store.verify(7)


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_selected_leaves_of_an_open_checkpoint_can_be_verified(tmp_path: Path) -> None:
    tree = {"m": {"a": np.arange(9), "b": np.arange(99)}, "v": 1}
    ckptfmt.save(tree, tmp_path)
    checkpoint = ckptfmt.open(tmp_path)
    assert checkpoint.verify().ok
    [file] = (tmp_path / "data").iterdir()
    start = int(checkpoint.index.placement.offsets[1])
    damage(file, start + 5)
    assert checkpoint.verify("m/a").ok
    assert checkpoint.verify(["v"]).ok
    [problem] = checkpoint.verify("m/b").problems
    assert (problem.tensor, problem.start, problem.stop) == ("m/b", start, start + 792)
    assert [p.tensor for p in checkpoint.verify().problems] == ["m/b"]


def test_names_that_match_nothing_cannot_be_verified(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(2)}, tmp_path)
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.open(tmp_path).verify("b")


def test_verify_reads_with_the_workers_of_an_executor(small: Small) -> None:
    key = small.keys("data")[0]
    data = bytearray(small.bytes_of(key))
    data[65] ^= 1
    small.put(key, bytes(data))
    alone = small.store.verify()
    with concurrent.futures.ThreadPoolExecutor(3) as executor:
        assert small.store.verify(executor=executor) == alone


def test_verify_reports_progress(small: Small) -> None:
    events: list[Event] = []
    report = small.store.verify(progress=events.append)
    assert events[-1].nbytes == events[-1].total_nbytes == report.nbytes
    assert {event.kind for event in events} == {"verify"}


def test_verify_covers_what_is_set_aside(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(99)}, tmp_path, step=1)
    store = ckptfmt.Store(tmp_path)
    store.quarantine(1, "bad loss")
    [file] = (tmp_path / "data").iterdir()
    damage(file, 100)
    assert [p.tensor for p in store.verify().problems] == ["a"]


def test_a_data_file_that_nobody_uses_is_no_damage(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(99)}, tmp_path, step=1)
    ckptfmt.save({"a": np.arange(9)}, tmp_path, step=1, if_exists="replace")
    assert len(list((tmp_path / "data").iterdir())) == 2
    assert ckptfmt.Store(tmp_path).verify().files == 1


def test_verify_of_nothing_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ckptfmt.NotFoundError, match=r"there is no checkpoint.* found nothing"):
        ckptfmt.Store(tmp_path / "none").verify()
    assert not (tmp_path / "none").exists()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a").write_text("x")
    with pytest.raises(ckptfmt.NotFoundError, match=r"found logs/, notes\.txt; check the path"):
        ckptfmt.Store(tmp_path).verify()
    ckptfmt.save({"a": 1}, tmp_path / "runs/a")
    ckptfmt.save({"a": 1}, tmp_path / "runs/b")
    with pytest.raises(ckptfmt.NotFoundError, match="stores below it: a, b; choose one"):
        ckptfmt.Store(tmp_path / "runs").verify()
    with pytest.raises(ckptfmt.NotFoundError, match="stores below it: a, b; choose one"):
        ckptfmt.load(tmp_path / "runs")


def test_a_store_whose_checkpoints_are_gone_is_verified(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path)
    store = ckptfmt.Store(tmp_path)
    store.delete("main")
    assert store.verify() == VerifyReport()


class Pair(NamedTuple):
    one: int
    two: object


def rewrite(path: Path, change: Callable[[TreeSection], TreeSection]) -> ckptfmt.Store:
    """Another tree section in the store's only index, all digests right."""
    store = ckptfmt.Store(path)
    (entry,) = store.backend.list("checkpoints/")
    index = parse_index(bytes(store.backend.get(entry.key)))
    packed = pack_tree(change(index.tree))
    about = dataclasses.replace(index.about, tree_digest=digest(packed, "xxh3-128"))
    commit_id = index.header.commit_id
    data = pack_index(about, index.files, index.placement, packed, commit_id)
    store.backend.put(entry.key, data)
    return store


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"values": [b"\xc1", b"\x01"]}, "p/0", "not a msgpack"),
        ({"values": [b"\x01", pack_value(1) * 2]}, "v", "value"),
        ({"container_arguments": [b"\xc1"]}, "p", "value"),
        ({"container_arguments": [pack_value(["Pair", ["one"]])]}, "p", "other fields"),
        (
            {"leaf_attributes": {"torch.x": Attribute(np.array([1], np.uint32), [b"\xc1"])}},
            "p/1",
            "attribute torch.x: ",
        ),
        ({"leaf_kinds": np.array([1, 2, 1], np.uint8)}, "p/1", "value"),
        ({"names": ["p/0", "p/2", "v"]}, "p", "0, 1, 2"),
    ],
)
def test_what_does_not_parse_is_a_damage_that_names_its_leaf(
    tmp_path: Path, change: dict[str, Any], name: str, reason: str
) -> None:
    """Every digest is right: a writer that has gone wrong, not a disk."""
    tree = {"p": Pair(1, np.full(9, 0xC1, np.uint8)), "v": None}
    ckptfmt.save(tree, tmp_path, step=3)
    store = rewrite(tmp_path, lambda found: dataclasses.replace(found, **change))
    report = store.verify()
    (found,) = report.problems
    assert found.tensor == name, found
    assert reason in found.reason
    assert found.file.startswith("checkpoints/step-0000000000000003~0")
    assert 288 < found.start < found.stop
    assert store.open().verify().problems[0].tensor == name
    assert list(store.backend.list("damaged/")) == [], "no data file is to be healed"


def test_verify_runs_nothing_that_is_registered(tmp_path: Path) -> None:
    class Opaque:
        pass

    def unpack(data: object) -> Opaque:
        raise AssertionError("verify made an object of a user's class")

    ckptfmt.register_type(Opaque, "test.opaque", pack=lambda obj: {"a": np.ones(2)}, unpack=unpack)
    ckptfmt.save({"o": Opaque(), "long": list(range(5000)), "p": Pair(1, (2, {3}))}, tmp_path)
    report = ckptfmt.Store(tmp_path).verify()
    assert report.ok, report.problems
    assert report.checkpoints == 1


def test_a_read_only_store_is_verified_and_not_marked(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(99)}, tmp_path, step=1)
    [file] = (tmp_path / "data").iterdir()
    damage(file, 100)
    store = ckptfmt.Store(tmp_path, read_only=True)
    assert not store.verify().ok
    with pytest.raises(ckptfmt.CorruptError):
        ckptfmt.load(store)
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("found_by", ["load", "verify"])
def test_the_next_save_heals_the_store(tmp_path: Path, found_by: str) -> None:
    """I7: no chunk of a file known to be rotten is reused."""
    tree = {"a": np.arange(5000), "b": np.ones(5000)}
    ckptfmt.save(tree, tmp_path, step=1)
    [file] = (tmp_path / "data").iterdir()
    good = file.read_bytes()
    damage(file, 4100)
    if found_by == "load":
        with pytest.raises(ckptfmt.CorruptError):
            ckptfmt.load(tmp_path)
    else:
        assert not ckptfmt.Store(tmp_path).verify().ok
    assert [f.name for f in (tmp_path / "damaged").iterdir()] == [file.name]
    info = ckptfmt.save({**tree, "c": 1}, tmp_path, step=2)
    assert info.written_nbytes >= 80_000
    assert not difference(ckptfmt.load(tmp_path), {**tree, "c": 1})
    # The same content has the same id: the rotten file was replaced, and step 1 is whole again.
    assert file.read_bytes() == good
    assert not difference(ckptfmt.load(tmp_path, step=1), tree)
    assert list((tmp_path / "damaged").iterdir()) == []
    assert ckptfmt.Store(tmp_path).verify().ok


@pytest.mark.damaged_store
def test_unknown_damage_is_reused_but_found_by_the_next_load(tmp_path: Path) -> None:
    tree = {"a": np.arange(5000)}
    ckptfmt.save(tree, tmp_path, step=1)
    [file] = (tmp_path / "data").iterdir()
    damage(file, 4100)
    ckptfmt.save(tree, tmp_path, step=2)
    with pytest.raises(ckptfmt.CorruptError):
        ckptfmt.load(tmp_path)
    info = ckptfmt.save(tree, tmp_path, step=3)
    assert info.written_nbytes > 0
    assert not difference(ckptfmt.load(tmp_path), tree)


def test_a_truncated_base_file_is_not_reused(tmp_path: Path) -> None:
    tree = {"a": np.arange(5000)}
    ckptfmt.save(tree, tmp_path, step=1)
    [file] = (tmp_path / "data").iterdir()
    file.write_bytes(file.read_bytes()[:4096])
    info = ckptfmt.save(tree, tmp_path, step=2)
    assert info.written_nbytes > 0
    assert not difference(ckptfmt.load(tmp_path), tree)
    file.unlink()
    assert ckptfmt.save({**tree, "b": 1}, tmp_path, step=3).written_nbytes > 0
    assert not difference(ckptfmt.load(tmp_path), {**tree, "b": 1})
