"""Names under tmp/ say who writes; dead is only what is known to be."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from ckptfmt.storage import Process, is_abandoned_temporary
from ckptfmt.storage.process import temporary_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="facts of /proc")


def test_a_name_of_this_process_is_not_abandoned_and_never_the_same_twice() -> None:
    names = {temporary_name("put") for _ in range(10)}
    assert len(names) == 10
    assert not any(is_abandoned_temporary(f"tmp/{name}") for name in names)


def test_a_fork_has_a_name_of_its_own_and_leaves_litter_when_it_ends() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, f"{temporary_name('put')} {temporary_name('probe')}".encode())
        os._exit(0)
    names = os.read(reader, 1000).decode().split()
    os.waitpid(pid, 0)
    assert all(f"-{pid}-" in name for name in names)
    assert all(is_abandoned_temporary(f"tmp/{name}") for name in names)
    assert is_abandoned_temporary(f"tmp/{names[1]}-a")


def test_what_is_not_known_to_be_dead_is_not() -> None:
    here = Process.here()
    assert here.boot_id is not None
    dead = replace(here, pid=2**22 + 12345, start_time=1)
    assert dead.has_ended()
    reused = replace(here, start_time=1)
    assert reused.has_ended()
    for field in ("host", "boot_id", "pid_namespace", "pid", "start_time"):
        assert not replace(dead, **{field: None}).has_ended()
    boot, namespace = here.boot_id.replace("-", ""), (here.pid_namespace or "")[5:-1]
    good = f"tmp/put-{boot}-{namespace}-{2**22 + 12345}-1-{'0' * 16}"
    assert is_abandoned_temporary(good)
    for key in (
        good.replace(boot, "0" * 32),  # another machine, or before it was started again
        good.replace(namespace, "1"),  # another container
        good.replace("put", "pit"),
        good.removeprefix("tmp/"),
        f"tmp/put-{'0' * 32}",
    ):
        assert not is_abandoned_temporary(key)
