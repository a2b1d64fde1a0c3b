"""torch.distributed.checkpoint over our store, on a gloo group of several processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
import ckptfmt.torch as ckt

JOBS = Path(__file__).with_name("jobs.py")


def _bits(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        return str(obj.dtype), list(obj.shape), obj.reshape(-1).view(torch.uint8).tolist()
    if isinstance(obj, dict):
        return {str(key): _bits(item) for key, item in obj.items()}
    return [_bits(item) for item in obj] if isinstance(obj, list | tuple) else obj


def _whole(seed: int) -> Any:
    """What all ranks of a job hold together."""
    spec = importlib.util.spec_from_file_location("jobs", JOBS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.whole(seed)


def test_four_ranks_to_two_to_three_to_one_bit_for_bit(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    expected = _bits(_whole(1))
    ranks.run(JOBS, "save", 4, path=path, step=1, seed=1, torchs=False)
    for step, world in ((1, 2), (2, 3), (3, 1), (4, 4)):
        found = ranks.run(JOBS, "move", world, path=path, step=step)
        assert {one["name"] for one in found} == {f"step-{step + 1:016d}"}
        assert _bits(ckt.load(path, step=step + 1)) == expected
    loaded = ckptfmt.load(path, step=5)
    assert list(loaded) == ["model", "list", "optim", "epoch", "words"]
    assert list(loaded["optim"]["state"]) == [0]
    assert isinstance(loaded["model"]["rows"], np.ndarray)
    assert ckptfmt.Store(path).verify().ok


@pytest.mark.parametrize("torchs", [True, False])
def test_every_rank_gets_its_part_back(ranks: Any, tmp_path: Path, torchs: bool) -> None:
    path = str(tmp_path / "s")
    (info, *others) = ranks.run(JOBS, "save", 4, path=path, step=1, seed=3, torchs=torchs)
    assert all(other == info for other in others)  # every rank is told what was committed
    for found, expected in ranks.run(JOBS, "load", 3, path=path, step=1, seed=3, torchs=torchs):
        assert found == expected


def test_what_all_ranks_have_is_written_once(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(JOBS, "replicated", 4, path=str(tmp_path / "s"))
    nbytes = 8 * 50_000 * 4
    assert found[0]["nbytes"] == nbytes
    assert nbytes <= found[0]["written"] < 1.05 * nbytes
    assert sum(f.stat().st_size for f in (tmp_path / "s/data").iterdir()) == found[0]["written"]


def test_a_sharded_model_and_its_optimizer_resume_on_any_number_of_ranks(
    ranks: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    expected = ranks.run(JOBS, "train_and_save", 4, path=path, background=False)[0]
    for world in (2, 3, 1):
        for found, step, unexpected in ranks.run(JOBS, "resume", world, path=path):
            assert (found, step, unexpected) == (expected, 2, [])
    plain = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.LayerNorm(10), torch.nn.Linear(10, 3)
    )
    assert ckt.restore({"model": plain}, path, names="model").clean


def test_a_background_save_holds_what_was_there_when_it_was_called(
    ranks: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    expected = ranks.run(JOBS, "train_and_save", 2, path=path, background=True)[0]
    for found, step, _ in ranks.run(JOBS, "resume", 2, path=path):
        assert (found, step) == (expected, 2)


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_fails_makes_nothing_visible(
    ranks: Any, tmp_path: Path, background: bool
) -> None:
    path = str(tmp_path / "s")
    ranks.run(JOBS, "save", 4, path=path, step=1, seed=1, torchs=False)
    found = ranks.answers(JOBS, "fail_in_write", 4, path=path, background=background)
    assert all("third machine" in one["text"] for one in found)
    assert ckptfmt.Store(path).steps() == [1]
    assert ranks.run(JOBS, "open_saves", 1, path=path) == [[]]


def test_what_cannot_be_packed_is_refused_by_its_path_on_all_ranks(
    ranks: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    for one in ranks.answers(JOBS, "fail_to_pack", 4, path=path):
        assert one["error"] == "UsageError"
        assert "of 3/1/x: found lock" in one["text"]
        assert one["notes"] == ["on rank 3"]
    assert ckptfmt.Store(path).steps() == []
    assert ranks.run(JOBS, "open_saves", 1, path=path) == [[]]


def test_damage_that_one_rank_finds_changes_nothing_on_any(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    ranks.run(JOBS, "save", 4, path=str(path), step=1, seed=1, torchs=False)
    needle = _whole(1)["model"]["rows"][-1].numpy().tobytes()  # the last rank's
    (file,) = [f for f in (path / "data").iterdir() if needle in f.read_bytes()]
    raw = bytearray(file.read_bytes())
    raw[raw.index(needle)] ^= 1
    file.write_bytes(raw)
    for error, text, unchanged in ranks.run(JOBS, "damaged", 4, path=str(path)):
        assert error == "CorruptError"
        assert "model/rows" in text
        assert unchanged


@pytest.mark.parametrize("torchs", [True, False])
def test_ranks_with_keys_of_their_own_are_one_tree(
    ranks: Any, tmp_path: Path, torchs: bool
) -> None:
    ranks.run(JOBS, "own_keys", 3, path=str(tmp_path / "s"), torchs=torchs)
    loaded = ckptfmt.load(tmp_path / "s")
    assert list(loaded["model"]) == [f"layer{rank}.weight" for rank in range(3)]
    assert loaded["rank"] == {
        (str(rank) if torchs else rank): [rank, {"x": rank}] for rank in range(3)
    }
    for rank in range(3):
        tensor, number = loaded["pair"][f"of{rank}"]
        assert (tensor.tolist(), number) == ([rank, rank], rank)


def test_the_state_dicts_of_torchs_planner_tests_come_back(ranks: Any, tmp_path: Path) -> None:
    """Nested, sharded in shards of several sizes, replicated, bytes, objects, without elements."""
    path = str(tmp_path / "s")
    ranks.run(JOBS, "save_planner_state", 4, path=path, per_rank=2)
    for world, per_rank, torchs in ((4, 1, True), (2, 8, False), (1, 4, True)):
        rows = ranks.run(
            JOBS, "load_planner_state", world, path=path, per_rank=per_rank, torchs=torchs
        )
        for found, expected in rows:
            assert found == expected
    loaded = ckptfmt.load(path)
    assert loaded["st"].tolist() == loaded["nested"]["st"].tolist() == list(range(64))
    assert loaded["nested"]["object"] == {"n": None, "text": "t", "complex": 1j}
    assert (loaded["bytes"], loaded["value"]) == (b"\0raw", [1, 2, 3])


def test_without_collectives_each_rank_has_a_checkpoint_of_its_own(
    ranks: Any, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    found = ranks.run(JOBS, "without_collectives", 2, path=str(path))
    assert found == [[[0.0, 0.0], 0], [[1.0, 1.0], 1]]
    names = [f"rank{rank:05d}.step-{3:016d}" for rank in range(2)]
    assert ckptfmt.Store(path).names() == names
    assert ckptfmt.load(path, at=names[1])["n"] == 1


def test_ranks_load_the_checkpoint_that_the_first_one_found(ranks: Any, tmp_path: Path) -> None:
    for step in (1, 2):
        ckt.save({"n": step}, tmp_path / "s", step=step)
    assert ranks.run(JOBS, "agree", 2, path=str(tmp_path / "s")) == [[2, 2], [2, 2]]


def test_an_empty_store_is_not_found_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    for one in ranks.answers(JOBS, "nothing_there", 2, path=str(tmp_path / "s")):
        assert one["error"] == "NotFoundError"


def test_a_group_of_some_ranks_saves_and_loads_alone(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(JOBS, "in_a_group", 4, path=str(tmp_path / "s"))
    assert found[0] is None
    assert found[1] == found[3] == [f"step-{1:016d}", [7.0] * 4]


def test_no_pickle_is_in_the_store(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    ranks.run(JOBS, "save", 2, path=str(path), step=1, seed=1, torchs=True)
    for file in path.rglob("*"):
        if file.is_file():
            raw = file.read_bytes()
            assert b"PK\x03\x04" not in raw, file
            assert b"torch._utils" not in raw, file
