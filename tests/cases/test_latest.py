"""Case 25: the latest checkpoint is what a listing says; there is no pointer to be wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckptfmt
from ckptfmt import NotFoundError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (9, 10, 100):
        ckptfmt.save({"w": np.full(1000, step)}, tmp_path / "run", step=step, durable=False)
    return tmp_path / "run"


def newest(path: Path) -> int:
    return int(ckptfmt.load(path)["w"][0])


def digests(path: Path) -> list[str]:
    return [info.digest for info in ckptfmt.Store(path).checkpoints()]


def test_a_save_that_died_before_its_name_was_there_is_no_candidate(run: Path) -> None:
    code = (
        "import os, sys, numpy as np, ckptfmt\n"
        "link = os.link\n"
        "def die(source, target, **how):\n"
        "    if str(target).endswith('.index'): os._exit(9)\n"
        "    link(source, target, **how)\n"
        "os.link = die\n"
        "ckptfmt.save({'w': np.full(1000, 200)}, sys.argv[1], step=200)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], env=dict(os.environ), check=False)
    assert done.returncode == 9
    assert newest(run) == 100
    assert ckptfmt.Store(run).steps() == [9, 10, 100]
    ckptfmt.save({"w": np.full(1000, 201)}, run, step=201, durable=False)
    assert newest(run) == 201


def test_temporary_and_foreign_names_are_no_candidates_and_stay(run: Path) -> None:
    index = next((run / "checkpoints").glob("step-0000000000000100~0.index"))
    strays = [
        run / "checkpoints" / "step-0000000000000999~0.index.tmp",
        run / "checkpoints" / "step-999~0.index",
        run / "checkpoints" / "handpicked.index",
        run / "checkpoints" / "latest",
        run / "latest",
        run / "checkpoint",
    ]
    for stray in strays:
        stray.write_bytes(index.read_bytes())
    assert newest(run) == 100
    ckptfmt.Store(run).gc(grace_s=0, wait=True)
    assert all(stray.exists() for stray in strays)


@pytest.mark.parametrize("content", [b"", b"step-100" * 100], ids=["empty", "garbage"])
def test_a_broken_newest_falls_back_with_a_warning(run: Path, content: bytes) -> None:
    (run / "checkpoints" / "step-0000000000000500~0.index").write_bytes(content)
    with pytest.warns(ckptfmt.CkptWarning, match="step-0000000000000500"):
        assert newest(run) == 100


@pytest.mark.parametrize("leads", ["to itself", "to nothing"])
def test_a_link_that_leads_nowhere_is_no_checkpoint(run: Path, leads: str) -> None:
    target = run / "checkpoints" / "step-0000000000000500~0.index"
    target.symlink_to(target if leads == "to itself" else run / "gone")
    assert newest(run) == 100
    assert ckptfmt.Store(run).steps() == [9, 10, 100]


def test_the_newest_deleted_by_hand_leaves_the_one_before(run: Path) -> None:
    for path in (run / "checkpoints").glob("step-0000000000000100~*"):
        path.unlink()
    assert newest(run) == 10
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(NotFoundError):
        ckptfmt.load(run)


def test_a_tag_for_the_best_is_not_the_latest_and_says_where_it_leads_when_broken(
    run: Path,
) -> None:
    store = ckptfmt.Store(run)
    store.tag("best", 9)
    assert newest(run) == 100
    assert int(ckptfmt.load(f"{run}@best")["w"][0]) == 9
    next((run / "tags").iterdir()).write_bytes(b"best -> best")
    assert newest(run) == 100
    with pytest.raises(ckptfmt.CheckpointError, match="best"):
        ckptfmt.load(f"{run}@best")


def test_a_moved_and_a_copied_folder_are_what_they_were(run: Path, tmp_path: Path) -> None:
    before = digests(run)
    copied, moved = tmp_path / "copy", tmp_path / "else" / "where"
    shutil.copytree(run, copied)
    moved.parent.mkdir()
    run.rename(moved)
    assert digests(copied) == digests(moved) == before
    assert newest(copied) == newest(moved) == 100
    for _ in range(2):
        ckptfmt.Store(copied).gc(grace_s=0, wait=True)
    assert digests(copied) == before
    assert ckptfmt.Store(copied).verify().ok
