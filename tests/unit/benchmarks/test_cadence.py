"""The simulation behind `when.young_daly`: it measures what it says, and the policy is near the best."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def cadence() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_cadence

        return bench_cadence
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_without_failures_the_stalls_are_all_that_is_wasted(cadence: Any) -> None:
    never = cadence.Scenario(stall_s=1, persist_s=1, mean_s=1e15)
    found = cadence.waste(never, cadence.Trace(never, 0), 1000 * 100.0, lambda _: 100.0)
    assert found == pytest.approx(999 / (1000 * 100), rel=0.05)  # the last stretch needs no save


def test_a_failure_costs_what_is_not_durable(cadence: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(cadence, "NOISE", 0.0)
    monkeypatch.setattr(cadence.Scenario, "gaps", lambda self, rng: iter([115.0, 1e9]))
    job = cadence.Scenario(stall_s=0, persist_s=10, mean_s=1)
    # Saved at 50 and 100, durable at 60 and 110: 15 s are done twice. Durable too late: 65 s.
    assert cadence.waste(job, cadence.Trace(job, 0), 1000.0, lambda _: 50.0) == pytest.approx(0.015)
    late = cadence.Scenario(stall_s=0, persist_s=20, mean_s=1)
    trace = cadence.Trace(late, 0)
    assert cadence.waste(late, trace, 1000.0, lambda _: 50.0) == pytest.approx(0.065)


@pytest.mark.parametrize("number", range(6))
def test_from_failure_to_failure_is_the_same_as_from_save_to_save(
    cadence: Any, number: int
) -> None:
    job = cadence.SCENARIOS[number]
    trace = cadence.Trace(job, 5)
    work_s = 10 * job.mean_s
    for seconds in (job.persist_s * 3.1, job.mean_s / 7.77, job.mean_s * 3.1):
        slow = cadence.waste(job, trace, work_s, lambda _, s=seconds: s)
        assert cadence.waste_of_fixed(job, trace, work_s, seconds) == pytest.approx(slow, rel=1e-9)


def test_young_daly_is_near_the_best_fixed_interval(cadence: Any) -> None:
    for scenario in cadence.SCENARIOS[3:]:  # the first have many times as many saves
        row = cadence.measure(scenario, 24, 13, 60)  # fewer traces, and their luck decides
        assert row["over_best"] <= 0.05, row
        often, seldom = row["fixed"][0][1], row["fixed"][-1][1]
        assert row["young_daly"] < min(often, seldom) * 0.8  # or any interval would have done


def test_the_benchmark_prints_and_draws(tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    script = [sys.executable, str(BENCHMARKS / "bench_cadence.py"), "--small"]
    done = subprocess.run(
        [*script, "--json", str(out), "--plot", str(picture)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("told half") == len(json.loads(out.read_text())["results"]) == 6
    drawn = ElementTree.parse(picture).getroot()
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}polyline")) == 6
