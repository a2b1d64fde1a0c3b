"""What a save writes, refuses, reuses and says. Spec: 08-protocol."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import ckptfmt
from ckptfmt.events import Event
from ckptfmt.format import parse_header
from ckptfmt.testing import difference


def files(path: Path, folder: str = "data") -> list[str]:
    where = path / folder
    return sorted(os.listdir(where)) if where.is_dir() else []


def everything(path: Path) -> dict[str, bytes]:
    return {
        str(found.relative_to(path)): found.read_bytes()
        for found in sorted(path.rglob("*"))
        if found.is_file()
    }


# -- names --------------------------------------------------------------------------------------


def test_a_step_names_its_checkpoint(tmp_path: Path) -> None:
    info = ckptfmt.save({"a": 1}, tmp_path, step=7)
    assert (info.name, info.step, info.generation) == ("step-0000000000000007", 7, 0)
    assert files(tmp_path, "checkpoints") == ["step-0000000000000007~0.index"]


def test_without_a_step_it_is_main(tmp_path: Path) -> None:
    info = ckptfmt.save({"a": 1}, tmp_path)
    assert (info.name, info.step) == ("main", None)


def test_a_name_of_its_own_may_have_a_step_beside_it(tmp_path: Path) -> None:
    info = ckptfmt.save({"a": 1}, tmp_path, name="best.v1_x-y", step=3)
    assert (info.name, info.step) == ("best.v1_x-y", 3)
    assert ckptfmt.Store(tmp_path).steps() == []
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.load(tmp_path)
    assert ckptfmt.load(tmp_path, at="best.v1_x-y") == {"a": 1}


@pytest.mark.parametrize(
    "name",
    [
        *("", "Best", "latest", "7", "0012", "step-7", "step-0000000000000007", "a/b", "../x"),
        *("a.", ".a", "-a", "a b", "con", "nul", "aux.txt", "é", "a\n", "x" * 121, "a~0", "a@b"),
    ],
)
def test_an_illegal_name_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(ckptfmt.UsageError):
        ckptfmt.save({"a": 1}, tmp_path / "s", name=name)
    assert not (tmp_path / "s").exists()


def test_the_refusal_of_a_name_offers_a_legal_spelling(tmp_path: Path) -> None:
    with pytest.raises(ckptfmt.UsageError, match="run-7"):
        ckptfmt.save({"a": 1}, tmp_path, name="7")
    with pytest.raises(ckptfmt.UsageError, match="best-model"):
        ckptfmt.save({"a": 1}, tmp_path, name="Best Model")


@pytest.mark.parametrize("step", [-1, 2**53, 1.5, "7", True, None.__class__])
def test_a_step_is_a_count_of_finished_steps(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ckptfmt.UsageError, match="step"):
        ckptfmt.save({"a": 1}, tmp_path / "s", step=step)
    assert not (tmp_path / "s").exists()


def test_a_step_may_be_a_numpy_integer_and_comes_back_as_an_int(tmp_path: Path) -> None:
    step: Any = np.int64(12)
    info = ckptfmt.save({"a": 1}, tmp_path, step=step)
    assert (type(info.step), info.step) == (int, 12)
    assert ckptfmt.Store(tmp_path).latest().step == 12  # type: ignore[union-attr]


def test_a_selector_names_what_is_saved(tmp_path: Path) -> None:
    assert ckptfmt.save({"a": 1}, f"{tmp_path}@5").step == 5
    assert ckptfmt.save({"a": 1}, f"{tmp_path}@best").name == "best"
    assert ckptfmt.load(f"{tmp_path}@5") == {"a": 1}
    assert ckptfmt.load(f"{tmp_path}@best") == {"a": 1}
    assert ckptfmt.load(f"{tmp_path}@latest") == {"a": 1}


@pytest.mark.parametrize("more", [{"step": 5}, {"name": "best"}])
def test_a_selector_beside_step_or_name_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ckptfmt.UsageError, match="twice"):
        ckptfmt.save({"a": 1}, f"{tmp_path}/s@5", **more)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("which", ["latest", "", "Best", "step-7"])
def test_a_selector_that_is_no_legal_name_is_refused(tmp_path: Path, which: str) -> None:
    with pytest.raises(ckptfmt.UsageError):
        ckptfmt.save({"a": 1}, f"{tmp_path}/s@{which}")
    assert os.listdir(tmp_path) == []


def test_a_tag_is_no_name(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1)
    ckptfmt.Store(tmp_path).tag("best", 1)
    before = everything(tmp_path)
    with pytest.raises(ckptfmt.UsageError, match="tag"):
        ckptfmt.save({"a": 1}, tmp_path, name="best")
    assert everything(tmp_path) == before


def test_main_beside_steps_is_a_warning(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1)
    with pytest.warns(ckptfmt.CkptWarning, match="highest step"):
        ckptfmt.save({"a": 2}, tmp_path)
    assert ckptfmt.load(tmp_path) == {"a": 1}
    assert ckptfmt.load(tmp_path, at="main") == {"a": 2}


# -- arguments ----------------------------------------------------------------------------------


def test_swapped_arguments_are_called_that(tmp_path: Path) -> None:
    swapped: Callable[..., Any] = ckptfmt.save
    for first in (str(tmp_path / "s"), tmp_path / "s"):
        with pytest.raises(ckptfmt.UsageError, match="arguments look swapped"):
            swapped(first, {"a": 1})
    assert os.listdir(tmp_path) == []


def test_a_path_is_a_path(tmp_path: Path) -> None:
    save: Callable[..., Any] = ckptfmt.save
    for wrong in (None, 5, b"x", {"a": 1}):
        with pytest.raises(ckptfmt.UsageError):
            save({"a": 1}, wrong)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("codec", "lzma"),
        ("codec", "zstd:99"),
        ("codec", "zstd:x"),
        ("codec", {"nothing": "zstd"}),
        ("chunk_nbytes", 4095),
        ("chunk_nbytes", 0),
        ("chunk_nbytes", 5000),
        ("chunk_nbytes", (1 << 30) + 4096),
        ("chunk_nbytes", 4096.0),
        ("chunk_nbytes", True),
        ("chunk_nbytes", {"nothing": 4096}),
        ("digest", "md5"),
        ("if_exists", "maybe"),
        ("progress", 5),
        ("metadata", {"f": print}),
        ("metadata", {1: "x"}),
        ("metrics", {"loss": "low"}),
        ("metrics", {"loss": np.zeros(2)}),
        ("metrics", {1: 0.5}),
    ],
)
def test_an_illegal_option_is_refused_before_anything_is_made(
    tmp_path: Path, option: str, value: Any
) -> None:
    with pytest.raises(ckptfmt.UsageError):
        ckptfmt.save({"a": np.ones(3)}, tmp_path / "s", step=1, **{option: value})
    assert not (tmp_path / "s").exists()


def test_metrics_are_taken_from_0d_arrays_and_numpy_scalars(tmp_path: Path) -> None:
    metrics: Any = {"a": np.array(0.5), "b": np.float32(0.25), "c": 3, "d": float("nan")}
    info = ckptfmt.save({"a": 1}, tmp_path, step=1, metrics=metrics)
    assert {type(value) for value in info.metrics.values()} == {float}
    found = ckptfmt.open(tmp_path).info.metrics
    assert (found["a"], found["b"], found["c"]) == (0.5, 0.25, 3.0)
    assert found["d"] != found["d"]


def test_metadata_comes_back_as_it_was(tmp_path: Path) -> None:
    metadata = {
        "epoch": 3,
        "config": {"lr": 1e-3, 5: (1, 2), "deep": [None, True, b"x", 1 + 2j]},
        "np": np.int16(4),
    }
    ckptfmt.save({"a": 1}, tmp_path, step=1, metadata=metadata)
    assert not difference(dict(ckptfmt.open(tmp_path).info.metadata), metadata)


def test_the_info_says_what_was_saved(tmp_path: Path, tree: dict[str, Any]) -> None:
    info = ckptfmt.save(tree, tmp_path, step=3)
    assert info.tensors == 6
    assert info.url == str(tmp_path)
    data = tmp_path / "data"
    assert info.stored_nbytes == sum((data / file).stat().st_size for file in files(tmp_path))
    assert info.written_nbytes == info.stored_nbytes
    assert info.nbytes == ckptfmt.open(tmp_path).info.nbytes > 240
    assert info.created.tzinfo is not None
    assert info.writer.startswith("ckptfmt ")
    assert info.seconds > 0
    opened = ckptfmt.open(tmp_path).info
    same = dataclasses.replace(info, written_nbytes=0, seconds=0.0)
    assert dataclasses.asdict(opened) == dataclasses.asdict(same)


def test_the_parent_is_what_this_process_saved_or_restored_last(tmp_path: Path) -> None:
    first = ckptfmt.save({"a": 1}, tmp_path, step=1)
    second = ckptfmt.save({"a": 2}, tmp_path, step=2)
    assert first.parent is None
    assert second.parent == (first.name, first.digest)
    ckptfmt.load(tmp_path, step=1)
    third = ckptfmt.save({"a": 3}, tmp_path, step=3)
    assert third.parent == (first.name, first.digest)
    ckptfmt.restore({"a": 0}, tmp_path, step=2)
    assert ckptfmt.save({"a": 4}, tmp_path, step=4).parent == (second.name, second.digest)


# -- what exists already ------------------------------------------------------------------------


def test_the_same_tree_again_commits_nothing(tmp_path: Path, tree: dict[str, Any]) -> None:
    first = ckptfmt.save(tree, tmp_path, step=1)
    before = everything(tmp_path)
    again = ckptfmt.save(tree, tmp_path, step=1)
    assert (again.digest, again.generation, again.written_nbytes) == (first.digest, 0, 0)
    assert again.created == first.created
    assert everything(tmp_path) == before


def test_the_same_tree_again_notes_only_what_is_new(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1, metrics={"x": 1.0}, metadata={"m": "a", "n": 1})
    index = everything(tmp_path / "checkpoints")
    info = ckptfmt.save(
        {"a": 1}, tmp_path, step=1, metrics={"x": 1.0, "y": 2.0}, metadata={"m": "b", "n": 1}
    )
    assert info.metrics == {"x": 1.0, "y": 2.0}
    assert info.metadata == {"m": "b", "n": 1}
    assert len(files(tmp_path, "notes")) == 1
    assert everything(tmp_path / "checkpoints") == index
    assert ckptfmt.open(tmp_path).info.metadata == {"m": "b", "n": 1}
    ckptfmt.save({"a": 1}, tmp_path, step=1, metrics={"y": 2.0}, metadata={"m": "b"})
    assert len(files(tmp_path, "notes")) == 1


def test_nan_metrics_noted_again_are_nothing_new(tmp_path: Path) -> None:
    for _ in range(2):
        ckptfmt.save({"a": 1}, tmp_path, step=1, metrics={"loss": float("nan")})
    assert files(tmp_path, "notes") == []


def test_another_tree_under_a_step_is_refused(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.zeros(3)}, tmp_path, step=1)
    before = everything(tmp_path / "checkpoints")
    with pytest.raises(ckptfmt.ExistsError, match='if_exists="replace"'):
        ckptfmt.save({"a": np.ones(3)}, tmp_path, step=1)
    assert everything(tmp_path / "checkpoints") == before
    assert difference(ckptfmt.load(tmp_path), {"a": np.zeros(3)}) == ""


@pytest.mark.parametrize(
    "other",
    [
        {"b": np.zeros(3), "v": 1},
        {"a": np.zeros(4), "v": 1},
        {"a": np.zeros((3, 1)), "v": 1},
        {"a": np.zeros(3, np.int64), "v": 1},
        {"a": np.zeros(3), "v": 2},
        {"v": 1, "a": np.zeros(3)},
    ],
)
def test_another_structure_is_refused_before_staging(tmp_path: Path, other: dict[str, Any]) -> None:
    ckptfmt.save({"a": np.zeros(3), "v": 1}, tmp_path, step=1)
    before = everything(tmp_path)
    called: list[Event] = []
    with pytest.raises(ckptfmt.ExistsError):
        ckptfmt.save(other, tmp_path, step=1, progress=called.append)
    assert everything(tmp_path) == before
    assert called == []


def test_another_container_kind_is_another_tree(tmp_path: Path) -> None:
    array = np.zeros(3)
    ckptfmt.save({"a": [array]}, tmp_path, step=1)
    with pytest.raises(ckptfmt.ExistsError):
        ckptfmt.save({"a": (array,)}, tmp_path, step=1)


def test_main_is_replaced_by_default_and_its_old_generation_goes(tmp_path: Path) -> None:
    for value in range(3):
        info = ckptfmt.save({"a": np.full(3, value)}, tmp_path)
        assert info.generation == value
        assert files(tmp_path, "checkpoints") == [f"main~{value}.index"]
    assert ckptfmt.load(tmp_path)["a"].tolist() == [2, 2, 2]


def test_replace_makes_the_next_generation_of_a_step(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1)
    info = ckptfmt.save({"b": np.ones(2)}, tmp_path, step=1, if_exists="replace")
    assert info.generation == 1
    assert files(tmp_path, "checkpoints") == ["step-0000000000000001~1.index"]
    assert list(ckptfmt.load(tmp_path)) == ["b"]


def test_keep_returns_what_is_stored_and_reads_nothing_of_the_tree(tmp_path: Path) -> None:
    class Untouchable(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError("the tree was looked at")

        __iter__ = keys = values = items

    first = ckptfmt.save({"a": 1}, tmp_path, step=1)
    before = everything(tmp_path)
    kept = ckptfmt.save(Untouchable(a=2), tmp_path, step=1, if_exists="keep")
    assert (kept.digest, kept.name) == (first.digest, first.name)
    assert everything(tmp_path) == before


def test_keep_saves_where_there_is_nothing(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1, if_exists="keep")
    assert ckptfmt.load(tmp_path) == {"a": 1}


def test_error_can_be_asked_for_with_main(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, if_exists="error")
    ckptfmt.save({"a": 1}, tmp_path, if_exists="error")
    with pytest.raises(ckptfmt.ExistsError):
        ckptfmt.save({"a": 2}, tmp_path, if_exists="error")


def test_a_tagged_checkpoint_is_not_replaced_by_another_tree(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.zeros(2)}, tmp_path)
    store = ckptfmt.Store(tmp_path)
    store.tag("best", "main")
    before = everything(tmp_path / "checkpoints")
    with pytest.raises(ckptfmt.UsageError, match="untag it first"):
        ckptfmt.save({"a": np.ones(2)}, tmp_path)
    assert everything(tmp_path / "checkpoints") == before
    ckptfmt.save({"a": np.zeros(2)}, tmp_path)
    store.untag("best")
    ckptfmt.save({"a": np.ones(2)}, tmp_path)
    assert ckptfmt.load(tmp_path)["a"].tolist() == [1, 1]


def test_a_quarantined_generation_is_not_used_again(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1)
    ckptfmt.Store(tmp_path).quarantine(1, "diverged")
    info = ckptfmt.save({"a": 2}, tmp_path, step=1)
    assert info.generation == 1
    assert ckptfmt.load(tmp_path, step=1) == {"a": 2}


def test_a_damaged_generation_is_not_in_the_way(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1)
    [name] = files(tmp_path, "checkpoints")
    (tmp_path / "checkpoints" / name).write_bytes(b"junk" * 100)
    with pytest.warns(ckptfmt.CkptWarning, match="skipped"):
        info = ckptfmt.save({"a": 2}, tmp_path, step=1)
    assert info.generation == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckptfmt.CkptWarning)
        assert ckptfmt.load(tmp_path, step=1) == {"a": 2}


# -- what is refused ----------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    lr: float = 0.1


@pytest.mark.parametrize(
    ("leaf", "path"),
    [
        (np.array([object()], object), "m/x"),
        (np.array([1, None], object), "m/x"),
        (np.zeros(2, [("a", "i4"), ("b", "f8")]), "m/x"),
        (np.zeros(2, np.longdouble), "m/x"),
        (object(), "m/x"),
        (print, "m/x"),
        (lambda: 0, "m/x"),
        (Config(), "m/x"),
        (Config, "m/x"),
        ([1, {"k": [object()]}], "m/x"),
        ("\ud800", "m/x"),
        ({"\ud800": 1}, "m/x"),
        ({np.int64(1): 1}, "m/x"),
        ({1: 0, np.str_("a"): np.ones(1)}, "m/x"),
        (iter([1]), "m/x"),
        (open, "m/x"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else None,
)
def test_what_cannot_come_back_is_refused_with_its_path_and_nothing_is_made(
    tmp_path: Path, leaf: Any, path: str
) -> None:
    with pytest.raises(ckptfmt.UsageError, match=re.escape(path)):
        ckptfmt.save({"ok": np.ones(4), "m": {"x": leaf}}, tmp_path / "s", step=1)
    assert not (tmp_path / "s").exists()


def test_a_tree_within_itself_is_refused(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"w": np.ones(2)}
    loop["self"] = loop
    with pytest.raises(ckptfmt.UsageError):
        ckptfmt.save(loop, tmp_path / "s")
    listed: list[Any] = [np.ones(2)]
    listed.append(listed)
    with pytest.raises(ckptfmt.UsageError):
        ckptfmt.save({"l": listed}, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_refusal_in_a_store_with_checkpoints_changes_nothing(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(3)}, tmp_path, step=1)
    before = everything(tmp_path)
    with pytest.raises(ckptfmt.UsageError, match="sched/best"):
        ckptfmt.save({"w": np.ones(9), "sched": {"best": object()}}, tmp_path, step=2)
    assert everything(tmp_path) == before


# -- bytes --------------------------------------------------------------------------------------


def test_tied_arrays_are_stored_once(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random(100_000)
    one = ckptfmt.save({"a": array}, tmp_path / "one")
    tied = ckptfmt.save({"a": array, "b": array, "c": [array]}, tmp_path / "tied")
    assert tied.tensors == 1
    assert tied.nbytes == one.nbytes == array.nbytes
    assert tied.stored_nbytes <= one.stored_nbytes + 4096


def test_equal_arrays_share_their_bytes_within_a_save(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random(100_000)
    info = ckptfmt.save({"a": array, "b": array.copy(), "c": array.reshape(10, -1)}, tmp_path)
    assert info.tensors == 3
    assert info.nbytes == 3 * array.nbytes
    assert info.stored_nbytes < 1.1 * array.nbytes
    loaded = ckptfmt.load(tmp_path)
    loaded["a"][:] = 0
    assert (loaded["b"] == array).all()
    assert (loaded["c"].reshape(-1) == array).all()


def test_equal_arrays_of_other_dtypes_keep_their_dtypes(tmp_path: Path) -> None:
    tree = {"a": np.arange(8, dtype=np.float32)}
    tree["b"] = tree["a"].copy().view(np.int32)
    tree["c"] = tree["a"].view(np.uint8)
    ckptfmt.save(tree, tmp_path)
    assert not difference(ckptfmt.load(tmp_path), tree)


def test_a_second_save_of_the_same_tree_writes_no_data_file(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    ckptfmt.save(tree, tmp_path, step=1)
    before = files(tmp_path)
    info = ckptfmt.save(tree, tmp_path, step=2)
    assert info.written_nbytes == 0
    assert files(tmp_path) == before
    assert not difference(ckptfmt.load(tmp_path, step=2), tree)


def test_only_changed_chunks_are_written(tmp_path: Path) -> None:
    array = np.arange(1 << 18, dtype=np.float32)  # 1 MiB, 16 chunks
    ckptfmt.save({"a": array, "b": np.ones(5)}, tmp_path, step=1, chunk_nbytes=64 << 10)
    array[100_000] = -1
    info = ckptfmt.save({"a": array, "b": np.ones(5)}, tmp_path, step=2, chunk_nbytes=64 << 10)
    assert 64 << 10 <= info.written_nbytes <= 80 << 10
    assert (ckptfmt.load(tmp_path)["a"] == array).all()
    assert ckptfmt.load(tmp_path, step=1)["a"][100_000] == 100_000


def test_the_same_tree_gives_the_same_files_and_the_same_tree_section(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tree = {f"l{i}": rng.random((i * 37, 11)) for i in range(20)}
    one = ckptfmt.save(tree, tmp_path / "a", step=1, codec="zstd")
    two = ckptfmt.save(tree, tmp_path / "b", step=1, codec="zstd")
    assert one.digest == two.digest
    assert everything(tmp_path / "a" / "data") == everything(tmp_path / "b" / "data")


def test_the_digest_says_whether_the_content_is_the_same(tmp_path: Path) -> None:
    one = ckptfmt.save({"a": np.ones(3)}, tmp_path, step=1)
    two = ckptfmt.save({"a": np.ones(3)}, tmp_path, step=2, metrics={"x": 1.0})
    three = ckptfmt.save({"a": np.zeros(3)}, tmp_path, step=3)
    assert one.digest == two.digest != three.digest


def test_bases_choose_whose_chunks_are_reused(tmp_path: Path) -> None:
    big = np.random.default_rng(0).random(50_000)
    ckptfmt.save({"a": big}, tmp_path, step=1)
    ckptfmt.save({"a": big + 1}, tmp_path, step=2, bases=[])
    default = ckptfmt.save({"a": big}, tmp_path, name="d")
    assert default.written_nbytes > 0
    reused = ckptfmt.save({"a": big, "b": 1}, tmp_path, name="e", bases=[1])
    assert reused.written_nbytes == 0
    tagged = ckptfmt.Store(tmp_path)
    tagged.tag("two", 2)
    both = ckptfmt.save({"a": big, "b": big + 1}, tmp_path, name="f", bases=["two", "d"])
    assert both.written_nbytes == 0


def test_no_bases_means_that_all_is_written_and_files_of_equal_content_are_one(
    tmp_path: Path,
) -> None:
    ckptfmt.save({"a": np.ones(5000)}, tmp_path, step=1)
    before = everything(tmp_path / "data")
    info = ckptfmt.save({"a": np.ones(5000)}, tmp_path, step=2, bases=[])
    assert info.written_nbytes > 0
    assert everything(tmp_path / "data") == before


def test_a_base_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1)
    before = everything(tmp_path)
    with pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.save({"a": 2}, tmp_path, step=2, bases=[9])
    assert everything(tmp_path) == before


def test_chunks_of_another_digest_are_not_reused(tmp_path: Path) -> None:
    tree = {"a": np.random.default_rng(0).random(10_000)}
    ckptfmt.save(tree, tmp_path, step=1)
    info = ckptfmt.save(tree, tmp_path, step=2, digest="sha256")
    assert info.written_nbytes > 0
    assert len(info.digest) == 64
    assert {len(name) for name in files(tmp_path)} == {32, 64}
    assert not difference(ckptfmt.load(tmp_path), tree)
    assert ckptfmt.Store(tmp_path).verify().ok


def test_zstd_is_used_where_it_pays_and_by_pattern(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "m": {"zeros": np.zeros(100_000), "noise": np.random.default_rng(0).bytes(400_000)},
        "opt": {"zeros": np.ones(100_000)},
        "small": np.arange(3),
    }
    tree["m"]["noise"] = np.frombuffer(tree["m"]["noise"], np.uint8)
    info = ckptfmt.save(tree, tmp_path, codec={"m": "zstd:3", "**": "raw"})
    checkpoint = ckptfmt.open(tmp_path)
    assert checkpoint["m/zeros"].codec == "zstd"
    assert checkpoint["m/noise"].codec == "raw"
    assert checkpoint["opt/zeros"].codec == "raw"
    assert checkpoint["m/zeros"].stored_nbytes < 8000
    assert info.stored_nbytes < 1_300_000
    assert not difference(ckptfmt.load(tmp_path), tree)
    assert ckptfmt.Store(tmp_path).verify().ok


def test_chunk_sizes_are_chosen_by_pattern_first_match_wins(tmp_path: Path) -> None:
    tree = {"emb": {"a": np.zeros(3 << 12, np.uint8), "b": np.arange(3 << 10)}, "w": np.ones(9000)}
    ckptfmt.save(tree, tmp_path, chunk_nbytes={"emb/a": 8192, "emb": 4096})
    index = ckptfmt.open(tmp_path).index
    raw = [
        index.tree.chunk_raw[a:b].tolist()
        for a, b in zip(index.tree.region_chunk_starts, index.tree.region_chunk_starts[1:])
    ]
    assert raw == [[8192, 4096], [4096] * 6, [72000]]
    assert not difference(ckptfmt.load(tmp_path), tree)


def test_large_tensors_start_on_a_block_and_small_ones_on_64_bytes(tmp_path: Path) -> None:
    tree = {f"{i}": np.full(n, i, np.uint8) for i, n in enumerate([1, 70_000, 63, 65, 65_536, 3])}
    ckptfmt.save(tree, tmp_path)
    index = ckptfmt.open(tmp_path).index
    offsets = index.placement.offsets.tolist()
    assert all(offset % 64 == 0 for offset in offsets)
    assert [offset % 4096 for offset in (offsets[1], offsets[4])] == [0, 0]
    assert len(index.files.ids) == 1
    assert int(index.files.nbytes[0]) % 4096 == 0


def test_a_tree_without_a_tensor_has_no_data_file(tmp_path: Path) -> None:
    info = ckptfmt.save({"a": 1, "b": [None, "x"]}, tmp_path)
    assert files(tmp_path) == []
    assert (info.nbytes, info.stored_nbytes, info.tensors) == (0, 0, 0)
    assert ckptfmt.load(tmp_path) == {"a": 1, "b": [None, "x"]}


@pytest.mark.parametrize(
    "tree", [5, None, "text", [], {}, [1, 2], np.arange(4), [np.ones(2)], (np.ones(1), 2)]
)
def test_the_root_may_be_anything(tmp_path: Path, tree: Any) -> None:
    ckptfmt.save(tree, str(tmp_path) if not isinstance(tree, str) else tmp_path)
    assert not difference(ckptfmt.load(tmp_path), tree)


def test_the_store_is_marked_and_laid_out_as_the_spec_says(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(3)}, tmp_path / "new" / "run", step=1)
    root = tmp_path / "new" / "run"
    assert b'"requires_to_write": []' in (root / "ckptfmt.json").read_bytes()
    left = {str(f.relative_to(root)) for f in root.rglob("*") if f.is_file()}
    [data] = files(root)
    expected = {"ckptfmt.json", f"data/{data}", "checkpoints/step-0000000000000001~0.index"}
    assert left == expected


def test_a_store_that_asks_for_more_than_we_know_is_not_written_to(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, step=1)
    marker = tmp_path / "ckptfmt.json"
    marker.write_text('{"format": "ckptfmt", "version": [1, 5], "requires_to_write": ["locks"]}')
    before = everything(tmp_path)
    with pytest.raises(ckptfmt.UnsupportedError, match="requires_to_write"):
        ckptfmt.save({"a": 2}, tmp_path, step=2)
    assert everything(tmp_path) == before
    assert ckptfmt.load(tmp_path) == {"a": 1}


def test_a_name_that_looks_like_a_file_becomes_a_folder_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(ckptfmt.CkptWarning, match="folder"):
        ckptfmt.save({"a": 1}, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").is_dir()


def test_a_run_folder_may_hold_other_things(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "data").mkdir()
    strays = ["config.yaml", "checkpoints/notes.txt", "checkpoints/step-9~x.index", "data/README"]
    for stray in strays:
        (tmp_path / stray).write_text("mine")
    ckptfmt.save({"a": np.ones(3)}, tmp_path, step=1)
    ckptfmt.save({"a": np.zeros(3)}, tmp_path, step=1, if_exists="replace")
    assert [(tmp_path / stray).read_text() for stray in strays] == ["mine"] * 4
    assert ckptfmt.Store(tmp_path).steps() == [1]


# -- durability, progress, interruption ---------------------------------------------------------


def test_a_durable_save_syncs_data_before_the_index_is_put(counted: Any) -> None:
    ckptfmt.save({"a": np.ones(3)}, counted.store, step=1)
    calls = counted.backend.calls
    [data] = [key for kind, key in calls if kind == "sync" and re.match("data/.", key)]
    index = calls.index(("put_if_absent", "checkpoints/step-0000000000000001~0.index"))
    assert max(calls.index(("sync", data)), calls.index(("sync", "data/"))) < index


def test_a_durable_save_syncs_reused_files_too(counted: Any) -> None:
    ckptfmt.save({"a": np.ones(3)}, counted.store, step=1, durable=False)
    [data] = [entry.key for entry in counted.backend.list("data/")]
    counted.backend.forget()
    ckptfmt.save({"a": np.ones(3), "b": 2}, counted.store, step=2)
    assert ("sync", data) in counted.backend.calls


def test_a_save_that_is_not_durable_calls_no_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptfmt.save({"a": np.zeros(3)}, tmp_path, step=1)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    ckptfmt.save({"a": np.ones(3)}, tmp_path, step=2, durable=False)
    assert synced == []
    monkeypatch.undo()
    assert ckptfmt.load(tmp_path)["a"].tolist() == [1, 1, 1]


def test_progress_counts_the_bytes_of_the_save(tmp_path: Path) -> None:
    events: list[Event] = []
    tree = {f"{i}": np.full(1000, i) for i in range(100)}
    ckptfmt.save(tree, tmp_path, step=3, progress=events.append)
    done = [event.nbytes for event in events]
    assert done == sorted(done)
    assert (done[-1], events[-1].total_nbytes) == (800_000, 800_000)
    assert {(event.kind, event.step) for event in events} == {("save", 3)}
    assert events[-1].checkpoint == "step-0000000000000003"


def test_progress_true_draws_on_stderr_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckptfmt.save({"a": np.ones(3)}, tmp_path, progress=True)
    ckptfmt.load(tmp_path, progress=True)
    assert capsys.readouterr().out == ""


def test_nothing_is_printed_otherwise(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ckptfmt.save({"a": np.ones(3)}, tmp_path)
    ckptfmt.load(tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interrupt_in_the_middle_leaves_nothing_visible(
    tmp_path: Path, error: type[BaseException]
) -> None:
    ckptfmt.save({"a": np.zeros(3)}, tmp_path, step=1)
    before = everything(tmp_path)

    def interrupt(event: Event) -> None:
        raise error

    with pytest.raises(error):
        ckptfmt.save({"a": np.ones(5000)}, tmp_path, step=2, progress=interrupt)
    after = everything(tmp_path)
    assert {key: after[key] for key in before} == before
    assert not [key for key in after if key not in before and not key.startswith("data/")]
    assert ckptfmt.Store(tmp_path).steps() == [1]
    assert ckptfmt.Store(tmp_path).verify().ok


def test_an_error_of_the_tree_itself_leaves_nothing_visible(tmp_path: Path) -> None:
    class Fails:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no state")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(RuntimeError, match="no state"):
        ckptfmt.save({"a": np.ones(2), "f": Fails()}, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_full_disk_is_a_storage_error_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    ckptfmt.save({"a": np.zeros(3)}, tmp_path, step=1)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ckptfmt.StorageError) as caught:
        ckptfmt.save({"a": np.ones(3000)}, tmp_path, step=2)
    monkeypatch.undo()
    assert caught.value.kind == "storage-no-space"
    assert ckptfmt.Store(tmp_path).steps() == [1]
    assert files(tmp_path, "tmp") == []
    assert files(tmp_path, "parts") == []
    assert not difference(ckptfmt.load(tmp_path), {"a": np.zeros(3)})


# -- several files, and stores that cannot rename -----------------------------------------------


def test_a_file_ends_after_the_region_that_passes_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfmt.engine.write.FILE_NBYTES_TARGET", 100_000)
    rng = np.random.default_rng(0)
    tree = {f"{i:02}": rng.integers(0, 255, 30_000, np.uint8) for i in range(20)}
    tree["big"] = rng.integers(0, 255, 300_000, np.uint8)
    tree["last"] = rng.integers(0, 255, 10, np.uint8)
    info = ckptfmt.save(tree, tmp_path, step=1)
    assert len(files(tmp_path)) == 7
    assert info.written_nbytes == sum(f.stat().st_size for f in (tmp_path / "data").iterdir())
    for mode in ("auto", "read", "mmap"):
        assert not difference(ckptfmt.load(tmp_path, mode=mode), tree)
    assert ckptfmt.Store(tmp_path).verify().ok
    tree["07"] = tree["07"] + 1
    again = ckptfmt.save(tree, tmp_path, step=2)
    assert again.written_nbytes < 50_000
    assert not difference(ckptfmt.load(tmp_path), tree)


@pytest.fixture
def no_rename(monkeypatch: pytest.MonkeyPatch) -> ckptfmt.Store:
    """A store whose keys are fixed when a file is begun, and which maps nothing."""
    return ckptfmt.Store("memory://", storage_options={"late_key": False})


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_store_that_cannot_rename_holds_the_same_bytes(
    tmp_path: Path, no_rename: ckptfmt.Store, tree: dict[str, Any], codec: str
) -> None:
    local = ckptfmt.save(tree, tmp_path, step=1, codec=codec)
    there = ckptfmt.save(tree, no_rename, step=1, codec=codec)
    assert there.digest == local.digest
    keys = [entry.key for entry in no_rename.backend.list("")]
    assert [key.removeprefix("data/") for key in keys if key.startswith("data/")] == files(tmp_path)
    assert not [key for key in keys if key.startswith(("tmp/", "parts/"))]
    assert not difference(ckptfmt.load(no_rename), tree)
    with pytest.raises(ckptfmt.UnsupportedError, match="cannot be mapped"):
        ckptfmt.load(no_rename, mode="mmap")
    assert no_rename.verify().ok


def test_without_rename_what_is_encoded_is_cut_into_regions(
    no_rename: ckptfmt.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("ckptfmt.engine.save")
    monkeypatch.setattr(module, "FILE_NBYTES_TARGET_REMOTE", 64 << 10)
    monkeypatch.setattr("ckptfmt.engine.write.FILE_NBYTES_TARGET_REMOTE", 64 << 10)
    tree = {
        "wide": np.arange(100_000, dtype=np.float32).reshape(1, 50, 2000),
        "scalar": np.array(1.0),
        "row": np.arange(100_000, dtype=np.int32).reshape(1, 1, -1),
        "raw": np.arange(50_000, dtype=np.int64),
        "one": np.full((1, 1), 3.0),
    }
    ckptfmt.save(tree, no_rename, step=1, codec={"raw": "raw", "**": "zstd"}, chunk_nbytes=4096)
    checkpoint = no_rename.open()
    counts = np.diff(checkpoint.index.tree.tensor_region_starts)
    regions = dict(zip(checkpoint.names(), counts.tolist()))
    assert regions == {"wide": 7, "scalar": 1, "row": 7, "raw": 1, "one": 1}
    assert not difference(ckptfmt.load(no_rename), tree)
    assert not difference(
        checkpoint["wide"].read(np.s_[0, 5:30:7, ::-3]), tree["wide"][0, 5:30:7, ::-3]
    )
    assert no_rename.verify().ok
    again = ckptfmt.save(
        {**tree, "v": 1}, no_rename, step=2, codec={"raw": "raw", "**": "zstd"}, chunk_nbytes=4096
    )
    assert again.written_nbytes == 0


def test_two_saves_to_one_store_at_once_are_both_there(tmp_path: Path) -> None:
    import threading

    errors: list[BaseException] = []

    def work(step: int) -> None:
        try:
            ckptfmt.save({"a": np.full(20_000, step), "s": step}, tmp_path, step=step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert ckptfmt.Store(tmp_path).steps() == list(range(6))
    for step in range(6):
        assert ckptfmt.load(tmp_path, step=step)["s"] == step
    assert ckptfmt.Store(tmp_path).verify().ok


def test_of_two_saves_of_one_step_one_wins(tmp_path: Path) -> None:
    import threading

    barrier = threading.Barrier(2)
    outcomes: dict[int, BaseException | None] = {}

    def wait(event: Event) -> None:
        if event.nbytes == event.total_nbytes:
            barrier.wait(timeout=20)

    def work(value: int) -> None:
        try:
            ckptfmt.save({"a": np.full(1000, value)}, tmp_path, step=1, progress=wait)
            outcomes[value] = None
        except ckptfmt.CheckpointError as error:
            outcomes[value] = error

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [value for value, error in outcomes.items() if error is None]
    lost = [error for error in outcomes.values() if error is not None]
    assert len(won) == len(lost) == 1
    assert isinstance(lost[0], ckptfmt.ExistsError)
    assert ckptfmt.load(tmp_path)["a"][0] == won[0]
    assert files(tmp_path, "parts") == []


@pytest.mark.integration
def test_an_s3_store_saves_loads_resaves_and_verifies(tree: dict[str, Any]) -> None:
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from ckptfmt.testing import serve_s3

    with serve_s3() as server, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=ResourceWarning)
        store = ckptfmt.Store(server.url("runs/a"), storage_options=server.storage_options)
        assert store.capabilities.put_if_absent
        assert not store.capabilities.late_key
        info = ckptfmt.save(tree, store, step=1, codec="zstd", metrics={"x": 1.0})
        again = ckptfmt.save({**tree, "step": 8}, store, step=2, codec="zstd")
        assert info.written_nbytes > 0 == again.written_nbytes
        with pytest.raises(ckptfmt.ExistsError):
            ckptfmt.save({**tree, "step": 9}, store, step=2)
        assert not difference(ckptfmt.load(store, step=1), tree)
        assert store.open(1)["model/embed"].read(np.s_[1, ::2]).shape == (6,)
        store.tag("best", 1)
        assert (store.steps(), store.tags()) == ([1, 2], {"best": info.name})
        assert store.verify().ok
        store.delete(2)
        assert store.steps() == [1]
        store.close()


def test_where_no_generation_is_left_nothing_is_committed_or_deleted(tmp_path: Path) -> None:
    """The next one would have a key that no reader accepts."""
    ckptfmt.save({"a": 1}, tmp_path)
    main = tmp_path / "checkpoints" / "main~0.index"
    (tmp_path / "checkpoints" / f"main~{2**63 - 1}.index").write_bytes(main.read_bytes())
    before = everything(tmp_path / "checkpoints")
    with pytest.raises(ckptfmt.ConflictError, match="no generation of this name is left"):
        ckptfmt.save({"a": 2}, tmp_path)
    assert everything(tmp_path / "checkpoints") == before
    assert ckptfmt.load(tmp_path) == {"a": 1}


def test_the_index_of_many_small_tensors_is_packed_tightly(tmp_path: Path) -> None:
    """A quarter less than level 1 leaves beside the digests, which nothing compresses."""
    count = 3000
    rows = np.arange(16 * count, dtype=np.float32).reshape(count, 16)
    ckptfmt.save({f"layers.{i}.weight": row.copy() for i, row in enumerate(rows)}, tmp_path)
    (path,) = (tmp_path / "checkpoints").iterdir()
    data = path.read_bytes()
    row = parse_header(data).sections[2]
    stored = data[row.offset : row.offset + row.stored_nbytes]
    raw = zstandard.ZstdDecompressor().decompress(stored)
    quick = zstandard.ZstdCompressor(level=1).compress(raw)
    assert len(stored) - 16 * count < 0.8 * (len(quick) - 16 * count)
    assert len(ckptfmt.load(tmp_path)) == count
