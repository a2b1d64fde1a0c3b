"""The plain loop of docs/examples: killed in the middle of a save, it goes on exactly."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptfmt import Store

pytest.importorskip("torchdata")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's own use of torch
]
EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/pytorch_loop.py"


@pytest.mark.parametrize(
    "kills", [[4], pytest.param(range(1, 9), marks=pytest.mark.slow)], ids=["one", "each"]
)
def test_a_loop_killed_in_the_middle_of_a_save_goes_on_exactly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kills: list[int],
) -> None:
    def here(store: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--store", str(store)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        output = capsys.readouterr().out
        found = re.search(r"starts at step (\d+)\nweights after 60 steps: (\w+)", output)
        assert found is not None, output
        return int(found[1]), found[2]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        begun, straight = here(tmp_path / "straight")
        assert begun == 0
        assert Store(tmp_path / "straight").steps() == [49, 56]
        for kill in kills:
            store = tmp_path / f"killed {kill}"
            killed(store, kill)
            begun, weights = here(store)
            assert begun == 7 * (kill - 1)
            assert weights == straight, kill
    finally:
        torch.set_num_threads(threads)


def killed(store: Path, kill: int) -> None:
    """Run the example until its `kill`-th commit: all is written then but the index."""
    program = f"""
import os, runpy, signal, sys
begun = set()
def audit(event, arguments):
    if event == "os.link" and "checkpoints" in str(arguments[1]):
        begun.add(arguments[1])
        if len(begun) == {kill}:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
sys.argv = [{str(EXAMPLE)!r}, "--store", {str(store)!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as here
    died = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert died.returncode == -9, died.stderr
