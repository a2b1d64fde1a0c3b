"""Cases 20 to 22: an interrupted save, damaged files, and a save over what is mapped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.storage import open_backend
from ckptfmt.testing import FaultyBackend, difference

SizeOf = Callable[[Path], int]


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(20_000, step), "b": np.full(7, -step), "step": step}


# -- case 20 (random kills are in tests/crash) ----------------------------------------------------


@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_killed_at_every_operation_of_a_save_the_old_or_the_new_step_is_there(
    tmp_path: Path, size_of: SizeOf, when: Any
) -> None:
    """Case 20: SIGKILL at operation 0, 1, 2, ... of a save over a good step, in a process of its
    own: latest loads and verifies, the litter is at most one save's, and the next save takes it."""
    child = textwrap.dedent(
        """
        import sys
        import numpy as np
        import ckptfmt
        from ckptfmt.storage import open_backend
        from ckptfmt.testing import FaultyBackend
        path, at, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]
        store = ckptfmt.Store(path)
        store.backend = FaultyBackend(open_backend(path), fail_at=at, mode="kill", when=when)
        tree = {"w": np.full(20_000, 2), "b": np.full(7, -2), "step": 2}
        ckptfmt.save(tree, store, step=2)
        """
    )
    ckptfmt.save(state(1), tmp_path / "s0", step=1)
    one = size_of(tmp_path / "s0")
    seen = set()
    # Starting a process takes a second: a few operations each, another third by each parameter.
    first = ["before", "half", "after"].index(when)
    for at in range(first, 60, 3):
        path = tmp_path / f"s{at}-{when}"
        ckptfmt.save(state(1), path, step=1)
        done = subprocess.run([sys.executable, "-c", child, str(path), str(at), when], check=False)
        latest = ckptfmt.load(path)
        assert latest["step"] in (1, 2)
        assert not difference(latest, state(latest["step"]))
        seen.add(latest["step"])
        store = ckptfmt.Store(path)
        assert store.verify().ok
        assert store.steps() == [1, 2][: latest["step"]]
        assert size_of(path) <= 3 * one
        ckptfmt.save(state(3), path, step=3)
        litter = [f for f in path.rglob("*") if f.is_file() and f.parent.name != "data"]
        litter = [f for f in litter if f.parent.name != "checkpoints"]
        assert [f.name for f in litter] == ["ckptfmt.json"]
        store.gc(grace_s=0)
        assert store.verify().ok
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert seen == {1, 2}


def test_data_is_synced_before_the_name_that_shows_it(tmp_path: Path) -> None:
    """Case 20: file, then folder, then the index; a power cut at any operation loses no step."""
    ckptfmt.save(state(1), tmp_path / "s", step=1)
    for at in range(200):
        inner = open_backend("memory://")
        store = ckptfmt.Store("memory://")
        store.backend = FaultyBackend(inner, power=True)
        ckptfmt.save(state(1), store, step=1)
        faulty = FaultyBackend(store.backend, fail_at=at)
        store.backend = faulty
        try:
            ckptfmt.save(state(2), store, step=2)
            committed = True
        except ckptfmt.CheckpointError:
            committed = False
        power: Any = faulty.inner
        power.power_cut()
        after = ckptfmt.Store("memory://")
        after.backend = inner
        steps = after.steps()
        assert steps in ([1], [1, 2])
        if committed:
            assert steps == [1, 2]
        for step in steps:
            assert not difference(ckptfmt.load(after, step=step), state(step))
        if not faulty.fired:
            break
    else:
        pytest.fail("a save takes fewer operations than that")


# -- case 21 ------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    tree = {
        "w": np.arange(3000, dtype=np.float32),
        "half": np.arange(3000).astype(np.float16),
        "text": np.array(["a", "bc"], object),
        "v": {"lr": 0.1, "l": [1, 2]},
    }
    ckptfmt.save(tree, tmp_path / "s", step=1)
    return tmp_path / "s"


def files_of(path: Path) -> list[Path]:
    return sorted(f for name in ("data", "checkpoints") for f in (path / name).iterdir())


def damages(data: bytes, random: np.random.Generator) -> dict[str, bytes]:
    made = {f"cut to {n}": data[:n] for n in (0, 1, len(data) // 2, len(data) - 1)}
    for at in random.integers(0, len(data), 200).tolist():
        bit = int(random.integers(0, 8))
        made[f"bit {bit} of byte {at}"] = (
            data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
        )
    for at in range(0, len(data) - 1, 4096):
        if any(data[at : at + 4096]):
            made[f"zeros at {at}"] = (
                data[:at] + bytes(len(data[at : at + 4096])) + data[at + 4096 :]
            )
    made["all zeros"] = bytes(len(data))
    made["junk at the end"] = data + b"junk"
    made["a block at the end"] = data + bytes(4096)
    return made


def test_every_cut_flip_zeroed_block_and_appended_junk_is_found(damaged: Path, seed: int) -> None:
    """Case 21: verify finds all of it; a load of everything finds all that it reads, and names
    file, expected and found."""
    random = np.random.default_rng(seed)
    good = ckptfmt.load(damaged)
    store = ckptfmt.Store(damaged)
    index = store.open().index
    in_chunks = np.zeros(int(index.files.nbytes[0]), bool)
    for offset, nbytes in zip(index.placement.offsets.tolist(), index.placement.stored.tolist()):
        in_chunks[offset : offset + nbytes] = True
    for file in files_of(damaged):
        data = file.read_bytes()
        for what, bad in damages(data, random).items():
            file.write_bytes(bad)
            report = store.verify()
            assert not report.ok, f"{file.name}: {what}"
            assert {p.file for p in report.problems} == {f"{file.parent.name}/{file.name}"}
            changed = [i for i, (a, b) in enumerate(zip(data, bad)) if a != b]
            read = file.parent.name == "checkpoints" or (
                len(bad) < len(data) and bool(in_chunks[len(bad) :].any())
            )
            read |= any(in_chunks[i] for i in changed if i < len(in_chunks))
            try:
                loaded = ckptfmt.load(damaged, step=1)
            except ckptfmt.CorruptError as error:
                text = str(error)
                assert file.name in text + "".join(getattr(error, "__notes__", ()))  # noqa: PT017
                if file.parent.name == "data":
                    assert "tensor" in text
                    assert "expected" in text
            except ckptfmt.UnsupportedError:
                assert file.parent.name == "checkpoints"
            else:
                assert not read, f"{file.name}: {what}"
                assert not difference(loaded, good), what
        file.write_bytes(data)
        for marked in (damaged / "damaged").glob("*"):
            marked.unlink()
    assert store.verify().ok


def test_a_short_file_under_a_lazy_map_is_an_exception_not_a_signal(damaged: Path) -> None:
    """Case 21: sizes are checked when a map is made."""
    [file] = (damaged / "data").iterdir()
    data = file.read_bytes()
    checkpoint = ckptfmt.open(damaged)
    for nbytes in (0, 1, 4096, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:nbytes])
        with pytest.raises(ckptfmt.CorruptError, match=file.name):
            checkpoint["w"].mmap()
        with pytest.raises(ckptfmt.CorruptError):
            ckptfmt.load(damaged, mode="mmap", verify=False)


def test_undamaged_tensors_can_be_read_beside_damaged_ones(damaged: Path) -> None:
    """Case 21: what is whole is still to be had, by name."""
    index = ckptfmt.open(damaged).index
    [file] = (damaged / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[int(index.placement.offsets[0]) + 9] ^= 1
    file.write_bytes(data)
    with pytest.raises(ckptfmt.CorruptError, match="'w'"):
        ckptfmt.load(damaged)
    bad = {p.tensor for p in ckptfmt.open(damaged).verify().problems}
    assert bad == {"w"}
    saved = ckptfmt.load(damaged, names=lambda name: name not in bad)
    assert saved["half"].tolist() == np.arange(3000).astype(np.float16).tolist()
    assert saved["v"] == {"lr": 0.1, "l": [1, 2]}


# -- case 22 ------------------------------------------------------------------------------------

KEEPS_A_MAP = """
import sys
import ckptfmt
tree = ckptfmt.load(sys.argv[1], mode="mmap", verify=bool(sys.argv[2]))
print("mapped", flush=True)
for line in sys.stdin:
    print(int(tree["a"].sum()), float(tree["b"].sum()), flush=True)
"""


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("where", ["step", "main"])
def test_saving_over_what_is_mapped_gives_the_new_and_keeps_the_old(
    tmp_path: Path, where: str, verify: bool
) -> None:
    """Case 22: change one entry of a map, save to the same place; a second process keeps its own
    map throughout; then the step is pruned while mapped."""
    options: dict[str, Any] = {"step": 1, "if_exists": "replace"} if where == "step" else {}
    tree = {"a": np.arange(200_000), "b": np.full(100_000, 7.0), "c": np.ones(3)}
    ckptfmt.save(tree, tmp_path, **options)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            KEEPS_A_MAP,
            str(tmp_path),
            "verify" if verify else "",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def ask() -> str:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("?\n")
        child.stdin.flush()
        return child.stdout.readline().strip()

    try:
        assert child.stdout.readline() == "mapped\n"
        before = f"{int(tree['a'].sum())} {float(tree['b'].sum())}"
        if verify:
            assert ask() == before
        mapped = ckptfmt.load(tmp_path, mode="mmap", verify=verify)
        untouched = ckptfmt.load(tmp_path, mode="mmap", verify=False)
        mapped["b"][5] = -1.0
        ckptfmt.save(mapped, tmp_path, **options)
        store = ckptfmt.Store(tmp_path)
        store.gc(grace_s=0)
        assert ask() == before
        expected = {**tree, "b": tree["b"].copy()}
        expected["b"][5] = -1.0
        assert not difference(ckptfmt.load(tmp_path), expected)
        assert not difference(mapped, expected)
        assert not difference(untouched, tree)
        for name in store.names():
            store.delete(name)
        store.gc(grace_s=0)
        assert os.listdir(tmp_path / "data") == []
        assert ask() == before
        assert not difference(untouched, tree)
        assert not difference(mapped, expected)
    finally:
        child.communicate(timeout=30)
    assert child.returncode == 0


def test_the_old_data_goes_only_after_the_new_is_committed(tmp_path: Path) -> None:
    """Case 22: a failed save over what is mapped costs nothing."""
    tree = {"a": np.arange(100_000)}
    ckptfmt.save(tree, tmp_path)
    for at in range(0, 200, 2):
        mapped = ckptfmt.load(tmp_path, mode="mmap", verify=False)
        mapped["a"][0] = -5
        store = ckptfmt.Store(tmp_path)
        faulty = FaultyBackend(open_backend(tmp_path), fail_at=at, mode="from")
        store.backend = faulty
        try:
            ckptfmt.save(mapped, store)
        except (ckptfmt.CheckpointError, OSError):
            pass
        loaded = ckptfmt.load(tmp_path)
        assert loaded["a"][1:].tolist() == tree["a"][1:].tolist()
        assert loaded["a"][0] in (0, -5)
        assert ckptfmt.Store(tmp_path).verify().ok
        if not faulty.fired:
            break
    else:
        pytest.fail("a save takes fewer operations than that")
