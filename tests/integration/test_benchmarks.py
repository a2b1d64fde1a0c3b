"""The benchmarks run in their small size, and their JSON says what was asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# question -> operations of ours, and numbers besides the seconds
WANTED: dict[str, tuple[set[str], set[str]]] = {
    "save": ({"save"}, set()),
    "load": (
        {"cold load", "cold map", "warm load", "warm map", "warm map unchecked"},
        set(),
    ),
    "stall": (
        {"first stall", "stall", "durable", "matmul", "python"},
        {"speed", "durable_s", "of_durable", "cpu_speed", "runqueue", "blocked"},
    ),
    "incremental": (
        {"full save", "unchanged save", "rows save"},
        {"written_nbytes", "scanned_gb_s", "of_full_save"},
    ),
    "open": ({"open 200", "open 1000"}, set()),
    "memory": (
        {"save", "cold restore", "cold restore checked", "cold restore spare"},
        {"peak_nbytes"},
    ),
    "start": (
        {"--help", "--version", "ls", "show", "cat", "diff", "verify", "tag", "rm"},
        {"over_numpy_s", "over_numpy_cpu_s"},
    ),
    "bundle": ({"list", "list objects", "warm read", "convert", "save"}, set()),
    "convert": (
        {
            "save",
            "convert pt",
            "convert bundle",
            "convert transposed",
            "cold convert pt",
            "cold convert bundle",
            "cold copy",
            "export pt",
            "export bundle",
            "cold export pt",
            "cold export bundle",
        },
        {"of_save_rate"},
    ),
    "dcp": ({"first stall", "stall", "save", "small save"}, {"nbytes"}),
    "tensorflow": (
        {"save", "cold restore", "cold restore 2 passes", "cold restore one pass"},
        {"peak_nbytes"},
    ),
    "hostile": (
        {
            *("pt", "pt pickle", "pt legacy", "pt tar", "pt folder", "torchscript", "dcp"),
            *("bundle", "saved model", "keras", "weights.h5", "h5", "gguf", "flax"),
            *("safetensors", "safetensors folder", "npy", "npz", "npz deflated"),
            *("orbax", "orbax zarr", "dense pickle", "dense safetensors", "dense npz"),
        },
        {"files", "refused", "slowest_cpu_s", "peak_nbytes"},
    ),
    "part": ({"cold part"}, {"asked_nbytes", "disk_nbytes"}),
}


def run(question: str, folder: Path, size: str = "--small") -> dict[str, Any]:
    script = BENCHMARKS / f"bench_{question}.py"
    peers = "safetensors,np.savez,limit"  # those that are imported fast
    command = [sys.executable, str(script), size, "--json", "-", "--dir", str(folder)]
    done = subprocess.run(
        [*command, "--peers", peers],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=dict(os.environ, PYTHONWARNINGS="default"),
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("question", WANTED)
def test_a_small_benchmark_answers_its_question(question: str, tmp_path: Path) -> None:
    document = run(question, tmp_path)
    operations, numbers = WANTED[question]
    ours = {row["operation"]: row for row in document["results"] if row["peer"] == "ckptfmt"}
    assert set(ours) == operations
    for row in document["results"]:
        assert all(seconds > 0 for seconds in row["seconds"])
        assert len(row["cpu_s"]) == len(row["seconds"]) == 1
    assert {key for row in ours.values() for key in row.get("numbers", {})} == numbers
    assert {"commit", "cpu", "cores", "command"} <= set(document["machine"])


@pytest.mark.slow
def test_two_hundred_hostile_files_of_each_kind_take_little_memory(tmp_path: Path) -> None:
    """Each is a tree or a typed error, and no process dies: else the benchmark ends early."""
    rows = run("hostile", tmp_path, "--count=200")["results"]
    assert {row["operation"] for row in rows} == WANTED["hostile"][0]
    for row in rows:
        (files,), (refused,), (peak,) = (
            row["numbers"][key] for key in ("files", "refused", "peak_nbytes")
        )
        assert peak < 200 << 20, row["operation"]
        assert files >= (1 if row["operation"].startswith("dense") else 200)
        assert refused > files // 5 or files == 1, row["operation"]


def test_a_small_change_writes_little(tmp_path: Path) -> None:
    rows = {
        row["operation"]: row["numbers"]["written_nbytes"][0]
        for row in run("incremental", tmp_path)["results"]
        if row["peer"] == "ckptfmt"
    }
    assert rows["unchanged save"] < 64 << 10
    assert rows["unchanged save"] < rows["rows save"] < rows["full save"] / 2


def test_every_benchmark_is_looked_at() -> None:
    found = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    # The others have tests of their own in tests/unit/benchmarks.
    assert found - {"many_tensors", "cadence"} == set(WANTED)
