"""The soak, short: what the long one (`make soak`) looks for in ten minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_three_trainers_lose_nothing_whatever_goes_wrong(tmp_path: Path) -> None:
    script = Path(__file__).with_name("soak.py")
    done = subprocess.run(
        [sys.executable, str(script), "--seconds", "25", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "all held" in done.stdout


@pytest.mark.slow
def test_ranks_that_are_killed_one_by_one_go_on_exactly(tmp_path: Path) -> None:
    script = Path(__file__).with_name("ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), "--kills", "4", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "all held" in done.stdout
