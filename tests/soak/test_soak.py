"""The soak, short: what the long one (`make soak`) looks for in ten minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"), [("soak.py", ["--seconds", "25"]), ("ranks.py", ["--kills", "4"])]
)
def test_nothing_is_lost_whatever_goes_wrong(
    tmp_path: Path, script: str, arguments: list[str]
) -> None:
    """Three trainers on one store; three ranks of one job, killed one by one."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments, "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "all held" in done.stdout
