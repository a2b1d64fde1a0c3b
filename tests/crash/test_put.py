"""A process is killed inside a put of the local backend: the next save removes what it had begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Store
from ckptfmt.types import Key

CHILD = textwrap.dedent(
    """
    import os, signal, sys
    import numpy as np
    import ckptfmt
    from ckptfmt.storage import exclusive, local, syscalls

    path, moment, left = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def killing(call, half=None):
        def do(*args):
            global left
            left -= 1
            if left < 0:
                if half:
                    half(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args)
        return do

    def write_half(fd, view, offset):
        write(fd, view[: view.nbytes // 2], offset)

    write = syscalls.pwrite_all
    if moment == "write":
        syscalls.pwrite_all = killing(write, write_half)
    elif moment == "sync":
        syscalls.sync_fd = killing(syscalls.sync_fd)
    elif moment == "place":
        exclusive.place = killing(exclusive.place)
    elif moment == "placed":
        exclusive.place = killing(exclusive.place, exclusive.place)
    elif moment == "rename":
        local.os.replace = killing(os.replace)
    ckptfmt.save({"w": np.full(5000, 2.0)}, path, step=2)
    """
)


def below(path: Path) -> list[str]:
    return [f.name for f in (path / "tmp").rglob("*") if f.is_file()]


@pytest.mark.skipif(sys.platform != "linux", reason="the owner of a file is known on Linux")
@pytest.mark.parametrize("moment", ["write", "sync", "place", "placed", "rename"])
def test_what_a_killed_put_had_begun_goes_with_the_next_save(tmp_path: Path, moment: str) -> None:
    """Case 20, at each call that a put makes, also those of a save's first and last objects."""
    seen = 0
    for at in range(20):
        path = tmp_path / str(at)
        ckptfmt.save({"w": np.full(5000, 1.0)}, path, step=1)
        child = [sys.executable, "-c", CHILD, str(path), moment, str(at)]
        done = subprocess.run(child, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        seen += any(name.startswith("put-") for name in below(path))
        ckptfmt.save({"w": np.full(5000, 3.0)}, path, step=3)
        assert below(path) == []
        assert list(Store(path).backend.list("parts/")) == []
        assert ckptfmt.load(path)["w"][0] == 3.0
        assert Store(path).verify().ok
    assert done.returncode == 0, "not all of a save was cut short"
    assert seen, "no kill hit a put"


def test_what_a_living_process_is_putting_stays(tmp_path: Path) -> None:
    ckptfmt.save({"w": np.zeros(3)}, tmp_path, step=1)
    ready, release = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            writer = Store(tmp_path).backend.create(Key("notes/x"))
            os.write(ready[1], b"!")
            os.read(release[0], 1)
            writer.finish(durable=False)
        finally:
            os._exit(0)
    os.read(ready[0], 1)
    (begun,) = below(tmp_path)
    ckptfmt.save({"w": np.ones(3)}, tmp_path, step=2)
    assert below(tmp_path) == [begun]
    os.write(release[1], b"!")
    os.waitpid(pid, 0)
    assert (tmp_path / "notes/x").exists()
    assert below(tmp_path) == []
