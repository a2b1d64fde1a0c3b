"""Killed, or on a full disk, an export leaves what was there before, or is whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError, StorageError
from ckptfmt.cli import main
from ckptfmt.foreign.exporters import exporting, staging

KILLED = """
import os, signal, shutil, sys
import ckptfmt
from ckptfmt.foreign.exporters import staging

how, store, target, to = sys.argv[1:]
to = to or None
folder, name = os.path.split(target)

def names():
    return sorted(n for n in os.listdir(folder))

def value():
    return ckptfmt.open_foreign(target)["epoch"]

if how == "aside":
    def refuse(one, other):
        raise OSError(38, "no such call")
    staging.exchange_names = refuse

def child(k):
    left = [k]
    def armed(call):
        def counted(*args, **options):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **options)
        return counted
    for call in ("rename", "replace", "unlink", "link", "rmdir", "mkdir"):
        setattr(os, call, armed(getattr(os, call)))
    staging.exchange_names = armed(staging.exchange_names)
    staging.sync_directory = armed(staging.sync_directory)
    try:
        ckptfmt.export(store, target, target_format=to, at="new", if_exists="replace")
    except BaseException:
        os._exit(3)
    os._exit(0)

k, seen = 0, set()
while True:
    shutil.rmtree(folder, ignore_errors=True)
    ckptfmt.export(store, target, target_format=to, at="old")
    whole = names()
    pid = os.fork()
    if pid == 0:
        child(k)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), (k, status)
    if os.path.lexists(target) or how == "exchange":
        seen.add(value())
        assert value() in (1, 2), k
    else:  # of several files, or a folder where names cannot be swapped, for a moment
        assert how == "aside"
        try:
            ckptfmt.export(store, target, target_format=to, at="new")
            raise AssertionError("the old one is not back")
        except ckptfmt.ExistsError:
            assert value() == 1, k
            seen.add("recovered")
    ckptfmt.export(store, target, target_format=to, at="new", if_exists="replace")
    assert value() == 2
    assert names() == whole, (k, names())
    if status == 0:
        break
    k += 1
print(k, sorted(map(str, seen)))
"""


@pytest.mark.parametrize(
    ("how", "target", "to"),
    [
        ("aside", "m", "safetensors"),
        ("aside", "m.index", ""),
        pytest.param("exchange", "m", "safetensors", marks=pytest.mark.slow),
        pytest.param("exchange", "x.pt", "", marks=pytest.mark.slow),
    ],
)
def test_an_export_that_is_killed_at_any_step_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, how: str, target: str, to: str
) -> None:
    for name, epoch in (("old", 1), ("new", 2)):
        tree = {"w": np.full(3, epoch), "epoch": epoch}
        ckptfmt.save(tree, tmp_path / "s", name=name, durable=False)
    arguments = [how, str(tmp_path / "s"), str(tmp_path / "out" / target), to]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    steps, _, seen = run.stdout.partition(" ")
    assert int(steps) >= 5
    wanted = ["1", "2"] if how == "exchange" else ["1", "2", "recovered"]
    assert seen.strip() == str(wanted)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    call = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(call, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    "name", ["x.pt", "x.safetensors", "st", "x.npz", "x.index", "x.weights.h5", "dcp", "orbax"]
)
def test_a_full_disk_is_said_to_be_and_nothing_is_left(
    tmp_path: Path, full_disk: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    needs = {"x.weights.h5": "h5py", "orbax": "tensorstore"}
    if name in needs:
        pytest.importorskip(needs[name])
    to = {"st": "safetensors", "dcp": "dcp", "orbax": "orbax"}.get(name)
    tree = {"dense": {"kernel": np.random.default_rng(0).random((500, 600))}}
    ckptfmt.save(tree, tmp_path / "s", durable=False)
    with pytest.raises(StorageError, match="no space left") as caught:
        ckptfmt.export(tmp_path / "s", full_disk / name, target_format=to)
    assert caught.value.kind == "storage-no-space"
    assert caught.value.where == str(full_disk / name)
    assert ".ckptfmt" not in str(caught.value)
    assert "ckptfmt gc" not in str(caught.value)
    assert os.listdir(full_disk) == []
    extra = ["--to", to] if to else []
    assert main(["convert", str(tmp_path / "s"), str(full_disk / name), *extra]) == 15
    capfd.readouterr()


def test_damage_of_the_source_is_not_taken_for_a_library_that_fails(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    ckptfmt.save({"w": np.arange(1000)}, tmp_path / "s", durable=False)
    (data,) = (tmp_path / "s/data").iterdir()
    raw = bytearray(data.read_bytes())
    raw[64] ^= 1
    data.chmod(0o644)
    data.write_bytes(raw)
    with pytest.raises(CorruptError, match="chunk digest differs"):
        ckptfmt.export(tmp_path / "s", tmp_path / "o", target_format="orbax")


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x.npz", "x.npy", "x.index"])
def test_what_was_sent_to_the_disk_need_not_come_back_to_be_compared(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"w": np.random.default_rng(0).random((300, 500))}
    ckptfmt.save(tree, tmp_path / "s", durable=False)

    def read(piece: object) -> None:
        raise AssertionError("the file's values were read")

    monkeypatch.setattr(exporting, "digested", read)
    ckptfmt.export(tmp_path / "s", tmp_path / name)
    monkeypatch.undo()
    # Where the importer finds them elsewhere than they were sent to, they are.
    monkeypatch.setattr(staging.Staging, "digest", lambda *args: None)
    ckptfmt.export(tmp_path / "s", tmp_path / f"y{name}")
    monkeypatch.setattr(staging.Staging, "digest", lambda *args: b"another")
    ckptfmt.export(tmp_path / "s", tmp_path / f"z{name}")
