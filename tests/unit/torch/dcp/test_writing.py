"""torch's planners write to our store, in one process."""

from __future__ import annotations

import collections
import datetime
import gc
import importlib
import io
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

import ckptfmt
import ckptfmt.torch as ckt
import ckptfmt.torch.dcp as cdcp
from ckptfmt.testing import FaultyBackend
from ckptfmt.torch.dcp import stager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Pair = collections.namedtuple("Pair", "a b")


def _plain(obj: Any) -> Any:
    """A tree to compare: bytes for tensors, kinds of containers."""
    if isinstance(obj, torch.Tensor):
        return str(obj.dtype), tuple(obj.shape), obj.detach().contiguous().numpy().tobytes()
    if isinstance(obj, dict):
        return type(obj).__name__, [(key, _plain(item)) for key, item in obj.items()]
    if isinstance(obj, list | tuple):
        return type(obj).__name__, [_plain(item) for item in obj]
    return obj


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def _tree() -> dict[str, Any]:
    model, optimizer = _trained()
    return {
        "model": dict(model.state_dict()),
        "optim": optimizer.state_dict(),
        "values": {
            "none": None, "int": 3, "big": 1 << 70, "text": "ü", "bytes": b"\x00", "float": -0.0,
            "complex": 1j, "date": datetime.date(2026, 1, 1), "path": Path("a/b"),
            "set": {1, 2}, "tuple": (1, (2,)), "size": torch.Size([2]), "dtype": torch.int8,
            "np": np.float32(1.5), "long": "x" * 9000, "list": [], "pair": Pair(1, [2]),
        },
        "mixed": [1, {"t": torch.ones(2)}, [torch.zeros(1), "s"]],
        "tuple": (torch.arange(3), {"x": 1}),
        "pair": Pair(torch.ones(1), None),
        "ordered": collections.OrderedDict(b=1, a=torch.ones(2)),
        "default": collections.defaultdict(list, {"k": torch.ones(1)}),
        "empty": {},
        "nested": {"empty": {"deep": {}}},
        "keys": {0: 1, 2.5: torch.ones(1), (1, "a"): 2, None: 3, "a/b.c": 4},
        "scalar": torch.tensor(5),
        "nothing": torch.zeros(0, 3),
    }  # fmt: skip


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    tree = _tree()
    info = cdcp.save(tree, tmp_path / "s", step=3, metadata={"epoch": 2}, metrics={"loss": 0.5})
    assert (info.step, info.metadata, info.metrics) == (3, {"epoch": 2}, {"loss": 0.5})
    assert _plain(ckt.load(tmp_path / "s")) == _plain(tree)
    assert ckptfmt.Store(tmp_path / "s").verify().ok


def test_it_is_the_checkpoint_that_a_plain_save_makes(tmp_path: Path) -> None:
    tree = _tree()
    ours = ckptfmt.save(tree, tmp_path / "a", step=1)
    theirs = cdcp.save(tree, tmp_path / "b", step=1)
    assert theirs.digest == ours.digest


def test_torchs_planner_loses_what_its_paths_do_not_say_and_nothing_else(tmp_path: Path) -> None:
    tree = _tree()
    made = dcp.save(tree, storage_writer=cdcp.CkptfmtWriter(tmp_path / "s", step=1))
    assert made.storage_data.name == f"step-{1:016d}"
    for key in ("empty", "nested"):
        del tree[key]
    tree["ordered"], tree["default"] = dict(tree["ordered"]), dict(tree["default"])
    tree["keys"] = {str(key): item for key, item in tree["keys"].items()}
    state = tree["optim"]["state"]
    tree["optim"]["state"] = {str(key): item for key, item in state.items()}
    assert _plain(ckt.load(tmp_path / "s")) == _plain(tree)


def test_planners_that_do_not_flatten_are_served(tmp_path: Path) -> None:
    tree = {"m": {"w": torch.ones(2), "n": [1, 2]}, "t": torch.zeros(1)}
    save = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(tree, storage_writer=cdcp.CkptfmtWriter(tmp_path / "s"), planner=save)
    assert _plain(ckt.load(tmp_path / "s")) == _plain(tree)
    target: dict[str, Any] = {"m": None, "t": torch.ones(1)}
    load = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(target, storage_reader=cdcp.CkptfmtReader(tmp_path / "s"), planner=load)
    assert _plain(target) == _plain(tree)


@pytest.mark.parametrize("tree", [{}, {"m": {}}, {"n": 1}, {"l": [1, {"x": ()}]}])
def test_a_tree_without_tensors_is_saved(tmp_path: Path, tree: dict[str, Any]) -> None:
    cdcp.save(tree, tmp_path / "s", step=1)
    assert ckptfmt.load(tmp_path / "s") == tree
    dcp.save(tree, storage_writer=cdcp.CkptfmtWriter(tmp_path / "s", step=2))
    assert ckptfmt.load(tmp_path / "s") == ({} if tree == {"m": {}} else tree)


def test_tied_tensors_stay_tied_and_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(300, 10)
    info = cdcp.save({"a": weight, "b": {"c": weight}}, tmp_path / "s")
    assert info.nbytes == weight.nbytes
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        assert checkpoint.ties() == [["a", "b/c"]]


def test_a_second_save_writes_what_changed_only(tmp_path: Path) -> None:
    tree = {"a": torch.randn(50_000), "b": torch.randn(1000)}
    cdcp.save(tree, tmp_path / "s", step=1)
    tree["b"] += 1
    assert cdcp.save(tree, tmp_path / "s", step=2).written_nbytes < 20_000
    assert cdcp.save(tree, tmp_path / "s", step=3).written_nbytes == 0


def test_names_that_exist_are_kept_replaced_or_refused(tmp_path: Path) -> None:
    first = cdcp.save({"n": 1}, tmp_path / "s", name="best")
    assert cdcp.save({"n": 1}, tmp_path / "s", name="best").digest == first.digest
    with pytest.raises(ckptfmt.ExistsError):
        cdcp.save({"n": 2}, tmp_path / "s", name="best")
    kept = cdcp.save({"n": 2}, tmp_path / "s", name="best", if_exists="keep")
    assert kept.digest == first.digest
    cdcp.save({"n": 2}, tmp_path / "s", name="best", if_exists="replace")
    assert ckptfmt.load(tmp_path / "s", at="best") == {"n": 2}
    assert os.listdir(tmp_path / "s/parts") == []


class _Lock:
    pass


@pytest.mark.parametrize(
    ("obj", "where"),
    [
        (_Lock(), "m/x"),
        ([1, {"y": _Lock()}], "m/x/1/y"),
        ((torch.ones(1), _Lock()), "m/x/1"),
        (nn.Linear(1, 1), "m/x"),
        (collections.Counter("ab"), "m/x"),
        (collections.defaultdict(lambda: 0, a=1), "m/x"),
        (torch.ones(2).to_sparse(), "m/x"),
    ],
)
def test_what_cannot_come_back_is_refused_by_its_path(
    tmp_path: Path, obj: object, where: str
) -> None:
    with pytest.raises(ckptfmt.UsageError) as caught:
        cdcp.save({"m": {"x": obj}, "fine": torch.ones(3)}, tmp_path / "s")
    assert caught.value.where == where
    assert ckptfmt.Store(tmp_path / "s").names() == []
    assert not (tmp_path / "s/parts").exists() or os.listdir(tmp_path / "s/parts") == []


def test_objects_at_the_top_give_their_state(tmp_path: Path) -> None:
    model, optimizer = _trained()
    cdcp.save({"model": model, "optim": optimizer}, tmp_path / "s")
    loaded = ckt.load(tmp_path / "s")
    assert list(loaded["model"]) == list(model.state_dict())
    assert loaded["optim"]["param_groups"] == optimizer.state_dict()["param_groups"]


# -- planners of the user's own --------------------------------------------------------------------


class HalfPlanner(DefaultSavePlanner):
    """From torch's own documentation: what is written is another dtype."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        item = super().resolve_data(write_item)
        return item if write_item.type == WriteItemType.BYTE_IO else item.to(torch.float16)


def test_a_planner_that_converts_is_asked_for_its_tensors(tmp_path: Path) -> None:
    tree = {"w": torch.tensor([1.5, 2.0]), "n": {"x": [1, (2, "three")]}}
    cdcp.save(tree, tmp_path / "s", planner=HalfPlanner())
    loaded = ckt.load(tmp_path / "s")
    assert loaded["w"].dtype is torch.float16
    assert loaded["n"] == {"x": [1, (2, "three")]}


def test_what_a_planner_pickles_is_read_as_plain_data_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ckptfmt.UsageError, match="no plain data") as caught:
        cdcp.save({"n": {"x": _Lock()}}, tmp_path / "s", planner=HalfPlanner())
    assert caught.value.where == "n/x"


class OwnBytes(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(repr(object).encode())
        return object


class FromOwnBytes(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read().decode()


def test_bytes_of_a_planners_own_go_back_to_its_counterpart(tmp_path: Path) -> None:
    cdcp.save(
        {"n": {1: "x"}, "m": "y" * 9000}, tmp_path / "s", planner=OwnBytes(flatten_state_dict=False)
    )
    target: dict[str, Any] = {"m": "", "n": ""}
    load = FromOwnBytes(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(target, storage_reader=cdcp.CkptfmtReader(tmp_path / "s"), planner=load)
    assert load.original_state_dict == {"n": "{'1': 'x'}", "m": repr("y" * 9000)}


def test_a_planner_that_keeps_plans_is_refused_and_commits_nothing(tmp_path: Path) -> None:
    def planner() -> DefaultSavePlanner:
        return DefaultSavePlanner(enable_plan_caching=True)

    tree = {"w": torch.ones(2)}
    text = (
        "the planner keeps plans of an earlier save: found enable_plan_caching=True; leave it out: a "
        "kept plan has the ticket of the save that it was made for, and paths that are not compared; "
        "nothing was committed"
    )
    for step in (1, 2):  # the first one too: no trainer learns of it hours later
        with pytest.raises(ckptfmt.UsageError) as caught:
            cdcp.save(tree, tmp_path / "s", step=step, planner=planner())
        assert str(caught.value) == text
        assert caught.value.kind == "usage-dcp-plan-caching"
    future = cdcp.async_save(tree, tmp_path / "s", step=3, planner=planner())
    with pytest.raises(ckptfmt.UsageError, match="enable_plan_caching"):
        future.result()
    assert ckptfmt.Store(tmp_path / "s").names() == []
    assert not [p for p in (tmp_path / "s" / "parts").rglob("*") if p.is_file()]


# -- the writer ------------------------------------------------------------------------------------


def test_the_collector_of_garbage_rests_while_a_save_is_planned_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []

    class Looks(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            seen.append(("plan", gc.isenabled()))
            return super().create_local_plan()

        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "bad":
                raise ZeroDivisionError
            return super().resolve_data(write_item)

    module = importlib.import_module("ckptfmt.torch.dcp.writer")
    real = module.write_part

    def look(*args: Any) -> Any:
        seen.append(("write", gc.isenabled()))
        return real(*args)

    monkeypatch.setattr(module, "write_part", look)
    tree = {"w": torch.ones(1000)}
    cdcp.save(tree, tmp_path, step=1, planner=Looks())
    assert seen == [("plan", False), ("write", False), ("write", False)]
    monkeypatch.setattr(module, "_LONG_NBYTES", 1000)
    cdcp.save(tree, tmp_path, step=2, planner=Looks())
    assert seen[3:5] == [("plan", False), ("write", True)]
    assert gc.isenabled()
    with pytest.raises(dcp.CheckpointException, match="ZeroDivisionError"):
        cdcp.save({"bad": torch.ones(2)}, tmp_path, step=3, planner=Looks())
    assert gc.isenabled()
    gc.disable()
    try:
        cdcp.save(tree, tmp_path, step=4, planner=Looks())
        assert not gc.isenabled()  # as the caller had it
    finally:
        gc.enable()


def test_a_writer_travels_and_is_used_again(tmp_path: Path) -> None:
    writer = cdcp.CkptfmtWriter(tmp_path / "s", step=1, durable=False)
    dcp.save({"n": 1}, storage_writer=pickle.loads(pickle.dumps(writer)))
    dcp.save({"n": 2}, storage_writer=cdcp.CkptfmtWriter("unused"), checkpoint_id=f"{tmp_path}/s@2")
    dcp.save({"n": 3}, storage_writer=writer, checkpoint_id=str(tmp_path / "other"))
    assert ckptfmt.Store(tmp_path / "s").steps() == [1, 2]
    assert ckptfmt.load(tmp_path / "other", step=1) == {"n": 3}
    assert writer.info is not None
    assert cdcp.CkptfmtWriter.validate_checkpoint_id(tmp_path / "s")
    assert not cdcp.CkptfmtWriter.validate_checkpoint_id(3)  # type: ignore[arg-type]


def test_a_save_that_fails_while_it_writes_leaves_nothing_open(tmp_path: Path) -> None:
    class Breaks(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise OSError(5, "broken disk")

    for through_torch in (False, True):
        writer = cdcp.CkptfmtWriter(tmp_path / "s", step=1)
        save = partial(dcp.save, storage_writer=writer)
        if not through_torch:
            save = partial(cdcp.save, path=tmp_path / "s", step=1)
        with pytest.raises(BaseException, match="broken disk"):
            save({"w": torch.ones(1)}, planner=Breaks())
        del writer, save
        gc.collect()  # torch tells a writer of no error: the save ends with it
        assert os.listdir(tmp_path / "s/parts") == []
        assert ckptfmt.Store(tmp_path / "s").names() == []


@pytest.mark.parametrize("mode", ["once", "from"])
def test_a_store_that_fails_at_any_operation_keeps_the_old_or_has_the_new(
    tmp_path: Path, mode: Any
) -> None:
    inner = ckptfmt.Store(tmp_path / "s").backend
    cdcp.save({"w": torch.ones(1)}, tmp_path / "s", step=1)
    for k in range(1000):
        store = ckptfmt.Store(tmp_path / "s")
        store.backend = faulty = FaultyBackend(inner, fail_at=k, mode=mode)
        step, error = k + 2, None
        try:
            cdcp.save({"w": torch.full((1000,), float(step)), "v": "x" * 5000}, store, step=step)
        except ckptfmt.CheckpointError as found:
            error = found
        loaded = ckt.load(tmp_path / "s")
        assert len(loaded["w"]) in (1, 1000)
        if error is None:
            assert loaded["w"][0] == step
        assert ckptfmt.Store(tmp_path / "s").verify().ok
        if not faulty.fired:
            break
    assert error is None
    assert k > 20


# -- in the background -----------------------------------------------------------------------------


def test_what_is_saved_is_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    tree = {"w": torch.randn(1000, 50), "l": [1, 2], "d": {"t": torch.ones(3)}}
    expected = _plain(tree)
    future = cdcp.async_save(tree, tmp_path / "s", step=1)
    assert future.staged
    tree["w"].zero_()
    tree["d"]["t"].zero_()
    tree["l"].append(3)
    assert future.result().name == f"step-{1:016d}" == future.name
    assert _plain(ckt.load(tmp_path / "s")) == expected


def test_an_error_waits_for_whoever_asks_or_saves_next(tmp_path: Path) -> None:
    future = cdcp.async_save({"x": _Lock()}, tmp_path / "s", step=1)
    with pytest.raises(ckptfmt.UsageError, match="found _Lock"):
        future.result()
    assert not future.cancel()
    failed = cdcp.async_save({"x": _Lock()}, tmp_path / "s", step=1)
    while not failed.done():
        pass
    with pytest.raises(ckptfmt.UsageError, match="found _Lock"):
        cdcp.save({"x": 1}, tmp_path / "s", step=2)
    assert ckptfmt.Store(tmp_path / "s").names() == []


@pytest.fixture
def _one_process() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_torchs_async_save_takes_the_writer_as_its_stager(tmp_path: Path) -> None:
    tree = {"w": torch.ones(10)}
    future = dcp.async_save(tree, storage_writer=cdcp.CkptfmtWriter(tmp_path / "s", step=1))
    tree["w"].zero_()
    assert future.result().storage_data.step == 1
    assert ckt.load(tmp_path / "s")["w"].all()


@pytest.mark.slow
@pytest.mark.usefixtures("_one_process")
def test_a_save_in_another_process_commits_the_same(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    tree = {"w": torch.arange(1000), "n": [1, {"x": 2}]}
    for step in (1, 2):
        future = dcp.async_save(
            tree,
            storage_writer=cdcp.CkptfmtWriter(tmp_path / "s", step=step),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        kept = _plain(tree)
        tree["w"].add_(1)
        assert future.result().storage_data.step == step
        assert _plain(ckt.load(tmp_path / "s", step=step)) == kept


# -- staging ---------------------------------------------------------------------------------------


def _address(obj: Any) -> int:
    return int(obj["w"].data_ptr())


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no copy of an earlier test is still waiting in."""
    monkeypatch.setattr(stager, "_pool", stager.Pool())


@pytest.mark.usefixtures("pool")
def test_the_memory_of_one_copy_serves_the_next() -> None:
    tree = {"w": torch.randn(1000), "s": torch.tensor(3)}
    first, lease = stager.stage(tree)
    assert _plain(first) == _plain(tree)
    at = _address(first)
    second, other = stager.stage(tree)
    assert _address(second) != at  # the first is still read
    lease.release()
    third, again = stager.stage(tree)
    assert _address(third) == at
    other.release()
    fourth, last = stager.stage(tree)
    assert _address(fourth) != at  # what the second gave back was its own
    for one in (again, last):
        one.release()


@pytest.mark.usefixtures("pool")
def test_memory_comes_back_when_the_last_tensor_of_a_copy_is_gone() -> None:
    tree = {"w": torch.randn(1000)}
    made, lease = stager.stage(tree)
    at = _address(made)
    kept = made["w"]
    del made, lease
    gc.collect()
    other, _ = stager.stage(tree)
    assert _address(other) != at
    del kept
    gc.collect()
    again, lease = stager.stage(tree)
    assert _address(again) == at
    lease.release()


def test_a_copy_keeps_kinds_ties_and_odd_tensors() -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    tree = {
        "a": weight,
        "b": weight,
        "t": torch.randn(3, 4).t(),
        "c": torch.randn(2, dtype=torch.complex64).conj(),
        "h": torch.ones(2).bfloat16(),
        "sparse": torch.eye(2).to_sparse(),
        "o": collections.OrderedDict(x=[1, (torch.ones(1), Pair(2, torch.zeros(1)))]),
        "e": torch.zeros(0, 2),
    }
    made, lease = stager.stage(tree)
    assert made["a"].data_ptr() == made["b"].data_ptr() != weight.data_ptr()
    for key in ("a", "t", "h", "e"):
        assert torch.equal(made[key], tree[key].detach())
    assert torch.equal(made["c"], tree["c"].resolve_conj())
    assert torch.equal(made["sparse"].to_dense(), torch.eye(2))
    assert _plain(made["o"]) == _plain(tree["o"])
    lease.release()


def test_a_tensor_without_its_memory_is_refused(tmp_path: Path) -> None:
    """To copy it would be to read wild, or to save what happens to lie in fresh memory."""
    freed = torch.ones(10)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ckptfmt.UsageError, match="storage was freed"):
        cdcp.save({"w": freed}, tmp_path)
    with pytest.raises(ckptfmt.UsageError, match="storage was freed"):
        cdcp.async_save({"w": freed}, tmp_path).result()
    cdcp.save({"w": torch.ones(10)}, tmp_path)
    with pytest.raises(ckptfmt.MismatchError, match="storage was freed"):
        cdcp.load({"w": freed}, tmp_path)
