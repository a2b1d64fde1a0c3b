"""The example of the documentation runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckptfmt

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
def test_the_example_saves_on_four_processes_and_resumes_on_two(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/examples/dcp.py"), str(tmp_path / "s")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "4 processes saved step-0000000000000003" in done.stdout
    assert "2 processes went on from step 3" in done.stdout
    assert ckptfmt.Store(tmp_path / "s").steps() == [3]
