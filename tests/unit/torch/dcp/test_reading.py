"""torch's planners read what `ckptfmt.torch.save` wrote."""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckptfmt
import ckptfmt.torch as ckt
import ckptfmt.torch.dcp as cdcp
from ckptfmt import config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Pair = collections.namedtuple("Pair", "a b")


def _trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def _plain(state: Any) -> Any:
    """A state dict to compare: bytes for tensors."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), state.detach().numpy().tobytes()
    if isinstance(state, dict):
        return {key: _plain(item) for key, item in state.items()}
    if isinstance(state, list | tuple):
        return [type(state).__name__, *map(_plain, state)]
    return state


@pytest.mark.parametrize("ours", [True, False])
def test_a_model_and_its_optimizer_come_back_through_state_dicts(
    tmp_path: Path, ours: bool
) -> None:
    model, optimizer = _trained(1)
    ckt.save({"model": model, "optim": optimizer}, tmp_path / "s", step=2)
    other, fresh = _trained(2)
    model_state, optim_state = get_state_dict(other, fresh)
    state = {"model": model_state, "optim": optim_state}
    if ours:
        report = cdcp.load(state, tmp_path / "s")
        assert report.step == 2
        assert not report.missing
        assert not report.unexpected
        assert "optim/state/0.weight/exp_avg" in report.matched
    else:
        dcp.load(state, storage_reader=cdcp.CkptfmtReader(tmp_path / "s"))
    set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert _plain(other.state_dict()) == _plain(model.state_dict())
    assert _plain(fresh.state_dict()) == _plain(optimizer.state_dict())


def test_objects_with_state_are_given_it(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    saved, target = Counter(), Counter()
    saved.count = 5
    model, _ = _trained(1)
    other, _ = _trained(2)
    ckt.save({"model": model, "counter": saved}, tmp_path / "s")
    cdcp.load({"model": other, "counter": target}, tmp_path / "s")
    assert target.count == 5
    assert _plain(other.state_dict()) == _plain(model.state_dict())


VALUES: dict[str, Any] = {
    "none": None,
    "int": 7,
    "float": 0.5,
    "text": "abc",
    "bytes": b"\x00\x01",
    "list": [1, "two", [3.0]],
    "tuple": (1, 2),
    "set": {1, 2},
    "pair": Pair(1, "x"),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "groups": [{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "params": ["b"]}],
    "deep": {"x": {"y": [{"z": 1}]}},
    "long": ["parameter"] * 2000,
}


@pytest.mark.parametrize("flat", [True, False])
def test_values_come_as_they_are_and_nothing_is_unpickled(
    tmp_path: Path, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckt.save(VALUES, tmp_path / "s")
    target: dict[str, Any] = dict.fromkeys(VALUES, 0)
    if flat:  # else torch does not look into these
        target["groups"] = [{"lr": 0, "params": []}, {"lr": 0, "params": []}]
        target["deep"] = {"x": {"y": [{"z": 0}]}}

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    planner = DefaultLoadPlanner(flatten_state_dict=flat, flatten_sharded_tensors=flat)
    dcp.load(target, storage_reader=cdcp.CkptfmtReader(tmp_path / "s"), planner=planner)
    assert _plain(target) == _plain(VALUES)
    assert type(target["size"]) is torch.Size


def test_keys_that_are_no_text_are_found_and_not_doubled(tmp_path: Path) -> None:
    ckt.save({"state": {0: {"step": 3}, 1: {"step": 4}}}, tmp_path / "s")
    target = {"state": {0: {"step": 0}, 1: {"step": 0}}}
    cdcp.load(target, tmp_path / "s")
    assert target == {"state": {0: {"step": 3}, 1: {"step": 4}}}


def test_a_tuple_with_tensors_is_one_item(tmp_path: Path) -> None:
    ckt.save({"t": (torch.arange(3), 1), "n": Pair(torch.ones(2), None)}, tmp_path / "s")
    target: dict[str, Any] = {"t": None, "n": None}
    cdcp.load(target, tmp_path / "s")
    assert torch.equal(target["t"][0], torch.arange(3))
    assert target["t"][1] == 1
    assert target["n"]._fields == ("a", "b")
    assert torch.equal(target["n"].a, torch.ones(2))


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64, torch.complex64,
    torch.complex128, torch.complex32, torch.int4, torch.uint2,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.arange(24 * width, dtype=torch.uint8).reshape(4, 6 * width)
    raw = raw % 2 if dtype in (torch.bool, torch.int4, torch.uint2) else raw
    saved = raw.view(dtype)
    ckt.save({"w": saved}, tmp_path / "s")
    target = {"w": torch.zeros(4, 6 * width, dtype=torch.uint8).view(dtype)}
    kept = target["w"]
    dcp.load(target, storage_reader=cdcp.CkptfmtReader(tmp_path / "s"))
    assert target["w"] is kept
    assert torch.equal(kept.view(torch.uint8), raw)


def test_targets_that_lie_otherwise_in_memory_are_filled_where_they_are(tmp_path: Path) -> None:
    saved = torch.randn(4, 6, dtype=torch.complex64)
    ckt.save({"w": saved, "x": saved, "y": saved}, tmp_path / "s")
    base = torch.zeros(6, 8, dtype=torch.complex64)
    target = {
        "w": base.t()[:4],
        "x": torch.zeros(4, 6, dtype=torch.complex64).conj(),
        "y": nn.Parameter(torch.zeros(4, 6, dtype=torch.complex64)),
    }
    dcp.load(target, storage_reader=cdcp.CkptfmtReader(tmp_path / "s"))
    assert torch.equal(base.t()[:4], saved)
    assert not base.t()[4:].any()
    assert torch.equal(target["x"], saved)
    assert torch.equal(target["y"], saved)


def test_everything_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    ckt.save(
        {"m": {"a": torch.ones(2, 2), "b": torch.ones(3), "c": 1, "d": torch.ones(1)}},
        tmp_path / "s",
    )
    kept = torch.zeros(1)
    target = {
        "m": {"a": torch.zeros(3, 2), "b": torch.zeros(3).half(), "c": torch.zeros(1), "d": kept},
        "e": 1,
    }
    with pytest.raises(ckptfmt.MismatchError) as caught:
        cdcp.load(target, tmp_path / "s")
    assert str(caught.value) == (
        "the state dict and the checkpoint disagree:\n"
        "  missing in the checkpoint: e\n"
        "  m.a: stored float32 [2, 2], target float32 [3, 2]\n"
        "  m.b: stored float32 [3], target float16 [3]\n"
        "  m.c: stored a value, target float32 [1]\n"
        "; nothing was changed; give the state dict what is stored, or pass "
        "planner=DefaultLoadPlanner(allow_partial_load=True) for what is missing"
    )
    assert not kept.any()


def test_with_torchs_planner_a_wrong_dtype_is_refused_before_the_first_copy(tmp_path: Path) -> None:
    ckt.save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "s")
    target = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(target, storage_reader=cdcp.CkptfmtReader(tmp_path / "s"))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, ckptfmt.MismatchError)
    assert "b: stored float32, target int32" in str(error)
    assert not target["a"].any()


def test_a_partial_load_reports_what_it_passed_over(tmp_path: Path) -> None:
    ckt.save({"m": {"a": torch.ones(2), "b": torch.ones(2)}}, tmp_path / "s")
    target = {"m": {"a": torch.zeros(2), "new": torch.zeros(2)}}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    report = cdcp.load(target, tmp_path / "s", planner=planner)
    assert (report.matched, report.missing, report.unexpected) == (("m/a",), ("m/new",), ("m/b",))
    assert target["m"]["a"].all()
    assert not target["m"]["new"].any()


def test_damage_is_found_before_the_first_target_changes(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(100), "b": torch.full((100,), 2.0)}
    ckt.save(tensors, tmp_path / "s")
    (file,) = (tmp_path / "s/data").iterdir()
    raw = bytearray(file.read_bytes())
    raw[raw.rindex(torch.tensor(2.0).numpy().tobytes())] ^= 1
    file.write_bytes(raw)
    target = {"a": torch.zeros(100), "b": torch.zeros(100)}
    with pytest.raises(ckptfmt.CorruptError):
        cdcp.load(target, tmp_path / "s")
    assert not target["a"].any()
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(target, storage_reader=cdcp.CkptfmtReader(tmp_path / "s"))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, ckptfmt.PartialRestoreError)
    assert error.changed == ("a", "b")
    with config.configure(staging_nbytes=1), pytest.raises(ckptfmt.PartialRestoreError):
        cdcp.load(target, tmp_path / "s")


def test_a_state_over_the_staging_budget_is_read_straight(tmp_path: Path) -> None:
    ckt.save({"a": torch.arange(1000), "n": 4}, tmp_path / "s")
    target: dict[str, Any] = {"a": torch.zeros(1000, dtype=torch.int64), "n": 0}
    with config.configure(staging_nbytes=100):
        assert cdcp.load(target, tmp_path / "s")
    assert torch.equal(target["a"], torch.arange(1000))
    assert target["n"] == 4


def test_an_object_that_refuses_its_state_is_a_partial_restore(tmp_path: Path) -> None:
    class Refuses:
        def state_dict(self) -> dict[str, int]:
            return {"x": 0}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise RuntimeError("no")

    ckt.save({"o": {"x": 1}}, tmp_path / "s")
    with pytest.raises(ckptfmt.PartialRestoreError, match="refused its state") as caught:
        cdcp.load({"o": Refuses()}, tmp_path / "s")
    assert caught.value.changed == ("o",)


def test_the_whole_tree_is_rebuilt_by_torchs_own_empty_planner(tmp_path: Path) -> None:
    model, optimizer = _trained(1)
    ckt.save({"model": model, "optim": optimizer, "step": 3}, tmp_path / "s")
    made: dict[str, Any] = {}
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(
        made,
        storage_reader=cdcp.CkptfmtReader(tmp_path / "s"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert _plain(made) == _plain(ckt.load(tmp_path / "s"))


def test_a_reader_chooses_and_travels(tmp_path: Path) -> None:
    for step in (1, 2):
        ckt.save({"n": step}, tmp_path / "s", step=step)
    reader = cdcp.CkptfmtReader(tmp_path / "s", step=1)
    reader.read_metadata()
    copy = pickle.loads(pickle.dumps(reader))
    for found, given, expected in (
        (copy, None, 1),
        (reader, f"{tmp_path}/s@1", 1),
        (cdcp.CkptfmtReader("unused"), str(tmp_path / "s"), 2),
        (cdcp.CkptfmtReader(ckptfmt.Store(tmp_path / "s"), at="latest"), None, 2),
    ):
        target = {"n": 0}
        if given is not None and found is reader:
            found = cdcp.CkptfmtReader("unused")
        dcp.load(target, storage_reader=found, checkpoint_id=given)
        assert target["n"] == expected
    assert cdcp.CkptfmtReader.validate_checkpoint_id(tmp_path / "s")
    assert not cdcp.CkptfmtReader.validate_checkpoint_id(tmp_path / "nothing")
    with pytest.raises(ckptfmt.NotFoundError):
        cdcp.load({"n": 0}, tmp_path / "s", step=9)


def test_what_torch_cannot_name_is_refused(tmp_path: Path) -> None:
    ckt.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "twice")
    with pytest.raises(ckptfmt.UnsupportedError, match=r"'a\.b' and 'a/b'"):
        cdcp.CkptfmtReader(tmp_path / "twice").read_metadata()
    ckt.save([torch.ones(1)], tmp_path / "list")
    with pytest.raises(ckptfmt.UnsupportedError, match="a list at the root"):
        cdcp.CkptfmtReader(tmp_path / "list").read_metadata()


def test_tensors_that_torch_lacks_are_values(tmp_path: Path) -> None:
    days = np.array(["2020-01-01"], "datetime64[D]")
    ckt.save(
        {"days": days, "names": np.array(["a", "bc"], np.dtypes.StringDType())}, tmp_path / "s"
    )
    target: dict[str, Any] = {"days": None, "names": None}
    cdcp.load(target, tmp_path / "s")
    assert target["days"] == days
    assert target["names"].tolist() == ["a", "bc"]


def test_a_planner_with_its_own_load_bytes_gets_bytes_that_torch_loads(tmp_path: Path) -> None:
    class Own(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            seen.append(read_item.dest_index.fqn)
            super().load_bytes(read_item, value)

    seen: list[str] = []
    ckt.save({"d": {"n": [1, 2]}}, tmp_path / "s")
    target: dict[str, Any] = {"d": {"n": 0}}
    dcp.load(target, storage_reader=cdcp.CkptfmtReader(tmp_path / "s"), planner=Own())
    assert (seen, target) == (["d.n"], {"d": {"n": [1, 2]}})


def test_ranks_that_opened_different_checkpoints_are_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        ckt.save({"n": step}, tmp_path / "s", step=step)
    plans = []
    for step in (1, 2):
        reader = cdcp.CkptfmtReader(tmp_path / "s", step=step)
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(ckptfmt.ConflictError, match="rank 1"):
        reader.prepare_global_plan(plans)
