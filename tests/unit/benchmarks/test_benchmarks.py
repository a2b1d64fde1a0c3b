"""Each benchmark runs, in its small size, and says what it measured. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PEERS = {
    "bench_many_tensors": {"safetensors": "safetensors"},
}


def run(name: str, tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    for module in PEERS[name].values():
        pytest.importorskip(module)
    out = tmp_path / "out.json"
    script = ROOT / "benchmarks" / f"{name}.py"
    command = [sys.executable, str(script), "--small", "--dir", str(tmp_path), "--json", str(out)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_benchmark_compares_all_peers_in_every_round(name: str, tmp_path: Path) -> None:
    shown, document = run(name, tmp_path)
    assert document["schema"] == 1
    assert {"cpu", "cores", "system", "python", "commit", "command"} <= set(document["machine"])
    rows = document["results"]
    assert {row["peer"] for row in rows} == {"ckptfmt", *PEERS[name]}
    for row in rows:
        assert len(row["seconds"]) == len(row["cpu_s"]) == 2
        assert all(seconds > 0 for seconds in row["seconds"])
        assert ("ratios" in row) == (row["peer"] != "ckptfmt")
    mine = {row["operation"]: row["seconds"] for row in rows if row["peer"] == "ckptfmt"}
    for row in rows:
        if "ratios" in row:
            found = [a / b for a, b in zip(mine[row["operation"]], row["seconds"])]
            assert row["ratios"] == pytest.approx(found)
    # Ratios come before seconds, and nothing is left behind.
    assert shown.index("of the time of") < shown.index("seconds")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
