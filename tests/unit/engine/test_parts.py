"""A save by several ranks, step by step, with no process group: here all in one process."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine import FlatTree, TensorSource, flatten
from ckptfmt.engine.parts import (
    PartsTicket,
    abort_parts,
    begin_parts,
    commit_parts,
    plan_part,
    share_parts,
    write_part,
)
from ckptfmt.engine.plan import SaveOptions
from ckptfmt.engine.request import SaveRequest
from ckptfmt.engine.sharded import Sharded
from ckptfmt.format import parse_fragment, parse_index, parse_value
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.testing import FaultyBackend
from ckptfmt.types import CheckpointInfo, IfExists, Key

Tree = dict[str, Any]


def begin(store: ckptfmt.Store, step: int = 1, **options: Any) -> PartsTicket:
    if_exists: IfExists = options.pop("if_exists", "error")
    request = SaveRequest(f"step-{step:016}", step, {"a": 1}, {}, if_exists, SaveOptions(**options))
    ticket = begin_parts(store.backend, request)
    assert isinstance(ticket, PartsTicket)
    return PartsTicket.of_bytes(ticket.to_bytes())


def write(
    store: ckptfmt.Store, ticket: PartsTicket, trees: Sequence[Tree], *, shared: bool = True
) -> list[bytes]:
    parts = [
        plan_part(flatten(tree, rank=rank), ticket, rank, len(trees))
        for rank, tree in enumerate(trees)
    ]
    shares = None
    if shared:
        shares = share_parts(store.backend, ticket, [part.claim() for part in parts])
    return [write_part(store.backend, part, shares) for part in parts]


def save(
    store: ckptfmt.Store,
    trees: Sequence[Tree],
    step: int = 1,
    *,
    shared: bool = True,
    **options: Any,
) -> CheckpointInfo:
    ticket = begin(store, step, **options)
    try:
        fragments = write(store, ticket, trees, shared=shared)
    except BaseException:
        abort_parts(store.backend, ticket)
        raise
    return commit_parts(store.backend, ticket, fragments[::-1])


def rows(array: Any, rank: int, size: int) -> Sharded:
    at = [len(array) * r // size for r in range(size + 1)]
    mine = array[at[rank] : at[rank + 1]]
    parts = [((at[rank], *(0 for _ in array.shape[1:])), mine)] if len(mine) else []
    return Sharded(array.shape, parts, array.dtype)


def data_files(root: Path) -> list[Path]:
    return sorted((root / "data").iterdir())


@pytest.fixture
def store(tmp_path: Path) -> ckptfmt.Store:
    return ckptfmt.Store(tmp_path / "run")


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("shared", [True, False])
def test_what_several_ranks_saved_loads_in_one_process(
    store: ckptfmt.Store, codec: str, shared: bool
) -> None:
    weight, table = np.round(random(7, 5), 1), random(3, 40, 4)

    def tree(rank: int) -> Tree:
        return {
            "model": {"w": rows(weight, rank, 3), "table": rows(table, rank, 3)},
            "bias": random(9),
            "step": 7,
            "names": ["a", np.arange(3)],
            "text": np.array(["x", "yz"], object),
            "none": np.zeros((0, 3)),
        }

    info = save(store, [tree(r) for r in range(3)], codec=codec, chunk_nbytes=4096, shared=shared)
    assert (info.step, info.metadata, info.tensors) == (1, {"a": 1}, 6)
    loaded = ckptfmt.load(store)
    assert list(loaded) == ["model", "bias", "step", "names", "text", "none"]
    np.testing.assert_array_equal(loaded["model"]["w"], weight)
    np.testing.assert_array_equal(loaded["model"]["table"], table)
    np.testing.assert_array_equal(loaded["bias"], random(9))
    assert loaded["step"] == 7
    assert loaded["names"][0] == "a"
    assert loaded["text"].tolist() == ["x", "yz"]
    assert loaded["none"].shape == (0, 3)
    assert store.verify().ok
    assert store.backend.stat(f"parts/{'0' * 32}/open") is None  # type: ignore[arg-type]
    assert list(store.backend.list("parts/")) == []
    assert list(store.backend.list("tmp/")) == []


def test_what_all_ranks_hold_is_written_once_and_spread_over_them(
    store: ckptfmt.Store, tmp_path: Path
) -> None:
    tree = {f"layer{i}": random(1 << 18, seed=i) for i in range(4)}
    tree |= {f"small{i}": random(100, seed=100 + i) for i in range(40)}
    ticket = begin(store)
    fragments = write(store, ticket, [tree, tree])
    sizes = [sum(len(p.read_bytes()) for p in data_files(tmp_path / "run"))]
    info = commit_parts(store.backend, ticket, fragments)
    total = sum(array.nbytes for array in tree.values())
    assert sizes[0] < total + 20_000
    assert info.written_nbytes == sizes[0]
    files = data_files(tmp_path / "run")
    assert len(files) == 2
    assert max(f.stat().st_size for f in files) < 0.55 * total
    for name, array in ckptfmt.load(store).items():
        np.testing.assert_array_equal(array, tree[name])


def test_saving_the_same_parts_again_writes_nothing_and_is_the_same_tree(
    store: ckptfmt.Store, tmp_path: Path
) -> None:
    w = random(64, 64)
    trees = [{"w": rows(w, r, 2), "b": random(5)} for r in range(2)]
    first = save(store, trees, 1)
    before = data_files(tmp_path / "run")
    second = save(store, trees, 2)
    assert second.written_nbytes == 0
    assert second.digest == first.digest
    assert data_files(tmp_path / "run") == before
    again = save(store, trees, 2)  # the same tree under its own name succeeds
    assert (again.generation, again.digest) == (0, first.digest)
    with pytest.raises(ckptfmt.ExistsError, match="holds another tree"):
        save(store, [{"w": rows(w + 1, r, 2), "b": random(5)} for r in range(2)], 2)
    with pytest.raises(ckptfmt.ExistsError, match="holds another tree"):
        save(store, [{"w": rows(w, r, 2)} for r in range(2)], 2)
    assert list(store.backend.list("parts/")) == []


def test_ranks_with_trees_of_their_own_make_one_tree(store: ckptfmt.Store) -> None:
    """As pipeline stages have them; a dict has the keys of the lower ranks first."""
    first = {"model": {"layer0": random(3), "norm": random(2, seed=1)}, "opt": {"lr": 0.1}}
    second = {
        "model": {"layer1": random(4, seed=2), "norm": random(2, seed=1)},
        "opt": collections.OrderedDict(),
        "extra": (np.arange(2), "x"),
    }
    second["opt"] = {"lr": 0.1}
    save(store, [first, second])
    loaded = ckptfmt.load(store)
    assert list(loaded) == ["model", "opt", "extra"]
    assert list(loaded["model"]) == ["layer0", "norm", "layer1"]
    assert type(loaded["extra"]) is tuple
    np.testing.assert_array_equal(loaded["model"]["layer1"], random(4, seed=2))
    assert ckptfmt.open(store).names() == [
        "model/layer0", "model/norm", "model/layer1", "opt/lr", "extra/0", "extra/1",
    ]  # fmt: skip


def test_per_rank_values_stand_beside_each_other(store: ckptfmt.Store) -> None:
    save(store, [{"rng": ckptfmt.torch.per_rank({"seed": r}), "w": random(3)} for r in range(2)])
    assert ckptfmt.load(store)["rng"] == {"0": {"seed": 0}, "1": {"seed": 1}}


def test_ties_survive_also_where_a_rank_holds_nothing_of_them(store: ckptfmt.Store) -> None:
    w = random(2, 3)

    def tree(rank: int) -> Tree:
        part = rows(w, rank, 3)  # rank 0 holds none
        return {"a": part, "b": part if part.parts else rows(w, rank, 3)}

    save(store, [tree(r) for r in range(3)])
    assert ckptfmt.open(store).ties() == [["a", "b"]]
    loaded = ckptfmt.load(store)
    assert loaded["a"] is loaded["b"]
    np.testing.assert_array_equal(loaded["a"], w)


def test_boxes_in_any_cut_are_put_together_in_order(store: ckptfmt.Store) -> None:
    whole = np.arange(6 * 8 * 2, dtype=np.int16).reshape(6, 8, 2)

    def boxes(*cuts: tuple[int, int, int, int]) -> Sharded:
        return Sharded(
            whole.shape, [((r, c, 0), whole[r : r + h, c : c + w]) for r, c, h, w in cuts]
        )

    save(
        store,
        [{"t": boxes((3, 5, 3, 3), (0, 0, 3, 4))}, {"t": boxes((0, 4, 3, 4), (3, 0, 3, 5))}],
    )
    np.testing.assert_array_equal(ckptfmt.load(store)["t"], whole)
    part = ckptfmt.open(store)["t"].read(np.s_[2:5, 3:7])
    np.testing.assert_array_equal(part, whole[2:5, 3:7])


def test_boxes_are_cut_where_a_store_cannot_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfmt.engine.parts.FILE_NBYTES_TARGET_REMOTE", 8 << 10)
    store = ckptfmt.Store("memory://", storage_options={"late_key": False})
    whole = np.arange(40 * 300, dtype=np.int32).reshape(40, 300)
    halves = [
        Sharded(whole.shape, [((0, 150 * r), np.ascontiguousarray(whole[:, 150 * r :][:, :150]))])
        for r in range(2)
    ]
    same = np.arange(30_000, dtype=np.int16)
    save(store, [{"t": t, "same": same} for t in halves], codec="zstd", chunk_nbytes=4096)
    loaded = ckptfmt.load(store)
    np.testing.assert_array_equal(loaded["t"], whole)
    np.testing.assert_array_equal(loaded["same"], same)
    assert len(ckptfmt.open(store).index.tree.region_tensors) > 10


# -- disagreements: the leaf and the ranks are named, nothing is committed


def differ(change: Tree) -> list[Tree]:
    same = {"w": random(4, 4), "n": 1, "list": [random(2), 3], "s": rows(random(4, 4), 0, 1)}
    return [same, same | change]


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        (differ({"w": random(4, 4, seed=1)}), r"differs between them: 'w': .*ranks \d, \d"),
        (differ({"w": random(4, 5)}), "another dtype or shape on different ranks: 'w'.*ranks 0, 1"),
        (differ({"w": random(4, 4).astype("f8")}), "another dtype or shape.*'w'.*ranks 0, 1"),
        (differ({"n": 2}), "a plain value differs on different ranks: 'n': found ranks 0, 1"),
        (differ({"n": random(1)}), "another kind of leaf.*'n'.*ranks 0, 1"),
        (differ({"n": {"m": 1}}), "leaf on one rank and holds leaves on another.*'n'"),
        (differ({"list": (random(2), 3)}), "containers of two kinds.*'list'"),
        (differ({"n": list(range(3000))}), "another kind of leaf, or another value.*'n'"),
        (
            [{"s": rows(random(4, 4), 0, 3)}, {"s": rows(random(4, 4), 1, 3)}],
            (
                r"does not cover the tensor exactly once: 's': expected boxes that tile \(4, 4\), "
                r"found rank 0 \[0:1, 0:4\]; rank 1 \[1:2, 0:4\]"
            ),
        ),
        (
            [{"s": rows(random(4, 4), 0, 1)}, {"s": rows(random(4, 4), 1, 2)}],
            r"exactly once: 's': .*rank 0 \[0:4, 0:4\]; rank 1 \[2:4, 0:4\]",
        ),
        (
            [{"p": list(range(3000))}, {"p": list(range(2999, -1, -1))}],
            "a plain value differs on different ranks: 'p'",
        ),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_ranks_that_disagree_are_named(
    store: ckptfmt.Store, trees: list[Tree], message: str, shared: bool
) -> None:
    """M08-24, M08-25, M08-26."""
    with pytest.raises(ckptfmt.MismatchError, match=message):
        save(store, trees, shared=shared)
    assert store.names() == []
    assert list(store.backend.list("parts/")) == []


def test_a_tie_on_one_rank_alone_is_refused(store: ckptfmt.Store) -> None:
    w = random(3)
    with pytest.raises(ckptfmt.MismatchError, match=r"tied to another tensor, or not.*'b'.*ranks"):
        save(store, [{"a": w, "b": w}, {"a": w, "b": w.copy()}])


# -- fragments of other saves


def test_a_fragment_of_another_attempt_is_refused(store: ckptfmt.Store) -> None:
    """M08-23."""
    trees = [{"w": rows(random(4), r, 2)} for r in range(2)]
    stale = begin(store)
    old = write(store, stale, trees)
    ticket = begin(store)
    new = write(store, ticket, trees)
    with pytest.raises(ckptfmt.ConflictError, match="of another save: rank 1"):
        commit_parts(store.backend, ticket, [new[0], old[1]])
    assert store.names() == []
    abort_parts(store.backend, stale)


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        ([0], "another number of ranks: rank 0: expected 1, found 2"),
        ([0, 0], "there twice"),
        ([], "there twice"),
    ],
)
def test_exactly_one_fragment_of_each_rank_is_taken(
    store: ckptfmt.Store, pick: list[int], message: str
) -> None:
    ticket = begin(store)
    fragments = write(store, ticket, [{"w": rows(random(4), r, 2)} for r in range(2)])
    with pytest.raises(ckptfmt.ConflictError, match=message):
        commit_parts(store.backend, ticket, [fragments[i] for i in pick])
    assert store.names() == []


def test_a_file_that_is_gone_before_the_commit_is_found(
    store: ckptfmt.Store, tmp_path: Path
) -> None:
    ticket = begin(store)
    fragments = write(store, ticket, [{"w": rows(random(4), r, 2)} for r in range(2)])
    data_files(tmp_path / "run")[0].unlink()
    with pytest.raises(ckptfmt.ConflictError, match="condemned files of this save"):
        commit_parts(store.backend, ticket, fragments)
    assert store.names() == []


def test_an_aborted_save_leaves_space_that_gc_takes_back(
    store: ckptfmt.Store, tmp_path: Path
) -> None:
    save(store, [{"w": random(3)}], 1)
    ticket = begin(store, 2)
    write(store, ticket, [{"w": rows(random(4), r, 2)} for r in range(2)])
    abort_parts(store.backend, ticket)
    assert len(data_files(tmp_path / "run")) == 3
    store.gc(grace_s=0)
    assert len(data_files(tmp_path / "run")) == 1
    assert store.steps() == [1]


def test_the_name_of_a_tag_is_refused_before_anything_begins(store: ckptfmt.Store) -> None:
    save(store, [{"w": random(3)}], 1)
    store.tag("best", 1)
    request = SaveRequest("best", None, {}, {}, "error", SaveOptions())
    with pytest.raises(ckptfmt.UsageError, match="this name is a tag"):
        begin_parts(store.backend, request)
    keep = replace(request, name="step-0000000000000001", step=1, if_exists="keep")
    kept = begin_parts(store.backend, keep)
    assert isinstance(kept, CheckpointInfo)
    assert list(store.backend.list("parts/")) == []


def test_a_rank_is_durable_before_its_fragment_is_there() -> None:
    """M08-27: whatever was not synced is lost, also if the committer syncs nothing more."""
    faulty = FaultyBackend(MemoryBackend(), power=True)
    request = SaveRequest("main", None, {}, {}, "replace", SaveOptions())
    ticket = begin_parts(faulty, request)
    assert isinstance(ticket, PartsTicket)
    part = plan_part(flatten({"w": random(30)}), ticket, 0, 1)
    files = parse_fragment(write_part(faulty, part)).index.files.ids
    medium = faulty.power_cut()
    assert [medium.stat(Key(f"data/{file}")) is not None for file in files] == [True]
    abort_parts(faulty, ticket)


def test_a_document_that_is_no_fragment_is_refused(store: ckptfmt.Store) -> None:
    save(store, [{"w": random(3)}])
    ticket = begin(store, 2)
    index = store.backend.get(Key("checkpoints/step-0000000000000001~0.index"))
    with pytest.raises(ckptfmt.CorruptError, match="an index, but not a fragment") as caught:
        commit_parts(store.backend, ticket, [bytes(index)])
    assert caught.value.kind == "corrupt-fragment"
    [fragment] = write(store, ticket, [{"w": random(3)}])
    broken = bytearray(fragment)
    broken[-1] ^= 1
    with pytest.raises(ckptfmt.CorruptError, match="section digest differs"):
        parse_fragment(bytes(broken))
    with pytest.raises(ckptfmt.CorruptError, match="regions do not tile"):
        parse_index(write(store, ticket, [{"w": rows(random(4), r, 2)} for r in range(2)])[0])


def test_attributes_that_ranks_do_not_agree_about_are_those_of_the_lowest(
    store: ckptfmt.Store,
) -> None:
    def leaf(**attributes: object) -> TensorSource:
        array = random(3)
        return TensorSource(
            "float32", (3,), array.__array__, None, {f"x.{k}": v for k, v in attributes.items()}
        )

    save(store, [{"w": leaf(a=1)}, {"w": leaf(a=2, b=3), "v": leaf(b=4)}])
    found = ckptfmt.open(store).index.tree.leaf_attributes
    assert {k: (v.rows.tolist(), [parse_value(x) for x in v.values]) for k, v in found.items()} == {
        "x.a": ([0], [1]),
        "x.b": ([0, 1], [3, 4]),
    }


# -- Sharded


@pytest.mark.parametrize(
    ("shape", "parts", "dtype", "message"),
    [
        ((4,), [], None, "one dtype for all parts"),
        ((), [((), np.float32(1))], None, "of one axis or more"),
        ((4,), [((2,), np.zeros(3))], None, "boxes inside"),
        ((4,), [((-1,), np.zeros(3))], None, "boxes inside"),
        ((4, 2), [((0,), np.zeros(3))], None, "boxes inside"),
        ((4,), [((0,), np.zeros(3)), ((2,), np.zeros(1))], None, "apart from each other"),
        ((4,), [((0,), np.zeros(3)), ((3,), np.zeros(1, "f4"))], None, "one dtype"),
    ],
)
def test_parts_that_cannot_be_are_refused(
    shape: tuple[int, ...], parts: Any, dtype: Any, message: str
) -> None:
    with pytest.raises(ckptfmt.UsageError, match=message):
        Sharded(shape, parts, dtype)


def test_a_sharded_leaf_needs_a_group(store: ckptfmt.Store) -> None:
    with pytest.raises(ckptfmt.UsageError, match=r"a part of the tensor only: 'a/w'.*pass group="):
        ckptfmt.save({"a": {"w": rows(random(4), 0, 2)}}, store)
    assert store.names() == []


def test_a_rank_names_tensors_of_which_it_has_nothing(tmp_path: Path) -> None:
    """Also those without axes: a part of nothing is no element."""
    store = ckptfmt.Store(tmp_path / "s")
    ticket = begin(store)

    def stub(dtype: str, *shape: int) -> TensorSource:
        return TensorSource(dtype, shape, lambda: np.zeros(0), parts=())

    here = {"a": np.array(1, "f4"), "b": np.ones((2, 3)), "s": np.array(["x"], object)}
    names = {"s": stub("string", 1), "b": stub("float64", 2, 3), "a": stub("float32"), "v": 1}
    commit_parts(store.backend, ticket, write(store, ticket, [names, here], shared=False))
    loaded = ckptfmt.load(tmp_path / "s")
    assert list(loaded) == ["s", "b", "a", "v"]
    assert (loaded["a"][()], loaded["v"], loaded["s"].tolist()) == (1, 1, ["x"])
    assert loaded["b"].all()


def test_a_rank_without_a_leaf_is_no_tree_of_its_own(tmp_path: Path) -> None:
    store = ckptfmt.Store(tmp_path / "s")
    ticket = begin(store)
    parts = [
        plan_part(flat, ticket, rank, 2) for rank, flat in enumerate((flatten({}), FlatTree()))
    ]
    commit_parts(store.backend, ticket, [write_part(store.backend, part) for part in parts])
    assert ckptfmt.load(tmp_path / "s") == {}
