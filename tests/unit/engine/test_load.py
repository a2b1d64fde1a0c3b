"""What a load gives: bit for bit, private, writable, checked; or one clear error. Spec: 08-protocol."""

from __future__ import annotations

import collections
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.events import Event
from ckptfmt.testing import difference
from ckptfmt.types import Mode

MODES: list[Mode] = ["auto", "read", "mmap"]
Point = collections.namedtuple("Point", ["x", "y"])


# -- what comes back ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_tree_comes_back_bit_for_bit(tmp_path: Path, tree: dict[str, Any], mode: Mode) -> None:
    ckptfmt.save(tree, tmp_path)
    assert not difference(ckptfmt.load(tmp_path, mode=mode), tree)


def test_a_fresh_process_gets_the_same(tmp_path: Path, tree: dict[str, Any]) -> None:
    ckptfmt.save(tree, tmp_path, step=3)
    code = (
        "import sys, pickle, ckptfmt;"
        "sys.stdout.buffer.write(pickle.dumps(ckptfmt.load(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, stdout=subprocess.PIPE
    )
    assert not difference(pickle.loads(done.stdout), tree)


@pytest.mark.parametrize("mode", MODES)
def test_arrays_are_writable_and_their_writes_reach_no_file(tmp_path: Path, mode: Mode) -> None:
    tree = {"a": np.arange(70_000), "b": np.ones(3), "c": np.zeros((0,)), "d": np.array(5)}
    ckptfmt.save(tree, tmp_path)
    [file] = (tmp_path / "data").iterdir()
    before = file.read_bytes()
    loaded = ckptfmt.load(tmp_path, mode=mode)
    for array in loaded.values():
        assert array.flags.writeable
        assert array.flags.c_contiguous
        array[...] = 77
    assert file.read_bytes() == before
    assert not difference(ckptfmt.load(tmp_path, mode=mode), tree)


@pytest.mark.parametrize("mode", MODES)
def test_only_tied_names_are_one_object(tmp_path: Path, mode: Mode) -> None:
    weight = np.arange(12.0)
    tree = {"a": weight, "b": weight, "c": weight.copy(), "d": weight.reshape(3, 4)}
    ckptfmt.save(tree, tmp_path)
    loaded = ckptfmt.load(tmp_path, mode=mode)
    assert loaded["a"] is loaded["b"]
    loaded["a"][:] = -1
    assert (loaded["c"] == weight).all()
    assert (loaded["d"] == weight.reshape(3, 4)).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [8, 5000, 100_000])
def test_writes_to_one_array_reach_no_other(tmp_path: Path, mode: Mode, count: int) -> None:
    """Equal arrays share a stored range; neighbours share a buffer or a map."""
    base = np.random.default_rng(0).integers(0, 255, count, np.uint8)
    tree = {"a": base, "b": base.copy(), "c": base[::-1].copy(), "d": base.copy(), "e": base + 1}
    ckptfmt.save(tree, tmp_path, chunk_nbytes=4096)
    for victim in tree:
        loaded = ckptfmt.load(tmp_path, mode=mode)
        loaded[victim][:] = 0
        for name, array in loaded.items():
            if name != victim:
                assert (array == tree[name]).all(), (victim, name)


def test_views_that_overlapped_come_back_independent(tmp_path: Path) -> None:
    whole = np.arange(20)
    ckptfmt.save({"head": whole[:12], "tail": whole[8:], "all": whole}, tmp_path)
    loaded = ckptfmt.load(tmp_path)
    loaded["head"][9] = -1
    assert loaded["tail"][1] == loaded["all"][9] == 9


def test_read_gives_each_array_memory_of_its_own(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(10_000), "b": np.arange(3)}, tmp_path)
    owned = ckptfmt.load(tmp_path, mode="read")

    def backing(array: Any) -> int:
        while array.base is not None and isinstance(array.base, np.ndarray):
            array = array.base
        return int(array.nbytes)

    assert backing(owned["b"]) < 8192
    shared = ckptfmt.load(tmp_path, mode="auto")
    assert shared["a"].ctypes.data % 64 == 0


def test_the_pages_of_a_map_are_brought_by_one_thread_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads upset the system's read-ahead: later maps then take thrice the faults."""
    from ckptfmt.engine import read

    tree = {name: np.arange(3 << 18, dtype=np.float64) + len(name) for name in ("a", "bb", "ccc")}
    ckptfmt.save(tree, tmp_path, chunk_nbytes=1 << 20)
    seen: list[tuple[int, int, int]] = []

    def fault_in(memory: memoryview) -> None:
        array = np.frombuffer(memory, np.uint8)
        seen.append((threading.get_ident(), array.ctypes.data, array.nbytes))

    monkeypatch.setattr(read, "fault_in", fault_in)
    loaded = ckptfmt.load(tmp_path, mode="mmap")
    assert not difference(loaded, tree)
    assert {thread for thread, _, _ in seen} == {threading.get_ident()}
    starts = [start for _, start, _ in seen]
    assert starts == sorted(starts)
    assert sum(nbytes for _, _, nbytes in seen) == sum(array.nbytes for array in tree.values())
    seen.clear()
    ckptfmt.load(tmp_path, mode="mmap", verify=False)
    assert not seen


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(3)}, tmp_path)
    wrong: Any = "lazy"
    with pytest.raises(ckptfmt.UsageError, match="mode"):
        ckptfmt.load(tmp_path, mode=wrong)


def test_strings_come_back_in_the_kind_of_array_they_were(tmp_path: Path) -> None:
    tree = {
        "new": np.array(["", "é", "long " * 50], np.dtypes.StringDType()),
        "objects": np.array([["a", "b"], ["c", "\U0001f600"]], object),
        "bytes": np.array([b"", b"\0x"], object),
        "fixed": np.array(["ab", "c"]),
        "fixed_bytes": np.array([b"ab", b"c"]),
        "none": np.array([], object),
    }
    for codec in ("raw", "zstd"):
        ckptfmt.save(tree, tmp_path / codec, codec=codec)
        loaded = ckptfmt.load(tmp_path / codec)
        for name in ("new", "objects", "bytes", "fixed", "fixed_bytes"):
            assert not difference(loaded[name], tree[name], name)
        assert loaded["none"].shape == (0,)


def test_string_arrays_tied_or_equal_stay_so(tmp_path: Path) -> None:
    words = np.array(["a", "bb"], object)
    ckptfmt.save({"a": words, "b": words, "c": words.copy()}, tmp_path)
    loaded = ckptfmt.load(tmp_path)
    assert loaded["a"] is loaded["b"] is not loaded["c"]
    assert loaded["c"].tolist() == ["a", "bb"]


def test_long_values_come_back(tmp_path: Path) -> None:
    tree = {"text": "x" * 10_000, "list": list(range(5000)), "bytes": b"\0\xff" * 5000, "a": 1}
    ckptfmt.save(tree, tmp_path)
    assert not difference(ckptfmt.load(tmp_path), tree)
    assert not difference(
        ckptfmt.load(tmp_path, names=["text", "a"]), {"text": tree["text"], "a": 1}
    )


# -- a part -------------------------------------------------------------------------------------


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    tree = {
        "model": {
            "enc": {"w": np.ones(2), "b": np.zeros(2)},
            "list": [np.full(1, i) for i in range(5)],
            "pair": (np.ones(1), 7),
            "point": Point(np.ones(1), 3),
            "deep": [[np.zeros(1), np.ones(1)], {"k": np.full(1, 2.0)}],
        },
        "opt": {"lr": 0.1, 3: np.ones(3)},
        "plain": [1, [2, 3]],
    }
    ckptfmt.save(tree, tmp_path / "s")
    return tmp_path / "s"


def load(path: Path, names: Any) -> Any:
    return ckptfmt.load(path, names=names)


def test_a_container_takes_all_below_it_and_nesting_stays(layers: Path) -> None:
    loaded = load(layers, "model/enc")
    assert not difference(loaded, {"model": {"enc": {"w": np.ones(2), "b": np.zeros(2)}}})
    assert list(load(layers, ["opt", "model/enc/w"])) == ["model", "opt"]
    assert list(load(layers, "model/list")["model"]) == ["list"]


def test_a_whole_list_stays_a_list_and_one_with_gaps_becomes_a_dict_of_positions(
    layers: Path,
) -> None:
    whole = load(layers, "model/list")["model"]["list"]
    assert [int(a[0]) for a in whole] == [0, 1, 2, 3, 4]
    assert isinstance(whole, list)
    for names, expected in (
        (["model/list/1", "model/list/3"], {1: 1, 3: 3}),
        ("model/list/0", {0: 0}),
        (["model/list/0", "model/list/1"], {0: 0, 1: 1}),
    ):
        some = load(layers, names)["model"]["list"]
        assert type(some) is dict
        assert {k: int(v[0]) for k, v in some.items()} == expected


def test_a_part_of_a_tuple_or_namedtuple_becomes_a_dict_too(layers: Path) -> None:
    assert load(layers, "model/pair/1")["model"]["pair"] == {1: 7}
    whole = load(layers, "model/pair")["model"]["pair"]
    assert isinstance(whole, tuple)
    part = load(layers, "model/point/1")["model"]["point"]
    assert list(dict(part).values()) == [3]
    assert load(layers, "model/point")["model"]["point"]._fields == ("x", "y")


def test_patterns_cross_keys_with_two_stars_alone(layers: Path) -> None:
    assert list(load(layers, "model/*/w")["model"]) == ["enc"]
    assert list(load(layers, "*/lr")) == ["opt"]
    assert set(load(layers, "**/k")["model"]["deep"][1]) == {"k"}
    assert load(layers, "opt/~3i3")["opt"][3].shape == (3,)
    assert load(layers, lambda name: name.endswith("lr")) == {"opt": {"lr": 0.1}}
    assert load(layers, "plain") == {"plain": [1, [2, 3]]}


@pytest.mark.parametrize(
    "names",
    ["modle", "model/en", "model/enc/", "*x*", ["model/enc", "nothing"], [], lambda n: False],
)
def test_a_pattern_that_matches_nothing_is_an_error(layers: Path, names: Any) -> None:
    with pytest.raises(ckptfmt.NotFoundError, match="no leaf matches"):
        load(layers, names)


def test_the_error_names_the_nearest(layers: Path) -> None:
    with pytest.raises(ckptfmt.NotFoundError, match="did you mean 'model/enc/w'"):
        load(layers, "model/enk/w")


def test_only_the_part_is_read(counted: Any) -> None:
    tree = {f"{i}": np.full(100_000, i, np.uint8) for i in range(10)}
    ckptfmt.save(tree, counted.store)
    counted.backend.forget()
    loaded = ckptfmt.load(counted.store, names=["3", "7"])
    assert list(loaded) == ["3", "7"]
    assert counted.backend.data_nbytes() <= 220_000


def test_a_part_of_a_tie_is_whole(tmp_path: Path) -> None:
    weight = np.arange(5)
    ckptfmt.save({"a": weight, "b": weight}, tmp_path)
    assert not difference(ckptfmt.load(tmp_path, names="b"), {"b": weight})


# -- which --------------------------------------------------------------------------------------


def test_latest_is_the_highest_step_then_main(tmp_path: Path) -> None:
    ckptfmt.save({"v": "main"}, tmp_path)
    assert ckptfmt.load(tmp_path) == {"v": "main"}
    for step in (9000, 10_000, 5):
        ckptfmt.save({"v": step}, tmp_path, step=step)
    assert ckptfmt.load(tmp_path) == {"v": 10_000}
    assert ckptfmt.load(tmp_path, at="latest") == {"v": 10_000}
    assert ckptfmt.load(tmp_path, step=9000) == {"v": 9000}
    assert ckptfmt.load(tmp_path, at=5) == {"v": 5}
    assert ckptfmt.load(tmp_path, at="step-0000000000000005") == {"v": 5}
    assert ckptfmt.load(f"{tmp_path}@main") == {"v": "main"}


@pytest.mark.parametrize(
    "options", [{"step": 1, "at": 1}, {"step": 1, "at": "main"}, {"step": -1}, {"step": "1"}]
)
def test_choosing_twice_or_wrongly_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    ckptfmt.save({"v": 1}, tmp_path, step=1)
    with pytest.raises(ckptfmt.UsageError):
        ckptfmt.load(tmp_path, **options)


def test_a_selector_beside_step_is_refused(tmp_path: Path) -> None:
    ckptfmt.save({"v": 1}, tmp_path, step=1)
    with pytest.raises(ckptfmt.UsageError, match="twice"):
        ckptfmt.load(f"{tmp_path}@1", step=1)


def test_what_is_not_there_is_not_found_and_the_message_lists_what_is(tmp_path: Path) -> None:
    with pytest.raises(ckptfmt.NotFoundError, match="no checkpoint"):
        ckptfmt.load(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    ckptfmt.save({"v": 1}, tmp_path, name="best")
    with pytest.raises(ckptfmt.NotFoundError, match="best") as caught:
        ckptfmt.load(tmp_path)
    assert "at=" in str(caught.value)
    assert isinstance(caught.value, KeyError | FileNotFoundError)
    for at in (7, "bset", "step-0000000000000001"):
        with pytest.raises(ckptfmt.NotFoundError, match="best"):
            ckptfmt.load(tmp_path, at=at)


def test_a_damaged_latest_is_skipped_with_a_warning_that_names_it(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ckptfmt.save({"v": step}, tmp_path, step=step)
    for step in (3, 2):
        index = tmp_path / "checkpoints" / f"step-{step:016d}~0.index"
        index.write_bytes(index.read_bytes()[:-1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ckptfmt.load(tmp_path) == {"v": 1}
    named = [str(w.message) for w in caught if w.category is ckptfmt.CkptWarning]
    assert len(named) == 2
    assert "step-0000000000000003~0.index" in named[0]
    assert {w.filename for w in caught} == {__file__}, "the warning points at the caller"


def test_if_all_are_damaged_it_is_an_error(tmp_path: Path) -> None:
    ckptfmt.save({"v": 1}, tmp_path, step=1)
    index = tmp_path / "checkpoints" / "step-0000000000000001~0.index"
    index.write_bytes(b"")
    with (
        pytest.warns(ckptfmt.CkptWarning),
        pytest.raises(ckptfmt.NotFoundError, match="no readable checkpoint"),
    ):
        ckptfmt.load(tmp_path)


def test_a_damaged_step_that_was_asked_for_is_corrupt_not_absent(tmp_path: Path) -> None:
    ckptfmt.save({"v": 1}, tmp_path, step=1)
    index = tmp_path / "checkpoints" / "step-0000000000000001~0.index"
    index.write_bytes(index.read_bytes()[:-1] + b"x")
    with pytest.raises(ckptfmt.CorruptError, match=r"step-0000000000000001~0\.index"):
        ckptfmt.load(tmp_path, step=1)


def test_a_damaged_higher_generation_falls_back_to_the_lower(tmp_path: Path) -> None:
    ckptfmt.save({"v": 1}, tmp_path)
    old = (tmp_path / "checkpoints" / "main~0.index").read_bytes()
    ckptfmt.save({"v": 2}, tmp_path)
    (tmp_path / "checkpoints" / "main~0.index").write_bytes(old)
    assert ckptfmt.load(tmp_path) == {"v": 2}
    (tmp_path / "checkpoints" / "main~1.index").write_bytes(b"\0" * 500)
    with pytest.warns(ckptfmt.CkptWarning, match="main~1"):
        assert ckptfmt.load(tmp_path) == {"v": 1}


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["missing", "short", "long", "flipped", "zeroed"])
def test_a_damaged_data_file_is_corrupt_and_its_file_and_tensor_are_named(
    tmp_path: Path, mode: Mode, how: str
) -> None:
    ckptfmt.save({"m": {"w": np.arange(1, 10_001)}, "z": np.ones(3)}, tmp_path)
    [file] = (tmp_path / "data").iterdir()
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        changed = {
            "short": data[:8192],
            "long": data + b"\0" * 4096,
            "flipped": data[:9000] + bytes([data[9000] ^ 1]) + data[9001:],
            "zeroed": data[:8192] + b"\0" * 4096 + data[12288:],
        }
        file.write_bytes(changed[how])
    if how == "long" and mode != "mmap":
        ckptfmt.load(tmp_path, mode=mode)  # what is read is whole; verify finds the rest
        return
    with pytest.raises(ckptfmt.CorruptError) as caught:
        ckptfmt.load(tmp_path, mode=mode)
    text = str(caught.value)
    assert f"data/{file.name}" in text
    if how != "long":
        assert "'m/w'" in text
    if how in ("flipped", "zeroed"):
        assert "[4096:84096)" in text
        assert "expected" in text
    assert (tmp_path / "damaged" / file.name).exists() == (how != "missing")


def test_a_part_that_is_whole_loads_from_a_damaged_file(tmp_path: Path) -> None:
    tree = {"a": np.arange(5000), "b": np.ones(5000)}
    ckptfmt.save(tree, tmp_path)
    [file] = (tmp_path / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[4200] ^= 1
    file.write_bytes(data)
    assert not difference(ckptfmt.load(tmp_path, names="b"), {"b": tree["b"]})


def test_without_verify_only_sizes_are_checked(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.zeros(5000, np.uint8)}, tmp_path)
    [file] = (tmp_path / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[4100] ^= 1
    file.write_bytes(data)
    for mode in MODES:
        assert int(ckptfmt.load(tmp_path, mode=mode, verify=False)["a"].sum()) == 1
    file.write_bytes(data[:4096])
    for mode in MODES:
        with pytest.raises(ckptfmt.CorruptError):
            ckptfmt.load(tmp_path, mode=mode, verify=False)


def test_a_symbolic_link_in_place_of_a_data_file_is_not_followed(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(5000)}, tmp_path / "s")
    [file] = (tmp_path / "s" / "data").iterdir()
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    for mode in MODES:
        with pytest.raises(ckptfmt.CheckpointError):
            ckptfmt.load(tmp_path / "s", mode=mode)


# -- limits, progress ---------------------------------------------------------------------------


def test_more_bytes_than_allowed_are_refused_before_anything_is_read(counted: Any) -> None:
    ckptfmt.save({"a": np.zeros(1000, np.uint8), "b": np.zeros(24, np.uint8)}, counted.store)
    counted.backend.forget()
    with pytest.raises(ckptfmt.UsageError, match="1024 bytes"):
        ckptfmt.load(counted.store, max_nbytes=1023)
    assert counted.backend.data_reads() == []
    ckptfmt.load(counted.store, max_nbytes=1024)
    ckptfmt.load(counted.store, max_nbytes=24, names="b")


def test_progress_counts_the_bytes_of_the_load(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.zeros(100_000), "b": 1}, tmp_path, step=4)
    for mode in MODES:
        events: list[Event] = []
        ckptfmt.load(tmp_path, mode=mode, progress=events.append)
        assert (events[-1].kind, events[-1].step) == ("load", 4)
        assert events[-1].nbytes == events[-1].total_nbytes == 800_000


def test_an_error_of_progress_ends_the_load(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.zeros(100_000)}, tmp_path)

    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptfmt.load(tmp_path, progress=stop)


def test_neighbours_are_read_in_few_requests(counted: Any) -> None:
    tree = {f"{i}": np.full(500, i, np.int64) for i in range(1000)}
    ckptfmt.save(tree, counted.store)
    counted.backend.forget()
    assert not difference(ckptfmt.load(counted.store), tree)
    assert len(counted.backend.data_reads()) <= 3


# -- what was returned lives on -----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify", [True, False])
def test_deleting_or_replacing_the_checkpoint_harms_no_array(
    tmp_path: Path, mode: Mode, verify: bool
) -> None:
    tree = {"a": np.arange(100_000), "b": np.ones(7)}
    ckptfmt.save(tree, tmp_path / "s")
    loaded = ckptfmt.load(tmp_path / "s", mode=mode, verify=verify)
    ckptfmt.save({"a": np.zeros(3)}, tmp_path / "s")
    store = ckptfmt.Store(tmp_path / "s")
    store.gc(grace_s=0)
    assert not difference(loaded, tree)
    store.delete("main")
    store.gc(grace_s=0)
    shutil.rmtree(tmp_path / "s")
    gc.collect()
    assert not difference(loaded, tree)


def test_the_next_save_may_read_from_the_map_it_replaces(tmp_path: Path) -> None:
    tree = {"a": np.arange(100_000), "b": np.ones(70_000)}
    ckptfmt.save(tree, tmp_path)
    for value in range(3):
        mapped = ckptfmt.load(tmp_path, mode="mmap")
        mapped["b"][value] = 100 + value
        ckptfmt.save(mapped, tmp_path)
        ckptfmt.Store(tmp_path).gc(grace_s=0)
        tree["b"][value] = 100 + value
        assert not difference(mapped, tree)
        assert not difference(ckptfmt.load(tmp_path), tree)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_load_leaves_no_descriptor_open(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.arange(100_000)}, tmp_path)
    for mode in MODES:
        ckptfmt.load(tmp_path, mode=mode)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for mode in MODES:
            ckptfmt.load(tmp_path, mode=mode)
        ckptfmt.save({"a": np.arange(100_000)}, tmp_path)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_mmap_needs_raw_chunks_in_one_range(tmp_path: Path) -> None:
    ckptfmt.save({"ok": np.array(1.5), "m": {"zip": np.zeros(9999)}}, tmp_path / "z", codec="zstd")
    with pytest.raises(ckptfmt.UnsupportedError, match="'m/zip'"):
        ckptfmt.load(tmp_path / "z", mode="mmap")
    array = np.arange(1 << 15)
    ckptfmt.save({"a": array}, tmp_path / "r", step=1, chunk_nbytes=4096)
    array[5000] = 0
    ckptfmt.save({"a": array}, tmp_path / "r", step=2, chunk_nbytes=4096)
    with pytest.raises(ckptfmt.UnsupportedError, match="'a'"):
        ckptfmt.load(tmp_path / "r", mode="mmap")
    assert not difference(ckptfmt.load(tmp_path / "r"), {"a": array})


# -- like ---------------------------------------------------------------------------------------


class Spec:
    """Something with shape and dtype, and nothing else."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)


def test_like_gives_its_own_structure_with_the_stored_values(tmp_path: Path) -> None:
    saved: Any = {"p": {"w": np.arange(6.0).reshape(2, 3)}, "l": [np.ones(2), 5], "n": (1, 2)}
    ckptfmt.save(saved, tmp_path)
    like: Any = {
        "p": collections.OrderedDict(w=Spec((2, 3), np.float64)),
        "l": (np.zeros(2), 0),
        "n": None,
    }
    loaded = ckptfmt.load(tmp_path, like=like)
    expected: Any = {
        "p": collections.OrderedDict(w=saved["p"]["w"]),
        "l": (np.ones(2), 5),
        "n": (1, 2),
    }
    assert not difference(loaded, expected)
    assert like["l"][0].tolist() == [0, 0], "like is left alone"


def test_like_is_compared_as_in_restore(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(3), "b": np.ones(2), "c": 1}, tmp_path)
    wrong: Any = {"a": Spec((4,), np.float64), "b": Spec((2,), np.int32), "d": 1}
    with pytest.raises(ckptfmt.MismatchError) as caught:
        ckptfmt.load(tmp_path, like=wrong)
    report: Any = caught.value.report
    assert [m.name for m in report.shapes] == ["a"]
    assert [m.name for m in report.dtypes] == ["b"]
    assert list(report.missing) == ["d"]
    assert list(report.unexpected) == ["c"]


def test_like_with_names_takes_a_part(tmp_path: Path) -> None:
    ckptfmt.save({"a": np.ones(3), "b": np.ones(2)}, tmp_path)
    loaded = ckptfmt.load(tmp_path, like={"a": np.zeros(3)}, names="a")
    assert not difference(loaded, {"a": np.ones(3)})


def test_like_works_with_ml_dtypes_and_scalars(tmp_path: Path) -> None:
    saved = {"h": np.ones(2, ml_dtypes.bfloat16), "s": np.float32(2), "z": np.zeros((0, 1))}
    ckptfmt.save(saved, tmp_path)
    like: Any = {"h": Spec((2,), ml_dtypes.bfloat16), "s": 0, "z": Spec((0, 1), np.float64)}
    assert not difference(ckptfmt.load(tmp_path, like=like), saved)
